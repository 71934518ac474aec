"""Bandwidths that change with time: against an obvious walk through the steps, and what is no schedule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesd.errors import UsageError
from pipesd.sim.schedule import Schedule

SCENARIO_4 = Path(__file__).parents[1] / "bench" / "scenario4.json"
RATES = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    up = draw(RATES)
    down = draw(st.lists(st.integers(1, 50), min_size=len(up), max_size=len(up)))
    return Schedule(draw(st.sampled_from([0.5, 1.0, 3.0])), tuple(up), tuple(down))


def test_a_change_is_in_force_at_its_own_time_and_the_steps_come_again() -> None:
    schedule = Schedule(20.0, (8.0, 16.0, 80.0), (160.0, 200.0, 280.0))
    assert schedule.at(0.0) == (1e6, 20e6) and schedule.at(19.999) == (1e6, 20e6)
    assert schedule.at(20.0) == (2e6, 25e6) and schedule.at(45.0) == (10e6, 35e6)
    assert schedule.at(60.0) == schedule.at(600.0) == (1e6, 20e6) and schedule.at(79.0) == (1e6, 20e6)
    assert [schedule.next_change_s(t_s) for t_s in (0.0, 19.0, 20.0, 61.0)] == [20.0, 20.0, 40.0, 80.0]
    odd = Schedule(0.1, (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    at_s = 0.0
    for step in range(3000):
        assert odd.at(at_s)[0] == (step % 3 + 1) * 125e3, f"step {step} at its own beginning"
        assert odd.next_change_s(at_s) > at_s
        at_s = odd.next_change_s(at_s)


def test_what_is_under_way_at_a_change_is_finished_at_the_new_rate() -> None:
    schedule = Schedule(1.0, (8.0, 80.0), (800.0, 8.0))  # 1 and 10, 100 and 1 MB/s
    assert schedule.finish_s(0.2, 0.5e6, "up") == pytest.approx(0.7), "within a step"
    assert schedule.finish_s(0.5, 1.5e6, "up") == pytest.approx(1.1), "0.5 MB at 1 MB/s, 1 MB at 10"
    assert schedule.finish_s(0.99, 1.5e6, "down") == pytest.approx(1.5), "1 MB at 100 MB/s, 0.5 at 1"
    assert schedule.finish_s(0.5, 22e6, "up") == pytest.approx(4.0 + 0.5), "two cycles"
    assert schedule.finish_s(1.25, 0.0, "up") == 1.25


@given(schedules(), st.floats(0, 20), st.floats(0, 5e7), st.sampled_from(["up", "down"]))
def test_the_end_is_where_an_obvious_walk_gets(schedule: Schedule, start_s: float, length: float, way: Any) -> None:
    left, now_s = length, start_s
    while True:
        rate, ends_s = schedule.at(now_s)[way == "down"], schedule.next_change_s(now_s)
        if left <= rate * (ends_s - now_s):
            break
        left, now_s = left - rate * (ends_s - now_s), ends_s
    end_s = schedule.finish_s(start_s, length, way)
    assert end_s == pytest.approx(now_s + left / rate, rel=1e-9, abs=1e-6)
    assert schedule.carried_bytes(start_s, end_s, way) == pytest.approx(length, rel=1e-6, abs=10)


@given(schedules(), st.floats(0, 20), st.floats(0, 1e7), st.floats(0, 1e7))
def test_two_messages_end_when_one_of_both_lengths_does(s: Schedule, start_s: float, one: float, two: float) -> None:
    apart_s = s.finish_s(s.finish_s(start_s, one, "up"), two, "up")
    assert apart_s == pytest.approx(s.finish_s(start_s, one + two, "up"), rel=1e-9, abs=1e-6)


def test_scenario_4_is_what_its_seed_draws() -> None:
    kept = Schedule.load(SCENARIO_4)
    assert kept.seed is not None and kept == Schedule.redrawn(kept.seed)
    assert (kept.every_s, len(kept.up_mbps)) == (20.0, 60)
    assert all(10 <= mbps <= 80 for mbps in kept.up_mbps) and all(150 <= mbps <= 280 for mbps in kept.down_mbps)
    assert 40 < sum(kept.up_mbps) / 60 < 50 and 200 < sum(kept.down_mbps) / 60 < 230
    assert Schedule.redrawn(1) != Schedule.redrawn(2)
    assert Schedule.redrawn(1, steps=3).up_mbps == Schedule.redrawn(1).up_mbps[:3]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for schedule in (Schedule.redrawn(3, steps=4, up=(1, 2), down=(3, 4), every_s=0.5), Schedule(1.0, (1.0,), (2.0,))):
        schedule.save(tmp_path / "schedule.json")
        assert Schedule.load(tmp_path / "schedule.json") == schedule
    with pytest.raises(UsageError, match="write it elsewhere"):
        schedule.save(tmp_path / "no" / "schedule.json")


GOOD = {"every_s": 20, "up_mbps": [1, 2], "down_mbps": [3, 4], "seed": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps(GOOD)[:-9], "cut short"), ("", "empty"), ("[1]", "list"), ("{}", "down_mbps is missing"),
        (json.dumps(GOOD | {"every_s": 0}), "every_s 0"), (json.dumps(GOOD | {"every_s": math.nan}), "every_s nan"),
        (json.dumps(GOOD | {"every_s": 1e-300}), "every_s 1e-300; give seconds, at least 0.001"),
        (json.dumps(GOOD | {"every_s": "20"}), "every_s '20'"), (json.dumps(GOOD | {"every_s": True}), "every_s True"),
        (json.dumps(GOOD | {"up_mbps": [1, -2]}), r"up_mbps \[1, -2\]"),
        (json.dumps(GOOD | {"up_mbps": 3}), "up_mbps 3"),
        (json.dumps(GOOD | {"up_mbps": []}), "up_mbps"), (json.dumps(GOOD | {"up_mbps": [[1]] * 99}), "up_mbps"),
        (json.dumps(GOOD | {"down_mbps": [3]}), "2 figures of up_mbps, 1 of down_mbps"),
        (json.dumps(GOOD | {"up_mbps": [math.inf, 1]}), "up_mbps"), (json.dumps(GOOD | {"seed": "x"}), "seed 'x'"),
        (json.dumps(GOOD | {"up": 1}), "'up' is unknown"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as refused:
        Schedule.load(path)
    told = str(refused.value)
    assert str(path) in told and "\n" not in told and len(told) < 300


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(UsageError, match="no-such"):
        Schedule.load("no-such.json")
    with pytest.raises(UsageError, match="0 steps"):
        Schedule.redrawn(1, steps=0)
