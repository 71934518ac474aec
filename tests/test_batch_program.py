"""`generate --file … --out …` as its users run it: a result a line, and whatever ends a run, the next one goes on."""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipesd.cloud import front
from pipesd.cloud.admission import error_to, open_refusal
from pipesd.core import Piece
from pipesd.edge import chat
from pipesd.edge.chat import ChatTemplate
from pipesd.edge.cli import main
from pipesd.edge.session import EdgeSession
from pipesd.errors import Refused
from pipesd.protocol import wire
from pipesd.protocol.messages import Error, ErrorCode, Open
from pipesd.sim.texts import KeyedText
from tests.clouds import NOWHERE, CloudProcess, Serving, serving, wait_until
from tests.programs import Models, Program, Ran, edge
from tests.test_programs_generate import law, notes

TIMES = ("tpt_ms", "ttft_ms", "cloud_s", "draft_s", "wait_s", "alpha_ms", "beta_ms", "gap_ms", "gamma_ms", "rtt_ms")
COMMON = ("--max-tokens", 12, "--strategy", "vanilla")


@pytest.fixture(scope="module")
def scripted(models: Models) -> Iterator[Serving]:
    with serving(law(models), target={"vocabulary": models.vocabulary, "context": 400}) as served:
        yield served


@pytest.fixture
def options(models: Models, scripted: Serving) -> list[str]:
    return ["generate", "--draft", str(models.draft), "--cloud", scripted.address]


def prompts(folder: Path, *lines: dict[str, Any] | str, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def ids(file: Path) -> list[tuple[int, list[int]]]:
    return [(found["index"], found["token_ids"]) for found in results(file)]


def has(file: Path, lines: int) -> bool:
    return file.exists() and file.read_bytes().count(b"\n") >= lines


def here(*arguments: object) -> Ran:
    """The program's body in this process: much quicker than a process of its own."""
    out, err = io.StringIO(), io.StringIO()
    begun_s = time.monotonic()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(each) for each in arguments])
    return Ran(code, out.getvalue(), err.getvalue(), time.monotonic() - begun_s)


def summed(ran: Ran) -> dict[str, Any]:
    assert ran.out.count("\n") == 1 and ran.out.endswith("\n"), ran.out
    told: dict[str, Any] = json.loads(ran.out)
    return told


# ---- what comes out


def test_each_line_gets_what_it_gets_alone(options: list[str], tmp_path: Path) -> None:
    lines = [
        {"prompt": "zanzibar xylophone", "id": "a", "entry_point": "of the data set"},
        {"question": "zanzibar", "max_tokens": 5},
        {"text": "mauve 🙂", "temperature": 0.9, "seed": 5, "top-k": 40},
        {"ids": [97, 98, 99], "id": 7, "stop": ["q"]},
    ]
    out = tmp_path / "results.jsonl"
    file = prompts(tmp_path, *lines[:2], "", *lines[2:])
    ran = here(*options, *COMMON, "--seed", 3, "--file", file, "--out", out, "--json")
    found = results(out)
    assert ran.code == 0 and [each["index"] for each in found] == [0, 1, 2, 3]
    assert [each["id"] for each in found] == ["a", None, None, 7] and [each["seed"] for each in found] == [3, 3, 5, 3]
    alone = [
        ["--prompt", "zanzibar xylophone", "--seed", 3],
        ["--prompt", "zanzibar", "--max-tokens", 5, "--seed", 3],
        ["--prompt", "mauve 🙂", "--temperature", 0.9, "--seed", 5, "--top-k", 40],
    ]
    for each, arguments in zip(found, alone, strict=False):
        one = json.loads(here(*options, *COMMON, *arguments, "--json", "--quiet").out)
        assert list(one) == [name for name in each if name not in ("index", "line", "id", "digest", "target")]
        assert [each[name] for name in ("text", "token_ids", "seed", "finish_reason", "strategy")] == [
            one[name] for name in ("text", "token_ids", "seed", "finish_reason", "strategy")
        ]
        assert each["stats"]["verified"] == one["stats"]["verified"]
    told = summed(ran)
    assert (told["prompts"], told["done"], told["before"], told["errors"]) == (4, 4, 0, 0)
    assert told["tokens"] == sum(each["stats"]["tokens"] for each in found) and told["tpt_ms"] > 0
    said = notes(ran)
    progress = re.compile(r"line 1: 12 tokens, .* per token; 1 of 4 done; \S+ s left")
    assert sum(bool(progress.search(line)) for line in said) == 1, said
    assert "4 of 4 prompts done" in said[-1]


def test_gzip_and_chat_and_quiet(options: list[str], tmp_path: Path) -> None:
    file = prompts(tmp_path, {"prompt": "zanzibar"})
    zipped = tmp_path / "prompts.gz"
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    plain, chat = tmp_path / "plain", tmp_path / "chat"
    for source, more, out in ((zipped, [], plain), (file, ["--chat", "--system", "be brief"], chat)):
        ran = here(*options, *COMMON, *more, "--file", source, "--out", out, "--quiet")
        assert (ran.code, ran.out, ran.err) == (0, "", "")
    alone = here(*options, *COMMON, "--prompt", "zanzibar", "--chat", "--system", "be brief", "--quiet")
    assert results(chat)[0]["text"] + "\n" == alone.out != results(plain)[0]["text"] + "\n"


def test_a_prompt_that_is_refused_is_a_result_and_the_run_goes_on(options: list[str], tmp_path: Path) -> None:
    wrong = [
        ({"prompt": "x" * 500}, "500 ids"),
        ({"prompt": "x", "temperature": -1}, "temperature: got -1"),
        ({"prompt": "x", "temprature": 1}, "did you mean 'temperature'"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"answer": "x"}, "wanted one of prompt, question, text, ids"),
        ({"prompt": "x", "text": "y"}, "got prompt and text"),
        ({"prompt": 5}, "wanted a text"),
        ({"ids": [1 << 40]}, "vocabulary"),
        ({"ids": "abc"}, "wanted a list of ids"),
        ({"ids": [1, True]}, "ids: got True in it, wanted whole numbers only"),
        ({"ids": [1.0]}, "ids: got 1.0 in it"),
        ({"prompt": "x", "strategy": "cloud"}, "'strategy' is an option of the whole run: give --strategy on the"),
        ({"prompt": "x", "draft-length": 3}, "'draft-length' is an option of the whole run: give --draft-length on"),
        ({"prompt": "x", "context": 300}, "'context' is an option of the whole run"),
        ({"prompt": "x", "max_tokens": None}, "max-tokens: got None"),
    ]
    out = tmp_path / "results.jsonl"
    right = {"prompt": "zanzibar", "context": "a data set's own text", "answer": 5}
    file = prompts(tmp_path, "", *(line for line, _ in wrong), right)
    ran = here(*options, *COMMON, "--file", file, "--out", out, "--json", "--quiet")
    found = results(out)
    assert ran.code == 0 and [each["finish_reason"] for each in found] == ["error"] * len(wrong) + ["length"]
    for number, (each, (_, message)) in enumerate(zip(found, wrong, strict=False)):
        assert each["error"].startswith(f"line {number + 2}: ") and message in each["error"]
        assert (each["index"], each["line"], each["token_ids"]) == (number, number + 2, [])
        assert f"pipesd-edge: {each['error']}\n" in ran.err
    assert summed(ran)["errors"] == len(wrong) and "error" not in found[-1]
    before = out.read_bytes()
    assert here(*options, *COMMON, "--file", file, "--out", out, "--quiet").code == 0
    assert out.read_bytes() == before, "what was refused is done"


# ---- going on


def test_killed_at_any_time_the_next_run_goes_on(models: Models, tmp_path: Path) -> None:
    file = prompts(tmp_path, *({"prompt": f"prompt number {k}", "seed": k} for k in range(12)))
    out, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"
    target = {"vocabulary": models.vocabulary, "pass_s": 0.01}
    with serving(law(models), target=target) as slow:
        base = ["generate", "--draft", models.draft, "--cloud", slow.address, *COMMON, "--temperature", 0.8]
        undisturbed = here(*base, "--file", file, "--out", whole, "--json", "--quiet")
        for lines in (3, 8):
            with Program("edge", *base, "--file", file, "--out", out, "--quiet") as program:
                wait_until(partial(has, out, lines), "some results")
                program.send(signal.SIGKILL, group=True)
                program.process.wait(10)
            with out.open("ab") as torn:  # as if it had been written just then
                torn.write(b'{"index": 11, "id"')
        ran = edge(*base, "--file", file, "--out", out, "--json")
    assert ran.code == 0 and "prompts have their results" in ran.err
    assert ids(out) == ids(whole) and [index for index, _ in ids(out)] == list(range(12))
    told, wanted = summed(ran), summed(undisturbed)
    assert told["before"] >= 8 and (told["tokens"], told["done"]) == (wanted["tokens"], 12)


def test_interrupted_it_keeps_what_is_done(models: Models, tmp_path: Path) -> None:
    file = prompts(tmp_path, *({"prompt": f"prompt number {k}"} for k in range(50)))
    out = tmp_path / "results.jsonl"
    with serving(law(models), target={"vocabulary": models.vocabulary, "pass_s": 0.02}) as slow:
        base = ["generate", "--draft", models.draft, "--cloud", slow.address, *COMMON, "--file", file, "--out", out]
        with Program("edge", *base, "--json", "--quiet") as program:
            wait_until(partial(has, out, 2), "some results")
            program.send(signal.SIGINT)
            ran = program.end()
    count = len(results(out))
    assert ran.code == 130 and f"{count} of 50 prompts are done" in ran.complaint and 2 <= count < 50
    assert (summed(ran)["finish_reason"], summed(ran)["done"]) == ("cancelled", count)


@pytest.mark.slow
def test_a_cloud_that_is_lost_ends_the_run_and_the_next_one_goes_on(models: Models, tmp_path: Path) -> None:
    file = prompts(tmp_path, *({"prompt": f"prompt number {k}"} for k in range(8)))
    out = tmp_path / "results.jsonl"
    settings: dict[str, Any] = {"vocabulary": models.vocabulary, "pass_s": 0.02}
    base = ["generate", "--draft", models.draft, *COMMON, "--file", file, "--out", out, "--json", "--patience-s", 0.5]
    with CloudProcess(tmp_path, law(models), **settings) as gone:
        with Program("edge", *base, "--cloud", gone.address, "--quiet") as program:
            wait_until(partial(has, out, 2), "some results")
            gone.kill()
            ran = program.end()
    count = len(results(out))
    assert ran.code == 3 and f"{count} of 8 prompts are done: the same command goes on" in ran.complaint
    assert all(found["finish_reason"] != "error" for found in results(out)), "a lost cloud is no prompt's fault"
    assert summed(ran)["finish_reason"] == "error"
    with serving(law(models), target={"vocabulary": models.vocabulary}) as back:
        assert edge(*base, "--cloud", back.address, "--quiet").code == 0
    assert [index for index, _ in ids(out)] == list(range(8)) and out.read_bytes().count(b"\n") == 8


def test_other_prompts_or_options_are_refused_and_restart_does_all_anew(options: list[str], tmp_path: Path) -> None:
    out, events = tmp_path / "results.jsonl", tmp_path / "events"
    file = prompts(tmp_path, {"prompt": "zanzibar"}, {"prompt": "xylophone"})
    base = [*options, "--file", file, "--out", out, "--quiet"]
    assert here(*base, *COMMON).code == 0
    before = out.read_bytes()
    for more in (["--max-tokens", 5], [*COMMON, "--strategy", "cloud"], [*COMMON, "--chat"], [*COMMON, "--seed", 1]):
        ran = here(*base, *more)
        assert ran.code == 2 and "other prompts or options" in ran.complaint and "--restart" in ran.complaint
        assert here(*base, *more, "--events", events).code == 2 and not events.exists()
    assert out.read_bytes() == before
    for more in (["--threads", 1], ["--patience-s", 9], ["--cloud", NOWHERE]):
        assert here(*base, *COMMON, *more).code == 0 and out.read_bytes() == before
    file = prompts(tmp_path, {"prompt": "zanzibar"}, {"prompt": "xylophone"}, {"prompt": "mauve"})
    assert here(*base, *COMMON).code == 0
    assert out.read_bytes().startswith(before) and len(results(out)) == 3, "one more line is one more result"
    prompts(tmp_path, {"prompt": "zanzibar!"}, {"prompt": "xylophone"})
    assert here(*base, *COMMON).code == 2
    failed = here(*base, *COMMON, "--restart", "--cloud", NOWHERE, "--connect-s", 0.3)
    assert failed.code == 3 and len(results(out)) == 3, "nothing goes before there is a cloud"
    assert here(*base, *COMMON, "--restart").code == 0 and len(results(out)) == 2


def test_results_of_another_target_are_not_mixed(models: Models, options: list[str], tmp_path: Path) -> None:
    out, file = tmp_path / "results.jsonl", prompts(tmp_path, {"prompt": "zanzibar"})
    base = ["generate", "--draft", models.draft, *COMMON, "--file", file, "--out", out, "--quiet"]
    assert here(*options, *base[1:]).code == 0
    (whose,) = (found["target"] for found in results(out))
    prompts(tmp_path, {"prompt": "zanzibar"}, {"prompt": "xylophone"})
    before = out.read_bytes()
    same: dict[str, Any] = {"vocabulary": models.vocabulary, "context": 400}
    with serving(KeyedText(4, alphabet=[*b"abc "]), target=same) as other:
        ran = here(*base, "--cloud", other.address)
        assert ran.code == 2 and f"its results are of {whose['name']} ({whose['fingerprint'][:12]})" in ran.complaint
        assert "go on with the one that began" in ran.complaint and out.read_bytes() == before
        assert here(*base, "--cloud", other.address, "--restart").code == 0
        one, two = (found["target"] for found in results(out))
        assert one == two and one["name"] == whose["name"] and one["fingerprint"] != whose["fingerprint"]
    out.write_bytes(before)
    with serving(law(models), target={**same, "name": "by another name"}) as renamed:
        assert here(*base, "--cloud", renamed.address).code == 0
    assert [found["target"]["name"] for found in results(out)] == [whose["name"], "by another name"]


def test_alone_no_target_is_named(models: Models, tmp_path: Path) -> None:
    out, file = tmp_path / "results.jsonl", prompts(tmp_path, {"prompt": "zanzibar"})
    ran = here("generate", "--draft", models.draft, "--strategy", "local", "--file", file, "--out", out, "--quiet")
    assert ran.code == 0 and [found["target"] for found in results(out)] == [None]


def test_a_refusal_in_the_middle_of_an_output_is_not_the_prompts_fault(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EdgeSession._generate

    def broken(*arguments: Any) -> Iterator[Piece]:
        steps = real(*arguments)
        yield next(steps)
        steps.close()
        raise Refused("no more")

    monkeypatch.setattr(EdgeSession, "_generate", broken)
    file, out = prompts(tmp_path, {"prompt": "zanzibar"}, {"prompt": "xylophone"}), tmp_path / "out"
    ran = here(*options, *COMMON, "--file", file, "--out", out, "--quiet")
    assert (ran.code, ran.complaint) == (4, "pipesd-edge: no more; 0 of 2 prompts are done") and not out.read_bytes()


@pytest.mark.parametrize(
    ("code", "more", "message"),
    [
        (ErrorCode.MODEL, [], "the same command goes on where the target that began is served, --restart begins anew"),
        (ErrorCode.FULL, ["--patience-s", 0.5], "the same command goes on from there"),
        (ErrorCode.VERSION, [], "3 prompts are done"),
        (ErrorCode.VOCABULARY, [], "3 prompts are done"),
    ],
)
def test_what_would_befall_every_further_prompt_ends_the_run(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ErrorCode, more: list[Any], message: str
) -> None:
    file, out = prompts(tmp_path, *({"prompt": f"prompt number {k}"} for k in range(3))), tmp_path / "out"
    base = [*options, *COMMON, "--file", file, "--out", out, "--quiet", "--json"]
    openings: list[Open] = []

    def refuse(opening: Open, *given: Any, **named: Any) -> Error | None:
        openings.append(opening)
        first = opening.opening == openings[0].opening
        return open_refusal(opening, *given, **named) if first else error_to(opening, code, "not now", 50)

    with monkeypatch.context() as patched:
        patched.setattr(front, "open_refusal", refuse)
        ran = here(*base, *more)
    assert ran.code == 4 and "the cloud refuses: not now; 1 of 3 prompts are done" in ran.complaint
    assert message in ran.complaint and summed(ran)["finish_reason"] == "error"
    assert [found["finish_reason"] for found in results(out)] == ["length"], "it is no prompt's fault"
    assert here(*base).code == 0
    assert [(found["index"], found["finish_reason"]) for found in results(out)] == [(k, "length") for k in range(3)]


def test_what_the_cloud_does_not_know_is_of_the_line_that_asks_for_it_or_of_the_run(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "FEATURES", 0)
    lines = [{"prompt": "zanzibar", "temperature": 0.5}, {"prompt": "xylophone"}]
    file, out = prompts(tmp_path, *lines), tmp_path / "out"
    base = [*options, *COMMON, "--file", file, "--quiet"]
    ran = here(*base, "--out", out, "--temperature", 0.5)
    assert ran.code == 4 and "knows nothing of sampling" in ran.complaint and not results(out)
    assert here(*base, "--out", out).code == 0
    assert [found["finish_reason"] for found in results(out)] == ["error", "length"]


def test_a_chat_template_that_cannot_be_read_ends_the_run(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "ChatTemplate", lambda source, **given: ChatTemplate("{% nothing", **given))
    file, out = prompts(tmp_path, {"prompt": "zanzibar"}), tmp_path / "out"
    ran = here(*options, *COMMON, "--file", file, "--out", out, "--quiet", "--chat")
    assert ran.code == 2 and "leave out --chat" in ran.complaint and not results(out)


def test_alone_too_a_prompt_that_is_too_long_is_a_result(models: Models, tmp_path: Path) -> None:
    file, out = prompts(tmp_path, {"prompt": "x" * 5000}, {"prompt": "x"}), tmp_path / "out"
    base = ["generate", "--draft", models.draft, "--strategy", "local", "--context", 256, "--max-tokens", 4]
    assert here(*base, "--file", file, "--out", out, "--quiet").code == 0
    assert [found["finish_reason"] for found in results(out)] == ["error", "length"]


def test_half_a_character_is_refused_with_a_chat_too(options: list[str], tmp_path: Path) -> None:
    file, out = prompts(tmp_path, {"prompt": "\ud800"}, {"prompt": "zanzibar"}), tmp_path / "out"
    for more in ([], ["--chat"]):
        assert here(*options, *COMMON, "--file", file, "--out", out, "--quiet", "--restart", *more).code == 0
        assert [found["finish_reason"] for found in results(out)] == ["error", "length"]


def test_a_result_that_is_there_twice_is_refused(options: list[str], tmp_path: Path) -> None:
    file, out = prompts(tmp_path, {"prompt": "zanzibar"}), tmp_path / "out"
    base = [*options, *COMMON, "--file", file, "--out", out, "--quiet"]
    assert here(*base).code == 0
    out.write_bytes(2 * out.read_bytes())
    assert "line 2: index 0 is there twice" in here(*base).complaint


# ---- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{out}"], "--out goes with --file"),
        (["--prompt", "x", "--out", "{out}"], "--out goes with --file"),
        (["--file", "{file}", "--restart"], "--restart goes with --out"),
        (["--file", "{file}", "--out", "{file}"], "it is the file of the prompts"),
        (["--file", "{file}", "--out", "{link}"], "it is the file of the prompts"),
        (["--file", "{file}", "--out", "{folder}"], "directory"),
        (["--file", "{file}", "--out", "{folder}/no/where"], "No such file"),
        (["--file", "{file}", "--out", "/dev/null"], "no ordinary file"),
        (["--file", "{file}", "--out", "{text}"], "something else than results"),
        (["--file", "{file}", "--out", "{other}"], "line 1 is no result"),
        (["--file", "{text}", "--out", "{out}"], "line 1: not JSON"),
        (["--file", "{list}", "--out", "{out}"], "wanted a JSON object"),
        (["--file", "{empty}", "--out", "{out}"], "it is empty"),
        (["--file", "{folder}/nothing", "--out", "{out}"], "there is no such file"),
        (["--file", "{folder}", "--out", "{out}"], "no ordinary file"),
        (["--file", "{gz}", "--out", "{out}"], "damaged gzip"),
    ],
)
def test_what_cannot_be_is_one_line(models: Models, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {name: tmp_path / name for name in ("out", "link", "text", "other", "list", "empty", "gz")}
    places |= {"folder": tmp_path, "file": prompts(tmp_path, {"prompt": "x"})}
    places["link"].symlink_to(places["file"])
    places["text"].write_text("Once upon a time")
    places["other"].write_text('{"prompt": "x"}\n')
    places["list"].write_text("[1, 2]\n")
    places["empty"].write_text("\n\n")
    places["gz"].write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 99)[:-20])
    kept = {name: places[name].read_bytes() for name in ("text", "other", "file")}
    filled = [each.format(**places) for each in arguments]
    ran = here("generate", *models.options, "--cloud", NOWHERE, *filled, "--quiet", "--json")
    assert ran.code == 2 and message in ran.complaint
    assert {name: places[name].read_bytes() for name in kept} == kept
    json.loads(ran.out)


def test_two_runs_do_not_write_to_one_file(models: Models, tmp_path: Path) -> None:
    file, out = prompts(tmp_path, {"prompt": "x"}), tmp_path / "out"
    with out.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = here("generate", *models.options, "--cloud", NOWHERE, "--file", file, "--out", out, "--quiet")
    assert ran.code == 2 and "another run writes to it" in ran.complaint


def test_a_file_system_without_locks_is_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    file, out = prompts(tmp_path, {"prompt": "x"}), tmp_path / "out"
    ran = here("generate", *models.options, "--cloud", NOWHERE, "--file", file, "--out", out, "--quiet")
    assert ran.code == 2 and "cannot be locked (No locks available)" in ran.complaint


def test_a_large_file_of_something_else_is_refused_by_its_beginning(models: Models, tmp_path: Path) -> None:
    file, out = prompts(tmp_path, {"prompt": "x"}), tmp_path / "out"
    out.write_text("something else")
    os.truncate(out, 1 << 42)  # no memory holds that
    ran = here("generate", *models.options, "--cloud", NOWHERE, "--file", file, "--out", out, "--quiet")
    assert ran.code == 2 and "something else than results" in ran.complaint


def test_without_out_a_file_of_json_lines_is_one_prompt(options: list[str], tmp_path: Path) -> None:
    file = prompts(tmp_path, {"prompt": "x"}, {"prompt": "y"})
    ran = here(*options, *COMMON, "--file", file, "--quiet")
    asked = here(*options, *COMMON, "--prompt", file.read_text().removesuffix("\n"), "--quiet")
    assert ran.code == 0 and ran.out == asked.out
