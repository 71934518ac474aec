"""Both programs without a model: help, versions, wrong use, configuration files, streams that are not as usual."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipesd import __version__
from pipesd.metrics import Meter, Tally, summary
from tests.clouds import NOWHERE
from tests.programs import MAIN, ROOT, Program, Ran, cloud, edge, run

COMMANDS = [
    ("edge", ""),
    ("edge", "generate"),
    ("edge", "chat"),
    ("edge", "link"),
    ("edge", "plan"),
    ("edge", "tune"),
    ("edge", "pair"),
    ("edge", "advise"),
    ("cloud", ""),
    ("cloud", "serve"),
]
KEYS = ["text", "token_ids", "finish_reason", "strategy", "seed", "stats"]
STATS = set(
    "tokens tpt_ms ttft_ms rounds navs drafted verified accepted acceptance_rate acceptance_per_token "
    "acceptance_by_position promoted discarded stale bytes_up bytes_down target_passes cloud_s draft_s wait_s alpha_ms "
    "beta_ms gap_ms gamma_ms rtt_ms".split()
)
HEAVY = {"numba", "scipy", "torch", "llama_cpp", "transformers", "gguf", "jinja2"}
EMOJI = "über 😀"


def one_object(ran: Ran) -> dict[str, Any]:
    """The only thing on stdout."""
    assert ran.out.endswith("\n") and ran.out.count("\n") == 1, ran.out
    result = json.loads(ran.out)
    assert [key for key in result if key != "logprobs"] == KEYS and set(result["stats"]) >= STATS
    return dict(result)


# ---- help and versions


@pytest.mark.parametrize(("side", "command"), COMMANDS)
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_everywhere(side: str, command: str, option: str) -> None:
    ran = run(side, *command.split(), option)
    assert (ran.code, ran.err) == (0, "")
    if option == "--version":
        assert ran.out == f"pipesd-{side} {__version__}\n"
    else:
        assert ran.out.startswith(f"usage: pipesd-{side} {command}".rstrip())
        assert "None" not in ran.out and "==" not in ran.out, "a help text shows what is not for people"


def test_every_option_has_a_help_text() -> None:
    for side, command in COMMANDS:
        shown = run(side, *command.split(), "--help").out.partition("options:")[2]
        for described in re.split(r"\n(?=  -)", shown.strip("\n")):
            assert len(described.split()) > 2, f"{side} {command}: {described}"


@pytest.mark.parametrize(("side", "command"), [COMMANDS[1], COMMANDS[-1]])
def test_help_comes_at_once_and_loads_nothing_heavy(side: str, command: str) -> None:
    def least_s(program: str) -> float:
        """Time on the processor, which other programs do not lengthen much, beside what it waits for: nothing."""
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    argv = [*command.split(), "--help"]
    assert least_s(f"import sys; sys.argv[1:] = {argv}; " + MAIN.format(side)) - least_s("pass") <= 0.25
    listing = f"import sys; from pipesd.{side}.cli import main; main({argv}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pipesd" in loaded and not loaded & (HEAVY | {"numpy", "zmq"})


# ---- what is not delivered


@pytest.mark.parametrize("rest", [[], ["--help"], ["--cloud", NOWHERE, "--json"], ["new", "--name", "x"]])
@pytest.mark.parametrize("command", ["serve", "doctor", "keys"])
def test_what_is_not_delivered_says_so_whatever_follows(command: str, rest: list[str]) -> None:
    side = "cloud" if command == "keys" else "edge"
    ran = run(side, command, *rest)
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaint == f"pipesd-{side}: '{command}' is not part of this version"


@pytest.mark.parametrize("name", ["flow"])
def test_strategies_to_come_are_told_from_unknown_ones(name: str) -> None:
    ran = edge("generate", "--draft", "x", "--prompt", "x", "--strategy", name)
    assert ran.code == 2
    assert ran.complaint == (
        f"pipesd-edge: strategy '{name}' is not part of this version: choose one of "
        "auto, pipesd, vanilla, hsl, edgellm, cloud, local"
    )
    ran = edge("generate", "--draft", "x", "--prompt", "x", "--strategy", f"{name}x")
    assert ran.code == 2
    assert ran.complaint == (
        f"pipesd-edge: unknown strategy '{name}x': choose one of auto, pipesd, vanilla, hsl, edgellm, cloud, local"
    )


# ---- wrong use

GENERATE = ["generate", "--draft", "x", "--prompt", "x"]
WRONG: list[tuple[str, Sequence[str], str]] = [
    ("edge", [], "no command given"),
    ("edge", ["what"], "invalid choice: 'what'"),
    ("cloud", [], "no command given"),
    ("cloud", ["serve"], "no model: give --model PATH, a GGUF file or a Hugging Face folder"),
    ("cloud", ["serve", "--model"], "--model: expected one argument"),
    ("cloud", ["serve", "x.gguf"], "an argument belongs to no option; the model is given with --model PATH"),
    ("cloud", ["serve", "--model", "x", "--keys", "k"], "--keys: keys are not part of this version"),
    ("cloud", ["serve", "--model", "x", "--workers", "0"], "workers: got 0, wanted 1 to 64"),
    ("cloud", ["serve", "--model", "x", "--threads", "many"], "--threads: invalid int value: 'many'"),
    ("edge", ["generate", "--prompt", "x"], "no draft model: give --draft FILE.gguf"),
    (
        "edge",
        [*GENERATE, "--file", "y"],
        "--file: not allowed with argument --prompt",
    ),
    ("edge", [*GENERATE, "--max-token", "3"], "unknown option --max-token, did you"),
    ("edge", ["generate", "--draft", "x", "--prompt", "-x"], "--prompt: expected one argument; one that begins with -"),
    ("edge", [*GENERATE, "--max-tokens", "0"], "max-tokens: got 0, wanted 1 to"),
    (
        "edge",
        [*GENERATE, "--patience-s", "-1"],
        "patience-s: got -1.0, wanted 0.5 to",
    ),
    (
        "edge",
        [*GENERATE, "--seed", "-1"],
        "seed: got -1, wanted 0 to 184467440737095",
    ),
    ("edge", [*GENERATE, "--stop", ""], "a stop text is empty"),
    ("edge", [*GENERATE, "--system", "s"], "--system goes with --chat"),
    ("edge", ["generate", "--draft", "x", "--file", "nowhere.txt"], "prompt file nowhere.txt: No such file"),
    (
        "edge",
        ["generate", "--draft", "x", "--file", "~nobody-of-that-name/p"],
        "prompt file ~nobody-of-that-name/p: No",
    ),
    (
        "edge",
        [*GENERATE, "--config", "no.toml"],
        "configuration file no.toml: No such",
    ),
    ("edge", [*GENERATE, "--config", "~nobody-of-that-name/c"], "No such file"),
    (
        "edge",
        [*GENERATE, "--events", "/no/folder"],
        "event file '/no/folder': No such",
    ),
    ("edge", [*GENERATE, "--events", "~nobody-of-that-name/e"], "No such file"),
    ("edge", ["generate", "--draft", "~nobody-of-that-name/d", "--prompt", "x"], "~nobody-of-that-name/d"),
    ("edge", [*GENERATE, "--cloud", "::1"], "an IPv6 address stands in brackets"),
    ("edge", [*GENERATE, "--cloud", "http://h:1"], "http:// is not spoken here"),
    ("edge", ["chat"], "no draft model: give --draft FILE.gguf"),
    ("edge", ["pair", "--target", "x"], "no draft model: give --draft FILE.gguf"),
    ("edge", ["pair", "--draft", "x"], "no target model: give --target PATH"),
    ("edge", ["pair", "--draft", "x", "--target", "y", "--tokens", "0"], "tokens: got 0, wanted 1 to 4096"),
    ("edge", ["chat", "--draft", "x", "--json"], "unknown option --json"),
    ("edge", [*GENERATE, "--temp", "0.8"], "unknown option --temp, did you mean --temperature?"),
]


@pytest.mark.parametrize(("side", "arguments", "said"), WRONG, ids=[" ".join([w[0], *w[1]])[:60] for w in WRONG])
def test_wrong_use_is_one_line_and_exit_code_2(side: str, arguments: list[str], said: str) -> None:
    ran = run(side, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.complaint and ran.complaint.startswith(f"pipesd-{side}: ")


@pytest.mark.parametrize("arguments", [w[1] for w in WRONG if w[1][:1] == ["generate"]][::4])
def test_wrong_use_with_json_is_one_object_too(arguments: list[str]) -> None:
    ran = edge(*arguments, "--json")
    result = one_object(ran)
    assert (ran.code, result["finish_reason"], result["text"], result["token_ids"]) == (2, "error", "", [])
    assert result["stats"] == summary(Tally(), Meter(0.0))
    assert ran.complaint


def test_sampling_is_refused_by_name_before_anything_is_loaded() -> None:
    for option in ("--draft", "--config"):
        assert edge("generate", option, "/no/such", "--prompt", "x").code == 2
    common = ["generate", "--draft", "/no/such.gguf", "--cloud", NOWHERE, "--prompt", "x"]
    ran = edge(*common, "--temperature", "-0.7")
    assert ran.code == 2 and "temperature: got -0.7, wanted 0 to 100" in ran.complaint


def test_a_prompt_without_its_option_is_not_repeated() -> None:
    for words in (["my secret"], ["my", "secret"], ["-my secret"], ["--prompt", "x", "a\nsecret"]):
        ran = edge("generate", *words)
        assert ran.code == 2 and "secret" not in ran.err
        assert "--prompt TEXT" in ran.complaint


@pytest.mark.parametrize("side", ["edge", "cloud"])
def test_debug_shows_where_an_error_came_from(side: str) -> None:
    ran = run(side, "serve" if side == "cloud" else "chat", "--debug", debug=True)
    assert ran.code == 2
    first, _, rest = ran.err.partition("\n")
    assert first.startswith(f"pipesd-{side}: no ") and rest.startswith("Traceback") and "cli.py" in rest


# ---- prompts


def test_no_prompt_at_a_terminal() -> None:
    terminal, other_end = os.openpty()
    try:
        with Program("edge", "generate", "--draft", "x", stdin=other_end) as program:
            ran = program.end()
    finally:
        os.close(terminal)
        os.close(other_end)
    assert ran.code == 2 and "no prompt: give --prompt TEXT or --file FILE, or pipe it in" in ran.complaint


@pytest.mark.parametrize("source", ["stdin", "file", "argument", "system", "stop"])
def test_text_that_is_not_utf_8(source: str, tmp_path: Path) -> None:
    bad = b"caf\xe9"
    file = tmp_path / "prompt"
    file.write_bytes(bad)
    given = {
        "stdin": [],
        "file": ["--file", str(file)],
        "argument": ["--prompt", os.fsdecode(bad)],
        "system": ["--prompt", "x", "--chat", "--system", os.fsdecode(bad)],
        "stop": ["--prompt", "x", "--stop", os.fsdecode(bad)],
    }
    ran = edge("generate", "--draft", "x", *given[source], stdin=bad)
    assert ran.code == 2 and "not UTF-8" in ran.complaint


# ---- configuration files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[edge]\nstrateg = 'cloud'", "unknown option 'strateg': did you mean 'strategy'?"),
        ("[edges]\nstrategy = 'cloud'", "unknown table or key 'edges' in"),
        ("strategy = 'cloud'", "unknown table or key 'strategy' in"),
        ("edge = 3", "'edge' in"),
        ("[edge", "not TOML"),
        ("[edge]\nthreads = '2'", "threads: got '2', wanted a whole number"),
        ("[generate]\nstop = 'x'", "stop: got 'x', wanted a list of texts"),
        ('[edge]\nevents = "a\\u0000b"', "event file"),
        ('[edge]\ndraft = "a\\u0000b"', "embedded null"),
        (b"\xff\xfe", "not TOML"),
        (b"\xef\xbb\xbf[edge]\nthreads = 1000", "threads: got 1000, wanted 0 to 512"),
    ],
)
def test_configuration_files_that_are_wrong(content: str | bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = edge("generate", "--draft", "/no/such.gguf", "--prompt", "x", "--config", file)
    if b"draft" in file.read_bytes():
        ran = edge("generate", "--prompt", "x", "--config", file)
    assert ran.code == 2 and said in ran.complaint


def test_a_flag_wins_over_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text("[edge]\nstrategy = 'nonsense'\ndraft = '/no/such.gguf'\n[cloud]\n")
    assert "unknown table or key 'cloud'" in edge("generate", "--config", file, "--prompt", "x").complaint
    file.write_text("[edge]\nstrategy = 'nonsense'\ndraft = '/no/such.gguf'\n")
    assert "strategy 'nonsense'" in edge("generate", "--config", file, "--prompt", "x").complaint
    ran = edge("generate", "--config", file, "--prompt", "x", "--strategy", "cloud", "--cloud", NOWHERE)
    assert ran.code == 2 and "/no/such.gguf: no such file" in ran.complaint
    file.write_text("[cloud]\nworkers = 0\nbind = 'udp://x'\n")
    assert "workers: got 0" in cloud("serve", "--model", "x", "--config", file).complaint
    assert "udp:// is not spoken" in cloud("serve", "--model", "x", "--config", file, "--workers", 1).complaint


# ---- streams


@pytest.mark.parametrize("side", ["edge", "cloud"])
@pytest.mark.parametrize(
    ("streams", "code"), [("| true", 0), (">&-", 0), ("2>&-", 0), ("<&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 2)]
)
def test_help_into_anything(side: str, streams: str, code: int) -> None:
    ran = run(side, "--help", shell=streams)
    assert ran.code == code
    assert ("cannot be written" in ran.complaint) if code else (ran.err == "")


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_be_told_of(streams: str) -> None:
    ran = edge("generate", "--json", "--prompt", "x", shell=streams)
    assert ran.code == 2 and ran.err == ""
    assert one_object(ran)["finish_reason"] == "error", "what is meant for stderr goes to stdout"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "C"},
    ],
    ids=lambda settings: ",".join(settings.values()),
)
def test_errors_under_narrow_encodings(environment: dict[str, str]) -> None:
    ran = edge("generate", "--draft", f"/no/{EMOJI}.gguf", "--prompt", EMOJI, "--cloud", NOWHERE, **environment)
    assert ran.code == 2
    assert "no such file" in ran.complaint and "/no/" in ran.complaint


def test_a_message_cannot_steer_the_terminal() -> None:
    ran = edge("generate", "--draft", "/no/\x1b[31mred\x07\nline.gguf", "--prompt", "x", "--cloud", NOWHERE)
    assert ran.code == 2 and ran.complaint.isprintable()


def test_what_the_machine_refuses_is_one_line() -> None:
    """A limit of open files that leaves no room for a file."""
    before = "import resource, pipesd.edge.output; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4)); "
    ran = edge("generate", "--draft", "x", "--json", before=before)
    assert ran.code == 1 and one_object(ran)["finish_reason"] == "error"
    assert ran.complaint == "pipesd-edge: this machine refuses: [Errno 24] Too many open files"
