"""Statistics of draws: how well counts fit a law, and samplers whose rows are a few fixed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from pipesd.policy.noise import Stream
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Law

Weights = npt.NDArray[np.float64]


def misfit(counts: Sequence[int] | Weights, law: Weights) -> float:
    """The chi-square test's p-value of counts of ids under `law`; ids that are expected fewer than 5 times are taken
    together. An id that cannot occur but did gives 0."""
    seen = np.asarray(counts, float)
    expected = law * seen.sum()
    if seen[law == 0].any():
        return 0.0
    few = expected < 5
    seen = np.append(seen[~few], seen[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] == 0:
        seen, expected = seen[:-1], expected[:-1]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, max(1, len(seen) - 1))) if len(seen) > 1 else 1.0


def dense(law: Law, width: int) -> Weights:
    """The probabilities of ids 0 to `width` - 1."""
    found = np.zeros(width)
    found[slice(None) if law.ids is None else law.ids] = law.weights.astype(float) / law.total
    return found


class TableSampler(Sampler):
    """A sampler that makes each row's law once: for rows that are told apart by being the same array."""

    _laws: dict[int, tuple[Any, Law | None]]

    def law(self, row: Any, prefix: Sequence[int]) -> Law | None:
        known = self.__dict__.setdefault("_laws", {})
        if id(row) not in known:
            known[id(row)] = row, super().law(row, prefix)
        law: Law | None = known[id(row)][1]
        return law


class NearOne(Sampler):
    """Every number is the highest that there is."""

    def unit(self, position: int, stream: Stream, number: int = 0) -> float:
        return 1 - 2.0**-53

    def units(self, position: int, stream: Stream, numbers: range) -> Any:
        return np.full(len(numbers), 1 - 2.0**-53)
