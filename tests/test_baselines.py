"""EdgeLLM's adaptive threshold against its rule as printed, with one draft at a time and with several undecided."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipesd.policy.baselines import LEAST_THRESHOLD, AdaptiveSequence
from pipesd.policy.trigger import Costs

probabilities = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0.0, 1.0))


def adapted(r1: float, tokens: list[float], correct: int) -> float:
    """R1 behind the verdict on a draft, as the rule is printed, kept within its bounds."""
    if correct == len(tokens):
        r1 = 0.5 * r1
    else:
        c1 = max(math.prod(tokens), LEAST_THRESHOLD)
        r1 = r1 / c1 ** ((len(tokens) - correct) / len(tokens))
    return min(max(r1, LEAST_THRESHOLD), 1.0)


def observe(trigger: AdaptiveSequence, *tokens: float) -> list[str | None]:
    return [trigger.observe(p) for p in tokens]


@given(st.floats(0.0, 1.0), st.lists(probabilities, max_size=60), st.randoms(use_true_random=False))
@example(1e-11, [1.0, 0.0] * 20, Random(1))
def test_one_draft_at_a_time_is_the_printed_rule(initial: float, tokens: list[float], rng: Random) -> None:
    trigger = AdaptiveSequence(initial)
    r1 = max(initial, LEAST_THRESHOLD)
    draft: list[float] = []
    for p in tokens:
        draft.append(p)
        said = trigger.observe(p)
        assert said == ("sequence" if math.prod(draft) <= r1 else None)
        if said:
            correct = rng.randint(0, len(draft))
            trigger.decided(correct, correct < len(draft))
            r1 = adapted(r1, draft, correct)
            draft = []
            assert trigger.sequence_threshold == pytest.approx(r1, rel=1e-9)
            assert LEAST_THRESHOLD <= trigger.sequence_threshold <= 1.0
            trigger.sequence_threshold = r1  # so that rounding never decides


def test_drafts_are_decided_one_after_the_other() -> None:
    trigger = AdaptiveSequence(0.5)
    first, second, third = [0.9, 0.5], [0.4], [0.8, 0.7, 0.6]
    assert observe(trigger, *first, *second, *third) == [None, "sequence", "sequence", None, None, "sequence"]
    trigger.decided(2, False)
    assert trigger.sequence_threshold == 0.25
    trigger.decided(1, False)
    assert trigger.sequence_threshold == 0.125
    trigger.decided(1, True)
    assert trigger.sequence_threshold == pytest.approx(adapted(0.125, third, 1))


def test_one_verdict_may_decide_several_drafts() -> None:
    trigger = AdaptiveSequence(0.5)
    observe(trigger, 0.5, 0.4, 0.9, 0.3)
    trigger.decided(3, True)  # the first two and one token of the third
    assert trigger.sequence_threshold == pytest.approx(adapted(0.125, [0.9, 0.3], 1))


def test_a_guess_that_the_targets_own_token_confirms_is_one_of_the_next_draft() -> None:
    trigger = AdaptiveSequence(0.5)
    observe(trigger, 0.5, 0.9)
    trigger.decided(2, False)
    assert trigger.sequence_threshold == 0.25
    assert observe(trigger, 0.5, 0.4) == [None, "sequence"]
    trigger.decided(1, True)
    assert trigger.sequence_threshold == pytest.approx(adapted(0.25, [0.9, 0.5, 0.4], 2))


@pytest.mark.parametrize("ahead", [[0.9], [0.9, 0.2]], ids=["one that goes on", "one that was asked about"])
def test_a_draft_that_only_lost_its_beginning_was_not_verified(ahead: list[float]) -> None:
    trigger = AdaptiveSequence(0.5)
    observe(trigger, 0.5, *ahead)
    trigger.decided(1, True)  # the draft was right, the target's own token was not the guess
    assert trigger.sequence_threshold == 0.25
    assert observe(trigger, 0.9, 0.9, 0.3) == [None, None, "sequence"]  # nothing of it is left
    trigger.decided(3, False)
    assert trigger.sequence_threshold == 0.125


def test_a_draft_that_something_else_asked_about_counts_too() -> None:
    trigger = AdaptiveSequence(0.1)
    observe(trigger, 0.9, 0.8)
    trigger.asked()
    observe(trigger, 0.7)
    trigger.decided(1, True)
    assert trigger.sequence_threshold == pytest.approx(adapted(0.1, [0.9, 0.8], 1))


def test_asking_about_nothing_new_makes_no_draft() -> None:
    trigger = AdaptiveSequence(0.5)
    trigger.asked()
    observe(trigger, 0.5)
    trigger.asked()
    trigger.decided(1, False)
    trigger.decided(0, False)
    assert trigger.sequence_threshold == 0.25


def test_a_token_that_was_wrong_before_anything_asked_counts() -> None:
    trigger = AdaptiveSequence(0.1)
    observe(trigger, 0.9, 0.8, 0.7)
    trigger.decided(1, False)
    assert trigger.sequence_threshold == 0.1
    trigger.decided(1, True)
    assert trigger.sequence_threshold == pytest.approx(adapted(0.1, [0.9, 0.8, 0.7], 2))


def test_it_sinks_to_its_least_and_comes_back_at_once() -> None:
    trigger = AdaptiveSequence(0.5)
    for _ in range(60):
        while trigger.observe(0.5) is None:
            pass
        trigger.decided(100, False)
    assert trigger.sequence_threshold == LEAST_THRESHOLD
    while trigger.observe(0.5) is None:
        pass
    trigger.decided(0, True)
    assert trigger.sequence_threshold == 1.0
    assert trigger.observe(1.0) == "sequence"
    trigger.decided(1, False)
    assert trigger.sequence_threshold == 0.5


@pytest.mark.parametrize("p_draft", [0.0, 5e-324, math.nan])
def test_a_product_of_nothing_raises_it_without_an_error(p_draft: float) -> None:
    trigger = AdaptiveSequence(0.5)
    assert observe(trigger, 0.9, p_draft) == [None, "sequence"]
    trigger.decided(1, True)
    assert trigger.sequence_threshold == 1.0


def test_a_threshold_of_nothing_is_the_least() -> None:
    assert AdaptiveSequence(0.0).sequence_threshold == LEAST_THRESHOLD
    assert AdaptiveSequence(1).observe(1.0) == "sequence"


def test_a_reset_forgets_the_drafts_and_keeps_the_threshold() -> None:
    trigger = AdaptiveSequence(0.5)
    observe(trigger, 0.5, 0.5, 0.9)
    trigger.decided(1, False)
    trigger.reset()
    trigger.decided(5, True)
    trigger.adopt(Costs(0.1, 0.1, 0.1))
    assert trigger.sequence_threshold == 0.25
    assert observe(trigger, 0.9, 0.25) == [None, "sequence"]
