"""How a table measures: what is tuned on, what a seed changes, how ratios are paired."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipesd.config import EdgeConfig
from pipesd.errors import Unreachable
from pipesd.policy.strategy import make_strategy
from pipesd.policy.tuning import space_of
from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule
from pipesd.sim.simulate import SUMMED
from pipesd.sim.synthetic import synthetic_trace
from pipesd.sim.trace import Record

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import measuring
import table
from measuring import Cell, Outcome, Row, tuned

RECORDS = synthetic_trace(7, 8, seed=1).records
CELL = Cell("a cell", "humaneval", RECORDS, Link(), 0.01, 0.02)


def cell_options(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"seeds": 2, "samples": 8, "tune_tokens": 5, "tokens": 8, "quick": False, **changed})


class FakeSimulation:
    """Takes longer the further `draft_length` is from 6, and fails at 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[Record], dict[str, Any]]] = []

    def __call__(self, records: Sequence[Record], **given: Any) -> Any:
        self.calls.append((records, given))
        length = given["settings"].get("draft_length", 4)
        if length == 1:
            raise Unreachable("nothing comes")
        numbers = dict.fromkeys(SUMMED, 1) | {"tokens": 8}
        return SimpleNamespace(
            stats={"cloud_s_per_1000_tokens": 25.0},
            each=[
                {**numbers, "record": i, "tpt_ms": 10.0 + abs(length - 6) + len(record.prompt) / 100}
                for i, record in enumerate(records)
            ],
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSimulation:
    made = FakeSimulation()
    monkeypatch.setattr(measuring, "simulate", made)
    return made


def test_tuning_never_sees_what_is_measured(fake: FakeSimulation) -> None:
    outcomes = measuring.measure(CELL, {"vanilla": tuned(strategy="vanilla")}, cell_options())
    tuning, rest = set(RECORDS[:4]), set(RECORDS[4:])
    for seed in range(2):
        mine = [set(records) for records, given in fake.calls if given["seed"] == seed]
        assert mine == [tuning] * 8 + [rest]
    assert {given["max_tokens"] for records, given in fake.calls if set(records) == tuning} == {5}
    assert [dict(outcome.found) for outcome in outcomes["vanilla"]] == [{"draft_length": 6}] * 2


def test_quick_measures_other_prompts_too(fake: FakeSimulation) -> None:
    measuring.measure(CELL, {"vanilla": tuned(strategy="vanilla")}, cell_options(quick=True, samples=1, seeds=1))
    assert [set(records) for records, _ in fake.calls] == [{RECORDS[0]}, {RECORDS[4], RECORDS[5]}]


def test_settings_at_a_bound_of_what_is_searched_are_told() -> None:
    row = tuned(strategy="vanilla")
    lengths = space_of(make_strategy(EdgeConfig(strategy="vanilla")))["draft_length"]
    assert measuring.at_bounds(row, {"draft_length": int(lengths.high)}) == ["draft_length"]
    assert measuring.at_bounds(row, {"draft_length": int(lengths.low) + 1}) == [] == measuring.at_bounds(row, {})
    told = list(table.bounded({"vanilla": {"at_bounds": [["draft_length"], []]}, "hsl": {"at_bounds": [[]]}}))
    assert told == ["vanilla: draft_length at a bound of what is searched with 1 of 2 seeds"]


def test_rows_without_parameters_or_search_are_not_tuned(fake: FakeSimulation) -> None:
    rows = {"cloud": tuned(strategy="cloud"), "given": Row({"strategy": "vanilla", "draft_length": 2})}
    measuring.measure(CELL, rows, cell_options(seeds=1))
    assert len(fake.calls) == 2


def test_statistics_find_back_to_their_prompts(fake: FakeSimulation) -> None:
    for seed in range(3):
        each = measuring.run_row(Row({}), CELL, RECORDS, tokens=8, seed=seed, found={})
        assert [s["tpt_ms"] for s in each] == [12.0 + len(record.prompt) / 100 for record in RECORDS]
    orders = {tuple(RECORDS.index(record) for record in records) for records, _ in fake.calls}
    assert len(orders) == 3
    assert [s["machine_s"] for s in each] == [0.2] * len(RECORDS)


def vanilla_by_hand(record: Record, length: int, count: int, *, gamma_s: float, pass_s: float, way_s: float) -> Any:
    """ms per token, and passes per token, of drafts of that length, from the trace alone. What the first draft and the
    prompt's pass share of their time is free, as time counts from the target's having read the prompt."""
    at, passes, took_s = 0, 0, 0.0
    while at < count:
        length = min(length, count - at - 1)
        drafted = [guess.id for guess in record.continuation(at, length)]
        right = next((i for i in range(length) if drafted[i] != record.output[at + i]), length)
        round_s = max(pass_s, length * gamma_s) if passes == 0 else length * gamma_s + way_s + pass_s + way_s
        at, passes, took_s = at + right + 1, passes + 1, took_s + round_s
    return pytest.approx(1e3 * took_s / count, abs=1e-3), pytest.approx(passes / count)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_vanilla_takes_what_the_trace_says(length: int) -> None:
    records = synthetic_trace(3, 40, acceptance=0.8, seed=2).records
    cell = Cell("a cell", "humaneval", records, Link(latency_s=0.005), 0.01, 0.02)
    row = Row({"strategy": "vanilla", "draft_length": length})
    outcome = Outcome({}, dict(enumerate(measuring.run_row(row, cell, records, tokens=33, seed=1, found={}))))
    for record, stats in zip(records, outcome.each.values(), strict=True):
        measured = stats["tpt_ms"], stats["target_passes"] / stats["tokens"]
        assert measured == vanilla_by_hand(record, length, 33, gamma_s=0.01, pass_s=0.02, way_s=0.005)
    said = table.report("vanilla", row, cell, {"vanilla": [outcome]})
    assert said["ms_per_token"] == pytest.approx(sum(stats["tpt_ms"] for stats in outcome.each.values()) / 3)
    assert said["cloud_s_per_1000_tokens"] == pytest.approx(20 * said["passes_per_token"])


def test_seeds_redraw_scenario_4s_schedule_and_leave_others(fake: FakeSimulation) -> None:
    slow = Schedule.redrawn(3, up=(1.0, 2.0), down=(4.0, 8.0))
    for drawn in (Schedule.redrawn(5, steps=7, every_s=3.0), Schedule(1.0, (10.0,), (20.0,)), slow):
        cell = CELL._replace(link=Link(bandwidths=drawn))
        for seed in range(2):
            measuring.run_row(Row({}), cell, RECORDS, tokens=8, seed=seed, found={})
    first, second, *others = (given["link"].bandwidths for _, given in fake.calls)
    assert [first, second] == [Schedule.redrawn(seed, steps=7, every_s=3.0) for seed in (5, 6)]
    assert others == [Schedule(1.0, (10.0,), (20.0,))] * 2 + [slow] * 2
    co_located = Row({}, linked=False)
    measuring.run_row(co_located, cell, RECORDS, tokens=8, seed=0, found={})
    assert fake.calls[-1][1]["link"] == Link()


def test_ratios_pair_prompts_over_seeds() -> None:
    def outcomes(factor: float) -> list[Outcome]:
        return [
            Outcome({}, {p: {"tpt_ms": factor * (10 + 5 * p) * (1 + seed / 10)} for p in range(4)}) for seed in range(3)
        ]

    ratio = measuring.over(outcomes(1.5), outcomes(1.0))
    assert tuple(ratio) == pytest.approx((1.5, 1.5, 1.5)) and ratio.verdict == "1.50 times"
    assert measuring.over(outcomes(1.0), outcomes(1.0)).verdict == "no difference"
    once = measuring.over([Outcome({}, {0: {"tpt_ms": 20.0}})], [Outcome({}, {0: {"tpt_ms": 10.0}})])
    assert once.mean == pytest.approx(2.0) and once.verdict == "2.00 times, measured once: no interval"
    one = [Outcome({}, {0: {"tpt_ms": value}}) for value in (10.0, 20.0)]
    other = [Outcome({}, {0: {"tpt_ms": value}}) for value in (10.0, 10.0)]
    assert measuring.over(one, other).verdict == "no difference"


def test_the_luck_of_a_seed_is_in_the_interval() -> None:
    """What seeds bring moves all prompts together, so more prompts do not make it surer."""
    found = []
    for prompts in (4, 40):
        above = [Outcome({}, {p: {"tpt_ms": 10.0 * factor} for p in range(prompts)}) for factor in (0.9, 1.3, 1.2)]
        below = [Outcome({}, {p: {"tpt_ms": 10.0} for p in range(prompts)}) for _ in range(3)]
        found.append(measuring.over(above, below))
    assert all(ratio.verdict == "no difference" for ratio in found)
    assert found[0] == pytest.approx(found[1])
