"""Sockets made the one right way: the edge's DEALER, the front's ROUTER, and the pair between front and worker.

Everything here is ZeroMQ and nothing is protocol: a payload is bytes. The classes close the traps around libzmq, each
in one place:

* a send never blocks; `False` (or `Delivery.FULL`, `Delivery.GONE`) means *not sent*, so the caller leaves its own
  position where it was;
* a ROUTER says when a peer is gone instead of dropping the answer (ROUTER_MANDATORY);
* a message has exactly the parts expected. `MAXMSGSIZE` bounds one part only, so the parts of a longer message are read
  away in bounded steps and never stored;
* both sides notice a dead link: edges send heartbeats and the front, which answers them, misses them (why not both
  ways: see `SocketSettings`); identities are never fixed, so that no client can take another's place;
* a socket belongs to one thread of one process. Used from another it raises `PipeSDError`, where libzmq would abort the
  interpreter (thread) or hang (forked child);
* the monitor's queue has no bound on our side and is emptied as we go: full, it would block libzmq's own thread.

Settings are in ms and bytes, as libzmq wants them; time arguments of methods are in seconds.
"""

from __future__ import annotations

import math
import os
import socket as net
import time
from enum import Enum, StrEnum

import zmq
from zmq.utils.monitor import parse_monitor_message

from pipesd.address import Reach, Resolver, candidates, is_loopback, parse_address, reach, split_address
from pipesd.errors import PipeSDError, UsageError
from pipesd.sockets import NOBLOCK, SNDMORE, Context, OwnedSocket, Socket, SocketSettings, new_socket, readable

__all__ = [
    "EDGE",
    "FRONT",
    "PAIR",
    "Context",
    "Delivery",
    "EdgeSocket",
    "FrontSocket",
    "Link",
    "PairSocket",
    "SocketSettings",
    "edge_socket",
    "front_socket",
    "is_loopback",
    "pair_connect",
    "pair_listen",
    "parse_address",
]

WAKE_MS = 20
EDGE = SocketSettings(send_messages=64, receive_messages=0, heartbeat_ms=500)  # the protocol bounds what a cloud sends
FRONT = SocketSettings(send_messages=256, receive_messages=256, keepalive_s=20)
PAIR = SocketSettings(send_messages=1024, receive_messages=1024, message_bytes=1 << 26)  # READY has a whole vocabulary


class Link(StrEnum):
    """What is known of the edge's connection."""

    NEVER = "never connected"
    CONNECTED = "connected"
    LOST = "lost"
    FOREIGN = "answered by something that is no PipeSD cloud"


class Delivery(Enum):
    """What became of an answer."""

    SENT = "sent"
    FULL = "full"  # the peer does not read: its queue is full
    GONE = "gone"  # no such peer any more


class PairSocket(OwnedSocket):
    """One end of the DEALER–DEALER pair between the front and a worker; one part a message."""

    def send(self, payload: bytes) -> bool:
        """True when queued, False when the other side is away or its queue is full."""
        self._check_owner()
        try:
            self._socket.send(payload, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """The next payload, or None when none came in time (rounded up to whole ms) or a malformed one was refused."""
        self._check_owner()
        message = self._wait(math.ceil(timeout_s * 1000))
        return message[1] if message else None

    def receive_polled(self) -> bytes | None:
        """The same without a wait, for when a poller has said that something is there."""
        self._check_owner()
        message = self._take()
        return message[1] if message else None


class FrontSocket(OwnedSocket):
    """The cloud's public ROUTER: routing id and payload, exactly two parts."""

    def __init__(self, socket: Socket, address: str) -> None:
        super().__init__(socket)
        self.address = address  # as bound, with the real port

    def receive(self) -> tuple[bytes, bytes] | None:
        """(routing id, payload) of the next message; None if none waits or a malformed one was refused. Never waits: it
        is meant for when a poller has said that something is there."""
        self._check_owner()
        return self._take()

    def send(self, routing_id: bytes, payload: bytes) -> Delivery:
        """Never blocks and never drops in silence."""
        self._check_owner()
        try:
            self._socket.send(routing_id, NOBLOCK | SNDMORE)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        self._socket.send(payload, NOBLOCK)  # the second part of an accepted message is always accepted
        return Delivery.SENT


class EdgeSocket(OwnedSocket):
    """The edge's DEALER. A name with several addresses (IPv6 and IPv4) is tried at all of them, the first that greets
    properly is kept; when it is lost all are tried again. The name is looked up once, here."""

    def __init__(self, socket: Socket, address: str, endpoints: tuple[str, ...]) -> None:
        super().__init__(socket)
        self.address = address
        self._endpoints = endpoints
        self._kept: str | None = None  # the endpoint in use, others being disconnected; None while all are tried
        self._link = Link.NEVER
        self._monitor = _start_monitor(socket)
        self._woken = False
        for endpoint in endpoints:
            self._connect(endpoint)

    def send(self, payload: bytes) -> bool:
        """True when queued; False when the cloud is away or does not read: nothing was sent."""
        self._check_owner()
        if self._kept is None:
            self._watch()
        try:
            self._socket.send(payload, NOBLOCK)
        except zmq.Again:
            self._watch()
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """The next payload, or None: nothing came within `timeout_s` (rounded up to whole ms), or `wake` was called."""
        self._check_owner()
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait_ms = WAKE_MS if timeout_s * 1000 > WAKE_MS else math.ceil(timeout_s * 1000)
            message = self._wait(wait_ms if not self._woken else 0)
            if message:
                return message[1]
            timeout_s = deadline_s - time.monotonic()
            if timeout_s <= 0 or self._woken:
                self._woken = False
                self._watch()
                return None

    def wake(self) -> None:
        """Ends the owner's wait in `receive`, or its next one, within `WAKE_MS`. The one method for any thread."""
        self._woken = True

    def connection_state(self) -> Link:
        """What the connection is known to be; costs a few microseconds."""
        self._check_owner()
        self._watch()
        return self._link

    def explain(self, timeout_s: float = 1.0) -> str:
        """One line for the user on why there is no answer and what to do; tries TCP for at most about `timeout_s`."""
        link = self.connection_state()
        if link is Link.CONNECTED:
            return f"{self.address} is connected, but the cloud does not answer"
        met = reach(self.address, timeout_s)
        if met is Reach.OPEN:
            if link is Link.FOREIGN:
                return f"something answers at {self.address}, but it is no PipeSD cloud; check the port"
            return f"{self.address} accepts connections, but no PipeSD cloud greets there; check the port, or try again"
        why = {
            Reach.REFUSED: "nothing listens there; start pipesd-cloud, or check the port",
            Reach.FILTERED: "no answer at all; check the address, and that firewalls let this TCP connection through",
            Reach.UNKNOWN_HOST: "the name has no address; check it",
        }[met]
        lost = "the connection to" if link is Link.LOST else "cannot reach"
        return f"{lost} {self.address} was lost: {why}" if link is Link.LOST else f"{lost} {self.address}: {why}"

    def close(self) -> None:
        """Closes; what was sent has the linger time to leave. Closing twice, or in a forked child, does nothing."""
        if self._socket.closed or self._pid != os.getpid():
            return
        self._check_owner()
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        super().close()

    def _connect(self, endpoint: str) -> None:
        # Read at each connect. Off for IPv4: machines without IPv6 work, and events name the address as it was given.
        self._socket.set(zmq.IPV6, int("[" in endpoint))
        self._socket.connect(endpoint)

    def _watch(self) -> None:
        """Takes what the monitor has seen, and keeps one of several addresses."""
        while readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            endpoint = event["endpoint"].decode()
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._kept is None:
                    self._keep(endpoint)
                if endpoint == self._kept:
                    self._link = Link.CONNECTED
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                if endpoint == self._kept:
                    self._link = Link.LOST
                    self._try_all()
            elif self._link is Link.NEVER:  # a failed handshake
                self._link = Link.FOREIGN

    def _keep(self, winner: str) -> None:
        assert winner in self._endpoints, f"{winner} is none of {self._endpoints}"
        self._kept = winner
        for endpoint in self._endpoints:
            if endpoint != winner:
                self._socket.disconnect(endpoint)

    def _try_all(self) -> None:
        """The kept one reconnects by itself; the others get their chance again."""
        for endpoint in self._endpoints:
            if endpoint != self._kept:
                self._connect(endpoint)
        self._kept = None


def edge_socket(
    context: Context,
    address: str,
    *,
    settings: SocketSettings = EDGE,
    keys: None = None,
    resolve: Resolver = net.getaddrinfo,
) -> EdgeSocket:
    """A socket that keeps trying to reach the cloud at `address`; returns at once, whether or not the cloud is there.

    `keys` is the place for the keys of an encrypted link; there are none yet. Raises `UsageError` for a bad address and
    `Unreachable` for a name without one.
    """
    assert keys is None, "links have no keys yet"
    address = parse_address(address)
    endpoints = candidates(address, resolve)
    socket = new_socket(context, zmq.DEALER, settings)
    socket.set(zmq.IMMEDIATE, 1)  # queue only to a cloud that is there: otherwise EAGAIN
    return EdgeSocket(socket, address, endpoints)


def front_socket(
    context: Context,
    bind: str,
    *,
    settings: SocketSettings = FRONT,
    keys: None = None,
    resolve: Resolver = net.getaddrinfo,
) -> FrontSocket:
    """The cloud's public socket, bound. Raises `UsageError` naming address and port when it cannot be bound."""
    assert keys is None, "links have no keys yet"
    bind = parse_address(bind, bind=True)
    host, port = split_address(bind, bind=True)
    endpoint = f"tcp://*:{port}"
    if host != "*":
        found = candidates(bind, resolve)
        endpoint = next((each for each in found if "[" not in each), found[0])  # IPv4 first: edges try both
    socket = new_socket(context, zmq.ROUTER, settings)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    # With a domain libzmq refuses peers of ZMTP 1 and 2, for whom any eight bytes on the port are a message; one that
    # is still greeting when the socket closes would make libzmq abort the process.
    socket.set(zmq.ZAP_DOMAIN, b"pipesd")
    socket.set(zmq.IPV6, int(host == "*" or "[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise UsageError(_why_not_bound(bind, port, error)) from None
    bound = str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
    return FrontSocket(socket, bound)


def pair_listen(context: Context, endpoint: str, *, settings: SocketSettings = PAIR) -> PairSocket:
    """The front's end of a pair, bound to `endpoint` (ipc, inproc or tcp). What is queued at close is dropped."""
    socket = new_socket(context, zmq.DEALER, settings)
    socket.set(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise PipeSDError(f"cannot make the socket {endpoint} to a worker: {error.strerror}") from None
    return PairSocket(socket)


def pair_connect(context: Context, endpoint: str, *, settings: SocketSettings = PAIR) -> PairSocket:
    """The worker's end of a pair."""
    socket = new_socket(context, zmq.DEALER, settings)
    socket.connect(endpoint)
    return PairSocket(socket)


def _start_monitor(socket: Socket) -> Socket:
    """Few events, none of which repeats while the other side is simply away."""
    endpoint = f"inproc://monitor-{id(socket)}"
    socket.monitor(
        endpoint,
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    )
    monitor = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, 0)
    monitor.set(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor


def _why_not_bound(bind: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"{bind}: port {port} is in use, perhaps by another pipesd-cloud; stop that, or bind another port"
    if error.errno == zmq.EADDRNOTAVAIL:
        return f"{bind}: this machine has no such address; bind one of its own, such as tcp://127.0.0.1:{port}"
    return f"{bind}: port {port} cannot be bound ({error.strerror}); choose another address or port"
