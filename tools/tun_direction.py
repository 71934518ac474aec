"""One direction of an emulated link, packet by packet: rate, queue, delay, jitter, losses, cuts, changing bandwidth.

No loop and no timer: everything takes the time as an argument, and `tun_link` turns the wheel.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipesd.sim.schedule import Schedule


@dataclass
class Direction:
    """Packets one way. Times are in s, of any clock that does not go back; schedule and cuts count from `begun_s`.

    With a schedule a packet that is being serialised when the rate changes is finished at the new rate for its rest
    (`Schedule.finish_s`). A cut loses every packet that it meets between the line and the far end; what waits goes on
    to be serialised, as a sender cannot see that nothing arrives.
    """

    delay_s: float = 0.0
    bytes_per_s: float = math.inf
    jitter_s: float = 0.0  # a packet takes up to so much longer, evenly distributed
    loss: float = 0.0  # share of the packets
    queue_bytes: float = 1 << 20  # what may wait for the line
    random: random.Random = field(default_factory=lambda: random.Random(0))
    way: Literal["up", "down"] = "up"
    schedule: Schedule | None = None  # instead of `bytes_per_s`
    cuts: tuple[tuple[float, float], ...] = ()  # when each begins, and how long it lasts
    begun_s: float = 0.0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_s: float = -math.inf  # when the line has serialised all it took
    last_s: float = -math.inf  # when the last packet arrives
    carried: int = 0
    lost: int = 0
    dropped: int = 0  # the queue was full
    cut: int = 0  # lost in a cut

    def take(self, packet: bytes, now_s: float) -> None:
        """A packet enters at `now_s`."""
        start_s = max(self.free_s, now_s)
        if self._waiting_bytes(now_s) + len(packet) > max(self.queue_bytes, len(packet)):
            self.dropped += 1
            return
        self.free_s = self._serialised_s(start_s, len(packet))
        if self.loss and self.random.random() < self.loss:
            self.lost += 1  # behind the line, which it has kept busy
            return
        late_s = self.random.uniform(0, self.jitter_s) if self.jitter_s else 0.0
        at_s = max(self.last_s, self.free_s + self.delay_s + late_s)
        if self._is_cut(at_s):
            self.cut += 1
            return
        self.last_s = at_s
        self.under_way.append((at_s, packet))

    def due_s(self) -> float:
        """When the next packet arrives; infinite if none is under way."""
        return self.under_way[0][0] if self.under_way else math.inf

    def arrived(self, now_s: float) -> list[bytes]:
        """Those that are at the far end by now, in order."""
        packets = []
        while self.due_s() <= now_s:
            packets.append(self.under_way.popleft()[1])
        self.carried += len(packets)
        return packets

    def _waiting_bytes(self, now_s: float) -> float:
        """What the line has taken and not serialised."""
        if self.free_s <= now_s:
            return 0.0
        if self.schedule is None:
            return (self.free_s - now_s) * self.bytes_per_s
        return self.schedule.carried_bytes(now_s - self.begun_s, self.free_s - self.begun_s, self.way)

    def _serialised_s(self, start_s: float, length_bytes: int) -> float:
        """When the line has serialised a packet that it begins with at `start_s`."""
        if self.schedule is None:
            return start_s + length_bytes / self.bytes_per_s
        return self.begun_s + self.schedule.finish_s(start_s - self.begun_s, length_bytes, self.way)

    def _is_cut(self, arrives_s: float) -> bool:
        """Whether a cut meets the packet that has just left the line."""
        left_s, arrives_s = self.free_s - self.begun_s, arrives_s - self.begun_s
        return any(at_s <= arrives_s and left_s < at_s + lasts_s for at_s, lasts_s in self.cuts)
