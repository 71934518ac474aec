"""One user of a simulated cloud: the edge's own loop, turn by turn, and what it sends and receives by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.core import common_prefix
from pipesd.edge.connection import Connection
from pipesd.edge.local import generate_alone
from pipesd.edge.loop import Loop
from pipesd.edge.run import Run
from pipesd.metrics import EventLog, summary
from pipesd.policy.strategy import make_strategy
from pipesd.policy.tuning import Tuning
from pipesd.protocol.messages import ID_BYTES, Draft, Probe, Welcome
from pipesd.protocol.wire import decode
from pipesd.sim.link_model import Line, Link
from pipesd.sim.sim_cloud import SimCloud
from pipesd.sim.sim_world import Clock, World
from pipesd.sim.tokeniser import ByteTokeniser
from pipesd.sim.trace import Record
from pipesd.sim.traced import TraceDrafter

BEYOND = 64  # further ids that a text which ends by itself might have had


class SimLink:
    """What a user's session sends and receives by."""

    address = "sim"

    def __init__(self, user: User, world: World, cloud: SimCloud, link: Link, seed: str) -> None:
        self.inbox: deque[tuple[float, bytes]] = deque()
        self.greeting = True
        self.up, self.down = Line(link, "up", seed), Line(link, "down", seed)
        self._user, self._world, self._cloud, self._clock = user, world, cloud, user.clock
        self._whole = bool(link.cuts)
        self._fat = link.up_bytes_per_draft_token > 0

    def send(self, payload: bytes) -> bool:
        now_s, connection, tokens = self._clock.now_s, 0, 0
        if self._whole:
            if self.up.away(now_s):
                return False
            connection = self.up.number(now_s)
        message = decode(payload)
        if self._fat:
            if isinstance(message, Draft):
                tokens = len(message.ids)
            elif isinstance(message, Probe):
                tokens = len(message.payload) // ID_BYTES
        arrives_s = self.up.arrival_s(now_s, len(payload), tokens)
        if arrives_s is not None:
            self._world.at(arrives_s, self._cloud.take, self._user.number, connection, message)
        return True

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        clock, inbox = self._clock, self.inbox
        until_s = clock.now_s + (math.ceil(timeout_s * 1000) / 1000 if timeout_s else 0.0)
        if self.greeting:
            while not inbox and self._world.next_s <= until_s:
                self._world.run(self._world.next_s)
        if inbox and inbox[0][0] <= until_s:
            arrived_s, payload = inbox.popleft()
            clock.now_s = max(clock.now_s, arrived_s)
            return payload
        clock.now_s = until_s
        return None

    def answer(self, connection: int, payload: bytes) -> None:
        """The cloud's message to that connection."""
        now_s = self._world.now_s
        if self._whole and connection != self.down.number(now_s):
            return
        arrives_s = self.down.arrival_s(now_s, len(payload))
        if arrives_s is not None:
            self.inbox.append((arrives_s, payload))
            self._user.expect(arrives_s)

    def explain(self) -> str:
        return "the simulated cloud does not answer"

    def adopt(self) -> None:
        """There is one thread."""

    def wake(self) -> None:
        """Nobody waits in virtual time."""

    def close(self) -> None:
        """Nothing is held."""


class IdStream:
    """In place of a text: counts ids and shows nothing, as nobody reads what a simulated run says."""

    stopped = False

    def __init__(self) -> None:
        self.kept_ids = 0

    def push(self, ids: Sequence[int]) -> str:
        self.kept_ids += len(ids)
        return ""

    def finish(self) -> str:
        return ""


class User:
    """One session: its loop is resumed whenever a message is there or its waiting is over."""

    def __init__(
        self, number: int, world: World, cloud: SimCloud, config: EdgeConfig, link: Link, gamma_s: float, seed: int
    ) -> None:
        self.number = number
        self.clock = Clock()
        self._seed = seed
        self.link = SimLink(self, world, cloud, link, f"{seed} {number}")
        self.each: list[dict[str, Any]] = []
        self.said: list[tuple[int, tuple[int, ...]]] = []
        self.rejections = 0
        self._world, self._cloud, self._config = world, cloud, config
        self._strategy = strategy = make_strategy(config)
        self._drafter = TraceDrafter(gamma_s, self.clock)
        self._tokeniser = ByteTokeniser()
        self._events = EventLog(config.events, self.clock)
        self._loop = Loop(config, strategy, self.clock, self._events)
        self._loop.drafter = self._drafter
        self._welcome: Welcome | None = None
        self._wakes_s = math.inf  # when it is resumed, while it waits
        self._turns: Generator[float, None, None]

    def greet(self) -> None:
        """What an edge does when it opens its session."""
        loop, steering = self._loop, self._loop.steering
        if not self._strategy.uses_cloud:
            return
        round_trips = steering.round_trips if steering else None
        loop.connection = Connection(self._config, self.clock, self._events, link=self.link, round_trips=round_trips)
        self._welcome = loop.connection.greet(loop.machine.session, self._tokeniser)
        if steering is not None and self._strategy.tuned:
            steering.tune(Tuning(self._strategy, seed=self._seed))

    def begin(self, start_s: float, records: Sequence[tuple[int, Record]], max_tokens: int | None) -> None:
        """Generate behind these records from now on."""
        self.clock.now_s = start_s
        self.link.greeting = False
        self.link.up.begin(start_s)
        self.link.down.begin(start_s)
        self._turns = self._generations(records, max_tokens)
        self._wakes_s = start_s
        self._world.at(start_s, self._wake, start_s)

    def expect(self, arrives_s: float) -> None:
        """A message will be there."""
        at_s = max(arrives_s, self.clock.now_s)
        if at_s < self._wakes_s < math.inf:
            self._wakes_s = at_s
            self._world.at(at_s, self._wake, at_s)

    def _wake(self, at_s: float) -> None:
        """Go on, unless that was done before."""
        if at_s != self._wakes_s:
            return
        world, clock, inbox = self._world, self.clock, self.link.inbox
        self._wakes_s = math.inf
        for wait_s in self._turns:
            wakes_s = clock.now_s
            if wait_s:
                wakes_s += math.ceil(wait_s * 1000) / 1000
                if inbox:
                    wakes_s = max(clock.now_s, min(wakes_s, inbox[0][0]))
            if wakes_s >= world.next_s:  # others come first
                self._wakes_s = wakes_s
                world.at(wakes_s, self._wake, wakes_s)
                return

    def _generations(
        self, records: Sequence[tuple[int, Record]], max_tokens: int | None
    ) -> Generator[float, None, None]:
        for number, record in records:
            config = GenerateConfig(max_tokens=_tokens(record, max_tokens))
            run = Run(config, self._strategy, record.seed or 0, self.clock.now(), answer=False)
            run.begin_into(IdStream(), drafts=self._loop.drafting)
            self._drafter.read(record)
            end_ids = frozenset((*record.end_ids, *(record.output[-1:] if record.finish == "stop" else ())))
            if self._welcome is None:
                for _ in generate_alone(run, self._drafter, record.prompt, end_ids, self.clock):
                    pass
            else:
                self._cloud.target.read(self._loop.machine.session, record)
                yield from self._loop.turns(run, record.prompt, end_ids, self._welcome)
            self._end(number, record, run)
        self._loop.hang_up()
        self._events.close()

    def _end(self, number: int, record: Record, run: Run) -> None:
        if self._loop.steering is not None:
            self._loop.steering.end(run.meter)
        ids, stats = tuple(run.ids), summary(run.tally, run.meter)
        self._events.record("end", finish_reason=run.reason, stats=stats)
        self.each.append({**stats, "user": self.number, "record": number})
        self.said.append((number, ids))
        self.rejections += run.tally.rejections
        if self._welcome is not None:
            recorded = record.output[: run.config.max_tokens]
            assert ids == recorded, f"record {number}: other ids from number {common_prefix(ids, recorded)} on"


def _tokens(record: Record, most: int | None) -> int:
    """How many tokens to ask for: what was recorded, more where the text ends by itself."""
    recorded = len(record.output) + BEYOND * (record.finish == "stop")
    return recorded if most is None else min(most, recorded)
