"""A draft model that reads along guesses what it would guess if it were asked afresh behind every prefix."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import numpy as np

from pipesd.edge.advise_reading import Seen, read_along
from pipesd.edge.drafter import Drafter
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.texts import KeyedText, continuation
from tests.tiny import write_tiny

PROMPT = "def f(x):"
DEPTH = 5


def afresh(model: Drafter, ids: list[int], count: int) -> list[Seen]:
    """`count` guesses behind these ids, each by a row that is looked at whole."""
    model.rollback(0)
    model.extend(ids)
    guesses = []
    for _ in range(count):
        drawn = model.draft()
        row = model._logits().astype(float)
        share = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        second = int(np.argsort(-share, kind="stable")[1])
        guesses.append(Seen(drawn.id, share[drawn.id], drawn.entropy, second, share[second]))
    return guesses


def same(seen: Seen, wanted: Seen) -> bool:
    """Up to the last bits, which hang on how a text was cut into pieces."""
    numbers = ((seen.p_draft, wanted.p_draft), (seen.entropy, wanted.entropy), (seen.p_runner_up, wanted.p_runner_up))
    ids = (seen.id, seen.runner_up) == (wanted.id, wanted.runner_up)
    return ids and all(math.isclose(*pair, rel_tol=0.02, abs_tol=1e-4) for pair in numbers)


def test_guesses_and_what_follows_wrong_ones_are_those_of_a_slow_reading(tmp_path: Path) -> None:
    target, model = (
        Drafter(write_tiny(tmp_path / "t.gguf"), context=64),
        Drafter(write_tiny(tmp_path / "d.gguf", noise=0.1), context=64),
    )
    prompt = model.tokeniser.encode(PROMPT, special=True)
    target.extend(prompt)
    text = [target.draft().id for _ in range(16)]
    target.close()
    places: list[int] = []
    reading = read_along(model, prompt, text, DEPTH, places.append)
    assert places == list(range(16)) and len(reading.guesses) == 16
    wrong = [place for place in range(16) if reading.guesses[place].id != text[place]]
    assert 0 < len(wrong) < 16, "a case that tells nothing"
    assert set(reading.behind) == {*wrong, 15}
    assert len(reading.times_s) == 16 + DEPTH * len(reading.behind) and min(reading.times_s) > 0.0
    agree = []
    for place in range(16):
        guesses = afresh(model, [*prompt, *text[:place]], 1 + DEPTH)
        agree.append(same(reading.guesses[place], guesses[0]))
        if place in reading.behind:
            agree += map(same, reading.behind[place], guesses[1:])
            assert len(reading.behind[place]) == DEPTH
    model.close()
    assert sum(agree) > 0.9 * len(agree), "but for near ties"


@pytest.mark.parametrize("room", [3, 8, 10, 11])
def test_a_context_that_ends_before_the_text_ends_the_reading(room: int) -> None:
    """Behind the last place that was read the draft goes on as far as it can."""
    law = KeyedText(3)
    drafter = ScriptedDrafter(Agreement(law, 1.0), context=4 + room)
    prompt = [65, 66, 67, 68]
    reading = read_along(drafter, prompt, continuation(law, prompt, 10), DEPTH)
    read = min(room, 10)
    assert [seen.id for seen in reading.guesses] == continuation(law, prompt, read)
    assert list(reading.behind) == [read - 1] and len(reading.behind[read - 1]) == min(DEPTH, room - read)


def test_a_prompt_that_fills_the_context_gives_nothing() -> None:
    drafter = ScriptedDrafter(Agreement(KeyedText(3), 1.0), context=4)
    assert read_along(drafter, [65, 66, 67, 68], [97, 98], DEPTH) == ((), {}, ())
