"""An emulated link: a TCP proxy on one machine with delay, bandwidth and faults on command.

Each direction is a line that serialises at so many bytes a second, shared by all connections, and then a delay; a
bounded queue before the line, behind which TCP's own back-pressure stops the sender. Rates may follow a schedule, and
the link may be cut at set times. What it cannot do: lose single packets (TCP ends here), and delay the opening of a
connection, which the kernel accepts at once.

One thread runs a loop around `select`, whose timers are exact to some 0.1 ms where those of epoll are in ms.

    with LinkProxy("tcp://127.0.0.1:7421", delay_s=0.010, up_bytes_per_s=125e3) as link:
        ...  # connect to link.address
        link.cut()

By hand: `python -m pipesd.sim.proxy --to tcp://127.0.0.1:7421 --delay-ms 10 --up-mbps 1`.
"""

from __future__ import annotations

import contextlib
import math
import random
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pipesd.address import candidates, join_address, parse_address
from pipesd.errors import PipeSDError
from pipesd.sim.cuts import checked_cuts, is_cut, next_change_s
from pipesd.sim.lanes import Connection, Line, bound_socket, checked_delay, checked_rate, prepare, reset_at_close
from pipesd.sim.schedule import Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class LinkCounts:
    """What a link has seen since it began. Bytes are those handed over; `lost_bytes` those that a fault destroyed."""

    connections: int
    open: int
    failed: int  # the target did not accept
    bytes_up: int
    bytes_down: int
    under_way_bytes: int  # read, and neither handed over nor lost, both directions together
    lost_bytes: int


class LinkProxy:
    """A link to `target`, usable at `.address` from construction until `close()`; a context manager.

    `delay_s` is one-way, in each direction, and a chunk takes up to `up_jitter_s` or `down_jitter_s` longer, by chance
    from `seed`; rates are in bytes of TCP payload a second; `queue_bytes` bounds what a connection may have waiting for
    a line. Each token of a DRAFT occupies the line up as if `up_bytes_per_draft_token` came with it (see `fat`).
    Instead of the rates a `schedule` may be given: what is being serialised as it changes is finished at the new rate.
    `cuts` are pairs (begin, length), s: as `cut` at its begin and `refuse` until its end, which ends a `refuse` too.
    Schedule and cuts count from when the link was made.
    Addresses are "tcp://host:port". Commands may come from any thread and have taken effect when they return. Raises
    UsageError for an address or a figure that cannot be used, Unreachable for a target name without an address.
    """

    def __init__(
        self,
        target: str,
        *,
        listen: str = "tcp://127.0.0.1:0",
        delay_s: float = 0.0,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        queue_bytes: int = 1 << 18,
        up_jitter_s: float = 0.0,
        down_jitter_s: float = 0.0,
        up_bytes_per_draft_token: int = 0,
        schedule: Schedule | None = None,
        cuts: Iterable[tuple[float, float]] = (),
        seed: int = 0,
    ) -> None:
        self._cuts, self._is_cut, self._begun_s = checked_cuts(cuts), False, time.monotonic()
        common: dict[str, Any] = {"chance": random.Random(seed), "schedule": schedule, "begun_s": self._begun_s}
        self._up = Line(delay_s, up_bytes_per_s, queue_bytes, up_jitter_s, up_bytes_per_draft_token, **common)
        self._down = Line(delay_s, down_bytes_per_s, queue_bytes, down_jitter_s, way="down", **common)
        self._targets = candidates(parse_address(target))
        self._connections: list[Connection] = []
        self._accepted = self._failed = 0
        self._holder = bound_socket(listen, queue_bytes)  # never listens: keeps the port ours, and refused
        host, port = self._holder.getsockname()[:2]
        self._address = join_address(host, port)
        self._listener: socket.socket | None = None
        self._accept(True)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._lock = threading.Lock()  # of the two below
        self._running = True
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread = threading.Thread(target=self._run, name="pipesd-link", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where to connect."""
        return self._address

    def __enter__(self) -> LinkProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and the port; when it returns, thread and file descriptors are gone."""
        with self._lock:
            self._running = False
            self._wake()
        self._thread.join()

    def change(
        self,
        *,
        delay_s: float | None = None,
        up_bytes_per_s: float | None = None,
        down_bytes_per_s: float | None = None,
    ) -> None:
        """Change delay or rates for what enters the link from now on; None leaves a figure as it is. A rate given ends
        the schedule of its direction."""
        delay_s = None if delay_s is None else checked_delay(delay_s)
        rates = [None if rate is None else checked_rate(rate) for rate in (up_bytes_per_s, down_bytes_per_s)]

        def change() -> None:
            for line, rate in zip((self._up, self._down), rates, strict=True):
                line.delay_s = line.delay_s if delay_s is None else delay_s
                if rate is not None:
                    line.bytes_per_s, line.schedule = rate, None

        self._command(change)

    def black_hole(self, on: bool = True, *, up: bool = True, down: bool = True) -> None:
        """Let nothing arrive in the chosen directions, telling nobody; off: all arrives, as TCP would repeat it."""
        self._command(lambda: self._hold(math.inf if on else -math.inf, up, down))

    def stall(self, seconds: float, *, up: bool = True, down: bool = True) -> None:
        """Let nothing arrive for `seconds`, then all that was held back."""
        until_s = time.monotonic() + checked_delay(seconds)
        self._command(lambda: self._hold(until_s, up, down))

    def cut(self) -> int:
        """Close every connection at both ends; what was under way is lost. Returns how many there were."""
        return self._command(lambda: self._drop_all(reset=False))

    def reset(self) -> int:
        """As `cut`, with a TCP reset to both ends."""
        return self._command(lambda: self._drop_all(reset=True))

    def refuse(self, on: bool = True) -> None:
        """Refuse new connections, as if nobody listened; off: accept them again, on the same port."""
        self._command(lambda: self._accept(not on))

    def counts(self) -> LinkCounts:
        """What has passed so far."""
        return self._command(
            lambda: LinkCounts(
                connections=self._accepted,
                open=len(self._connections),
                failed=self._failed,
                bytes_up=self._up.delivered_bytes,
                bytes_down=self._down.delivered_bytes,
                under_way_bytes=sum(lane.under_way_bytes for c in self._connections for lane, _ in c.lanes),
                lost_bytes=self._up.lost_bytes + self._down.lost_bytes,
            )
        )

    def _command(self, do: Callable[[], T]) -> T:
        """Have the loop's thread do it, and wait for that."""
        future: Future[T] = Future()
        with self._lock:
            if not self._running:
                raise PipeSDError("the link is closed; make another one")
            self._commands.append((do, future))
            self._wake()
        return future.result()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody to wake
            self._wake_in.send(b"!")

    # From here on everything runs in the loop's thread.

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        finally:
            with self._lock:
                self._running = False
            for _, future in self._commands:
                future.set_exception(PipeSDError("the link was closed"))
            self._drop_all(reset=False)
            self._accept(False)
            for end in (self._holder, self._wake_in, self._wake_out):
                end.close()

    def _turn(self) -> None:
        """Deliver what is due, wait for the next thing to happen, and take what has come."""
        now_s = time.monotonic()
        self._follow_cuts(now_s - self._begun_s)
        due_s = min(self._deliver(), self._begun_s + next_change_s(self._cuts, now_s - self._begun_s))
        readers: list[socket.socket] = [self._wake_out] if self._listener is None else [self._wake_out, self._listener]
        writers = []
        for connection in self._connections:
            if not connection.connected:
                writers.append(connection.server)
            for lane, _ in connection.lanes:
                if lane.readable and (connection.connected or lane is connection.up):
                    readers.append(lane.source)
                if lane.blocked:
                    writers.append(lane.sink)
        wait_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic())
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        if self._wake_out in readable:
            self._obey()  # may close what select has named
            return
        if self._listener in readable:
            self._take_connection()
        self._take(set(readable), set(writable))

    def _follow_cuts(self, at_s: float) -> None:
        if is_cut(self._cuts, at_s) != self._is_cut:
            self._is_cut = not self._is_cut
            self._accept(not self._is_cut)  # first, as who sees its connection closed tries again at once
            if self._is_cut:
                self._drop_all(reset=False)

    def _deliver(self) -> float:
        """Hand over what has arrived; when the next arrives, infinite if nothing is under way."""
        due_s, now_s = math.inf, time.monotonic()
        for connection in list(self._connections):
            if connection.connected:
                connection.deliver(now_s)
                if connection.done:
                    self._drop(connection, reset=connection.up.was_reset or connection.down.was_reset)
                due_s = min(due_s, *(lane.due_s() for lane, _ in connection.lanes if not lane.blocked), math.inf)
        return due_s

    def _take(self, readable: set[socket.socket], writable: set[socket.socket]) -> None:
        now_s = time.monotonic()
        for line in (self._up, self._down):
            line.follow(now_s)
        for connection in list(self._connections):
            if not connection.connected and connection.server in writable:
                try:
                    connection.finish_connect()
                except OSError:
                    self._failed += 1
                    self._drop(connection, reset=True)
                    continue
            for lane, _ in connection.lanes:
                if lane.source in readable:
                    lane.read(now_s)

    def _take_connection(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has already gone away
        self._accepted += 1
        try:
            prepare(client)
            self._connections.append(Connection(client, self._targets, self._up, self._down))
        except OSError:
            self._failed += 1
            reset_at_close(client)
            client.close()

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        while self._commands:
            do, future = self._commands.popleft()
            try:
                future.set_result(do())
            except (OSError, PipeSDError) as error:
                future.set_exception(error)

    def _hold(self, until_s: float, up: bool, down: bool) -> None:
        now_s = time.monotonic()
        for line, chosen in ((self._up, up), (self._down, down)):
            if not chosen:
                continue
            if line.held_s > now_s > until_s:  # let go: what was held is sent again
                for connection in self._connections:
                    for lane, _ in connection.lanes:
                        if lane.line is line:
                            lane.postpone(now_s + line.delay_s)
            line.held_s = until_s

    def _accept(self, on: bool) -> None:
        if on and self._listener is None:
            self._listener = bound_socket(self._address, self._up.queue_bytes)
            self._listener.listen(128)
        elif not on and self._listener is not None:
            self._listener.close()
            self._listener = None

    def _drop_all(self, reset: bool) -> int:
        dropped = list(self._connections)
        for connection in dropped:
            self._drop(connection, reset)
        self._up.free_s = self._down.free_s = -math.inf  # the queues are empty
        return len(dropped)

    def _drop(self, connection: Connection, reset: bool) -> None:
        connection.close(reset)
        self._connections.remove(connection)


if __name__ == "__main__":
    from pipesd.sim.proxy_program import main

    sys.exit(main())
