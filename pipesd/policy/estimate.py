"""What the link and the drafting cost, from samples: a line through noisy times, and the figures that a run goes by.

A message of n tokens takes α + β·n one way (PipeSD, section 3), so sizes and times lie about a line. Measured times are
never too short but often far too long (a lost packet, a busy processor), hence the line is a robust one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesd.policy.token_batches import LONGEST_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEWEST_SIZES = 3  # distinct ones, for a slope
FEWEST_SAMPLES = 5
CHANGE = 0.2  # share by which conditions are others: all three δ of the paper, as a reproduction has them
SPREAD = 2.0  # the largest size over the smallest, for a slope
MADN = 1.4826  # median absolute deviation to standard deviation, in normal noise
HUBER = 1.345  # standard deviations; beyond, a sample pulls no harder than there (Huber's usual choice)
OUTLIER = 8.0  # standard deviations; beyond, a sample is left out
RESOLUTION = 0.01  # share of the median time that is no outlier however calm the rest
MOST_ROUNDS = 20
LARGEST = 1e15
GROUPS = 100  # points that the first, quadratic look at the samples goes through


class PlanFigures(NamedTuple):
    """What the planner of token batches takes, in its order; all finite, at least 0, the gap at most α."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run knows of its conditions at one moment; None is not known yet. No figure is negative or NaN."""

    alpha_s: float | None = None  # one-way start-up of the link
    beta_s: float | None = None  # the uplink's time for one more token; 0 where `beta_is_zero`
    gamma_s: float | None = None  # drafting one token
    gap_s: float | None = None  # what a message occupies of the link beside its tokens, at most alpha_s
    rtt_s: float | None = None  # a message and its answer as they were sent, without the cloud's own time
    tpt_s: float | None = None  # time per output token
    pass_s: float | None = None  # the cloud's own time for a verification
    beta_is_zero: bool = False  # β was looked for, cannot be told from 0 and is little at most
    samples: int = 0  # round trips that the link's figures rest on
    passes: tuple[tuple[int, float], ...] = ()  # the last verifications: draft tokens, and the cloud's own time

    @property
    def alone_s(self) -> float | None:
        """The cloud's own time for a pass without draft tokens, which is what the cloud alone takes for a token: by the
        line through the medians of the smallest and the largest third of the verifications, at least half of what small
        ones take. None without any. It is computed at each look: few need it."""
        ordered = sorted(self.passes)
        if not ordered:
            return None
        third = max(1, len(ordered) // 3)
        least, most = ordered[:third], ordered[-third:]
        few, many = middle([tokens for tokens, _ in least]), middle([tokens for tokens, _ in most])
        small_s, large_s = (
            middle(sorted([took_s for _, took_s in least])),
            middle(sorted([took_s for _, took_s in most])),
        )
        slope_s = max(0.0, (large_s - small_s) / (many - few)) if many - few >= 2 else 0.0
        return max(small_s - slope_s * few, small_s / 2)

    def figures(self) -> dict[str, Any]:
        """All of it by name, without the verifications one by one."""
        return {
            "alpha_s": self.alpha_s, "beta_s": self.beta_s, "gamma_s": self.gamma_s, "gap_s": self.gap_s,
            "rtt_s": self.rtt_s, "tpt_s": self.tpt_s, "pass_s": self.pass_s, "alone_s": self.alone_s,
            "beta_is_zero": self.beta_is_zero, "samples": self.samples,
        }  # fmt: skip

    def plan_figures(self) -> PlanFigures | None:
        """What a plan is made of, or None while α or γ is not known. An unknown β counts as 0, an unknown gap as α."""
        if self.alpha_s is None or self.gamma_s is None:
            return None
        gap_s = self.alpha_s if self.gap_s is None else min(self.gap_s, self.alpha_s)
        return PlanFigures(self.alpha_s, self.beta_s or 0.0, self.gamma_s, gap_s)


# A difference below these is none, whatever its share: it moves no plan (s).
FLOORS_S = {"alpha": 5e-4, "beta": 5e-5, "gamma": 5e-5, "gap": 1e-4, "tpt": 5e-4}


def changed(old: Estimate, new: Estimate, share: float = CHANGE) -> frozenset[str]:
    """Which of `alpha beta gamma gap tpt` differ by more than `share` of the old value (PipeSD, appendix D) and by more
    than FLOORS_S. A figure known for the first time counts, one no longer known does not."""
    pairs = (
        ("alpha", old.alpha_s, new.alpha_s), ("beta", old.beta_s, new.beta_s), ("gamma", old.gamma_s, new.gamma_s),
        ("gap", old.gap_s, new.gap_s), ("tpt", old.tpt_s, new.tpt_s),
    )  # fmt: skip
    names = set()
    for name, before, now in pairs:
        if now is None or now == before:
            continue
        if before is None or abs(now - before) > max(share * before, FLOORS_S[name]):
            names.add(name)
    return frozenset(names)


class LineFit(NamedTuple):
    """time = intercept + slope · size, with 95 % intervals; all at least 0 (s, s per unit of size).

    Without samples intercept and slope are 0 with nothing known above them: the upper ends are infinite.
    """

    intercept_s: float
    slope_s: float
    intercept_low_s: float
    intercept_high_s: float
    slope_low_s: float
    slope_high_s: float
    r2: float  # share of the variance that the line explains, outliers apart; 0 where there is no variance
    slope_half_s: float  # of the slope's interval before it was cut off at 0; infinite where there was none
    slope_known: bool  # the slope can be told from 0
    spread_enough: bool  # samples and sizes suffice for a slope
    samples: int  # used
    outliers: int  # left out as far too long or short
    dropped: int  # negative, NaN or infinite: no measurements


def fit_line(sizes: Sequence[float], times_s: Sequence[float], lags_s: Sequence[float] | None = None) -> LineFit:
    """The line through times (s) over sizes (any unit), robust to a quarter of the samples being far off.

    Siegel's repeated medians give a first line; samples beyond 8 of its standard deviations (by the median absolute
    deviation) are left out, Huber's M-estimate goes through the rest. Intervals take each sample's own deviation, so
    that noise may grow with the size; they assume that samples do not depend on each other. `lags_s` tells for each
    time by how much it may be off to either side (s), any amount up to that being as likely: it then weighs less.

    For a slope there must be 5 samples of 3 distinct sizes, the largest at least twice the smallest (`spread_enough`).
    Of fewer sizes the intercept is the middle of all times, and may be anything below.
    Where the best slope would be negative it is 0, and likewise the intercept; the other is fitted anew. Samples that
    are negative, NaN or above 1e9 s (or 1e15 in size) are dropped.
    """
    import numpy as np  # here, because this module is on the way to a command's flags

    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    lag = np.zeros_like(x) if lags_s is None else np.asarray(lags_s, dtype=np.float64)
    assert x.ndim == 1 and x.shape == y.shape == lag.shape, f"{x.shape} sizes, {y.shape} times, {lag.shape} lags"
    good = (x >= 0) & (x <= LARGEST) & (y >= 0) & (y <= LONGEST_S) & (lag >= 0) & (lag <= LONGEST_S)
    given, dropped = len(x), int(len(x) - good.sum())
    x, y, lag = x[good], y[good], lag[good]
    if len(x) == 0:
        return LineFit(0.0, 0.0, 0.0, math.inf, 0.0, math.inf, 0.0, math.inf, False, False, 0, 0, dropped)

    order = np.lexsort((lag, y, x))
    x, y, lag = x[order], y[order], lag[order]
    unit = float(x[-1]) or 1.0  # sizes from 0 to 1 keep the arithmetic well conditioned
    x = x / unit
    slope = _first_slope(x, y)
    resolution = RESOLUTION * _median(y) / OUTLIER
    for _ in range(2):  # outliers move the first middle and make the first deviation too large
        residual = y - slope * x
        residual = np.abs(residual - _median(residual))
        deviation = _deviations(residual, lag, resolution)
        kept = residual <= OUTLIER * deviation
        x, y, lag, deviation = x[kept], y[kept], lag[kept], deviation[kept]

    least, most = float(x[0]), float(x[-1])
    distinct = 1 + int((x[1:] != x[:-1]).sum())
    enough = len(x) >= FEWEST_SAMPLES and most >= SPREAD * least and distinct >= FEWEST_SIZES
    ones = np.ones_like(x)
    if distinct < FEWEST_SIZES or most - least < 1e-4:  # no slope can be had, but it is no steeper than from the origin
        (intercept,), (half,) = _huber([ones], y, deviation)
        slope, low, slope_low, slope_half = 0.0, 0.0, -math.inf, math.inf
        high, slope_high = intercept + half, (intercept + half) / least if least else math.inf
    else:
        (intercept, slope), (half, slope_half) = _huber([ones, x], y, deviation)
        low, high, slope_low, slope_high = intercept - half, intercept + half, slope - slope_half, slope + slope_half
        if slope < 0:
            (intercept,), _ = _huber([ones], y, deviation)
            slope = 0.0
        elif intercept < 0:
            (slope,), _ = _huber([x], y, deviation)
            intercept = 0.0
    deviations, residuals = y - y.mean(), y - intercept - slope * x
    total, left = float(deviations @ deviations), float(residuals @ residuals)
    return LineFit(
        intercept_s=intercept,
        slope_s=slope / unit,
        intercept_low_s=min(max(low, 0.0), intercept),
        intercept_high_s=max(high, intercept),
        slope_low_s=min(max(slope_low, 0.0), slope) / unit,
        slope_high_s=max(slope_high, slope) / unit,
        r2=min(max(1 - left / total, 0.0), 1.0) if total > 0 else 0.0,
        slope_half_s=slope_half / unit,
        slope_known=enough and slope_low > 0,
        spread_enough=enough,
        samples=len(x),
        outliers=given - dropped - len(x),
        dropped=dropped,
    )


def _deviations(residual: Array, lag: Array, least: float) -> Array:
    """Standard deviation of each sample: what all have in common, and that of being anywhere within its lag."""
    import numpy as np

    scale = MADN * _median(residual) * (1 + 5 / len(residual))  # of few, the median deviation is too small
    of_lags = lag * lag / 3
    own = max(scale * scale - _median(of_lags), 0.01 * scale * scale, least * least, 1e-24)
    deviation: Array = np.sqrt(own + of_lags)
    return deviation


def _inverse(matrix: Array) -> Array:
    import numpy as np

    inverse: Array
    if len(matrix) == 1:
        inverse = np.array([[1 / matrix.item()]])
        return inverse
    (a, b), (_, d) = matrix.tolist()
    determinant = a * d - b * b
    if determinant > 1e-12 * a * d:
        inverse = np.array([[d, -b], [-b, a]], dtype=np.float64) / np.float64(determinant)
    else:
        inverse = np.linalg.pinv(matrix).astype(np.float64)
    return inverse


def _first_slope(x: Array, y: Array) -> float:
    """By repeated medians: for each point the median slope to the others, and the median of these. The samples are in
    order of size; many are first put into groups of neighbours, all of as many."""
    import numpy as np

    px, py = x, y
    if len(x) > GROUPS:
        size = len(x) // GROUPS
        groups = np.linspace(0, len(x) - 1, GROUPS * size).astype(int).reshape(GROUPS, size)  # some are passed over
        px, py = np.median(x[groups], axis=1), np.median(y[groups], axis=1)
    dx = px[:, None] - px[None, :]
    slopes = np.full_like(dx, np.nan)
    np.divide(py[:, None] - py[None, :], dx, out=slopes, where=np.abs(dx) > 1e-9)
    slopes.sort(axis=1)  # what has no slope, NaN, comes last
    counts = np.isfinite(slopes).sum(axis=1)
    rows, counts = np.flatnonzero(counts), counts[counts > 0]
    each = (slopes[rows, (counts - 1) // 2] + slopes[rows, counts // 2]) / 2
    return _median(each) if len(each) else 0.0


def _huber(columns: Sequence[Array], y: Array, deviation: Array) -> tuple[list[float], list[float]]:
    """Huber's M-estimate of the columns' factors, and the half-widths of their 95 % intervals."""
    import numpy as np

    design = np.stack(columns, axis=1)
    base = 1 / (deviation * deviation)
    weight = base
    factors = np.zeros(len(columns))
    for _ in range(MOST_ROUNDS):
        weighted = design * weight[:, None]
        before, factors = factors, _inverse(weighted.T @ design) @ (weighted.T @ y)
        residual = y - design @ factors
        weight = base * np.minimum(1.0, HUBER * deviation / np.maximum(np.abs(residual), 1e-300))
        if np.all(np.abs(design @ (factors - before)) <= 1e-4 * deviation):
            break
    freedom = len(y) - len(columns)
    if freedom < 1:
        return [float(factor) for factor in factors], [math.inf] * len(columns)
    whole = _inverse((design * base[:, None]).T @ design)
    leverage = np.minimum(np.einsum("ij,jk,ik->i", design, whole, design) * base, 0.999)
    score = design * (residual * weight / (1 - leverage))[:, None]  # HC3: as if the sample had had no say in the fit
    moving = np.where(np.abs(residual) <= HUBER * deviation, base, 0.05 * base)  # what follows the line; never singular
    bread = _inverse((design * moving[:, None]).T @ design)
    variance = np.diag(bread @ (score.T @ score) @ bread)
    half = student_95(freedom) * (1 + 1 / freedom) * np.sqrt(np.maximum(variance, 0.0))  # few show too little variance
    return [float(factor) for factor in factors], [float(width) for width in half]


def _median(values: Array) -> float:
    """As numpy's, whose care for axes and NaN costs five times what it does."""
    import numpy as np

    return middle(np.sort(values).tolist())


def middle(ordered: Sequence[float]) -> float:
    """The median of what is in order."""
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def student_95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, within 1 %; `freedom` is at least 1 (an expansion by 1 / freedom)."""
    if freedom < 3:
        return (12.7062, 4.3027)[freedom - 1]
    z, v = 1.959964, freedom
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + terms[0] / v + terms[1] / v**2 + terms[2] / v**3
