"""For the tests of front and server: workers that follow a script, a front in a thread, an edge of bare messages."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipesd.clock import SystemClock
from pipesd.cloud.bounds import FrontLimits
from pipesd.cloud.front import Front
from pipesd.cloud.launch import WorkerBody, WorkerProcess, WorkerThread
from pipesd.core import Mode, ModelInfo, Vocabulary
from pipesd.errors import PipeSDError
from pipesd.protocol import wire
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.protocol.wire import Message
from pipesd.transport import EDGE, Context, SocketSettings, edge_socket, front_socket, pair_connect

SOON_S = 5.0  # far above what anything here takes
VOCABULARY = Vocabulary((*(b"%d" % i for i in range(300)), b"", b""))
INFO = ModelInfo("script", 300, 1000, (2,), b"modelone", "cpu", "float32")
HASH = vocabulary_hash(VOCABULARY)
WHO, CRASH, SLEEP, FLOOD, MUMBLE, FORGET, LEAVE, RUN = range(8)  # what the first id of a DRAFT makes a worker do
SHORT_QUEUE = SocketSettings(send_messages=64, receive_messages=4)  # an edge that can be made to read no more
QUICK = FrontLimits(farewell_s=0.3, complaint_s=0.5)

T = TypeVar("T")


def wait_for(what: Callable[[], T], timeout_s: float = SOON_S) -> T:
    """The first true value of `what()`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline_s, "not within the time"
        time.sleep(0.002)


@dataclass
class Script:
    """A worker that grants every OPEN, answers each NAV with its process id, and does what a DRAFT's first id says.

    `grants` sessions, then ERROR full. Everything it gets is kept in `heard`, of a thread also in the test's sight.
    """

    info: ModelInfo = INFO
    load_s: float = 0.0
    fail: Exception | None = None
    beats: bool = True
    grants: int = 1 << 30
    heard: list[Message] = field(default_factory=list)

    def __call__(self, endpoint: str, *, context: Context, stop: threading.Event) -> None:
        with pair_connect(context, endpoint) as front:
            stop.wait(self.load_s)
            if self.fail is not None:
                raise self.fail
            front.send(wire.encode(wire.Ready.of(self.info, VOCABULARY)))
            granted: set[int] = set()
            while not stop.is_set():
                payload = front.receive(0.05)
                if payload is None:
                    if self.beats:
                        front.send(wire.encode(wire.Beat(0, 0, len(granted), 1)))
                    continue
                message = wire.decode(payload)
                self.heard.append(message)
                if isinstance(message, wire.Close) and message.session == 0:
                    return
                for answer in self._answers(message, granted):
                    front.send(answer)

    def _answers(self, m: Message, granted: set[int]) -> Iterator[bytes]:
        if isinstance(m, wire.Open):
            if m.session not in granted and len(granted) >= self.grants:
                yield wire.encode(wire.Error(m.session, m.opening, wire.ErrorCode.FULL, "full", 100))
                return
            granted.add(m.session)
            yield wire.encode(wire.Opened(m.session, m.opening, m.limit, 32, 64, 1))
        elif isinstance(m, wire.Draft):
            order = m.ids[0] if m.ids else WHO
            if order == CRASH:
                raise RuntimeError("as told")
            if order == SLEEP:
                time.sleep(m.ids[1] / 1000)
            if order == FLOOD:
                big = wire.Verdict(m.session, m.opening, 0, 0, tuple(range(4000)))
                for _ in range(m.ids[1]):
                    yield wire.encode(big)
            if order == RUN:
                for i in range(m.ids[1]):
                    time.sleep(0.05)
                    yield wire.encode(wire.Verdict(m.session, m.opening, 0, i, (7,), more=True))
            if order == MUMBLE:
                yield b"\xc1 not a message"
            if order == FORGET:
                granted.discard(m.session)
                yield wire.encode(wire.Gone(m.session, m.opening))
            if order == LEAVE:
                os._exit(m.ids[1])
            if m.nav:
                yield wire.encode(wire.Verdict(m.session, m.opening, m.epoch, m.pos, (os.getpid(),)))


@dataclass
class RunningFront:
    front: Front
    address: str
    context: Context
    log: list[str]
    ended: threading.Event
    errors: list[PipeSDError]

    def edge(self, settings: SocketSettings = EDGE) -> Edge:
        return Edge(self.context, self.address, settings)


@contextmanager
def running_front(
    body: Script | Callable[[int], WorkerBody],
    limits: FrontLimits = QUICK,
    *,
    processes: bool = False,
    wait: bool = True,
) -> Iterator[RunningFront]:
    """A front in a thread; `body` is the worker, or gives that of each number. Ended at once on leaving."""
    context = Context()
    public = front_socket(context, "tcp://127.0.0.1:0")
    kind = WorkerProcess if processes else WorkerThread

    def body_of(number: int) -> WorkerBody:
        return body if isinstance(body, Script) else body(number)

    log: list[str] = []
    errors: list[PipeSDError] = []
    ready, ended = threading.Event(), threading.Event()
    front = Front(
        public,
        lambda number: kind(context, number, body_of(number)),
        limits,
        log=log.append,
        clock=SystemClock(),
        on_ready=ready.set,
    )

    def run() -> None:
        try:
            front.run()
        except PipeSDError as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if wait:
            assert ready.wait(20.0 if processes else SOON_S), "no worker became ready"
        yield RunningFront(front, public.address, context, log, ended, errors)
    finally:
        front.stop(now=True)
        thread.join()
        if front.workers_gone:
            context.destroy(linger=0)


class Edge:
    """Messages as they are, over a real socket."""

    def __init__(self, context: Context, address: str, settings: SocketSettings = EDGE) -> None:
        self.socket = edge_socket(context, address, settings=settings)

    def __enter__(self) -> Edge:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, message: Message | bytes) -> None:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        wait_for(lambda: self.socket.send(payload))

    def hear(self, timeout_s: float = SOON_S) -> Any:
        """The next message, None if none comes."""
        payload = self.socket.receive(timeout_s)
        return None if payload is None else wire.decode(payload)

    def ask(self, message: Message | bytes, timeout_s: float = SOON_S) -> Any:
        self.say(message)
        return self.hear(timeout_s)

    def open(self, session: int, opening: int = 1, **other: Any) -> Any:
        """The answer to an OPEN that is right but for `other`."""
        return self.ask(open_message(session, opening, **other))

    def who(self, session: int, opening: int = 1) -> int:
        """The process that holds a session."""
        answer = self.ask(draft(session, opening, WHO, nav=True))
        assert isinstance(answer, wire.Verdict) and answer[:2] == (session, opening)
        return answer.ids[0]


@contextmanager
def edge_at(address: str) -> Iterator[Edge]:
    context = Context()
    with Edge(context, address) as edge:
        yield edge
    context.term()


def hello(**other: Any) -> wire.Hello:
    return wire.Hello(9, 0, wire.MAJOR, wire.MINOR, 0, 300, HASH)._replace(**other)


def open_message(session: int, opening: int = 1, **other: Any) -> wire.Open:
    plain = wire.Open(session, opening, 0, bytes(8), (1, 2, 3), 100, (), None, 0, Mode.NAV, INFO.fingerprint, HASH)
    return plain._replace(**other)


def draft(session: int, opening: int, *ids: int, nav: bool = False) -> wire.Draft:
    return wire.Draft(session, opening, 0, 3, ids, 3, nav)


def probe(session: int = 0, **other: Any) -> wire.Probe:
    return wire.Probe(session, 0, 1)._replace(**other)


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def evil_pickle(path: str) -> bytes:
    return pickle.dumps(Evil(path))
