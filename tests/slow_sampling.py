"""What a sampled position must hold, computed the slow way: one position at a time, from both models' logits alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipesd.policy.noise import Stream, exponential, stream_key, unit
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Law, Method, Sampling
from pipesd.sim.distributions import Distribution
from pipesd.sim.texts import LETTERS, state_of

MOST_TOLD = 256  # ids of a law that is told whole


class Position(NamedTuple):
    """What may stand at one position: the target's own draw; what the edge drafts, whether the target takes it, and
    what the edge draws if it does not. `p`: the target's law."""

    own: int
    drafted: int
    taken: bool
    redrawn: int
    p: Law


def position_of(
    target: Distribution, draft: Distribution, sampling: Sampling, seed: int, prefix: Sequence[int], width: int
) -> Position:
    """Rejection sampling at the position behind `prefix`."""
    at, state, sampler = len(prefix), state_of(prefix), Sampler(sampling, seed)
    p, q = sampler.law(target.row(state, width), prefix), sampler.law(draft.row(state, width), prefix)
    assert p is not None and q is not None
    own, drafted = sampler.drawn(p, at).id, sampler.drawn(q, at).id
    taken = unit(stream_key(seed, at, Stream.TEST), 0) * half_above(q.probability(drafted)) < p.probability(drafted)
    return Position(own, drafted, taken, redrawn(p, q, sampling, seed, at), p)


def redrawn(p: Law, q: Law, sampling: Sampling, seed: int, at: int) -> int:
    """What is drawn in the place of a refused token."""
    kept = [(token, p.probability(token)) for token in ids_of(p)]
    told = sampling.top_mass if sampling.method is Method.PICOSPEC else MOST_TOLD
    if len(kept) <= told or sampling.method is Method.PICOSPEC:
        kept = sorted(sorted(kept, key=lambda pair: (-pair[1], pair[0]))[:told])
        left = [(token, residual(share, q.probability(token))) for token, share in kept]
        chances = left if any(weight for _, weight in left) else kept
        key = stream_key(seed, at, Stream.RESIDUAL)
        times = [(exponential(key, token) / w, token) for token, w in as_float32(chances) if w > 0]
        return min(times)[1]
    sums = np.cumsum(p.weights.astype(np.float64))
    number = 0
    while True:
        place = int(np.sum(sums <= unit(stream_key(seed, at, Stream.PROPOSAL), number) * sums[-1]))
        token = place if p.ids is None else int(p.ids[place])
        share = p.probability(token)
        if unit(stream_key(seed, at, Stream.ANSWER), number) < residual(share, q.probability(token)) / share:
            return token
        number += 1


def residual(p: float, q: float) -> float:
    return p if q == 0 else max(0.0, p - q * min(1.0, p / half_above(q)))


def half_above(q: float) -> float:
    """The least float16 that is at least q."""
    half = np.float16(q)
    return float(half if float(half) >= q else np.nextafter(half, np.float16(math.inf)))


def as_float32(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, float(np.float32(weight))) for token, weight in pairs]


def ids_of(law: Law) -> list[int]:
    places: list[int] = np.flatnonzero(law.weights).tolist()
    return places if law.ids is None else [int(law.ids[place]) for place in places]


def random_options(chance: random.Random, methods: Sequence[str] = ("noise",)) -> dict[str, Any]:
    """Options of a generation, as a user gives them: everything alone and together."""
    method = chance.choice(list(methods))
    options: dict[str, Any] = {
        "temperature": chance.choice((0.3, 0.8, 1.0, 1.5, 0.1 + 2 * chance.random())),
        "top_k": chance.choice((0, 0, 0, 1, 2, 5, 400)),
        "top_p": chance.choice((1.0, 1.0, 0.5, 0.9, chance.random())),
        "min_p": chance.choice((0.0, 0.0, 0.05, 0.3)),
        "repetition_penalty": chance.choice((1.0, 1.0, 1.2, 0.9)),
        "presence_penalty": chance.choice((0.0, 0.0, 0.6, -0.3)),
        "frequency_penalty": chance.choice((0.0, 0.0, 0.3)),
        "seed": chance.getrandbits(64),
        "sampling": method,
    }
    if chance.random() < 0.3:
        tokens = chance.sample(LETTERS, 3)
        options["logit_bias"] = ((tokens[0], 1.5), (tokens[1], -1.0), (tokens[2], -math.inf))
    if method == "picospec":
        options["top_mass"] = chance.choice((1, 3, 64))
    elif method == "noise":
        options["temperature"] = chance.choice((0.0, *[options["temperature"]] * 4))
        options["logprobs"] = chance.choice((None, None, 0, 3))
    return options
