"""Draft, test and redraw have the target's law, whatever the draft; picospec strays no further than it says."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import NearOne, TableSampler, Weights, dense, misfit

from pipesd._kernels import warmup
from pipesd.policy import accept, noise, residual, sampler
from pipesd.policy.accept import Draw, Refusal, ToldLaw, choose
from pipesd.policy.noise import Stream
from pipesd.policy.residual import MOST_PROPOSALS, Proposals, rounded_up
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling

DRAWS = 100_000


@given(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 2.0**-24, 2.0**-25, 1e-30, 0.1, 0.5, 1 - 2.0**-12])))
@example(float(np.nextafter(np.float16(0.3), np.float16(1))))
def test_rounding_up_gives_the_least_float16_that_is_no_less(q: float) -> None:
    found = rounded_up(q)
    assert float(np.float16(found)) == found >= q
    assert found == 0 or float(np.nextafter(np.float16(found), np.float16(-1))) < q


class Outcome:
    """Counts of ids, the share of drafts accepted, and the error bound, of one position under many seeds."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        options: dict[str, Any],
        draws: int = DRAWS,
        of_edge: dict[str, Any] | None = None,
    ) -> None:
        warmup()
        width = max(len(target), len(draft))
        sampling = Sampling(**{"temperature": 1.0, "method": Method.REJECTION, **options})
        cloud, edge = TableSampler(sampling, 0), TableSampler(replace(sampling, **(of_edge or {})), 0)
        p_row, q_row = np.asarray(target, np.float32), np.asarray(draft, np.float32)
        rows, proposals = [p_row, p_row], Proposals(edge)
        self.counts = np.zeros(width)
        accepted = 0
        for seed in range(draws):
            cloud.seed = edge.seed = seed
            choice = proposals.choose(q_row, 0, ())
            assert choice is not None
            choices = choose(rows, Draw(cloud, (), (choice.id,), (proposals.p_sent(0, choice.id),)))
            accepted += choices.accepted
            drawn = choice.id if choices.accepted else redrawn(proposals, choices.refusal)
            self.counts[drawn] += 1
        self.accepted = accepted / draws
        self.error_bound = proposals.error_bound
        p_law, q_law = cloud.law(p_row, ()), edge.law(q_row, ())
        assert p_law is not None and q_law is not None
        self.p: Weights = dense(p_law, width)
        self.q: Weights = dense(q_law, width)

    @property
    def misfit(self) -> float:
        return misfit(self.counts, self.p)

    @property
    def overlap(self) -> float:
        return float(np.minimum(self.p, self.q).sum())

    @property
    def chance(self) -> float:
        """Four standard deviations of the share accepted."""
        return 4 * math.sqrt(self.overlap * (1 - min(1.0, self.overlap)) / self.counts.sum())

    @property
    def astray(self) -> float:
        """The total variation between what was drawn and the target's law."""
        return float(np.abs(self.counts / self.counts.sum() - self.p).sum() / 2)


def redrawn(proposals: Proposals, refusal: Refusal | None) -> int:
    assert refusal is not None
    tried = 0
    while True:
        told = refusal.told(tried)
        token = proposals.redraw(0, told)
        if token is not None:
            return token
        tried = told.end


RNG = np.random.default_rng(3)
TARGET = (RNG.normal(size=10) * 1.3).astype(np.float32)
DRAFTS = {
    "good": TARGET + (RNG.normal(size=10) * 0.4).astype(np.float32),
    "bad": TARGET * np.float32(0.3) + (RNG.normal(size=10) * 1.2).astype(np.float32),
    "blind": np.where(np.arange(10) < 5, -np.inf, 0).astype(np.float32),
    "the target's": TARGET,
}


def test_the_output_has_the_target_s_law_and_acceptance_is_the_overlap() -> None:
    found = Outcome(TARGET, DRAFTS["bad"], {"temperature": 0.8, "top_p": 0.9}, draws=40_000)
    assert found.misfit > 0.001
    assert found.accepted == pytest.approx(found.overlap, rel=0.01)


@pytest.mark.parametrize("whole", [True, False])
def test_a_draft_cut_to_its_top_16_and_sent_as_float16(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """What is sent and tested is what the token was drawn from, cut as it is, not the draft model's own softmax."""
    chance = np.random.default_rng(8)
    target = (chance.normal(size=40) * 1.2).astype(np.float32)
    draft = target + (chance.normal(size=40) * 0.8).astype(np.float32)
    if not whole:
        monkeypatch.setattr(accept, "MOST_WHOLE", 0)
    sent, p_sent = set(), Proposals.p_sent

    def seen(proposals: Proposals, position: int, token: int) -> float:
        q = p_sent(proposals, position, token)
        sent.add((token, q))
        return q

    monkeypatch.setattr(Proposals, "p_sent", seen)
    found = Outcome(target, draft, {}, draws=25_000, of_edge={"top_k": 16})
    assert np.count_nonzero(found.q) == 16 and np.count_nonzero(found.p) == 40
    assert found.misfit > 0.001
    assert found.accepted == pytest.approx(found.overlap, rel=0.01)
    for token, q in sent:
        assert struct.unpack("<e", struct.pack("<e", q))[0] == q
        assert found.q[token] <= q <= found.q[token] * (1 + 2.0**-10)


OPTIONS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, (top_k, top_p, min_p) in product(
        [0.6, 1.0, 1.5], [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (3, 0.8, 0.0), (0, 1.0, 0.15), (6, 0.9, 0.05)]
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_output_has_the_target_s_law_with_every_option_and_draft(options: dict[str, Any], draft: str) -> None:
    found = Outcome(TARGET, DRAFTS[draft], options)
    assert found.misfit > 0.0005  # of 72 such tests
    assert found.accepted == pytest.approx(found.overlap, rel=0.01, abs=found.chance)


@pytest.fixture
def by_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution is told whole."""
    monkeypatch.setattr(accept, "MOST_WHOLE", 0)


@pytest.mark.usefixtures("by_proposals")
def test_proposals_give_the_target_s_law_too() -> None:
    found = Outcome(TARGET, DRAFTS["bad"], {}, draws=25_000)
    assert found.misfit > 0.001


@pytest.mark.slow
@pytest.mark.usefixtures("by_proposals")
@pytest.mark.parametrize("draft", ["good", "bad", "blind"])
@pytest.mark.parametrize("options", OPTIONS[::4], ids=str)
def test_proposals_give_the_target_s_law_with_every_draft(options: dict[str, Any], draft: str) -> None:
    found = Outcome(TARGET, DRAFTS[draft], options)
    assert found.misfit > 0.0005
    assert found.accepted == pytest.approx(found.overlap, rel=0.01, abs=found.chance)


# Rules that are broken must show: without this the tests above might pass for whatever is drawn.
def test_a_residual_that_knows_nothing_of_the_rounding_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(q: float) -> float:  # a rounding that can be seen with so few draws
        return math.ceil(q * 8) / 8

    monkeypatch.setattr(residual, "rounded_up", coarse)
    assert Outcome(TARGET, DRAFTS["good"], {}, draws=15_000).misfit > 0.001
    monkeypatch.setattr(residual, "_residual", lambda p, q: max(0.0, p - q))
    assert Outcome(TARGET, DRAFTS["good"], {}, draws=15_000).misfit < 1e-6


@pytest.mark.parametrize(("stream", "other"), [("TEST", "CHOICE"), ("RESIDUAL", "CHOICE"), ("ANSWER", "PROPOSAL")])
def test_two_draws_from_the_same_noise_show(monkeypatch: pytest.MonkeyPatch, stream: str, other: str) -> None:
    if stream == "ANSWER":
        monkeypatch.setattr(accept, "MOST_WHOLE", 0)
    target, draft = np.log([0.1, 0.6, 0.3]), np.log([0.6, 0.38, 0.02])
    assert Outcome(target, draft, {}, draws=10_000).misfit > 0.001
    key = noise.stream_key

    def confused(seed: int, position: int, which: Stream) -> int:
        return key(seed, position, Stream[other] if which is Stream[stream] else which)

    for module in (sampler, residual):
        monkeypatch.setattr(module, "stream_key", confused)
    assert Outcome(target, draft, {}, draws=10_000).misfit < 1e-6


@pytest.mark.parametrize("top_mass", [1, 3, 6])
def test_picospec_strays_no_further_than_its_bound(top_mass: int) -> None:
    draws = 12_000
    found = Outcome(TARGET, DRAFTS["bad"], {"method": Method.PICOSPEC, "top_mass": top_mass}, draws=draws)
    tail = 1 - np.sort(found.p)[::-1][:top_mass].sum()
    assert found.error_bound == pytest.approx(tail, abs=1e-6)
    noise_of_counts = 3 * math.sqrt(len(TARGET) / draws)
    assert found.astray <= found.error_bound + noise_of_counts
    lost = np.maximum(found.p - found.q, 0)[np.argsort(-found.p)[top_mass:]].sum()
    assert found.astray == pytest.approx(lost, abs=noise_of_counts)
    assert found.accepted == pytest.approx(found.overlap, abs=0.02)


def test_picospec_that_tells_all_is_exact() -> None:
    found = Outcome(TARGET, DRAFTS["bad"], {"method": Method.PICOSPEC, "top_mass": 10}, draws=15_000)
    assert found.error_bound == pytest.approx(0, abs=1e-6)
    assert found.misfit > 0.001


def proposals_at(draft: Any, seed: int = 1, **options: Any) -> Proposals:
    made = Proposals(Sampler(Sampling(**{"temperature": 1.0, "method": Method.REJECTION, **options}), seed))
    assert made.choose(np.asarray(draft, np.float32), 0, ()) is not None
    return made


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    below = tuple((token, 0.0) for token in range(10))
    certain = tuple((token, float(token == 4)) for token in range(10))
    for seed in range(50):
        one_hot = np.where(np.arange(10) == 4, 0, -np.inf)
        assert proposals_at(one_hot, seed).redraw(0, ToldLaw(certain)) == 4
        token = proposals_at(TARGET, seed).redraw(0, ToldLaw((*below[:3], (7, 1e-9))))
        assert token == 7


ONE_HOT = np.where(np.arange(10) == 4, 0, -np.inf)
EQUAL = {
    "p is q": (TARGET, TARGET),
    "one id has all": (ONE_HOT, ONE_HOT),
    "one id has all but for rounding": (ONE_HOT, np.where(np.arange(10) == 4, 16, 0)),
    "and the other way": (np.where(np.arange(10) == 4, 16, 0), ONE_HOT),
    "of two ids": (np.log([0.1, 0.9]), np.log([0.1, 0.9])),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("which", EQUAL)
def test_a_number_just_under_1_where_nothing_is_left_gives_an_id_that_can_be(
    monkeypatch: pytest.MonkeyPatch, which: str, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(accept, "MOST_WHOLE", 0)
    target, draft = (np.asarray(row, np.float32) for row in EQUAL[which])
    refused = 0
    for seed in range(6):
        one = NearOne(Sampling(temperature=1.0, method=Method.REJECTION), seed)
        proposals = Proposals(one)
        with np.errstate(all="raise", under="ignore"):
            choice = proposals.choose(draft, 0, ())
            assert choice is not None
            choices = choose([target, target], Draw(one, (), (choice.id,), (proposals.p_sent(0, choice.id),)))
            token = choice.id if choices.accepted else redrawn(proposals, choices.refusal)
        refused += choices.refusal is not None
        assert target[token] > -np.inf
    assert (refused == 0) == which.startswith("one id has all")


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"min_p": 0.01}, {"logit_bias": ((3, 1.0),)}, {"frequency_penalty": 1.0}],
    ids=str,
)
def test_what_was_drawn_from_outlives_the_logits(options: dict[str, Any]) -> None:
    """llama.cpp writes each row of logits over the last one."""
    buffer = DRAFTS["bad"].copy()
    kept, other = (
        Proposals(Sampler(Sampling(**{"temperature": 1.0, "method": Method.REJECTION, **options}), 1)) for _ in "ab"
    )
    choice, same = kept.choose(buffer, 3, (1, 1, 2)), other.choose(buffer.copy(), 3, (1, 1, 2))
    assert choice is not None and same is not None and choice.id == same.id and choice.law is not None
    assert not np.shares_memory(choice.law.weights, buffer)
    buffer[:] = 50.0
    pairs = tuple((token, 0.1) for token in range(10))
    assert [kept.p_sent(3, token) for token in range(10)] == [other.p_sent(3, token) for token in range(10)]
    assert kept.redraw(3, ToldLaw(pairs)) == other.redraw(3, ToldLaw(pairs))


def test_what_is_asked_twice_has_the_same_answer() -> None:
    law = Sampler(Sampling(temperature=1.0), 0).law(TARGET, ())
    assert law is not None
    pairs = tuple((token, law.probability(token)) for token in range(10))
    for seed in range(20):
        one = proposals_at(DRAFTS["bad"], seed)
        assert one.redraw(0, ToldLaw(pairs)) == one.redraw(0, ToldLaw(pairs[::-1]))
        assert one.redraw(0, ToldLaw(pairs, first=0)) == one.redraw(0, ToldLaw(pairs, first=0))


def test_the_first_proposal_that_passes_is_taken() -> None:
    blind = np.where(np.arange(10) < 9, 0, -np.inf)  # 9 is always taken: the draft cannot have drawn it
    one = proposals_at(blind)
    never = (0, 1e-9)
    assert one.redraw(0, ToldLaw((never, (9, 0.5)), first=0)) == 9
    assert one.redraw(0, ToldLaw((never, never), first=1)) is None
    assert one.redraw(0, ToldLaw(((9, 0.5),), first=3)) == 9
    assert ToldLaw((never,) * 5, first=16).end == 21


def test_proposals_end_where_nothing_but_rounding_is_left() -> None:
    one = proposals_at(np.zeros(10))
    never = (3, 1e-9)
    assert one.redraw(0, ToldLaw((never,) * 64, first=MOST_PROPOSALS - 128)) is None
    assert one.redraw(0, ToldLaw((never,) * 64, first=MOST_PROPOSALS - 64)) == 3


@pytest.mark.usefixtures("by_proposals")
def test_the_last_of_so_many_proposals_moves_the_law_by_no_more_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    left = np.geomspace(1e-7, 1, 100_000)  # the residual's sum
    assert 2.2e-5 < (left * (1 - left) ** MOST_PROPOSALS).max() < 2.3e-5
    monkeypatch.setattr(residual, "MOST_PROPOSALS", 2)
    target, draft, draws = np.log([0.5, 0.25, 0.25]), np.log([0.8, 0.1, 0.1]), 15_000
    found = Outcome(target, draft, {}, draws=draws)
    left = 1 - found.overlap
    wrong = left * (1 - left) ** 2 * (1 - 0.2 / 0.7)  # but for the share that falls where it ought to
    assert found.astray == pytest.approx(wrong, abs=3 * math.sqrt(len(target) / draws) / 2)
    assert wrong < left * (1 - left) ** 2


def test_laws_are_kept_until_their_position_is_decided() -> None:
    one = Proposals(Sampler(Sampling(temperature=1.0, method=Method.REJECTION), 1))
    for position in range(6):
        assert one.choose(TARGET, position, ()) is not None
    law = Sampler(Sampling(temperature=1.0), 1).law(TARGET, ())
    assert law is not None
    assert one.p_sent(3, 2) == rounded_up(law.probability(2))
    one.forget(4)
    one.settle(2)
    assert sorted(one._laws) == [2, 3]
    bad = TARGET.copy()
    bad[0] = math.nan
    assert one.choose(bad, 3, ()) is None
    assert sorted(one._laws) == [2]


def test_a_token_that_was_taken_without_a_draw_was_certain() -> None:
    law = Sampler(Sampling(temperature=1.0), 0).law(TARGET, ())
    assert law is not None
    pairs = tuple((token, law.probability(token)) for token in range(10))
    for seed in range(50):
        one = Proposals(Sampler(Sampling(temperature=1.0, method=Method.REJECTION), seed))
        assert one.choose(np.full(10, math.nan, np.float32), 0, ()) is None
        assert one.p_sent(0, 9) == 1.0
        assert one.redraw(0, ToldLaw(pairs)) != 9  # p·1 of it was accepted, nothing is left
