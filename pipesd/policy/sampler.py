"""What is drawn at each position of one generation: its options and its seed, at work on rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pipesd.policy.noise import Stream, race, stream_key, unit, units
from pipesd.policy.penalties import Counts
from pipesd.policy.sampling import Law, Sampling, adjusted, warped


class Choice(NamedTuple):
    """What was drawn, and the `margin` by which it was first: 1 - its time ÷ the runner-up's, from 0 (a tie) to 1 (no
    other could win). At temperature 0 the same of the probabilities: 1 - the second highest ÷ the highest. `law` is
    what it was drawn from, None at temperature 0."""

    id: int
    margin: float
    law: Law | None


class Chooser(Protocol):
    """What draws a token from a row of logits."""

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        """What stands at `position` behind `prefix`, see `Sampler`."""


class Sampler:
    """The same in draft model and target: a pure function of logits, position and prefix.

    `margins`: whether the margin is wanted at temperature 0 too, where it takes a second pass over each row; without it
    it is 0 there. For one thread at a time: what the last prefix held is remembered.
    """

    def __init__(self, sampling: Sampling, seed: int, *, margins: bool = False) -> None:
        self.sampling = sampling
        self.seed = seed
        self._margins = margins
        self._counts = Counts() if sampling.penalised else None

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        """What stands at `position` (absolute) behind `prefix`; None where the highest logit is not finite.

        `row`: float32 logits (n,), which stay as they are. On a tie the lowest id.
        """
        if self.sampling.greedy:
            return self._highest(adjusted(row, self.sampling, prefix, self._counts))
        law = self.law(row, prefix)
        return None if law is None else self.drawn(law, position)

    def law(self, row: Any, prefix: Sequence[int]) -> Law | None:
        """What is drawn from behind `prefix`, at a temperature above 0; None where the highest logit is not finite."""
        row = adjusted(row, self.sampling, prefix, self._counts)
        top = float(row.max())
        return warped(row, self.sampling, top) if math.isfinite(top) else None

    def drawn(self, law: Law, position: int) -> Choice:
        """The draw from `law` that the noise at `position` makes."""
        token, first, second = race(law.weights, stream_key(self.seed, position, Stream.CHOICE), law.ids)
        return Choice(token, 1.0 - first / second, law)

    def occurring(self, prefix: Sequence[int]) -> tuple[Any, Any]:
        """The ids that the penalties strike behind `prefix`, and how often each occurs: int64 and float32 arrays, to be
        read before another prefix is asked for."""
        assert self._counts is not None, "no penalties, nothing is counted"
        return self._counts.of(prefix)

    def unit(self, position: int, stream: Stream, number: int = 0) -> float:
        """Number `number` of a stream of noise at `position`: even over (0, 1)."""
        return unit(stream_key(self.seed, position, stream), number)

    def units(self, position: int, stream: Stream, numbers: range) -> Any:
        """Those of several `numbers`: float64 (n,)."""
        import numpy as np

        return units(stream_key(self.seed, position, stream), np.arange(numbers.start, numbers.stop, dtype=np.uint64))

    def _highest(self, row: Any) -> Choice | None:
        token = int(row.argmax())  # of the first NaN, if there is one
        top = float(row[token])
        if not math.isfinite(top):
            return None
        if not self._margins:
            return Choice(token, 0.0, None)
        second = max((float(part.max()) for part in (row[:token], row[token + 1 :]) if len(part)), default=-math.inf)
        return Choice(token, -math.expm1(second - top), None)
