"""What the target makes of a draft: which tokens it accepts, what it says where it refuses, and log-probabilities."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import NearOne, dense, misfit

from pipesd.policy.accept import FIRST_PROPOSALS, MOST_AT_ONCE, Choices, Draw, Refusal, accept_greedy, choose, highest
from pipesd.policy.noise import Stream
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling

RNG = np.random.default_rng(2)
ROWS = (RNG.normal(size=(5, 9)) * 2).astype(np.float32)
PREFIX = (4, 4, 2)
REJECTION: dict[str, Any] = {"temperature": 1.0, "method": Method.REJECTION}


def drawn(
    options: dict[str, Any], drafted: tuple[int, ...], p_draft: tuple[float, ...] = (), rows: Any = ROWS
) -> Choices:
    return choose(rows[: 1 + len(drafted)], Draw(Sampler(Sampling(**options), 5), PREFIX, drafted, p_draft))


def law_of(options: dict[str, Any], row: Any, prefix: Any = PREFIX) -> Any:
    law = Sampler(Sampling(**options), 5).law(row, prefix)
    assert law is not None
    return law


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_the_longest_equal_beginning_is_accepted(draft: list[int], choices: list[int]) -> None:
    choices = choices[: len(draft) + 1]
    assert accept_greedy(draft, choices) == max(n for n in range(len(draft) + 1) if draft[:n] == choices[:n])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_p": 0.8},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_each_row_is_drawn_from_behind_the_draft_before_it(options: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(**options), 5)
    drafted = (4, 1, 7, 4)
    wanted = []
    for i, row in enumerate(ROWS):
        choice = sampler.choose(row, len(PREFIX) + i, PREFIX + drafted[:i])
        assert choice is not None
        wanted.append(choice.id)
    choices = drawn(options, drafted)
    assert choices == Choices(tuple(wanted), accept_greedy(drafted, wanted))
    own: tuple[int, ...] = ()
    while len(own) < 4:  # the ids that the target alone draws
        own += drawn(options, own).ids[-1:]
    assert drawn(options, own).accepted == 4


def test_a_row_that_is_not_finite_is_told_by_its_place() -> None:
    rows = ROWS.copy()
    rows[2, 3] = math.nan
    for options in ({}, {"temperature": 1.0}):
        good = drawn(options, (0, 0, 0, 0)).ids
        assert drawn(options, (0, 0, 0, 0), rows=rows).ids == (*good[:2], -1, *good[3:])
    bad = drawn(REJECTION, (1, 2, 3, 4), (0.0,) * 4, rows)  # what has no probability in the draft is accepted always
    assert bad.accepted == 2 and bad.ids[:3] == (1, 2, -1) and bad.refusal is None and len(bad.ids) == 5
    rows = ROWS.copy()
    rows[4] = -math.inf
    bad = drawn(REJECTION, (1, 2, 3, 4), (0.0,) * 4, rows)
    assert bad.accepted == 4 and bad.ids == (1, 2, 3, 4, -1)


def test_a_draft_token_is_accepted_by_its_number() -> None:
    sampler = Sampler(Sampling(**REJECTION), 5)
    u = sampler.unit(len(PREFIX), Stream.TEST)
    for token in range(9):
        p = law_of(REJECTION, ROWS[0]).probability(token)
        for q in (p / u * 0.999, p / u * 1.001):
            choices = drawn(REJECTION, (token,), (q,))
            assert choices.accepted == (u * q < p)
            assert (choices.refusal is None) == (choices.accepted == 1)
            assert choices.ids[: choices.accepted] == (token,)[: choices.accepted]
    own = drawn(REJECTION, (3,), (0.0,)).ids[1]
    choice = sampler.choose(ROWS[1], len(PREFIX) + 1, (*PREFIX, 3))
    assert choice is not None and own == choice.id


def test_an_id_without_probability_is_never_accepted() -> None:
    options = {**REJECTION, "top_k": 2}
    kept = law_of(options, ROWS[0]).ids.tolist()
    for token in set(range(12)) - set(kept):
        for q in (0.0, 1e-7, 1.0):
            choices = drawn(options, (token,), (q,))
            assert choices.accepted == 0 and choices.refusal is not None
    assert drawn(options, (kept[0],), (math.nan,)).accepted == 0


def test_what_both_are_sure_of_is_accepted() -> None:
    row = np.array([[0.0, 200.0, 0.0]] * 2, np.float32)
    for seed in range(200):
        draw = Draw(Sampler(Sampling(**REJECTION), seed), PREFIX, (1,), (1.0,))
        assert choose(row, draw) == Choices((1, 1), 1)


def test_penalties_count_accepted_draft_tokens_in_the_test() -> None:
    options = {**REJECTION, "frequency_penalty": 2.0}
    rows = np.zeros((3, 4), np.float32)
    choices = drawn(options, (1, 1), (0.0, 1.0), rows)
    u = Sampler(Sampling(**options), 5).unit(len(PREFIX) + 1, Stream.TEST)
    assert choices.accepted == 1 + (u < law_of(options, rows[0], (*PREFIX, 1)).probability(1))
    assert law_of(options, rows[0], (*PREFIX, 1)).probability(1) < law_of(options, rows[0]).probability(1) / 2


def refusal(row: Any, **options: Any) -> Refusal:
    sampler = Sampler(Sampling(**{**REJECTION, **options}), 5)
    law = sampler.law(np.asarray(row, np.float32), ())
    assert law is not None
    return Refusal(law, sampler, 7)


def test_a_distribution_of_few_ids_is_told_whole() -> None:
    row = RNG.normal(size=256)
    told = refusal(row).told(0)
    assert told.first is None and told.end == 0
    assert [token for token, _ in told.pairs] == list(range(256))
    assert math.fsum(p for _, p in told.pairs) == pytest.approx(1, abs=1e-5)
    wide = np.append(row, RNG.normal(size=9000))
    assert len(refusal(wide, top_k=256).told(0).pairs) == 256
    assert len(refusal(np.append(row, [-1e30] * 5000)).told(0).pairs) == 256  # none that cannot be
    for pairs in (told.pairs, refusal(wide, top_p=0.01).told(0).pairs):
        assert all(p > 0 and struct.unpack("f", struct.pack("f", p))[0] == p for _, p in pairs)


def test_of_more_ids_numbered_proposals_are_told_the_same_whenever_asked() -> None:
    row = RNG.normal(size=3000)
    one, law = refusal(row), law_of(REJECTION, row.astype(np.float32))
    first = one.told(0)
    more = one.told(first.end)
    assert (first.first, len(first.pairs), first.end) == (0, FIRST_PROPOSALS, FIRST_PROPOSALS)
    assert (more.first, len(more.pairs), more.end) == (FIRST_PROPOSALS, 4 * FIRST_PROPOSALS, 5 * FIRST_PROPOSALS)
    assert len(one.told(10_000).pairs) == MOST_AT_ONCE
    assert all(p == law.probability(token) for token, p in first.pairs + more.pairs)
    again = refusal(row)
    assert again.told(first.end) == more and again.told(0) == first and again.told(3).pairs[:13] == first.pairs[3:]


class Counted(Sampler):
    """Counts how often proposals are drawn."""

    times = 0

    def units(self, position: int, stream: Stream, numbers: range) -> Any:
        self.times += 1
        return super().units(position, stream, numbers)


def test_a_question_that_is_repeated_is_answered_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    row = RNG.normal(size=3000).astype(np.float32)
    sampler = Counted(Sampling(**REJECTION), 5)
    law = sampler.law(row, ())
    assert law is not None
    one, sums = Refusal(law, sampler, 7), []
    cumsum = np.cumsum
    monkeypatch.setattr(np, "cumsum", lambda *args, **more: sums.append(1) or cumsum(*args, **more))
    answers = [one.told(tried) for tried in (0, 16, 400) for _ in range(50)]
    assert sampler.times == 3 and len(sums) == 1, "a flood of the same question costs the cloud its time"
    assert len({id(answer) for answer in answers}) == 3
    few = refusal(row, top_k=4)
    assert few.told(0) is few.told(0) is few.told(16), "what is told whole does not hang on what was tried"


def test_proposals_have_the_noise_of_their_numbers() -> None:
    sampler = Sampler(Sampling(**REJECTION), 5)
    numbers = range(1000, 1040)
    singly = [sampler.unit(7, Stream.PROPOSAL, number) for number in numbers]
    assert sampler.units(7, Stream.PROPOSAL, numbers).tolist() == singly


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_number_proposes_the_last_id_that_can_be(seed: int) -> None:
    row = np.random.default_rng(seed).normal(size=3000 + seed).astype(np.float32)
    row[-5:] = -np.inf
    sampler = NearOne(Sampling(**REJECTION), seed)
    law = sampler.law(row, ())
    assert law is not None
    last = len(row) - 6
    assert set(Refusal(law, sampler, 7).told(0).pairs) == {(last, law.probability(last))}


def test_proposals_have_the_target_s_law() -> None:
    row = np.append(RNG.normal(size=20) + 8, RNG.normal(size=400))
    one, law = refusal(row), dense(law_of(REJECTION, row.astype(np.float32)), 420)
    counts = np.zeros(420)
    for tried in range(MOST_AT_ONCE, 100_000, MOST_AT_ONCE):
        np.add.at(counts, [token for token, _ in one.told(tried).pairs], 1)
    assert misfit(counts, law) > 0.001


def test_picospec_tells_the_most_probable_ids() -> None:
    row = RNG.normal(size=500).astype(np.float32)
    told = refusal(row, method=Method.PICOSPEC, top_mass=7).told(0)
    assert told.first is None
    assert [token for token, _ in told.pairs] == np.argsort(-row)[:7].tolist()
    assert len(refusal(row, method=Method.PICOSPEC, top_mass=700).told(0).pairs) == 500
    assert len(refusal(row, method=Method.PICOSPEC, top_mass=7, top_k=3).told(0).pairs) == 3


@pytest.mark.parametrize("most", [0, 1, 5])
def test_log_probabilities_are_those_before_any_option(most: int) -> None:
    plain = ROWS.astype(float)
    wanted = plain - np.log(np.exp(plain).sum(1, keepdims=True))
    some = {"top_k": 3, "min_p": 0.2, "repetition_penalty": 1.7, "presence_penalty": 1.0, "logit_bias": ((2, 4.0),)}
    for options in ({}, {"temperature": 0.7}, {"temperature": 0.7, **some}, some):
        for drafted in ((), tuple(drawn(options, (0,) * 4).ids[:1]), (8, 8, 8, 8)):
            choices = drawn({**options, "logprobs": most}, drafted)
            assert choices[:3] == drawn(options, drafted)[:3]
            assert choices.logprobs is not None and len(choices.logprobs) == choices.accepted + 1
            for row, token, told in zip(wanted, choices.ids, choices.logprobs, strict=False):
                assert told.own == pytest.approx(row[token], abs=1e-5)
                assert [i for i, _ in told.top] == np.argsort(-row)[:most].tolist()
                assert [x for _, x in told.top] == pytest.approx(sorted(row, reverse=True)[:most], abs=1e-5)


def test_log_probabilities_of_accepted_tokens_come_with_a_refusal_too() -> None:
    choices = drawn({**REJECTION, "logprobs": 1}, (3, 8), (0.0, 1e9))
    assert choices.accepted == 1 and choices.refusal is not None
    assert choices.logprobs is not None and len(choices.logprobs) == 1
    rows = ROWS.copy()
    rows[1] = math.nan
    bad = drawn({"logprobs": 1}, (int(ROWS[0].argmax()),), rows=rows)
    assert bad.ids[1] == -1 and bad.logprobs is not None and len(bad.logprobs) == 1


def test_log_probabilities_are_never_above_zero_and_may_be_of_impossible_ids() -> None:
    row = np.array([[-math.inf, 500.0, -math.inf]], np.float32)
    told = drawn({"logprobs": 20}, (), rows=row).logprobs
    assert told == ((0.0, ((1, 0.0), (0, -math.inf), (2, -math.inf))),)


@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]), max_size=12), st.integers(0, 14))
def test_the_highest_are_in_order_and_the_lowest_place_first_on_a_tie(values: list[float], most: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:most]
    assert highest(np.array(values, np.float32), most).tolist() == wanted


def test_what_is_said_of_a_refusal_is_drawn_for_its_position() -> None:
    rows = np.zeros((3, 600), np.float32)
    sampler = Sampler(Sampling(**REJECTION), 5)
    choices = choose(rows, Draw(sampler, PREFIX, (3, 4), (0.0, 1e9)))
    assert choices.accepted == 1 and choices.refusal is not None
    assert choices.refusal.told(0) == Refusal(law_of(REJECTION, rows[1]), sampler, len(PREFIX) + 1).told(0)
