"""The race of ids under the noise that both sides share, see `pipesd.policy.noise`: who arrives first."""

from __future__ import annotations

import math
from typing import Any

from pipesd._kernels import Kernel

BLOCK = 1024  # ids hashed at a time: their bits stay in the processor's nearest cache
ROOM = 1.0 + 2.0**-50  # a bound times this is above whatever rounding makes of a time below it


def _race(weights: Any, key: int, numbers: Any, bits: Any) -> tuple[int, float, float]:
    """The place of the smallest -log(1 - v) / weight, -1 where no weight is above 0, that time, and the next smallest.

    v comes of the hash of `numbers` (n, unsigned), or of the places where it is empty; `weights` (n), none below 0;
    uses `bits` (signed, of any length).
    """
    mask = 0xFFFFFFFFFFFFFFFF
    golden, factor, other_factor = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    count = len(weights)
    block = len(bits)
    place = -1
    first = second = bound = math.inf
    last = key  # of the hash's counter
    for start in range(0, count, block):
        size = min(block, count - start)
        if len(numbers):
            for i in range(size):
                z = (key + (numbers[start + i] * golden & mask) + golden) & mask
                z = ((z ^ (z >> 30)) * factor) & mask
                z = ((z ^ (z >> 27)) * other_factor) & mask
                bits[i] = (z ^ (z >> 31)) >> 12
        else:
            for i in range(size):
                last = (last + golden) & mask
                z = ((last ^ (last >> 30)) * factor) & mask
                z = ((z ^ (z >> 27)) * other_factor) & mask
                bits[i] = (z ^ (z >> 31)) >> 12
        # -log(1 - v) ≥ v, so most ids are known to be too late without a logarithm
        for i in range(size):
            v = (float(bits[i]) + 0.5) * 2.0**-52
            weight = float(weights[start + i])
            if v < bound * weight:
                time = -math.log1p(-v) / weight
                if time < first:
                    second = first
                    first = time
                    place = start + i
                elif time < second:
                    second = time
                bound = second * ROOM
    return place, first, second


RACE = Kernel(_race, "Tuple((int64, float64, float64))(float32[::1], uint64, uint64[::1], int64[::1])")
