"""Virtual time: what happens, in the order of its times, and the clocks that follow."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """One user's: the world's time whenever the user has its turn, ahead of it when that ends."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class World:
    """The events in the order of their times. `hears`: what takes the cloud's messages, for each user."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.hears: list[Callable[[int, bytes], None]] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, at_s: float, do: Callable[..., None], *given: Any) -> None:
        """Let `do(*given)` happen at that time."""
        heapq.heappush(self._events, (at_s, next(self._order), do, given))

    def answer(self, user: int, connection: int, payload: bytes) -> None:
        """The cloud speaks on that connection."""
        self.hears[user](connection, payload)

    @property
    def next_s(self) -> float:
        """When the next event is, infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run(self, until_s: float) -> None:
        """Let everything happen that is due by then."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, do, given = heapq.heappop(events)
            do(*given)
