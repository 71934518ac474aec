"""Noise that both sides can make for themselves: a hash of (seed, position, stream, id), never of a message or a time.

At one position the ids race: id i arrives at E_i / p_i, with E_i from an exponential distribution, and the first wins.
That is one exact draw from p (the Gumbel-max trick). Two distributions that race under the same E mostly have the same
winner: with probability Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i), which is at least (1 - TV) / (1 + TV) (Daliri, Musco and
Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024). So draft model and target
need only the seed in common, and what the target says does not hang on what was drafted.

The hash is that of splitmix64: number n of the stream with key k is mix(k + n·G), modulo 2**64, id i having number
i + 1. It is the same integer in numpy, in numba and in torch. Only its highest 52 bits are used: v = (bits + ½) / 2**52
is exact, even over (0, 1) and never an end of it, and E = -log(1 - v), for which E ≥ v: an id whose v alone is too late
needs no logarithm.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from pipesd._kernels.race import BLOCK, RACE, ROOM

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIT = 2.0**-52


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
    return ((mix(key + (number + 1) * GOLDEN) >> 12) + 0.5) * UNIT


def units(key: int, numbers: Any) -> Any:
    """The same for uint64 (n,) numbers: float64 (n,)."""
    import numpy as np

    z = np.uint64(key) + (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * UNIT


def exponential(key: int, number: int) -> float:
    """The same as a draw of the exponential distribution with mean 1, at least `unit(key, number)`."""
    return -math.log1p(-unit(key, number))


def race(weights: Any, key: int, ids: Any = None) -> tuple[int, float, float]:
    """Who arrives first, when, and when the second does (inf if there is none).

    `weights`: float32, of any sum, none negative or NaN; shape (n,). `ids`: int64 (n,), ascending; without it the
    places themselves. The result is an id, -1 where no weight is above 0; times are E / weight. On a tie the lowest id.
    Where compiled code has been loaded it runs; the result is the same.
    """
    import numpy as np

    weights = np.ascontiguousarray(weights, np.float32)
    numbers = None if ids is None else np.ascontiguousarray(ids, np.int64).view(np.uint64)
    run = RACE.at_hand()
    if run is RACE.plain:  # one id after the other would take a tenth of a second for a large vocabulary
        place, first, second = _race_of_arrays(weights, key, numbers)
    else:
        place, first, second = run(
            weights, np.uint64(key), np.empty(0, np.uint64) if numbers is None else numbers, np.empty(BLOCK, np.int64)
        )
    return (place if place < 0 or numbers is None else int(numbers[place])), first, second


def warmup() -> bool:
    """Load or compile the race, so that no later call does; returns whether it is compiled."""
    return RACE.compiled() is not None


def _race_of_arrays(weights: Any, key: int, numbers: Any) -> tuple[int, float, float]:
    """The place of the first, its time and the second's."""
    import numpy as np

    if not len(weights):
        return -1, math.inf, math.inf
    if numbers is None:
        numbers = np.arange(len(weights), dtype=np.uint64)
    arrivals = units(key, numbers)

    def time(place: int) -> float:  # numpy's own logarithm may differ in the last place
        weight = float(weights[place])
        return -math.log1p(-float(arrivals[place])) / weight if weight > 0 else math.inf

    with np.errstate(divide="ignore"):
        earliest = arrivals / weights
    leader = int(earliest.argmin())
    least = earliest[leader]
    earliest[leader] = math.inf
    bound = max(time(leader), time(int(earliest.argmin()))) * ROOM
    earliest[leader] = least
    places = np.flatnonzero((earliest <= bound) & (earliest < math.inf)).tolist()
    times = sorted((time(place), place) for place in places)[:2]
    times += [(math.inf, -1)] * (2 - len(times))
    return times[0][1], times[0][0], times[1][0]
