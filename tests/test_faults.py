"""Links that break and clouds that die in the middle of a generation: the ids stay those of the target alone, the fault
is counted, it is noticed in time, and what cannot be mended ends with its reason and the text so far."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clouds import (
    HEALED_S,
    LAW,
    NOWHERE,
    PATIENT_S,
    PROMPT,
    STRATEGIES,
    EachStrategy,
    InThread,
    Reader,
    Serving,
    Watched,
    at_once,
    edge,
    free_port,
    ids_of,
    said,
    serving,
    wait_until,
)

from pipesd.errors import PipeSDError, Refused, Unreachable
from pipesd.protocol.messages import (
    ErrorCode,
)
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.targets import Fault
from pipesd.sim.texts import KeyedText
from pipesd.sim.tokeniser import byte_vocabulary


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
    with LinkProxy(cloud.address, delay_s=0.002) as link, EachStrategy(link.address) as each:
        each.begin(250)
        for at in sorted(chance.sample(range(10, 120), 3)):
            each.until(at)
            assert getattr(link, fault)() == len(STRATEGIES)
            each.go_on(10)
        assert min(each.right()) >= 1
        assert link.counts().connections >= 8


@pytest.mark.slow
def test_a_black_hole_for_two_seconds(cloud: Serving) -> None:
    with LinkProxy(cloud.address, delay_s=0.001) as link, EachStrategy(link.address) as each:
        each.begin(300)
        each.until(20)
        link.black_hole()
        time.sleep(2.0)
        link.black_hole(False)
        each.go_on(100)
        each.right()


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
    assert [each.result() for each in early] == [said(LAW, PROMPT, 40)] * len(STRATEGIES)
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
    with EachStrategy(restarting.address) as each:
        each.begin(250)
        each.until(20)
        restarting.stop()
        restarting.start()
        each.go_on(10)
        assert min(each.right()) >= 2


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
    with serving(target={"pass_s": 0.002, "faults": faults}) as cloud, EachStrategy(cloud.address) as each:
        begun_s = time.monotonic()
        each.begin(120)
        assert min(each.right()) >= 3 and time.monotonic() - begun_s < 2 * HEALED_S
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
    """A pass lasts twice as long as the edge's patience; the front answers all the while."""
    for strategy in STRATEGIES:
        with serving(target={"faults": [Fault("sleep", 5, seconds=1.0)]}) as cloud:
            with edge(cloud.address, strategy=strategy, patience_s=0.5) as session:
                assert ids_of(session, PROMPT, max_tokens=40) == said(LAW, PROMPT, 40)
                assert session.stats["openings"] == 1 and session.stats["ttft_ms"] < session.stats["wait_s"] * 1000


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
