"""What all our ZeroMQ sockets share: their options, one owner, messages of exactly the parts expected, no blocking."""

from __future__ import annotations

from dataclasses import dataclass
from os import getpid
from threading import get_ident
from typing import Self, cast

import zmq

from pipesd.errors import PipeSDError

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

NOBODY = -1  # no thread has this identity
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)
REFUSED_PARTS_A_STEP = 1000  # parts of a refused message read away before the caller gets its turn again


@dataclass(frozen=True)
class SocketSettings:
    """Options of one kind of socket; 0 messages is no bound, 0 ms no heartbeat. Times must suit the slowest link:
    handshakes need 4 round trips.

    libzmq aborts the process when a heartbeat is due on a connection that has broken while its receive queue was full
    (zeromq/libzmq#4364; 3937 and 4767 are its kin). So a socket that sends heartbeats has no bound on what it receives,
    and one that must have a bound, as it hears strangers, only answers them.
    """

    send_messages: int  # queued for each peer
    receive_messages: int  # queued from each peer
    heartbeat_ms: int = 0
    heartbeat_timeout_ms: int = 10_000  # either side gives the connection up after this silence; the longest OPEN of a
    # thin link, one part, must cross in it: 80 KB in 10 s are 64 kbit/s
    message_bytes: int = 1 << 21  # longest part taken, above any legal one; a peer that sends more is disconnected
    linger_ms: int = 300  # how long a close waits for the last message to leave
    reconnect_ms: int = 50
    reconnect_most_ms: int = 1000
    connect_timeout_ms: int = 1000  # above the round trip
    handshake_ms: int = 3000  # above five round trips
    backlog: int = 1024
    keepalive_s: int = 0  # TCP looks after a silent peer this often, and waits as long for what it sent; 0: never

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            assert value >= 0, f"{name} = {value}"
        assert not (self.heartbeat_ms and self.receive_messages), "libzmq would abort, see above"
        assert self.heartbeat_timeout_ms > self.heartbeat_ms, "a heartbeat must be able to arrive in time"


class OwnedSocket:
    """A ZeroMQ socket that only the thread and the process that own it may touch."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._pid = getpid()
        self._thread = get_ident()
        self._routed = socket.type == zmq.ROUTER  # its messages begin with a routing id, put there by libzmq
        self.refused = 0  # messages with a wrong number of parts
        self._rest_to_refuse = False  # such a message is being read away
        self._timeout_ms = -1  # RCVTIMEO as it is set

    @property
    def zmq_socket(self) -> Socket:
        """For a poller; sends and receives go through this object."""
        return self._socket

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def adopt(self) -> None:
        """Makes the calling thread the owner. The previous owner must be done with the socket for good."""
        self._check_process()
        self._thread = get_ident()

    def close(self) -> None:
        """Closes; what was sent has the linger time to leave. Closing twice, or in a forked child, does nothing."""
        if self._socket.closed or self._pid != getpid():
            return
        self._check_owner()
        self._socket.close()
        self._thread = NOBODY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if self._pid != getpid():
            raise PipeSDError(
                "this connection was made before the process forked and cannot be used in the child; "
                "connect again there, or start processes by 'spawn'"
            )

    def _check_owner(self) -> None:
        if self._thread != get_ident() or self._pid != getpid():
            self._check_process()
            if self._socket.closed:
                raise PipeSDError("this connection is closed; make a new one")
            raise PipeSDError("this connection belongs to another thread; use it from the thread that made it")

    def _wait(self, timeout_ms: int) -> tuple[bytes, bytes] | None:
        """As `_take`, waiting for at most `timeout_ms`. A call that waits costs 5 µs less than poll and receive."""
        if timeout_ms <= 0:
            return self._take() if readable(self._socket) else None  # looking is cheaper than an exception
        if timeout_ms != self._timeout_ms:
            self._socket.set(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        return self._take(flags=0)

    def _take(self, flags: int = NOBLOCK) -> tuple[bytes, bytes] | None:
        """(routing id, payload) of the next message, the former empty unless this is a ROUTER. None if there is none
        (with `flags` 0: within RCVTIMEO), if it has more parts and is refused, or while one is being read away."""
        socket = self._socket
        try:
            if not self._rest_to_refuse:
                first = socket.recv(flags)
                routing_id, payload = (first, socket.recv(NOBLOCK)) if self._routed else (b"", first)
                if not socket.get(zmq.RCVMORE):
                    return routing_id, payload
                self.refused += 1
                self._rest_to_refuse = True
            for _ in range(REFUSED_PARTS_A_STEP):
                socket.recv(NOBLOCK, copy=False)
                if not socket.get(zmq.RCVMORE):
                    self._rest_to_refuse = False
                    break
        except zmq.Again:
            pass
        return None


def new_socket(context: Context, kind: int, settings: SocketSettings) -> Socket:
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise PipeSDError(f"no socket can be made: {error.strerror}") from None
    options = {
        zmq.SNDHWM: settings.send_messages,
        zmq.RCVHWM: settings.receive_messages,
        zmq.MAXMSGSIZE: settings.message_bytes,
        zmq.LINGER: settings.linger_ms,
        zmq.RECONNECT_IVL: settings.reconnect_ms,
        zmq.RECONNECT_IVL_MAX: settings.reconnect_most_ms,
        zmq.CONNECT_TIMEOUT: settings.connect_timeout_ms,
        zmq.HANDSHAKE_IVL: settings.handshake_ms,
        zmq.BACKLOG: settings.backlog,
    }
    if settings.heartbeat_ms:
        options[zmq.HEARTBEAT_IVL] = settings.heartbeat_ms
        options[zmq.HEARTBEAT_TIMEOUT] = settings.heartbeat_timeout_ms
        options[zmq.HEARTBEAT_TTL] = settings.heartbeat_timeout_ms  # what the other side, which sends none, goes by
    if settings.keepalive_s:
        options[zmq.TCP_KEEPALIVE] = 1
        options[zmq.TCP_KEEPALIVE_IDLE] = options[zmq.TCP_KEEPALIVE_INTVL] = settings.keepalive_s
        options[zmq.TCP_KEEPALIVE_CNT] = 3
        options[zmq.TCP_MAXRT] = settings.keepalive_s * 1000
    for option, value in options.items():
        socket.set(option, value)
    return socket


def readable(socket: Socket) -> bool:
    """Whether a message can be received now."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
