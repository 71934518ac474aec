"""The measuring behind `pipesd-edge link`: probes of real frames' sizes over one connection, timed at the edge alone.

A PROBE is answered by the cloud's front at once, without a model. In turn:

1. *Warm-up.* The first round trips pay for the connection and for sleeping machines; they are thrown away until
   several in a row are alike.
2. *Up*. Long probes, as many under way as the link takes, open TCP's window and say roughly how fast the link is.
   Then transfers of several lengths, with empty answers: the slope of time over bytes is the bandwidth, whatever the
   round trip. What follows is cut to the time that there is.
3. *Single probes* on an idle link, the sizes in random order, so that a link that drifts does not look like one on
   which size matters. A line through round trip over size gives start-up and time per token.
4. *Trains* of empty frames, one behind the other: the distance of their answers is what a message occupies.
5. *Down*: as up, with empty questions and long answers.

Only differences of one clock are used. Encoding comes before a probe's time begins and decoding after it ends. A probe
without an answer in time is counted as lost and gives no time.
"""

from __future__ import annotations

import math
import random
from collections import deque
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
SIZES = (0, 1, 2, 4, 8, 16, 32)  # draft tokens of a probe's frame; without one it only asks for verification
REPLY_BYTES = 1 << 16  # the most that a cloud answers to a short probe
TRAIN = 16  # frames
TRAINS = 15
LEAST_ROUNDS = 2  # of all sizes, and trains, however long they take
LEAST_SIZES = 3  # for a line
_ALIKE = 1.25, 0.5e-3  # round trips up to so many times the shortest and so many s are alike
_ALIKE_RUN, _MOST_WARM_UPS = 3, 40
_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS = 1.0, 10  # TCP may need five round trips to replace what was lost
_UNKNOWN_BYTE_S = 1e-4  # 80 kbit/s, while nothing is known
_LOST_FOR_GOOD = 3  # times in a row
_SEND_AGAIN_S = 0.005
# Bulk: least and most bytes of a probe or its answer, probes under way (the edge's queue takes 64).
_BULK_BYTES = {"up": (1024, MAX_PROBE_BYTES), "down": (1024, REPLY_BYTES)}
_MOST_UNDER_WAY, _FIRST_WINDOW_BYTES, _LEAST_TRANSFER_BYTES = 48, 1 << 13, 1 << 12
_MESSAGE_S, _WAITING_S = (
    4e-3,
    0.02,
)  # what a probe is to take of the link, and all that wait beside a round trip's worth
_PACE_S = 0.05  # over so long, or a round trip, the pace is judged
_OPENING_S, _OPENING_ROUND_TRIPS = 0.4, 12
_TRANSFER_S = 0.1, 0.3  # the longest beyond its round trip: a round trip within these
_PARTS = 3  # the longest, a half, a third
_MOST_TRANSFERS = 6 * _PARTS
_MOST_OPENINGS = 4
_OPENS = 0.85  # share of the time a byte took before, below which the window is still opening
_PHASES = {"warm-up": 0.1, "up": 0.35, "probes": 0.65, "trains": 0.75, "down": 1.0}  # over by this share of the time

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
        if deadline_s is None:
            deadline_s = self.deadline_s(count * (frame_bytes + reply_bytes))
        until_s = begin_s + deadline_s
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
                    self.codec_s = begin_s - begun_s + self._clock.now() - now_s
        self.lost += len(awaited)
        if awaited:
            self._lose()
            return None
        self._lost_in_a_row = 0
        if count == 1:
            self.rtt_s = min(self.rtt_s or math.inf, answered_s[0])
        return answered_s

    def open_up(self, way: str, seconds: float) -> None:
        """Bulk in one direction for so long, so that TCP's window opens and `byte_s` is known.

        The link always has something to carry, but not much waits. Ends early when answers fail to come.
        """
        least_bytes, most_bytes = _BULK_BYTES[way]
        begin_s = last_s = self._clock.now()
        awaited: dict[int, int] = {}
        answers = deque([(begin_s, 0)])  # of the last round trip, and the one before: (when it came, its bytes)
        message_bytes, window_bytes = least_bytes, _FIRST_WINDOW_BYTES
        while awaited or self._clock.now() - begin_s < seconds:
            now_s = self._clock.now()
            while now_s - begin_s < seconds and len(awaited) < _MOST_UNDER_WAY and sum(awaited.values()) < window_bytes:
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
            self._lost_in_a_row = 0
            answers.append((last_s, awaited.pop(token)))
            while answers[1][0] < last_s - max(_PACE_S, self.rtt_s):
                answers.popleft()
            passed_s, carried = last_s - answers[0][0], sum(length for _, length in answers) - answers[0][1]
            self.byte_s = max(passed_s, 1e-9) / carried
            message_bytes = int(min(max(_MESSAGE_S / self.byte_s, least_bytes), most_bytes))
            window_bytes = max(int((2 * self.rtt_s + _WAITING_S) / self.byte_s), _FIRST_WINDOW_BYTES)

    def transfer(self, way: str, total_bytes: int) -> float | None:
        """Seconds until the last answer of as few probes as carry so many bytes in that direction."""
        count = -(-total_bytes // _BULK_BYTES[way][1])
        answered_s = self.train(count, *_both_ways(way, total_bytes // count))
        return None if answered_s is None else answered_s[-1]

    def deadline_s(self, under_way_bytes: int) -> float:
        """How long to wait for an answer when so much is under way."""
        return max(_LEAST_DEADLINE_S, _DEADLINE_ROUND_TRIPS * self.rtt_s) + 4 * self.byte_s * under_way_bytes

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
        return message.token

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
        up = self._bulk("up")
        points = self._single_probes(self._affordable_sizes())
        if not points:
            raise Unreachable("no probe of the link was answered in time; it is too slow or too busy to be measured")
        gaps_s = self._trains()
        down = self._bulk("down")
        prober = self._prober
        return figures_of(
            points, gaps_s, up, down, token_bytes=ID_BYTES + self._effort.token_bytes, codec_s=median(self._codecs_s),
            sent=prober.sent, lost=prober.lost, status=prober.status, took_s=self._clock.now() - self._begun_s,
        )  # fmt: skip

    def _time_left_s(self, phase: str) -> float:
        passed_s = self._clock.now() - self._begun_s
        self._tell(phase, min(1.0, passed_s / self._effort.seconds))
        return self._effort.seconds * _PHASES[phase] - passed_s

    def _warm_up(self) -> None:
        """Until round trips are alike."""
        alike = 0
        for _ in range(_MOST_WARM_UPS):
            took_s = self._prober.round_trip(frame_bytes(1, 0))
            times, more_s = _ALIKE
            alike = alike + 1 if took_s is not None and took_s <= times * self._prober.rtt_s + more_s else 0
            if alike == _ALIKE_RUN or self._time_left_s("warm-up") <= 0:
                return

    def _affordable_sizes(self) -> list[int]:
        """Those sizes, in draft tokens, that a probe can have and of which the time allows a few rounds."""
        token_bytes = self._effort.token_bytes
        most = max(n for n in range(SIZES[-1] + 1) if frame_bytes(n, token_bytes) <= MAX_PROBE_BYTES)
        sizes = [n for n in SIZES if n <= most]
        round_s = self._effort.seconds * (_PHASES["probes"] - _PHASES["up"]) / LEAST_ROUNDS
        while len(sizes) > LEAST_SIZES and self._round_s(sizes) > round_s:
            sizes.pop()
        return sizes

    def _round_s(self, sizes: Sequence[int]) -> float:
        """About how long one probe of each size takes."""
        beyond_bytes = sum(frame_bytes(n, self._effort.token_bytes) for n in sizes)
        return len(sizes) * self._prober.rtt_s + beyond_bytes * self._prober.byte_s

    def _single_probes(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """(draft tokens, s) of probes on an idle link, the smallest twice as often: it tells start-up and latency."""
        times: list[tuple[int, float]] = []
        for done in range(self._effort.repeats):
            for size in self._shuffled([sizes[0], *sizes]):
                if self._time_left_s("probes") <= 0 and done >= LEAST_ROUNDS:
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
            if self._time_left_s("trains") <= 0 and done >= LEAST_ROUNDS:
                break
            answered_s = self._prober.train(TRAIN, frame_bytes(0, 0))
            if answered_s is not None:
                gaps_s.append((answered_s[-1] - answered_s[0]) / (TRAIN - 1))
        return gaps_s

    def _bulk(self, way: str) -> Rate | None:
        """The bandwidth in one direction; None if it cannot be told."""
        prober = self._prober
        prober.open_up(way, min(max(_OPENING_S, _OPENING_ROUND_TRIPS * prober.rtt_s), self._time_left_s(way) / 2))
        times: list[tuple[int, float]] = []
        openings = 0
        while len(times) < LEAST_ROUNDS * _PARTS or (len(times) < _MOST_TRANSFERS and self._time_left_s(way) > 0):
            before_s = prober.byte_s
            latest = self._transfers(way)
            if len(latest) < _PARTS:
                if self._time_left_s(way) <= 0:
                    break
                continue
            (least_bytes, least_s), (most_bytes, most_s) = min(latest), max(latest)
            prober.byte_s = max((most_s - least_s) / (most_bytes - least_bytes), 1e-10)
            if prober.byte_s < _OPENS * before_s and openings < _MOST_OPENINGS and self._time_left_s(way) > 0:
                times, openings = [], openings + 1  # TCP's window was still opening
            else:
                times += latest
        sizes, times_s = zip(*times, strict=True) if times else ((), ())
        return Rate.of(fit_line(sizes, times_s))

    def _transfers(self, way: str) -> list[tuple[int, float]]:
        """(bytes, s) of transfers of several lengths; the longest takes a while at the pace that is known."""
        prober = self._prober
        least_s, most_s = _TRANSFER_S
        longest_bytes = int(min(max(least_s, prober.rtt_s), most_s) / prober.byte_s)
        longest_bytes = min(max(longest_bytes, _LEAST_TRANSFER_BYTES), _MOST_UNDER_WAY * _BULK_BYTES[way][1])
        lengths = self._shuffled([longest_bytes // part for part in range(_PARTS, 0, -1)])
        taken = [(length, prober.transfer(way, length)) for length in lengths]
        return [(length, took_s) for length, took_s in taken if took_s is not None]

    def _shuffled(self, sizes: Sequence[int]) -> list[int]:
        return self._random.sample(sizes, len(sizes))


def _both_ways(way: str, length_bytes: int) -> tuple[int, int]:
    """Bytes of a probe and of its answer."""
    return (length_bytes, 0) if way == "up" else (0, length_bytes)


def frame_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes of a DRAFT with so many draft tokens, in the middle of a usual generation, with `token_bytes` more each."""
    frame = Draft(1 << 63, 1, 3, 600, (1000,) * tokens, 600 - tokens, nav=True)
    return len(encode(frame)) + token_bytes * tokens
