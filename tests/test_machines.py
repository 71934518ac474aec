"""The two state machines in a model world: any order of events, any loss, and it still ends in the target's own text.

`PIPESD_EXAMPLES` sets the number of examples of each exploration (default 300).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipesd.core import Mode
from tests.explore import Setup, World
from tests.wander import CHOICES, LEAST, MOST_DEADLINES, breadth_first, complete, pick, random_world, undisturbed
from tests.wander import small_bounds as small_bounds

EXAMPLES = int(os.environ.get("PIPESD_EXAMPLES", 300))

explored = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SETUPS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})
SCHEDULES = st.binary(max_size=240)  # two bytes an event


def moved(setup: dict[str, Any], schedule: bytes, *, faults: bool) -> World:
    world = World(Setup(**setup))
    for at in range(0, len(schedule) - 1, 2):
        world.do(pick(world, int.from_bytes(schedule[at : at + 2], "little"), faults=faults))
    return world


@explored
@given(SETUPS, SCHEDULES)
def test_whatever_goes_wrong_it_ends_in_what_the_cloud_committed(setup: dict[str, Any], schedule: bytes) -> None:
    complete(moved(setup, schedule, faults=True), MOST_DEADLINES)


@explored
@given(SETUPS, SCHEDULES)
def test_without_a_fault_nothing_is_repeated_and_no_deadline_needed(setup: dict[str, Any], schedule: bytes) -> None:
    undisturbed(moved(setup, schedule, faults=False))


def test_by_chance() -> None:
    """As above, with a plain generator: longer schedules, and always the same."""
    for seed in range(EXAMPLES):
        complete(random_world(seed, faults=True), MOST_DEADLINES)
        undisturbed(random_world(seed, faults=False))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_by_chance_for_longer(part: int) -> None:
    for seed in range(10_000 + 1000 * part, 10_000 + 1000 * (part + 1)):
        complete(random_world(seed, faults=True, most_events=200), MOST_DEADLINES)
        undisturbed(random_world(seed, faults=False, most_events=200))


TINY = {"prompt": 1, "tokens": 2, "draft_ahead": 1, "ids": 2, "cloud_ahead": (LEAST,), "run_ahead": LEAST}
LISTENS = {"mode": Mode.FREE, "drafts": False, "tokens": 3}
SMALL: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"cut": 1}),
    (LISTENS, {"cut": 1, "ask": 0}),
    ({"ahead": True, "draft_ahead": 2}, {"wait": 0}),
    ({"reproducible": False, "tokens": 1}, {"crash": 1, "retry": 1, "ask": 0}),
    ({"tokens": 1}, {"cancel": 1, "next": 1, "cut": 1, "late_up": 1, "late_down": 1, "ask": 0}),
    ({}, {"mode": 1}),
]
LARGER: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"cut": 1, "deadline": 1, "late_up": 1, "late_down": 1}),
    (LISTENS, {"cut": 2, "deadline": 1, "ask": 0}),
    ({"mode": Mode.EAGER}, {"cut": 1, "deadline": 1}),
    ({"reproducible": False}, {"crash": 2, "retry": 2, "deadline": 1, "ask": 0}),
    ({}, {"mode": 2, "cut": 1}),
]


@pytest.mark.parametrize(("changed", "allowed"), SMALL, ids=str)
def test_every_order_of_events_in_a_tiny_world(changed: dict[str, Any], allowed: dict[str, int]) -> None:
    states = breadth_first(World(Setup(**{**TINY, **changed})), allowed, MOST_DEADLINES, most_states=5000)
    assert 30 < states < 5000, "it was not explored to its end"


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "allowed"), LARGER, ids=str)
def test_every_order_of_events_in_a_small_world(changed: dict[str, Any], allowed: dict[str, int]) -> None:
    assert breadth_first(World(Setup(**{**TINY, **changed})), allowed, MOST_DEADLINES, most_states=8000) > 1000
