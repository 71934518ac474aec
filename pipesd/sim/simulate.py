"""A run in virtual time: the runtime's own loop, policies, wire and machines on recorded models and a modelled link.

Nothing waits and no model computes: the edge's clock moves by drafting and by waiting, the cloud's by passes, and what
happens next is the earliest of all events. The same arguments always give the same figures, on any machine.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.core import common_prefix
from pipesd.edge.connection import Connection
from pipesd.edge.local import generate_alone
from pipesd.edge.loop import Loop
from pipesd.edge.run import Run
from pipesd.errors import UsageError
from pipesd.metrics import EventLog, summary
from pipesd.policy.strategy import make_strategy
from pipesd.policy.token_batches import warmup
from pipesd.policy.tuning import Tuning
from pipesd.protocol.messages import ID_BYTES, Draft, Probe, Welcome
from pipesd.protocol.wire import decode
from pipesd.sim.link_model import Line, Link
from pipesd.sim.sim_cloud import SimCloud
from pipesd.sim.tokeniser import ByteTokeniser
from pipesd.sim.trace import Record
from pipesd.sim.traced import TraceDrafter

SUMMED = ("tokens", "rounds", "navs", "drafted", "verified", "accepted", "proactive", "promoted", "discarded", "stale",
          "target_passes", "openings", "alone_tokens", "bytes_up", "bytes_down", "cloud_s", "draft_s",
          "wait_s")  # fmt: skip
BEYOND = 64  # further ids that a text which ends by itself might have had


@dataclass(frozen=True)
class Simulated:
    """What a simulated run showed.

    `tpt_ms`: time per output token, over all tokens of all users. `stats`: sums over the generations of what a session
    counts, `tpt_ms`, `acceptance_rate`, `acceptance_per_token`, `triggers`, and `cloud_s_per_1000_tokens`, for which
    the passes of the one machine count once however many users shared them. `each`: the statistics of every generation,
    with its `user` and the number of its `record`; `ids`: its output. Both are in the order of the records.
    `elapsed_s`: virtual time from the first prompt to the last token.
    """

    tpt_ms: float
    stats: Mapping[str, Any]
    each: Sequence[Mapping[str, Any]]
    ids: Sequence[tuple[int, ...]]
    elapsed_s: float


def simulate(
    records: Sequence[Record],
    *,
    link: Link | None = None,
    gamma_s: float,
    pass_s: float,
    token_s: float = 0.0,
    max_tokens: int | None = None,
    users: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Simulated:
    """Generate behind the prompts of `records` with the edge's `settings` (fields of `EdgeConfig`: strategy, …).

    `link`: of each user, none takes no time; `gamma_s` is what drafting a token takes, `pass_s` and `token_s` what a
    pass of the target takes, and each id in it. `max_tokens`: of each output, at most what was recorded. User u
    generates behind `records[u::users]`, one after the other in one session; all share one machine and its passes.
    `seed` is of what happens by chance on the links. A strategy that tunes itself begins without earlier knowledge.

    Raises UsageError for what cannot be run: no records, fewer than users, a time below 0, settings out of bounds.
    """
    link = link or Link()
    config = EdgeConfig(**(settings or {}))
    _check(records, users, config, gamma_s=gamma_s, pass_s=pass_s, token_s=token_s, max_tokens=max_tokens)
    if make_strategy(config).batching == "dp":
        warmup()
    world = _World(users, pass_s, token_s)
    everyone = [_User(number, world, config, link, gamma_s, seed) for number in range(users)]
    world.users = everyone
    for user in everyone:
        user.greet()
    start_s = max(user.clock.now_s for user in everyone)
    for number, user in enumerate(everyone):
        user.begin(start_s, list(enumerate(records))[number::users], max_tokens)
    world.run(math.inf)
    each = sorted((stats for user in everyone for stats in user.each), key=lambda stats: stats["record"])
    assert len(each) == len(records), "a generation never ended"
    ids = [said for _, said in sorted(pair for user in everyone for pair in user.said)]
    elapsed_s = max(user.clock.now_s for user in everyone) - start_s
    stats = _sums(each, sum(user.rejections for user in everyone), world.cloud)
    return Simulated(stats["tpt_ms"], stats, tuple(each), tuple(ids), elapsed_s)


class _Clock:
    """One user's: the world's time whenever the user has its turn, ahead of it when that ends."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _World:
    """The events in the order of their times, and the cloud."""

    def __init__(self, users: int, pass_s: float, token_s: float) -> None:
        self.now_s = 0.0
        self.users: Sequence[_User] = ()
        self.cloud = SimCloud(self, users, pass_s, token_s)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, at_s: float, do: Callable[..., None], *given: Any) -> None:
        """Let `do(*given)` happen at that time."""
        heapq.heappush(self._events, (at_s, next(self._order), do, given))

    def answer(self, user: int, connection: int, payload: bytes) -> None:
        """The cloud speaks on that connection."""
        self.users[user].link.answer(connection, payload)

    @property
    def next_s(self) -> float:
        """When the next event is, infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run(self, until_s: float) -> None:
        """Let everything happen that is due by then."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, do, given = heapq.heappop(events)
            do(*given)


class _SimLink:
    """What a user's session sends and receives by."""

    address = "sim"

    def __init__(self, user: _User, world: _World, link: Link, seed: str) -> None:
        self.inbox: deque[tuple[float, bytes]] = deque()
        self.greeting = True
        self.up, self.down = Line(link, "up", seed), Line(link, "down", seed)
        self._user, self._world, self._clock = user, world, user.clock
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
            self._world.at(arrives_s, self._world.cloud.take, self._user.number, connection, message)
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


class _User:
    """One session: its loop is resumed whenever a message is there or its waiting is over."""

    def __init__(self, number: int, world: _World, config: EdgeConfig, link: Link, gamma_s: float, seed: int) -> None:
        self.number = number
        self.clock = _Clock()
        self.link = _SimLink(self, world, link, f"{seed} {number}")
        self.each: list[dict[str, Any]] = []
        self.said: list[tuple[int, tuple[int, ...]]] = []
        self.rejections = 0
        self._world, self._config = world, config
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
            steering.tune(Tuning(self._strategy))

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
            run.begin(self._tokeniser, drafts=self._loop.drafting)
            self._drafter.read(record)
            end_ids = frozenset(record.output[-1:] if record.finish == "stop" else ())
            if self._welcome is None:
                for _ in generate_alone(run, self._drafter, record.prompt, end_ids, self.clock):
                    pass
            else:
                self._world.cloud.target.read(self._loop.machine.session, record)
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


def _check(records: Sequence[Record], users: int, config: EdgeConfig, max_tokens: int | None, **times_s: float) -> None:
    if not 1 <= users <= len(records):
        raise UsageError(f"users {users}: want from 1 up to the number of records, {len(records)}")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens {max_tokens}: want at least 1")
    for name, value in times_s.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} {value}: want seconds from 0")
    if config.events and users > 1:
        raise UsageError("events: the log is of one user; leave it out, or simulate one")


def _sums(each: Sequence[Mapping[str, Any]], rejections: int, cloud: SimCloud) -> dict[str, Any]:
    """Sums and rates over the generations."""
    sums: dict[str, Any] = {name: sum(stats[name] for stats in each) for name in SUMMED}
    elapsed_ms = sum((stats["tpt_ms"] or 0.0) * stats["tokens"] for stats in each)
    decided = sums["accepted"] + rejections
    return {
        **sums,
        "tpt_ms": elapsed_ms / sums["tokens"],
        "acceptance_rate": sums["accepted"] / sums["verified"] if sums["verified"] else None,
        "acceptance_per_token": sums["accepted"] / decided if decided else None,
        "triggers": dict(sum((Counter(stats["triggers"]) for stats in each), Counter())),
        "cloud_s_per_1000_tokens": 1000 * cloud.busy_s / sums["tokens"],
    }
