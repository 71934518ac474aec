"""The edge's side of rejection sampling: what draft tokens were drawn from, and what stands in a refused one's place.

With p the target's distribution and q the draft's, drafted x has the probability q(x), and the target accepts it with
probability min(1, p(x) / q̂(x)), q̂(x) being q(x) rounded up to a float16, as it was sent. What is drawn after a refusal
has the residual r(x) = p(x) - q(x)·min(1, p(x) / q̂(x)) for its weights, so that the output has the law p (Leviathan,
Kalman and Matias, 2023, with q̂ = q). The edge knows q, the target says of p what it takes:

- all of it, or its most probable ids (PicoSpec), which moves no more mass than p has elsewhere;
- or ids y that it drew from p. The edge takes the first that passes with probability r(y) / p(y): then it has the law
  of the residual, in one divided by the residual's sum draws on average (AsymSpec's proposal recovery).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from pipesd.policy.accept import ToldLaw
from pipesd.policy.noise import Stream, race, stream_key
from pipesd.policy.sampler import Choice, Sampler
from pipesd.policy.sampling import Law, Method

# The last of so many is taken, whatever it is. Where the residual's sum is R a draft token is refused with probability
# R, and then all N of them are with (1 - R)**N: the law of a place is off by R·(1 - R)**N, at most 1 / (e·N) = 2.3e-5.
MOST_PROPOSALS = 1 << 14


class Proposals:
    """The drafts of one generation, each with its distribution until its position is decided."""

    def __init__(self, sampler: Sampler) -> None:
        assert sampler.sampling.tests
        self._sampler = sampler
        self._laws: dict[int, Law] = {}
        self._error_bound = 0.0

    @property
    def error_bound(self) -> float:
        """With PicoSpec, of the places where a token was refused so far: the largest share of the target's distribution
        that was left out. Before the test, the law of each of these places differed from the target's by at most that
        (total variation). Of other places it says nothing. Else 0."""
        return self._error_bound

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        """As that of a sampler, which see; what the token is drawn from is kept."""
        choice = self._sampler.choose(row, position, prefix)
        self._laws.pop(position, None)
        if choice is not None and choice.law is not None:
            self._laws[position] = choice.law
        return choice

    def p_sent(self, position: int, token: int) -> float:
        """The probability to send with a token that was drafted at `position`: 1 where nothing could be drawn, so that
        it was taken for certain."""
        import numpy as np

        law = self._laws.setdefault(position, Law(np.array([token]), np.ones(1, np.float32), 1.0))
        return rounded_up(law.probability(token))

    def forget(self, position: int) -> None:
        """Nothing is drafted from `position` on any more."""
        for known in [known for known in self._laws if known >= position]:
            del self._laws[known]

    def settle(self, position: int) -> None:
        """Everything below `position` is decided."""
        for known in [known for known in self._laws if known < position]:
            del self._laws[known]

    def redraw(self, position: int, refused: ToldLaw) -> int | None:
        """The id that stands at `position`, where the drafted one was refused; None: none of the proposals is taken, so
        `refused.end` are tried. The same question has the same answer."""
        law = self._laws[position]
        if refused.first is None:
            return self._from_residual(law, position, refused.pairs)
        for number, (token, p) in enumerate(refused.pairs, refused.first):
            share = _residual(p, law.probability(token)) / p if p > 0 else 0.0
            if self._sampler.unit(position, Stream.ANSWER, number) < share or number + 1 >= MOST_PROPOSALS:
                return token
        return None

    def _from_residual(self, law: Law, position: int, pairs: Sequence[tuple[int, float]]) -> int:
        import numpy as np

        if self._sampler.sampling.method is Method.PICOSPEC and len(pairs) == self._sampler.sampling.top_mass:
            self._error_bound = max(self._error_bound, 1.0 - math.fsum(p for _, p in pairs))
        pairs = sorted(pairs)
        ids = np.array([token for token, _ in pairs], np.int64)
        p = [p for _, p in pairs]
        residual = [_residual(p, law.probability(token)) for token, p in pairs]
        key = stream_key(self._sampler.seed, position, Stream.RESIDUAL)
        # all zero: p is q but for rounding, and what was refused would be what is drawn
        weights = np.array(residual if any(residual) else p)
        return race((weights / weights.max()).astype(np.float32), key, ids)[0]  # as they are all may be 0 in float32


def rounded_up(q: float) -> float:
    """The least float16 that is at least `q`, a probability: what is sent, and what the target tests with."""
    number: float = struct.unpack("<e", struct.pack("<e", q))[0]
    if number >= q:
        return number
    bits: int = struct.unpack("<H", struct.pack("<e", q))[0]
    return float(struct.unpack("<e", struct.pack("<H", bits + 1))[0])


def _residual(p: float, q: float) -> float:
    """p - q·min(1, p / q̂), at least 0."""
    if q == 0:
        return p
    return max(0.0, p - q * min(1.0, p / rounded_up(q)))
