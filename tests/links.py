"""A cloud's front at the far end of a link whose figures are set, under a virtual clock: probes go in, answers come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from pipesd.clock import VirtualClock
from pipesd.protocol.messages import MAX_PROBE_BYTES, Message, Probe, Probed, ProbeStatus
from pipesd.protocol.wire import decode, encode

SEND_S = 1e-5  # what giving a message to the link takes
Fate = Callable[[int, Probe], float | None]  # of the n-th probe: s on the way beside its own, None: lost


def no_fate(number: int, probe: Probe) -> float:
    return 0.0


class VirtualLink:
    """Serialises each way, then delays. `answer` may replace what the cloud says to a probe."""

    address = "tcp://virtual:1"

    def __init__(
        self,
        clock: VirtualClock,
        *,
        delay_s: float = 0.0,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        message_s: float = 0.0,
        fate: Fate = no_fate,
        answer: Callable[[Probe], Message] | None = None,
    ) -> None:
        self.clock = clock
        self.delay_s, self.up_bytes_per_s, self.down_bytes_per_s = delay_s, up_bytes_per_s, down_bytes_per_s
        self.message_s, self.fate, self.answer = message_s, fate, answer
        self.away = False
        self.probes: list[Probe] = []
        self.frame_bytes: list[int] = []
        self.most_under_way = 0
        self._up_free_s = self._down_free_s = 0.0
        self._coming: list[tuple[float, int, bytes]] = []
        self._numbers = count()

    def adopt(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def explain(self) -> str:
        return "cannot reach tcp://virtual:1"

    def send(self, payload: bytes) -> bool:
        self.clock.advance(SEND_S)
        if self.away:
            return False
        probe = decode(payload)
        assert isinstance(probe, Probe)
        number = len(self.probes)
        self.probes.append(probe)
        self.frame_bytes.append(len(payload))
        late_s = self.fate(number, probe)
        self._up_free_s = max(self._up_free_s, self.clock.now()) + len(payload) / self.up_bytes_per_s + self.message_s
        if late_s is None:
            return True
        there_s = self._up_free_s + self.delay_s + late_s
        reply = encode(self.answer(probe) if self.answer else answered(probe))
        self._down_free_s = max(self._down_free_s, there_s) + len(reply) / self.down_bytes_per_s
        heapq.heappush(self._coming, (self._down_free_s + self.delay_s, next(self._numbers), reply))
        self.most_under_way = max(self.most_under_way, len(self._coming))
        return True

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        now_s = self.clock.now()
        if self._coming and self._coming[0][0] <= now_s + timeout_s:
            at_s, _, reply = heapq.heappop(self._coming)
            self.clock.advance(max(0.0, at_s - now_s))
            return reply
        self.clock.advance(timeout_s)
        return None


def answered(probe: Probe) -> Probed:
    """As the front does."""
    assert len(probe.payload) <= MAX_PROBE_BYTES
    payload = bytes(min(probe.reply_bytes, max(len(probe.payload), 1 << 16)))
    return Probed(probe.session, probe.opening, probe.token, ProbeStatus.OK, 0, payload)
