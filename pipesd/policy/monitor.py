"""The environment monitor: from what a run itself shows to what it knows of its link, its drafting and its cloud.

Times are differences taken on one machine; a clock that steps shows as a sample that cannot be, which is dropped and
counted. Of each figure the last 100 samples count (PipeSD, appendix D), until conditions change: then only what came
since. The two ends of a round trip cannot be told apart, so the link is taken as even: α is half of what a message of
no tokens takes there and back without the cloud's own time. β is not halved: answers do not grow with the tokens sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import fmean, median

from pipesd.policy.estimate import FEWEST_SIZES, SPREAD, Estimate, LineFit, fit_line
from pipesd.policy.level import REMEMBERED, Level

REMEMBERED_ROUNDS = 32  # for the time per output token
REMEMBERED_TRAINS = 4
LONGEST_S = 60.0  # what took longer was a clock that stepped, a machine that slept, or an outage
WARM_UP = 3  # round trips: the first ones on a connection can be 50 times as long
PROBED_SIZES = 8  # distinct sizes that a line should go through (PipeSD, appendix D)
VAGUE = 0.2  # share of a slope that answers left unread may have made, for it to count
SURE = 1.5  # times the half-width of its interval: what β must be to count as above 0, 3 standard deviations
LITTLE = 0.2  # share of a round trip: up to it, the β of a usual message moves no plan, like a change of any figure
REFIT = 25  # round trips between two fits of the line
FRESH_TOKENS = 2000  # drafted without a round trip, after which what is known of the link is old
DELAY = 5.0  # times the mean of the other steps of a train: no step but a delay


class Monitor:
    """Collects what a run shows; `snapshot` is what it knows. Times are in s. `dropped` counts what could be no
    measurement: negative, NaN, above LONGEST_S, or a cloud's time longer than the whole round trip."""

    def __init__(self) -> None:
        self.dropped = 0
        self._gamma = Level(2e-5)
        self._pass = Level(2e-4)
        self._passes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_ROUNDS)  # draft tokens, time
        self._trips: deque[tuple[int, float, float]] = deque()  # tokens, time, by how much off; the last REMEMBERED
        self._trip_tokens = 0  # of all these together
        self._link = Level(2e-4)  # of the same round trips, without β · tokens
        self._warm = 0  # round trips seen, up to WARM_UP
        self._trains: deque[list[tuple[int, float]]] = deque(maxlen=REMEMBERED_TRAINS)  # tokens, step
        self._steps_fit: LineFit | None = None
        self._sizes: set[int] = set()  # of trips and trains since conditions changed
        self._unseen = _unseen(self._sizes)
        self._beta_s: float | None = None
        self._beta_uncertainty_s = math.inf
        self._gap_s: float | None = None
        self._unfitted = 0  # round trips since the last fit; REFIT: a fit is due
        self._since_trip = 0  # tokens drafted
        self._round_tokens: deque[int] = deque(maxlen=REMEMBERED_ROUNDS)
        self._round_times_s: deque[float] = deque(maxlen=REMEMBERED_ROUNDS)
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

    def passed(self, pass_s: float, tokens: int = 0) -> None:
        """A verification of so many draft tokens took the cloud so long, by its own clock."""
        self._snapshot = None
        if 0.0 <= pass_s <= LONGEST_S:
            self._pass.add(pass_s)
            self._passes.append((tokens, pass_s))
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
            self._keep_trip(tokens, value, half)
            return
        if not self._link:  # the first that counts
            self._drop_trips(len(self._trips))
        self._keep_trip(tokens, value, half)
        if tokens not in self._sizes:
            self._see(tokens)
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
            self._see(tokens)
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
                self._round_tokens.append(tokens)
                self._round_times_s.append(now_s - self._round_began_s)
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
        return self._unseen or ((1,) if self._since_trip > FRESH_TOKENS else ())

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
            rtt_s = 2 * alpha_s + beta_s * (self._trip_tokens / len(self._trips))
            gap_s = None if self._gap_s is None else min(self._gap_s, alpha_s)
        return Estimate(
            alpha_s=alpha_s,
            beta_s=self._beta_s,
            gamma_s=self._gamma.value,
            gap_s=gap_s,
            rtt_s=rtt_s,
            tpt_s=sum(self._round_times_s) / sum(self._round_tokens) if self._round_tokens else None,
            pass_s=self._pass.value,
            beta_is_zero=self._beta_s == 0.0,
            samples=len(self._trips),
            passes=tuple(self._passes),
        )

    def _keep_trip(self, tokens: int, value: float, half: float) -> None:
        self._trips.append((tokens, value, half))
        self._trip_tokens += tokens
        self._drop_trips(len(self._trips) - REMEMBERED)

    def _drop_trips(self, count: int) -> None:
        """Forget the oldest so many."""
        for _ in range(count):
            self._trip_tokens -= self._trips.popleft()[0]

    def _see(self, tokens: int) -> None:
        """A message of so many tokens was timed."""
        self._sizes.add(tokens)
        self._unseen = _unseen(self._sizes)

    def _fit(self) -> None:
        """β from the round trips or from the steps of trains, whichever tell more, and with it the gap and the level.

        Where neither has enough spread, or where they tell less than what β was taken from and do not speak against it,
        it stays what it was, as far as messages take that long at all."""
        self._unfitted = 0
        if self._steps_fit is None and self._trains:
            self._steps_fit = fit_line(*zip(*(step for train in self._trains for step in train), strict=True))
        trips_fit = None
        if self._link and (self._beta_s or len({tokens for tokens, _, _ in self._trips}) >= FEWEST_SIZES):
            trips_fit = fit_line(*zip(*self._trips, strict=True))  # of fewer it only says that a β is no larger
        vague_s = self._vague_s()
        fits = [self._steps_fit] if self._steps_fit is not None and self._steps_fit.spread_enough else []
        if trips_fit is not None and trips_fit.spread_enough and vague_s <= VAGUE * trips_fit.slope_s:
            fits.append(trips_fit)
        if fits:
            fit = min(fits, key=_uncertainty_s)
            agrees = self._beta_s is not None and fit.slope_low_s <= self._beta_s <= fit.slope_high_s
            if not (agrees and self._beta_s and _uncertainty_s(fit) > self._beta_uncertainty_s):
                # It is looked for again and again, so more is asked than that the interval is above 0.
                sure = fit.slope_known and fit.slope_s > SURE * (fit.slope_high_s - fit.slope_s)
                self._beta_s = fit.slope_s if sure else self._unsure_beta_s(fit)
                self._beta_uncertainty_s = _uncertainty_s(fit)
        elif self._beta_s is not None and trips_fit is not None:
            self._beta_s = min(self._beta_s, trips_fit.slope_high_s + vague_s)
        beta_s = self._beta_s or 0.0
        if self._link:
            self._link.replace((value - beta_s * tokens, half) for tokens, value, half in self._trips)
        if self._trains:
            self._gap_s = median(_gap([step_s - beta_s * tokens for tokens, step_s in train]) for train in self._trains)

    def _unsure_beta_s(self, fit: LineFit) -> float:
        """β where a fit cannot tell it from 0: 0 if it is little even at the fit's upper end, else the last known one,
        brought between the fit's slope and that end.

        Of the two ways to be wrong the larger β is the safe one: it costs some waiting. With one too small messages are
        sent that queue on the link; their round trips are all waiting, of which no fit tells β ever again."""
        usual_tokens = self._trip_tokens / len(self._trips)
        if fit.slope_high_s * usual_tokens <= LITTLE * median(value for _, value, _ in self._trips):
            return 0.0
        return min(max(self._beta_s or 0.0, fit.slope_s), fit.slope_high_s)

    def _vague_s(self) -> float:
        """How far a slope through the round trips may be off as answers lay unread: by all of that between the least
        and the largest, as at a steady beat of drafting each size is always read too late by as much."""
        halves = sorted(half for _, _, half in self._trips)
        if not halves or not halves[len(halves) // 2]:
            return 0.0
        sizes = [tokens for tokens, _, _ in self._trips]
        return 2 * halves[len(halves) // 2] / max(max(sizes) - min(sizes), 1)

    def _forget(self, kept: int) -> None:
        """The link is another: only the last round trips tell of it. β and gap stay the last known."""
        self._drop_trips(len(self._trips) - kept)
        self._trains.clear()
        self._steps_fit = None
        self._sizes = {tokens for tokens, _, _ in self._trips}
        self._unseen = _unseen(self._sizes)
        self._unfitted = REFIT


def _unseen(sizes: set[int]) -> tuple[int, ...]:
    """The smallest sizes to try, as many as are missing to PROBED_SIZES; 1 where those seen lie too close together for
    a slope."""
    missing = PROBED_SIZES - len(sizes)
    if missing > 0:
        return tuple(islice((size for size in range(1, PROBED_SIZES + len(sizes) + 1) if size not in sizes), missing))
    return (1,) if max(sizes) < SPREAD * min(sizes) else ()


def _uncertainty_s(fit: LineFit) -> float:
    return fit.slope_high_s - fit.slope_low_s


def _gap(steps_s: list[float]) -> float:
    """Their mean without delays, at least 0. The mean, since answers that are read together make a step of nothing and
    one of twice as much."""
    steps_s = sorted(steps_s)
    while len(steps_s) > 1 and steps_s[-1] > DELAY * max(fmean(steps_s[:-1]), 1e-4):
        steps_s.pop()
    return max(fmean(steps_s), 0.0)
