"""What the edge's machine counts of one generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipesd.metrics import Tally
from pipesd.protocol.messages import Counters

NOWHERE = 1 << 62  # behind every position
NO_COUNTERS = Counters(0, 0, 0, 0)


@dataclass
class EdgeCounts:
    """The tally of a generation, and what it takes to keep it. A token is proactive that was drafted while a NAV was
    outstanding; the fate of each is decided once: when it is committed or lost, at the latest when the NAV is answered.
    """

    tally: Tally = field(default_factory=Tally, repr=False)
    told: Counters = field(default=NO_COUNTERS, repr=False)  # by the cloud, in this opening
    proactive_from: int = NOWHERE  # undecided proactive tokens are the draft's positions from here on
    round_start: int = 0  # where the draft began that is being verified

    def drafted(self, pos: int, *, proactive: bool) -> None:
        """A token was drawn for position `pos`."""
        self.tally.drafted += 1
        if proactive:
            self.proactive_from = min(self.proactive_from, pos)
            self.tally.proactive += 1

    def compared(self, pos: int, *, accepted: bool) -> None:
        """What was drafted for `pos` met what is committed there."""
        self.tally.count_position(pos - self.round_start, accepted)
        if accepted and pos >= self.proactive_from:
            self.proactive_from = pos + 1
            self.tally.promoted += 1

    def dropped(self, pos: int, end: int) -> None:
        """The draft, which reached to `end`, ends at `pos` now."""
        self.tally.dropped += self._undecided(pos, end)

    def lost(self) -> None:
        """The branch is over."""
        self.proactive_from = NOWHERE

    def answered(self, pos: int, end: int) -> None:
        """The NAV is: what is drafted from `pos` to `end` survived it."""
        self.tally.promoted += self._undecided(pos, end)
        self.proactive_from = NOWHERE

    def hear(self, counters: Counters) -> None:
        """The cloud's own, cumulative in an opening."""
        self.told = Counters(*map(max, self.told, counters))

    def keep(self) -> None:
        """Add the opening's last counters to the generation's sums: they restart with every opening."""
        self.tally.passes += self.told.passes
        self.tally.verified += self.told.verified
        self.tally.stale += self.told.stale
        self.tally.busy_100us += self.told.busy_100us
        self.told = NO_COUNTERS

    def _undecided(self, pos: int, end: int) -> int:
        """How many tokens from `pos` on were drafted while the NAV was outstanding."""
        return max(0, end - max(self.proactive_from, pos))
