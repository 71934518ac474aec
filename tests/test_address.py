"""Addresses as people write them: either they work, or one line shows a right example."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from pipesd.address import Reach, candidates, is_loopback, parse_address, reach
from pipesd.errors import Unreachable, UsageError


def answers(*ips: str) -> Any:
    """A name server that knows one name."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in ip], socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    return resolve


def knows_nothing(host: str, port: int, **_: Any) -> list[Any]:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("tcp://127.0.0.1:7421", "tcp://127.0.0.1:7421"),
        (" localhost:1 ", "tcp://localhost:1"),
        ("TCP://cloud.example:65535", "tcp://cloud.example:65535"),
        ("[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[2001:db8::7]:5555", "tcp://[2001:db8::7]:5555"),
        ("münchen.example:7421", "tcp://münchen.example:7421"),
    ],
)
def test_what_can_be_understood_gets_one_spelling(text: str, want: str) -> None:
    assert parse_address(text) == want
    assert parse_address(want) == want


@pytest.mark.parametrize("text", ["*:7421", "tcp://127.0.0.1:0", "tcp://[::]:*", "0.0.0.0:1"])
def test_a_cloud_may_bind_to_everything_and_to_a_free_port(text: str) -> None:
    parse_address(text, bind=True)
    with pytest.raises(UsageError):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("::1", "tcp://[::1]:7421"),
        ("::1:5555", "tcp://[::1]:5555"),
        ("tcp://::1", "tcp://[::1]:7421"),
        ("[::1]", "tcp://[::1]:7421"),
        ("[127.0.0.1]:5", "tcp://[::1]:5"),
        ("localhost", "tcp://localhost:7421"),
        ("tcp://cloud.example", "tcp://cloud.example:7421"),
        ("cloud:0", "tcp://cloud:7421"),
        ("cloud:65536", "tcp://cloud:7421"),
        ("cloud:abc", "tcp://cloud:7421"),
        ("cloud:-1", "tcp://cloud:7421"),
        ("cloud:", "tcp://cloud:7421"),
        ("cloud:٣", "tcp://cloud:7421"),
        ("http://", "tcp://127.0.0.1:7421"),
        ("http://cloud.example:8000/v1?x#y", "tcp://cloud.example:8000"),
        ("ipc:///run/x", "tcp://127.0.0.1:7421"),
        ("tcp://me@cloud:7421", "tcp://cloud:7421"),
        ("tcp://cloud:7421/", "tcp://cloud:7421"),
        ("256.1.1.1:7", "tcp://127.0.0.1:7"),
        ("1.2.3:7", "tcp://127.0.0.1:7"),
        ("a b:7", "tcp://127.0.0.1:7"),
        ("a..b:7", "tcp://127.0.0.1:7"),
        ("x" * 300 + ":7", "tcp://127.0.0.1:7"),
        ("", "tcp://127.0.0.1:7421"),
        (":7", "tcp://127.0.0.1:7"),
        ("*:7421", "tcp://127.0.0.1:7421"),
        ("0.0.0.0:7421", "tcp://127.0.0.1:7421"),
    ],
)
def test_anything_else_is_refused_with_a_right_example(text: str, example: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_address(text)
    line = str(refused.value)
    assert "\n" not in line
    shown = re.findall(r"tcp://\S+$", line)
    assert shown == [example]
    assert parse_address(shown[0]) == example, "the example itself must be right"


def test_loopback_is_what_only_this_machine_reaches() -> None:
    for address in ("127.0.0.1:1", "127.9.8.7:1", "[::1]:1"):
        assert is_loopback(address), address
    for address in ("*:1", "0.0.0.0:1", "[::]:1", "192.168.0.1:1", "[2001:db8::1]:1"):
        assert not is_loopback(address), address
    assert is_loopback("home:1", answers("127.0.0.1", "::1"))
    assert not is_loopback("home:1", answers("127.0.0.1", "192.168.0.1"))
    assert not is_loopback("nowhere:1", knows_nothing)


def test_a_name_leads_to_all_its_addresses_in_order() -> None:
    assert candidates("home:7", answers("::1", "127.0.0.1", "::1")) == ("tcp://[::1]:7", "tcp://127.0.0.1:7")
    assert candidates("127.0.0.1:7", knows_nothing) == ("tcp://127.0.0.1:7",)
    with pytest.raises(Unreachable, match=r"nowhere.*has no address.*tcp://127\.0\.0\.1:7"):
        candidates("nowhere:7", knows_nothing)


def test_reach_tells_open_from_refused_from_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach(f"127.0.0.1:{port}") is Reach.OPEN
        assert reach(f"home:{port}", 2.0, answers("::1", "127.0.0.1")) is Reach.OPEN
    assert reach(f"127.0.0.1:{port}") is Reach.REFUSED
    assert reach(f"home:{port}", 2.0, answers("::1", "127.0.0.1")) is Reach.REFUSED
    assert reach("nowhere:1", 1.0, knows_nothing) is Reach.UNKNOWN_HOST


def test_reach_tells_an_address_that_does_not_answer() -> None:
    # With a full backlog and nobody who accepts, further connections get no answer, as behind a firewall.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        crowd = [socket.socket() for _ in range(3)]
        try:
            for each in crowd:
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", port))
            assert reach(f"127.0.0.1:{port}", 0.3) is Reach.FILTERED
        finally:
            for each in crowd:
                each.close()
