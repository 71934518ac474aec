"""One row of a table in one cell: tuned, then simulated on other prompts, with each of several seeds.

The simulation is the runtime's own code in virtual time, `pipesd.sim.simulate`. What a seed changes: the link's jitter,
and its bandwidths where they are scenario 4's; the order of the prompts, and so what a session has learnt of the link
when a prompt's turn comes; the tuner's seed, beforehand and in a session. A ratio pairs rows by prompt and
seed. Its interval is over both: prompts and seeds are resampled, each by themselves, as one seed's setting is that of
all prompts (`pipesd.sim.intervals`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paired import Ratio, paired_ratio
from printed import Figures
from scenarios import PASS_S
from stamp import progress

from pipesd.config import EdgeConfig
from pipesd.errors import Unreachable
from pipesd.policy.search_space import Setting
from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule
from pipesd.sim.search import Cost, Space, fastest
from pipesd.sim.simulate import simulate
from pipesd.sim.trace import Record

TUNING_RECORDS = 4  # the first of each trace; no others are tuned on, and these are not measured
NEAR = 1e-6  # of a bound: at it

Search = Callable[[Space, Setting, int, int, Cost], Setting]  # space, first setting, budget, seed, cost; gives the best


class Row(NamedTuple):
    """Settings of `EdgeConfig`; whether the link is in between; how its parameters are found, None: as they are given.
    `printed`: the name of its printed figure, its own without it."""

    settings: Mapping[str, Any]
    linked: bool = True
    search: Search | None = None
    printed: str | None = None


class Cell(NamedTuple):
    """One set of conditions. `printed`: by figure (`ms_per_token`, …) those of the rows, where the paper has them.
    `facts` stand in the JSON."""

    name: str
    dataset: str
    records: tuple[Record, ...]
    link: Link
    gamma_s: float
    pass_s: float = PASS_S
    token_s: float = 0.0
    users: int = 1
    settings: Mapping[str, Any] = {}  # of every row
    printed: Mapping[str, Figures] = {}
    facts: Mapping[str, Any] = {}


class Outcome(NamedTuple):
    """What one seed brought of one row: the setting found, and the statistics of each generation, by prompt."""

    found: Mapping[str, Any]
    each: Mapping[int, Mapping[str, Any]]


def surrogate(space: Space, first: Setting, samples: int, seed: int, cost: Cost) -> Setting:
    """The tuner of the runtime."""
    return fastest(space, first, samples, seed, cost).setting


def tuned(**settings: Any) -> Row:
    """A row whose parameters are searched for beforehand."""
    return Row(settings, search=surrogate)


def split(cell: Cell, quick: bool) -> tuple[Sequence[Record], Sequence[Record]]:
    """What is tuned on, and what is measured."""
    tuning, rest = cell.records[:TUNING_RECORDS], cell.records[TUNING_RECORDS:]
    return (tuning[:1], rest[:2]) if quick else (tuning, rest)


def run_row(
    row: Row, cell: Cell, records: Sequence[Record], *, tokens: int, seed: int, found: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The statistics of each generation, in the order of `records`; `machine_s` is its share by tokens of what the
    cloud's machine was busy, where passes that users share count once."""
    link = cell.link if row.linked else Link()
    if link.bandwidths is not None:
        link = dataclasses.replace(link, bandwidths=drawn_anew(link.bandwidths, seed))
    order = random.Random(seed).sample(range(len(records)), len(records))
    done = simulate(
        [records[i] for i in order], link=link, gamma_s=cell.gamma_s, pass_s=cell.pass_s, token_s=cell.token_s,
        max_tokens=tokens, users=cell.users, seed=seed,
        settings={"tuning": "off", **cell.settings, **row.settings, **found},
    )  # fmt: skip
    machine_s = done.stats["cloud_s_per_1000_tokens"] / 1000
    each = {order[stats["record"]]: {**stats, "machine_s": machine_s * stats["tokens"]} for stats in done.each}
    return [each[i] for i in range(len(records))]


def drawn_anew(schedule: Schedule, seed: int) -> Schedule:
    """With another seed, if it is scenario 4's, of any number and length of steps; any other, whose bounds are not
    known, as it is."""
    if schedule.seed is None:
        return schedule
    steps, every_s = len(schedule.up_mbps), schedule.every_s
    if schedule != Schedule.redrawn(schedule.seed, steps=steps, every_s=every_s):
        return schedule
    return Schedule.redrawn(schedule.seed + seed, steps=steps, every_s=every_s)


def searched(row: Row, samples: int, seed: int, tpt_s: Callable[[Mapping[str, Any]], float]) -> dict[str, Any]:
    """The options that the row's search finds, by the s per token that `tpt_s` says of them, or Unreachable where it
    fails; {} for a row without parameters."""
    if row.search is None or not samples:
        return {}
    from pipesd.policy.strategy import make_strategy
    from pipesd.policy.tuning import point_of, settings_of, space_of

    strategy = make_strategy(EdgeConfig(**{"tuning": "off", **row.settings}))
    space = space_of(strategy)
    if not space:
        return {}

    def cost(setting: Setting) -> float:
        found = settings_of(strategy, setting)
        try:
            return tpt_s(found)
        except Unreachable as error:
            progress(f"failed: {found}: {error}")
            return math.inf

    return dict(settings_of(strategy, row.search(space, point_of(strategy), samples, seed, cost)))


def at_bounds(row: Row, found: Mapping[str, Any]) -> list[str]:
    """The parameters of which the search found the least or the greatest value of those it may try."""
    if not found:
        return []
    from pipesd.policy.strategy import make_strategy
    from pipesd.policy.tuning import point_of, space_of

    strategy = make_strategy(EdgeConfig(**{"tuning": "off", **row.settings, **found}))
    point = point_of(strategy)
    return [
        name for name, parameter in space_of(strategy).items()
        if min(abs(point[name] - end) for end in (parameter.low, parameter.high)) < NEAR
    ]  # fmt: skip


def tune(row: Row, cell: Cell, records: Sequence[Record], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The row's options on these records."""
    records = [*records] * -(-cell.users // len(records))  # each user has one

    def tpt_s(found: Mapping[str, Any]) -> float:
        return ms_per_token(run_row(row, cell, records, tokens=options.tune_tokens, seed=seed, found=found)) / 1e3

    return searched(row, options.samples, seed, tpt_s)


def measure(cell: Cell, rows: Mapping[str, Row], options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Tune and measure each row with each seed."""
    tuning, rest = split(cell, options.quick)
    outcomes: dict[str, list[Outcome]] = {}
    for name, row in rows.items():
        outcomes[name] = []
        for seed in range(options.seeds):
            found = tune(row, cell, tuning, options, seed)
            each = run_row(row, cell, rest, tokens=options.tokens, seed=seed, found=found)
            outcomes[name].append(Outcome(found, dict(enumerate(each))))
        every = [stats for outcome in outcomes[name] for stats in outcome.each.values()]
        progress(f"{cell.name}: {name} {ms_per_token(every):.1f} ms per token")
    return outcomes


def ms_per_token(each: Sequence[Mapping[str, Any]]) -> float:
    """Over several generations, each in proportion to its tokens."""
    return math.fsum((s["tpt_ms"] or 0.0) * s["tokens"] for s in each) / max(1, sum(s["tokens"] for s in each))


def over(above: Sequence[Outcome], below: Sequence[Outcome]) -> Ratio:
    """How many times the first one's time per token is the other's: the geometric mean over prompts and seeds, with an
    interval over other prompts and other seeds; with one seed over prompts alone, and so without the tuner's luck."""
    mine, theirs = (
        [[outcome.each[prompt]["tpt_ms"] for outcome in one] for prompt in above[0].each] for one in (above, below)
    )
    return paired_ratio(mine, theirs)
