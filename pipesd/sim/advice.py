"""Which strategy will be fastest, which cheapest for the cloud, and at what round trip that changes: by simulation.

Each strategy runs in the simulator behind the records of a sample, over the link and at the speeds that were measured.
Thresholds and draft lengths are searched for on some of the records and judged on the others. What is said of a round
trip that was not measured is said with the link's latency changed and all else as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipesd.config import EdgeConfig
from pipesd.policy.search_space import Setting
from pipesd.policy.strategy import make_strategy
from pipesd.policy.tuning import point_of, settings_of, space_of
from pipesd.sim.intervals import RESAMPLED, bounds
from pipesd.sim.link_model import Link
from pipesd.sim.search import fastest
from pipesd.sim.simulate import simulate
from pipesd.sim.trace import Record

EXACT = ("cloud", "vanilla", "hsl", "edgellm", "pipesd")  # the target's output, all of them
SAMPLES = 12  # settings that are tried of each strategy, at each round trip where it is tuned
MOST_RTT_S = 1.0  # no further round trip is looked at
LEAST_RTT_S = 2e-3  # the first one above 0
RUNGS = 5  # steps from there to the most, at each of which strategies are tuned
CLOSE = 0.03  # a crossing is known to this share of itself

Settings = Mapping[str, Any]  # fields of EdgeConfig


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the strategies are compared: a link, what a draft token takes, and what a pass over n ids takes,
    pass_s + token_s · n. `max_tokens`: of each record, None for all."""

    link: Link
    gamma_s: float
    pass_s: float
    token_s: float = 0.0
    max_tokens: int | None = None

    @property
    def rtt_s(self) -> float:
        """The round trip of a message of no bytes."""
        return 2 * (self.link.latency_s + self.link.gap_s)

    def at(self, rtt_s: float) -> Place:
        """The same with another round trip: the latency changes, and what a message occupies only where it must."""
        gap_s = min(self.link.gap_s, rtt_s / 2)
        return replace(self, link=replace(self.link, gap_s=gap_s, latency_s=rtt_s / 2 - gap_s))


class Expected(NamedTuple):
    """What is expected of a strategy with its best settings. `interval`: 95 %, over other prompts like those of the
    sample; nan where there was only one. `each`: (tokens, s) of each prompt that it was judged on."""

    strategy: str
    settings: Settings
    tpt_s: float
    interval: tuple[float, float]
    cloud_s_per_1000_tokens: float
    acceptance: float | None  # share of verified draft tokens
    each: tuple[tuple[int, float], ...]


class Change(NamedTuple):
    """From about `rtt_s` on, away from the round trip that was asked about, `strategy` is faster."""

    rtt_s: float
    strategy: str


def split(records: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    """Records to tune on, a third, and the others, to judge on; the same one for both where there is only one."""
    assert records, "a sample of nothing"
    first = max(1, len(records) // 3)
    return records[:first], records[first:] or records


class Adviser:
    """Compares strategies behind the records of a sample, at `place` and at the same place with other round trips.

    Settings are searched for at some round trips; between two of these the better of both ends' is taken. `rows` names
    the strategies, each with the fields of EdgeConfig that make it; `common` are fields that all of them have.
    """

    def __init__(
        self,
        place: Place,
        tuning: Sequence[Record],
        judged: Sequence[Record],
        *,
        rows: Mapping[str, Settings] | None = None,
        common: Settings | None = None,
        samples: int = SAMPLES,
        seed: int = 0,
        tell: Callable[[float], None] = lambda rtt_s: None,
    ) -> None:
        """`tell` is called with each round trip that settings are searched for at."""
        self.place = place
        self._tuning, self._judged = tuning, judged
        self._rows = rows or {name: {"strategy": name} for name in EXACT}
        self._common = {**(common or {}), "tuning": "off"}
        self._samples, self._seed, self._tell = samples, seed, tell
        self._found: dict[float, dict[str, Settings]] = {}  # by round trip
        self._done: dict[tuple[Any, ...], Any] = {}

    def expected(self, rtt_s: float | None = None, among: Collection[str] | None = None) -> list[Expected]:
        """What each strategy (or some) would do at that round trip, by default the place's; the fastest first."""
        rtt_s = self.place.rtt_s if rtt_s is None else rtt_s
        if not self._found:
            self._tune(rtt_s)
        found = [self._expected(name, rtt_s) for name in self._rows if among is None or name in among]
        return sorted(found, key=lambda each: each.tpt_s)

    def change(
        self, *, above: bool, margin: float = 0.0, most_s: float = MOST_RTT_S, close: float = CLOSE
    ) -> Change | None:
        """The round trip above (or below) the place's where another strategy than the fastest there is faster by more
        than `margin`, a share, to `close`, a share too; None if there is none up to `most_s`, or down to 0. A strategy
        that is faster between two of the round trips that are looked at, and at neither, is not found."""
        near_s = self.place.rtt_s
        self._tune(near_s)
        here = self.expected()[0].strategy
        for rung_s in _rungs(near_s, above, most_s):
            self._tune(rung_s)
            if rivals := self._faster(here, rung_s, margin, self._rows):
                return self._bisected(here, rivals, near_s, rung_s, margin, close)
            near_s = rung_s
        return None

    def _bisected(
        self, here: str, rivals: Sequence[str], near_s: float, far_s: float, margin: float, close: float
    ) -> Change:
        while abs(far_s - near_s) > close * max(near_s, far_s, LEAST_RTT_S):
            middle_s = (near_s + far_s) / 2
            if faster := self._faster(here, middle_s, margin, rivals):
                far_s, rivals = middle_s, faster
            else:
                near_s = middle_s
        return Change((near_s + far_s) / 2, rivals[0])

    def _faster(self, here: str, rtt_s: float, margin: float, among: Collection[str]) -> list[str]:
        """The strategies that are faster there than `here` by more than `margin`, the fastest first."""
        found = self.expected(rtt_s, {here, *among})
        own_s = next(each.tpt_s for each in found if each.strategy == here)
        return [each.strategy for each in found if own_s > (1.0 + margin) * each.tpt_s and each.strategy != here]

    def _tune(self, rtt_s: float) -> None:
        """Search for the best settings of every strategy at this round trip."""
        if rtt_s not in self._found:
            self._tell(rtt_s)
            self._found[rtt_s] = {
                name: tuned(row, lambda settings: self._tpt_s(settings, rtt_s), self._samples, self._seed)
                for name, row in self._rows.items()
            }

    def _expected(self, name: str, rtt_s: float) -> Expected:
        below = max((known_s for known_s in self._found if known_s <= rtt_s), default=min(self._found))
        above = min((known_s for known_s in self._found if known_s >= rtt_s), default=max(self._found))
        ends = [self._found[known_s][name] for known_s in {below, above}]
        best = ends[0]
        if len(ends) == 2 and ends[0] != ends[1]:
            best = min(ends, key=lambda settings: self._tpt_s(settings, rtt_s))
        ran = self._simulated(best, rtt_s, judged=True)
        each = tuple((stats["tokens"], stats["tpt_ms"] * stats["tokens"] / 1e3) for stats in ran.each)
        rate = ran.stats["acceptance_rate"]
        cost = ran.stats["cloud_s_per_1000_tokens"]
        return Expected(name, best, pooled_s(each), interval(each), cost, rate, each)

    def _tpt_s(self, settings: Settings, rtt_s: float) -> float:
        return float(self._simulated(settings, rtt_s, judged=False).tpt_ms) / 1e3

    def _simulated(self, settings: Settings, rtt_s: float, *, judged: bool) -> Any:
        key = (tuple(sorted(settings.items())), rtt_s, judged)
        if key not in self._done:
            place = self.place if rtt_s == self.place.rtt_s else self.place.at(rtt_s)
            self._done[key] = simulate(
                self._judged if judged else self._tuning,
                link=place.link,
                gamma_s=place.gamma_s,
                pass_s=place.pass_s,
                token_s=place.token_s,
                max_tokens=place.max_tokens,
                seed=self._seed,
                settings={**self._common, **settings},
            )
        return self._done[key]


def tuned(row: Settings, tpt_s: Callable[[Settings], float], samples: int, seed: int = 0) -> Settings:
    """The fastest settings found for a row, by what `tpt_s` says of each: all of them where they can be counted, as
    draft lengths can, else `samples` of the tuner's. A row that gives one of its parameters stays as it is."""
    strategy = make_strategy(EdgeConfig(**{"tuning": "off", **row}))
    space = space_of(strategy)
    if not space or not settings_of(strategy, point_of(strategy)).keys().isdisjoint(row):
        return dict(row)
    name, only = next(iter(space.items()))
    if len(space) == 1 and only.integer:
        points: list[Setting] = [{name: value} for value in range(math.ceil(only.low), math.floor(only.high) + 1)]
    else:
        points = []

    def cost(point: Setting) -> float:
        return tpt_s({**row, **settings_of(strategy, point)})

    best = min(points, key=cost) if points else fastest(space, point_of(strategy), samples, seed, cost).setting
    return {**row, **settings_of(strategy, best)}


def break_even_rtt_s(acceptance: float, draft_length: int, alone_s: float, gamma_s: float) -> float:
    """The round trip up to which drafts of a fixed length, one at a time, beat the target alone: arXiv 2606.25091,
    a(1 - a^k)/(1 - a) · t_ar - k · t_d, with `alone_s` t_ar, what a token of the target alone takes, and `gamma_s`
    t_d. Every draft token is right with the chance `acceptance`; a pass takes as long for k + 1 ids as for one, and
    the link carries what it is given at once. Below 0 where drafts never pay."""
    a, k = acceptance, draft_length
    right = float(k) if a == 1.0 else a * (1.0 - a**k) / (1.0 - a)
    return right * alone_s - k * gamma_s


def pooled_s(each: Sequence[tuple[int, float]]) -> float:
    """s per token of several generations, as (tokens, s)."""
    return sum(took_s for _, took_s in each) / sum(tokens for tokens, _ in each)


def interval(
    each: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]] | None = None
) -> tuple[float, float]:
    """95 % of the s per token over prompts like these, or of its ratio to that of `others` behind the same prompts, by
    resampling the prompts (`intervals`). nan for a single prompt."""
    import numpy as np

    count = len(each)
    if count < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLED, count))

    def resampled(values: Sequence[tuple[int, float]]) -> Any:
        tokens, times_s = np.asarray(values, float).T
        return times_s[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)

    return bounds(resampled(each) if others is None else resampled(each) / resampled(others), count - 1)


def _rungs(near_s: float, above: bool, most_s: float) -> list[float]:
    """Round trips to look at, from `near_s` away: each as many times the one before, and in the end 0 or `most_s`."""
    step = (most_s / LEAST_RTT_S) ** (1 / RUNGS)
    rungs = [LEAST_RTT_S * step**k for k in range(RUNGS)] + [most_s]
    if above:
        return [rung_s for rung_s in rungs if rung_s > near_s]
    return [rung_s for rung_s in reversed(rungs) if rung_s < near_s] + ([0.0] if near_s > 0.0 else [])
