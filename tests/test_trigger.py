"""Triggers against the papers' rules, read off step by step, and what is done with values that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipesd import _kernels
from pipesd._kernels import confidence as kernel
from pipesd.errors import UsageError
from pipesd.policy.baselines import AdaptiveSequence
from pipesd.policy.gain import Gain
from pipesd.policy.trigger import (
    HIGHEST_ENTROPY_ROOT,
    Costs,
    DualThreshold,
    EntropyThreshold,
    FixedLength,
    SequenceThreshold,
    TokenThreshold,
    Trigger,
)

ALL: dict[str, Callable[[], Trigger]] = {
    "dual": lambda: DualThreshold(0.3, 0.4),
    "sequence": lambda: SequenceThreshold(0.3),
    "token": lambda: TokenThreshold(0.4),
    "entropy": lambda: EntropyThreshold(0.8),
    "length": lambda: FixedLength(3),
    "gain": Gain,
    "adaptive": lambda: AdaptiveSequence(0.3),
}

# Probabilities of which many are equal, so that products meet thresholds exactly.
probabilities = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 5e-324]), st.floats(0.0, 1.0))
drafts = st.lists(probabilities, max_size=40)


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "plain"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triggers made in the test use this form of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            pytest.importorskip("numba")
            assert _kernels.warmup()
        else:
            patch.setattr(kernel, "OBSERVE", _kernels.Kernel(kernel.OBSERVE.plain, ""))
        made = DualThreshold(0.5, 0.5)
        assert (made._observe is kernel.OBSERVE.plain) == (not request.param)
        yield


both_forms = pytest.mark.usefixtures("form")


def answers(trigger: Trigger, tokens: Sequence[float]) -> list[str | None]:
    return [trigger.observe(p) for p in tokens]


def by_the_paper(r1: float, r2: float, tokens: Sequence[float]) -> list[str | None]:
    """C1* = C1·P; NAV if C1* ≤ R1 or P ≤ R2; then C1 is 1."""
    said: list[str | None] = []
    since: list[float] = []
    for p in tokens:
        since.append(p)
        product = 1.0
        for factor in since:
            product = product * factor
        rule = "sequence" if product <= r1 else "token" if p <= r2 else None
        said.append(rule)
        if rule is not None:
            since = []
    return said


@both_forms
@given(probabilities, probabilities, drafts)
@example(0.5, 0.5, [0.5, 1.0, 0.5])
@example(0.0, 0.0, [1e-200, 1e-200, 0.5, 0.0])
@example(1.0, 0.0, [1.0, 1.0])
def test_dual_is_the_papers_rule(r1: float, r2: float, tokens: list[float]) -> None:
    assert answers(DualThreshold(r1, r2), tokens) == by_the_paper(r1, r2, tokens)


@both_forms
@given(probabilities, drafts)
def test_sequence_is_the_rule_on_the_product_alone(r1: float, tokens: list[float]) -> None:
    assert answers(SequenceThreshold(r1), tokens) == by_the_paper(r1, -1.0, tokens)


@given(probabilities, drafts)
def test_token_is_the_rule_on_the_token_alone(r2: float, tokens: list[float]) -> None:
    assert answers(TokenThreshold(r2), tokens) == ["token" if p <= r2 else None for p in tokens]


@given(st.floats(0.0, 4.0), st.lists(st.floats(0.0, 14.0), max_size=20))
def test_entropy_asks_above_its_threshold(h: float, entropies: list[float]) -> None:
    trigger = EntropyThreshold(h)
    assert [trigger.observe(0.5, e) for e in entropies] == ["entropy" if math.sqrt(e) > h else None for e in entropies]


def test_entropy_at_its_threshold_and_what_is_no_entropy() -> None:
    assert EntropyThreshold(0.5).observe(0.9, 0.25) is None
    assert EntropyThreshold(0.5).observe(0.9, 0.2500001) == "entropy"
    assert EntropyThreshold(0.0).observe(0.9, 0.0) is None
    assert EntropyThreshold(100).observe(0.9, math.nan) == "entropy"
    assert EntropyThreshold(100).observe(0.9, math.inf) == "entropy"
    assert EntropyThreshold(0.0).observe(0.9, -1e-9) is None  # rounding may leave that of a sum


@given(st.integers(1, 7), st.integers(0, 40))
def test_length_asks_at_every_so_many_tokens(length: int, tokens: int) -> None:
    said = answers(FixedLength(length), [0.5] * tokens)
    assert said == [None if i % length else "length" for i in range(1, tokens + 1)]


# The rule on each token and the rule on the product part where no token is doubtful by itself.
CASES = [
    (TokenThreshold, (0.5,), [0.9, 0.8, 0.3, 0.9], [None, None, "token", None]),
    (SequenceThreshold, (0.5,), [0.9, 0.8, 0.3, 0.9], [None, None, "sequence", None]),
    (DualThreshold, (0.5, 0.5), [0.9, 0.8, 0.3, 0.9], [None, None, "sequence", None]),
    (DualThreshold, (0.1, 0.5), [0.9, 0.8, 0.3, 0.9], [None, None, "token", None]),
    (TokenThreshold, (0.5,), [0.9, 0.8, 0.6, 0.9], [None, None, None, None]),
    (SequenceThreshold, (0.5,), [0.9, 0.8, 0.6, 0.9], [None, None, "sequence", None]),
]


@both_forms
@pytest.mark.parametrize(("kind", "thresholds", "tokens", "said"), CASES)
def test_the_doubtful_token_ends_the_draft_and_belongs_to_it(
    kind: Callable[..., Trigger], thresholds: tuple[float, ...], tokens: list[float], said: list[str | None]
) -> None:
    assert answers(kind(*thresholds), tokens) == said


@both_forms
def test_the_sequence_rule_comes_first_where_both_hold() -> None:
    assert DualThreshold(0.5, 0.5).observe(0.5) == "sequence"
    assert DualThreshold(math.nextafter(0.5, 0.0), 0.5).observe(0.5) == "token"
    assert DualThreshold(math.nextafter(0.5, 0.0), math.nextafter(0.5, 0.0)).observe(0.5) is None


@given(st.tuples(probabilities, probabilities).map(sorted), drafts)
def test_a_token_threshold_that_is_not_the_higher_one_is_of_no_effect(
    thresholds: list[float], tokens: list[float]
) -> None:
    low, high = thresholds
    assert answers(DualThreshold(high, low), tokens) == answers(SequenceThreshold(high), tokens)


@both_forms
def test_thresholds_at_their_ends() -> None:
    for p in (0.0, 1e-300, 0.5, 1.0):
        assert DualThreshold(1.0, 0.0).observe(p) == "sequence"
        assert TokenThreshold(1.0).observe(p) == "token"
        nothing = p == 0.0
        assert DualThreshold(0.0, 0.0).observe(p) == ("sequence" if nothing else None)
        assert TokenThreshold(0.0).observe(p) == ("token" if nothing else None)
    vanishing = answers(DualThreshold(0.0, 0.0), [1e-100] * 4)
    assert vanishing == [None, None, None, "sequence"]  # 1e-400 is 0 in 64 bits
    assert answers(TokenThreshold(0.0), [1e-100] * 4) == [None] * 4


@both_forms
@pytest.mark.parametrize("p_draft", [math.nan, -0.1, 1.0000001, math.inf, -math.inf, np.nan, np.float32("nan"), 7])
def test_what_is_no_probability_is_no_confidence(p_draft: float) -> None:
    assert DualThreshold(0.0, 0.0).observe(p_draft) == "sequence"
    assert SequenceThreshold(0.0).observe(p_draft) == "sequence"
    assert TokenThreshold(0.0).observe(p_draft) == "token"
    trigger = DualThreshold(0.2, 0.1)
    assert answers(trigger, [p_draft, 0.5, 0.5, 0.5]) == ["sequence", None, None, "sequence"]  # nothing of it stays


@both_forms
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, Fraction])
def test_any_kind_of_real_number_will_do(kind: Callable[[float], Any]) -> None:
    said = [None, "sequence", "token", None]
    assert answers(DualThreshold(kind(0.25), kind(0.375)), [kind(p) for p in (0.5, 0.5, 0.375, 0.75)]) == said
    assert DualThreshold(0, 1).observe(1) == "token"
    one, nothing = np.int64(1), np.int64(0)
    assert DualThreshold(one, nothing).observe(np.float32(1)) == "sequence"  # type: ignore[arg-type]


BAD: list[Any] = [
    -0.0001,
    1.0001,
    math.nan,
    math.inf,
    -math.inf,
    np.nan,
    True,
    False,
    np.True_,
    None,
    "0.5",
    1j,
    10**400,
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_threshold_is_refused_by_name_and_changes_nothing(bad: Any) -> None:
    dual, sequence, token, entropy = (
        DualThreshold(0.25, 0.5), SequenceThreshold(0.25), TokenThreshold(0.5), EntropyThreshold(0.5)
    )  # fmt: skip
    adaptive = AdaptiveSequence(0.25)
    wrong: Callable[[], object]
    for wrong in (
        lambda: DualThreshold(bad, 0.5),
        lambda: SequenceThreshold(bad),
        lambda: AdaptiveSequence(bad),
        lambda: setattr(dual, "sequence_threshold", bad),
        lambda: setattr(sequence, "sequence_threshold", bad),
        lambda: setattr(adaptive, "sequence_threshold", bad),
    ):
        with pytest.raises(UsageError, match=r"^sequence_threshold: got .*, wanted a number, 0 to 1$"):
            wrong()
    for wrong in (
        lambda: DualThreshold(0.5, bad),
        lambda: TokenThreshold(bad),
        lambda: setattr(dual, "token_threshold", bad),
        lambda: setattr(token, "token_threshold", bad),
    ):
        with pytest.raises(UsageError, match=r"^token_threshold: got .*, wanted a number, 0 to 1$"):
            wrong()
    if bad != 1.0001:
        for wrong in (lambda: EntropyThreshold(bad), lambda: setattr(entropy, "entropy_threshold", bad)):
            with pytest.raises(UsageError, match=r"^entropy_threshold: got .*, wanted a number, 0 to 100$"):
                wrong()
    assert (dual.sequence_threshold, dual.token_threshold) == (0.25, 0.5)
    assert (sequence.sequence_threshold, token.token_threshold) == (0.25, 0.5)
    assert (entropy.entropy_threshold, adaptive.sequence_threshold) == (0.5, 0.25)


def test_an_entropy_threshold_has_an_end() -> None:
    assert EntropyThreshold(HIGHEST_ENTROPY_ROOT).observe(0.5, 14.0) is None
    with pytest.raises(UsageError, match="entropy_threshold"):
        EntropyThreshold(HIGHEST_ENTROPY_ROOT + 1)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, math.nan, None, "3"])
def test_a_bad_length_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"^length: got .*, wanted a whole number of tokens, at least 1$"):
        FixedLength(bad)
    assert answers(FixedLength(np.int64(2)), [0.5] * 2) == [None, "length"]  # type: ignore[arg-type]


@both_forms
def test_thresholds_may_change_within_a_draft_and_the_product_goes_on() -> None:
    trigger = DualThreshold(0.1, 0.0)
    assert answers(trigger, [0.5, 0.5]) == [None, None]
    trigger.sequence_threshold = 0.2
    assert answers(trigger, [0.8]) == ["sequence"]  # 0.2
    trigger.token_threshold = 0.9
    assert answers(trigger, [0.9, 0.95]) == ["token", None]
    entropy = EntropyThreshold(1.0)
    entropy.entropy_threshold = 2
    assert entropy.observe(0.5, 3.9) is None


# -- what all have in common


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(data=st.data())
def test_a_trigger_that_asked_was_asked_or_was_reset_starts_anew(name: str, data: st.DataObject) -> None:
    """Whatever it saw before, without a verdict it then says what a new one says."""
    used = ALL[name]()
    tokens = st.tuples(probabilities, st.floats(0.0, 3.0))
    for p_draft, entropy in data.draw(st.lists(tokens, max_size=10)):
        used.observe(p_draft, entropy)
    data.draw(st.sampled_from([used.reset, used.asked]))()
    fresh = ALL[name]()
    for p_draft, entropy in data.draw(st.lists(tokens, max_size=30)):
        assert used.observe(p_draft, entropy) == fresh.observe(p_draft, entropy)


@pytest.mark.parametrize("name", ["dual", "sequence", "token", "entropy", "length"])
def test_the_ones_that_do_not_learn_take_no_notice_of_verdicts_and_costs(name: str) -> None:
    told, left_alone = ALL[name](), ALL[name]()
    for i in range(60):
        p_draft = (i * 37 % 100) / 100
        told.decided(i % 3, i % 2 == 0)
        told.adopt(Costs(0.01 * i, 0.1, 0.05))
        assert told.observe(p_draft, p_draft) == left_alone.observe(p_draft, p_draft)


@pytest.mark.parametrize("name", ALL)
def test_more_verdicts_than_tokens_do_no_harm(name: str) -> None:
    trigger = ALL[name]()
    for accepted, rejected in ((0, True), (5, False), (5, True), (0, False)):
        trigger.decided(accepted, rejected)
        trigger.observe(0.9, 0.1)
        trigger.decided(100, rejected)
        trigger.decided(0, True)
    assert trigger.observe(0.0, 9.0) in {None, "sequence", "token", "entropy", "length", "gain"}
