"""Noise that both sides can make for themselves: a hash of (seed, position, stream, id), never of a message or a time.

At one position the ids race: id i arrives at E_i / p_i, with E_i from an exponential distribution, and the first wins.
That is one exact draw from p (the Gumbel-max trick). Two distributions that race under the same E mostly have the same
winner: with probability Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i), which is at least (1 - TV) / (1 + TV) (Daliri, Musco and
Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024). So draft model and target
need only the seed in common, and what the target says does not hang on what was drafted.

The hash is that of splitmix64: number n of the stream with key k is mix(k + n·G), modulo 2**64, id i having number
i + 1. It is the same integer in numpy, in numba and in torch. Only its highest 53 bits are used: v = (bits + ½) / 2**53
is even over (0, 1), and E = -log(1 - v), for which E ≥ v: an id whose v alone is too late needs no logarithm.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIT = 2.0**-53


class Stream(IntEnum):
    """Independent noise at one position."""

    CHOICE = 0  # the race: of the target's own choice, and of what is drafted
    TEST = 1  # whether a draft token is accepted, in rejection sampling
    RESIDUAL = 2  # what stands in the place of a refused one
    PROPOSAL = 3  # what the target proposes for that place
    ANSWER = 4  # whether a proposal is taken


def mix(number: int) -> int:
    """`number` modulo 2**64, scrambled one to one: splitmix64's finaliser."""
    z = number & MASK
    z = ((z ^ (z >> 30)) * FIRST_FACTOR) & MASK
    z = ((z ^ (z >> 27)) * SECOND_FACTOR) & MASK
    return z ^ (z >> 31)


def stream_key(seed: int, position: int, stream: Stream) -> int:
    """Key of the noise at an absolute `position` under a uint64 `seed`."""
    return mix(mix(mix(seed + GOLDEN) ^ (position + 1)) + int(stream) * GOLDEN)


def unit(key: int, number: int) -> float:
    """Number `number` (from 0 on) of the stream with that key: even over (0, 1), the ends excluded."""
    return ((mix(key + (number + 1) * GOLDEN) >> 11) + 0.5) * UNIT


def exponential(key: int, number: int) -> float:
    """The same as a draw of the exponential distribution with mean 1, at least `unit(key, number)`."""
    return -math.log1p(-unit(key, number))


def race(weights: Any, key: int, ids: Any = None) -> tuple[int, float, float]:
    """Who arrives first, when, and when the second does (inf if there is none).

    `weights`: float32, of any sum, none negative or NaN; shape (n,). `ids`: int64 (n,), ascending; without it the
    places themselves. The result is an id, -1 where no weight is above 0; times are E / weight. On a tie the lowest id.
    """
    import numpy as np

    numbers = np.arange(len(weights), dtype=np.uint64) if ids is None else np.asarray(ids).astype(np.uint64)
    z = np.uint64(key) + (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    with np.errstate(divide="ignore"):
        times = -np.log1p(-((z >> np.uint64(11)).astype(np.float64) + 0.5) * UNIT) / weights
    if not len(times):
        return -1, math.inf, math.inf
    first = int(times.argmin())
    at = float(times[first])
    times[first] = math.inf
    return (-1 if math.isinf(at) else int(numbers[first])), at, float(times.min())
