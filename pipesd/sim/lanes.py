"""The bytes of an emulated link: lines that serialise and delay, and the connections that share them.

No loop and no timer: everything takes the time as an argument, and `proxy` turns the wheel.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipesd.address import candidates, join_address, split_address
from pipesd.errors import UsageError
from pipesd.sim.fat import DraftTokens
from pipesd.sim.schedule import Schedule, Way

MOST_FDS = 1024  # what select can watch

# Lets a listener share the port with a socket that only holds it, but not with another listener.
_SHARE_PORT = socket.SO_REUSEADDR if sys.platform == "linux" else socket.SO_REUSEPORT

_CHUNK_S = 0.5e-3  # a chunk occupies the line for about this long, so that arrival is gradual
_CHUNK_BYTES = 1448, 1 << 16  # least and most
_FLIGHT_BYTES = 16 << 20  # most under way in the delay of a line without a rate
_LEAST_BUFFER_BYTES = 1 << 16  # loopback has segments of 64 KiB; less makes TCP crawl
_FIN, _RST = "FIN", "RST"


@dataclass
class Line:
    """One direction of the link, shared by the connections. With a schedule `bytes_per_s` is what `follow` last found
    in force. It counts from `begun_s`."""

    delay_s: float
    bytes_per_s: float
    queue_bytes: int
    jitter_s: float = 0.0
    bytes_per_draft_token: int = 0  # that each comes with, beside what is sent; they take no room in the queue
    chance: random.Random = field(default_factory=random.Random)
    way: Way = "up"
    schedule: Schedule | None = None
    begun_s: float = 0.0
    free_s: float = -math.inf  # when everything accepted so far has been serialised
    held_s: float = -math.inf  # nothing arrives before this time; infinite in a black hole
    delivered_bytes: int = 0
    lost_bytes: int = 0

    def __post_init__(self) -> None:
        self.delay_s, self.jitter_s = checked_delay(self.delay_s), checked_delay(self.jitter_s)
        self.bytes_per_s = checked_rate(self.bytes_per_s)
        if self.schedule is not None and self.bytes_per_s != math.inf:
            raise UsageError(f"link: a rate of {self.bytes_per_s} bytes/s and a schedule; give one of them")
        self.follow(self.begun_s)
        if self.queue_bytes < 1:
            raise UsageError(f"link: a queue of {self.queue_bytes} bytes; give at least 1")
        if self.bytes_per_draft_token < 0:
            raise UsageError(f"link: {self.bytes_per_draft_token} bytes with each draft token; give a number from 0")

    def arrival_s(self, now_s: float, length_bytes: int) -> float:
        """When a chunk that enters at `now_s` has been serialised and has crossed, late by chance up to `jitter_s`."""
        start_s = max(self.free_s, now_s)
        if self.schedule is None:
            self.free_s = start_s + length_bytes / self.bytes_per_s
        else:
            self.free_s = self.begun_s + self.schedule.finish_s(start_s - self.begun_s, length_bytes, self.way)
        return self.free_s + self.delay_s + (self.jitter_s * self.chance.random() if self.jitter_s else 0.0)

    def follow(self, now_s: float) -> None:
        """Take the rate that the schedule has in force at `now_s`."""
        if self.schedule is not None:
            self.bytes_per_s = self.schedule.at(now_s - self.begun_s)[self.way == "down"]

    @property
    def most_bytes(self) -> int:
        """What one connection may have in the queue and under way."""
        flight = self.bytes_per_s * self.delay_s if self.delay_s else 0.0
        return self.queue_bytes + int(min(flight, _FLIGHT_BYTES))

    @property
    def chunk_bytes(self) -> int:
        """What is read at a time."""
        least, most = _CHUNK_BYTES
        return int(min(max(self.bytes_per_s * _CHUNK_S, least), most))


@dataclass
class Lane:
    """One direction of one connection: what has been read and has not arrived, in order, with its arrival time."""

    line: Line
    source: socket.socket
    sink: socket.socket
    drafts: DraftTokens | None = None
    under_way: deque[tuple[float, memoryview | str]] = field(default_factory=deque)
    under_way_bytes: int = 0
    blocked: bool = False  # the receiver takes nothing now
    ended: bool = False  # nothing more will be read
    finished: bool = False  # the sender's end of stream has arrived
    was_reset: bool = False  # the sender's reset has arrived

    @property
    def readable(self) -> bool:
        """Whether there is room for more."""
        return not self.ended and self.under_way_bytes < self.line.most_bytes

    def due_s(self) -> float:
        """When `deliver` has something to do, infinite while nothing is under way or the line is held."""
        return max(self.under_way[0][0], self.line.held_s) if self.under_way else math.inf

    def read(self, now_s: float) -> None:
        """Take from the sender what the line takes at once."""
        try:
            data = self.source.recv(self.line.chunk_bytes)
        except BlockingIOError:
            return
        except OSError:
            self.reset(now_s)
            return
        if data:
            whole = memoryview(data)
            for piece, further_bytes in [(whole, 0)] if self.drafts is None else self.drafts.split(whole):
                self._put(piece, now_s, further_bytes)
        else:
            self.ended = True
            self._put(_FIN, now_s)

    def reset(self, now_s: float) -> None:
        """The sender is gone; the receiver will be told behind what is under way."""
        self.ended = True
        self._put(_RST, now_s)

    def deliver(self, now_s: float) -> None:
        """Hand over what has arrived. Raises OSError when the receiver is gone."""
        self.blocked = False
        while self.due_s() <= now_s:
            at_s, item = self.under_way[0]
            if isinstance(item, memoryview):
                try:
                    sent = self.sink.send(item)
                except BlockingIOError:
                    self.blocked = True
                    return
                self.line.delivered_bytes += sent
                self.under_way_bytes -= sent
                if sent < len(item):
                    self.under_way[0] = at_s, item[sent:]
                    continue
            elif item == _FIN:
                self.sink.shutdown(socket.SHUT_WR)
                self.finished = True
            else:
                self.was_reset = True
            self.under_way.popleft()

    def postpone(self, until_s: float) -> None:
        """Nothing that is under way arrives before `until_s`."""
        self.under_way = deque((max(at_s, until_s), item) for at_s, item in self.under_way)

    def lose(self) -> None:
        """What is under way is destroyed."""
        self.line.lost_bytes += self.under_way_bytes
        self.under_way.clear()
        self.under_way_bytes = 0
        self.blocked = False

    def _put(self, item: memoryview | str, now_s: float, further_bytes: int = 0) -> None:
        length = len(item) if isinstance(item, memoryview) else 0
        at_s = self.line.arrival_s(now_s, length + further_bytes)
        self.under_way.append((at_s, item))  # and never before the one ahead of it
        self.under_way_bytes += length


class Connection:
    """A client, the connection to the target made for it, and a lane each way.

    The constructor begins to connect to the first of `addresses` and raises OSError if none accepts.
    """

    def __init__(self, client: socket.socket, addresses: Sequence[str], up: Line, down: Line) -> None:
        self.client = client
        self.connected = False
        self._left = list(addresses)
        self._lines = up, down
        self._try_next()

    @property
    def lanes(self) -> tuple[tuple[Lane, Lane], tuple[Lane, Lane]]:
        """Each lane with the one that goes the other way."""
        return (self.up, self.down), (self.down, self.up)

    @property
    def done(self) -> bool:
        """Whether nothing more can come: both ends have finished, or one has reset."""
        return (self.up.finished and self.down.finished) or self.up.was_reset or self.down.was_reset

    def finish_connect(self) -> None:
        """The target's socket became writable. Raises OSError if no address of the target accepts."""
        failure = self.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._failed(failure)
        else:
            self.connected = True

    def deliver(self, now_s: float) -> None:
        """Hand over what has arrived on both lanes; an end that is gone is told to the other in due time."""
        for lane, opposite in self.lanes:
            try:
                lane.deliver(now_s)
            except OSError:
                lane.lose()
                lane.ended = True
                opposite.reset(now_s)

    def close(self, reset: bool = False) -> None:
        """Close both ends, with a TCP reset if wished; what is under way is lost."""
        for lane in (self.up, self.down):
            lane.lose()
        for end in (self.client, self.server):
            if reset:
                reset_at_close(end)
            end.close()

    def _try_next(self) -> None:
        host, port = split_address(self._left.pop(0))
        self.server = stream_socket(host, self._lines[1].queue_bytes)
        fat = self._lines[0].bytes_per_draft_token
        self.up = Lane(self._lines[0], self.client, self.server, DraftTokens(fat) if fat else None)
        self.down = Lane(self._lines[1], self.server, self.client)
        failure = self.server.connect_ex((host, port))
        if failure not in (0, errno.EINPROGRESS):
            self._failed(failure)

    def _failed(self, failure: int) -> None:
        self.server.close()
        if not self._left:
            raise OSError(failure, os.strerror(failure))
        self._try_next()


def stream_socket(host: str, buffer_bytes: int) -> socket.socket:
    """A TCP socket that does not block, for a numeric host. Raises OSError if select takes no further descriptor."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    prepare(made)
    for kind in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # inherited by what is accepted; they must not hide our own queue
        made.setsockopt(socket.SOL_SOCKET, kind, max(buffer_bytes, _LEAST_BUFFER_BYTES))
    return made


def bound_socket(address: str, buffer_bytes: int) -> socket.socket:
    """A socket bound to the address, as the link's other one may be. Raises UsageError if it cannot be had."""
    host, port = split_address(address, bind=True)
    host = split_address(candidates(join_address(host, port))[0], bind=True)[0] if host != "*" else "0.0.0.0"
    made = stream_socket(host, buffer_bytes)
    made.setsockopt(socket.SOL_SOCKET, _SHARE_PORT, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UsageError(f"link: cannot listen at {address} ({error.strerror}); choose another --listen") from None
    return made


def checked_delay(seconds: float) -> float:
    if not 0.0 <= seconds < math.inf:
        raise UsageError(f"link: a delay of {seconds} s; give a number of seconds from 0")
    return float(seconds)


def checked_rate(bytes_per_s: float) -> float:
    if not bytes_per_s > 0.0:
        raise UsageError(f"link: a rate of {bytes_per_s} bytes/s; give more than 0")
    return float(bytes_per_s)


def prepare(end: socket.socket) -> None:
    """Make a socket one for the loop; raises OSError, the socket closed, if select cannot watch it."""
    if end.fileno() >= MOST_FDS:
        end.close()
        raise OSError(errno.EMFILE, f"a link watches descriptors below {MOST_FDS} only")
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset_at_close(end: socket.socket) -> None:
    """Closing this socket will send a TCP reset."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
