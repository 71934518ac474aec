"""Ratios of what was measured in turn, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLED = 10_000


class Ratio(NamedTuple):
    """A ratio and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "no difference" if self.low <= 1.0 <= self.high else f"{self.mean:.2f} times"

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Ratio:
    """The geometric mean of `above[i] / below[i]` over the repetitions i, with a percentile bootstrap over them.

    Both have one positive number a repetition, taken in the same repetition. One repetition alone has no interval: its
    bounds are nan.
    """
    logs = np.log(np.asarray(above, float) / np.asarray(below, float))
    if len(logs) < 2:
        return Ratio(float(np.exp(logs.mean())), float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLED, len(logs)))
    low, high = np.quantile(logs[drawn].mean(axis=1), (0.025, 0.975))
    return Ratio(*(float(np.exp(value)) for value in (logs.mean(), low, high)))
