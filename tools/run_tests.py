"""tools/test: style, types, all tests, on a fresh machine too."""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision import Provision, provisioned
from workshop import (
    ROOT,
    Command,
    Failure,
    Parser,
    cache_folder,
    clean_environment,
    follow,
    say,
    seconds,
    stop_on_terminate,
)

TOOL = "tools/test"
# A single test that takes longer is stopped and failed.
DEFAULT_LIMIT_S = 120
MODEL_LIMIT_S = 600
NO_TESTS = 5  # pytest's exit code
EVERY_EXTRA = ("edge", "cloud", "transformers", "test", "bench", "dev")

DESCRIPTION = f"""\
Makes an environment, then checks style (ruff), types (mypy), the default tests, and the tests that take long or need
the real model pair, which is built first. Says what it will fetch and build before it does; a second run fetches
nothing. Everything made is kept in {cache_folder()} (PIPESD_CACHE chooses another folder).

The rest of the command line goes to pytest: tools/test tests/test_wire.py -k golden
"""


@dataclass
class Summary:
    """What each stage came to."""

    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, stage: str, ok: bool, took_s: float, note: str) -> None:
        self.lines.append(f"  {stage:<14} {'ok' if ok else 'FAILED':<7} {seconds(took_s):>12}  {note}".rstrip())
        if not ok:
            self.failed.append(stage)


def main() -> int:
    """Exit code: 0 when all is well, 1 when a check failed, 2 when the environment cannot be made."""
    parser = Parser(TOOL, DESCRIPTION, usage="%(prog)s [--quick] [pytest's arguments]")
    parser.add_argument(
        "--quick", "--default", action="store_true",
        help="without llama-cpp-python, the model pair and the tests that need them or take long",
    )  # fmt: skip
    options, pytest_arguments = parser.parse_known_args()
    stop_on_terminate()
    start_s, summary = time.monotonic(), Summary()
    try:
        with provisioned(TOOL, EVERY_EXTRA, llama=not options.quick, pair=not options.quick) as provision:
            summary.add("environment", True, time.monotonic() - start_s, str(provision.environment.folder))
            check(provision, summary, options.quick, pytest_arguments)
    except (Failure, OSError) as error:
        say(f"{TOOL}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"\n{TOOL}: interrupted")
        return 130
    return report(summary, time.monotonic() - start_s, some_wanted=not pytest_arguments)


def check(provision: Provision, summary: Summary, quick: bool, pytest_arguments: Sequence[str]) -> None:
    """Runs every stage, whatever became of the ones before."""
    python = provision.environment.python
    if not pytest_arguments:
        stage(provision, summary, "style", [[python, "-m", "ruff", "check", "."]])
        scripts = [sorted((ROOT / name).glob("*.py")) for name in ("bench", "tools")]
        commands: list[Command] = [[python, "-m", "mypy", *paths] for paths in ([ROOT / "pipesd"], *scripts) if paths]
        stage(provision, summary, "types", commands)
    tests(provision, summary, "default tests", "not model and not slow", DEFAULT_LIMIT_S, pytest_arguments)
    if not quick:
        tests(provision, summary, "model tests", "model or slow", MODEL_LIMIT_S, pytest_arguments)


def stage(provision: Provision, summary: Summary, name: str, commands: Sequence[Command]) -> None:
    """Runs the commands of one stage, as far as they end well, and notes how it went."""
    start_s, log = begin(provision, name)
    code = next((code for command in commands if (code := follow(command, log, show, lambda: None))), 0)
    summary.add(name, code == 0, time.monotonic() - start_s, ended(code, log))


def tests(
    provision: Provision, summary: Summary, name: str, marks: str, limit_s: int, arguments: Sequence[str]
) -> None:
    """Runs the tests with these marks; only a choice of tests on the command line may leave none."""
    start_s, log = begin(provision, name)
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command: list[str | Path] = [provision.environment.python, "-m", "pytest", "-m", marks, f"--timeout={limit_s}"]
    command += [f"--junit-xml={junit}", f"--color={'yes' if sys.stdout.isatty() else 'auto'}", *arguments]
    variables = clean_environment(PIPESD_DEMO_DIR=str(provision.pair), PIPESD_REQUIRE_MODEL="1")
    code = follow(command, log, show, lambda: None, environment=variables)
    summary.counts.update(counted(junit))
    ok = code == 0 or (code == NO_TESTS and bool(arguments))
    summary.add(name, ok, time.monotonic() - start_s, ended(code, log))


def begin(provision: Provision, name: str) -> tuple[float, Path]:
    """When a stage starts, and its log."""
    say(f"{TOOL}: {name}")
    return time.monotonic(), provision.cache / "logs" / f"test-{name.replace(' ', '-')}.log"


def ended(code: int, log: Path) -> str:
    return "" if code == 0 else f"exit code {code}; all of its output: {log}"


def show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def counted(junit: Path) -> Counter[str]:
    """Tests passed, failed and skipped as pytest wrote them down; nothing if it did not get that far."""
    counts: Counter[str] = Counter()
    if junit.is_file():
        for suite in ElementTree.parse(junit).iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            counts += Counter(failed=failed, skipped=skipped, passed=int(suite.get("tests", 0)) - failed - skipped)
    return counts


def report(summary: Summary, took_s: float, some_wanted: bool) -> int:
    say()
    for line in summary.lines:
        say(line)
    counts = summary.counts
    if not summary.failed and not counts.total():
        summary.failed.append("no test was run" if some_wanted else "no test fits these arguments")
    outcome = f"failed: {', '.join(summary.failed)}" if summary.failed else "all is well"
    say(f"{TOOL}: {outcome}, after {seconds(took_s)}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
