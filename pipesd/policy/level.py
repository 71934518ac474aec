"""A figure that is measured over and over: what it is, under noise and outliers, and whether it has changed."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean

from pipesd.policy.estimate import MADN, middle

REMEMBERED = 100  # samples; PipeSD, appendix D, has as many token batches
RUN = 5  # samples off the band, to one side, are a change
RUN_AMONG_OUTLIERS = 7
OUTLIERS = 0.05  # share of samples
LONGEST_RUN = 40
BAND = 0.15  # share of the level; the band is at least so wide, to either side
PRECISE = 3  # samples, of which one may be far off
DEVIATIONS = 4.0  # of the samples, likewise


class Level:
    """A figure that stays as it is, under noise, until it changes: the mean of the samples in a band about the median.

    The band is the larger of 15 % of the median, 4 standard deviations (by the median absolute deviation) and a floor.
    So outliers and the slow first tokens of a draft do not count. When 5 samples lie above the band, or below, with at
    most one other among them, those older are forgotten; where more than 5 % lie off the band anyway, 7 samples with at
    most two others. A change that is taken back within the 100 samples doubles the run that the next one needs, up to
    40, so that what goes to and fro is noise in the end.
    """

    __slots__ = (
        "_floor_s",
        "_high",
        "_hits",
        "_last",
        "_least",
        "_low",
        "_misses",
        "_need",
        "_new",
        "_samples",
        "_value",
    )

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # value, by how much it may be off
        self._low, self._high = -math.inf, math.inf
        self._hits = 0  # of the run, the last samples: those above the band, or below it as a negative number
        self._misses = 0  # the others of the run
        self._least = RUN  # hits to be a change, for the outliers there are
        self._need = RUN  # the same, for the changes that were taken back
        self._last = 0  # the direction of the last change
        self._value: float | None = None  # None: to be computed
        self._new = 0  # samples since it was

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, value: float, half: float = 0.0) -> bool:
        """One more sample (s), known to lie within `half` of the value; returns whether conditions have changed."""
        self._samples.append((value, half))
        self._new += 1
        if value - half > self._high:
            side = 1
        elif value + half < self._low:
            side = -1
        elif self._hits == 0:
            return False
        else:
            side = 0
        if side * self._hits > 0:
            self._hits += side
            return abs(self._hits) >= max(self._least, self._need) and self._changed()
        if self._hits and self._misses < max(self._least, self._need) // 3:
            self._misses += 1
        else:
            self._hits, self._misses = side, 0
        return False

    def replace(self, samples: Iterable[tuple[float, float]]) -> None:
        """The same samples, seen in another way."""
        self._samples = deque(samples, maxlen=REMEMBERED)
        self._value = None

    @property
    def value(self) -> float | None:
        """The level (s), None without samples. It is computed anew where an eighth of the samples is, and does not
        follow a run before that is a change."""
        if self._samples and (self._value is None or 8 * self._new >= len(self._samples)):
            before, run = self._parts()
            self._value, self._new = self._settle(before if len(before) >= RUN else before + run), 0
        return self._value

    def _parts(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """The samples before the run, and the run."""
        samples = list(self._samples)
        cut = max(len(samples) - abs(self._hits) - self._misses, 0)
        return samples[:cut], samples[cut:]

    def _changed(self) -> bool:
        """Whether the run is off the band of what came before it, if that was enough for one; if so, only the run is
        kept."""
        before, run = self._parts()
        direction = 1 if self._hits > 0 else -1
        self._hits = self._misses = 0
        if len(before) < RUN:
            self._value = None
            return False
        self._settle(before)
        edge = self._high if direction > 0 else -self._low
        if sum(direction * value - half > edge for value, half in run) < max(self._least, self._need):
            return False
        if direction == -self._last and len(before) + len(run) < REMEMBERED:
            self._need = min(2 * self._need, LONGEST_RUN)
        else:
            self._need = max(self._need // 2, RUN)
        self._last = direction
        self._samples = deque(run, maxlen=REMEMBERED)
        self._value, self._new = self._settle(run), 0
        return True

    def _settle(self, samples: Sequence[tuple[float, float]]) -> float:
        """Sets the band by the samples, the more precise ones of them, and returns the mean of those within it, each
        weighing as it is precise. Vague ones show a change but tell no level where there are others: who drafts at a
        steady beat always looks too late by as much, so the mean of many is as far off as one.
        """
        halves = [half for _, half in samples]
        exact = not any(halves)
        if exact:
            values = sorted([value for value, _ in samples])
        else:
            halves.sort()
            best = halves[min(len(halves) // 4, PRECISE - 1)]
            most = 2 * best + self._floor_s  # about as precise as the best, be they few
            values = sorted([value for value, half in samples if half <= most])
        centre = middle(values)
        deviation = MADN * middle(sorted([abs(value - centre) for value in values])) * (1 + 5 / len(values))
        if not exact:  # without what comes of being anywhere within `half`
            deviation = math.sqrt(max(deviation**2 - middle(halves[: len(values)]) ** 2 / 3, deviation**2 / 100))
        width = max(BAND * centre, DEVIATIONS * deviation, self._floor_s)
        self._low, self._high = low, high = centre - width, centre + width
        if exact:
            within = values[bisect_left(values, low) : bisect_right(values, high)]
            self._least = RUN if len(within) >= (1 - OUTLIERS) * len(samples) else RUN_AMONG_OUTLIERS
            return fmean(within)
        inside = [sample for sample in samples if low - sample[1] <= sample[0] <= high + sample[1]]
        self._least = RUN if len(inside) >= (1 - OUTLIERS) * len(samples) else RUN_AMONG_OUTLIERS
        least = max(deviation, self._floor_s) ** 2
        total = weights = 0.0
        for value, half in inside:
            if half <= most:
                weight = 1 / (least + half * half / 3)
                total += weight * value
                weights += weight
        return total / weights
