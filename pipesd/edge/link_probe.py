"""Probes over one link: a PROBE of any size, one or many, and when its answer came, by the edge's clock alone.

The cloud's front answers a PROBE at once, without a model. Encoding comes before a probe's time begins and decoding
after it ends. A probe without an answer in time is counted as lost and gives no time.
"""

from __future__ import annotations

import math
import random
from collections import deque

from pipesd.clock import Clock
from pipesd.edge.connection import Link, refusal
from pipesd.errors import Unreachable
from pipesd.protocol.messages import MAX_PROBE_BYTES, Draft, Error, Message, Probe, Probed, ProbeStatus
from pipesd.protocol.wire import decode, encode

MOST_UNDER_WAY = 48  # probes; the edge's queue takes 64
# Of bulk, least and most bytes of a probe, or of its answer: to a short probe the cloud says no more than that.
BULK_BYTES = {"up": (1 << 10, MAX_PROBE_BYTES), "down": (1 << 10, 1 << 16)}
_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS = 1.0, 10  # TCP may need five round trips to replace what was lost
_UNKNOWN_BYTE_S = 1e-4  # 80 kbit/s, while nothing is known
_LOST_FOR_GOOD = 3  # times in a row
_SEND_AGAIN_S = 0.005
_MESSAGE_S = 4e-3  # what a probe of bulk is to take of the link
_FIRST_WINDOW_BYTES = 1 << 14  # so much is under way at first, later what three round trips and this time carry
_WAITING_S = 0.02
_PACE_S = 0.05  # the pace is judged over a round trip, or so long


class Prober:
    """Sends probes over a link that is this object's alone, and times their answers."""

    def __init__(self, link: Link, clock: Clock, connect_s: float) -> None:
        self._link = link
        self._clock = clock
        self._connect_s = connect_s
        self._token = 1 << 16  # all tokens take the same bytes
        self._lost_in_a_row = 0
        self.sent = self.lost = 0
        self.rtt_s = 0.0  # the shortest so far
        self.byte_s = _UNKNOWN_BYTE_S  # what a byte up or down takes, roughly
        self.status = ProbeStatus.OK
        self.codec_s = 0.0  # encoding all and decoding an answer, of the last probes

    def connect(self) -> None:
        """Wait for the first answer. Raises Unreachable if there is none within `connect_s`."""
        until_s = self._clock.now() + self._connect_s
        while self._clock.now() < until_s:
            if self.train(1, frame_bytes(0, 0), deadline_s=until_s - self._clock.now()) is not None:
                self.sent, self.lost = 1, 0
                return
        raise Unreachable(f"{self._link.explain()} (waited {self._connect_s:g} s)")

    def round_trip(self, frame_bytes: int, reply_bytes: int = 0) -> float | None:
        """Seconds from giving a probe of that size to the idle link until its answer is here; None: it was lost."""
        times_s = self.train(1, frame_bytes, reply_bytes)
        return None if times_s is None else times_s[0]

    def train(
        self, count: int, frame_bytes: int, reply_bytes: int = 0, deadline_s: float | None = None
    ) -> list[float] | None:
        """When each of `count` probes, sent one behind the other, was answered, from before the first was given to the
        link; None if any was not. Raises Unreachable when several in a row were lost, and what an ERROR stands for.
        """
        probes = [self._probe(frame_bytes, reply_bytes) for _ in range(count)]
        begun_s = self._clock.now()
        payloads = [encode(probe) for probe in probes]
        begin_s = self._clock.now()
        until_s = begin_s + (deadline_s or self.deadline_s(count * (frame_bytes + reply_bytes)))
        awaited = {probe.token for probe in probes}
        answered_s: list[float] = []
        self.sent += count
        if all(self._send(payload, until_s) for payload in payloads):
            while awaited and (wait_s := until_s - self._clock.now()) > 0:
                payload = self._link.receive(wait_s)
                if payload is None:
                    continue
                now_s = self._clock.now()
                token = self._answered(decode(payload))
                if token in awaited:  # others came too late for what they were to tell
                    awaited.discard(token)
                    answered_s.append(now_s - begin_s)
                    until_s = max(until_s, now_s + self.deadline_s(len(awaited) * (frame_bytes + reply_bytes)))
                    self.codec_s = begin_s - begun_s + self._clock.now() - now_s
        self.lost += len(awaited)
        if awaited:
            self._lose()
            return None
        if count == 1:
            self.rtt_s = min(self.rtt_s or math.inf, answered_s[0])
        return answered_s

    def open_up(self, way: str, seconds: float) -> None:
        """Bulk in one direction for so long, so that TCP's window opens and `byte_s` is known.

        The link always has something to carry, but not much waits. Ends early when answers fail to come.
        """
        least_bytes, most_bytes = BULK_BYTES[way]
        begin_s = last_s = self._clock.now()
        awaited: dict[int, int] = {}
        answers = deque([(begin_s, 0)])  # of the last round trip, and the one before: (when it came, its bytes)
        message_bytes, window_bytes, fastest_s = least_bytes, _FIRST_WINDOW_BYTES, math.inf
        while awaited or self._clock.now() - begin_s < seconds:
            now_s = self._clock.now()
            while now_s - begin_s < seconds and len(awaited) < MOST_UNDER_WAY and sum(awaited.values()) < window_bytes:
                probe = self._probe(*_both_ways(way, message_bytes))
                if not self._link.send(encode(probe)):
                    break
                awaited[probe.token] = message_bytes
                self.sent += 1
            wait_s = last_s + self.deadline_s(sum(awaited.values())) - now_s
            if wait_s <= 0:
                self.lost += len(awaited)
                self._lose()
                return
            payload = self._link.receive(wait_s if awaited else _SEND_AGAIN_S)
            token = None if payload is None else self._answered(decode(payload))
            if token not in awaited:
                continue
            last_s = self._clock.now()
            answers.append((last_s, awaited.pop(token)))
            while answers[1][0] < last_s - max(_PACE_S, self.rtt_s):
                answers.popleft()
            passed_s, carried = last_s - answers[0][0], sum(length for _, length in answers) - answers[0][1]
            self.byte_s = max(passed_s, 1e-9) / carried
            fastest_s = min(fastest_s, self.byte_s)
            message_bytes = int(min(max(_MESSAGE_S / self.byte_s, least_bytes), most_bytes))
            window_bytes = max(int((3 * self.rtt_s + _WAITING_S) / self.byte_s), _FIRST_WINDOW_BYTES)
        self.byte_s = min(
            fastest_s, self.byte_s
        )  # at the end nothing was left to carry, or TCP replaced what it had lost

    def transfer(self, way: str, total_bytes: int) -> float | None:
        """Seconds until the last answer of as few probes as carry so many bytes in that direction."""
        count = -(-total_bytes // BULK_BYTES[way][1])
        answered_s = self.train(count, *_both_ways(way, total_bytes // count))
        return None if answered_s is None else answered_s[-1]

    def deadline_s(self, under_way_bytes: int) -> float:
        """How long to wait for an answer when so much is under way."""
        return max(_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS * self.rtt_s) + 8 * self.byte_s * under_way_bytes

    def _probe(self, frame_bytes: int, reply_bytes: int) -> Probe:
        """A probe whose frame has so many bytes, or as many as an empty one if that is more."""
        self._token += 1
        probe = Probe(0, 0, self._token, b"", reply_bytes)
        missing = frame_bytes - len(encode(probe))
        if missing > 0:
            longer = len(encode(probe._replace(payload=bytes(missing)))) - frame_bytes  # a longer length in the header
            probe = probe._replace(payload=random.randbytes(missing - longer))  # nothing on the way can compress it
        return probe

    def _send(self, payload: bytes, until_s: float) -> bool:
        """Give it to the link, as soon as that takes it; False: it did not until then."""
        while not self._link.send(payload):
            if self._clock.now() >= until_s:
                return False
            self._clock.sleep(_SEND_AGAIN_S)
        return True

    def _answered(self, message: Message) -> int | None:
        """The token of the probe that it answers."""
        if isinstance(message, Error):
            raise refusal(message.code, message.text)
        if not isinstance(message, Probed):
            return None
        self.status = message.status
        self._lost_in_a_row = 0
        return message.token

    def _lose(self) -> None:
        """Nothing was heard for a deadline's time, not even what came too late."""
        self._lost_in_a_row += 1
        if self.rtt_s and self._lost_in_a_row >= _LOST_FOR_GOOD:
            raise Unreachable(f"the link was lost while it was measured: {self._link.explain()}")


def _both_ways(way: str, length_bytes: int) -> tuple[int, int]:
    """Bytes of a probe and of its answer."""
    return (length_bytes, 0) if way == "up" else (0, length_bytes)


def frame_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes of a DRAFT with so many draft tokens, in the middle of a usual generation, with `token_bytes` more each."""
    frame = Draft(1 << 63, 1, 3, 600, (1000,) * tokens, 600 - tokens, nav=True)
    return len(encode(frame)) + token_bytes * tokens
