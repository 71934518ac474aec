"""As `test_machines`, where draft tokens are tested and the edge draws in the place of a refused one: any order of
events, any loss, and both sides end with the same ids, each of them accepted, drawn by the edge from what it was told,
or the target's own where the edge had drawn nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from pipesd.core import Mode
from tests.explore import Setup, World
from tests.test_machines import EXAMPLES, SCHEDULES, SETUPS, TINY, explored, moved
from tests.wander import MOST_DEADLINES, breadth_first, complete, random_world, undisturbed
from tests.wander import small_bounds as small_bounds

FEWER = EXAMPLES // 3
less_explored = settings(explored, max_examples=FEWER)


@less_explored
@given(SETUPS, SCHEDULES)
def test_whatever_goes_wrong_it_ends_in_what_was_accepted_or_drawn(setup: dict[str, Any], schedule: bytes) -> None:
    complete(moved({**setup, "tests": True}, schedule, faults=True), MOST_DEADLINES)


@less_explored
@given(SETUPS, SCHEDULES)
def test_without_a_fault_nothing_is_repeated_and_no_deadline_needed(setup: dict[str, Any], schedule: bytes) -> None:
    undisturbed(moved({**setup, "tests": True}, schedule, faults=False))


def by_chance(seeds: range, most_events: int) -> Counter[str]:
    """How often each kind of message was sent, and more was asked for."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        for faults in (True, False):
            world = random_world(seed, faults=faults, most_events=most_events, tests=True)
            if faults:
                complete(world, MOST_DEADLINES)
            else:
                undisturbed(world)
            counts.update(world.counts)
    return counts


def test_by_chance() -> None:
    """With a plain generator: longer schedules, and always the same."""
    counts = by_chance(range(FEWER), 100)
    assert min(counts["redrawn"], counts["ask more"]) > FEWER / 2, "too little was refused"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_by_chance_for_longer(part: int) -> None:
    by_chance(range(10_000 + 1000 * part, 10_000 + 1000 * (part + 1)), 200)


TOLD = {**TINY, "tests": True, "proposes": False}
PROPOSED = {**TOLD, "proposes": True}
SMALL: list[tuple[dict[str, Any], dict[str, int]]] = [
    (TOLD, {"cut": 1}),
    (PROPOSED, {"cut": 1, "ask": 0}),
    (PROPOSED | {"draft_ahead": 2, "tokens": 3, "ahead": True}, {"wait": 0}),
    (TOLD, {"mode": 1}),
]
LARGER: list[tuple[dict[str, Any], dict[str, int]]] = [
    (PROPOSED | {"tokens": 3}, {"cut": 1}),
    (TOLD | {"mode": Mode.EAGER, "ahead": True, "tokens": 3}, {"cut": 1, "ask": 0}),
    (TOLD, {"cancel": 1, "next": 1, "cut": 1, "late_up": 1, "late_down": 1, "ask": 0}),
    (TOLD, {"stop_drafting": 1, "cut": 1, "ask": 0}),
    (TOLD, {"cut": 1, "deadline": 1, "late_up": 1, "late_down": 1}),
    (TOLD | {"reproducible": False}, {"crash": 1, "retry": 1, "ask": 0}),
]


@pytest.mark.parametrize(("setup", "allowed"), SMALL, ids=str)
def test_every_order_of_events_in_a_tiny_world(setup: dict[str, Any], allowed: dict[str, int]) -> None:
    states = breadth_first(World(Setup(**setup)), allowed, MOST_DEADLINES, most_states=2000)
    assert 100 < states < 2000, "it was not explored to its end"


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "allowed"), LARGER, ids=str)
def test_every_order_of_events_in_a_small_world(setup: dict[str, Any], allowed: dict[str, int]) -> None:
    assert breadth_first(World(Setup(**setup)), allowed, MOST_DEADLINES, most_states=8000) > 500
