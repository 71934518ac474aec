"""How a worker comes to life: as a spawned process for a server, as a thread for a server inside a program.

A worker process has its end of the pair in a folder that only this user may enter, and that is gone as soon as the
worker has connected. Interrupts and SIGTERM are blocked in it: a terminal and a service manager send them to the whole
group, and it is the front that decides when a worker ends. It ends by itself when the front is no more.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket as net
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from pipesd.cloud.supervisor import Ending
from pipesd.errors import PipeSDError
from pipesd.transport import Context, pair_listen

SOCKET_NAME = "front"
MAX_REASON_BYTES = 4096
MAX_IPC_PATH_BYTES = 100  # what every system takes as the path of a local socket
ENDED_S = 5.0  # how long a killed process may take to be gone


class WorkerBody(Protocol):
    """What a worker does from its start to its end; picklable if it is to be a process."""

    def __call__(self, endpoint: str, *, context: Context, stop: threading.Event) -> None: ...


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, context: Context, number: int, body: WorkerBody) -> None:
        """OSError or PipeSDError: the system has no files, processes or memory left; nothing stays behind."""
        self._folder = _private_folder()
        with ExitStack() as undo:
            undo.callback(self.settled)
            endpoint = f"ipc://{self._folder}/{SOCKET_NAME}"
            self.pair = undo.enter_context(pair_listen(context, endpoint))
            spawn = multiprocessing.get_context("spawn")
            self._reasons, told = spawn.Pipe(duplex=False)
            undo.enter_context(self._reasons)
            with told:
                level = logging.getLogger("pipesd").getEffectiveLevel()
                self._process = spawn.Process(
                    target=_process_main,
                    args=(number, endpoint, self._folder, body, told, level),
                    name=f"pipesd-worker-{number}",
                )
                _start_undisturbed(self._process)
            self.sentinel = self._process.sentinel
            undo.pop_all()

    def settled(self) -> None:
        _remove(self._folder)

    def ended(self) -> Ending | None:
        code = self._process.exitcode
        if code is None:
            return None
        return Ending(code, self._reason())

    def kill(self) -> bool:
        self._process.kill()
        return True

    def close(self, wait_s: float) -> bool:
        self._process.join(wait_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(ENDED_S)
        self.pair.close()
        self._reasons.close()
        self.settled()
        if self._process.exitcode is None:
            return False  # the system does not let go of it, as of one whose device hangs
        self._process.close()
        return True

    def _reason(self) -> str:
        try:
            told = self._reasons.recv_bytes(MAX_REASON_BYTES) if self._reasons.poll() else b""
        except EOFError:
            return ""
        return told.decode("utf-8", "replace")  # a cut may go through a character


class WorkerThread:
    """A worker in a thread of this process."""

    def __init__(self, context: Context, number: int, body: WorkerBody) -> None:
        endpoint = f"inproc://pipesd-worker-{number}-{id(self)}"
        self._ended_reader, self._ended_writer = net.socketpair()
        self.pair = pair_listen(context, endpoint)
        self._stop = threading.Event()
        self._ending: Ending | None = None
        self.sentinel = self._ended_reader.fileno()
        self._thread = threading.Thread(
            target=self._main,
            args=(context, endpoint, body),
            name=f"pipesd-worker-{number}",
            daemon=True,  # a pass that hangs must not keep the program from ending
        )
        self._thread.start()

    def settled(self) -> None:
        """Nothing was needed to connect."""

    def ended(self) -> Ending | None:
        return self._ending

    def kill(self) -> bool:
        self._stop.set()
        return False

    def close(self, wait_s: float) -> bool:
        self._stop.set()
        self._thread.join(wait_s)
        self.pair.close()
        self._ended_reader.close()
        return not self._thread.is_alive()

    def _main(self, context: Context, endpoint: str, body: WorkerBody) -> None:
        self._ending = _run(lambda: body(endpoint, context=context, stop=self._stop))
        self._ended_writer.close()  # wakes the front


def _start_undisturbed(process: BaseProcess) -> None:
    """Start a process in which interrupts and SIGTERM are blocked."""
    resource_tracker.ensure_running()  # starting it would unblock the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _process_main(
    number: int,
    endpoint: str,
    folder: str,
    body: WorkerBody,
    told: connection.Connection,
    level: int,
) -> None:
    """What a worker process does, from its first line to its last."""
    logging.basicConfig(level=level, format=f"pipesd-cloud: worker {number}: %(message)s")
    threading.Thread(target=_leave_with_parent, args=(folder,), daemon=True).start()
    context = Context()
    ending = _run(lambda: body(endpoint, context=context, stop=threading.Event()))
    if ending.reason:
        told.send_bytes(ending.reason.encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES])
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.exit_code)  # nothing of ours is left to do, and native libraries have been known to crash at exit


def _run(body: Callable[[], None]) -> Ending:
    """Run a worker to its end, whatever that is."""
    try:
        body()
    except BaseException as error:  # noqa: BLE001 — the outermost line of a worker: whatever it was, the front is told
        if logging.getLogger("pipesd").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        if isinstance(error, PipeSDError):
            return Ending(error.exit_code, _one_line(str(error)))
        return Ending(1, _one_line(f"{type(error).__name__}: {error}"))
    return Ending(0, "")


def _leave_with_parent(folder: str) -> None:
    parent: Any = multiprocessing.parent_process()
    connection.wait([parent.sentinel])
    _remove(folder)
    os._exit(1)


def _private_folder() -> str:
    """A new folder that only this user may enter, on a path short enough for a local socket."""
    folder = tempfile.mkdtemp(prefix="pipesd-")
    if len(os.fsencode(folder)) < MAX_IPC_PATH_BYTES:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="pipesd-", dir="/tmp")


def _remove(folder: str) -> None:
    """The folder and the socket in it, as far as they are there; needs no file descriptor, for there may be none."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, SOCKET_NAME))
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def _one_line(text: str) -> str:
    return " ".join(text.split())
