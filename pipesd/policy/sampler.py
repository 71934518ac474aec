"""What is drawn at each position of one generation: its options and its seed, at work on rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipesd.policy.noise import Stream, race, stream_key
from pipesd.policy.sampling import Law, Sampling, adjusted, warped


class Choice(NamedTuple):
    """What was drawn, and the `margin` by which it was first: 1 - its time ÷ the runner-up's, from 0 (a tie) to 1 (no
    other could win). At temperature 0 the same of the probabilities: 1 - the second highest ÷ the highest. `law` is
    what it was drawn from, None at temperature 0."""

    id: int
    margin: float
    law: Law | None


class Sampler:
    """The same in draft model and target: a pure function of logits, position and prefix."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self.seed = seed

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        """What stands at `position` (absolute) behind `prefix`; None where the highest logit is not finite.

        `row`: float32 logits (n,), which stay as they are.
        """
        import numpy as np

        row = adjusted(row, self.sampling, prefix)
        top = float(row.max())
        if not math.isfinite(top):
            return None
        if self.sampling.greedy:
            return Choice(int(row.argmax()), 0.0, None)
        law = warped(row, self.sampling)
        token, first_s, second_s = race(law.weights, stream_key(self.seed, position, Stream.CHOICE), law.ids)
        return Choice(token, 1.0 - first_s / second_s, law)
