"""Links that break and clouds that die in the middle of a generation: the ids stay those of the target alone, the fault
is counted, it is noticed in time, and what cannot be mended ends with its reason and the text so far."""

from __future__ import annotations

import functools
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from clouds import (
    LAW,
    NOWHERE,
    PATIENT_S,
    CloudProcess,
    FakeCloud,
    InThread,
    Serving,
    Watched,
    at_once,
    edge,
    ids_of,
    said,
    serving,
    wait_until,
)

from pipesd.edge.session import EdgeSession
from pipesd.errors import PipeSDError, ProtocolError, Refused, Unreachable
from pipesd.protocol.messages import (
    Cancel,
    Draft,
    Error,
    ErrorCode,
    Hello,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    ProbeStatus,
    Resend,
    Verdict,
    Welcome,
)
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.targets import Fault
from pipesd.sim.texts import KeyedText
from pipesd.sim.tokeniser import byte_vocabulary

PROMPT = "Once upon a time"
STRATEGIES = ["vanilla", "cloud"]
HEALED_S = 10.0  # what a busy machine may need for a recovery that takes under two seconds


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


class Both:
    """A session of either strategy, generating at the same time, so that one fault meets both."""

    def __init__(self, address: str, **config: Any) -> None:
        self.sessions = [edge(address, strategy=strategy, **config) for strategy in STRATEGIES]
        self.readers: list[Reader] = []

    def __enter__(self) -> Both:
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
        """Either gets so many ids more, soon."""
        begun_s, seen = time.monotonic(), [len(reader.seen) for reader in self.readers]
        for reader, before in zip(self.readers, seen, strict=True):
            reader.until(before + count)
        assert time.monotonic() - begun_s < HEALED_S

    def right(self) -> list[int]:
        """Both got the target's ids; how often each opened."""
        for reader in self.readers:
            assert reader.result() == said(LAW, PROMPT, self._count)
        return [session.stats["openings"] for session in self.sessions]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(target={"pass_s": 0.002}) as served:
        yield served


# -- the link


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_link_changes_times_only(cloud: Serving, strategy: str) -> None:
    with LinkProxy(cloud.address, delay_s=0.02) as link, edge(link.address, strategy=strategy) as session:
        assert ids_of(session, PROMPT, max_tokens=40) == said(LAW, PROMPT, 40)
        stats = session.stats
        assert 40 <= stats["rtt_ms"] < 400 and 40 <= stats["ttft_ms"] < 1000
        assert stats["openings"] == 1 and stats["wait_s"] > (0.04 * stats["navs"] if strategy == "vanilla" else 0.08)


@pytest.mark.parametrize("fault", ["cut", pytest.param("reset", marks=pytest.mark.slow)])
def test_connections_that_are_cut_at_random_moments(cloud: Serving, fault: str) -> None:
    chance = random.Random(fault)
    with LinkProxy(cloud.address, delay_s=0.002) as link, Both(link.address) as both:
        both.begin(250)
        for at in sorted(chance.sample(range(10, 120), 3)):
            both.until(at)
            assert getattr(link, fault)() == 2
            both.go_on(10)
        assert min(both.right()) >= 1
        assert link.counts().connections >= 8


@pytest.mark.slow
def test_a_black_hole_for_two_seconds(cloud: Serving) -> None:
    with LinkProxy(cloud.address, delay_s=0.001) as link, Both(link.address) as both:
        both.begin(300)
        both.until(20)
        link.black_hole()
        time.sleep(2.0)
        link.black_hole(False)
        both.go_on(100)
        both.right()


def test_a_link_that_stays_dead_is_noticed_in_time(cloud: Serving) -> None:
    with LinkProxy(cloud.address) as link, edge(link.address, patience_s=1.0) as session:
        reader = Reader(session, 1900)
        reader.until(20)
        link.black_hole()
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match=r"nothing heard from the cloud for 1 s"):
            reader.result()
        assert 0.9 < time.monotonic() - begun_s < HEALED_S
        assert session.finish_reason == "error" and len(reader.seen) >= 20
        assert list(session.token_ids) == reader.seen == said(LAW, PROMPT, len(reader.seen))
        link.black_hole(False)
        assert ids_of(session, PROMPT, max_tokens=30) == said(LAW, PROMPT, 30), "and it can go on"


@pytest.mark.slow
def test_links_in_any_order_of_faults(cloud: Serving) -> None:
    chance = random.Random(5)
    with LinkProxy(cloud.address, delay_s=0.002) as link:

        def user(number: int) -> None:
            with edge(link.address, strategy=STRATEGIES[number % 2], draft_length=1 + number) as session:
                for turn in range(3):
                    prompt = f"user {number}, turn {turn}"
                    assert ids_of(session, prompt, max_tokens=900) == said(LAW, prompt, 900)

        users = [InThread(functools.partial(user, number)) for number in range(4)]
        faults: list[Callable[[], object]] = [
            link.cut,
            link.reset,
            lambda: link.stall(chance.uniform(0.1, 1.0), up=chance.random() < 0.5),
            lambda: link.change(delay_s=chance.choice([0.0, 0.002, 0.05])),
            lambda: (link.black_hole(), time.sleep(chance.uniform(0.1, 3.0)), link.black_hole(False)),
            lambda: (link.refuse(), link.cut(), time.sleep(0.5), link.refuse(False)),
        ]
        while not all(user.over for user in users):
            time.sleep(chance.uniform(0.2, 1.0))
            chance.choice(faults)()
        for thread in users:
            thread.result()


# -- the cloud, in this program


class Restarting:
    """A cloud in threads that can be taken away and come back at the same port."""

    def __init__(self, **settings: Any) -> None:
        self._port = free_port()
        self._settings = {"target": {"pass_s": 0.002}, **settings}
        self._cloud: Any = None
        self.address = f"tcp://127.0.0.1:{self._port}"

    def start(self, **changed: Any) -> Serving:
        self._cloud = serving(bind=self.address, **{**self._settings, **changed})
        served: Serving = self._cloud.__enter__()
        return served

    def stop(self) -> None:
        if self._cloud is not None:
            self._cloud.__exit__(None, None, None)
            self._cloud = None


@pytest.fixture
def restarting() -> Iterator[Restarting]:
    cloud = Restarting()
    yield cloud
    cloud.stop()


def test_the_cloud_starts_after_the_edge(restarting: Restarting) -> None:
    def once(strategy: str) -> list[int]:
        with edge(restarting.address, strategy=strategy) as session:
            ids = ids_of(session, PROMPT, max_tokens=40)
            assert session.stats["openings"] == 1
            return ids

    early = [InThread(functools.partial(once, strategy)) for strategy in STRATEGIES]
    time.sleep(1.0)
    served = restarting.start()
    assert [each.result() for each in early] == [said(LAW, PROMPT, 40)] * 2
    assert served.targets[0].fed < 2 * (17 + 40 * 5), "nothing was asked for twice"


def test_the_cloud_is_away_when_a_generation_begins(restarting: Restarting) -> None:
    restarting.start()
    with edge(restarting.address) as session:
        assert ids_of(session, PROMPT, max_tokens=10) == said(LAW, PROMPT, 10)
        restarting.stop()
        reader = Reader(session, 40, "another")
        time.sleep(0.3)
        assert not reader.over
        restarting.start()
        assert reader.result() == said(LAW, "another", 40)


def test_a_cloud_that_shuts_down_and_comes_back(restarting: Restarting) -> None:
    restarting.start()
    with Both(restarting.address) as both:
        both.begin(250)
        both.until(20)
        restarting.stop()
        restarting.start()
        both.go_on(10)
        assert min(both.right()) >= 2


def test_a_cloud_that_dies_for_good(restarting: Restarting) -> None:
    restarting.start()
    with edge(restarting.address, patience_s=1.0) as session:
        reader = Reader(session, 1900)
        reader.until(20)
        begun_s = time.monotonic()
        restarting.stop()
        with pytest.raises(Unreachable):
            reader.result()
        assert time.monotonic() - begun_s < HEALED_S
        assert session.finish_reason == "error"
        assert list(session.token_ids) == said(LAW, PROMPT, len(session.token_ids)) and len(session.token_ids) >= 20
        assert session.text and session.stats["tokens"] == len(session.token_ids)


def test_another_model_after_a_restart_is_refused_by_name(restarting: Restarting) -> None:
    restarting.start()
    with edge(restarting.address) as session:
        reader = Reader(session, 1900)
        reader.until(20)
        restarting.stop()
        restarting.start(law=KeyedText(8), target={"name": "the other model"})
        with pytest.raises(Refused, match="the other model") as refused:
            reader.result()
        assert refused.value.code == ErrorCode.MODEL
        assert reader.seen == said(LAW, PROMPT, len(reader.seen))


@pytest.mark.slow
def test_another_vocabulary_after_a_restart_is_refused(restarting: Restarting) -> None:
    restarting.start()
    with edge(restarting.address) as session:
        reader = Reader(session, 1900)
        reader.until(20)
        restarting.stop()
        restarting.start(target={"vocabulary": byte_vocabulary(600)})
        with pytest.raises(Refused, match="vocabulary") as refused:
            reader.result()
        assert refused.value.code == ErrorCode.VOCABULARY


@pytest.mark.slow
def test_a_cloud_that_loads_its_model_is_waited_for(restarting: Restarting) -> None:
    def slowly() -> Watched:
        time.sleep(1.5)
        return Watched(LAW)

    loading = InThread(lambda: restarting.start(make=slowly))
    with edge(restarting.address, connect_s=0.7, patience_s=PATIENT_S) as session:
        assert ids_of(session, PROMPT, max_tokens=20) == said(LAW, PROMPT, 20)
    loading.result()


def test_a_worker_that_raises_is_started_again(tmp_path: Path) -> None:
    faults = [Fault("raise", at_pass, once_file=str(tmp_path / str(at_pass))) for at_pass in (9, 21)]
    with serving(target={"pass_s": 0.002, "faults": faults}) as cloud, Both(cloud.address) as both:
        begun_s = time.monotonic()
        both.begin(120)
        assert min(both.right()) >= 3 and time.monotonic() - begun_s < 2 * HEALED_S
        assert len(cloud.targets) == 3


def test_the_other_worker_and_its_sessions_do_not_notice(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    with serving(workers=2, target={"pass_s": 0.002, "faults": [Fault("raise", 30, once_file=once)]}) as cloud:

        def user(number: int) -> int:
            with edge(cloud.address, strategy="cloud") as session:
                prompt = f"user {number}"
                assert ids_of(session, prompt, max_tokens=120) == said(LAW, prompt, 120)
                return int(session.stats["openings"])

        openings = at_once([functools.partial(user, number) for number in range(4)])
        assert sorted(openings)[:2] == [1, 1] and max(openings) >= 2


def test_long_passes_are_no_silence() -> None:
    """A pass lasts three times as long as the edge's patience; the front answers all the while."""
    with (
        serving(target={"faults": [Fault("sleep", 5, seconds=1.5)]}) as cloud,
        Both(cloud.address, patience_s=0.5) as both,
    ):
        both.begin(30)
        assert both.right() == [1, 1]


@pytest.mark.slow
def test_a_prefill_longer_than_the_patience() -> None:
    with serving(target={"token_s": 0.005}) as cloud, edge(cloud.address, patience_s=0.5) as session:
        begun_s = time.monotonic()
        prompt = [65] * 300
        assert ids_of(session, prompt, max_tokens=5) == said(LAW, prompt, 5)
        assert time.monotonic() - begun_s > 1.5
        assert cloud.targets[0].fed < 400, "what was computed was not computed again"


@pytest.mark.slow
def test_a_slow_draft_model_is_nobodys_silence(cloud: Serving) -> None:
    """A step of the draft model lasts longer than the patience."""
    with edge(cloud.address, patience_s=0.5, draft_length=2) as session:
        drafter = session._drafter
        assert drafter is not None
        drafter.gamma_s = 0.7  # type: ignore[attr-defined]
        assert ids_of(session, PROMPT, max_tokens=3) == said(LAW, PROMPT, 3)


def test_a_cloud_without_room_for_good() -> None:
    with serving(max_sessions=1) as cloud, edge(cloud.address, strategy="cloud") as holder:
        kept = holder.generate(PROMPT, max_tokens=1900)
        next(kept)
        with edge(cloud.address, patience_s=1.0) as session:
            begun_s = time.monotonic()
            with pytest.raises(Refused, match="in use") as refused:
                ids_of(session, "other", max_tokens=20)
            assert refused.value.code == ErrorCode.FULL
            assert 1.0 < time.monotonic() - begun_s < HEALED_S
            kept.close()
            assert ids_of(session, "other", max_tokens=20) == said(LAW, "other", 20)


def test_edges_that_vanish_leave_room() -> None:
    with serving(max_sessions=2, idle_s=1.0) as small:
        with LinkProxy(small.address) as link:
            sessions = [edge(link.address, strategy="cloud") for _ in range(2)]
            pieces = [session.generate(PROMPT, max_tokens=1900) for session in sessions]
            for each in pieces:
                next(each)
            link.refuse()
            link.cut()  # nothing of them is heard any more, not even a good-bye
            with edge(small.address, patience_s=PATIENT_S) as session:
                assert ids_of(session, "other", max_tokens=20) == said(LAW, "other", 20)
            for session in sessions:
                session.close()
        target = small.targets[0]
        wait_until(lambda: not any(target.length(slot) for slot in range(2)), "all slots are empty")


# -- the cloud, in processes


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudProcess]:
    with CloudProcess(tmp_path_factory.mktemp("cloud"), pass_s=0.002) as started:
        yield started
        assert started.stop() == 0


def test_a_worker_that_is_killed(process: CloudProcess) -> None:
    with Both(process.address) as both:
        both.begin(300)
        both.until(random.randrange(10, 100))
        process.kill_worker()
        both.go_on(100)
        assert min(both.right()) >= 2
    assert "worker 0 is down: it was killed (SIGKILL)" in process.errors.read_text()


@pytest.mark.slow
def test_a_cloud_that_is_stopped_and_goes_on(process: CloudProcess) -> None:
    with Both(process.address) as both:
        both.begin(300)
        both.until(20)
        process.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.process.send_signal(signal.SIGCONT)
        both.go_on(100)
        both.right()


@pytest.mark.slow
def test_a_cloud_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with CloudProcess(tmp_path, pass_s=0.002) as first, Both(first.address) as both:
        both.begin(300)
        both.until(random.randrange(10, 100))
        first.kill()
        with CloudProcess(tmp_path, port=first.port, pass_s=0.002):
            both.go_on(100)
            assert min(both.right()) >= 2


# -- clouds that misbehave


class Pretender:
    """Answers as a cloud would until OPEN; what comes then is the test's."""

    def __init__(self, after: Callable[[Message], Sequence[Message | bytes]]) -> None:
        self._after = after

    def __call__(self, message: Message) -> Sequence[Message | bytes]:
        vocabulary = byte_vocabulary()
        if isinstance(message, Hello):
            about = ("fake", vocabulary.real_size, vocabulary_hash(vocabulary), bytes(8), 2048, "cpu", "float32")
            return [Welcome(message.session, 0, 1, 0, 0, *about)]
        if isinstance(message, Probe):
            return [Probed(message.session, 0, message.token, ProbeStatus.OK, 0)]
        return self._after(message)


def opened(message: Open) -> Opened:
    return Opened(message.session, message.opening, message.limit, 32, 64, 1)


def test_garbage_in_mid_generation() -> None:
    for garbage in (b"", b"\xc1", b"\x93\x06\x01\x01", b"x" * 2000):
        with FakeCloud(Pretender(lambda m, g=garbage: [g] if isinstance(m, Open) else [])) as cloud:  # type: ignore[misc]
            with edge(cloud.address) as session, pytest.raises(ProtocolError):
                ids_of(session, PROMPT)


def test_messages_that_only_an_edge_may_send() -> None:
    with FakeCloud(Pretender(lambda m: [Cancel(m.session, m.opening)])) as cloud:
        with edge(cloud.address) as session, pytest.raises(ProtocolError, match="Cancel"):
            ids_of(session, PROMPT)


def test_a_cloud_that_takes_back_what_it_said() -> None:
    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            first, second = ((70,), (71,))
            pos = len(message.ids)
            return [
                opened(message),
                Verdict(message.session, message.opening, 0, pos, first, more=True),
                Verdict(message.session, message.opening, 0, pos, second, more=True),
            ]
        return []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address, strategy="cloud") as session:
        pieces = session.generate(PROMPT)
        assert next(pieces).token_ids == (70,)
        with pytest.raises(ProtocolError, match=r"71 at position .* 70"):
            list(pieces)
        assert session.token_ids == (70,) and session.finish_reason == "error"


def test_what_belongs_to_somebody_else_is_dropped() -> None:
    """Verdicts of another session, of an earlier and of a later opening, and errors of them."""

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            pos = len(message.ids)
            addresses = [(message.session ^ 1, message.opening), (message.session, message.opening - 1)]
            addresses += [(message.session, message.opening + 1), (message.session, 1 << 20)]
            lies: list[Message] = []
            for session, opening in addresses:
                lies += [
                    Verdict(session, opening, 0, pos, (66,)),
                    Error(session, opening, ErrorCode.LIMIT, "not yours"),
                    Error(session, opening, ErrorCode.UNKNOWN, "not yours"),
                    Opened(session, opening, 3, 1, 1, 1),
                    Resend(session, opening, 0, 0),
                ]
            return [*lies, opened(message), *lies]
        if isinstance(message, Draft):
            return [Verdict(message.session, message.opening, message.epoch, message.known, (70,))]
        return []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address, agreement=0.0) as session:
        assert ids_of(session, PROMPT, max_tokens=5) == [70] * 5
        assert session.stats["openings"] == 1


def test_a_version_that_is_refused_at_the_opening() -> None:
    text = "the edge speaks protocol version 1.0, this side 2.0"
    with FakeCloud(Pretender(lambda m: [Error(m.session, m.opening, ErrorCode.VERSION, text)])) as cloud:
        with edge(cloud.address) as session, pytest.raises(Refused, match=r"1\.0.*2\.0") as refused:
            ids_of(session, PROMPT)
        assert refused.value.code == ErrorCode.VERSION


def test_a_cloud_that_answers_probes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesd.edge.patience.GIVE_UP_FACTOR", 3)
    with FakeCloud(Pretender(lambda m: [])) as cloud, edge(cloud.address, patience_s=0.5) as session:
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match="answers probes but not this generation"):
            ids_of(session, PROMPT)
        assert 1.5 <= time.monotonic() - begun_s < HEALED_S
        assert 3 <= cloud.kinds().count("Open") < 30


def test_a_cloud_that_forgets_is_told_everything_again() -> None:
    """Its front answers a probe that it knows no such session, and nothing more: the edge opens again by that."""
    forgotten = threading.Event()
    opens: list[Open] = []

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            opens.append(message)
            return [opened(message)] if len(opens) == 1 or forgotten.is_set() else []
        if isinstance(message, Draft) and forgotten.is_set():
            return [Verdict(message.session, message.opening, message.epoch, message.known, (70,))]
        return []

    def with_probes(message: Message) -> Sequence[Message | bytes]:
        if isinstance(message, Probe) and opens and not forgotten.is_set():
            forgotten.set()
            return [Probed(message.session, 0, message.token, ProbeStatus.UNKNOWN_SESSION, 0)] * 3
        return Pretender(answer)(message)

    with FakeCloud(with_probes) as cloud, edge(cloud.address, agreement=0.0) as session:
        assert ids_of(session, PROMPT, max_tokens=5) == [70] * 5
        assert session.stats["openings"] == len(opens) == 2, "three times the same news is one"
        assert opens[1].base == 0 and opens[1].ids[: len(opens[0].ids)] == opens[0].ids


def test_nobody_at_the_address() -> None:
    begun_s = time.monotonic()
    with pytest.raises(Unreachable, match="nothing listens there; start pipesd-cloud") as error:
        edge(NOWHERE, connect_s=0.5).__enter__()
    assert 0.5 <= time.monotonic() - begun_s < HEALED_S and error.value.exit_code == 3


def test_an_opening_that_failed_can_be_tried_again(restarting: Restarting) -> None:
    session = edge(restarting.address, connect_s=0.2)
    for _ in range(2):
        with pytest.raises(Unreachable):
            session.open()
        with pytest.raises(PipeSDError):
            ids_of(session, PROMPT)
    restarting.start()
    assert ids_of(session, PROMPT, max_tokens=10) == said(LAW, PROMPT, 10)
    session.close()
