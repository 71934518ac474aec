"""A level under noise, outliers, imprecise samples and change."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesd.policy.level import RUN, Level


def value_of(level: Level) -> float:
    assert level.value is not None
    return level.value


def test_a_band_is_kept_although_nobody_asks_for_the_level_between() -> None:
    level = Level(1e-5)
    for _ in range(100):
        level.add(0.02)
    assert level.value == pytest.approx(0.02)
    assert [level.add(0.04) for _ in range(RUN)] == [False] * (RUN - 1) + [True]
    assert len(level) == RUN


def test_imprecise_samples_do_not_outvote_precise_ones() -> None:
    level = Level(1e-5)
    for _ in range(10):
        level.add(0.020)
        for _ in range(2):
            level.add(0.05, 0.03)  # anything from 20 to 80 ms
    assert value_of(level) == pytest.approx(0.02, rel=0.01)


def test_one_sample_among_a_run_does_not_hide_it() -> None:
    level = Level(1e-5)
    for _ in range(20):
        level.add(0.02)
    value_of(level)
    assert [level.add(value) for value in (0.04, 0.04, 0.02, 0.04, 0.04, 0.04)] == [False] * 5 + [True]
    assert value_of(level) == pytest.approx(0.04)
    for _ in range(20):
        level.add(0.04)
    value_of(level)
    assert not any(level.add(value) for value in (0.08, 0.04, 0.08, 0.08, 0.04, 0.08, 0.08, 0.04, 0.08))


def test_a_few_samples_have_no_band_that_could_be_left() -> None:
    level = Level(1e-5)
    for value in (0.09, 0.09, 0.09, 0.09):
        level.add(value)
    value_of(level)
    assert not any(level.add(0.03) for _ in range(6))
    assert value_of(level) == pytest.approx(0.03)


def test_a_run_is_held_against_all_that_came_before_it() -> None:
    """Not against the band of when the level was last asked for."""
    level = Level(1e-5)
    for _ in range(10):
        level.add(0.02)
    value_of(level)
    assert not any(level.add(value) for _ in range(8) for value in [0.03] * 4 + [0.01] * 4)
    assert not any(level.add(0.03) for _ in range(RUN + 2))


Law = Callable[[Random, int], float]
STEADY: dict[str, Law] = {
    "normal": lambda random, i: max(random.gauss(0.03, 0.006), 0.0),
    "exponential": lambda random, i: 0.01 + random.expovariate(100),
    "lognormal": lambda random, i: random.lognormvariate(math.log(0.02), 1.0),
    "pareto": lambda random, i: 0.02 * random.paretovariate(1.6),
    "every second one": lambda random, i: 0.03 if i % 2 else 0.09,
    "two of three": lambda random, i: 0.03 if i % 3 else 0.09,
    "first of a draft": lambda random, i: 0.03 * random.uniform(0.9, 1.1) * (1 if i % 4 else 3),
    "four of fifty": lambda random, i: 0.03 * random.uniform(0.9, 1.1) + (0.2 if i % 50 < 4 else 0),
}


@pytest.mark.parametrize("law", STEADY)
def test_noise_is_no_change(law: str) -> None:
    changes = 0
    for seed in range(4):
        level, random = Level(2e-5), Random(seed)
        values = []
        for i in range(1000):
            changes += level.add(STEADY[law](random, i))
            values.append(value_of(level))
        assert max(values[100:]) < 2.2 * min(values[100:])
    assert changes == 0


@pytest.mark.parametrize("length", [5, 6, 10, 20])
def test_what_goes_to_and_fro_is_noise_in_the_end(length: int) -> None:
    level, random = Level(2e-5), Random(1)
    changes = []
    for i in range(2000):
        changes.append(level.add(random.uniform(0.9, 1.1) * (0.09 if i // length % 2 else 0.03)))
        assert 0.02 < value_of(level) < 0.1
    assert sum(changes) <= 6 and not any(changes[400:])


@given(st.lists(st.floats(0.019, 0.021), min_size=1, max_size=100), st.randoms(use_true_random=False))
def test_the_order_of_samples_in_a_window_does_not_matter(drawn: list[float], random: Any) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)
    levels = []
    for values in (drawn, shuffled):
        level = Level(2e-5)
        for value in values:
            level.add(value, 0.001 if value > 0.02 else 0.0)
        levels.append(value_of(level))
    assert levels[0] == pytest.approx(levels[1], rel=1e-9)
    assert min(drawn) <= levels[0] * (1 + 1e-12) and levels[0] <= max(drawn) * (1 + 1e-12)
