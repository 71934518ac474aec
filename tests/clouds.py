"""Clouds and edges for tests: scripted models behind real sockets on this machine, in threads or in processes."""

from __future__ import annotations

import base64
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipesd.cloud.server import CloudServer
from pipesd.config import CloudConfig, EdgeConfig
from pipesd.core import Vocabulary
from pipesd.edge.session import EdgeSession
from pipesd.policy.accept import Choices, Draw
from pipesd.protocol.messages import Message
from pipesd.protocol.wire import decode, encode
from pipesd.sim.drafters import Agreement, Proposal, ScriptedDrafter
from pipesd.sim.targets import Batch, ScriptedTarget
from pipesd.sim.texts import KeyedText, Law, RecordedText, continuation
from pipesd.sim.tokeniser import ByteTokeniser
from pipesd.transport import Context, front_socket

LAW = KeyedText(7)
PROMPT = "Once upon a time"
STRATEGIES = ["pipesd", "vanilla", "cloud"]
NOWHERE = "tcp://127.0.0.1:1"  # a port that nobody listens at
HEALED_S = 10.0  # what a busy machine may need for a recovery that takes under two seconds
PATIENT_S = 20.0  # for what must happen, on a machine that is busy


class Watched(ScriptedTarget):
    """Remembers how many sequences each pass had."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.batches: list[int] = []

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        self.batches.append(len(batch))
        return super().greedy(batch)

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        self.batches.append(len(batch))
        return super().sample(batch, draws)


class Serving:
    """A cloud in threads of this program; `targets` are those of its workers, `address` is where it listens."""

    def __init__(self, server: CloudServer, targets: list[Watched]) -> None:
        self.server = server
        self.targets = targets

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def passes(self) -> int:
        return sum(target.passes for target in self.targets)


@contextmanager
def serving(
    law: Law = LAW, *, make: Callable[[], Any] | None = None, target: dict[str, Any] | None = None, **config: Any
) -> Iterator[Serving]:
    """A cloud whose target says what `law` says; `target` are settings of `ScriptedTarget`, `make` another maker."""
    targets: list[Watched] = []

    def make_target() -> Any:
        made = Watched(law, **(target or {})) if make is None else make()
        targets.append(made)
        return made

    settings: dict[str, Any] = {"bind": "tcp://127.0.0.1:0", **config}
    with CloudServer(CloudConfig(**settings), target=make_target) as server:
        yield Serving(server, targets)


def edge(
    address: str,
    law: Law = LAW,
    *,
    agreement: float = 0.8,
    proposal: Proposal | None = None,
    drafter: ScriptedDrafter | None = None,
    tokeniser: ByteTokeniser | None = None,
    vocabulary: Vocabulary | None = None,
    **config: Any,
) -> EdgeSession:
    """A session whose drafter agrees with `law` that often, or says what `proposal` says."""
    if drafter is None:
        drafter = ScriptedDrafter(proposal or Agreement(law, agreement), vocabulary)
    settings: dict[str, Any] = {"cloud": address, "connect_s": PATIENT_S, **config}
    return EdgeSession(EdgeConfig(**settings), drafter=drafter, tokeniser=tokeniser or ByteTokeniser(vocabulary))


def ids_of(session: EdgeSession, prompt: str | Sequence[int], **options: Any) -> list[int]:
    """Run a generation; its ids, which must be those of its pieces."""
    pieces = list(session.generate(prompt, **options))
    ids = [token for piece in pieces for token in piece.token_ids]
    assert "".join(piece.text for piece in pieces) == session.text
    assert tuple(ids[: len(session.token_ids)]) == session.token_ids
    return list(session.token_ids)


def said(law: Law, prompt: str | Sequence[int], count: int, end_ids: Sequence[int] = ()) -> list[int]:
    """What the target alone says behind the prompt."""
    return continuation(law, ByteTokeniser().encode(prompt) if isinstance(prompt, str) else prompt, count, end_ids)


def recorded(prompt: Sequence[int], output: Sequence[int]) -> RecordedText:
    return RecordedText([(prompt, output)], beyond=KeyedText(3))


def wait_until(true: Callable[[], bool], what: str, within_s: float = PATIENT_S) -> float:
    """Wait for at most `within_s`; how long it took."""
    begun_s = time.monotonic()
    while not true():
        assert time.monotonic() - begun_s < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.002)
    return time.monotonic() - begun_s


class InThread:
    """Runs `body` in a thread; `result` waits for what it returns, and raises what it raises."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(3 * PATIENT_S)
        assert self.over, "the thread still runs"
        if self._error is not None:
            raise self._error
        return self._outcome

    def _main(self) -> None:
        try:
            self._outcome = self._body()
        except BaseException as error:  # noqa: BLE001 — raised again by `result`
            self._error = error


def at_once(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, run at the same time."""
    return [thread.result() for thread in [InThread(body) for body in bodies]]


class Reader(InThread):
    """A generation in a thread of its own; `seen` are the ids so far."""

    def __init__(self, session: EdgeSession, count: int, prompt: str = PROMPT) -> None:
        self.session = session
        self.seen: list[int] = []
        self._pieces = session.generate(prompt, max_tokens=count)
        super().__init__(self._read)

    def _read(self) -> list[int]:
        for piece in self._pieces:
            self.seen.extend(piece.token_ids)
        return self.seen

    def until(self, count: int) -> None:
        wait_until(lambda: len(self.seen) >= count or self.over, f"{count} ids")


class EachStrategy:
    """A session of each strategy, generating at the same time, so that one fault meets all."""

    def __init__(self, address: str, **config: Any) -> None:
        self.sessions = [edge(address, strategy=strategy, **config) for strategy in STRATEGIES]
        self.readers: list[Reader] = []

    def __enter__(self) -> EachStrategy:
        for session in self.sessions:
            session.open()
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions:
            session.close()

    def begin(self, count: int) -> None:
        self._count = count
        self.readers = [Reader(session, count) for session in self.sessions]

    def until(self, count: int) -> None:
        for reader in self.readers:
            reader.until(count)

    def go_on(self, count: int) -> None:
        """Each gets so many ids more, soon."""
        begun_s, seen = time.monotonic(), [len(reader.seen) for reader in self.readers]
        for reader, before in zip(self.readers, seen, strict=True):
            reader.until(before + count)
        assert time.monotonic() - begun_s < HEALED_S

    def right(self) -> list[int]:
        """All got the target's ids; how often each opened."""
        for reader in self.readers:
            assert reader.result() == said(LAW, PROMPT, self._count)
        return [session.stats["openings"] for session in self.sessions]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


_SERVE = """
import base64, os, pickle, sys
sys.path[:0] = {path!r}
if __name__ == "__main__":
    from pipesd.cloud.server import serve
    config, make_target = pickle.loads(base64.b64decode({payload!r}))
    sys.exit(serve(config, make_target=make_target))
"""


class PidTarget:
    """A maker of targets that writes its process's number into a file, so that a test can kill it."""

    def __init__(self, pid_file: Path, law: Law, settings: dict[str, Any]) -> None:
        self.pid_file, self.law, self.settings = pid_file, law, settings

    def __call__(self) -> ScriptedTarget:
        self.pid_file.write_text(str(os.getpid()))
        return ScriptedTarget(self.law, **self.settings)


class CloudProcess:
    """A cloud as its users run it: a front process and worker processes. Ready when constructed."""

    def __init__(self, folder: Path, law: Law = LAW, *, port: int = 0, **settings: Any) -> None:
        self._pid_file = folder / "worker.pid"
        config = CloudConfig(bind=f"tcp://127.0.0.1:{port}")
        payload = pickle.dumps((config, PidTarget(self._pid_file, law, settings)))
        program = _SERVE.format(path=sys.path, payload=base64.b64encode(payload))
        self.errors = folder / "stderr"
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 3 * PATIENT_S)[0], "no word from the cloud"
        line = self.process.stdout.readline().decode()
        assert "tcp://" in line, f"the cloud did not start: {self.errors.read_text()}"
        self.address = line.split()[-1]

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def kill_worker(self) -> None:
        os.kill(int(self._pid_file.read_text()), signal.SIGKILL)

    def kill(self) -> None:
        """End the front without a word; its workers follow by themselves."""
        self.process.kill()
        self.process.wait(PATIENT_S)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENT_S)

    def __enter__(self) -> CloudProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


class FakeCloud:
    """A socket that answers each message with what `answer` says: messages, or bytes as they are; `heard` are those
    that came."""

    def __init__(self, answer: Callable[[Message], Sequence[Message | bytes]]) -> None:
        self.heard: list[Message] = []
        self._answer = answer
        self._context = Context()
        self._socket = front_socket(self._context, "tcp://127.0.0.1:0")
        self.address = self._socket.address
        self._stop = threading.Event()
        self._thread = InThread(self._main)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]

    def _main(self) -> None:
        self._socket.adopt()
        while not self._stop.is_set():
            if not self._socket.zmq_socket.poll(10):
                continue
            taken = self._socket.receive()
            if taken is not None:
                message = decode(taken[1])
                self.heard.append(message)
                for said in self._answer(message):
                    self._socket.send(taken[0], said if isinstance(said, bytes) else encode(said))
        self._socket.close()

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.result()
        self._context.term()
