"""The emulated link, with real sockets: figures with wide margins, since the machine may be busy."""

from __future__ import annotations

import hashlib
import math
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipesd.address import split_address
from pipesd.errors import PipeSDError, UsageError
from pipesd.sim.lanes import Line
from pipesd.sim.proxy import LinkProxy

SLACK_S = 0.05  # what a busy machine may add to a median


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family)
    server.settimeout(10)
    return server


def address_of(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(link: LinkProxy) -> socket.socket:
    client = socket.create_connection(split_address(link.address), timeout=10)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def accept(server: socket.socket) -> socket.socket:
    accepted, _ = server.accept()
    accepted.settimeout(10)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return accepted


@contextmanager
def linked(**settings: Any) -> Iterator[tuple[LinkProxy, socket.socket, socket.socket]]:
    """A link, and the two ends of a connection over it."""
    with (
        listening() as server,
        LinkProxy(address_of(server), **settings) as link,
        connect(link) as client,
        accept(server) as far,
    ):
        yield link, client, far


def exactly(end: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        data = end.recv(min(length - len(got), 1 << 16))
        assert data, f"the stream ended after {len(got)} of {length} bytes"
        got += data
    return got


def hears_nothing(end: socket.socket, seconds: float) -> bool:
    end.settimeout(seconds)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(10)
    return False


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen within 10 s"
        time.sleep(0.005)


def round_trips_s(client: socket.socket, far: socket.socket, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        client.sendall(b"x" * 100)
        far.sendall(exactly(far, 100))
        exactly(client, 100)
        times.append(time.perf_counter() - begin)
    return times


def transfer_s(sender: socket.socket, receiver: socket.socket, data: bytes) -> float:
    begin = time.perf_counter()
    thread = threading.Thread(target=sender.sendall, args=(data,))
    thread.start()
    assert exactly(receiver, len(data)) == data
    thread.join()
    return time.perf_counter() - begin


def test_line_serialises_then_delays() -> None:
    line = Line(delay_s=0.5, bytes_per_s=100.0, queue_bytes=1000)
    assert line.arrival_s(1.0, 100) == pytest.approx(1.0 + 1.0 + 0.5)
    assert line.arrival_s(1.2, 50) == pytest.approx(2.0 + 0.5 + 0.5)  # waits for the first, the delays overlap
    assert line.arrival_s(9.0, 50) == pytest.approx(9.0 + 0.5 + 0.5)  # an idle line saves nothing up
    assert line.most_bytes == 1000 + 50


def test_line_without_a_rate_holds_a_bounded_flight() -> None:
    assert Line(0.0, math.inf, 1000).most_bytes == 1000
    assert 1000 < Line(0.1, math.inf, 1000).most_bytes < 1 << 25


def test_delay_is_one_way_in_each_direction() -> None:
    with linked() as (link, client, far):
        plain_s = statistics.median(round_trips_s(client, far, 20))
        link.change(delay_s=0.02)
        slow = round_trips_s(client, far, 10)
    assert plain_s < SLACK_S
    assert min(slow) >= 0.04 - 1e-4
    assert statistics.median(slow) < 0.04 + SLACK_S


@pytest.mark.parametrize("up", [True, False])
def test_rate_holds_in_its_direction_only(up: bool) -> None:
    data = random.Random(1).randbytes(200_000)
    with linked() as (link, client, far):
        link.change(**{"up_bytes_per_s" if up else "down_bytes_per_s": 1e6})
        limited_s = transfer_s(*((client, far) if up else (far, client)), data)
        free_s = transfer_s(*((far, client) if up else (client, far)), data)
    assert 0.2 * 0.98 <= limited_s < 0.2 * 2 + SLACK_S
    assert free_s < limited_s


def test_connections_share_the_line() -> None:
    data = bytes(100_000)
    with linked(up_bytes_per_s=1e6) as (link, client, far), connect(link) as second:
        begin = time.perf_counter()
        for sender in (client, second):
            threading.Thread(target=sender.sendall, args=(data,)).start()
        exactly(far, len(data))
        wait_until(lambda: link.counts().bytes_up == 2 * len(data))
        both_s = time.perf_counter() - begin
    assert both_s >= 0.2 * 0.98


def test_large_transfers_arrive_whole_both_ways_at_once_while_the_link_changes() -> None:
    up, down = random.Random(2).randbytes(3_000_000), random.Random(3).randbytes(2_000_000)
    with linked(delay_s=0.002) as (link, client, far):
        got: dict[str, str] = {}

        def receive(name: str, end: socket.socket, length: int) -> None:
            got[name] = hashlib.sha256(exactly(end, length)).hexdigest()

        threads = [
            threading.Thread(target=client.sendall, args=(up,)),
            threading.Thread(target=far.sendall, args=(down,)),
            threading.Thread(target=receive, args=("up", far, len(up))),
            threading.Thread(target=receive, args=("down", client, len(down))),
        ]
        for thread in threads:
            thread.start()
        chance = random.Random(4)
        while any(thread.is_alive() for thread in threads):
            link.change(delay_s=chance.choice([0.0, 0.001, 0.01]), up_bytes_per_s=chance.choice([2e7, math.inf]))
            if chance.random() < 0.2:
                link.stall(0.005)
            time.sleep(0.005)
        counts = link.counts()
    assert got == {"up": hashlib.sha256(up).hexdigest(), "down": hashlib.sha256(down).hexdigest()}
    assert (counts.bytes_up, counts.bytes_down, counts.lost_bytes) == (len(up), len(down), 0)


def test_shorter_delay_overtakes_nothing() -> None:
    with linked(delay_s=0.4) as (link, client, far):
        client.sendall(b"first ")
        wait_until(lambda: link.counts().under_way_bytes == 6)
        link.change(delay_s=0.0)
        client.sendall(b"second")
        assert exactly(far, 12) == b"first second"


def test_black_hole_swallows_and_restores() -> None:
    with linked(delay_s=0.4) as (link, client, far):
        client.sendall(b"before ")
        wait_until(lambda: link.counts().under_way_bytes == 7)
        link.black_hole()
        link.change(delay_s=0.1)
        client.sendall(b"behind")
        far.sendall(b"answer")
        assert hears_nothing(far, 0.5)
        assert hears_nothing(client, 0.01)
        begin = time.monotonic()
        link.black_hole(False)
        assert exactly(far, 13) == b"before behind"
        assert exactly(client, 6) == b"answer"
        assert time.monotonic() - begin >= 0.1  # sent again, it has the link to cross
        assert link.counts().lost_bytes == 0


@pytest.mark.parametrize("up", [True, False])
def test_black_hole_of_one_direction(up: bool) -> None:
    with linked() as (link, client, far):
        link.black_hole(up=up, down=not up)
        swallowed, other = (client, far) if up else (far, client)
        swallowed.sendall(b"lost?")
        other.sendall(b"heard")
        assert exactly(swallowed, 5) == b"heard"
        assert hears_nothing(other, 0.1)
        link.black_hole(False)
        assert exactly(other, 5) == b"lost?"


def test_black_hole_swallows_the_end_of_a_stream_and_new_connections() -> None:
    with listening() as server, LinkProxy(address_of(server)) as link, connect(link) as client, accept(server) as far:
        link.black_hole()
        client.close()
        assert hears_nothing(far, 0.1)
        with connect(link) as second:
            second.sendall(b"hello")
            with accept(server) as other_far:
                assert hears_nothing(other_far, 0.1)
                link.black_hole(False)
                assert exactly(other_far, 5) == b"hello"
        assert far.recv(1) == b""


def test_black_hole_stops_the_sender_after_a_bounded_amount() -> None:
    with linked() as (link, client, _):
        link.black_hole()
        client.settimeout(0.3)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 1 << 26:
                sent += client.send(bytes(1 << 16))
        assert sent < 1 << 24


def test_receiver_that_pauses_loses_nothing() -> None:
    data = random.Random(5).randbytes(1 << 24)  # more than the buffers of all sockets on the way
    with linked() as (link, client, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        thread = threading.Thread(target=client.sendall, args=(data,))
        thread.start()
        wait_until(lambda: link.counts().under_way_bytes >= 1 << 18)
        begin_s = time.process_time()
        time.sleep(0.3)  # everything is full, and nobody spins
        assert time.process_time() - begin_s < 0.15
        assert exactly(far, len(data)) == data
        thread.join()


def test_stall_delivers_late_but_everything() -> None:
    with linked() as (link, client, far):
        begin = time.monotonic()
        link.stall(0.2)
        client.sendall(b"one")
        assert exactly(far, 3) == b"one"
        assert 0.2 <= time.monotonic() - begin < 2.0
        assert statistics.median(round_trips_s(client, far, 5)) < SLACK_S


def test_cut_closes_both_ends_and_loses_what_was_under_way() -> None:
    with linked(delay_s=30.0) as (link, client, far):
        client.sendall(b"never heard")
        wait_until(lambda: link.counts().under_way_bytes == 11)
        assert link.cut() == 1
        assert far.recv(100) == b""
        assert client.recv(100) == b""
        counts = link.counts()
        assert (counts.open, counts.bytes_up, counts.under_way_bytes, counts.lost_bytes) == (0, 0, 0, 11)
        assert link.cut() == 0
        link.change(delay_s=0.0)
        with connect(link) as again:  # the link itself lives
            again.sendall(b"again")
            wait_until(lambda: link.counts().bytes_up == 5)


def test_cut_empties_the_queue_of_a_slow_line() -> None:
    with listening() as server, LinkProxy(address_of(server), up_bytes_per_s=10e3) as link:
        with connect(link) as client, accept(server) as far:
            client.sendall(bytes(100_000))  # ten seconds of line
            exactly(far, 1)
            link.cut()
        with connect(link) as client, accept(server) as far:
            begin = time.monotonic()
            client.sendall(b"fresh")
            assert exactly(far, 5) == b"fresh"
            assert time.monotonic() - begin < 3


def test_reset_is_a_reset_at_both_ends() -> None:
    with linked() as (link, client, far):
        assert link.reset() == 1
        for end in (client, far):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_reset_by_one_end_reaches_the_other_in_due_time() -> None:
    with linked(delay_s=0.1) as (link, client, far):
        begin = time.monotonic()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        assert time.monotonic() - begin >= 0.1
        wait_until(lambda: link.counts().open == 0)


def test_one_direction_may_end_while_the_other_goes_on() -> None:
    with linked(delay_s=0.01) as (link, client, far):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert exactly(far, 8) == b"question"
        assert far.recv(1) == b""
        far.sendall(b"answer")
        far.close()
        assert exactly(client, 6) == b"answer"
        assert client.recv(1) == b""
        wait_until(lambda: link.counts().open == 0)


def test_end_that_is_gone_is_told_to_the_one_that_writes() -> None:
    with linked() as (link, client, far):
        far.close()
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"is anybody there?")
                time.sleep(0.005)
        wait_until(lambda: link.counts().open == 0)


def test_refuse_and_accept_again_on_the_same_port() -> None:
    with linked() as (link, client, far):
        address = link.address
        link.refuse()
        link.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(link)
        assert round_trips_s(client, far, 1)  # what is open stays open
        link.refuse(False)
        assert link.address == address
        connect(link).close()
        wait_until(lambda: link.counts().connections == 2)


def test_target_that_does_not_listen() -> None:
    with listening() as server:
        address = address_of(server)
    with LinkProxy(address) as link:
        with pytest.raises(ConnectionResetError), connect(link) as client:  # the reset may even beat `connect`
            client.recv(1)
        assert link.counts().failed == 1
        with listening(port=split_address(address)[1]) as server, connect(link), accept(server):
            assert link.counts().open == 1


def test_target_on_ipv6_and_by_name() -> None:
    try:
        server = listening("::1")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with server, LinkProxy(address_of(server), listen="tcp://[::1]:0") as link:
        assert link.address.startswith("tcp://[::1]:")
        with connect(link) as client, accept(server) as far:
            assert round_trips_s(client, far, 1)
    with listening() as server:
        port = split_address(address_of(server))[1]
        with LinkProxy(f"tcp://localhost:{port}") as link, connect(link) as client, accept(server) as far:
            assert round_trips_s(client, far, 1)  # also where localhost is ::1 first


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    folder = Path("/dev/fd")
    with listening() as server:
        threads, descriptors = threading.active_count(), len(list(folder.iterdir()))
        for at in range(10):
            link = LinkProxy(address_of(server), delay_s=0.01 * (at % 2))
            with connect(link) as client, accept(server) as far:
                client.sendall(b"x")
                link.refuse(at % 3 == 0)
                link.close()
                assert far.recv(2) in (b"", b"x")
            link.close()
        assert threading.active_count() == threads
        assert len(list(folder.iterdir())) == descriptors
        with pytest.raises(PipeSDError, match="closed"):
            link.cut()


def test_commands_from_many_threads() -> None:
    with linked() as (link, client, far):

        def command(at: int) -> None:
            for _ in range(50):
                link.change(delay_s=at * 1e-4)
                link.counts()

        threads = [threading.Thread(target=command, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        assert round_trips_s(client, far, 20)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    "settings",
    [
        {"delay_s": -0.1},
        {"delay_s": math.nan},
        {"delay_s": math.inf},
        {"up_bytes_per_s": 0.0},
        {"down_bytes_per_s": -1.0},
        {"up_bytes_per_s": math.nan},
        {"queue_bytes": 0},
        {"listen": "http://127.0.0.1:1"},
    ],
)
def test_bad_figures_are_refused_by_name(settings: dict[str, float]) -> None:
    threads = threading.active_count()
    with pytest.raises(UsageError):
        LinkProxy("tcp://127.0.0.1:9", **settings)  # type: ignore[arg-type]
    assert threading.active_count() == threads


def test_bad_change_changes_nothing() -> None:
    with linked() as (link, client, far):
        with pytest.raises(UsageError):
            link.change(delay_s=5.0, up_bytes_per_s=0.0)
        assert round_trips_s(client, far, 1)[0] < 5.0


def test_port_in_use_is_refused_even_to_another_link() -> None:
    with listening() as server, LinkProxy("tcp://127.0.0.1:9") as link:
        for taken in (address_of(server), link.address):
            with pytest.raises(UsageError, match="cannot listen"):
                LinkProxy("tcp://127.0.0.1:9", listen=taken)


def run_by_hand(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipesd.sim.proxy", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_by_hand(number: signal.Signals, code: int) -> None:
    with listening() as server:
        process = run_by_hand("--to", address_of(server), "--delay-ms", "20", "--up-mbps", "8", "--down-mbps", "80")
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with socket.create_connection(split_address(address), timeout=10) as client, accept(server) as far:
                assert round_trips_s(client, far, 1)[0] >= 0.04
                assert transfer_s(client, far, bytes(100_000)) >= 0.1 * 0.98
                process.send_signal(number)
                output, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == code
    assert output == ""
    assert "bytes_up=100100" in errors
    assert "Traceback" not in errors


def test_by_hand_with_nonsense() -> None:
    for arguments in (["--to", "127.0.0.1"], ["--to", "127.0.0.1:9", "--up-mbps", "0"], ["--to", "127.0.0.1:9", "--x"]):
        process = run_by_hand(*arguments)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 2
        assert output == ""
        assert "error: " in errors
        assert "Traceback" not in errors
