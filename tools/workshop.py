"""What tools/demo and tools/test share: the cache folder, its locks, and commands that show how far they are.

Nothing beyond the standard library is imported by these tools: they run before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
QUIET_TICK_S = 20.0  # between progress lines where no terminal shows them
GRACE_S = 10.0  # a command that is told to stop is killed after this
MADE = ("environments", "wheels", "downloads", "logs", "pair-*")  # folders in the cache folder
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Environments, wheels and models made by PipeSD's tools/demo and tools/test; tools/demo --clean removes them.\n"
)

Command = Sequence[str | os.PathLike[str]]


class Failure(Exception):
    """One line for the user: what failed, why, what to do."""


def cache_folder() -> Path:
    """PIPESD_CACHE, else the user's cache folder; it need not exist yet."""
    if chosen := os.environ.get("PIPESD_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pipesd"


def make_cache_folder() -> Path:
    """The cache folder, made and marked as ours (the mark also tells backup programs to skip it)."""
    cache = cache_folder()
    if not is_ours(cache) and (others := made_in(cache)):
        raise Failure(f"{others[0]} is there already and was not made by these tools; set PIPESD_CACHE to a new folder")
    try:
        (cache / "logs").mkdir(parents=True, exist_ok=True)
        (cache / _TAG).write_text(_TAG_TEXT)
    except OSError as error:
        raise Failure(f"the cache folder {cache} cannot be written ({error.strerror}); set PIPESD_CACHE") from error
    return cache


def is_ours(cache: Path) -> bool:
    tag = cache / _TAG
    return tag.is_file() and tag.read_text(errors="replace") == _TAG_TEXT


def made_in(cache: Path) -> list[Path]:
    """The folders in the cache folder that bear the names of those made by these tools."""
    return sorted(path for pattern in MADE for path in cache.glob(pattern) if path.is_dir())


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know with one line and exit code 2."""

    def __init__(self, tool: str, description: str, usage: str | None = None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(tool, description=description, usage=usage, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def say(line: str = "") -> None:
    print(line, file=sys.stderr, flush=True)


def seconds(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s < 90 else f"{duration_s // 60:.0f} min {duration_s % 60:02.0f} s"


@contextmanager
def lock(cache: Path, name: str, *, shared: bool = False, wait: str | None = None) -> Iterator[None]:
    """Holds the lock `name` of the cache. `wait` is said when another process has it; None: a Failure instead."""
    with (cache / f"{name}.lock").open("a") as file:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise Failure(f"another run of PipeSD's tools uses {cache}; try again when it has ended") from None
            say(wait)
            fcntl.flock(file, kind)
        yield


def stop_on_terminate() -> None:
    """SIGTERM ends the tool by an exception, so that what it started is stopped too."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def clean_environment(**more: str) -> dict[str, str]:
    """The caller's variables (pip's own among them) with this checkout first on Python's path."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1", **more}


class Ticker:
    """One line that says how far a command is: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._start_s = self._shown_s = time.monotonic()
        self._live = sys.stderr.isatty()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def show(self, status: str) -> None:
        if self._live:
            width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
            print(f"\r\033[K{f'  {self.label}: {seconds(self.elapsed_s)} {status}'[:width]}", end="", file=sys.stderr)
            sys.stderr.flush()
        elif time.monotonic() - self._shown_s >= QUIET_TICK_S:
            self._shown_s = time.monotonic()
            say(f"  {self.label}: {seconds(self.elapsed_s)} {status}")

    def end(self, line: str) -> None:
        clear = "\r\033[K" if self._live else ""
        say(f"{clear}  {self.label}: {line}")


def run(
    command: Command,
    log: Path,
    label: str,
    *,
    environment: Mapping[str, str] | None = None,
    status: Callable[[str], str | None] | None = None,
    reason: Callable[[str], str] | None = None,
) -> None:
    """Runs a command with its output in `log`. `status` turns a line of it into progress, `reason` a log into one line.

    Raises Failure, with the reason and the path of the log, unless the command ends well.
    """
    ticker, shown, pending = Ticker(label), "", ""

    def on_output(data: bytes) -> None:
        nonlocal shown, pending
        *lines, pending = (pending + data.decode("utf-8", "replace")).replace("\r", "\n").split("\n")
        for line in lines:
            shown = (status and status(line)) or shown

    code = follow(command, log, on_output, lambda: ticker.show(shown), environment=environment)
    if code != 0:
        why = reason(log.read_text(errors="replace")) if reason else last_line(log)
        ticker.end("failed")
        raise Failure(f"{label} failed ({why or f'exit code {code}'}); all of its output: {log}")
    ticker.end(f"done in {seconds(ticker.elapsed_s)}")


def follow(
    command: Command,
    log: Path,
    on_output: Callable[[bytes], None],
    on_tick: Callable[[], None],
    *,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a command in this checkout, gives its output to `log` and `on_output` as it comes; returns the exit code.

    `on_tick` is called once a second at least. Whatever ends this function ends the command and its children too.
    """
    words = [str(word) for word in command]
    with log.open("wb") as file, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment or clean_environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        try:
            while True:
                if selector.select(timeout=1.0):
                    data = os.read(process.stdout.fileno(), 1 << 16)
                    if not data:
                        return process.wait()
                    file.write(data)
                    file.flush()
                    on_output(data)
                elif process.poll() is not None:  # a child that it left behind keeps the pipe open
                    return process.returncode
                on_tick()
        finally:
            stop(process)
            process.stdout.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads its own group, and what it left in the group: asked first, killed after GRACE_S."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
