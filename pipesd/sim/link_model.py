"""What a simulated link makes of a message: when it arrives, as a pure function of time, size and chance.

A message first occupies its direction, for a fixed part and for its bytes, behind those before it; then it crosses, by
a latency during which others follow. `Link.hockney` has the fixed part alone (PipeSD's model: each message takes
alpha + beta·n), `Link.streamed` splits alpha into what occupies and what only delays. Order is kept, as on TCP.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self

from pipesd.errors import UsageError
from pipesd.sim.cuts import checked_cuts
from pipesd.sim.schedule import Schedule

Way = Literal["up", "down"]

SEGMENT_BYTES = 1448  # of a TCP segment on an Ethernet path
LEAST_RTO_S = 0.2  # what Linux adds to the round trip, at least, before it sends again (RFC 6298 has 1 s in all)
RECONNECT_S = 0.05  # until the edge's socket first tries to connect again; each further wait is twice as long
MOST_RECONNECT_S = 1.0
HANDSHAKE_RTTS = 4  # of TCP and ZeroMQ


@dataclass(frozen=True, kw_only=True)
class Link:
    """One user's link. Times in s, rates in bytes/s; the default takes no time at all.

    `gap_s`: what each message occupies of its direction beside its bytes; `latency_s`: one way, behind that.
    `up_bytes_per_draft_token`: what further comes with each token of a DRAFT, or that a PROBE stands for.
    `message_bytes`: what a message takes beside its payload (2: the frame of ZeroMQ, as on a byte stream).
    `jitter_s`: the most that a message is late by chance; `loss`: the chance of each segment to be lost.
    `cuts`: pairs (when one begins, how long the link is away). `bandwidths`: in place of both rates. Cuts and
    bandwidths count from the beginning of the first generation.

    A lost last segment is sent again after TCP's retransmission time-out, `2·latency_s + gap_s + 0.2 s` on Linux,
    doubled each time (RFC 6298, 2 and 5); any other is missed by the receiver and sent again one round trip later (RFC
    5681, 3.2). What lies behind waits for it. In a cut all that is under way is lost, and so is what is handed over
    until the edge has connected again: it takes nothing from the edge meanwhile. Raises UsageError for a value out of
    bounds.
    """

    latency_s: float = 0.0
    gap_s: float = 0.0
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    up_bytes_per_draft_token: float = 0.0
    message_bytes: float = 2
    jitter_s: float = 0.0
    loss: float = 0.0
    cuts: Sequence[tuple[float, float]] = ()
    bandwidths: Schedule | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "gap_s", "up_bytes_per_draft_token", "message_bytes", "jitter_s"):
            value = getattr(self, name)
            if not is_from_0(value):
                raise UsageError(f"link: {name} {value!r:.60}; give a number from 0")
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise UsageError(f"link: {name} {value!r:.60}; give a number above 0")
        if not (is_from_0(self.loss) and self.loss < 1):
            raise UsageError(f"link: a loss of {self.loss!r:.60}; give a share from 0 to below 1")
        if not isinstance(self.bandwidths, Schedule | None):
            raise UsageError(f"link: bandwidths {self.bandwidths!r:.60}; give a Schedule, or None")
        if self.bandwidths is not None and min(self.up_bytes_per_s, self.down_bytes_per_s) < math.inf:
            raise UsageError("link: rates and bandwidths; give one of them")
        object.__setattr__(self, "cuts", checked_cuts(self.cuts))

    @classmethod
    def hockney(cls, alpha_s: float, **further: Any) -> Self:
        """Each message occupies its direction for `alpha_s` and its bytes, and has arrived then."""
        if twice := {"gap_s", "latency_s"} & further.keys():
            raise UsageError(f"link: {min(twice)} beside alpha; all of it is the gap in this model")
        return cls(gap_s=alpha_s, **further)

    @classmethod
    def streamed(cls, alpha_s: float, gap_s: float, **further: Any) -> Self:
        """Each message occupies its direction for `gap_s` and its bytes, and arrives `alpha_s - gap_s` later."""
        if not (is_from_0(alpha_s) and is_from_0(gap_s) and gap_s <= alpha_s):
            raise UsageError(f"link: a gap of {gap_s!r:.60} s; give one from 0 to alpha, {alpha_s!r:.60} s")
        return cls(gap_s=gap_s, latency_s=alpha_s - gap_s, **further)

    @property
    def rto_s(self) -> float:
        """The time-out after which a lost segment is sent again."""
        return 2 * self.latency_s + self.gap_s + LEAST_RTO_S

    def away_s(self, lasts_s: float) -> float:
        """For how long after a cut that lasts so long the edge has no connection."""
        tried_s, wait_s = RECONNECT_S, RECONNECT_S
        while tried_s < lasts_s:
            wait_s = min(2 * wait_s, MOST_RECONNECT_S)
            tried_s += wait_s
        return tried_s + HANDSHAKE_RTTS * 2 * self.latency_s


def is_from_0(value: Any) -> bool:
    """Whether it is a finite number that is not below 0."""
    return _is_number(value) and 0 <= value < math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Line:
    """One direction of a user's link. Until `begin` there are no cuts, and the first bandwidth is in force."""

    def __init__(self, link: Link, way: Way, seed: str) -> None:
        self._link, self._way = link, way
        self._bytes_per_s = link.up_bytes_per_s if way == "up" else link.down_bytes_per_s
        self._chance = random.Random(f"{seed} {way}")
        self._plain = not (link.jitter_s or link.loss or link.cuts or link.bandwidths)
        self._begun_s = math.inf
        self._free_s = self._last_s = 0.0
        self._number = 0  # of the connection

    def begin(self, now_s: float) -> None:
        """The first generation begins."""
        self._begun_s = now_s

    def arrival_s(self, now_s: float, length_bytes: int, draft_tokens: int = 0) -> float | None:
        """When a message that is sent at `now_s` arrives; None: never, as it is under way in a cut."""
        link = self._link
        size = length_bytes + link.message_bytes + draft_tokens * link.up_bytes_per_draft_token
        if self._plain:
            start_s = (now_s if now_s > self._free_s else self._free_s) + link.gap_s
            self._free_s = start_s + size / self._bytes_per_s
            return self._free_s + link.latency_s
        number = self.number(now_s)
        if number > self._number:  # a new connection, with nothing on it
            self._number, self._free_s, self._last_s = number, now_s, now_s
        start_s = max(now_s, self._free_s) + link.gap_s
        self._free_s = self._through_s(start_s, size)
        late_s = link.jitter_s * self._chance.random() if link.jitter_s else 0.0
        arrives_s = self._free_s + link.latency_s + late_s + self._repeats_s(size)
        self._last_s = max(self._last_s, arrives_s)  # nothing overtakes what is ahead of it
        return None if self.number(self._last_s) > number or self.away(now_s) else self._last_s

    def number(self, now_s: float) -> int:
        """How many connections there were before the one of that time."""
        return sum(self._begun_s + at_s <= now_s for at_s, _ in self._link.cuts)

    def away(self, now_s: float) -> bool:
        """Whether the edge has no connection."""
        return any(0 <= now_s - self._begun_s - at_s < self._link.away_s(lasts_s) for at_s, lasts_s in self._link.cuts)

    def _through_s(self, start_s: float, size: float) -> float:
        if self._link.bandwidths is None:
            return start_s + size / self._bytes_per_s
        since_s = max(0.0, start_s - self._begun_s)
        return start_s - since_s + self._link.bandwidths.finish_s(since_s, size, self._way)

    def _repeats_s(self, size: float) -> float:
        """What is lost to segments that must be sent again."""
        loss = self._link.loss
        if not loss:
            return 0.0
        late_s, time_out_s = 0.0, self._link.rto_s
        while self._chance.random() < loss:
            late_s += time_out_s
            time_out_s *= 2
        before = math.ceil(size / SEGMENT_BYTES) - 1  # segments, each of which the last one shows to be missing
        if before > 0 and self._chance.random() >= (1 - loss) ** before:
            late_s = max(late_s, 2 * self._link.latency_s + self._link.gap_s)
        return late_s
