"""The simulated cloud: the runtime's own cloud machine behind a front that answers probes, moved by events.

The worker does what `pipesd.cloud.worker` does, in its order: drain, forget the idle, choose, verify, reply; messages
that come during a pass wait for its end. All users' verifications that are due go into one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits, Work
from pipesd.protocol.messages import (
    FEATURES,
    MAJOR,
    MINOR,
    Gone,
    Hello,
    Message,
    Open,
    Probe,
    Probed,
    ProbeStatus,
    Welcome,
)
from pipesd.protocol.wire import encode
from pipesd.sim.traced import TraceTarget

CONTEXT = 1 << 20  # ids in a session: no record is longer
VOCABULARY_SIZE = 1 << 31  # any id is one of the target's
MIGHT_BE_LONG = 1 << 16  # bytes of a probe's answer, as the front bounds it


class Surroundings(Protocol):
    """What the cloud needs of its world: the time, a way to come back later, a way to answer a user."""

    now_s: float

    def at(self, at_s: float, do: Callable[..., None], *given: Any) -> None: ...

    def answer(self, user: int, connection: int, payload: bytes) -> None: ...


class SimCloud:
    """A front and its one worker. A pass takes `pass_s` and `token_s` for each id in it; `busy_s` sums the passes that
    verify."""

    def __init__(self, world: Surroundings, users: int, pass_s: float, token_s: float) -> None:
        limits = CloudLimits(context=CONTEXT, vocabulary_size=VOCABULARY_SIZE, max_sessions=users)
        self.machine = CloudMachine(limits, max(1, math.ceil(1000 * (pass_s + token_s))))
        self.target = TraceTarget()
        self.busy_s = 0.0
        self._world = world
        self._pass_s, self._token_s = pass_s, token_s
        self._waiting: list[Message] = []  # for the worker, while it computes
        self._busy = False
        self._users: dict[int, tuple[int, int]] = {}  # who has a session, and the connection last heard it on
        self._opened: set[int] = set()  # sessions that the front has a place for

    def take(self, user: int, connection: int, message: Message) -> None:
        """A message has arrived at the front."""
        session = message.session
        self._users[session] = user, connection
        if isinstance(message, Probe):
            status = ProbeStatus.OK if session in self._opened else ProbeStatus.UNKNOWN_SESSION
            reply = bytes(min(message.reply_bytes, max(len(message.payload), MIGHT_BE_LONG)))
            self._say([Probed(session, message.opening, message.token, status, 0, reply)])
        elif isinstance(message, Hello):
            own_hash, fingerprint = message.vocabulary_hash, bytes(8)
            self._say([
                Welcome(session, message.opening, MAJOR, MINOR, FEATURES, "recorded", VOCABULARY_SIZE - 1, own_hash,
                        fingerprint, CONTEXT, "cpu", "float32")
            ])  # fmt: skip
        else:
            if isinstance(message, Open):
                self._opened.add(session)
            self._waiting.append(message)
            if not self._busy:
                self._turn()

    def _turn(self) -> None:
        """Take what waits, and begin a pass; its end is an event."""
        machine, now_s = self.machine, self._world.now_s
        for message in self._waiting:
            self._say(machine.receive(message, now_s))
        self._waiting.clear()
        self._say(machine.tick(now_s))
        for slot in machine.take_freed():
            self.target.truncate(slot, 0)
        work = machine.work()
        self._busy = bool(work)
        if work:
            took_s = self._pass_s + self._token_s * sum(len(item.ids) for item in work)
            self._world.at(now_s + took_s, self._finish, work, took_s)

    def _finish(self, work: Sequence[Work], took_s: float) -> None:
        """The pass is over: each session is told."""
        if work[0].rows:
            self.busy_s += took_s
        for item in work:
            self._say(self.machine.done(item, self.target.choices(item), took_s, self._world.now_s))
        self._turn()

    def _say(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Gone):
                self._opened.discard(message.session)
            else:
                self._world.answer(*self._users[message.session], encode(message))
