"""The front's workers: started, watched, restarted with back-off, given up, ended. Knows no sessions and no edges.

    phase     until                                    then
    loading   its first word, READY                    ready
              it ends, or says nothing for load_s      given up if no worker was ever ready, else as below
    ready     it ends, or says nothing for stall_s     killed if need be; resting
    resting   0.1, 0.5, 2.5 s later                    loading; but after `restarts` restarts within a minute: given up

A worker says a BEAT when it has had nothing else to say for a while, so silence means that a pass is running or that
it hangs. Giving up raises `PipeSDError` with the worker's own reason and exit code.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from pipesd.errors import PipeSDError, ProtocolError, Refused, Unreachable, UsageError
from pipesd.transport import PairSocket

MINUTE_S = 60.0
FIRST_REST_S = 0.1
REST_GROWTH = 5.0


class Ending(NamedTuple):
    """How a worker ended: its exit code (-n: by signal n) and what it said of it, one line or nothing."""

    exit_code: int
    reason: str

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.exit_code == -signal.SIGKILL:
            return "it was killed (SIGKILL), perhaps for want of memory"
        if self.exit_code < 0:
            return f"it was ended by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"
        return f"it ended with exit code {self.exit_code} and gave no reason"


class RunningWorker(Protocol):
    """A worker that was launched: a process or a thread."""

    pair: PairSocket
    sentinel: int  # a file descriptor that becomes readable when the worker has ended

    def settled(self) -> None:
        """It has connected: what was needed for that may go."""

    def ended(self) -> Ending | None:
        """None while it runs."""

    def kill(self) -> bool:
        """End it at once; False if it cannot be ended from outside (a thread)."""

    def close(self, wait_s: float) -> bool:
        """Wait for its end for at most `wait_s`, kill it if that helps, release everything; False if it still runs."""


Launcher = Callable[[int], RunningWorker]


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTING = "resting"


@dataclass(eq=False)
class Worker:
    """The place of one worker, filled by one incarnation after the other."""

    number: int
    phase: Phase = Phase.RESTING
    running: RunningWorker | None = None
    heard_s: float = 0.0  # its last word, or its start
    asked_s: float | None = None  # the first message to it since its last word
    due_s: float = 0.0  # when to start it, while resting
    crashes_s: list[float] = field(default_factory=list)  # those within the last minute

    def hear(self, now_s: float) -> None:
        self.heard_s = now_s
        self.asked_s = None

    def busy_ms(self, now_s: float) -> int:
        """How long something has waited for its next word."""
        return 0 if self.asked_s is None else max(0, round((now_s - self.asked_s) * 1000))

    def tell(self, payload: bytes, now_s: float) -> bool:
        """False: not sent, it is away or far behind."""
        if self.running is None or not self.running.pair.send(payload):
            return False
        if self.asked_s is None:
            self.asked_s = now_s
        return True


class Supervisor:
    """All workers of one front."""

    def __init__(
        self, launch: Launcher, count: int, *, stall_s: float, load_s: float, restarts: int, log: Callable[[str], None]
    ) -> None:
        assert count >= 1 and restarts >= 0 and min(stall_s, load_s) > 0
        self.workers = tuple(Worker(number) for number in range(count))
        self.changes = 0  # raised when a worker comes or goes, and with it what is to be polled
        self.crashes = 0
        self._launch = launch
        self._stall_s, self._load_s, self._restarts = stall_s, load_s, restarts
        self._log = log
        self._ever_ready = False

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    @property
    def all_ready(self) -> bool:
        return all(worker.phase is Phase.READY for worker in self.workers)

    @property
    def all_gone(self) -> bool:
        return all(worker.running is None for worker in self.workers)

    def with_phase(self, phase: Phase) -> list[Worker]:
        return [worker for worker in self.workers if worker.phase is phase]

    def ready(self, worker: Worker) -> None:
        """Its READY has come."""
        assert worker.running is not None
        worker.phase = Phase.READY
        worker.running.settled()
        self._ever_ready = True

    def check(self, now_s: float) -> list[Worker]:
        """Starts what is due; returns the workers that went down since the last call. PipeSDError: given up.

        Call it after taking what the workers said: a front that slept must not blame them for its own silence.
        """
        down = []
        for worker in self.workers:
            if worker.running is None:
                if now_s >= worker.due_s:
                    self._start(worker, now_s)
                continue
            ending = worker.running.ended() or self._stalled(worker, now_s)
            if ending is not None:
                self._bury(worker, ending, now_s)
                down.append(worker)
        return down

    def due_in_s(self, now_s: float) -> float:
        """When `check` has something to do that no sentinel tells."""
        due = [
            worker.due_s - now_s if worker.running is None else worker.heard_s + self._patience_s(worker) - now_s
            for worker in self.workers
        ]
        return max(0.0, min(due))

    def stop(self, farewell: bytes, wait_s: float) -> None:
        """Tells all to end, waits for at most `wait_s` together, kills the rest."""
        running = [worker for worker in self.workers if worker.running is not None]
        for worker in running:
            worker.tell(farewell, worker.heard_s)
        for worker in running:
            assert worker.running is not None
            if worker.running.close(wait_s / len(running)):
                worker.running = None
            worker.phase = Phase.RESTING
        self.changes += 1

    def _start(self, worker: Worker, now_s: float) -> None:
        try:
            worker.running = self._launch(worker.number)
        except (OSError, PipeSDError) as error:  # no more files, processes or memory: others may let go of some
            self._rest(worker, Ending(1, f"it cannot be started: {error}"), now_s)
            return
        worker.phase = Phase.LOADING
        worker.hear(now_s)
        self.changes += 1

    def _patience_s(self, worker: Worker) -> float:
        return self._stall_s if worker.phase is Phase.READY else self._load_s

    def _stalled(self, worker: Worker, now_s: float) -> Ending | None:
        silent_s = now_s - worker.heard_s
        if silent_s <= self._patience_s(worker):
            return None
        assert worker.running is not None
        doing = "" if worker.phase is Phase.READY else " while loading its model"
        reason = f"it said nothing for {silent_s:.0f} s{doing}"
        if not worker.running.kill():
            raise PipeSDError(f"worker {worker.number}: {reason}, and a thread cannot be ended: giving up")
        return Ending(1, reason)

    def _bury(self, worker: Worker, ending: Ending, now_s: float) -> None:
        """Clears up after a worker."""
        assert worker.running is not None
        worker.running.close(0.0)
        worker.running, worker.phase = None, Phase.RESTING
        self.changes += 1
        self._rest(worker, ending, now_s)

    def _rest(self, worker: Worker, ending: Ending, now_s: float) -> None:
        """Says when it is to be started again, or gives up."""
        self.crashes += 1
        if not self._ever_ready:
            raise _given_up(str(ending), ending.exit_code)
        worker.crashes_s = [at for at in worker.crashes_s if now_s - at < MINUTE_S] + [now_s]
        count = len(worker.crashes_s)
        if count > self._restarts:
            raise _given_up(f"worker {worker.number} ended {count} times within a minute; the last time: {ending}", 1)
        rest_s = FIRST_REST_S * REST_GROWTH ** (count - 1)
        worker.due_s = now_s + rest_s
        self._log(f"worker {worker.number} is down: {ending}; starting it again in {rest_s:g} s")


def _given_up(text: str, exit_code: int) -> PipeSDError:
    kinds: Sequence[type[PipeSDError]] = (UsageError, Unreachable, ProtocolError, Refused)
    kind = next((kind for kind in kinds if kind.exit_code == exit_code), PipeSDError)
    return kind(text)
