"""Bandwidths that change with time: what each direction of an emulated link carries, step by step, over and over again.

The simulator, the proxy and the link between network namespaces follow one rule, which is `Schedule.finish_s`: what is
being serialised when the rate changes is finished at the new rate for its rest. Time 0 is when the link begins.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, Self

from pipesd.errors import UsageError
from pipesd.json_file import read_object

Way = Literal["up", "down"]

LEAST_EVERY_S = 1e-3  # steps are walked through one by one
_BYTES_PER_MBIT = 125e3


@dataclass(frozen=True)
class Schedule:
    """Step k of a cycle lasts from `k * every_s` to `(k + 1) * every_s` and carries `up_mbps[k]` and `down_mbps[k]`
    Mbit/s; after the last one comes the first again. `seed`: what the figures were drawn from, None if they were not.

    UsageError, one line, unless all are finite and above 0, a step lasts 1 ms or more and both directions have the same
    number of steps.
    """

    every_s: float
    up_mbps: tuple[float, ...]
    down_mbps: tuple[float, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _positive(self.every_s) or self.every_s < LEAST_EVERY_S:
            raise UsageError(f"schedule: every_s {_short(self.every_s)}; give seconds, at least {LEAST_EVERY_S:g}")
        for name in ("up_mbps", "down_mbps"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or not given or not all(map(_positive, given)):
                raise UsageError(f"schedule: {name} {_short(given)}; give one or more figures above 0")
            object.__setattr__(self, name, tuple(float(figure) for figure in given))
        if len(self.up_mbps) != len(self.down_mbps):
            raise UsageError(
                f"schedule: {len(self.up_mbps)} figures of up_mbps, {len(self.down_mbps)} of down_mbps; give as many"
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise UsageError(f"schedule: seed {_short(self.seed)}; give a whole number, or null")

    @classmethod
    def redrawn(
        cls,
        seed: int,
        *,
        steps: int = 60,
        up: tuple[float, float] = (10.0, 80.0),
        down: tuple[float, float] = (150.0, 280.0),
        every_s: float = 20.0,
    ) -> Self:
        """`steps` bandwidths (Mbit/s) drawn evenly between the bounds: by default scenario 4 of PipeSD (arXiv
        2605.13319), which redraws them every 20 s. More steps of a seed begin with those of fewer."""
        if steps < 1:
            raise UsageError(f"schedule: {steps} steps; give at least 1")
        chance = random.Random(seed)
        drawn = [(round(chance.uniform(*up), 2), round(chance.uniform(*down), 2)) for _ in range(steps)]
        return cls(every_s, tuple(pair[0] for pair in drawn), tuple(pair[1] for pair in drawn), seed)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The schedule in a file that `save` wrote. UsageError, one line, for any other file."""
        found = read_object(Path(path))
        try:
            known = {field.name for field in fields(cls)}
            if wrong := sorted(set(found) - known):
                raise UsageError(f"schedule: {_short(wrong[0])} is unknown; known are {', '.join(sorted(known))}")
            if missing := sorted(known - set(found) - {"seed"}):
                raise UsageError(f"schedule: {missing[0]} is missing; give every_s, up_mbps and down_mbps")
            return cls(**found)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as one JSON object. UsageError if the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"schedule file {os.fspath(path)!r}: {reason}; write it elsewhere") from error

    def at(self, t_s: float) -> tuple[float, float]:
        """What the link carries at that time, up and down, in bytes/s. A change is in force at its own time."""
        step = self._step(t_s)
        return self._rate(step, "up"), self._rate(step, "down")

    def next_change_s(self, t_s: float) -> float:
        """When the step after that time begins, always later than `t_s`."""
        return (self._step(t_s) + 1) * self.every_s

    def finish_s(self, start_s: float, length_bytes: float, way: Way) -> float:
        """When `length_bytes` that a line begins to serialise at `start_s` are through: each step carries what its rate
        allows, and the next one goes on with the rest."""
        step, rates = self._step(start_s), self.up_mbps if way == "up" else self.down_mbps
        cycle_bytes = sum(rates) * _BYTES_PER_MBIT * self.every_s
        cycles = int(length_bytes / cycle_bytes)  # carry the same wherever they begin
        begun_s, left_bytes = start_s, max(0.0, length_bytes - cycles * cycle_bytes)
        while True:
            ends_s, rate = (step + 1) * self.every_s, self._rate(step, way)
            room_bytes = (ends_s - begun_s) * rate
            if left_bytes <= room_bytes:
                return begun_s + left_bytes / rate + cycles * len(rates) * self.every_s
            step, begun_s, left_bytes = step + 1, ends_s, left_bytes - room_bytes

    def carried_bytes(self, start_s: float, end_s: float, way: Way) -> float:
        """What a line that is never idle carries between two times; the inverse of `finish_s`."""
        rates = self.up_mbps if way == "up" else self.down_mbps
        cycle_s = len(rates) * self.every_s
        cycles = max(0, int((end_s - start_s) / cycle_s))
        carried = cycles * sum(rates) * _BYTES_PER_MBIT * self.every_s
        begun_s, step = start_s + cycles * cycle_s, self._step(start_s + cycles * cycle_s)
        while begun_s < end_s:
            ends_s = min((step + 1) * self.every_s, end_s)
            carried += (ends_s - begun_s) * self._rate(step, way)
            step, begun_s = step + 1, ends_s
        return carried

    def _step(self, t_s: float) -> int:
        """The number of the step in force, counted from time 0 through all cycles; exact at a step's own beginning."""
        step = math.floor(t_s / self.every_s)
        if (step + 1) * self.every_s <= t_s:
            return step + 1
        return step - 1 if step * self.every_s > t_s else step

    def _rate(self, step: int, way: Way) -> float:
        rates = self.up_mbps if way == "up" else self.down_mbps
        return rates[step % len(rates)] * _BYTES_PER_MBIT


def _positive(figure: object) -> bool:
    number = isinstance(figure, (int, float)) and not isinstance(figure, bool)
    return number and 0 < figure <= 1e12  # type: ignore[operator]  # a number, as was just seen


def _short(value: object) -> str:
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:80]}…"
