"""The sockets against real ones on the loopback: each trap of libzmq, and what is promised instead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket as net
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import zmq

from pipesd.errors import PipeSDError, Unreachable, UsageError
from pipesd.protocol.messages import MAX_INTERNAL_BYTES, MAX_MESSAGE_BYTES
from pipesd.sim.proxy import LinkProxy
from pipesd.transport import (
    EDGE,
    FRONT,
    PAIR,
    Context,
    Delivery,
    EdgeSocket,
    FrontSocket,
    Link,
    SocketSettings,
    edge_socket,
    front_socket,
    pair_connect,
    pair_listen,
)

SOON_S = 5.0  # far above what anything here takes


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def front(context: Context) -> Iterator[FrontSocket]:
    with front_socket(context, "tcp://127.0.0.1:0") as made:
        yield made


def wait_for(what: Any, timeout_s: float = SOON_S) -> Any:
    """The first true value of `what()`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < deadline_s, "not within the time"
        time.sleep(0.002)


def greet(edge: EdgeSocket, front: FrontSocket, payload: bytes = b"hello") -> bytes:
    """Sends once connected; the routing id."""
    wait_for(lambda: edge.send(payload))
    routing_id, got = wait_for(front.receive)
    assert got == payload
    return bytes(routing_id)


def by_name(*ips: str) -> Any:
    """A name server that knows one name, with the port asked for."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(net.AF_INET6 if ":" in ip else net.AF_INET, net.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    return resolve


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


# ---- options


def test_options_of_each_kind(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge, pair_listen(context, "inproc://a") as pair:
        for socket, settings in ((edge, EDGE), (front, FRONT), (pair, PAIR)):
            get = socket.zmq_socket.getsockopt
            assert get(zmq.SNDHWM) == settings.send_messages > 0
            assert get(zmq.RCVHWM) == settings.receive_messages
            assert get(zmq.MAXMSGSIZE) == settings.message_bytes > 0
            assert get(zmq.HANDSHAKE_IVL) == 3000
            assert get(zmq.ROUTING_ID) == b"", "no fixed identity"
            assert not get(zmq.HEARTBEAT_IVL) or not get(zmq.RCVHWM), "libzmq would abort"
        get = edge.zmq_socket.getsockopt
        beats = (EDGE.heartbeat_ms, EDGE.heartbeat_timeout_ms, EDGE.heartbeat_timeout_ms)
        assert (get(zmq.HEARTBEAT_IVL), get(zmq.HEARTBEAT_TIMEOUT), get(zmq.HEARTBEAT_TTL)) == beats
        assert beats[0] == 500 and beats[1] * 64_000 / 8 >= 80_000 * 1000, "80 KB must cross 64 kbit/s meanwhile"
        assert get(zmq.IMMEDIATE) == 1
        assert 200 <= int(get(zmq.LINGER)) <= 500
    assert FRONT.receive_messages > 0, "strangers must not fill our memory"
    assert FRONT.message_bytes >= MAX_MESSAGE_BYTES and EDGE.message_bytes >= MAX_MESSAGE_BYTES
    assert PAIR.message_bytes >= MAX_INTERNAL_BYTES


# ---- the other side is away


def test_a_send_to_nobody_says_so_and_leaves_nothing_behind(context: Context) -> None:
    with front_socket(context, "tcp://127.0.0.1:0") as first:
        address = first.address
    wait_for(lambda: _refused(address))
    with edge_socket(context, address) as edge:
        assert [edge.send(b"early") for _ in range(10)] == [False] * 10
        assert edge.connection_state() is Link.NEVER
        assert edge.receive(0.02) is None
        with front_socket(context, address) as front:
            routing_id = greet(edge, front, b"first")  # nothing of the early ones comes before it
            assert edge.connection_state() is Link.CONNECTED
            assert front.send(routing_id, b"answer") is Delivery.SENT
            assert edge.receive(SOON_S) == b"answer"
            assert front.receive() is None
        wait_for(lambda: edge.connection_state() is Link.LOST)
        wait_for(lambda: not edge.send(b"lost"))
        with front_socket(context, address) as again:  # restart right after a stop, same port
            greet(edge, again, b"second")
            assert edge.connection_state() is Link.CONNECTED


def _refused(address: str) -> bool:
    with net.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port_of(address))) != 0


def test_closing_with_nobody_there_is_quick_and_with_somebody_delivers_the_last_word() -> None:
    context = Context()
    begun_s = time.monotonic()
    edge_socket(context, "tcp://127.0.0.1:1").close()
    context.term()
    assert time.monotonic() - begun_s < 1.0

    context = Context()
    with front_socket(context, "tcp://127.0.0.1:0") as front:
        edge = edge_socket(context, front.address)
        greet(edge, front)
        edge.send(b"close")
        edge.close()
        edge.close()
        assert wait_for(front.receive)[1] == b"close"
    context.term()


def test_a_pair_says_when_the_other_end_is_away_or_behind(context: Context) -> None:
    small = replace(PAIR, send_messages=4, receive_messages=4)
    with pair_listen(context, "inproc://pair", settings=small) as front:
        assert not front.send(b"nobody")
        with pair_connect(context, "inproc://pair", settings=small) as worker:
            assert worker.send(b"ready") and front.receive(SOON_S) == b"ready"
            sent = 0
            while front.send(b"x"):
                sent += 1
                assert sent <= 8, "bounded"
            assert worker.receive() == b"x"
        wait_for(lambda: not front.send(b"gone"))


# ---- peers of the front


def test_an_answer_to_a_peer_that_is_gone_is_told(context: Context, front: FrontSocket) -> None:
    assert front.send(b"\0abcd", b"x") is Delivery.GONE
    edge = edge_socket(context, front.address)
    routing_id = greet(edge, front)
    edge.close()
    wait_for(lambda: front.receive() is None and front.send(routing_id, b"x") is Delivery.GONE)


def test_a_peer_that_does_not_read_fills_its_own_queue_only(context: Context, front: FrontSocket) -> None:
    short = SocketSettings(send_messages=64, receive_messages=4)
    with edge_socket(context, front.address, settings=short) as stalled, edge_socket(context, front.address) as honest:
        stalled_id, honest_id = greet(stalled, front), greet(honest, front)
        sent, begun_s = 0, time.monotonic()
        while front.send(stalled_id, bytes(20_000)) is Delivery.SENT:
            sent += 1
            assert sent < 5000, "bounded"
        assert front.send(stalled_id, b"x") is Delivery.FULL
        assert front.send(honest_id, b"for you") is Delivery.SENT
        assert honest.receive(SOON_S) == b"for you"
        assert time.monotonic() - begun_s < SOON_S
        assert stalled.receive() == bytes(20_000)


# ---- parts and sizes


@pytest.mark.parametrize("parts", [2, 3, 60_001])
def test_the_front_refuses_any_other_number_of_parts(context: Context, front: FrontSocket, parts: int) -> None:
    with _raw_dealer(context, front.address) as raw:
        raw.send_multipart([b"x"] * parts)
        raw.send(b"good")
        steps = 0

        def next_message() -> tuple[bytes, bytes] | None:
            nonlocal steps
            steps += 1
            return front.receive()

        assert wait_for(next_message)[1] == b"good"
        assert front.refused == 1
        assert steps > parts / 1000, "the caller gets its turn in between"


def test_the_edge_refuses_any_other_number_of_parts(context: Context) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    with edge_socket(context, router.getsockopt_string(zmq.LAST_ENDPOINT)) as edge:
        wait_for(lambda: edge.send(b"hello"))
        routing_id, _ = router.recv_multipart()
        router.send_multipart([routing_id, b"two", b"parts"])
        router.send_multipart([routing_id, b"good"])
        assert edge.receive(SOON_S) == b"good"
        assert edge.refused == 1
    router.close(linger=0)


def test_an_overlong_part_ends_that_connection_only(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as honest, _raw_dealer(context, front.address) as raw:
        routing_id = greet(honest, front)
        raw.send(bytes(FRONT.message_bytes + 1))
        time.sleep(0.05)
        assert front.send(routing_id, b"still there") is Delivery.SENT
        assert honest.receive(SOON_S) == b"still there"
        assert front.receive() is None


@contextmanager
def _raw_dealer(context: Context, address: str) -> Iterator[zmq.Socket[bytes]]:
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(address)
    try:
        yield raw
    finally:
        raw.close()


# ---- binding


def test_a_port_in_use_is_named(context: Context, front: FrontSocket) -> None:
    with pytest.raises(UsageError, match=rf"{front.address}: port {port_of(front.address)} is in use"):
        front_socket(context, front.address)


@pytest.mark.parametrize("bind", ["tcp://192.0.2.1:7421", "tcp://127.0.0.1:70000", "::1"])
def test_what_cannot_be_bound_is_refused_in_one_line(context: Context, bind: str) -> None:
    with pytest.raises(UsageError) as refused:
        front_socket(context, bind)
    assert "tcp://" in str(refused.value) and "\n" not in str(refused.value)


def test_a_name_can_be_bound_and_a_name_without_address_cannot(context: Context) -> None:
    with front_socket(context, "localhost:0") as front, edge_socket(context, front.address) as edge:
        greet(edge, front)
    with front_socket(context, "home:0", resolve=by_name("::1", "127.0.0.1")) as front:
        assert front.address.startswith("tcp://127.0.0.1:"), "what most others would try"
    with pytest.raises(Unreachable, match="has no address"):
        edge_socket(context, "nowhere.invalid:1", resolve=_knows_nothing)


def _knows_nothing(*_: Any, **__: Any) -> Any:
    raise net.gaierror(-2, "Name or service not known")


# ---- names with addresses of both kinds

has_ipv6 = pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 on this machine")


def test_a_name_of_both_kinds_reaches_a_cloud_that_has_only_ipv4(context: Context, front: FrontSocket) -> None:
    address = f"tcp://home:{port_of(front.address)}"
    for order in (("::1", "127.0.0.1"), ("127.0.0.1", "::1")):
        with edge_socket(context, address, resolve=by_name(*order)) as edge:
            routing_id = greet(edge, front)
            assert front.send(routing_id, b"answer") is Delivery.SENT
            assert edge.receive(SOON_S) == b"answer"
            assert edge.connection_state() is Link.CONNECTED


@has_ipv6
def test_ipv6_alone_works(context: Context) -> None:
    with front_socket(context, "tcp://[::1]:0") as front, edge_socket(context, front.address) as edge:
        assert front.address.startswith("tcp://[::1]:")
        greet(edge, front)


@has_ipv6
def test_a_cloud_on_both_kinds_sees_one_connection_of_an_edge(context: Context) -> None:
    with front_socket(context, "*:0") as front:
        address = f"tcp://home:{port_of(front.address)}"
        with edge_socket(context, address, resolve=by_name("::1", "127.0.0.1")) as edge:
            first = greet(edge, front)
            assert {greet(edge, front) for _ in range(20)} <= {first}


@has_ipv6
def test_an_edge_finds_a_cloud_that_moved_to_the_other_kind(context: Context) -> None:
    with front_socket(context, "tcp://127.0.0.1:0") as first:
        port = port_of(first.address)
        edge = edge_socket(context, f"home:{port}", resolve=by_name("::1", "127.0.0.1"))
        greet(edge, first)
    with front_socket(context, f"tcp://[::1]:{port}") as second, edge:
        wait_for(lambda: edge.send(b"hello") and second.receive())
        assert edge.connection_state() is Link.CONNECTED


# ---- why there is no answer


def test_explains_why_there_is_no_answer(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        greet(edge, front)
        assert "does not answer" in edge.explain()
    with edge_socket(context, "127.0.0.1:1") as edge:
        assert "nothing listens there" in edge.explain()
    with _http_server() as port, edge_socket(context, f"127.0.0.1:{port}") as edge:
        wait_for(lambda: edge.connection_state() is Link.FOREIGN)
        assert "no PipeSD cloud" in edge.explain()


def test_a_stranger_that_greets_wrongly_for_hours_does_not_block_the_socket() -> None:
    # Each attempt leaves events in the monitor's queue, which nobody reads here. Were it bounded, libzmq's own thread
    # would wait for it after some two thousand of them, and the attempts would end.
    context = Context()
    quick = replace(EDGE, reconnect_ms=1, reconnect_most_ms=1)
    with _http_server() as port:
        edge = edge_socket(context, f"127.0.0.1:{port}", settings=quick)
        edge.zmq_socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        wait_for(lambda: _http_server.accepted > 1200, 20.0)
        assert edge.connection_state() is Link.FOREIGN
        edge.close()
    context.term()


class _HttpServer:
    """Answers anything as a web server does, and hangs up."""

    accepted = 0

    @contextmanager
    def __call__(self) -> Iterator[int]:
        self.accepted = 0
        with net.create_server(("127.0.0.1", 0), backlog=128) as listener:
            thread = threading.Thread(target=self._serve, args=(listener,))
            thread.start()
            try:
                yield listener.getsockname()[1]
            finally:
                listener.shutdown(net.SHUT_RDWR)
                thread.join()

    def _serve(self, listener: net.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                self.accepted += 1
                try:
                    connection.recv(64)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    continue


_http_server = _HttpServer()


def test_a_dead_link_is_noticed_on_both_sides_and_heals(context: Context, front: FrontSocket) -> None:
    hasty = replace(EDGE, heartbeat_ms=300, heartbeat_timeout_ms=900)
    with LinkProxy(front.address) as link, edge_socket(context, link.address, settings=hasty) as edge:
        routing_id = greet(edge, front)
        time.sleep(0.5)  # one heartbeat has told the front how long it may wait for the next
        link.black_hole()
        begun_s = time.monotonic()
        wait_for(lambda: edge.connection_state() is Link.LOST)
        wait_for(lambda: front.receive() is None and front.send(routing_id, b"x") is Delivery.GONE)
        assert time.monotonic() - begun_s < 2.5
        link.black_hole(False)
        greet(edge, front)


UNREAD = """
import sys, time
import zmq
from pipesd.transport import *

context = Context()
with front_socket(context, "tcp://127.0.0.1:0") as front:
    edge = edge_socket(context, front.address)
    while not edge.send(b"hello"):
        time.sleep(0.01)
    while not (got := front.receive()):
        time.sleep(0.01)
    if sys.argv[1] == "edge":  # does not read what it gets, and loses the cloud
        for _ in range(200):
            front.send(got[0], bytes(30_000))
    else:  # a crowd sends what nobody reads, and hangs up
        raw = context.socket(zmq.DEALER)
        raw.heartbeat_ivl, raw.heartbeat_ttl = 100, 1000
        raw.connect(front.address)
        for _ in range(900):
            raw.send(bytes(30_000))
        time.sleep(0.3)
        raw.close(linger=0)
        time.sleep(1.2)
        edge.send(b"still there?")
        while (got := front.receive()) is None or got[1] != b"still there?":
            time.sleep(0.0005)
time.sleep(1.2)
edge.close()
context.term()
print("alive")
"""


@pytest.mark.parametrize("who", ["edge", "front"])
def test_what_is_unread_when_a_connection_breaks_does_not_abort_the_process(who: str) -> None:
    done = subprocess.run([sys.executable, "-c", UNREAD, who], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


# ---- one owner


def test_another_thread_gets_an_error_and_the_owner_goes_on(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        greet(edge, front)
        errors = []

        def misuse() -> None:
            for action in (edge.close, lambda: edge.send(b"x"), edge.receive, edge.connection_state) * 250:
                try:
                    action()
                except PipeSDError as error:
                    errors.append(str(error))

        thread = threading.Thread(target=misuse)
        thread.start()
        while thread.is_alive():
            greet(edge, front)
        thread.join()
        assert len(errors) == 1000 and all("another thread" in error for error in errors)
        greet(edge, front)


def test_a_socket_can_change_hands(context: Context, front: FrontSocket) -> None:
    edge = edge_socket(context, front.address)

    def take_over() -> None:
        edge.adopt()
        wait_for(lambda: edge.send(b"from the new owner"))

    thread = threading.Thread(target=take_over)
    thread.start()
    thread.join()
    assert wait_for(front.receive)[1] == b"from the new owner"
    with pytest.raises(PipeSDError, match="another thread"):
        edge.close()
    edge.adopt()
    edge.close()
    with pytest.raises(PipeSDError, match="closed"):
        edge.send(b"x")


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        greet(edge, front)
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()

        def child() -> None:
            for action in (lambda: edge.send(b"x"), edge.receive, edge.adopt, edge.connection_state):
                try:
                    action()
                except PipeSDError as error:
                    there.send_bytes(str(error).encode())
            edge.close()
            there.send_bytes(b"over")

        process = fork.Process(target=child)
        process.start()
        told = [here.recv_bytes().decode() for _ in range(5) if here.poll(SOON_S)]
        process.join(SOON_S)
        assert process.exitcode == 0
        assert len(told) == 5 and all("forked" in line for line in told[:4]) and told[4] == "over"
        greet(edge, front)


# ---- waiting


def test_waits_end_in_time(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        greet(edge, front)
        for wait_s in (0.0, 0.0003, 0.05):
            begun_s = time.monotonic()
            assert edge.receive(wait_s) is None
            assert wait_s <= time.monotonic() - begun_s + 0.001 < wait_s + 1.0


def test_wake_ends_a_wait_from_any_thread(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        routing_id = greet(edge, front)
        begun_s = time.monotonic()
        timer = threading.Timer(0.05, edge.wake)
        timer.start()
        assert edge.receive(SOON_S) is None
        assert time.monotonic() - begun_s < 1.0
        timer.join()
        for _ in range(100_000):  # never blocks, whoever calls it how often
            edge.wake()
        assert edge.receive(SOON_S) is None, "the next wait ends too"
        begun_s = time.monotonic()
        assert edge.receive(0.05) is None
        assert time.monotonic() - begun_s >= 0.05, "and no other"
        front.send(routing_id, b"answer")
        assert edge.receive(SOON_S) == b"answer"
    edge.wake()


def test_an_interrupt_ends_a_wait(context: Context, front: FrontSocket) -> None:
    with edge_socket(context, front.address) as edge:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begun_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            edge.receive(SOON_S)
        assert time.monotonic() - begun_s < 1.0
        timer.join()
        greet(edge, front)
