"""When workers are started, given time, buried, started again and given up, by a clock that moves when told to."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pipesd.cloud.supervisor import Ending, Phase, Supervisor
from pipesd.errors import PipeSDError, UsageError


class FakePair:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, payload: bytes) -> bool:
        self.sent.append(payload)
        return True


class FakeWorker:
    """Runs until the test says otherwise."""

    sentinel = -1

    def __init__(self, killable: bool) -> None:
        self.pair: Any = FakePair()
        self.ending: Ending | None = None
        self.killable = killable
        self.killed = self.closed = self.is_settled = False

    def settled(self) -> None:
        self.is_settled = True

    def ended(self) -> Ending | None:
        return self.ending

    def kill(self) -> bool:
        self.killed = self.killable
        return self.killable

    def close(self, wait_s: float) -> bool:
        self.closed = True
        return True


class Stage:
    """A supervisor of one worker, with its launches, its log and the time."""

    def __init__(self, *, count: int = 1, killable: bool = True) -> None:
        self.launched: list[FakeWorker] = []
        self.log: list[str] = []
        self.fail: Exception | None = None
        self.killable = killable
        self.now_s = 1000.0
        self.supervisor = Supervisor(self._launch, count, stall_s=60.0, load_s=600.0, restarts=3, log=self.log.append)

    def _launch(self, number: int) -> FakeWorker:
        if self.fail is not None:
            raise self.fail
        self.launched.append(FakeWorker(self.killable))
        return self.launched[-1]

    def check(self, after_s: float = 0.0) -> list[int]:
        self.now_s += after_s
        return [worker.number for worker in self.supervisor.check(self.now_s)]

    def make_ready(self, number: int = 0) -> None:
        self.supervisor.ready(self.supervisor.workers[number])
        self.supervisor.workers[number].hear(self.now_s)

    def crash(self, reason: str = "as told") -> None:
        self.launched[-1].ending = Ending(1, reason)


def started() -> Stage:
    stage = Stage()
    stage.check()
    stage.make_ready()
    return stage


def test_a_worker_is_started_at_once_and_started_again_later_each_time() -> None:
    stage = started()
    assert stage.launched[0].is_settled
    for rest_s in (0.1, 0.5, 2.5):
        stage.crash()
        launches = len(stage.launched)
        assert stage.check() == [0] and stage.launched[-1].closed
        assert stage.log[-1] == f"worker 0 is down: as told; starting it again in {rest_s:g} s"
        assert stage.supervisor.due_in_s(stage.now_s) == pytest.approx(rest_s)
        assert stage.check(rest_s - 0.01) == [] and len(stage.launched) == launches
        assert stage.check(0.02) == [] and len(stage.launched) == launches + 1
        stage.make_ready()
    stage.crash()
    with pytest.raises(PipeSDError, match="worker 0 ended 4 times within a minute; the last time: as told") as given_up:
        stage.check()
    assert given_up.value.exit_code == 1


def test_crashes_more_than_a_minute_ago_are_forgiven() -> None:
    stage = started()
    for _ in range(10):
        stage.crash()
        assert stage.check(21.0) == [0]
        assert stage.log[-1].endswith(("in 0.1 s", "in 0.5 s", "in 2.5 s"))
        stage.check(3.0)
        stage.make_ready()
    assert stage.supervisor.crashes == 10


def test_each_worker_has_its_own_three_restarts() -> None:
    stage = Stage(count=2)
    stage.check()
    stage.make_ready(0)
    stage.make_ready(1)
    assert stage.supervisor.all_ready
    for number in (0, 1, 0, 1, 0, 1):
        running = stage.supervisor.workers[number].running
        assert isinstance(running, FakeWorker)
        running.ending = Ending(1, "as told")
        assert stage.check() == [number]
        stage.check(3.0)
        stage.make_ready(number)


@pytest.mark.parametrize(
    ("ending", "kind", "says"),
    [
        (Ending(2, "no such file"), UsageError, "no such file"),
        (Ending(1, "RuntimeError: x"), PipeSDError, "RuntimeError: x"),
        (Ending(-signal.SIGKILL, ""), PipeSDError, "killed (SIGKILL), perhaps for want of memory"),
        (Ending(-signal.SIGSEGV, ""), PipeSDError, "ended by signal 11"),
        (Ending(0, ""), PipeSDError, "exit code 0 and gave no reason"),
    ],
)
def test_what_never_became_ready_is_not_tried_again(ending: Ending, kind: type[PipeSDError], says: str) -> None:
    stage = Stage()
    stage.check()
    stage.launched[0].ending = ending
    with pytest.raises(PipeSDError) as given_up:
        stage.check()
    assert type(given_up.value) is kind and says in str(given_up.value)


def test_silence_is_a_stall_and_a_word_ends_it() -> None:
    stage = started()
    worker = stage.supervisor.workers[0]
    assert stage.check(59.0) == []
    worker.hear(stage.now_s)
    assert stage.supervisor.due_in_s(stage.now_s) == pytest.approx(60.0)
    assert stage.check(59.0) == []
    assert [each.killed for each in stage.launched] == [False]
    assert stage.check(2.0) == [0]
    assert [each.killed for each in stage.launched] == [True]
    assert "it said nothing for 61 s;" in stage.log[-1]


def test_a_load_has_its_own_limit() -> None:
    stage = Stage()
    stage.check()
    assert stage.check(599.0) == []
    with pytest.raises(PipeSDError, match="said nothing for 601 s while loading its model"):
        stage.check(2.0)


def test_a_stalled_thread_cannot_be_replaced() -> None:
    stage = Stage(killable=False)
    stage.check()
    stage.make_ready()
    with pytest.raises(PipeSDError, match="cannot be ended"):
        stage.check(61.0)


@pytest.mark.parametrize("fail", [OSError(24, "Too many open files"), PipeSDError("no socket can be made")])
def test_a_start_that_fails_is_tried_again_later(fail: Exception) -> None:
    stage = started()
    stage.crash()
    stage.check()
    stage.fail = fail
    assert stage.check(0.2) == [] and "it cannot be started: " in stage.log[-1]
    stage.fail = None
    stage.check(0.6)
    assert len(stage.launched) == 2


def test_the_end_is_told_to_all_that_run() -> None:
    stage = started()
    stage.supervisor.stop(b"farewell", 1.0)
    assert stage.launched[0].pair.sent == [b"farewell"] and stage.launched[0].closed
    assert stage.supervisor.all_gone and stage.supervisor.with_phase(Phase.READY) == []
