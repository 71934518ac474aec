"""The front: owns the public socket; checks, routes, answers; never computes and never waits for anyone.

    from an edge   what the front does
    HELLO          WELCOME, or ERROR version | starting
    PROBE          PROBED at once, while workers compute
    OPEN           ERROR version | draining | vocabulary | model | starting | full, else to the session's worker; a new
                   session goes to the worker with the fewest
    DRAFT          to the session's worker, or ERROR unknown
    CANCEL, CLOSE  to the session's worker, or nothing
    anything else  counted and refused by ERROR malformed, so many a second at most

Every payload from outside is hostile: it is decoded under the limits of the wire before anything else looks at it, and
the tables that it may fill are bounded. No send waits: what an edge does not read is dropped, counted and told in the
log, and that session is closed; an edge that is gone is counted, and found again by its next word. A reply to PROBE is
never longer than the larger of what was sent and `PROBE_REPLY_BYTES`, a WELCOME than a block of the vocabulary and its
header, anything else than a line; and all go to the far end of a TCP connection, never to a third party.

A worker's first word is READY. It says something (at least a BEAT) every few seconds unless a pass runs, leaves on
CLOSE of session 0, and otherwise gets the edges' messages as they came and answers by session. What happens when one
dies is in `supervisor`; its sessions are told ERROR unknown, whereupon their edges open again with what was committed.
"""

from __future__ import annotations

import math
import socket as net
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import zmq

from pipesd.clock import Clock
from pipesd.cloud.admission import DRAINING_RETRY_MS, Identity, error_to, hello_reply, open_refusal, starting
from pipesd.cloud.bounds import FrontCounters, FrontLimits
from pipesd.cloud.replies import Replies
from pipesd.cloud.routes import Route, Routes
from pipesd.cloud.supervisor import Launcher, Phase, Supervisor, Worker
from pipesd.errors import PipeSDError
from pipesd.protocol import wire
from pipesd.protocol.wire import ErrorCode, Message, ProbeStatus, WireError
from pipesd.transport import FrontSocket

PROBE_REPLY_BYTES = 1 << 16
LOOK_S = 0.25  # how often the front looks after its workers and tables
FAREWELL = wire.encode(wire.Close(0, 0))


class Front:
    """Run it in one thread; `stop` may be called from any, and from signal handlers."""

    def __init__(
        self,
        public: FrontSocket,
        launch: Launcher,
        limits: FrontLimits,
        *,
        log: Callable[[str], None],
        clock: Clock,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.counters = FrontCounters()
        self.limits = limits
        self._public = public
        self._replies = Replies(public, self.counters, limits, log, clock)
        self._log = log
        self._clock = clock
        self._on_ready = on_ready
        self._routes = Routes(limits.most_routes, limits.idle_s)
        self._workers = Supervisor(
            launch, limits.workers, stall_s=limits.stall_s, load_s=limits.load_s, restarts=limits.restarts, log=log
        )
        self._identity: Identity | None = None
        self._announced = False
        self._poller = zmq.Poller()
        self._sources: dict[Any, Callable[[], None]] = {}
        self._polled_change = -1
        self._look_at_s = 0.0
        self._poll_ms = 0
        self._stop_asked = 0  # 1: drain, 2: at once
        self._drain_until_s: float | None = None
        self._wake_reader, self._wake_writer = net.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def run(self) -> None:
        """Until `stop`. PipeSDError: a worker could not start, or failed too often; its `exit_code` is the worker's."""
        self._public.adopt()
        try:
            while not self._finished():
                self._watch_workers()
                for hear in self._wait():
                    hear()
        finally:
            self._close()

    @property
    def sessions(self) -> int:
        """Sessions in the table now."""
        return len(self._routes)

    @property
    def crashes(self) -> int:
        """How often a worker has ended unasked."""
        return self._workers.crashes

    @property
    def workers_gone(self) -> bool:
        """Whether every worker has ended, once `run` is over; a thread in a pass may be left."""
        return self._workers.all_gone

    def stop(self, *, now: bool = False) -> None:
        """Drain and end: no new generations, running ones have `drain_s`. With `now`, or the second time: at once."""
        self._stop_asked = 2 if now or self._stop_asked else 1
        try:
            self._wake_writer.send(b"\0")
        except OSError:
            return  # woken already, or over

    # ---- the turns of the loop

    def _finished(self) -> bool:
        if not self._stop_asked:
            return False
        now_s = self._clock.now()
        if self._drain_until_s is None:
            self._drain_until_s = now_s + self.limits.drain_s
        if self._stop_asked > 1 or now_s >= self._drain_until_s:
            return True
        return not self._routes.running(now_s, self.limits.quiet_s)

    def _watch_workers(self) -> None:
        """Start, bury and forget what is due; between two looks only a worker's end makes a third."""
        now_s = self._clock.now()
        if now_s < self._look_at_s:
            return
        for worker in self._workers.check(now_s):
            for route in self._routes.forget_worker(worker.number):
                self._replies.send(route.routing_id, route.session, _unknown(route.session, route.opening))
        for route in self._routes.forget_idle(now_s):
            self._workers.workers[route.worker].tell(wire.encode(wire.Close(route.session, route.opening)), now_s)
        if self._workers.changes != self._polled_change:
            self._poll_anew()
        wait_s = min(LOOK_S, self._workers.due_in_s(now_s))
        self._look_at_s = now_s + wait_s
        self._poll_ms = math.ceil(wait_s * 1000)

    def _poll_anew(self) -> None:
        """What is polled, and what to do when it has something."""
        self._sources = {self._public.zmq_socket: self._hear_edge, self._wake_reader.fileno(): self._wake_up}
        for worker in self._workers:
            if worker.running is not None:
                self._sources[worker.running.pair.zmq_socket] = partial(self._hear_worker, worker)
                self._sources[worker.running.sentinel] = self._look_soon
        self._poller = zmq.Poller()
        for source in self._sources:
            self._poller.register(source, zmq.POLLIN)
        self._polled_change = self._workers.changes

    def _wait(self) -> list[Callable[[], None]]:
        """What has come in meanwhile, as calls that take one message each: nobody gets ahead of the others."""
        return [self._sources[source] for source, _ in self._poller.poll(self._poll_ms)]

    def _wake_up(self) -> None:
        self._wake_reader.recv(4096)

    def _look_soon(self) -> None:
        self._look_at_s = 0.0

    def _hear_edge(self) -> None:
        taken = self._public.receive()
        if taken is not None:
            self.counters.taken += 1
            self._take(*taken)
        elif self._public.refused > self.counters.wrong_parts:
            self.counters.wrong_parts = self._public.refused
            self._replies.complain("parts", "a message with a wrong number of parts was refused")

    def _hear_worker(self, worker: Worker) -> None:
        payload = None if worker.running is None else worker.running.pair.receive_polled()
        if payload is None:
            return
        worker.hear(self._clock.now())
        try:
            message = wire.decode(payload, internal=True)
        except WireError as error:
            self._replies.complain("worker", f"worker {worker.number} said what cannot be read: {error}")
            return
        self._take_from_worker(worker, payload, message)

    def _take(self, routing_id: bytes, payload: bytes) -> None:
        """One message from outside."""
        try:
            message = wire.decode(payload)
        except WireError as error:
            self._replies.refuse(routing_id, error)
            return
        if isinstance(message, wire.Draft):
            self._draft(routing_id, payload, message)
        elif isinstance(message, wire.Probe):
            self._probe(routing_id, message)
        elif isinstance(message, wire.Open):
            self._open(routing_id, payload, message)
        elif isinstance(message, wire.Cancel | wire.Close):
            self._end(routing_id, payload, message)
        elif isinstance(message, wire.Hello):
            self._replies.answer(routing_id, hello_reply(message, self._identity, self.limits.retry_ms))
        else:
            kind, who = type(message).__name__.upper(), (message.session, message.opening)
            self._replies.refuse(routing_id, WireError(kind, "kind", "a message of the cloud", "one of the edge", who))

    # ---- what edges say

    def _probe(self, routing_id: bytes, probe: wire.Probe) -> None:
        route = self._routes[probe.session]
        if route is not None:
            status, busy_ms = ProbeStatus.OK, self._workers.workers[route.worker].busy_ms(self._clock.now())
            self._routes.heard(route, routing_id, self._clock.now())
        elif ready := self._workers.with_phase(Phase.READY):
            status = ProbeStatus.UNKNOWN_SESSION if probe.session else ProbeStatus.OK
            busy_ms = min(worker.busy_ms(self._clock.now()) for worker in ready)
        else:
            loading = self._identity is None or self._workers.with_phase(Phase.LOADING)
            status, busy_ms = ProbeStatus.STARTING if loading else ProbeStatus.DOWN, 0
        reply = bytes(min(probe.reply_bytes, max(len(probe.payload), PROBE_REPLY_BYTES)))
        self._replies.answer(routing_id, wire.Probed(probe.session, probe.opening, probe.token, status, busy_ms, reply))

    def _open(self, routing_id: bytes, payload: bytes, m: wire.Open) -> None:
        now_s = self._clock.now()
        route = self._routes[m.session]
        if route is not None and m.opening <= route.opening:
            self.counters.late += 1
            return
        # a generation that goes on may open again: after a crash, or to go on another way
        draining = self._stop_asked > 0 and route not in self._routes.running(now_s, self.limits.quiet_s)
        refusal = open_refusal(m, self._identity, draining=draining, retry_ms=self.limits.retry_ms)
        worker = None
        if refusal is None:
            worker = self._workers.workers[route.worker] if route is not None else self._emptiest()
            if worker is None:
                refusal = starting(m, self._identity, self.limits.retry_ms)
            elif route is None and self._routes.full:
                refusal = self._full(m, "too many sessions at once")
            elif not worker.tell(payload, now_s):
                self.counters.to_worker_dropped += 1
                refusal = self._full(m, "the worker is behind")
        if refusal is None:
            assert worker is not None
            self._routes.open(m.session, m.opening, routing_id, worker.number, now_s)
        else:
            self.counters.refused_opens += 1
            self._replies.answer(routing_id, refusal)

    def _draft(self, routing_id: bytes, payload: bytes, m: wire.Draft) -> None:
        route = self._heard(routing_id, m)
        if route is None:
            if self._routes[m.session] is None:
                self.counters.unknown += 1
                self._replies.send(routing_id, m.session, _unknown(m.session, m.opening))
            return
        self._pass_on(route, payload)

    def _end(self, routing_id: bytes, payload: bytes, m: wire.Cancel | wire.Close) -> None:
        route = self._heard(routing_id, m)
        if route is not None:
            self._pass_on(route, payload)
            route.running = route.running and m.opening != route.opening

    def _heard(self, routing_id: bytes, m: Message) -> Route | None:
        """The message's route, renewed; None if there is none or the message is of an earlier opening."""
        route = self._routes[m.session]
        if route is None:
            return None
        if m.opening < route.opening:
            self.counters.late += 1
            return None
        self._routes.heard(route, routing_id, self._clock.now())
        return route

    def _pass_on(self, route: Route, payload: bytes) -> None:
        if not self._workers.workers[route.worker].tell(payload, self._clock.now()):
            # the edge's deadline sends it again
            self.counters.to_worker_dropped += 1
            self._replies.complain(
                "behind", f"worker {route.worker} is behind: a message of session {route.session:016x} was dropped"
            )

    def _emptiest(self) -> Worker | None:
        ready = self._workers.with_phase(Phase.READY)
        return min(ready, key=lambda worker: self._routes.load(worker.number), default=None)

    # ---- what workers say

    def _take_from_worker(self, worker: Worker, payload: bytes, message: Message) -> None:
        if isinstance(message, wire.FROM_CLOUD):
            self._deliver(worker, payload, message)
        elif isinstance(message, wire.Gone):
            self._routes.gone(message.session, message.opening)
        elif isinstance(message, wire.Ready):
            self._introduce(worker, message)

    def _deliver(self, worker: Worker, payload: bytes, message: Message) -> None:
        route = self._routes[message.session]
        if route is None or route.worker != worker.number:
            return
        route.moved_s = self._clock.now()
        read = self._replies.send(route.routing_id, route.session, payload)
        if isinstance(message, wire.Opened):
            route.granted = True
        elif isinstance(message, wire.Error) and message.opening == route.opening:
            route.running = False
        if not route.granted and message.opening == route.opening and _refuses(message):
            self._routes.forget(route.session)
        if not read:
            self._routes.forget(route.session)
            worker.tell(wire.encode(wire.Close(route.session, route.opening)), self._clock.now())

    def _introduce(self, worker: Worker, ready: wire.Ready) -> None:
        known = self._identity
        if known is None or known.info != ready.info or known.vocabulary != ready.vocabulary:
            others = [other for other in self._workers.with_phase(Phase.READY) if other is not worker]
            if known is not None and others:
                raise PipeSDError(
                    f"worker {worker.number} loaded another model ({ready.name}) than worker {others[0].number} "
                    f"({known.info.name}); was the file replaced? start the cloud again"
                )
            self._identity = Identity(ready.info, ready.vocabulary)
        again = worker.phase is not Phase.READY and self._announced
        self._workers.ready(worker)
        if again:
            self._log(f"worker {worker.number} is ready again")
        if not self._announced and self._workers.all_ready:
            self._announced = True
            self._on_ready()

    def _full(self, m: Message, why: str) -> wire.Error:
        return error_to(m, ErrorCode.FULL, f"{why}; try again", self.limits.retry_ms)

    def _close(self) -> None:
        """Tells the sessions that are not over, and ends the workers."""
        for route in self._routes:
            if route.running:
                text = "the cloud is shutting down; open again when it is back"
                self._replies.answer(
                    route.routing_id,
                    wire.Error(route.session, route.opening, ErrorCode.DRAINING, text, DRAINING_RETRY_MS),
                )
        self._workers.stop(FAREWELL, self.limits.farewell_s)
        self._public.close()  # last: edges lose what they have not read when the connection ends
        self._wake_reader.close()
        self._wake_writer.close()


@lru_cache(maxsize=256)
def _unknown(session: int, opening: int) -> bytes:
    """Payload of ERROR unknown. After a crash every DRAFT under way gets one, so those of a session share it."""
    text = "no such session here; open again with all ids"
    return wire.encode(wire.Error(session, opening, ErrorCode.UNKNOWN, text))


def _refuses(message: Message) -> bool:
    """Whether a worker's answer says that it holds no such session: an early hole is asked for by RESEND too."""
    return isinstance(message, wire.Error) or (isinstance(message, wire.Resend) and message.pos == 0)
