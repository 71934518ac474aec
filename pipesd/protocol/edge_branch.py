"""The edge's committed ids and the draft behind them, what of it was said, and the DRAFTs that say it."""

from __future__ import annotations

from pipesd.metrics import Tally
from pipesd.protocol.actions import Action, Request, Rollback, Send
from pipesd.protocol.edge_counts import EdgeCounts
from pipesd.protocol.messages import Draft, Message
from pipesd.protocol.redrawing import Redrawing


class EdgeBranch:
    """`committed` and `draft` are ids; `sent` is the position up to which they were sent in this epoch of this opening;
    `nav` what was asked and is not answered yet, as (end of the draft, known)."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.committed: list[int] = []
        self.draft: list[int] = []
        self.p_sent: list[float] = []  # of each of `draft`, where it is tested
        self.opening = 0
        self.epoch = 0
        self.sent = 0
        self.nav: tuple[int, int] | None = None
        self._request: Request | None = None
        self._counts = EdgeCounts()
        self._redraw = Redrawing()
        self._nav_said = False  # the NAV that is outstanding was given to this opening's link
        self._told = 0  # the last `known` that was said
        self._hole = False  # a verdict beyond the committed length was seen and its repeat asked for

    @property
    def end(self) -> int:
        """Position behind the draft."""
        return len(self.committed) + len(self.draft)

    @property
    def tally(self) -> Tally:
        """Counts of this generation."""
        return self._counts.tally

    def not_sent(self, message: Message) -> None:
        """The link did not take `message`: what it carried is still to be said. A lost OPEN waits for its deadline."""
        if isinstance(message, Draft) and (message.opening, message.epoch) == (self.opening, self.epoch):
            self.sent = max(len(self.committed), min(self.sent, message.pos))
            self._nav_said = self._nav_said and not message.nav
            self._hole = self._hole and not message.again
            self._told = 0
            self._redraw.unsaid |= message.pos < len(self.committed)
            self._redraw.asked = self._redraw.asked and message.tried is None

    @property
    def _tests(self) -> bool:
        """Whether draft tokens are tested against a random number."""
        assert self._request is not None
        sampling = self._request.sampling
        return sampling is not None and sampling.tests

    def _repeat(self, start: int, *, again: bool) -> Send:
        """What was sent from `start` on, and what a NAV asks for, once more."""
        start = max(start, len(self.committed) - self._redraw.unheard)
        end = self.sent if self.nav is None else max(self.sent, self.nav[0])
        return self._draft(start, max(start, end), nav=self.nav is not None, again=again)

    def _draft(self, start: int, end: int, *, nav: bool, again: bool = False) -> Send:
        """A DRAFT of positions `start` to `end`; it carries a NAV, or a redrawn id, that is still to be said."""
        known = len(self.committed)
        if self._redraw.unsaid:
            start, self._redraw.unsaid = known - 1, False
        nav = nav or (self.nav is not None and not self._nav_said)
        self._nav_said = self._nav_said or nav
        behind = slice(max(start - known, 0), max(end - known, 0))
        redrawn = self.committed[start:known]
        ids, p_draft = (*redrawn, *self.draft[behind]), None
        if ids and self._tests:
            p_draft = (*(1.0 for _ in redrawn), *self.p_sent[behind])
        self.sent = max(self.sent, end)
        self._told = known
        return Send(Draft(self.session, self.opening, self.epoch, start, ids, known, nav, again, p_draft))

    def _ask_more(self) -> Send:
        known = self._told = len(self.committed)
        tried, self._redraw.asked = self._redraw.tried, True
        return Send(Draft(self.session, self.opening, self.epoch, known, (), known, again=True, tried=tried))

    def _lose_branch(self) -> list[Action]:
        actions = self._shorten(0)
        self._counts.lost()
        self.epoch += 1
        self.nav = None
        return actions

    def _shorten(self, length: int) -> list[Action]:
        """Drop the draft beyond `length` tokens."""
        if len(self.draft) <= length:
            return []
        pos = len(self.committed) + length
        self._counts.dropped(pos, self.end)
        del self.draft[length:], self.p_sent[length:]
        self.sent = min(self.sent, pos)
        if self.nav is not None:
            self.nav = (min(self.nav[0], pos), self.nav[1])
        return [Rollback(pos)]
