"""Ratios of what was measured in turn, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLED = 10_000
# The 97.5 % point of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Ratio(NamedTuple):
    """A ratio and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "no difference" if self.low <= 1.0 <= self.high else f"{self.mean:.2f} times"


def paired_ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Ratio:
    """The geometric mean of `above[i] / below[i]` over the repetitions i, with a percentile bootstrap over them.

    Both have one positive number a repetition, taken in the same repetition. Of few repetitions a plain percentile
    interval is too narrow, so it is widened as Student's is against the normal one (Hesterberg 2015, "What teachers
    should know about the bootstrap"). One repetition alone has no interval: its bounds are nan.
    """
    logs = np.log(np.asarray(above, float) / np.asarray(below, float))
    count = len(logs)
    if count < 2:
        return Ratio(float(np.exp(logs.mean())), math.nan, math.nan)
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLED, count))
    outside = NormalDist().cdf(-math.sqrt(count / (count - 1)) * STUDENT[min(count - 1, len(STUDENT)) - 1])
    low, high = np.quantile(logs[drawn].mean(axis=1), (outside, 1 - outside))
    return Ratio(*(float(np.exp(value)) for value in (logs.mean(), low, high)))
