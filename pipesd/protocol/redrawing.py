"""Where the cloud refused a draft token and the edge draws what stands there: how far that has come."""

from __future__ import annotations

from dataclasses import dataclass

from pipesd.policy.accept import ToldLaw


@dataclass
class Redrawing:
    """The refusal that is being answered, then the id that was drawn, the last of the committed ones."""

    due: bool = False  # the driver is to draw
    tried: int | None = None  # it took none of the first `tried` proposals, and the cloud is asked for more
    asked: bool = False  # the link took that question
    brought: bool = False  # the verdict brought ids too, and counted as a round
    unsaid: bool = False  # the id was drawn, and the link did not take it yet
    unheard: bool = False  # no message of the cloud has shown that it has the id
    pending: bool = False  # an id is still to be drawn: it is due, or what the cloud is asked for decides

    def answers(self, refused: ToldLaw) -> bool:
        """Whether `refused` is what the edge waits for, and no repetition of what it had."""
        return not self.due and refused.first in (None, self.tried or 0)

    def begin(self, *, brought: bool) -> None:
        """The driver is to draw, from new proposals if there were some."""
        self.brought = brought or self.brought
        self.due, self.tried, self.pending = True, None, True

    def ask(self, tried: int) -> None:
        self.due, self.tried, self.pending = False, tried, True
