"""An emulated link on which every draft token weighs: found in the stream whatever its chunks, charged exactly."""

from __future__ import annotations

import math
import random
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.protocol.messages import MAX_IDS, Draft, Message, Open, Probe
from pipesd.protocol.wire import encode
from pipesd.sim.fat import DraftTokens
from pipesd.sim.lanes import Lane, Line
from pipesd.sim.proxy import LinkProxy
from pipesd.transport import Context, edge_socket, front_socket

GREETING = bytes([0xFF, *bytes(8), 0x7F, 3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)
READY = bytes([4, 5]) + b"READY"


def frame(message: Message | bytes, *, flags: int = 0) -> bytes:
    """One message as ZMTP frames it."""
    body = message if isinstance(message, bytes) else encode(message)
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def draft(tokens: int, *, first: int = 0) -> Draft:
    return Draft(2**60, 1, 0, 10, tuple(range(first, first + tokens)), 10, nav=True)


OPEN = Open(2**60, 1, 0, bytes(8), tuple(range(300)), 900, (2,), None, 0, Mode.NAV, bytes(8), bytes(8))
PARTS: list[tuple[bytes, int]] = [  # as they stand in a stream, each with its draft tokens
    (GREETING + READY, 0),
    (frame(OPEN), 0),
    (frame(draft(3)), 3),
    (frame(draft(5, first=2**31 - 5)), 5),
    (frame(draft(200)), 200),  # a long frame
    (frame(draft(0)), 0),
    (frame(Probe(2**60, 0, 7, bytes(500))), 125),  # stands for a DRAFT as long as its payload
    (frame(draft(1)._replace(p_draft=(0.5,))), 1),
    (frame(encode(draft(2))[:-1]), 0),  # broken
    (frame(b""), 0),
    (frame(encode(draft(4)), flags=4), 0),  # a command
    (frame(draft(MAX_IDS)), MAX_IDS),
    (frame(bytes(70_000)), 0),
    (frame(draft(2)), 2),
]
STREAM = b"".join(data for data, _ in PARTS)


def charged(chunks: list[bytes], bytes_per_token: int = 10) -> dict[int, int]:
    """Where in the stream how many further bytes come, which must be the same bytes otherwise."""
    reader, at, found, passed = DraftTokens(bytes_per_token), 0, dict[int, int](), bytearray()
    for chunk in chunks:
        for piece, further_bytes in reader.split(memoryview(chunk)):
            assert len(piece) > 0
            passed += piece
            at += len(piece)
            if further_bytes:
                found[at] = further_bytes
    assert passed == b"".join(chunks)
    return found


def expected() -> dict[int, int]:
    at, found = 0, {}
    for data, tokens in PARTS:
        at += len(data)
        if tokens:
            found[at] = 10 * tokens
    return found


def test_each_draft_is_charged_at_its_last_byte() -> None:
    assert charged([STREAM]) == expected()


@settings(max_examples=15)
@given(st.integers(20, 3000), st.integers(0, 1 << 32))
def test_chunks_change_nothing(most: int, seed: int) -> None:
    chance, chunks, at = random.Random(seed), list[bytes](), 0
    while at < len(STREAM):
        length = chance.randint(1, most)
        chunks.append(STREAM[at : at + length])
        at += length
    assert charged(chunks) == expected()


def test_byte_by_byte() -> None:
    assert charged([bytes([byte]) for byte in STREAM]) == expected()


@given(st.binary(min_size=1, max_size=200), st.integers(1, 200))
def test_other_traffic_passes(data: bytes, cut: int) -> None:
    charged([part for part in (data[:cut], data[cut:], frame(draft(3))) if part])
    assert charged([b"GET / HTTP/1.1\r\n" * 10, frame(draft(3))]) == {}


def test_an_endless_frame_is_not_kept() -> None:
    reader = DraftTokens(10)
    reader.split(memoryview(GREETING + b"\x02" + (1 << 60).to_bytes(8, "big")))
    for _ in range(20):
        assert reader.split(memoryview(bytes(1 << 20)))[0][1] == 0
    assert len(reader._bytes) == 0


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_draft_takes_the_line_for_its_further_bytes(tokens: int) -> None:
    """In a time of its own: with rate R and N bytes a token, a DRAFT of n tokens arrives n·N/R later, and so does what
    is behind it; what is before it does not."""
    near, far = socket.socketpair()
    rate, fat, message = 1000.0, 500, frame(draft(tokens))
    for reader in (None, DraftTokens(fat)):
        line = Line(0.25, rate, 1 << 20, bytes_per_draft_token=fat)
        lane = Lane(line, far, near, reader)
        head = GREETING + READY
        for data in (head, message, frame(draft(0))):
            near.sendall(data)
        lane.read(10.0)
        arrivals = {}
        read = 0
        for at_s, item in lane.under_way:
            read += len(item)
            arrivals[read] = at_s
        further_s = tokens * fat / rate if reader else 0.0
        whole = len(head + message)
        if reader is not None:
            assert arrivals[whole] == pytest.approx(10.25 + whole / rate + further_s)
        assert max(arrivals.values()) == pytest.approx(10.25 + read / rate + further_s)
        assert read == len(head + message + frame(draft(0))) == lane.under_way_bytes
    near.close()
    far.close()


def test_jitter_is_bounded_and_by_chance() -> None:
    line = Line(1.0, math.inf, 100, jitter_s=0.5, chance=random.Random(3))
    late_s = [line.arrival_s(float(now), 10) - now - 1.0 for now in range(500)]
    assert 0.0 <= min(late_s) < 0.05 and 0.45 < max(late_s) <= 0.5
    assert 0.2 < sum(late_s) / len(late_s) < 0.3
    again = Line(1.0, math.inf, 100, jitter_s=0.5, chance=random.Random(3))
    assert [again.arrival_s(float(now), 10) - now - 1.0 for now in range(500)] == late_s


def test_drafts_weigh_on_a_real_connection() -> None:
    """400 ms at least for ten tokens, and for a probe that stands for as many."""
    context = Context()
    front = front_socket(context, "tcp://127.0.0.1:0")
    with LinkProxy(front.address, up_bytes_per_s=1e6, up_bytes_per_draft_token=40_000, up_jitter_s=0.001) as link:
        edge = edge_socket(context, link.address)
        took_s = []
        for message in (Probe(5, 0, 0), Probe(5, 0, 1, bytes(40)), draft(10), Probe(5, 0, 2)):
            while not edge.send(encode(message)):
                time.sleep(0.001)
            begun_s = time.monotonic()
            assert front.zmq_socket.poll(10_000)
            taken = front.receive()
            assert taken is not None and taken[1] == encode(message)
            took_s.append(time.monotonic() - begun_s)
        edge.close()
    front.close()
    context.term()
    assert min(took_s[1], took_s[2]) >= 0.4


@pytest.mark.parametrize(
    "settings", [{"up_jitter_s": -1.0}, {"down_jitter_s": math.nan}, {"up_bytes_per_draft_token": -1}]
)
def test_bad_figures_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="link: "):
        LinkProxy("tcp://127.0.0.1:1", **settings)  # type: ignore[arg-type]
