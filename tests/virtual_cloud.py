"""The cloud of a virtual world: the front's rules and one worker, moved by events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from pipesd.cloud.admission import Identity, hello_reply, open_refusal, starting
from pipesd.cloud.routes import Routes
from pipesd.cloud.worker import choices_of
from pipesd.core import ModelInfo
from pipesd.protocol import wire
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.wire import Message, ProbeStatus
from pipesd.sim.targets import ScriptedTarget
from pipesd.sim.texts import Law
from pipesd.sim.tokeniser import byte_vocabulary

RETRY_MS = 50
VOCABULARY = byte_vocabulary()


class Surroundings(Protocol):
    """What the cloud needs of its world: the time, a way to come back later, a way to answer a connection."""

    now_s: float

    def at(self, at_s: float, do: Callable[[], None]) -> None: ...

    def answer(self, number: int, payload: bytes) -> None: ...


class VirtualCloud:
    """A front and its one worker. The front does what `pipesd.cloud.front` does, with that one's table and answers; the
    worker takes its messages between two passes."""

    def __init__(
        self,
        world: Surroundings,
        law: Law,
        *,
        context: int,
        end_ids: Sequence[int],
        pass_s: float,
        token_s: float,
        limits: dict[str, Any],
    ) -> None:
        """A pass takes `pass_s` and `token_s` for each id in it; `limits` are fields of CloudLimits."""
        self._world = world
        self._model: dict[str, Any] = {"law": law, "vocabulary": VOCABULARY, "context": context, "end_ids": end_ids}
        self._pass_s, self._token_s = pass_s, token_s
        self._limits = CloudLimits(context=context, vocabulary_size=VOCABULARY.size, **{"prefill_piece": 16, **limits})
        self.errors: list[wire.Error] = []  # that were answered
        self._waiting: deque[Message] = deque()  # for the worker, while it computes
        self._up = self._busy = False
        self._life = 0  # a number for each worker
        self._start()
        self._identity = _identity(self.target.info)
        self.forget()

    def forget(self) -> None:
        """The front loses its table."""
        self.routes = Routes(64, self._limits.idle_s)

    # -- the front ----------------------------------------------------------------------------------------------------

    def take(self, number: int, payload: bytes) -> None:
        """A message that arrived on connection `number`."""
        message, now_s = wire.decode(payload), self._world.now_s
        connection = b"%d" % number
        route = self.routes[message.session]
        if isinstance(message, wire.Hello):
            self._answer(number, hello_reply(message, self._identity, RETRY_MS))
            return
        if isinstance(message, wire.Probe):
            if route is not None:
                self.routes.heard(route, connection, now_s)
            gone = ProbeStatus.UNKNOWN_SESSION if self._up else ProbeStatus.DOWN
            status = ProbeStatus.OK if route is not None else gone
            reply = bytes(min(message.reply_bytes, max(len(message.payload), 1 << 16)))
            self._answer(number, wire.Probed(message.session, message.opening, message.token, status, 0, reply))
            return
        if isinstance(message, wire.Open):
            self._open(number, message)
            return
        if route is None:
            if isinstance(message, wire.Draft):
                self._answer(number, _unknown(message.session, message.opening))
            return
        if message.opening < route.opening:
            return
        self.routes.heard(route, connection, now_s)
        self._tell(message)

    def _open(self, number: int, m: wire.Open) -> None:
        route = self.routes[m.session]
        if route is not None and m.opening <= route.opening:
            return
        refusal = open_refusal(m, self._identity, draining=False, retry_ms=RETRY_MS)
        if refusal is None and not self._up:
            refusal = starting(m, self._identity, RETRY_MS)
        if refusal is not None:
            self._answer(number, refusal)
            return
        self.routes.open(m.session, m.opening, b"%d" % number, 0, self._world.now_s)
        self._tell(m)

    def _deliver(self, messages: Sequence[Message]) -> None:
        """What the worker says."""
        for message in messages:
            if isinstance(message, wire.Gone):
                self.routes.gone(message.session, message.opening)
            elif (route := self.routes[message.session]) is not None:
                route.granted = route.granted or isinstance(message, wire.Opened)
                self._answer(int(route.routing_id), message)
                refuses = isinstance(message, wire.Error) or (isinstance(message, wire.Resend) and message.pos == 0)
                if refuses and not route.granted and message.opening == route.opening:
                    self.routes.forget(message.session)

    def _answer(self, number: int, message: Message) -> None:
        if isinstance(message, wire.Error):
            self.errors.append(message)
        self._world.answer(number, wire.encode(message))

    # -- the worker ---------------------------------------------------------------------------------------------------

    def crash(self, rest_s: float) -> None:
        """The worker ends with all it holds; the front sees it, tells the sessions, and has a new one after `rest_s`.
        One that rests goes on resting."""
        if not self._up:
            return
        self._up = False
        self._life += 1
        self._waiting.clear()
        for route in self.routes.forget_worker(0):
            self._answer(int(route.routing_id), _unknown(route.session, route.opening))
        self._world.at(self._world.now_s + rest_s, self._start)

    def _start(self) -> None:
        self._up, self._busy = True, False
        self._life += 1
        self.target = ScriptedTarget(**self._model)
        self.machine = CloudMachine(self._limits, max(1, math.ceil(1000 * (self._pass_s + self._token_s))))

    def _tell(self, message: Message) -> None:
        if self._up:
            self._waiting.append(message)
            if not self._busy:
                self._turn()

    def _turn(self) -> None:
        """Drain, choose, begin a pass; its end is an event."""
        now_s, machine = self._world.now_s, self.machine
        while self._waiting:
            self._deliver(machine.receive(self._waiting.popleft(), now_s))
        self._deliver(machine.tick(now_s))
        for slot in machine.take_freed():
            self.target.truncate(slot, 0)
        work = machine.work()
        self._busy = bool(work)
        if not work:
            return
        choices = choices_of(self.target, work)
        life, took_s = self._life, self._pass_s + self._token_s * sum(len(item.ids) for item in work)

        def finish() -> None:
            if life != self._life:
                return
            for item, chosen in zip(work, choices, strict=True):
                self._deliver(machine.done(item, chosen, took_s, self._world.now_s))
            self._turn()

        self._world.at(now_s + took_s, finish)


@lru_cache(maxsize=64)
def _identity(info: ModelInfo) -> Identity:
    return Identity(info, VOCABULARY)


def _unknown(session: int, opening: int) -> wire.Error:
    return wire.Error(session, opening, wire.ErrorCode.UNKNOWN, "no such session here; open again with all ids")
