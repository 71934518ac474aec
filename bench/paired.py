"""Ratios of what was measured in turn, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesd.sim.intervals import mean_bounds


class Ratio(NamedTuple):
    """A ratio and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.2f} times, measured once: no interval"
        return "no difference" if self.low <= 1.0 <= self.high else f"{self.mean:.2f} times"


def paired_ratio(
    above: Sequence[float] | Sequence[Sequence[float]], below: Sequence[float] | Sequence[Sequence[float]]
) -> Ratio:
    """The geometric mean of `above[i] / below[i]` over the repetitions i, with a bootstrap over them; or of
    `above[i][j] / below[i][j]` over subjects i and repetitions j, with one over both.

    All are positive, and what is divided was taken in the same repetition. One repetition alone has no interval: its
    bounds are nan.
    """
    logs = np.log(np.asarray(above, float) / np.asarray(below, float))
    logs = logs.reshape(len(logs), -1)
    return Ratio(*(float(np.exp(value)) for value in (logs.mean(), *mean_bounds(logs))))
