"""How a token is drawn from logits: the options, and what they make of a row. One place for edge and cloud.

In the order of transformers: logit bias; repetition penalty, then presence and frequency penalty; temperature; top-k;
top-p; min-p. At temperature 0 the highest logit is taken behind bias and penalties, whatever else is set.

Each of the last three keeps what is at least some value, so ids that tie there are kept or left out together (in
transformers top-p keeps some of them). The most probable id is always kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from pipesd.config import GenerateConfig, checked
from pipesd.errors import UsageError
from pipesd.policy.penalties import Counts

_AS_GIVEN = (  # what a user gives, checked as there
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "top_mass", "logprobs",
)  # fmt: skip
LEAST_TEMPERATURE = 1e-30  # a float32; the highest logit wins at this one as at any lower
_LEAST_WEIGHT = 2.0**-126  # of an id that truncation keeps, the most probable one having 1
_LARGEST = 1024  # ids that are sorted at first
_STRIDES = 32


class Method(IntEnum):
    """How draft tokens are compared with the target's distribution; their numbers on the wire."""

    NOISE = 0  # both sides draw under the same noise, equal ids are accepted
    REJECTION = 1  # accepted with probability min(1, p / q), else drawn from the residual: exact
    PICOSPEC = 2  # the same with only the most probable ids of p in the residual: approximate


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of one generation, as both sides need them. Raises UsageError for impossible values.

    `top_k` 0, `top_p` 1 and `min_p` 0 truncate nothing; `top_p` 0 keeps the most probable id.

    `logit_bias` are pairs (id, added to its logit); -inf forbids an id. `logprobs`: how many of the most probable ids
    to report beside each token, None: nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    method: Method = Method.NOISE
    top_mass: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _AS_GIVEN:
            object.__setattr__(self, name, checked(GenerateConfig, name, getattr(self, name)))
        if not isinstance(self.method, Method):
            raise UsageError(f"sampling method: got {self.method!r}, wanted one of {', '.join(Method.__members__)}")
        if (self.method is Method.PICOSPEC) != (self.top_mass > 0):
            raise UsageError(
                f"top-mass: got {self.top_mass} with method {self.method.name}, wanted some with PICOSPEC only"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether a row's logits depend on which ids stand before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        """Whether ids may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def plain(self) -> bool:
        """Whether the highest logit is all that is wanted."""
        return self.greedy and not self.penalised and not self.logit_bias and self.logprobs is None

    @property
    def tests(self) -> bool:
        """Whether draft tokens are tested against a random number, rather than compared with the target's choice."""
        return self.method is not Method.NOISE and not self.greedy

    @property
    def untested(self) -> Sampling:
        """The same law where nothing is drafted, so that there is nothing to test."""
        return self if self.method is Method.NOISE else replace(self, method=Method.NOISE, top_mass=0)

    @cached_property
    def biases(self) -> tuple[Any, Any]:
        """`logit_bias` as arrays: ids int64 (n,), ascending, and float32 (n,)."""
        import numpy as np

        ids = np.array([token for token, _ in self.logit_bias], np.int64)
        return ids, np.array([value for _, value in self.logit_bias], np.float32)


def make_sampling(config: GenerateConfig) -> Sampling:
    """The options of a generation."""
    return Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=config.logit_bias,
        method=Method[config.sampling.upper()],
        top_mass=config.top_mass,
        logprobs=config.logprobs,
    )


def adjusted(row: Any, sampling: Sampling, prefix: Sequence[int], counts: Counts | None = None) -> Any:
    """The logits behind bias and penalties, a new array where there are any; `row`: float32 (n,).

    Every id of `prefix`, the whole text before this position, counts for the penalties; `counts` saves counting it
    again where it has counted a text that begins as this one. Ids that the row lacks do not matter.
    """
    if not (sampling.logit_bias or sampling.penalised):
        return row
    import numpy as np

    row = row.copy()
    if sampling.logit_bias:
        ids, values = sampling.biases
        known = ids < len(row)
        row[ids[known]] += values[known]
    if sampling.penalised and len(prefix):
        ids, times = (counts or Counts()).of(prefix)
        if ids.max() >= len(row):
            known = ids < len(row)
            ids, times = ids[known], times[known]
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        row[ids] = behind_penalties(row[ids], times, *penalties, np)
    return row


def behind_penalties(values: Any, times: Any, repetition: Any, presence: Any, frequency: Any, xp: Any) -> Any:
    """Logits of ids that each occurred so many `times`, behind the three penalties, numbers or arrays as well. `xp`:
    the arrays' module, numpy or torch."""
    values = xp.where(values < 0, values * repetition, values / repetition)
    return values - times * frequency - presence


def warped(row: Any, sampling: Sampling, top: float | None = None) -> Law:
    """The distribution of what is drawn at a temperature above 0 from adjusted logits, float32 (n,), that are finite or
    -inf, `top`, the highest, finite."""
    import numpy as np

    weights = row - (row.max() if top is None else np.float32(top))
    with np.errstate(over="ignore"):  # to -inf
        weights /= np.float32(max(sampling.temperature, LEAST_TEMPERATURE))
    np.exp(weights, out=weights)
    total = float(weights.sum())
    if not sampling.truncates:
        return Law(None, weights, total)
    ids = np.flatnonzero(weights >= np.float32(_surely_out(weights, total, sampling)))
    kept = weights[ids]
    if 0 < sampling.top_k < len(row) or sampling.top_p < 1:  # min-p alone needs no order
        highest = _sorted(kept, total, sampling)
        least = threshold(highest, total, sampling.top_k or len(row), sampling.top_p, sampling.min_p, np)
        within = kept >= least
        ids, kept = ids[within], kept[within]
    return Law(ids, kept, float(kept.sum(dtype=np.float64)))


def _sorted(values: Any, total: float, sampling: Sampling) -> Any:
    """The highest values, descending, down to where top-p ends at the latest; all if top-k comes before it."""
    import numpy as np

    count = _LARGEST
    while not sampling.top_k and 2 * count < len(values):
        largest = np.partition(values, -count)[-count:]
        if largest.sum(dtype=np.float64) >= sampling.top_p * total:
            values = largest
        count *= 8
    return np.sort(values)[::-1]


def _surely_out(weights: Any, total: float, sampling: Sampling) -> float:
    """Ids of a lower weight than this are left out, whatever the others have; only few of those above are."""
    import numpy as np

    if 0 < sampling.top_k < len(weights):
        # of so many that each stand for different ids, the k-th highest is no higher than the k-th highest of all
        width = len(weights) // _STRIDES
        some = weights
        if sampling.top_k <= width // 4:
            some = weights[: width * _STRIDES].reshape(_STRIDES, width).max(axis=0)
        least = float(np.partition(some, len(some) - sampling.top_k)[len(some) - sampling.top_k])
        if sampling.top_p == 1:
            least = max(least, sampling.min_p)
    else:
        # if all ids below it were as probable as that, they would have half of what top-p leaves out
        least = max(0.5 * max(0.0, 1.0 - sampling.top_p) * total / len(weights), sampling.min_p)
    return max(least, _LEAST_WEIGHT)


def threshold(values: Any, total: Any, top_k: Any, top_p: Any, min_p: Any, xp: Any) -> Any:
    """The smallest weight that top-k, top-p and min-p keep, one after the other; (…, 1).

    `values` (…, n): the n highest weights of each row, descending, all that truncation may keep; `total`: the sum of
    all weights of the row; `top_k` at least 1. These are numbers or (…, 1). `xp`: the arrays' module, numpy or torch.
    """
    rank = xp.cumsum(xp.ones_like(values), axis=-1)
    highest = values[..., :1]
    kth = xp.amax(values * (rank >= top_k), axis=-1, keepdims=True)
    held = values * (values >= kth)  # `where` with a number would make torch wait for a device
    sums = xp.cumsum(held, axis=-1, dtype=xp.float64)
    mass = xp.where(kth > 0, sums[..., -1:], total)
    before = sums - held
    inside = (before < top_p * mass) | (top_p >= 1)
    least = xp.amin(xp.where(inside, values, highest), axis=-1, keepdims=True)
    return xp.maximum(xp.maximum(kth, least), min_p * highest)


class Law(NamedTuple):
    """A distribution over ids: `weights[k]` ÷ `total` is the probability of `ids[k]`, or of id k where ids is None.

    `weights` float32 (n,), `ids` int64 (n,), ascending; ids that are left out have none.
    """

    ids: Any
    weights: Any
    total: float

    def probability(self, token: int) -> float:
        """That of one id, as a float32 can hold it: so it is the same behind the wire."""
        import numpy as np

        at = token
        if self.ids is not None:
            at = int(np.searchsorted(self.ids, token))
            if at == len(self.ids) or self.ids[at] != token:
                return 0.0
        if at >= len(self.weights):
            return 0.0
        return float(np.float32(float(self.weights[at]) / self.total))
