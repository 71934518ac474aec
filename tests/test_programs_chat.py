"""`pipesd-edge chat` as its users run it: turns from a pipe and at a terminal, and signals between and within them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipesd.sim.check import check_file
from pipesd.sim.texts import KeyedText
from tests.clouds import Serving, serving, wait_until
from tests.programs import ENDS_S, Models, Program, edge

LAW = KeyedText(5)
SLOW_S = 0.02  # of a pass: an answer of 400 tokens takes seconds


@contextmanager
def talk(
    models: Models, *more: object, pass_s: float = 0.0, stdin: int = subprocess.PIPE
) -> Iterator[tuple[Program, Serving]]:
    target = {"vocabulary": models.vocabulary, "context": 500, "pass_s": pass_s}
    with serving(LAW, target=target) as served:
        with Program("edge", "chat", *models.options, "--cloud", served.address, *more, stdin=stdin) as program:
            yield program, served


def kinds(events: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == name]


def sessions_end(served: Serving) -> None:
    """The cloud has heard CLOSE."""
    assert served.server._front is not None
    front = served.server._front
    wait_until(lambda: front.sessions == 0, "the cloud to forget the session")


def test_turns_from_a_pipe(models: Models, tmp_path: Path) -> None:
    events = tmp_path / "events"
    with talk(models, "--max-tokens", 6, "--events", events, "--strategy", "pipesd") as (program, served):
        for turn in ("first", "", "   ", "second", "third"):
            program.write(f"{turn}\r\n" if turn == "second" else f"{turn}\n")
        assert program.process.stdin is not None
        program.process.stdin.close()
        ran = program.end()
        sessions_end(served)
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 3, "three answers, each ends its line"
    assert ran.err.count("6 tokens, length") == 3 and "> " not in ran.err
    assert check_file(events) == []
    opens = [event for event in kinds(events, "sent") if event["kind"] == "Open"]
    prompts = [event["prompt_tokens"] for event in kinds(events, "start")]
    assert prompts == sorted(prompts) and len(opens) == 3
    for opened, before, length in zip(opens[1:], prompts, prompts[1:], strict=False):
        new_ids = length - before - 6
        assert opened["bytes"] < 108 + 4 * new_ids, "a later turn sends its own ids only"


def test_the_last_line_needs_no_end(models: Models) -> None:
    with talk(models, "--max-tokens", 3, "--quiet") as (program, _):
        program.write("only")
        assert program.process.stdin is not None
        program.process.stdin.close()
        ran = program.end()
    assert (ran.code, len(ran.out), ran.err) == (0, 4, "")


@pytest.mark.parametrize("turns", [b"", b"\n\n"])
def test_no_turns(models: Models, turns: bytes) -> None:
    with serving(LAW, target={"vocabulary": models.vocabulary}) as served:
        ran = edge("chat", *models.options, "--cloud", served.address, "--quiet", stdin=turns)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        closed = edge("chat", *models.options, "--cloud", served.address, shell="<&-")
        assert closed.code == 2 and "no turns" in closed.complaint


@pytest.mark.parametrize(
    ("turn", "code", "said"), [(b"caf\xe9\n", 2, "turn 2 is not UTF-8"), (b"x" * 600 + b"\n", 4, "ids")]
)
def test_a_turn_that_is_refused_ends_a_chat_from_a_pipe(models: Models, turn: bytes, code: int, said: str) -> None:
    with serving(LAW, target={"vocabulary": models.vocabulary, "context": 500}) as served:
        turns = b"fine\n" + turn + b"never\n"
        ran = edge("chat", *models.options, "--cloud", served.address, "--quiet", "--max-tokens", 3, stdin=turns)
    assert ran.code == code and said in ran.complaint
    assert len(ran.out) == 4, "the turn before has been answered"


def test_interrupting_an_answer_goes_on_to_the_next_turn(models: Models) -> None:
    with talk(models, "--max-tokens", 400, pass_s=SLOW_S) as (program, served):
        for number in (1, 2):
            program.write("tell me\n")
            begun = len(program.out)
            wait_until(lambda begun=begun: len(program.out) > begun + 3, "an answer")  # type: ignore[misc]
            sent_s = program.send(signal.SIGINT)
            wait_until(lambda number=number: program.err.count(b"cancelled") == number, "its end")  # type: ignore[misc]
            assert time.monotonic() - sent_s < ENDS_S
        assert served.server._front is not None and served.server._front.sessions == 1
        program.write("go on\n")
        begun = len(program.out)
        wait_until(lambda: len(program.out) > begun + 3, "the third answer")
        sent_s = program.send(signal.SIGTERM)
        ran = program.end(ENDS_S, since_s=sent_s)
        sessions_end(served)
    assert ran.code == 130
    assert ran.out.count("\n") == 3, "each answer ends its line"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_between_turns_leaves(models: Models, number: signal.Signals) -> None:
    terminal, other_end = os.openpty()
    try:
        with talk(models, "--max-tokens", 3, stdin=other_end) as (program, served):
            os.write(terminal, b"hello\n")
            wait_until(lambda: program.err.count(b"> ") == 2, "the second prompt")
            ran = program.end(ENDS_S, since_s=program.send(number))
            sessions_end(served)
    finally:
        os.close(terminal)
        os.close(other_end)
    assert ran.code == 130 and len(ran.out) == 4


def typed(models: Models, turns: Sequence[str], *more: object) -> tuple[int, str, str]:
    """A chat at a terminal, with the turns typed one after the other; exit code, stdout, stderr."""
    terminal, other_end = os.openpty()
    try:
        with talk(models, "--max-tokens", 3, *more, stdin=other_end) as (program, _):
            for number, turn in enumerate(turns, 1):
                wait_until(lambda number=number: program.err.count(b"> ") == number, "a prompt")  # type: ignore[misc]
                os.write(terminal, turn.encode("utf-8", "surrogateescape"))
            ran = program.end()
    finally:
        os.close(terminal)
        os.close(other_end)
    return ran.code, ran.out, ran.err


def test_at_a_terminal_a_refused_turn_is_said_and_the_chat_goes_on(models: Models) -> None:
    turns = ["one\n", "caf\udce9\n", "y" * 600 + "\n", "two\n", "\x04"]
    code, out, err = typed(models, turns, "--quiet")
    assert code == 0 and len(out.splitlines()) == 2
    assert "turn 2 is not UTF-8" in err and "the target's context is 500" in err
    assert err.endswith("> \n"), "what comes next begins a line"
