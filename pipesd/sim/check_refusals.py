"""What the checker of event logs knows of draft tokens that the cloud tested and refused: whether the edge drew what
stands in their place from what it was told, asked for more where it took nothing, and said what it drew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


@dataclass
class Refusals:
    """How far the answer to a refusal has come, by the log."""

    told: tuple[int, Any] | None = None  # where the last verdict refused a token, and what it said of the target's law
    open: bool = False  # an id is still to be drawn
    tried: int | None = None  # of so many proposals none was taken, which is to be said
    fresh: bool = False  # the last verdict brought ids
    brought: bool = False  # a verdict on this place did
    redrawn: int | None = None  # drawn, and not committed yet
    said_at_once: bool = False  # the link took it before it was committed
    unsaid: bool = False  # committed, and the link did not take it yet
    unheard: bool = False  # no message of the cloud has shown that it has it

    def verdict(self, event: Event, known: int) -> None:
        """A verdict of this opening was received."""
        end = event["pos"] + len(event["ids"])
        self.told = (end, event["refused"]) if event.get("rejected") else None
        self.fresh = False
        if end >= known:
            self.unheard = self.unsaid = False

    def missed(self, known: int) -> bool:
        """Whether the last verdict refused what the edge should have drawn anew by now."""
        return self.told is not None and self.told[0] == known and not self.open and self.tried is None

    def refused(self, event: Event, known: int, drafted: int) -> Iterator[str]:
        """The edge is about to draw."""
        pos, law = self.told or (None, None)
        pairs, first = law or ((), None)
        if (event["pos"], event["told"], event["first"]) != (pos, len(pairs), first) or pos != known or not drafted:
            yield f"a refusal at {event['pos']} of {event['told']} from {event['first']}, the verdict said {self.told}"
        if first is not None and first != (self.tried or 0):
            yield f"proposals from number {first} on, {self.tried or 0} were tried"
        self.open, self.tried = True, None
        self.brought |= self.fresh

    def drew(self, event: Event, known: int) -> Iterator[str]:
        """The edge drew."""
        pairs = self.told[1][0] if self.told and self.told[1] else ()
        if not self.open or event["pos"] != known:
            yield f"drew anew at {event['pos']}, where nothing was refused"
        elif event["id"] not in [token for token, _ in pairs]:
            yield f"drew id {event['id']}, which is none of {[token for token, _ in pairs]}"
        self.redrawn = event["id"]

    def asks_more(self, event: Event, known: int) -> Iterator[str]:
        """A DRAFT that asks for more proposals."""
        end = self.told[1][1] + len(self.told[1][0]) if self.told and self.told[1] and self.open else self.tried
        if event["tried"] != end or event["ids"] or event["nav"] or (event["pos"], event["known"]) != (known, known):
            yield f"asks for more than the first {event['tried']} proposals at {event['pos']}, had {end} at {known}"
        self.told, self.open, self.tried = None, False, event["tried"]

    def committed(self, event: Event) -> Iterator[str]:
        """What was drawn is committed."""
        if (event["ids"], event["accepted"]) != ([self.redrawn], [False]):
            yield f"commits {event['ids']}, accepted {event['accepted']}, where id {self.redrawn} was drawn"
        self.told, self.open, self.tried, self.brought, self.redrawn = None, False, None, False, None
        self.unheard, self.unsaid, self.said_at_once = True, not self.said_at_once, False

    @property
    def pending(self) -> bool:
        """Whether nothing may be drafted or sent until an id was drawn."""
        return self.open or self.tried is not None
