"""When the edge asks for verification (NAV): a trigger sees each draft token and says whether to ask now.

The token that it asks at is part of the draft that is verified, low as its confidence may be. The confidence is the
draft model's own probability of the token at temperature 1, which no sampling option of a request changes; or, where
the session asks for it, the margin by which the token was ahead when it was drawn, which they do change. A confidence
that is none (NaN, below 0, above 1) counts as 0: a guess that nothing is known of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

from pipesd._kernels import confidence as kernel
from pipesd.errors import UsageError

HIGHEST_ENTROPY_ROOT = 100.0  # √nats; that of a vocabulary of a million ids is below 4


class Costs(NamedTuple):
    """What things take at present, in s."""

    gamma_s: float  # drafting one token
    round_s: float  # one round of verification, beyond the drafting
    token_s: float  # the time per output token: what one more accepted token is worth


class Trigger(Protocol):
    """The rule by which verification is asked for. Where drafting goes on meanwhile several drafts may be undecided."""

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        """One more draft token, with the confidence in it and the entropy (nats) of the draft model's distribution at
        temperature 1: the name of the rule that asks for verification behind it, or None. After a name a new draft
        begins."""

    def asked(self) -> None:
        """Verification was asked for, by this rule or as nothing else was left to do: a new draft begins."""

    def reset(self) -> None:
        """The draft was dropped: what is not decided is forgotten. What was learnt, and the thresholds, stay."""

    def decided(self, accepted: int, rejected: bool) -> None:
        """A verdict: the oldest `accepted` of the undecided tokens were right; if `rejected`, the next one was wrong
        and all behind it are gone. What goes beyond the tokens observed is ignored."""

    def adopt(self, costs: Costs) -> None:
        """What things take at present; at a round's end."""


class _Unlearning:
    """What the triggers share that learn nothing."""

    def asked(self) -> None:
        self.reset()

    def reset(self) -> None:
        pass

    def decided(self, accepted: int, rejected: bool) -> None:
        pass

    def adopt(self, costs: Costs) -> None:
        pass


class _Threshold:
    """A threshold of a trigger: checked whenever it is set, and kept under its name with a `_` before it, where
    `observe` reads it as it is."""

    def __init__(self, high: float = 1.0) -> None:
        self._high = high

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trigger: object, owner: type) -> float:
        value: float = getattr(trigger, f"_{self._name}")
        return value

    def __set__(self, trigger: object, value: float) -> None:
        setattr(trigger, f"_{self._name}", checked_threshold(self._name, value, self._high))


class DualThreshold(_Unlearning):
    """Asks when the cumulative confidence or the token's own is low (PipeSD, section 3.3).

    C1, the product of the probabilities since the last time, starts at 1. With P the probability of a new token,
    C1* = C1·P; if C1* ≤ `sequence_threshold` the rule is "sequence", else if P ≤ `token_threshold` it is "token". So
    when both hold it is "sequence", as in the paper's order; and as C1* ≤ P, "token" is only ever said if the token
    threshold is the higher one. When a rule asks C1 is 1 again, else it is C1*.

    A threshold of 1 asks at every token. One of 0 asks only where the confidence is 0, which a product of some hundred
    tiny probabilities becomes too, below 5e-324. Both may be set at any time, and C1 goes on. They are numbers from 0
    to 1, numpy's included; UsageError names the one that is not, that is NaN or bool, at construction and when set.
    """

    sequence_threshold = _Threshold()  # R1
    token_threshold = _Threshold()  # R2
    _sequence_threshold: float
    _token_threshold: float

    def __init__(self, sequence_threshold: float, token_threshold: float) -> None:
        self.sequence_threshold = sequence_threshold
        self.token_threshold = token_threshold
        self._confidence: float = 1.0
        self._observe: Callable[[float, float, float, float], tuple[float, int]] = kernel.OBSERVE.at_hand()

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        self._confidence, rule = self._observe(
            confidence(p_draft), self._confidence, self._sequence_threshold, self._token_threshold
        )
        return None if rule == 0 else "sequence" if rule == kernel.SEQUENCE else "token"

    def reset(self) -> None:
        self._confidence = 1.0
        self._observe = kernel.OBSERVE.at_hand()  # it may have been compiled since


class SequenceThreshold(DualThreshold):
    """Asks, by "sequence", when the product of the probabilities since the last time is at most `sequence_threshold`.

    It is `DualThreshold` with a token threshold of 0, which adds nothing: where P is 0, so is the product.
    """

    def __init__(self, sequence_threshold: float) -> None:
        super().__init__(sequence_threshold, 0.0)


class TokenThreshold(_Unlearning):
    """Asks, by "token", when the probability of the token is at most `token_threshold` (HSL; Hao et al., 2024).

    Thresholds are what they are for `DualThreshold`.
    """

    token_threshold = _Threshold()  # R2
    _token_threshold: float

    def __init__(self, token_threshold: float) -> None:
        self.token_threshold = token_threshold

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        return "token" if confidence(p_draft) <= self._token_threshold else None


class EntropyThreshold(_Unlearning):
    """Asks, by "entropy", when the root of the distribution's entropy (nats) is above `entropy_threshold` (SVIP,
    arXiv 2411.18462). The threshold is 0 to 100, else UsageError; an entropy that is NaN is above any."""

    entropy_threshold = _Threshold(HIGHEST_ENTROPY_ROOT)  # h, in nats to the power of one half
    _entropy_threshold: float

    def __init__(self, entropy_threshold: float) -> None:
        self.entropy_threshold = entropy_threshold

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        return None if math.sqrt(max(entropy, 0.0)) <= self._entropy_threshold else "entropy"


class FixedLength(_Unlearning):
    """Asks, by "length", after every `length` draft tokens (the papers' vanilla speculative decoding)."""

    def __init__(self, length: int) -> None:
        self.draft_length = length
        self._seen = 0

    @property
    def draft_length(self) -> int:
        """Tokens of a draft. What it is set to is checked as `length` is."""
        return self._length

    @draft_length.setter
    def draft_length(self, value: int) -> None:
        self._length = _checked_length(value)

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        self._seen += 1
        if self._seen < self._length:
            return None
        self._seen = 0
        return "length"

    def reset(self) -> None:
        self._seen = 0


def confidence(p_draft: float) -> float:
    """The probability as a float, 0 for what is none."""
    return float(p_draft) if 0.0 <= p_draft <= 1.0 else 0.0


def _checked_length(length: Any) -> int:
    whole = isinstance(length, Integral) and not isinstance(length, bool)
    if not whole or length < 1:
        raise UsageError(f"length: got {length!r}, wanted a whole number of tokens, at least 1")
    return int(length)


def checked_threshold(name: str, value: Any, high: float = 1.0) -> float:
    """The threshold as a float. Raises UsageError that names it if it is not a number from 0 to `high`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not 0 <= value <= high:
        raise UsageError(f"{name}: got {value!r}, wanted a number, 0 to {high:g}")
    return float(value)
