"""A world in virtual time: the real session, its loop, wire and machines against the real cloud's machine, with no
socket, no thread and no waiting. Thousands of generations take seconds, and each can be repeated from its `Scene`.

The edge's thread moves the clock: by drafting and by waiting for the link. What the cloud and the links do meanwhile
are events in the order of their times, run before the edge looks. Nothing here knows what should come out.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from virtual_cloud import VOCABULARY, VirtualCloud

from pipesd.clock import VirtualClock
from pipesd.config import EdgeConfig
from pipesd.core import Drawn
from pipesd.edge.session import EdgeSession
from pipesd.policy.sampler import Chooser
from pipesd.protocol import wire
from pipesd.protocol.messages import ID_BYTES
from pipesd.sim.drafters import Agreement, Proposal, ScriptedDrafter
from pipesd.sim.texts import KeyedText, Law
from pipesd.sim.tokeniser import ByteTokeniser

LAW = KeyedText(7)
FRAME_BYTES = 9  # what a message costs beside its payload
CONNECT_S = 0.02  # what connecting again takes after a cut
MOST_LOOKS = 20_000  # at the link without a step of the clock: the loop turns on the spot
MOST_S = 3600.0
EXACT_S = 2e-6  # what virtual times are logged to


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong at `at_s`: `crash` (of the worker, which is back after `lasts_s`), `cut` (what is under
    way is lost) and `late` (it still arrives, so much later), `forget` (the front loses its table), `lose_up`,
    `lose_down`, `repeat_up`, `repeat_down` (the next message), `block` (the link takes nothing for so long)."""

    at_s: float
    kind: str
    lasts_s: float = 0.05


TROUBLES = ("crash", "cut", "late", "forget", "lose_up", "lose_down", "repeat_up", "repeat_down", "block")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One world. Times in s, rates in bytes a second. `delay_s` is above 0, as round trips take time; `jitter_s` is the
    most that one message is late by chance, `gamma_jitter` the share by which a draw may take longer."""

    seed: int = 0
    law: Law = LAW
    agreement: float = 0.8
    proposal: Proposal | None = None
    end_ids: tuple[int, ...] = ()
    gamma_s: float = 0.006
    prefill_s: float = 0.0  # of the draft model, for each id that is read
    gamma_jitter: float = 0.0
    draft_context: int = 2048
    delay_s: float = 0.01
    jitter_s: float = 0.0
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    up_bytes_per_draft_token: int = 0
    pass_s: float = 0.02
    token_s: float = 0.0
    context: int = 2048
    limits: dict[str, Any] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()
    edge: dict[str, Any] = field(default_factory=dict)  # fields of EdgeConfig


class VirtualWorld:
    """The cloud, the link and the session of a scene; `session` is the real one, to be used as a user does."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.clock = VirtualClock(100.0)
        self.chance = random.Random(scene.seed)
        self.now_s = self.clock.now()  # of the event that runs
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.happened: list[str] = []  # the troubles so far
        self.cloud = VirtualCloud(
            self, scene.law, context=scene.context, end_ids=scene.end_ids, pass_s=scene.pass_s, token_s=scene.token_s,
            limits=scene.limits,
        )  # fmt: skip
        self.link = VirtualLink(self)
        for trouble in scene.troubles:
            self.at(self.now_s + trouble.at_s, lambda trouble=trouble: self._trouble(trouble))  # type: ignore[misc]
        proposal = scene.proposal or Agreement(scene.law, scene.agreement, scene.seed)
        self.drafter = _UnevenDrafter(proposal, self, context=scene.draft_context, end_ids=scene.end_ids)
        settings: dict[str, Any] = {"connect_s": 60.0, "patience_s": 60.0, **scene.edge}
        self.session = EdgeSession(
            EdgeConfig(**settings), drafter=self.drafter, tokeniser=ByteTokeniser(VOCABULARY), clock=self.clock,
            link=self.link,
        )  # fmt: skip

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        """Let `do` happen at that time."""
        heapq.heappush(self._events, (at_s, next(self._order), do))

    def next_s(self) -> float:
        """When the next event is, infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def answer(self, number: int, payload: bytes) -> None:
        """The cloud speaks on that connection."""
        self.link.answer(number, payload)

    def run(self, until_s: float) -> None:
        """Let everything happen that is due."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = until_s

    def _trouble(self, trouble: Trouble) -> None:
        self.happened.append(trouble.kind)
        if trouble.kind == "crash":
            self.cloud.crash(trouble.lasts_s)
        elif trouble.kind == "forget":
            self.cloud.forget()
        else:
            self.link.trouble(trouble)


class _UnevenDrafter(ScriptedDrafter):
    """Takes its time by the world's clock, more or less of it."""

    def __init__(self, proposal: Proposal, world: VirtualWorld, **settings: Any) -> None:
        paces = {"gamma_s": world.scene.gamma_s, "prefill_s": world.scene.prefill_s, "clock": world.clock}
        super().__init__(proposal, VOCABULARY, **paces, **settings)
        self._world = world

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        drawn = super().draft(sampler)
        if self._world.scene.gamma_jitter:
            self._world.clock.advance(self.gamma_s * self._world.scene.gamma_jitter * self._world.chance.random())
        return drawn


@dataclass(eq=False)
class _Line:
    """One direction of one connection: it keeps its order, and serialises."""

    free_s: float = 0.0
    last_s: float = 0.0


@dataclass(eq=False)
class _Connection:
    """Once it is cut, what is under way is lost, or arrives by `later_s` later."""

    number: int
    cut: bool = False
    later_s: float = 0.0
    up: _Line = field(default_factory=_Line)
    down: _Line = field(default_factory=_Line)


class VirtualLink:
    """What the session sends and receives by. A message occupies its direction for its bytes, then takes the delay."""

    address = "tcp://virtual:1"

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._connections = [_Connection(0)]
        self._inbox: deque[bytes] = deque()
        self._blocked_until_s = 0.0
        self._due: set[str] = set()  # troubles of the next message
        self._looks = 0
        self.closed = False
        self.sent = 0
        self.refused = 0

    # -- what the session calls ---------------------------------------------------------------------------------------

    def adopt(self) -> None:
        assert not self.closed

    def wake(self) -> None:
        """Nobody waits in virtual time."""

    def explain(self) -> str:
        return "the virtual cloud does not answer"

    def close(self) -> None:
        self.closed = True

    def send(self, payload: bytes) -> bool:
        assert not self.closed
        world, now_s = self._world, self._world.clock.now()
        world.run(now_s)
        if now_s < self._blocked_until_s:
            self.refused += 1
            return False
        self.sent += 1
        connection, message = self._connections[-1], wire.decode(payload)
        tokens = len(message.ids) if isinstance(message, wire.Draft) else 0
        if isinstance(message, wire.Probe):
            tokens = len(message.payload) // ID_BYTES
        further = world.scene.up_bytes_per_draft_token * tokens
        lasts_s = (len(payload) + FRAME_BYTES + further) / world.scene.up_bytes_per_s
        self._put(connection, connection.up, "up", lasts_s, lambda: world.cloud.take(connection.number, payload))
        return True

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        assert not self.closed
        world, clock = self._world, self._world.clock
        deadline_s = clock.now() + math.ceil(timeout_s * 1000) / 1000
        self._looks = self._looks + 1 if timeout_s == 0 else 0
        assert self._looks < MOST_LOOKS, "the loop looks at the link again and again, and does nothing"
        while True:
            now_s = clock.now()
            assert now_s < MOST_S, "no end in sight"
            world.run(now_s)
            if self._inbox:
                return self._inbox.popleft()
            if now_s >= deadline_s:
                return None
            clock.advance(max(min(world.next_s(), deadline_s) - now_s, 1e-9))

    # -- what the cloud calls, and what goes wrong --------------------------------------------------------------------

    def answer(self, number: int, payload: bytes) -> None:
        """The cloud's message to the connection `number`."""
        connection = self._connections[number]
        lasts_s = (len(payload) + FRAME_BYTES) / self._world.scene.down_bytes_per_s
        self._put(connection, connection.down, "down", lasts_s, lambda: self._inbox.append(payload))

    def trouble(self, trouble: Trouble) -> None:
        if trouble.kind in ("cut", "late"):
            old = self._connections[-1]
            old.cut, old.later_s = True, trouble.lasts_s if trouble.kind == "late" else math.inf
            self._connections.append(_Connection(old.number + 1))
            self._blocked_until_s = self._world.now_s + CONNECT_S
        elif trouble.kind == "block":
            self._blocked_until_s = self._world.now_s + trouble.lasts_s
        else:
            self._due.add(trouble.kind)

    def _put(self, connection: _Connection, line: _Line, way: str, lasts_s: float, deliver: Callable[[], None]) -> None:
        world = self._world
        line.free_s = max(line.free_s, world.now_s) + lasts_s
        copies = 0 if self._happens(f"lose_{way}") else 2 if self._happens(f"repeat_{way}") else 1
        for _ in range(copies):
            crossing_s = world.scene.delay_s + world.scene.jitter_s * world.chance.random()
            line.last_s = max(line.last_s, line.free_s + crossing_s)  # nothing overtakes what is ahead of it
            world.at(line.last_s, lambda: self._arrive(connection, deliver))

    def _arrive(self, connection: _Connection, deliver: Callable[[], None]) -> None:
        if not connection.cut:
            deliver()
        elif connection.later_s < math.inf:
            self._world.at(self._world.now_s + connection.later_s, deliver)

    def _happens(self, kind: str) -> bool:
        if kind not in self._due:
            return False
        self._due.remove(kind)
        return True
