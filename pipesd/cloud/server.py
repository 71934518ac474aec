"""A cloud as a whole: `serve` is the program (workers are processes), `CloudServer` the library (threads)."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import IO, Self

from pipesd.clock import SystemClock
from pipesd.cloud.bounds import FrontLimits
from pipesd.cloud.front import Front
from pipesd.cloud.launch import WorkerBody, WorkerProcess, WorkerThread
from pipesd.cloud.progress import LoadingProgress
from pipesd.cloud.worker import Target, run_worker
from pipesd.config import CloudConfig
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.streams import show
from pipesd.transport import Context, FrontSocket, front_socket, is_loopback, parse_address

MOST_FILES = 1 << 16  # one a connection
MakeTarget = Callable[[], Target]
_log = logging.getLogger("pipesd.cloud")


def serve(
    config: CloudConfig, *, make_target: MakeTarget | None = None, announce: Callable[[str], None] | None = None
) -> int:
    """Serve until SIGTERM or SIGHUP (drains; a second one ends at once) or SIGINT (ends at once); in the main thread.

    `announce` (by default: print) gets one line with the address when all workers are ready. Returns the exit code: 0,
    or 130 after SIGINT. Raises UsageError when the address cannot be bound or the model cannot be loaded, PipeSDError
    when a worker failed too often. `make_target` must be picklable; by default it loads `config.model`.
    """
    body = _worker_body(config, make_target or partial(load_target, config))
    front: Front | None = None
    caught: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        caught.append(number)
        if front is not None:
            front.stop(now=number == signal.SIGINT)

    # first, so that no interrupt can come between a socket and the block that closes it
    with _signals(on_signal), Context() as context, _public_socket(context, config) as public:
        front = Front(
            public,
            lambda number: WorkerProcess(context, number, body),
            _limits(config),
            log=_log.warning,
            clock=SystemClock(),
            on_ready=lambda: (announce or _print)(f"pipesd-cloud: serving at {public.address}"),
        )
        if caught:
            front.stop(now=True)
        _allow_many_files()
        front.run()
    return Cancelled.exit_code if signal.SIGINT in caught else 0


class CloudServer:
    """A cloud inside this program: `with CloudServer(CloudConfig(model=...)) as cloud: ... cloud.address`.

    The front and the workers are threads. `target` is used instead of loading `config.model`: a target, or a function
    that makes one (needed for more than one worker). `start` raises UsageError when the address cannot be bound or the
    model cannot be loaded, and returns when all workers are ready. Its log is the logger `pipesd.cloud`.
    """

    def __init__(self, config: CloudConfig, *, target: Target | MakeTarget | None = None) -> None:
        if target is None:
            self._make_target: MakeTarget = partial(load_target, config)
        elif callable(target):
            self._make_target = target
        elif config.workers == 1:
            self._make_target = lambda: target
        else:
            raise UsageError(f"{config.workers} workers need as many targets: give a function that makes one")
        self.config = config
        self._context: Context | None = None
        self._front: Front | None = None
        self._thread: threading.Thread | None = None
        self._address = ""
        self._settled = threading.Event()  # all workers ready, or failed
        self._error: PipeSDError | None = None

    @property
    def address(self) -> str:
        """Where edges find it, with the real port; empty before `start`."""
        return self._address

    @property
    def error(self) -> PipeSDError | None:
        """Why it ended before `close`, if it did."""
        return self._error

    def start(self) -> None:
        assert self._thread is None, "a server is started once"
        self._context = context = Context()
        try:
            public = _public_socket(context, self.config)
        except PipeSDError:
            context.term()
            raise
        self._address = public.address
        body = _worker_body(self.config, self._make_target)
        self._front = front = Front(
            public,
            lambda number: WorkerThread(context, number, body),
            _limits(self.config),
            log=_log.warning,
            clock=SystemClock(),
            on_ready=self._settled.set,
        )
        self._thread = threading.Thread(target=self._body, args=(front,), name="pipesd-front", daemon=True)
        self._thread.start()
        self._settled.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def close(self) -> None:
        """End it at once; running generations are told. Any thread may call it, and more than once."""
        if self._front is None or self._thread is None or self._context is None:
            return
        self._front.stop(now=True)
        self._thread.join()
        if self._front.workers_gone:
            self._context.term()  # else a pass that hangs still holds a socket, and this would wait for it

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _body(self, front: Front) -> None:
        try:
            front.run()
        except PipeSDError as error:
            self._error = error
            if self._settled.is_set():
                _log.error("the cloud at %s has ended: %s", self._address, error)
        finally:
            self._settled.set()


def _print(line: str) -> None:
    show(line + "\n")


def load_target(config: CloudConfig) -> Target:
    """The target that a configuration describes. UsageError: no such model, or it cannot run so."""
    shown_name = os.path.basename(os.path.normpath(config.model))
    with _packages_named(), LoadingProgress(shown_name, _log.info, _terminal(config)) as progress:
        return _loader(config.backend)(
            config.model,
            config.device,
            config.dtype,
            config.context or None,
            config.max_sessions,
            config.threads,
            progress,
            exact=True if config.row_invariant else None,
            copies=config.workers,
            say=_log.warning,
        )


def _loader(backend: str) -> Callable[..., Target]:
    """The function that loads a target for a backend; only now is torch needed."""
    if backend == "transformers":
        from pipesd.cloud.transformers_target import load_transformers_target

        return load_transformers_target
    from pipesd.cloud.loading import load_target as load_plain

    return load_plain


@contextmanager
def _packages_named() -> Iterator[None]:
    """UsageError where the body imports a package of the cloud that is missing; gguf is for GGUF files alone."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "gguf"):
            raise
        raise UsageError(f"{error.name} is not installed; a cloud needs it: pip install 'pipesd[cloud]'") from error


def _terminal(config: CloudConfig) -> IO[str] | None:
    """Where one line may be rewritten: not where several workers would, nor where only warnings are wanted."""
    return sys.stderr if config.workers == 1 and _log.isEnabledFor(logging.INFO) else None


def _public_socket(context: Context, config: CloudConfig) -> FrontSocket:
    bind = parse_address(config.bind, bind=True)
    if not is_loopback(bind):
        if not config.insecure:
            raise UsageError(
                f"{bind} can be reached from other machines, but nothing is encrypted and nobody is asked for a key: "
                "bind an address of this machine alone such as tcp://127.0.0.1:7421, or accept that with --insecure"
            )
        _log.warning("WARNING: %s is open to other machines; nothing is encrypted, anybody may use this cloud", bind)
    return front_socket(context, bind)


def _limits(config: CloudConfig) -> FrontLimits:
    return FrontLimits(
        workers=config.workers,
        sessions=config.max_sessions,
        idle_s=config.idle_s,
        stall_s=config.stall_s,
        drain_s=config.drain_s,
    )


def _worker_body(config: CloudConfig, make_target: MakeTarget) -> WorkerBody:
    bounds = {
        "max_sessions": config.max_sessions,
        "draft_ahead": config.draft_ahead,
        "run_ahead": config.run_ahead,
        "idle_s": config.idle_s,
    }
    return partial(_work, make_target, bounds)


def _work(
    make_target: MakeTarget, bounds: dict[str, float], endpoint: str, *, context: Context, stop: threading.Event
) -> None:
    run_worker(endpoint, make_target, context=context, stop=stop, clock=None, **bounds)


def _allow_many_files() -> None:
    """Each connection takes a file; many systems allow 1024 by default and more for the asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else it is nohup's business
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
