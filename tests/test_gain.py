"""The expected gain: its rule, what it learns of a draft model, and how near to the best it comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.policy.gain import EDGES, FIRST_COSTS, LONGEST_DRAFT, Calibration, Gain, rising
from pipesd.policy.trigger import Costs, FixedLength, Trigger

Law = Callable[[float], float]
LAWS: dict[str, Law] = {
    "honest": lambda p: p,
    "too sure": lambda p: p * p,
    "not sure enough": lambda p: math.sqrt(p),
    "knows nothing": lambda p: 0.6,
}


def learn(calibration: Calibration, law: Law, tokens: int, rng: Random) -> None:
    for _ in range(tokens):
        p_draft = rng.random()
        calibration.drafted(p_draft)
        calibration.decided(p_draft, rng.random() < law(p_draft))
    calibration.fit()


# -- the nearest rising sequence


def nearest_rising(values: list[float], weights: list[float]) -> list[float]:
    """The max-min form: of all stretches that end at or behind i, the least mean; of all beginnings, the greatest."""

    def mean(i: int, j: int) -> float:
        return sum(v * w for v, w in zip(values[i:j], weights[i:j], strict=True)) / sum(weights[i:j])

    size = len(values)
    return [max(min(mean(i, j) for j in range(k + 1, size + 1)) for i in range(k + 1)) for k in range(size)]


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 100.0)), max_size=14))
def test_rising_is_the_nearest_sequence_without_a_fall(pairs: list[tuple[float, float]]) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    found = rising(values, weights)
    assert found == pytest.approx(nearest_rising(values, weights), abs=1e-12)
    assert all(a <= b for a, b in pairwise(found))


# -- calibration


def test_before_any_verdict_the_draft_model_is_believed() -> None:
    calibration = Calibration()
    for i in range(101):
        assert calibration.chance(i / 100) == pytest.approx(i / 100, abs=0.0501)
    assert calibration.chance(1.0) > 0.999
    assert 0.0 < calibration.expected < 1.0


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_learnt(law: str) -> None:
    calibration = Calibration()
    learn(calibration, LAWS[law], 3000, Random(2))
    wrong = [abs(calibration.chance(p) - LAWS[law](p)) for p in (0.05 + i / 10 for i in range(10))]
    assert max(wrong) < 0.15 and sum(wrong) / len(wrong) < 0.06
    mean = sum(LAWS[law](i / 1000) for i in range(1000)) / 1000
    assert calibration.expected == pytest.approx(mean, abs=0.05)


def test_a_change_of_the_law_is_followed() -> None:
    calibration = Calibration()
    rng = Random(3)
    learn(calibration, lambda p: 0.95, 3000, rng)
    assert calibration.chance(0.5) > 0.85
    learn(calibration, lambda p: 0.3, 3000, rng)
    assert calibration.chance(0.5) < 0.45 and calibration.expected < 0.45
    learn(calibration, lambda p: 0.95, 3000, rng)
    assert calibration.chance(0.5) > 0.85


@pytest.mark.parametrize("law", [0.0, 1.0])
def test_what_never_changes_is_learnt_to_the_end(law: float) -> None:
    calibration = Calibration()
    for _ in range(1000):
        calibration.decided(0.55, bool(law))
    calibration.fit()
    assert abs(calibration.chance(0.55) - law) < 0.02


def test_a_probability_that_is_none_counts_as_nothing() -> None:
    calibration = Calibration()
    for odd in (math.nan, math.inf, -1.0, 2.0):
        assert calibration.chance(odd) == calibration.chance(0.0)


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=50))
def test_chances_are_chances_and_rise(seen: list[tuple[float, bool]]) -> None:
    calibration = Calibration()
    for p_draft, accepted in seen:
        calibration.drafted(p_draft)
        calibration.decided(p_draft, accepted)
        calibration.fit()
    chances = [calibration.chance(p) for p in (0.0, *EDGES, 1.0)]
    assert all(0.0 <= a <= b <= 1.0 for a, b in pairwise(chances))
    assert 0.0 < calibration.expected < 1.0


# -- the rule


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.0, 1.0), max_size=60),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.001, 1.0)),
    st.integers(0, 9),
)
def test_it_goes_on_while_the_next_token_is_worth_its_drafting(
    tokens: list[float], costs: tuple[float, float, float], seed: int
) -> None:
    gamma_s, round_s, token_s = costs
    trigger = Gain()
    learn(trigger.calibration, LAWS["too sure"], 100, Random(seed))
    trigger.adopt(Costs(gamma_s, round_s, token_s))
    worth_s = min(token_s, round_s + gamma_s)
    least = gamma_s / worth_s if worth_s > 0 else FIRST_COSTS.gamma_s / FIRST_COSTS.token_s
    draft: list[float] = []
    for p_draft in tokens:
        draft.append(p_draft)
        chance = 1.0
        for p in draft:
            chance *= trigger.calibration.chance(p)
        goes_on = chance * trigger.calibration.expected > least and len(draft) < LONGEST_DRAFT
        assert trigger.observe(p_draft) == (None if goes_on else "gain")
        if not goes_on:
            draft = []


@pytest.mark.parametrize(("costs", "length"), [(Costs(0.0, 0.1, 0.1), LONGEST_DRAFT), (Costs(0.1, 0.1, 1e-9), 1)])
def test_drafts_have_at_least_one_and_at_most_so_many_tokens(costs: Costs, length: int) -> None:
    trigger = Gain()
    trigger.adopt(costs)
    said = [trigger.observe(1.0) for _ in range(3 * LONGEST_DRAFT)]
    assert [i for i, rule in enumerate(said, 1) if rule] == list(range(length, 3 * LONGEST_DRAFT + 1, length))


def lengths(trigger: Gain, tokens: int, p_draft: float) -> list[int]:
    ends = [i for i in range(1, tokens + 1) if trigger.observe(p_draft) is not None]
    trigger.reset()
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_dearer_drafting_makes_shorter_drafts_and_dearer_rounds_longer_ones() -> None:
    found = []
    for gamma_s in (0.001, 0.01, 0.03, 0.09):
        trigger = Gain()
        trigger.adopt(Costs(gamma_s, 0.2, 0.1))
        found.append(lengths(trigger, 64, 0.85)[0])
    assert found == sorted(found, reverse=True) and found[0] > found[-1] == 1
    # a token costs at most a round of its own, so the time that a pause went into makes no longer drafts than that
    for token_s in (0.11, 60.0, 1e9):
        trigger.adopt(Costs(0.01, 0.1, token_s))
        found.append(lengths(trigger, 64, 0.85)[0])
    assert found[-1] == found[-2] == found[-3]


BAD_COSTS = [(math.nan, 0.1, 0.1), (0.1, math.nan, 0.1), (0.1, 0.1, math.nan), (-0.1, 0.3, 0.1), (0.1, 0.1, 0.0)]
BAD_COSTS += [(math.inf, 0.1, 0.1), (0.1, math.inf, 0.1), (0.1, 0.1, math.inf), (0.0, 0.0, 0.1), (0.1, -0.1, 0.1)]


@pytest.mark.parametrize("bad", BAD_COSTS)
def test_costs_that_make_no_sense_are_not_adopted(bad: tuple[float, float, float]) -> None:
    for good in (FIRST_COSTS, Costs(0.001, 0.2, 0.1)):
        told, left_alone = Gain(), Gain()
        for trigger in (told, left_alone):
            trigger.adopt(good)
        told.adopt(Costs(*bad))
        assert lengths(told, 64, 0.97) == lengths(left_alone, 64, 0.97)


@given(
    st.lists(
        st.one_of(
            st.floats(),
            st.tuples(st.integers(0, 9), st.booleans()),
            st.builds(Costs, st.floats(), st.floats(), st.floats()),
            st.sampled_from(["reset", "asked"]),
        ),
        max_size=80,
    )
)
def test_whatever_comes_it_stays_a_number_and_asks_in_time(steps: list[float | tuple[int, bool] | Costs | str]) -> None:
    trigger = Gain()
    silent = 0
    for step in steps:
        if isinstance(step, float):
            silent = 0 if trigger.observe(step) else silent + 1
        elif isinstance(step, str):
            (trigger.reset if step == "reset" else trigger.asked)()
            silent = 0
        elif isinstance(step, Costs):
            trigger.adopt(step)
        else:
            trigger.decided(*step)
        assert silent < LONGEST_DRAFT
        assert 0.0 < trigger.calibration.expected < 1.0
    trigger.adopt(FIRST_COSTS)
    assert trigger.observe(math.nan) == "gain"


# -- verdicts


def test_each_verdict_is_on_the_oldest_tokens_and_nothing_is_learnt_of_those_behind_a_wrong_one() -> None:
    trigger = Gain()
    wanted = Calibration()
    for p_draft in (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35):
        trigger.observe(p_draft)
        wanted.drafted(p_draft)
    trigger.decided(2, False)
    trigger.decided(1, True)
    trigger.decided(3, True)  # nothing is undecided any more
    for p_draft, accepted in ((0.95, True), (0.85, True), (0.75, True), (0.65, False)):
        wanted.decided(p_draft, accepted)
    wanted.fit()
    for i in range(101):
        assert trigger.calibration.chance(i / 100) == wanted.chance(i / 100)
    assert trigger.calibration.expected == wanted.expected


def test_a_rejection_begins_a_new_draft_and_a_reset_keeps_what_was_learnt() -> None:
    trigger = Gain()
    for _ in range(200):
        trigger.observe(0.99)
        trigger.decided(0, True)
    learnt = trigger.calibration.chance(0.99)
    trigger.observe(0.99)
    trigger.reset()
    trigger.decided(1, False)
    assert trigger.calibration.chance(0.99) == learnt < 0.05


def round_of(trigger: Trigger, confidence: Callable[[Random], float], law: Law, rng: Random) -> tuple[int, int]:
    """One draft and its verdict: tokens drafted and accepted."""
    drafted = accepted = 0
    rejected = False
    while True:
        p_draft = confidence(rng)
        rejected = rejected or rng.random() >= law(p_draft)
        accepted += not rejected
        drafted += 1
        if trigger.observe(p_draft):
            trigger.decided(accepted, rejected)
            return drafted, accepted


def time_per_token(
    trigger: Trigger, confidence: Callable[[Random], float], law: Law, gamma_s: float, round_s: float, rounds: int = 500
) -> float:
    """Rounds one after the other, each `round_s` and its drafting long; the trigger is told what things take."""
    rng, time_s, tokens = Random(5), 0.0, 0
    for _ in range(rounds):
        drafted, accepted = round_of(trigger, confidence, law, rng)
        time_s += round_s + gamma_s * drafted
        tokens += accepted + 1
        trigger.adopt(Costs(gamma_s, round_s, time_s / tokens))
    return time_s / tokens


def test_a_draft_model_that_is_always_sure_and_mostly_wrong_is_found_out() -> None:
    """All confidences are 0.99, 30 % are right: drafts of dozens of tokens at first, of one or two soon."""
    trigger, rng = Gain(), Random(1)
    trigger.adopt(Costs(0.006, 0.06, 0.05))
    first = [round_of(trigger, lambda _: 0.99, lambda _: 0.3, rng)[0] for _ in range(5)]
    later = [round_of(trigger, lambda _: 0.99, lambda _: 0.3, rng)[0] for _ in range(400)][50:]
    assert max(first) >= 20
    assert max(later) <= 3 and sum(later) / len(later) < 2.0
    assert trigger.calibration.chance(0.99) == pytest.approx(0.3, abs=0.08)


@pytest.mark.parametrize(("gamma_s", "round_s"), [(0.006, 0.06), (0.036, 0.1), (0.02, 0.02), (0.006, 0.2)])
@pytest.mark.parametrize("law", LAWS)
def test_it_comes_near_the_best_fixed_length_or_beats_it(law: str, gamma_s: float, round_s: float) -> None:
    """Untuned, against each length tried on the same tokens. The confidences are those of a common pair of models."""

    def confidence(rng: Random) -> float:
        return rng.betavariate(4, 1)

    best = min(
        time_per_token(FixedLength(n), confidence, LAWS[law], gamma_s, round_s) for n in (1, 2, 3, 4, 6, 8, 10, 14, 20)
    )
    assert time_per_token(Gain(), confidence, LAWS[law], gamma_s, round_s) <= 1.05 * best
