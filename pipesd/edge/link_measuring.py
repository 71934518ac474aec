"""The measuring behind `pipesd-edge link`: probes of real frames' sizes over one connection, timed at the edge alone.

In turn:

1. *Warm-up.* The first round trips pay for the connection and for sleeping machines; they are thrown away until
   several in a row are alike.
2. *Up*. Long probes, as many under way as the link takes, open TCP's window and say roughly how fast the link is.
   Then transfers of several lengths, with empty answers: the slope of time over bytes is the bandwidth, whatever the
   round trip. What follows is cut to the time that there is.
3. *Single probes* on an idle link, the sizes in random order, so that a link that drifts does not look like one on
   which size matters. A line through round trip over size gives start-up and time per token.
4. *Trains* of empty frames, one behind the other: the distance of their answers is what a message occupies.
5. *Down*: as up, with empty questions and long answers.

Only differences of one clock are used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from pipesd.clock import Clock
from pipesd.edge.connection import Link
from pipesd.edge.link_figures import LinkFigures, Rate, figures_of
from pipesd.edge.link_probe import BULK_BYTES, MOST_UNDER_WAY, Prober, frame_bytes
from pipesd.errors import Unreachable
from pipesd.policy.estimate import fit_line
from pipesd.protocol.messages import ID_BYTES, MAX_PROBE_BYTES

SIZES = (0, 1, 2, 4, 8, 16, 32)  # draft tokens of a probe's frame; without one it only asks for verification
TRAIN = 16  # frames
TRAINS = 15
LEAST_ROUNDS = 2  # of all sizes, and trains, however long they take
LEAST_SIZES = 3  # for a line
_ALIKE = 1.25, 0.5e-3  # round trips up to so many times the shortest and so many s are alike
_ALIKE_RUN, _MOST_WARM_UPS = 3, 40
_OPENING_S, _OPENING_ROUND_TRIPS = 0.4, 10  # for so long TCP's window is opened
_TRANSFER_S = 0.06  # of the longest, beyond its round trip; more would not fit into many a queue
_LEAST_TRANSFER_BYTES = 1 << 12
_PARTS = 3  # the longest, a half, a third
_MOST_TRANSFERS, _LATEST_TRANSFERS = 6 * _PARTS, 4 * _PARTS  # the earlier ones had a window that opened, perhaps
_SPARE_ROUNDS, _OVERTIME = 6, 0.1  # may be thrown away, until so much more than the time is over
_LATE = 1.5, 0.02  # so many round trips and so many s before the first byte: TCP replaced what it had lost
_OPENS = 0.9  # share of the least time of a byte so far, below which the window was still opening
_STEP, _LEAST_PACE_S = 3, 1e-11  # what is gone by changes so many times at most
_PHASES = {"warm-up": 0.08, "up": 0.36, "probes": 0.62, "trains": 0.7, "down": 1.0}  # over by this share of the time

Tell = Callable[[str, float], None]  # which phase runs, and which share of the time is over


@dataclass(frozen=True)
class Effort:
    """How much to measure: times of each size, bytes of a token beyond its id, about how long in all, a seed."""

    repeats: int
    token_bytes: int
    seconds: float
    seed: int


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
        paces: list[float] = []
        spare = _SPARE_ROUNDS
        while len(times) < LEAST_ROUNDS * _PARTS or (len(times) < _MOST_TRANSFERS and self._time_left_s(way) > 0):
            latest = self._transfers(way)
            if self._time_left_s(way) <= -_OVERTIME * self._effort.seconds:
                spare = 0
            if len(latest) < _PARTS:
                if not spare:
                    break
                spare -= 1
                continue
            (least_bytes, least_s), (most_bytes, most_s) = min(latest), max(latest)
            pace_s = max((most_s - least_s) / (most_bytes - least_bytes), _LEAST_PACE_S)
            if spare and least_s - pace_s * least_bytes > _LATE[0] * prober.rtt_s + _LATE[1]:
                spare -= 1
                continue
            if spare and paces and pace_s < _OPENS * min(paces):
                times, spare = [], spare - 1
            times += latest
            paces.append(pace_s)
            before_s = prober.byte_s
            prober.byte_s = min(max(median(paces), before_s / _STEP), before_s * _STEP)
        sizes, times_s = zip(*times[-_LATEST_TRANSFERS:], strict=True) if times else ((), ())
        return Rate.of(fit_line(sizes, times_s))

    def _transfers(self, way: str) -> list[tuple[int, float]]:
        """(bytes, s) of transfers of several lengths; the longest takes a while at the pace that is known."""
        prober = self._prober
        longest_bytes = int(_TRANSFER_S / prober.byte_s)
        longest_bytes = min(max(longest_bytes, _LEAST_TRANSFER_BYTES), MOST_UNDER_WAY * BULK_BYTES[way][1])
        lengths = self._shuffled([longest_bytes // part for part in range(_PARTS, 0, -1)])
        taken = [(length, prober.transfer(way, length)) for length in lengths]
        return [(length, took_s) for length, took_s in taken if took_s is not None]

    def _shuffled(self, sizes: Sequence[int]) -> list[int]:
        return self._random.sample(sizes, len(sizes))
