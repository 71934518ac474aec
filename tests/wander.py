"""Ways through the model world of `explore`: what can happen next, by chance or by misfortune, and the fair end."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipesd.core import Mode
from pipesd.protocol import cloud_session, edge_machine
from pipesd.protocol.messages import Open
from tests.explore import QUIET_S, Setup, World

MOST_STEPS = 5_000
TURNS = 3
MOST_DEADLINES = 2  # after the last misfortune: one tells the edge that something was lost
LEAST = 2  # stands for LEAST_AHEAD, so that small worlds reach their bounds
LEFT_OUT = ("passes", "verified", "stale", "verdicts", "sampler")

CHOICES: dict[str, tuple[object, ...]] = {
    "mode": tuple(Mode),
    "drafts": (True, True, True, False),
    "ahead": (False, True),
    "ask_every": (1, 2, 3, 5),
    "draft_ahead": (1, 2, 3, 6, 20),
    "cloud_ahead": ((LEAST,), (20,), (LEAST, 20), (20, LEAST)),
    "run_ahead": (LEAST, 5, 20),
    "prompt": (1, 2, 5),
    "tokens": (1, 2, 5, 8, 24),
    "context": ((400,), (400,), (12,), (400, 12), (12, 400)),
    "edges": (1, 1, 2, 3),
    "workers": (1, 1, 2),
    "max_sessions": (1, 2, 3),
    "prefill_piece": (1, 2, 100),
    "ids": (2, 3, 5),
    "stops_at": (frozenset(), frozenset(), frozenset({4}), frozenset({7, 8}), frozenset({12})),
    "reproducible": (True, True, False),
}


@pytest.fixture(scope="module", autouse=True)
def small_bounds() -> Iterator[None]:
    """Small worlds reach their bounds, in every module that imports this."""
    with bounded(LEAST):
        yield


@contextmanager
def bounded(least: int) -> Iterator[None]:
    """So much every cloud allows to be drafted ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_machine, "LEAST_AHEAD", least)
        patch.setattr(cloud_session, "LEAST_AHEAD", least)
        yield


def events(world: World) -> tuple[list[str], list[str], list[str]]:
    """What can happen now: in any run; now and then; by misfortune. More likely events are named more than once."""
    fair: list[str] = []
    rare = ["wait"]
    faults = ["forget", "idle"]
    for n, edge in enumerate(world.edges):
        m = edge.machine
        if m.running:
            fair += [f"settle {n}", f"ask {n}"]
            rare += [f"cancel {n}", f"stop_drafting {n}", f"resume_drafting {n}"]
            faults += [f"deadline {n}"] * 3 + [f"block {n}"]
        elif edge.turns < TURNS:
            rare += [f"next 0 {n}", f"next 2 {n}"] * 2 + [f"close {n}"]
        fair += [f"redraw {n}"] * 4 * (edge.redraw is not None)
        if m.may_draft:
            fair += [f"draw right {n}"] * 4 + [f"draw wrong {n}"] + [f"draw stop {n}"] * bool(world.setup.stops_at)
        fair += [f"send {n}"] * 2 * (m.sent < m.end and m.running) + [f"retry {n}"] * (edge.retry_s is not None)
        fair += [f"up {n}"] * 4 * bool(edge.link.up) + [f"down {n}"] * 4 * bool(edge.link.down)
        faults += [f"cut lose {n}", f"cut late {n}"] * 2 * bool(edge.link.up or edge.link.down)
        faults += [f"late_up {n}"] * 4 * any(link.up for link in edge.old)
        faults += [f"late_down {n}"] * 4 * any(link.down for link in edge.old)
        faults += [f"again_up {n}"] * bool(edge.link.up and not isinstance(edge.link.up[0], Open))
        faults += [f"again_down {n}"] * bool(edge.link.down)
    for w, worker in enumerate(world.workers):
        if worker.down:
            fair.append(f"restart {w}")
        else:
            faults.append(f"crash {w}")
            fair += [f"pass {w}"] * 4 * bool(worker.machine.work())
            rare += [f"mode {w} {s} {mode}" for s in worker.machine._sessions for mode in Mode]
    return fair, rare, faults


def pick(world: World, number: int, *, faults: bool) -> str:
    """The event that `number` stands for: small numbers are ordinary events."""
    fair, rare, bad = events(world)
    kind, at = number % 16, number // 16
    if faults and kind >= 13:
        return bad[at % len(bad)]
    return rare[at % len(rare)] if kind == 12 or not fair else fair[at % len(fair)]


def random_world(seed: int, *, faults: bool, most_events: int = 100, **fixed: Any) -> World:
    """A world made and moved by chance; `fixed` are fields of its setup."""
    rng = random.Random(seed)
    chosen: dict[str, Any] = {name: rng.choice(values) for name, values in CHOICES.items()}
    world = World(Setup(**{**chosen, **fixed}))
    for _ in range(rng.randrange(most_events)):
        world.do(pick(world, rng.getrandbits(16), faults=faults))
    return world


def complete(world: World, most_deadlines: int = 0) -> World:
    """Everything happens that can, until all generations have ended. A deadline fires only when nothing else can
    happen, at most so often."""
    fired = steps = 0
    for edge in world.edges:
        edge.blocked = False
    for quiet in range(1000):
        while _progress(world):
            steps += 1
            assert steps < MOST_STEPS, "there is always something to do, but it never ends"
        running = [n for n, edge in enumerate(world.edges) if edge.machine.running]
        if not running:
            return world
        world.now_s += QUIET_S / 2
        retries = [n for n in running if world.edges[n].retry_s is not None]
        for n in retries:
            world.do(f"retry {n}")
        waiting = [n for n in running if n not in retries]
        if waiting and (not retries or quiet % 8 == 7):
            fired += 1
            assert fired <= most_deadlines, f"only deadline number {fired} moves it on"
            for n in waiting:
                world.do(f"deadline {n}")
    raise AssertionError("it does not end")


def undisturbed(world: World) -> None:
    """The world ends by itself, nothing was asked or said twice, and the figures agree."""
    complete(world)
    assert "deadline" not in world.counts
    assert not world.witness.said_again
    assert "Resend" not in world.counts or "Gone" in world.counts
    for edge in world.edges:
        t = edge.machine.tally
        assert edge.ended
        assert t.verified + t.stale <= t.drafted or t.openings > 1


def _progress(world: World) -> bool:
    """Each message queue, edge and worker moves once; whether anything did."""
    moved = False
    for n, edge in enumerate(world.edges):
        for waits, event in (
            (edge.link.down, "down"),
            (edge.link.up, "up"),
            (any(link.down for link in edge.old), "late_down"),
            (any(link.up for link in edge.old), "late_up"),
        ):
            if waits:
                world.do(f"{event} {n}")
                moved = True
        moved |= _drive(world, n)
    for w, worker in enumerate(world.workers):
        if worker.down:
            world.do(f"restart {w}")
        if worker.machine.work():
            world.do(f"pass {w}")
            moved = True
    return moved


def _drive(world: World, n: int) -> bool:
    """What a driver does between two looks at the link: settle, draw one token, and ask or send it."""
    edge, setup = world.edges[n], world.setup
    if edge.retry_s is not None:
        return False
    moved = world.settle(n) or edge.redraw is not None
    if edge.redraw is not None:
        world.do(f"redraw {n}")
    if edge.machine.may_draft:
        world.do(f"draw {'wrong' if edge.draws % 4 == 3 else 'right'} {n}")
        asks = setup.mode is Mode.NAV and len(edge.machine.draft) >= setup.ask_every
        world.do(f"{'ask' if asks else 'send'} {n}")
        moved = True
    return moved


def key(world: World) -> bytes:
    """Equal for worlds that behave alike; counts and times are left out."""
    parts: list[object] = [sorted(world.rows.items()), world.placed, world.target.salt]
    for edge in world.edges:
        machine = vars(edge.machine)
        queues = [(list(link.up), list(link.down), link is world.routes.get(edge.machine.session))
                  for link in [edge.link, *edge.old]]  # fmt: skip
        parts += [str(machine), edge.mirror, str(queues), edge.blocked, edge.retry_s is None, edge.turns, edge.redraw]
    for worker in world.workers:
        sessions = [
            {name: value for name, value in vars(s).items() if not name.endswith("_s") and name not in LEFT_OUT}
            for s in worker.machine._sessions.values()
        ]
        parts += [str(sessions), sorted(worker.caches.items()), worker.down]
    return repr(parts).encode()


def breadth_first(world: World, allowed: dict[str, int], most_deadlines: int, most_states: int) -> int:
    """Visit every state that `world` can come to with at most `allowed[verb]` events of each kind named there and any
    number of ordinary ones; from each the fair end must come. Returns how many states there are, at most `most_states`.
    """
    seen: set[tuple[bytes, tuple[tuple[str, int], ...]]] = set()
    frontier = [(pickle.dumps(world), allowed)]
    while frontier and len(seen) < most_states:
        following = []
        for state, left in frontier:
            if len(seen) >= most_states:
                break
            for event in _choices(pickle.loads(state), left):
                after: World = pickle.loads(state).play(event)
                verb = event.split()[0]
                left_after = {**left, verb: left[verb] - 1} if verb in left else left
                mark = (key(after), tuple(sorted(left_after.items())))
                if mark not in seen:
                    seen.add(mark)
                    dumped = pickle.dumps(after)
                    following.append((dumped, left_after))
                    try:
                        complete(after, most_deadlines)
                    except AssertionError as error:
                        raise AssertionError(f"{error}, after {event} from {state!r}") from error
        frontier = following
    return len(seen)


def _choices(world: World, left: dict[str, int]) -> Iterable[str]:
    fair, rare, faults = events(world)
    ordinary = {event for event in fair if event.split()[0] not in left}
    return sorted(ordinary | {e for e in [*fair, *rare, *faults] if left.get(e.split()[0], 0) > 0})
