"""The environment monitor: from what a run itself shows to what it knows of its link, its drafting and its cloud.

Times are differences taken on one machine; a clock that steps shows as a sample that cannot be, which is dropped and
counted. Of each figure the last 100 samples count (PipeSD, appendix D), until conditions change: then only what came
since. The two ends of a round trip cannot be told apart, so the link is taken as even: α is half of what a message of
no tokens takes there and back without the cloud's own time. β is not halved: answers do not grow with the tokens sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean, median

from pipesd.policy.estimate import MADN, SPREAD, Estimate, LineFit, fit_line

REMEMBERED = 100  # samples of each figure
REMEMBERED_ROUNDS = 32  # for the time per output token
REMEMBERED_TRAINS = 4
LONGEST_S = 60.0  # what took longer was a clock that stepped, a machine that slept, or an outage
WARM_UP = 3  # round trips: the first ones on a connection can be 50 times as long
RUN = 5  # samples off the band, to one side, are a change
RUN_AMONG_OUTLIERS = 7
OUTLIERS = 0.05  # share of samples
LONGEST_RUN = 40
BAND = 0.15  # share of the level; the band is at least so wide, to either side
DEVIATIONS = 4.0  # of the samples, likewise
PROBED_SIZES = 8  # distinct sizes that a line should go through (PipeSD, appendix D)
SURE = 1.5  # times the half-width of its interval: what β must be to count as above 0, 3 standard deviations
REFIT = 16  # round trips between two fits of the line
FRESH_TOKENS = 2000  # drafted without a round trip, after which what is known of the link is old
DELAY = 5.0  # times the mean of the other steps of a train: no step but a delay


class Level:
    """A figure that stays as it is, under noise, until it changes: the mean of the samples in a band about the median.

    The band is the larger of 15 % of the median, 4 standard deviations (by the median absolute deviation) and a floor.
    So outliers and the slow first tokens of a draft do not count. When 5 samples lie above the band, or below, with at
    most one other among them, those older are forgotten; where more than 5 % lie off the band anyway, 7 samples with at
    most two others. A change that is taken back within the 100 samples doubles the run that the next one needs, up to
    40, so that what goes to and fro is noise in the end.
    """

    __slots__ = (
        "_floor_s",
        "_high",
        "_hits",
        "_last",
        "_least",
        "_low",
        "_misses",
        "_need",
        "_new",
        "_samples",
        "_value",
    )

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # value, by how much it may be off
        self._low, self._high = -math.inf, math.inf
        self._hits = 0  # of the run, the last samples: those above the band, or below it as a negative number
        self._misses = 0  # the others of the run
        self._least = self._need = (
            RUN  # hits to be a change: for the outliers there are, and for the changes taken back
        )
        self._last = 0  # the direction of the last change
        self._value: float | None = None  # None: to be computed
        self._new = 0  # samples since it was

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, value: float, half: float = 0.0) -> bool:
        """One more sample (s), known to lie within `half` of the value; returns whether conditions have changed."""
        self._samples.append((value, half))
        self._new += 1
        if value - half > self._high:
            side = 1
        elif value + half < self._low:
            side = -1
        elif self._hits == 0:
            return False
        else:
            side = 0
        if side * self._hits > 0:
            self._hits += side
            return abs(self._hits) >= max(self._least, self._need) and self._changed()
        if self._hits and self._misses < max(self._least, self._need) // 3:
            self._misses += 1
        else:
            self._hits, self._misses = side, 0
        return False

    def replace(self, samples: Iterable[tuple[float, float]]) -> None:
        """The same samples, seen in another way."""
        self._samples = deque(samples, maxlen=REMEMBERED)
        self._value = None

    @property
    def value(self) -> float | None:
        """The level (s), None without samples. It is computed anew where an eighth of the samples is, and does not
        follow a run before that is a change."""
        if self._samples and (self._value is None or 8 * self._new >= len(self._samples)):
            before, run = self._parts()
            self._value, self._new = self._settle(before if len(before) >= RUN else before + run), 0
        return self._value

    def _parts(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """The samples before the run, and the run."""
        samples = list(self._samples)
        cut = max(len(samples) - abs(self._hits) - self._misses, 0)
        return samples[:cut], samples[cut:]

    def _changed(self) -> bool:
        """Whether the run is off the band of what came before it, if that was enough for one; if so, only the run is
        kept."""
        before, run = self._parts()
        direction = 1 if self._hits > 0 else -1
        self._hits = self._misses = 0
        if len(before) < RUN:
            self._value = None
            return False
        self._settle(before)
        edge = self._high if direction > 0 else -self._low
        if sum(direction * value - half > edge for value, half in run) < max(self._least, self._need):
            return False
        if direction == -self._last and len(before) + len(run) < REMEMBERED:
            self._need = min(2 * self._need, LONGEST_RUN)
        else:
            self._need = max(self._need // 2, RUN)
        self._last = direction
        self._samples = deque(run, maxlen=REMEMBERED)
        self._value, self._new = self._settle(run), 0
        return True

    def _settle(self, samples: Sequence[tuple[float, float]]) -> float:
        """Sets the band by the samples and returns their mean within it, each weighing as it is precise."""
        halves = sorted([half for _, half in samples])
        values = sorted([value for value, _ in samples])
        count = len(values)
        centre = _middle(values)
        if halves[-1] > 0.0:  # the imprecise ones do not move the centre
            precise = 2 * halves[count // 4] + self._floor_s
            centre = _middle(sorted([value for value, half in samples if half <= precise]))
        deviation = MADN * _middle(sorted([abs(value - centre) for value in values])) * (1 + 5 / count)
        if halves[-1] > 0.0:  # without what comes of being anywhere within `half`
            deviation = math.sqrt(max(deviation**2 - halves[count // 2] ** 2 / 3, deviation**2 / 100))
        width = max(BAND * centre, DEVIATIONS * deviation, self._floor_s)
        self._low, self._high = low, high = centre - width, centre + width
        inside = [sample for sample in samples if low - sample[1] <= sample[0] <= high + sample[1]]
        self._least = RUN if len(inside) >= (1 - OUTLIERS) * count else RUN_AMONG_OUTLIERS
        if halves[-1] == 0.0:
            return fmean([value for value, _ in inside])
        least = max(deviation, self._floor_s) ** 2
        total = weights = 0.0
        for value, half in inside:
            weight = 1 / (least + half * half / 3)
            total += weight * value
            weights += weight
        return total / weights


def _middle(ordered: Sequence[float]) -> float:
    """The median of what is in order."""
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


class Monitor:
    """Collects what a run shows; `snapshot` is what it knows. Times are in s. `dropped` counts what could be no
    measurement: negative, NaN, above LONGEST_S, or a cloud's time longer than the whole round trip."""

    def __init__(self) -> None:
        self.dropped = 0
        self._gamma = Level(2e-5)
        self._pass = Level(2e-4)
        self._trips: deque[tuple[int, float, float]] = deque(maxlen=REMEMBERED)  # tokens, time, by how much off
        self._link = Level(2e-4)  # of the same round trips, without β · tokens
        self._warm = 0  # round trips seen, up to WARM_UP
        self._trains: deque[list[tuple[int, float]]] = deque(maxlen=REMEMBERED_TRAINS)  # tokens, step
        self._steps_fit: LineFit | None = None
        self._sizes: set[int] = set()  # of trips and trains since conditions changed
        self._beta_s: float | None = None
        self._beta_uncertainty_s = math.inf
        self._gap_s: float | None = None
        self._unfitted = 0  # round trips since the last fit; REFIT: a fit is due
        self._since_trip = 0  # tokens drafted
        self._rounds: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_ROUNDS)
        self._round_began_s: float | None = None
        self._snapshot: Estimate | None = None

    def drafted(self, took_s: float) -> None:
        """One draft token took so long."""
        self._snapshot = None
        self._since_trip += 1
        if 0.0 <= took_s <= LONGEST_S:
            self._gamma.add(took_s)
        else:
            self.dropped += 1

    def passed(self, pass_s: float) -> None:
        """A verification took the cloud so long, by its own clock."""
        self._snapshot = None
        if 0.0 <= pass_s <= LONGEST_S:
            self._pass.add(pass_s)
        else:
            self.dropped += 1

    def round_trip(self, tokens: int, took_s: float, cloud_s: float, lag_s: float = 0.0) -> None:
        """A message of so many draft tokens went onto an idle link and its answer was read `took_s` later, of which
        `cloud_s` were the cloud's own. The answer may have lain unread for up to `lag_s`: the middle is taken, and
        weighs less."""
        self._snapshot = None
        link_s = took_s - cloud_s
        if not (cloud_s >= 0.0 and lag_s >= 0.0 and 0.0 <= link_s <= LONGEST_S):
            self.dropped += 1
            return
        half = min(lag_s, link_s) / 2
        value = link_s - half
        self._since_trip = 0
        if self._warm < WARM_UP:
            self._warm += 1
            self._trips.append((tokens, value, half))
            return
        if not self._link:  # the first that counts
            self._trips.clear()
        self._trips.append((tokens, value, half))
        if tokens not in self._sizes:
            self._sizes.add(tokens)
            self._unfitted = REFIT
        self._unfitted += 1
        if self._link.add(value - (self._beta_s or 0.0) * tokens, half):
            self._forget(len(self._link))

    def train(self, replies: Sequence[tuple[int, float]]) -> None:
        """Messages sent at once, one behind the other: for each answer, in order, the tokens that its message carried
        and the time from the sending of the train to it. The first is a round trip; each later one comes gap + β·tokens
        behind the one before. No gap is seen below what the cloud takes to handle a message (about 0.05 ms)."""
        steps: list[tuple[int, float]] = []
        before_s = None
        for tokens, reply_s in replies:
            if not (before_s or 0.0) <= reply_s <= LONGEST_S:
                self.dropped += 1
                continue
            if before_s is None:
                self.round_trip(tokens, reply_s, 0.0)
            else:
                steps.append((tokens, reply_s - before_s))
            self._sizes.add(tokens)
            before_s = reply_s
        if steps:
            self._trains.append(steps)
            self._steps_fit = None
            self._unfitted = REFIT
            self._snapshot = None

    def committed(self, tokens: int, now_s: float) -> None:
        """So many output tokens were committed at that time. The first call of a generation, or after `paused`, only
        starts the clock."""
        self._snapshot = None
        if not math.isfinite(now_s) or tokens < 0:
            self.dropped += 1
            return
        if self._round_began_s is not None:
            if tokens == 0:
                return
            if 0.0 <= now_s - self._round_began_s <= LONGEST_S:
                self._rounds.append((tokens, now_s - self._round_began_s))
            else:
                self.dropped += 1
        self._round_began_s = now_s

    def paused(self) -> None:
        """The generation has ended: what passes until the next counts for nothing."""
        self._round_began_s = None

    @property
    def needs_probes(self) -> tuple[int, ...]:
        """Sizes (tokens) of probes that would help to know the link, smallest first; empty where none would.

        As many unseen small sizes as are missing to 8 distinct ones since conditions last changed; 1 where the sizes
        seen lie too close together for a slope, or where 2000 tokens were drafted without a round trip."""
        missing = PROBED_SIZES - len(self._sizes)
        if missing > 0:
            unseen = (size for size in range(1, PROBED_SIZES + len(self._sizes) + 1) if size not in self._sizes)
            return tuple(islice(unseen, missing))
        if max(self._sizes) < SPREAD * min(self._sizes) or self._since_trip > FRESH_TOKENS:
            return (1,)
        return ()

    def snapshot(self) -> Estimate:
        """What is known now. The same object until something new was seen."""
        if self._snapshot is None:
            self._snapshot = self._estimate()
        return self._snapshot

    def _estimate(self) -> Estimate:
        if self._unfitted >= REFIT:
            self._fit()
        beta_s = self._beta_s or 0.0
        if self._link:
            level_s = self._link.value
        else:  # of a warm-up the shortest tells most
            level_s = min((value - beta_s * tokens for tokens, value, _ in self._trips), default=None)
        alpha_s = rtt_s = gap_s = None
        if level_s is not None:
            alpha_s = max(level_s, 0.0) / 2
            rtt_s = 2 * alpha_s + beta_s * fmean(tokens for tokens, _, _ in self._trips)
            gap_s = None if self._gap_s is None else min(self._gap_s, alpha_s)
        return Estimate(
            alpha_s=alpha_s,
            beta_s=self._beta_s,
            gamma_s=self._gamma.value,
            gap_s=gap_s,
            rtt_s=rtt_s,
            tpt_s=sum(took_s for _, took_s in self._rounds) / sum(count for count, _ in self._rounds)
            if self._rounds
            else None,
            pass_s=self._pass.value,
            beta_is_zero=self._beta_s == 0.0,
            samples=len(self._trips),
        )

    def _fit(self) -> None:
        """β from the round trips or from the steps of trains, whichever tell more, and with it the gap and the level.

        Where neither has enough spread, or where they tell less than what β was taken from and do not speak against it,
        it stays what it was, as far as messages take that long at all."""
        self._unfitted = 0
        if self._steps_fit is None and self._trains:
            self._steps_fit = fit_line(*zip(*(step for train in self._trains for step in train), strict=True))
        trips_fit = fit_line(*zip(*self._trips, strict=True)) if self._link else None
        fits = [fit for fit in (self._steps_fit, trips_fit) if fit is not None and fit.spread_enough]
        if fits:
            fit = min(fits, key=_uncertainty_s)
            agrees = self._beta_s is not None and fit.slope_low_s <= self._beta_s <= fit.slope_high_s
            if not (agrees and self._beta_s and _uncertainty_s(fit) > self._beta_uncertainty_s):
                # It is looked for again and again, so more is asked than that the interval is above 0.
                sure = fit.slope_known and fit.slope_s > SURE * (fit.slope_high_s - fit.slope_s)
                self._beta_s = fit.slope_s if sure else 0.0
                self._beta_uncertainty_s = _uncertainty_s(fit)
        elif self._beta_s is not None and trips_fit is not None:
            self._beta_s = min(self._beta_s, trips_fit.slope_high_s)
        beta_s = self._beta_s or 0.0
        if self._link:
            self._link.replace((value - beta_s * tokens, half) for tokens, value, half in self._trips)
        if self._trains:
            self._gap_s = median(_gap([step_s - beta_s * tokens for tokens, step_s in train]) for train in self._trains)

    def _forget(self, kept: int) -> None:
        """The link is another: only the last round trips tell of it. β and gap stay the last known."""
        for _ in range(len(self._trips) - kept):
            self._trips.popleft()
        self._trains.clear()
        self._steps_fit = None
        self._sizes = {tokens for tokens, _, _ in self._trips}
        self._unfitted = REFIT


def _uncertainty_s(fit: LineFit) -> float:
    return fit.slope_high_s - fit.slope_low_s


def _gap(steps_s: list[float]) -> float:
    """Their mean without delays, at least 0. The mean, since answers that are read together make a step of nothing and
    one of twice as much."""
    steps_s = sorted(steps_s)
    while len(steps_s) > 1 and steps_s[-1] > DELAY * max(fmean(steps_s[:-1]), 1e-4):
        steps_s.pop()
    return max(fmean(steps_s), 0.0)
