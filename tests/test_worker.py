"""A worker behind one end of a pair: drain, choose, verify, reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from clouds import LAW, PATIENT_S, InThread, Watched, said, wait_until

from pipesd.cloud.worker import BEAT_S, choices_of, run_worker
from pipesd.core import Mode
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.messages import (
    Beat,
    Cancel,
    Close,
    Draft,
    Error,
    ErrorCode,
    Gone,
    Message,
    Open,
    Opened,
    Ready,
    Verdict,
)
from pipesd.protocol.vocabulary import digest
from pipesd.protocol.wire import decode, encode
from pipesd.sim.distributions import KeyedDistribution, sampled_continuation
from pipesd.sim.targets import Fault, ScriptedFault
from pipesd.sim.tokeniser import byte_vocabulary
from pipesd.transport import Context, PairSocket, pair_listen

PROMPT = tuple(b"once")
DISTRIBUTION = KeyedDistribution(5)


class Front:
    """The front's end, for a test: says and hears messages."""

    def __init__(self, pair: PairSocket) -> None:
        self._pair = pair
        self.heard: list[Message] = []
        self._waiting: list[Message] = []

    def say(self, *messages: Message) -> None:
        for message in messages:
            assert self._pair.send(encode(message))

    def hear(self, wanted: type[Message], session: int = 0) -> Any:
        """The next message of that kind (of that session); others wait for their turn."""
        deadline_s = time.monotonic() + PATIENT_S
        while True:
            for message in self._waiting:
                if isinstance(message, wanted) and session in (0, message.session):
                    self._waiting.remove(message)
                    return message
            payload = self._pair.receive(max(0.0, deadline_s - time.monotonic()))
            kinds = [type(message).__name__ for message in self.heard]
            assert payload is not None, f"no {wanted.__name__} came; heard were {kinds}"
            self.heard.append(decode(payload, internal=True))
            self._waiting.append(self.heard[-1])

    def silent(self, seconds: float) -> bool:
        return self._pair.receive(seconds) is None


@contextmanager
def working(
    make: Callable[[], Any] | None = None, *, stop: threading.Event | None = None, **bounds: float
) -> Iterator[tuple[Front, Any, InThread]]:
    """A worker in a thread: the front's end, its target, the thread."""
    target: list[Any] = []

    def make_target() -> Any:
        target.append(Watched(LAW) if make is None else make())
        return target[0]

    endpoint = f"inproc://test-worker-{time.monotonic_ns()}"
    with Context() as context, pair_listen(context, endpoint) as pair:
        ended = stop or threading.Event()
        thread = InThread(lambda: run_worker(endpoint, make_target, context=context, stop=ended, **bounds))
        front = Front(pair)
        try:
            front.hear(Ready)
            yield front, target[0], thread
        finally:
            ended.set()
            wait_until(lambda: thread.over, "the worker ends")


def opening(session: int, ids: Sequence[int] = PROMPT, number: int = 1, **changed: Any) -> Open:
    given: dict[str, Any] = {
        "session": session, "opening": number, "base": 0, "digest": digest(()), "ids": tuple(ids), "limit": 100,
        "stop_ids": (), "sampling": None, "seed": 0, "mode": Mode.NAV, "model_fingerprint": bytes(8),
        "vocabulary_hash": bytes(8),
    }  # fmt: skip
    return Open(**{**given, **changed})


def asks(session: int, ids: Sequence[int], pos: int = len(PROMPT), number: int = 1, epoch: int = 0) -> Draft:
    return Draft(session, number, epoch, pos, tuple(ids), pos, nav=True)


def test_its_first_word_says_what_it_serves() -> None:
    vocabulary = byte_vocabulary(512, 470)
    with working(lambda: Watched(LAW, vocabulary, name="its name", end_ids=(257,), context=99)) as (front, target, _):
        [ready] = front.heard
        assert isinstance(ready, Ready) and ready.info == target.info
        assert ready.vocabulary == vocabulary and (ready.context, ready.end_ids) == (99, (257,))


def test_it_verifies_and_commits_the_targets_ids() -> None:
    expected = said(LAW, PROMPT, 5)
    with working() as (front, target, _):
        front.say(opening(1))
        opened = front.hear(Opened)
        assert (opened.session, opened.opening, opened.limit) == (1, 1, 100)
        front.say(asks(1, expected[:4]))
        verdict = front.hear(Verdict)
        assert (verdict.pos, list(verdict.ids)) == (4, expected) and not verdict.more
        assert verdict.counters.passes == 1 and verdict.counters.verified == 4
        front.say(asks(1, [0, 0], pos=9))
        assert list(front.hear(Verdict).ids) == said(LAW, PROMPT, 6)[5:]
        assert target.ids(0)[:4] == PROMPT


def test_free_run_streams_until_its_bound_and_takes_no_more_passes() -> None:
    with working(run_ahead=16) as (front, target, _):
        front.say(opening(1, mode=Mode.FREE))
        ids: list[int] = []
        while len(ids) < 16:
            verdict = front.hear(Verdict)
            ids.extend(verdict.ids)
            assert verdict.more
        passes = target.passes
        assert front.silent(0.1) and target.passes == passes
        front.say(Draft(1, 1, 0, 20, (), 20))
        ids.extend(front.hear(Verdict).ids)
        assert ids == said(LAW, PROMPT, 17)
        front.say(Cancel(1, 1))
        while not front.silent(0.1):
            pass
        passes = target.passes
        assert front.silent(0.1) and target.passes == passes


def test_sessions_that_ask_at_the_same_time_share_a_pass() -> None:
    with working(lambda: Watched(LAW, pass_s=0.02), max_sessions=4) as (front, target, _):
        for session in range(1, 5):
            front.say(opening(session, (*PROMPT, session)))
        for session in range(1, 5):
            front.hear(Opened, session)
        for turn in range(20):  # all four at once, unless this thread has to wait for a processor in the middle
            front.say(*(asks(session, [], pos=5 + turn) for session in range(1, 5)))
            for session in range(1, 5):
                expected = said(LAW, (*PROMPT, session), turn + 1)[turn:]
                assert list(front.hear(Verdict, session).ids) == expected
        assert target.batches.count(4) + target.batches.count(3) >= 3


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    with working(lambda: Watched(LAW, token_s=0.0001)) as (front, target, _):
        front.say(opening(1))
        front.hear(Opened)
        front.say(opening(2, [65] * 2000, limit=2040))
        expected = said(LAW, PROMPT, 9)
        for at in range(4):
            front.say(asks(1, expected[2 * at : 2 * at + 1], pos=4 + 2 * at))
            assert list(front.hear(Verdict, 1).ids) == expected[2 * at : 2 * at + 2]
        assert not any(isinstance(message, Opened) and message.session == 2 for message in front.heard)
        assert front.hear(Opened, 2).limit == 2040
        assert len(target.batches) >= 2000 // 128 + 4


def test_what_a_session_leaves_is_cleared() -> None:
    with working(max_sessions=1) as (front, target, _):
        front.say(opening(1))
        front.hear(Opened)
        front.say(asks(1, []))
        front.hear(Verdict)
        assert target.length(0) > 0
        front.say(Close(1, 1))
        assert front.hear(Gone).session == 1
        wait_until(lambda: target.length(0) == 0, "its slot is empty")
        # and when one makes room for another, nothing of it is taken for the other's
        for session in range(2, 7):
            front.say(opening(session, (*PROMPT, session)), asks(session, [], pos=5), Cancel(session, 1))
            front.say(opening(session, (*PROMPT, session), 2), asks(session, [], pos=5, number=2))
            verdict = front.hear(Verdict, session)
            assert list(verdict.ids) == said(LAW, (*PROMPT, session), 1)
            front.say(Cancel(session, 2))
        assert sum(isinstance(message, Gone) for message in front.heard) == 5


def test_no_room_is_said() -> None:
    with working(max_sessions=1) as (front, _, _):
        front.say(opening(1))
        front.hear(Opened)
        front.say(opening(2))
        error = front.hear(Error)
        assert (error.session, error.opening, error.code) == (2, 1, ErrorCode.FULL) and error.retry_ms > 0


def test_idle_sessions_are_forgotten() -> None:
    with working(idle_s=0.1) as (front, target, _):
        front.say(opening(1))
        front.hear(Opened)
        begun_s = time.monotonic()
        assert front.hear(Gone).session == 1
        assert time.monotonic() - begun_s < 5.0
        wait_until(lambda: target.length(0) == 0, "its slot is empty")


def test_a_worker_that_works_says_that_it_lives() -> None:
    with working(lambda: Watched(LAW, pass_s=0.1)) as (front, _, _):
        front.say(opening(1, [65] * 1900, limit=2000))  # some 1.5 s without another word
        beat = front.hear(Beat)
        assert (beat.sessions, beat.pass_ms >= 100) == (1, True)
        front.hear(Opened)
        assert sum(isinstance(message, Beat) for message in front.heard) >= 1 / BEAT_S
        assert front.hear(Beat).sessions == 1, "and when it is idle"


def test_a_pass_that_is_not_finite_ends_its_session_only() -> None:
    with working(lambda: Watched(LAW, faults=[Fault("nan", 3)])) as (front, _, _):
        for session in (1, 2):
            front.say(opening(session))
            front.hear(Opened, session)
        front.say(asks(1, []))
        error = front.hear(Error, 1)
        assert error.code == ErrorCode.INTERNAL and "not finite" in error.text
        front.say(asks(2, []))
        assert list(front.hear(Verdict, 2).ids) == said(LAW, PROMPT, 1)
        front.say(opening(1, number=2), asks(1, [], number=2))
        assert list(front.hear(Verdict, 1).ids) == said(LAW, PROMPT, 1)


def sampled(sampling: Sampling, seed: int, count: int) -> list[int]:
    """What the target of `distributed` says behind the prompt, drawn one id at a time."""
    return sampled_continuation(DISTRIBUTION, PROMPT, count, Sampler(sampling, seed))


def distributed(**settings: Any) -> Watched:
    return Watched(DISTRIBUTION, **settings)


SAMPLING = Sampling(temperature=1.0, top_k=9, frequency_penalty=0.3)


def test_sessions_sample_by_their_own_seeds_whoever_shares_the_pass() -> None:
    expected = {1: sampled(SAMPLING, 11, 24), 2: sampled(SAMPLING, 22, 24), 3: sampled(Sampling(), 0, 24)}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    with working(lambda: distributed(pass_s=0.01)) as (front, target, _):
        for session, seed in ((1, 11), (2, 22)):
            front.say(opening(session, sampling=SAMPLING, seed=seed))
        front.say(opening(3))
        got: dict[int, list[int]] = {1: [], 2: [], 3: []}
        for session in got:
            front.hear(Opened, session)
        for turn in range(6):  # drafts that are right, or wrong in their second token
            for session, ids in got.items():
                draft = expected[session][len(ids) : len(ids) + 3]
                if turn % 2:
                    draft[1:] = [draft[1] + 1] * (len(draft) - 1)
                front.say(asks(session, draft, pos=4 + len(ids), epoch=turn))
            for session, ids in got.items():
                verdict = front.hear(Verdict, session)
                assert verdict.pos == 4 + len(ids) and len(verdict.ids) == (2 if turn % 2 else 4)
                ids += verdict.ids
        assert all(expected[session][: len(ids)] == ids for session, ids in got.items())
        assert max(target.batches) > 1


@pytest.mark.parametrize("kind", ["nan", "one-nan", "inf"])
@pytest.mark.parametrize("method", list(Method))
def test_a_row_that_is_not_finite_hurts_only_the_session_that_samples_it(kind: Any, method: Method) -> None:
    sampling = Sampling(temperature=1.0, method=method, top_mass=8 if method is Method.PICOSPEC else 0)
    faults = [Fault(kind, at, slot=1) for at in range(4, 40)]  # three prefills come before
    with working(lambda: distributed(pass_s=0.01, faults=faults)) as (front, target, _):
        for session in range(1, 4):
            front.say(opening(session, sampling=sampling, seed=session))
            front.hear(Opened, session)
        for session in range(1, 4):
            front.say(asks(session, []))
        assert front.hear(Error, 2).code == ErrorCode.INTERNAL
        for session in (1, 3):
            assert list(front.hear(Verdict, session).ids) == sampled(sampling, session, 1)
            front.say(asks(session, [], pos=5))
            assert list(front.hear(Verdict, session).ids) == sampled(sampling, session, 2)[1:]
        assert max(target.batches) > 1


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("method", list(Method))
def test_one_pass_over_a_plain_session_a_sampled_one_and_one_that_is_not_finite(method: Method, bad: int) -> None:
    sampling = Sampling(temperature=1.0, method=method, top_mass=8 if method is Method.PICOSPEC else 0)
    ways = {1: None, 2: sampling, 3: Sampling(frequency_penalty=0.5)}
    target = distributed(faults=[Fault("one-nan", 4, slot=bad - 1)])  # three prefills come before
    machine = CloudMachine(CloudLimits(context=100, vocabulary_size=target.vocabulary.size))

    def one_pass() -> list[Message]:
        work = machine.work()
        results = choices_of(target, work)
        return [said for item, found in zip(work, results, strict=True) for said in machine.done(item, found, 0.1, 0.0)]

    for session, way in ways.items():
        machine.receive(opening(session, sampling=way, seed=session), 0.0)
    while machine.work():
        one_pass()
    for session in ways:
        machine.receive(asks(session, ()), 0.0)
    assert len(machine.work()) == 3
    said = {message.session: message for message in one_pass()}
    error = said.pop(bad)
    assert isinstance(error, Error) and error.code is ErrorCode.INTERNAL and "not finite" in error.text
    assert len(said) == 2
    for session, verdict in said.items():
        assert isinstance(verdict, Verdict)
        assert list(verdict.ids) == sampled(ways[session] or Sampling(), session, 1)


def test_a_fault_of_the_target_ends_the_worker_with_its_reason() -> None:
    with working(lambda: Watched(LAW, faults=[Fault("raise", 2)])) as (front, _, thread):
        front.say(opening(1))
        front.hear(Opened)
        front.say(asks(1, []))
        with pytest.raises(ScriptedFault):
            thread.result()


def test_it_ends_when_it_is_told_to() -> None:
    with working() as (front, _, thread):
        front.say(Close(0, 0))
        thread.result()
    stop = threading.Event()
    with working(stop=stop) as (_, _, thread):
        stop.set()
        begun_s = time.monotonic()
        thread.result()
        assert time.monotonic() - begun_s < 2.0


def test_it_ends_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = 1234
    monkeypatch.setattr("pipesd.cloud.worker.os.getppid", lambda: parent)
    with working() as (_, _, thread):
        parent = 1
        begun_s = time.monotonic()
        thread.result()
        assert time.monotonic() - begun_s < 2.0


def test_no_more_sessions_are_granted_than_the_target_has_slots() -> None:
    with working(lambda: Watched(LAW, slots=1), max_sessions=4) as (front, _, _):
        front.say(opening(1))
        front.hear(Opened)
        front.say(opening(2))
        assert front.hear(Error).text == "all 1 sessions of this worker are in use"
