"""The front against real sockets and workers that follow a script, in threads and in processes that are killed."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket as net
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
from front_harness import (
    CRASH,
    FLOOD,
    FORGET,
    HASH,
    INFO,
    LEAVE,
    MUMBLE,
    QUICK,
    RUN,
    SHORT_QUEUE,
    SLEEP,
    SOON_S,
    VOCABULARY,
    WHO,
    Edge,
    Script,
    draft,
    evil_pickle,
    hello,
    open_message,
    probe,
    running_front,
    wait_for,
)

from pipesd.cloud.front import PROBE_REPLY_BYTES
from pipesd.errors import PipeSDError, UsageError
from pipesd.protocol import wire
from pipesd.protocol.vocabulary import block_hashes, block_pieces
from pipesd.protocol.wire import ErrorCode, ProbeStatus

# ---- questions that the front answers itself


def test_hello_is_answered_with_the_model_and_on_a_difference_with_hashes_and_pieces() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        same = edge.ask(hello())
        of_model = ("script", 300, HASH, INFO.fingerprint, 1000, "cpu", "float32")
        assert same[:12] == (9, 0, wire.MAJOR, wire.MINOR, wire.FEATURES, *of_model)
        assert same.block_hashes is None and same.pieces is None and same.end_ids == INFO.end_ids
        other = edge.ask(hello(vocabulary_hash=b"8 others"))
        assert other.block_hashes == block_hashes(VOCABULARY) and other.pieces is None
        assert edge.ask(hello(block=1)).pieces == block_pieces(VOCABULARY, 1)
        assert edge.ask(hello(block=4000)).pieces == ()


def test_before_a_worker_is_ready_everybody_is_told_to_wait() -> None:
    with running_front(Script(load_s=0.4), wait=False) as cloud, cloud.edge() as edge:
        for message in (hello(), open_message(5)):
            answer = edge.ask(message)
            assert (answer.code, answer.retry_ms) == (ErrorCode.STARTING, QUICK.retry_ms)
        assert edge.ask(probe()).status is ProbeStatus.STARTING
        wait_for(lambda: isinstance(edge.ask(hello()), wire.Welcome))
        assert isinstance(edge.open(5), wire.Opened)


def test_probe_is_answered_while_the_worker_computes() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge, cloud.edge() as other:
        edge.open(5)
        edge.say(draft(5, 1, SLEEP, 600, nav=True))
        time.sleep(0.1)
        for asking, session, status in ((edge, 5, ProbeStatus.OK), (other, 77, ProbeStatus.UNKNOWN_SESSION)):
            begun_s = time.monotonic()
            answer = asking.ask(probe(session, token=123))
            assert time.monotonic() - begun_s < 0.3
            assert (answer.session, answer.token, answer.status) == (session, 123, status)
            assert 50 <= answer.busy_ms < 600
        assert isinstance(edge.hear(), wire.Verdict)
        assert edge.ask(probe(5)).busy_ms == 0
        assert edge.ask(probe()).status is ProbeStatus.OK


@pytest.mark.parametrize(
    ("sent", "asked", "got"),
    [
        (0, 0, 0),
        (10, 2000, 2000),
        (0, wire.MAX_PROBE_BYTES, PROBE_REPLY_BYTES),
        (100_000, wire.MAX_PROBE_BYTES, 100_000),
    ],
)
def test_a_probe_gets_no_more_than_the_stated_bytes(sent: int, asked: int, got: int) -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        assert len(edge.ask(probe(payload=bytes(sent), reply_bytes=asked)).payload) == got


# ---- who may open


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ({"major": 2}, ErrorCode.VERSION, r"2\.\d.*1\.1"),
        ({"vocabulary_hash": b"8 others"}, ErrorCode.VOCABULARY, "vocabulary.*script"),
        ({"model_fingerprint": b"modeltwo"}, ErrorCode.MODEL, "script"),
        ({"session": 0}, ErrorCode.MALFORMED, r"OPEN\.session"),
    ],
)
def test_an_open_that_does_not_fit_never_reaches_a_worker(wrong: dict, code: ErrorCode, says: str) -> None:
    script = Script()
    with running_front(script) as cloud, cloud.edge() as edge:
        answer = edge.ask(open_message(5, 3)._replace(**wrong))
        assert (answer.session, answer.opening, answer.code) == (wrong.get("session", 5), 3, code)
        assert re.search(says, answer.text), answer.text
        assert isinstance(edge.open(6), wire.Opened)
        assert [m.session for m in script.heard] == [6]


@pytest.mark.parametrize("major", [0, 2, 40000])
def test_hello_of_another_version_is_told_both(major: int) -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        answer = edge.ask(hello(major=major, minor=7))
        assert answer.code is ErrorCode.VERSION
        assert f"{major}.7" in answer.text and f"{wire.MAJOR}.{wire.MINOR}" in answer.text


# ---- routing


def test_sessions_go_to_the_emptiest_worker_and_stay_there() -> None:
    limits = replace(QUICK, workers=2)
    scripts = [Script(), Script()]
    with running_front(scripts.__getitem__, limits) as cloud, cloud.edge() as edge:
        for session in range(1, 9):
            assert isinstance(edge.open(session), wire.Opened)
        opened = [[m.session for m in script.heard] for script in scripts]
        assert sorted(map(len, opened)) == [4, 4]
        for session in range(1, 9):
            edge.open(session, 2)
            edge.who(session, 2)
        for script, sessions in zip(scripts, opened, strict=True):
            assert {m.session for m in script.heard} == set(sessions)


def test_what_belongs_to_no_session_is_told_and_what_is_late_is_dropped() -> None:
    script = Script()
    with running_front(script) as cloud, cloud.edge() as edge:
        answer = edge.ask(draft(5, 3, 40))
        assert answer[:3] == (5, 3, ErrorCode.UNKNOWN)
        edge.open(5, 4)
        for late in (draft(5, 3, 41), wire.Cancel(5, 3), wire.Close(5, 3), open_message(5, 4), open_message(5, 3)):
            edge.say(late)
        edge.say(wire.Close(6, 1))
        edge.say(wire.Cancel(6, 1))
        assert edge.who(5, 4) == os.getpid(), "the session lives, and nothing else was answered"
        assert [type(m) for m in script.heard] == [wire.Open, wire.Draft]
        assert cloud.front.counters.unknown == 1 and cloud.front.counters.late == 5


def test_nobody_outside_can_send_a_worker_away() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        edge.say(wire.Close(0, 0))
        edge.say(open_message(0))
        edge.say(wire.Close(0, 1))
        assert edge.hear().code is ErrorCode.MALFORMED
        assert isinstance(edge.open(5), wire.Opened)
        assert cloud.front.crashes == 0


def test_an_edge_that_reconnects_is_found_by_its_next_word() -> None:
    with running_front(Script()) as cloud:
        with cloud.edge() as first:
            first.open(5)
            first.say(draft(5, 1, SLEEP, 200, nav=True))
            time.sleep(0.05)
        with cloud.edge() as second:
            second.ask(probe(5))  # it only listens, and is heard of nevertheless
            assert isinstance(second.hear(), wire.Verdict)
            assert second.who(5) == os.getpid()
        with cloud.edge() as third:
            third.say(draft(5, 1, SLEEP, 150, nav=True))
            time.sleep(0.05)
            third.socket.close()
        wait_for(lambda: cloud.front.counters.to_edge_gone == 1)
        with cloud.edge() as fourth:
            assert fourth.who(5) == os.getpid(), "gone for a while is not forgotten"


def test_a_session_that_its_worker_forgot_is_unknown_and_an_open_under_way_is_not() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, FORGET))
        wait_for(lambda: cloud.front.sessions == 0)
        assert edge.ask(draft(5, 1, WHO, nav=True)).code is ErrorCode.UNKNOWN
        edge.open(5, 2)
        edge.say(draft(5, 2, SLEEP, 50))
        edge.say(draft(5, 2, FORGET))
        edge.say(open_message(5, 3))  # passes the news of opening 2 on its way
        assert isinstance(edge.hear(), wire.Opened)
        assert edge.who(5, 3) == os.getpid()


def test_idle_sessions_are_forgotten_on_both_sides() -> None:
    script = Script()
    with running_front(script, replace(QUICK, idle_s=0.2)) as cloud, cloud.edge() as edge:
        edge.open(5)
        wait_for(lambda: cloud.front.sessions == 0)
        wait_for(lambda: wire.Close(5, 1) in script.heard)
        assert edge.ask(draft(5, 1, WHO)).code is ErrorCode.UNKNOWN


# ---- junk from outside


def zmtp1(*frames: bytes) -> bytes:
    """The greeting of ZMTP 1.0 (no identity), then messages: what a server without keys takes for a peer."""
    return b"\x01\x00" + b"".join(bytes([len(frame) + 1, 0]) + frame for frame in frames)


JUNK = [
    b"",
    b"\xc1",
    b"\x00" * 100,
    bytes(range(256)),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x93\x05\x01\x01",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    wire.encode(wire.Ready.of(INFO, VOCABULARY)),
    wire.encode(wire.Beat(0, 0, 1, 1)),
    wire.encode(wire.Gone(5, 1)),
    wire.encode(wire.Verdict(5, 1, 0, 0, (1,))),
    wire.encode(wire.Error(5, 1, ErrorCode.UNKNOWN, "x")),
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_what_is_no_message_of_an_edge_is_refused_by_name(junk: bytes) -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        answer = edge.ask(junk)
        assert answer.code is ErrorCode.MALFORMED and ": got " in answer.text
        assert cloud.front.counters.malformed == 1 and len(cloud.log) == 1
        assert edge.open(5) and edge.who(5) == os.getpid()


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with running_front(Script()) as cloud, cloud.edge() as edge:
        assert edge.ask(evil_pickle(str(target))).code is ErrorCode.MALFORMED
    assert not target.exists()


def test_a_flood_of_junk_is_counted_answered_a_little_and_hardly_logged() -> None:
    rng = random.Random(1)
    with running_front(Script()) as cloud, cloud.edge() as junk, cloud.edge() as honest:
        honest.open(5)
        begun_s = time.monotonic()
        for _ in range(2000):
            junk.say(b"\xc1" + rng.randbytes(rng.randrange(40)))
        wait_for(lambda: cloud.front.counters.malformed == 2000)
        lasted_s = time.monotonic() - begun_s
        assert honest.who(5) == os.getpid()
        answers = 0
        while junk.hear(0.1) is not None:
            answers += 1
        assert 1 <= answers <= (2 + lasted_s) * QUICK.refusals_per_s
        assert len(cloud.log) <= 2 + lasted_s / QUICK.complaint_s


def test_raw_bytes_on_the_port_do_no_harm() -> None:
    rng = random.Random(2)
    with running_front(Script()) as cloud, cloud.edge() as edge:
        host, port = "127.0.0.1", int(cloud.address.rpartition(":")[2])
        edge.open(5)
        raws = [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            zmtp1(b"8 bytes?", b"\xc1"),
            zmtp1(wire.encode(open_message(0))),
            b"\xff" + struct.pack(">Q", 1 << 62) + b"\x7f",
            *(rng.randbytes(200) for _ in range(20)),
        ]
        for raw in raws:
            with net.create_connection((host, port)) as connection:
                connection.sendall(raw)
        assert edge.who(5) == os.getpid()
        assert cloud.front.counters.malformed == 0, "a peer that greets as before ZMTP 3 is not heard"


def test_two_thousand_connections_do_no_harm() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        edge.open(5)
        address = ("127.0.0.1", int(cloud.address.rpartition(":")[2]))
        for _ in range(10):
            crowd = [net.create_connection(address) for _ in range(200)]
            for connection in crowd:
                connection.close()
        assert edge.who(5) == os.getpid()


def test_sessions_without_end_cannot_fill_the_table() -> None:
    limits = replace(QUICK, sessions=4)
    with running_front(Script(grants=4), limits) as cloud, cloud.edge() as honest, cloud.edge() as junk:
        honest.open(1)
        most = 0
        for session in range(10, 2010):
            junk.say(open_message(session))
            junk.socket.receive()
            most = max(most, cloud.front.sessions)
        assert most <= limits.most_routes < 100
        wait_for(lambda: cloud.front.sessions <= 4)
        assert honest.who(1) == os.getpid()
        for session in range(10_000, 12_000):
            junk.say(draft(session, 1))
            junk.socket.receive()
        assert cloud.front.sessions <= 4


def test_a_busy_worker_is_no_way_to_fill_the_table() -> None:
    with running_front(Script(), replace(QUICK, sessions=4)) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, SLEEP, 400))
        codes = set()
        for session in range(10, 210):
            edge.say(open_message(session))
        for _ in range(200):
            answer = edge.hear()
            codes.add(answer.code if isinstance(answer, wire.Error) else None)
        assert codes == {None, ErrorCode.FULL} and cloud.front.counters.refused_opens > 0


# ---- those who do not read


def test_an_edge_that_does_not_read_loses_its_session_and_nobody_else_waits() -> None:
    script = Script()
    with running_front(script) as cloud, cloud.edge() as honest, cloud.edge(SHORT_QUEUE) as stalled:
        honest.open(1)
        before_s = _longest_probe(honest)
        stalled.open(2)
        stalled.say(draft(2, 1, FLOOD, 1000))
        during_s = _longest_probe(honest)
        wait_for(lambda: cloud.front.counters.to_edge_dropped > 0)
        wait_for(lambda: wire.Close(2, 1) in script.heard)
        assert any("session 0000000000000002 does not read" in line for line in cloud.log)
        assert during_s < before_s + 0.25
        assert honest.who(1) == os.getpid()
        while not isinstance(answer := stalled.ask(draft(2, 1)), wire.Error):
            assert answer is not None  # what was on its way
        assert answer.code is ErrorCode.UNKNOWN


def _longest_probe(edge: Edge) -> float:
    longest_s = 0.0
    for token in range(50):
        begun_s = time.monotonic()
        assert edge.ask(probe(1, token=token)).token == token
        longest_s = max(longest_s, time.monotonic() - begun_s)
    return longest_s


def test_a_worker_that_does_not_read_costs_messages_and_no_time() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, SLEEP, 1000))
        time.sleep(0.05)
        for _ in range(3000):
            edge.say(draft(5, 1, 40))
        assert edge.ask(probe(5)).status is ProbeStatus.OK
        assert cloud.front.counters.to_worker_dropped > 0
        assert edge.open(6).code is ErrorCode.FULL
        assert any("worker 0 is behind" in line for line in cloud.log)
        wait_for(lambda: isinstance(edge.open(6), wire.Opened))


# ---- workers that fail


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_crash_is_told_to_its_sessions_and_mended(processes: bool) -> None:
    with running_front(Script(), processes=processes) as cloud, cloud.edge() as edge:
        edge.open(5, 3)
        edge.open(6, 8)
        before = edge.who(5, 3)
        begun_s = time.monotonic()
        edge.say(draft(5, 3, CRASH))
        told = {edge.hear()[:3], edge.hear()[:3]}
        assert time.monotonic() - begun_s < 1.0
        assert told == {(5, 3, ErrorCode.UNKNOWN), (6, 8, ErrorCode.UNKNOWN)}
        assert edge.ask(hello()).model == "script", "the front goes on answering"
        wait_for(lambda: isinstance(edge.open(5, 4), wire.Opened), 10.0)
        assert (edge.who(5, 4) != before) == processes
        assert cloud.front.crashes == 1
        assert "worker 0 is down: RuntimeError: as told; starting it again in 0.1 s" in cloud.log
        assert "worker 0 is ready again" in cloud.log


def test_a_killed_worker_is_noticed_at_once_and_the_other_goes_on() -> None:
    with running_front(Script(), replace(QUICK, workers=2), processes=True) as cloud, cloud.edge() as edge:
        for session in range(1, 5):
            edge.open(session)
        holders = {session: edge.who(session) for session in range(1, 5)}
        victim = holders[1]
        os.kill(victim, signal.SIGKILL)
        told = [edge.hear(1.0) for _ in range(2)]
        lost = {session for session, holder in holders.items() if holder == victim}
        assert {m.session for m in told} == lost and {m.code for m in told} == {ErrorCode.UNKNOWN}
        for session in holders.keys() - lost:
            assert edge.who(session) == holders[session]
        assert any("it was killed (SIGKILL)" in line for line in cloud.log)
        for session in lost:
            assert isinstance(edge.open(session, 2), wire.Opened)
        wait_for(lambda: any("ready again" in line for line in cloud.log), 10.0)


def test_a_worker_that_stands_still_is_killed_and_replaced() -> None:
    with running_front(Script(), replace(QUICK, stall_s=0.5), processes=True) as cloud, cloud.edge() as edge:
        edge.open(5)
        stopped = edge.who(5)
        os.kill(stopped, signal.SIGSTOP)
        begun_s = time.monotonic()
        assert edge.hear(3.0)[:3] == (5, 1, ErrorCode.UNKNOWN)
        assert 0.3 < time.monotonic() - begun_s < 2.0
        assert any("it said nothing for" in line for line in cloud.log)
        wait_for(lambda: isinstance(edge.open(5, 2), wire.Opened), 10.0)
        assert edge.who(5, 2) != stopped


def test_a_long_pass_is_no_stall() -> None:
    with running_front(Script(), replace(QUICK, stall_s=1.0)) as cloud, cloud.edge() as edge:
        edge.open(5)
        assert isinstance(edge.ask(draft(5, 1, SLEEP, 600, nav=True)), wire.Verdict)
        assert cloud.front.crashes == 0 and not cloud.log


def test_a_thread_that_stands_still_ends_the_cloud() -> None:
    with running_front(Script(), replace(QUICK, stall_s=0.3)) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, SLEEP, 1500))
        assert cloud.ended.wait(SOON_S)
        assert "worker 0" in str(cloud.errors[0]) and "thread cannot be ended" in str(cloud.errors[0])
        time.sleep(1.0)


def test_a_worker_that_keeps_crashing_is_given_up() -> None:
    with running_front(Script(), replace(QUICK, restarts=1)) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, CRASH))
        assert edge.hear().code is ErrorCode.UNKNOWN
        opening = next(n for n in itertools.count(2) if isinstance(edge.open(5, n), wire.Opened))
        edge.say(draft(5, opening, CRASH))
        assert cloud.ended.wait(SOON_S)
        (error,) = cloud.errors
        assert str(error) == "worker 0 ended 2 times within a minute; the last time: RuntimeError: as told"
        assert error.exit_code == 1


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_model_that_cannot_be_loaded_ends_the_cloud_with_the_workers_reason(processes: bool) -> None:
    fail = UsageError("model /no/such.gguf: no such file;\n give --model")
    with running_front(Script(fail=fail), processes=processes, wait=False) as cloud:
        assert cloud.ended.wait(20.0)
        (error,) = cloud.errors
        assert isinstance(error, UsageError) and error.exit_code == 2
        assert str(error) == "model /no/such.gguf: no such file; give --model"


def test_a_worker_killed_while_loading_ends_the_cloud() -> None:
    with running_front(lambda number: _leave_at_once, processes=True, wait=False) as cloud:
        assert cloud.ended.wait(20.0)
        assert type(cloud.errors[0]) is PipeSDError and "exit code 9" in str(cloud.errors[0])


def _leave_at_once(endpoint: str, *, context: object, stop: object) -> None:
    os._exit(9)


def test_workers_with_different_models_are_refused() -> None:
    scripts = [Script(), Script(info=replace(INFO, fingerprint=b"modeltwo"))]
    with running_front(scripts.__getitem__, replace(QUICK, workers=2), wait=False) as cloud:
        assert cloud.ended.wait(SOON_S)
        assert "another model" in str(cloud.errors[0])


def test_a_worker_that_mumbles_is_heard_no_worse_afterwards() -> None:
    with running_front(Script()) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, MUMBLE))
        assert edge.who(5) == os.getpid()
        assert any("cannot be read" in line for line in cloud.log)


def test_probe_tells_of_a_worker_that_is_down_and_starting() -> None:
    with running_front(Script(), processes=True) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, LEAVE, 3))
        assert edge.hear().code is ErrorCode.UNKNOWN
        assert edge.ask(probe(5)).status in (ProbeStatus.DOWN, ProbeStatus.STARTING)
        assert edge.open(5, 2).code is ErrorCode.STARTING
        wait_for(lambda: edge.ask(probe()).status is ProbeStatus.OK, 10.0)
        assert any("exit code 3" in line for line in cloud.log)


# ---- the end


def test_draining_takes_nothing_new_lets_the_running_finish_and_ends() -> None:
    with running_front(Script(), replace(QUICK, quiet_s=0.2)) as cloud, cloud.edge() as edge, cloud.edge() as other:
        edge.open(5)
        edge.say(draft(5, 1, RUN, 12))
        assert isinstance(edge.hear(), wire.Verdict)
        cloud.front.stop()
        refused = other.open(6)
        assert refused.code is ErrorCode.DRAINING and refused.retry_ms > 0
        assert [edge.hear().pos for _ in range(11)] == list(range(1, 12))
        assert cloud.ended.wait(1.0)
        last = edge.hear(1.0)
        assert last is None or last.code is ErrorCode.DRAINING
        assert not cloud.errors and not cloud.log


@pytest.mark.parametrize("again", [False, True])
def test_draining_ends_in_time_whatever_runs_and_at_once_when_asked_again(again: bool) -> None:
    with running_front(Script(), replace(QUICK, drain_s=0.5)) as cloud, cloud.edge() as edge:
        edge.open(5)
        edge.say(draft(5, 1, RUN, 60))
        edge.hear()
        begun_s = time.monotonic()
        cloud.front.stop()
        if again:
            cloud.front.stop()
        while not isinstance(answer := edge.hear(), wire.Error):
            assert answer is not None
        assert answer[:3] == (5, 1, ErrorCode.DRAINING)
        lasted_s = time.monotonic() - begun_s
        assert lasted_s < 0.4 if again else 0.4 < lasted_s < 2.0
        assert cloud.ended.wait(1.0)


def can_bind(address: str) -> bool:
    with net.socket() as listener:
        listener.setsockopt(net.SOL_SOCKET, net.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            listener.listen()
        except OSError:
            return False
        return True


def test_an_idle_front_ends_at_once_and_frees_its_port() -> None:
    with running_front(Script(), replace(QUICK, quiet_s=0.2)) as cloud, cloud.edge() as edge:
        edge.open(5)
        time.sleep(0.3)
        begun_s = time.monotonic()
        cloud.front.stop()
        assert cloud.ended.wait(SOON_S)
        assert time.monotonic() - begun_s < 0.5
        wait_for(lambda: can_bind(cloud.address), 1.0)
