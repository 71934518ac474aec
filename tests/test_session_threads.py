"""A session and threads, iterators that are left, processes that fork: clear errors, no hang, nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from clouds import LAW, NOWHERE, PATIENT_S, InThread, Serving, edge, ids_of, said, serving, wait_until

from pipesd.edge.run import Run
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.sim.drafters import Agreement, ScriptedDrafter

PROMPT = "Once upon a time"
SOON_S = 2.0  # within which a busy machine ends what is cancelled
STRATEGIES = ["vanilla", "cloud", "local"]


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(target={"pass_s": 0.001}, max_sessions=16) as served:
        yield served


def usable(session: EdgeSession) -> bool:
    return ids_of(session, "again", max_tokens=12) == said(LAW, "again", 12)


class Reader(InThread):
    """Reads a generation in a thread of its own; `seen` are the ids so far."""

    def __init__(self, session: EdgeSession, **options: object) -> None:
        self.seen: list[int] = []
        self._pieces = session.generate(PROMPT, **{"max_tokens": 1900, **options})
        super().__init__(self._read)

    def _read(self) -> list[int]:
        for piece in self._pieces:
            self.seen.extend(piece.token_ids)
        return self.seen


# -- two threads, one session


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_second_thread_is_told_and_the_first_is_unharmed(cloud: Serving, strategy: str) -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 1.0), gamma_s=0.001)
    with edge(cloud.address, drafter=drafter, strategy=strategy) as session:
        reader = Reader(session, max_tokens=200)
        wait_until(lambda: len(reader.seen) > 5, "the first has begun")
        with pytest.raises(UsageError, match="generating already"):
            ids_of(session, "other", max_tokens=5)
        assert reader.result() == said(LAW, PROMPT, 200)
        assert session.finish_reason == "length"


def test_one_thread_after_the_other(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        for _ in range(5):
            assert InThread(lambda: usable(session)).result()
            assert usable(session)


def test_threads_advance_one_iterator_in_turn(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        pieces = session.generate(PROMPT, max_tokens=300)
        seen: list[int] = []
        lock = threading.Lock()

        def read() -> None:
            while True:
                with lock:
                    piece = next(pieces, None)
                    if piece is None:
                        return
                    seen.extend(piece.token_ids)

        for thread in [InThread(read) for _ in range(3)]:
            thread.result()
        assert seen == said(LAW, PROMPT, 300)


# -- cancel


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cancel_from_another_thread(cloud: Serving, strategy: str) -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.8), gamma_s=0.001)
    with edge(cloud.address, drafter=drafter, strategy=strategy) as session:
        for _ in range(5):
            reader = Reader(session)
            wait_until(lambda reader=reader: len(reader.seen) > 5, "it has begun")  # type: ignore[misc]
            session.cancel()
            assert wait_until(lambda reader=reader: reader.over, "it ends") < SOON_S  # type: ignore[misc]
            ids = reader.result()
            assert session.finish_reason == "cancelled" and list(session.token_ids) == ids
            if strategy != "local":
                assert ids == said(LAW, PROMPT, len(ids))
                assert usable(session)


def test_cancel_in_the_prompts_prefill(cloud: Serving) -> None:
    for strategy in ("vanilla", "local"):
        drafter = ScriptedDrafter(Agreement(LAW, 0.8), prefill_s=0.001)
        with edge(cloud.address, drafter=drafter, strategy=strategy) as session:
            pieces = session.generate([65] * 2000, max_tokens=40)
            reader = InThread(lambda pieces=pieces: list(pieces))  # type: ignore[misc]
            time.sleep(0.05)
            session.cancel()
            assert wait_until(lambda reader=reader: reader.over, "it ends") < 1.0  # type: ignore[misc]
            assert session.finish_reason == "cancelled" and drafter.fed < 1000


def test_cancel_while_the_target_computes() -> None:
    with serving(target={"pass_s": 0.7}) as cloud, edge(cloud.address, strategy="cloud") as session:
        reader = InThread(lambda: list(session.generate([65], max_tokens=40)))
        time.sleep(0.1)
        session.cancel()
        assert wait_until(lambda: reader.over, "it ends") < 0.5
        assert reader.result() == [] and session.finish_reason == "cancelled"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_the_program_leaves_a_session_that_works(cloud: Serving, interruptible: None) -> None:
    """Ctrl-C in a program that does nothing about it: the loop ends, the session does not."""
    main = threading.main_thread().ident
    assert main is not None
    with edge(cloud.address, strategy="cloud") as session:
        for _ in range(3):
            threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                for _piece in session.generate(PROMPT, max_tokens=1900):
                    pass
            assert session.finish_reason == "cancelled" and session.stats["tokens"] > 0
            assert usable(session)


def test_cancel_stops_the_clouds_work() -> None:
    with serving(target={"pass_s": 0.002}) as cloud:
        with edge(cloud.address, strategy="cloud") as session:
            reader = Reader(session)
            wait_until(lambda: len(reader.seen) > 5, "it has begun")
            session.cancel()
            reader.result()
            time.sleep(0.1)
            passes = cloud.passes
            time.sleep(0.2)
            assert cloud.passes == passes


def test_an_iterator_that_was_cancelled_before_its_first_step_ends_there(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        pieces = session.generate(PROMPT, max_tokens=1900)
        pieces.cancel()
        assert list(pieces) == [] and session.finish_reason == "cancelled"
        assert usable(session)


def test_cancel_without_a_generation_does_nothing(cloud: Serving) -> None:
    session = edge(cloud.address)
    session.cancel()
    with session:
        session.cancel()
        assert usable(session)
        session.cancel()
        assert usable(session)
    session.cancel()


def test_cancel_while_it_waits_for_a_cloud() -> None:
    session = edge(NOWHERE, connect_s=60.0)
    opening = InThread(session.open)
    time.sleep(0.1)
    session.cancel()
    with pytest.raises(Cancelled, match=NOWHERE):
        opening.result()
    reader = Reader(session)
    time.sleep(0.1)
    session.cancel()
    with pytest.raises(Cancelled):
        reader.result()
    session.close()


# -- close


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_close_from_another_thread_in_mid_request(cloud: Serving, strategy: str) -> None:
    _close_in_mid_request(cloud, strategy, 8)


@pytest.mark.slow
def test_close_from_another_thread_a_thousand_times(cloud: Serving) -> None:
    _close_in_mid_request(cloud, "vanilla", 500)
    _close_in_mid_request(cloud, "cloud", 500)


def _close_in_mid_request(cloud: Serving, strategy: str, count: int) -> None:
    chance = random.Random(count)
    for _ in range(count):
        session = edge(cloud.address, strategy=strategy)
        session.open()
        reader = Reader(session)
        time.sleep(chance.uniform(0, 0.01))
        session.close()
        try:
            ids = reader.result()
        except PipeSDError as error:
            assert "closed" in str(error), "the generation began too late"
        else:
            assert strategy == "local" or ids == said(LAW, PROMPT, len(ids))


def test_a_session_that_is_closed_says_so(cloud: Serving) -> None:
    session = edge(cloud.address)
    with session:
        begun, not_begun = session.generate(PROMPT), session.generate(PROMPT)
        next(begun)
    assert list(begun) == []
    for use in (lambda: session.generate(PROMPT), lambda: next(not_begun), session.open):
        with pytest.raises(UsageError, match="closed"):
            use()
    session.close()


def test_closing_waits_for_an_iterator_that_another_thread_just_drops(
    cloud: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = EdgeSession._end

    def slowly(session: EdgeSession, run: Run) -> None:
        time.sleep(0.2)
        end(session, run)

    monkeypatch.setattr(EdgeSession, "_end", slowly)
    session = edge(cloud.address)
    held = [session.generate(PROMPT)]
    next(held[0])
    dropping = InThread(held.clear)
    time.sleep(0.1)
    session.close()
    dropping.result()


def test_a_generation_that_does_not_end_is_not_waited_for_for_ever(
    cloud: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipesd.edge.run.CLOSE_S", 0.1)
    drafter = ScriptedDrafter(Agreement(LAW, 0.8), gamma_s=0.4)
    session = edge(cloud.address, drafter=drafter)
    reader = Reader(session)
    wait_until(lambda: drafter.fed > 0, "it has begun")
    with pytest.raises(UsageError, match="still runs"):
        session.close()
    reader.result()
    session.close()


# -- iterators that are left


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_iterator_that_is_dropped_ends_its_generation(cloud: Serving, strategy: str) -> None:
    gc.disable()  # not the collector does it
    try:
        with edge(cloud.address, strategy=strategy) as session:
            for left in range(10):
                for number, _ in enumerate(session.generate(PROMPT, max_tokens=200)):
                    if number == left:
                        break
                assert session.finish_reason == "cancelled"
                assert strategy == "local" or usable(session)
    finally:
        gc.enable()


def test_an_iterator_that_is_kept_is_in_the_way_until_it_is_closed(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        kept = session.generate(PROMPT)
        next(kept)
        with pytest.raises(UsageError, match="generating already"):
            ids_of(session, "other")
        kept.close()
        assert list(kept) == [] and session.finish_reason == "cancelled"
        assert usable(session)


def test_the_session_ends_what_is_left_open(cloud: Serving) -> None:
    begun_s = time.monotonic()
    for strategy in STRATEGIES:
        with edge(cloud.address, strategy=strategy) as session:
            left = session.generate(PROMPT)
            next(left)
            other = session.generate("never begun")
        with edge(cloud.address, strategy=strategy) as session:
            left = session.generate(PROMPT)
            InThread(lambda left=left: next(left)).result()  # type: ignore[misc]
            session.generate("never begun")
        assert list(left) == []
        with pytest.raises(UsageError):
            next(other)
    assert time.monotonic() - begun_s < 3 * SOON_S


# -- processes


def _in_a_child(check: object) -> int:
    """Fork, run `check` in the child; 0 if it returned True."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2  # type: ignore[operator]
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + PATIENT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_may_make_its_own(cloud: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    with edge(cloud.address) as session:
        pieces = session.generate(PROMPT, max_tokens=200)
        begun = [*next(pieces).token_ids]

        def child() -> bool:
            for use in (lambda: session.generate("x"), session.open, lambda: list(pieces)):
                with pytest.raises(PipeSDError, match="fork"):
                    use()
            session.cancel()
            session.close()
            with edge(cloud.address) as own:
                return usable(own)

        assert _in_a_child(child) == 0
        assert begun + [i for piece in pieces for i in piece.token_ids] == said(LAW, PROMPT, 200)
        assert usable(session)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_drops_an_iterator_in_silence(cloud: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    with edge(cloud.address) as session:
        held = [session.generate(PROMPT, max_tokens=100)]
        begun = [*next(held[0]).token_ids]

        def child() -> bool:
            ignored: list[object] = []
            sys.unraisablehook = ignored.append
            held.clear()
            gc.collect()
            return not ignored

        assert _in_a_child(child) == 0
        assert begun + [i for piece in held[0] for i in piece.token_ids] == said(LAW, PROMPT, 100)
    assert capfd.readouterr().err == ""


# -- leaks


def test_nothing_is_left_of_many_sessions(cloud: Serving) -> None:
    _many_sessions(cloud, 30)


@pytest.mark.slow
def test_nothing_is_left_of_a_thousand_sessions(cloud: Serving) -> None:
    _many_sessions(cloud, 1000)


def _many_sessions(cloud: Serving, count: int) -> None:
    def one(number: int) -> None:
        strategy = STRATEGIES[number % 3]
        if number % 7 == 0:
            with pytest.raises(PipeSDError):
                edge("tcp://127.0.0.1:99999", strategy="cloud").open()
        with edge(cloud.address, strategy=strategy) as session:
            assert strategy == "local" or usable(session)
            left = session.generate(PROMPT)
            if number % 2:
                next(left)

    one(1)
    threads, files = threading.active_count(), len(os.listdir("/dev/fd"))
    for number in range(count):
        one(number)
    wait_until(lambda: threading.active_count() <= threads, "the threads are gone")
    # the cloud closes its end of a connection when it hears of it
    wait_until(lambda: len(os.listdir("/dev/fd")) <= files + 4, "the files are closed")
