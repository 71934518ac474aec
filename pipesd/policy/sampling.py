"""How a token is drawn from logits: the options, and what they make of a row. One place for edge and cloud.

In the order of transformers: logit bias; repetition penalty, then presence and frequency penalty; temperature; top-k;
top-p; min-p. At temperature 0 the highest logit is taken behind bias and penalties, whatever else is set.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipesd.config import GenerateConfig
from pipesd.errors import UsageError

MOST_BIASED = 1024  # ids with a bias of their own
MOST_LOGPROBS = 20
MOST_TOP_MASS = 1024


class Method(IntEnum):
    """How draft tokens are compared with the target's distribution; their numbers on the wire."""

    NOISE = 0  # both sides draw under the same noise, equal ids are accepted
    REJECTION = 1  # accepted with probability min(1, p / q), else drawn from the residual: exact
    PICOSPEC = 2  # the same with only the most probable ids of p in the residual: approximate


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of one generation, as both sides need them. Raises UsageError for impossible values.

    `logit_bias` are pairs (id, added to its logit); -inf forbids an id. `logprobs`: how many of the most probable ids
    to report beside each token, None: nothing. `own_token`: behind a draft that was accepted whole the target adds a
    token of its own; in rejection sampling an edge that drafts on does without it, so that all it drew is tested.
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
    own_token: bool = True

    def __post_init__(self) -> None:
        pass  # checks

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether a row's logits depend on which ids stand before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether the highest logit is all that is wanted."""
        return self.greedy and not self.penalised and not self.logit_bias and self.logprobs is None

    @property
    def tests(self) -> bool:
        """Whether draft tokens are tested against a random number, rather than compared with the target's choice."""
        return self.method is not Method.NOISE and not self.greedy


def make_sampling(config: GenerateConfig, *, drafts_on: bool) -> Sampling | None:
    """The options of a generation, None where only the highest logit is wanted. `drafts_on`: the edge goes on drafting
    while a verdict is awaited."""
    method = Method[config.sampling.upper()]
    sampling = Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=config.logit_bias,
        method=method,
        top_mass=config.top_mass,
        logprobs=config.logprobs,
        own_token=method is Method.NOISE or not drafts_on,
    )
    return None if sampling.plain else sampling


def adjusted(row: Any, sampling: Sampling, prefix: Sequence[int]) -> Any:
    """The logits behind bias and penalties, a new array where there are any; `row`: float32 (n,).

    Every id of `prefix`, the whole text before this position, counts for the penalties.
    """
    return row


def warped(row: Any, sampling: Sampling) -> Law:
    """The distribution of what is drawn from adjusted, finite or -inf logits; float32 (n,), the highest finite."""
    import numpy as np

    below = row - row.max()
    with np.errstate(over="ignore"):
        below = np.maximum(below / np.float32(sampling.temperature), np.float32(-1e30))
    weights = np.exp(below)
    return Law(None, weights, float(weights.sum()))


class Law(NamedTuple):
    """A distribution over ids: `weights[k]` ÷ `total` is the probability of `ids[k]`, or of id k where ids is None.

    `weights` float32 (n,), `ids` int64 (n,), ascending; ids that are left out have none.
    """

    ids: Any
    weights: Any
    total: float

    def probability(self, token: int) -> float:
        """That of one id."""
        import numpy as np

        at = token
        if self.ids is not None:
            at = int(np.searchsorted(self.ids, token))
            if at == len(self.ids) or self.ids[at] != token:
                return 0.0
        return float(self.weights[at]) / self.total if at < len(self.weights) else 0.0
