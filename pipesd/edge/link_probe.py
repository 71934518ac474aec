"""The measuring behind `pipesd-edge link`: probes of real frames' sizes over one connection, timed at the edge alone.

A PROBE is answered by the cloud's front at once, without a model. In turn:

1. *Warm-up.* The first round trips pay for the connection and for sleeping machines; they are thrown away until
   several in a row are alike. Then growing payloads open TCP's window and say roughly how fast the link is, so that
   what follows is cut to the time there is.
2. *Single probes* on an idle link, the sizes in random order, so that a link that drifts does not look like one on
   which size matters. A line through round trip over size gives start-up and time per token.
3. *Trains* of empty frames, one behind the other: the distance of their answers is what a message occupies.
4. *Bulk* up with empty answers, then down with empty questions: the slope of time over bytes is the bandwidth,
   whatever the round trip.

Only differences of one clock are used. Encoding comes before a probe's time begins and decoding after it ends. A probe
without an answer in time is counted as lost and gives no time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from pipesd.clock import Clock
from pipesd.edge.connection import Link, refusal
from pipesd.edge.link_figures import LinkFigures, Rate, figures_of
from pipesd.errors import Unreachable
from pipesd.policy.estimate import fit_line
from pipesd.protocol.messages import MAX_PROBE_BYTES, Draft, Error, Message, Probe, Probed, ProbeStatus
from pipesd.protocol.wire import decode, encode

ID_BYTES = 4  # of a draft token on the wire
SIZES = (1, 2, 4, 8, 16, 32)  # draft tokens of a probe's frame
REPLY_BYTES = 1 << 16  # the most that a cloud answers to a short probe
TRAIN = 16  # frames
TRAINS = 15
MOST_BULK = 6  # transfers of each size
LEAST_LINES = 3  # sizes, and times of each, below which a line says nothing
_ALIKE = 1.25, 0.5e-3  # round trips up to so many times the shortest and so many s are alike
_ALIKE_RUN, _MOST_WARM_UPS = 4, 40
_BULK_MESSAGES = 32  # probes of one transfer; the edge's queue takes 64
_FIRST_BULK_BYTES = 2048
_BULK_ROUND_TRIPS, _BULK_S = 3.0, 0.1  # a transfer that takes so much longer than a probe tells the bandwidth
_TRANSFERS_TO_COME = 10  # about as many of the longest kind are to follow
_NO_FASTER = 0.9  # share of the time before, from which on the same transfer counts as no faster
_UNKNOWN_BYTE_S = 1e-3  # 8 kbit/s, while nothing is known
_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS = 1.0, 10  # TCP may need five round trips to replace what was lost
_LOST_FOR_GOOD = 3  # probes in a row
_SEND_AGAIN_S = 0.005
_PHASES = {"warm-up": 0.15, "probes": 0.45, "trains": 0.55, "up": 0.78, "down": 1.0}  # over by this share of the time

Tell = Callable[[str, float], None]  # which phase runs, and which share of the time is over


@dataclass(frozen=True)
class Effort:
    """How much to measure: times of each size, bytes of a token beyond its id, about how long in all, a seed."""

    repeats: int
    token_bytes: int
    seconds: float
    seed: int


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
        self.byte_s = 0.0  # what a byte takes, roughly, upwards or downwards, whichever is slower
        self.status = ProbeStatus.OK
        self.codec_s = 0.0  # encoding all and decoding an answer, of the last probes

    def connect(self) -> None:
        """Wait for the first answer. Raises Unreachable if there is none within `connect_s`."""
        until_s = self._clock.now() + self._connect_s
        while self._clock.now() < until_s:
            if self.train(1, 0, deadline_s=until_s - self._clock.now()) is not None:
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
        if deadline_s is None:
            deadline_s = max(_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS * self.rtt_s)
            deadline_s += 4 * (self.byte_s or _UNKNOWN_BYTE_S) * count * (frame_bytes + reply_bytes)
        until_s = begin_s + deadline_s
        awaited = {probe.token for probe in probes}
        answered_s: list[float] = []
        self.sent += count
        if self._send(payloads, until_s):
            while awaited and (wait_s := until_s - self._clock.now()) > 0:
                payload = self._link.receive(wait_s)
                if payload is None:
                    continue
                now_s = self._clock.now()
                if self._answers(decode(payload), awaited):
                    answered_s.append(now_s - begin_s)
                    self.codec_s = begin_s - begun_s + self._clock.now() - now_s
        self.lost += len(awaited)
        if awaited:
            self._lose()
            return None
        self._lost_in_a_row = 0
        if count == 1:
            self.rtt_s = min(self.rtt_s or math.inf, answered_s[0])
        return answered_s

    def _probe(self, frame_bytes: int, reply_bytes: int) -> Probe:
        """A probe whose frame has so many bytes, or as many as an empty one if that is more."""
        self._token += 1
        probe = Probe(0, 0, self._token, b"", reply_bytes)
        missing = frame_bytes - len(encode(probe))
        if missing > 0:
            longer = len(encode(probe._replace(payload=bytes(missing)))) - frame_bytes  # a longer length in the header
            probe = probe._replace(payload=random.randbytes(missing - longer))  # nothing on the way can compress it
        return probe

    def _send(self, payloads: Sequence[bytes], until_s: float) -> bool:
        for payload in payloads:
            while not self._link.send(payload):
                if self._clock.now() >= until_s:
                    return False
                self._clock.sleep(_SEND_AGAIN_S)
        return True

    def _answers(self, message: Message, awaited: set[int]) -> bool:
        """Whether it is the answer to one of those; others came too late for what they were to tell."""
        if isinstance(message, Error):
            raise refusal(message.code, message.text)
        if not isinstance(message, Probed) or message.token not in awaited:
            return False
        awaited.remove(message.token)
        self.status = message.status
        return True

    def _lose(self) -> None:
        self._lost_in_a_row += 1
        if self.rtt_s and self._lost_in_a_row >= _LOST_FOR_GOOD:
            raise Unreachable(f"the link was lost while it was measured: {self._link.explain()}")


def measure(link: Link, clock: Clock, effort: Effort, connect_s: float, tell: Tell = lambda *_: None) -> LinkFigures:
    """Measure the link to a cloud's front.

    Raises Unreachable if nobody answers within `connect_s` or the link is lost for good, ProtocolError or Refused for
    what the other side says.
    """
    return _Measuring(Prober(link, clock, connect_s), clock, effort, tell).run()


class _Measuring:
    def __init__(self, prober: Prober, clock: Clock, effort: Effort, tell: Tell) -> None:
        self._prober, self._clock, self._effort, self._tell = prober, clock, effort, tell
        self._random = random.Random(effort.seed)
        self._codecs_s: list[float] = []  # of single probes

    def run(self) -> LinkFigures:
        self._tell("connecting", 0.0)
        self._prober.connect()
        self._begun_s = self._clock.now()
        self._warm_up()
        probes = self._single_probes(self._affordable_sizes())
        if not probes:
            raise Unreachable("no probe of the link was answered in time; it is too slow or too busy to be measured")
        gaps_s = self._trains()
        up, down = self._bulk("up", MAX_PROBE_BYTES), self._bulk("down", REPLY_BYTES)
        prober = self._prober
        return figures_of(
            probes, gaps_s, up, down, token_bytes=ID_BYTES + self._effort.token_bytes, codec_s=median(self._codecs_s),
            sent=prober.sent, lost=prober.lost, status=prober.status, took_s=self._clock.now() - self._begun_s,
        )  # fmt: skip

    def _time_left_s(self, phase: str) -> float:
        passed_s = self._clock.now() - self._begun_s
        self._tell(phase, min(1.0, passed_s / self._effort.seconds))
        return self._effort.seconds * _PHASES[phase] - passed_s

    def _warm_up(self) -> None:
        """Until round trips are alike, then until a payload shows how fast the link is."""
        alike = 0
        for _ in range(_MOST_WARM_UPS):
            took_s = self._prober.round_trip(frame_bytes(1, 0))
            times, more_s = _ALIKE
            alike = alike + 1 if took_s is not None and took_s <= times * self._prober.rtt_s + more_s else 0
            if alike == _ALIKE_RUN or self._time_left_s("warm-up") <= 0:
                break
        self._grow("warm-up", MAX_PROBE_BYTES)

    def _affordable_sizes(self) -> list[int]:
        """Those sizes, in draft tokens, that a probe can have and of which the time allows a few rounds."""
        token_bytes = self._effort.token_bytes
        most = next(n for n in range(SIZES[-1], 0, -1) if n == 1 or frame_bytes(n, token_bytes) <= MAX_PROBE_BYTES)
        sizes = [n for n in SIZES if n <= most]
        if len(sizes) <= LEAST_LINES:
            sizes = list(range(1, most + 1))
        round_s = self._effort.seconds * (_PHASES["probes"] - _PHASES["warm-up"]) / LEAST_LINES
        while len(sizes) > LEAST_LINES and self._round_s(sizes) > round_s:
            sizes.pop()
        return sizes

    def _round_s(self, sizes: Sequence[int]) -> float:
        """About how long one probe of each size takes."""
        beyond_bytes = sum(frame_bytes(n, self._effort.token_bytes) for n in sizes)
        return len(sizes) * self._prober.rtt_s + beyond_bytes * self._prober.byte_s

    def _single_probes(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """(draft tokens, s) of probes on an idle link, the smallest size twice as often as the others."""
        times: list[tuple[int, float]] = []
        for done in range(self._effort.repeats):
            for size in self._shuffled([sizes[0], *sizes]):
                if self._time_left_s("probes") <= 0 and done >= LEAST_LINES:
                    return times
                took_s = self._prober.round_trip(frame_bytes(size, self._effort.token_bytes))
                if took_s is not None:
                    times.append((size, took_s))
                    self._codecs_s.append(self._prober.codec_s)
        return times

    def _trains(self) -> list[float]:
        """What one frame of a train occupies, of each train."""
        gaps_s = []
        for done in range(TRAINS):
            if self._time_left_s("trains") <= 0 and done >= LEAST_LINES:
                break
            answered_s = self._prober.train(TRAIN, frame_bytes(0, 0))
            if answered_s is not None:
                gaps_s.append((answered_s[-1] - answered_s[0]) / (TRAIN - 1))
        return gaps_s

    def _bulk(self, way: str, message_bytes: int) -> Rate | None:
        """Bits a second in one direction; None if not enough was answered."""
        most_bytes = self._grow(way, message_bytes)
        parts = [most_bytes * part // 4 for part in (1, 2, 3, 4)]
        sizes, times_s = [], []
        done = 0
        while done < LEAST_LINES or (done < MOST_BULK and self._time_left_s(way) > 0):
            for total_bytes in self._shuffled(parts):
                took_s = self._transfer(way, total_bytes, message_bytes)
                if took_s is not None:
                    sizes.append(total_bytes)
                    times_s.append(took_s)
            done += 1
        if len(sizes) < LEAST_LINES:
            return None
        line = fit_line(sizes, times_s)
        return Rate.of(line) if line.spread_enough and line.slope_known else None

    def _grow(self, way: str, message_bytes: int) -> int:
        """Send more and more until a transfer takes long enough to tell the bandwidth, and then again until TCP lets
        it through as fast as before; its bytes."""
        total_bytes, before_s = _FIRST_BULK_BYTES, math.inf
        while True:
            took_s = self._transfer(way, total_bytes, message_bytes)
            left_s = self._time_left_s(way)
            if took_s is None:
                return total_bytes
            extra_s = max(took_s - self._prober.rtt_s, 0.0)
            self._prober.byte_s = extra_s / total_bytes
            enough = extra_s >= max(_BULK_S, _BULK_ROUND_TRIPS * self._prober.rtt_s)
            enough = enough or total_bytes >= _BULK_MESSAGES * message_bytes
            if (enough and took_s >= _NO_FASTER * before_s) or left_s < _TRANSFERS_TO_COME * took_s:
                return total_bytes
            if enough:
                before_s = took_s
            else:
                total_bytes *= 2

    def _transfer(self, way: str, total_bytes: int, message_bytes: int) -> float | None:
        """Seconds until the last answer of as few probes as carry so many bytes in that direction."""
        count = -(-total_bytes // message_bytes)
        up_bytes, reply_bytes = (0, total_bytes // count) if way == "down" else (total_bytes // count, 0)
        answered_s = self._prober.train(count, up_bytes, reply_bytes)
        return None if answered_s is None else answered_s[-1]

    def _shuffled(self, sizes: Sequence[int]) -> list[int]:
        return self._random.sample(sizes, len(sizes))


def frame_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes of a DRAFT with so many draft tokens, in the middle of a usual generation, with `token_bytes` more each."""
    frame = Draft(1 << 63, 1, 3, 600, (1000,) * tokens, 600 - tokens, nav=True)
    return len(encode(frame)) + token_bytes * tokens
