"""The front's bounds, its counters, and what it says of trouble: rationed, so that nobody can fill a disk or a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipesd.clock import Clock


@dataclass(frozen=True)
class FrontLimits:
    """Bounds of a front (seconds, counts)."""

    workers: int = 1
    sessions: int = 8  # that each worker grants
    idle_s: float = 600.0
    stall_s: float = 60.0
    drain_s: float = 5.0
    load_s: float = 1800.0  # longest time from a worker's start to its READY
    restarts: int = 3  # of one worker within a minute
    quiet_s: float = 1.0  # while draining, a generation in which nobody spoke for so long is over
    farewell_s: float = 0.7  # how long workers may take to leave
    retry_ms: int = 250  # told to edges that come too early
    refusals_per_s: float = 20.0  # replies to malformed messages
    complaint_s: float = 10.0  # lines of one kind in the log are at least so far apart

    @property
    def most_routes(self) -> int:
        """Granted sessions, as many that wait for their answer, and a few."""
        return 2 * self.workers * self.sessions + 64


@dataclass
class FrontCounters:
    """What went by and what went wrong since the start."""

    taken: int = 0  # messages from outside
    malformed: int = 0
    wrong_parts: int = 0  # messages refused for the number of their parts
    unknown: int = 0  # of sessions that no worker holds
    late: int = 0  # of an earlier opening, dropped
    refused_opens: int = 0
    to_worker_dropped: int = 0  # its queue was full
    to_edge_dropped: int = 0  # the edge did not read
    to_edge_gone: int = 0  # no such connection any more


class Complaints:
    """A log in which lines of one kind are at least `apart_s` apart, so that nobody can fill a disk."""

    def __init__(self, log: Callable[[str], None], clock: Clock, apart_s: float) -> None:
        self._log, self._clock, self._apart_s = log, clock, apart_s
        self._kinds: dict[str, tuple[float, int]] = {}  # when a line was written, how many were held back since

    def write(self, kind: str, text: str) -> None:
        now_s = self._clock.now()
        written_s, held_back = self._kinds.get(kind, (-float("inf"), 0))
        if now_s - written_s < self._apart_s:
            self._kinds[kind] = (written_s, held_back + 1)
            return
        self._log(f"{text} ({held_back} more like it before)" if held_back else text)
        self._kinds[kind] = (now_s, 0)


class Ration:
    """So many a second, and at most a second's worth at once."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        assert per_s >= 1
        self._per_s, self._clock = per_s, clock
        self._left = per_s
        self._filled_s = clock.now()

    def take(self) -> bool:
        """Whether one more may go."""
        now_s = self._clock.now()
        self._left = min(self._per_s, self._left + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
