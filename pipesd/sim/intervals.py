"""How sure a figure of few repetitions is: 95 % intervals by the percentile bootstrap, widened for few of them.

Of few repetitions a plain percentile interval is too narrow; it is widened as Student's interval is against the normal
one (Hesterberg 2015, "What teachers should know about the bootstrap").
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

RESAMPLED = 10_000
# The 97.5 % point of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def bounds(resampled: Any, freedom: float) -> tuple[float, float]:
    """The interval of a figure, from its values over resampled repetitions; `freedom`: degrees of it, at least 1, which
    for n repetitions are n - 1."""
    import numpy as np

    student = STUDENT[min(int(freedom), len(STUDENT)) - 1]
    outside = NormalDist().cdf(-math.sqrt((freedom + 1.0) / freedom) * student)
    low, high = np.quantile(resampled, (outside, 1.0 - outside))
    return float(low), float(high)


def mean_bounds(values: Any) -> tuple[float, float]:
    """The interval of the mean of `values[i, j]`, repetition j of subject i, over other subjects and other repetitions
    like these: both are resampled, each by itself, as a repetition is the same one for all subjects (Owen 2007, "The
    pigeonhole bootstrap"). A level with one member is not resampled. Degrees of freedom of the two together are
    Satterthwaite's. nan where there is one value alone."""
    import numpy as np

    values = np.asarray(values, float)
    if values.size < 2:
        return math.nan, math.nan
    source = np.random.default_rng(0)
    # how often each subject, and each repetition, was drawn
    drawn = [source.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLED) / n for n in values.shape]
    resampled = np.einsum("ri,ij,rj->r", drawn[0], values, drawn[1], optimize=True)
    parts = [
        (float(np.var(values.mean(axis=1 - axis), ddof=1)) / n, n - 1) for axis, n in enumerate(values.shape) if n > 1
    ]
    below = sum(part**2 / freedom for part, freedom in parts)
    together = sum(part for part, _ in parts) ** 2 / below if below > 0.0 else 0.0
    return bounds(resampled, max(together, min(freedom for _, freedom in parts)))
