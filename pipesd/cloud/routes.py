"""Which worker holds a session and which connection its edge was last heard on. A table and its rules; no I/O.

A session is pinned to a worker by OPEN and keeps it until the worker forgets it, ends, or the edge is silent for
`idle_s`. Its routing id is that of the newest message: an edge that reconnects is found again by its next word. Session
names are 64 random bits, so two living edges never share one by accident; if they did, answers would go to whichever
spoke last, and openings would keep the two generations apart.

The table is bounded: sessions that a worker granted are bounded by the workers, and a session that was not granted
leaves with the first answer to its OPEN, so junk cannot stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Route:
    """One session."""

    session: int
    worker: int
    routing_id: bytes
    opening: int
    heard_s: float  # the edge's last word
    moved_s: float  # the last word of either side
    granted: bool = False  # its worker has answered OPENED, now or in an earlier opening
    running: bool = True  # a generation was opened and neither cancelled nor refused


class Routes:
    """The table, the longest unheard first."""

    def __init__(self, most: int, idle_s: float) -> None:
        assert most > 0 and idle_s > 0
        self.most = most
        self.idle_s = idle_s
        self._routes: OrderedDict[int, Route] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def __getitem__(self, session: int) -> Route | None:
        return self._routes.get(session)

    @property
    def full(self) -> bool:
        return len(self._routes) >= self.most

    def load(self, worker: int) -> int:
        """Sessions pinned to a worker."""
        return sum(route.worker == worker for route in self._routes.values())

    def open(self, session: int, opening: int, routing_id: bytes, worker: int, now_s: float) -> Route:
        """An OPEN went to `worker`, the pinned one if there is a row. A new row needs room: see `full`."""
        route = self._routes.get(session)
        if route is None:
            assert not self.full
            route = self._routes[session] = Route(session, worker, routing_id, opening, now_s, now_s)
        assert route.worker == worker
        route.opening, route.running = opening, True
        self.heard(route, routing_id, now_s)
        return route

    def heard(self, route: Route, routing_id: bytes, now_s: float) -> None:
        """The edge spoke, on the connection `routing_id`."""
        route.routing_id = routing_id
        route.heard_s = route.moved_s = now_s
        self._routes.move_to_end(route.session)

    def forget(self, session: int) -> None:
        self._routes.pop(session, None)

    def gone(self, session: int, opening: int) -> None:
        """The worker forgot the session as of `opening`. A later OPEN may be on its way to it: that one stays."""
        route = self._routes.get(session)
        if route is not None and route.opening <= opening:
            del self._routes[session]

    def forget_worker(self, worker: int) -> list[Route]:
        """Forgets every session of a worker that has ended, and returns them."""
        lost = [route for route in self._routes.values() if route.worker == worker]
        for route in lost:
            del self._routes[route.session]
        return lost

    def forget_idle(self, now_s: float) -> list[Route]:
        """Forgets the sessions whose edges were silent for `idle_s`, and returns them."""
        idle = []
        for route in self._routes.values():
            if now_s - route.heard_s <= self.idle_s:
                break
            idle.append(route)
        for route in idle:
            del self._routes[route.session]
        return idle

    def running(self, now_s: float, quiet_s: float) -> list[Route]:
        """Sessions with a generation in which either side spoke within the last `quiet_s`."""
        return [route for route in self._routes.values() if route.running and now_s - route.moved_s < quiet_s]
