"""What goes out to edges: never waits, is counted where it did not arrive, rationed where anybody can ask for it."""

from __future__ import annotations

from collections.abc import Callable

from pipesd.clock import Clock
from pipesd.cloud.bounds import Complaints, FrontCounters, FrontLimits, Ration
from pipesd.protocol import wire
from pipesd.protocol.wire import Message, WireError
from pipesd.transport import Delivery, FrontSocket


class Replies:
    """The public socket's outgoing side, with the front's counters and log."""

    def __init__(
        self,
        public: FrontSocket,
        counters: FrontCounters,
        limits: FrontLimits,
        log: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._public = public
        self._counters = counters
        self._refusals = Ration(limits.refusals_per_s, clock)
        self.complain = Complaints(log, clock, limits.complaint_s).write

    def answer(self, routing_id: bytes, message: Message) -> None:
        self.send(routing_id, message.session, wire.encode(message))

    def send(self, routing_id: bytes, session: int, payload: bytes) -> bool:
        """False if the edge does not read what it gets. One that is gone may come back; its next word finds it."""
        delivery = self._public.send(routing_id, payload)
        if delivery is Delivery.GONE:
            self._counters.to_edge_gone += 1
        elif delivery is Delivery.FULL:
            self._counters.to_edge_dropped += 1
            self.complain(
                "full", f"session {session:016x} does not read its answers: dropped, and closed if it was open"
            )
            return False
        return True

    def refuse(self, routing_id: bytes, error: WireError) -> None:
        """For what is no legal message: told so many times a second at most."""
        self._counters.malformed += 1
        self.complain("malformed", f"a malformed message was refused: {error}")
        if self._refusals.take():
            self.answer(routing_id, wire.Error(error.session, error.opening, error.code, str(error)))
