"""Traces without models: that they are as right and as sure of themselves as was asked for."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.link_model import Link
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import Beta, Confidence, Even, synthetic_trace, table7
from pipesd.sim.tokeniser import END_ID, byte_vocabulary
from pipesd.sim.trace import DEPTH, Guess, Trace


def places(trace: Trace) -> Iterator[tuple[Guess, int]]:
    """Each guess behind a true prefix, with what the target says there."""
    for record in trace.records:
        yield from zip(record.guesses, record.output, strict=True)


def test_the_parts_of_a_trace() -> None:
    trace = synthetic_trace(3, 20, seed=4)
    assert [len(record.output) for record in trace.records] == [20] * 3
    assert len({record.prompt for record in trace.records}) == 3
    assert trace.vocabulary == vocabulary_hash(byte_vocabulary()).hex() and trace.vocabulary_size == 512
    assert trace.end_ids == (END_ID,) and trace.depth == DEPTH and not trace.sampling and not trace.pass_s
    for record in trace.records:
        assert [len(record.continuation(i)) for i in range(20)] == [DEPTH] * 20
        assert END_ID not in record.output
    shallow = synthetic_trace(1, 20, depth=3).records[0]
    assert {len(shallow.continuation(i)) for i in range(20)} <= {*range(3, 23)} and len(shallow.continuation(19)) == 3


def test_a_seed_gives_the_same_trace() -> None:
    assert synthetic_trace(2, 20, seed=4) == synthetic_trace(2, 20, seed=4) != synthetic_trace(2, 20, seed=5)


@pytest.mark.parametrize(
    ("acceptance", "right", "wrong", "second"),
    [(0.7, Even(0.5, 0.9), Even(0.1, 0.5), 0.25), (0.9, Beta(6.0, 2.0), Beta(2.0, 2.0), 0.75)],
)
def test_guesses_are_right_and_sure_as_asked(
    acceptance: float, right: Confidence, wrong: Confidence, second: float
) -> None:
    trace = synthetic_trace(10, 500, acceptance=acceptance, right=right, wrong=wrong, second=second, seed=1)
    by_right: dict[bool, list[float]] = {True: [], False: []}
    runners_up = []
    for guess, said in places(trace):
        by_right[guess.id == said].append(guess.p_draft)
        assert guess.runner_up != guess.id and guess.p_runner_up <= guess.p_draft
        assert guess.p_draft + guess.p_runner_up <= 1 + 1e-12 and 0 <= guess.margin <= 1
        if guess.id != said:
            runners_up.append(guess.runner_up == said)
    assert len(by_right[True]) / 5_000 == pytest.approx(acceptance, abs=0.015)
    chance = random.Random(2)
    for found, wanted in ((by_right[True], right), (by_right[False], wrong)):
        drawn = [wanted.draw(chance) for _ in range(5_000)]
        assert statistics.fmean(found) == pytest.approx(statistics.fmean(drawn), abs=0.03)
        assert statistics.stdev(found) == pytest.approx(statistics.stdev(drawn), abs=0.03)
    # a wrong guess's runner-up may be the target's id by chance too, one letter of eleven others
    assert statistics.fmean(runners_up) == pytest.approx(second + (1 - second) / 11, abs=0.06)


def test_guesses_do_not_hang_on_each_other() -> None:
    trace = synthetic_trace(10, 500, acceptance=0.8, seed=3)
    pairs = [(record.right(i), record.right(i + 1)) for record in trace.records for i in range(len(record.output) - 1)]
    behind_right = statistics.fmean(second for first, second in pairs if first)
    behind_wrong = statistics.fmean(second for first, second in pairs if not first)
    assert behind_right == pytest.approx(0.8, abs=0.02) and behind_wrong == pytest.approx(0.8, abs=0.04)
    further = [guess.p_draft for record in trace.records for guesses in record.behind.values() for guess in guesses]
    everywhere = statistics.fmean(guess.p_draft for guess, _ in places(trace))
    assert statistics.fmean(further) == pytest.approx(everywhere, abs=0.01)


def test_entropy_is_that_of_the_distribution_told() -> None:
    trace = synthetic_trace(1, 50)
    for guess, _ in places(trace):
        rest = 1 - guess.p_draft - guess.p_runner_up
        shares = [guess.p_draft, guess.p_runner_up, *[rest / 510] * 510]
        assert guess.entropy == pytest.approx(-sum(p * math.log(p) for p in shares if p > 0), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "rounds", "length", "accepted"),
    [
        ({"strategy": "hsl", "token_threshold": 0.99}, 0.256, 3.18, 0.915),
        ({"strategy": "edgellm"}, 0.149, 7.2, 0.84),  # printed: .191, 4.74, .892
    ],
)
def test_what_strategies_make_of_the_papers_trace(
    settings: dict[str, Any], rounds: float, length: float, accepted: float
) -> None:
    """Table 7, HumanEval, scenario 1's times: what a table measures of the trace, its records behind the first four."""
    settings = {"tuning": "off", **settings}
    link = Link.streamed(0.025, 0.002, up_bytes_per_s=2.5e6, down_bytes_per_s=25e6)
    done = simulate(table7(12).records[4:], link=link, gamma_s=0.036, pass_s=0.06, settings=settings).stats
    assert done["rounds"] / done["tokens"] == pytest.approx(rounds, rel=0.02)
    assert done["verified"] / done["rounds"] == pytest.approx(length, rel=0.02)
    assert done["acceptance_rate"] == pytest.approx(accepted, rel=0.01)
