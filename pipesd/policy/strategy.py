"""Strategies: which rung of the cloud's ladder, whether and when to draft, when to ask. Presets by name."""

from __future__ import annotations

from dataclasses import dataclass

from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.policy.trigger import FixedLength, Trigger

PRESETS = ("vanilla", "cloud", "local")
PLANNED = ("hsl", "edgellm", "pipesd", "flow", "auto")


@dataclass(frozen=True)
class Strategy:
    """One way to share the work. `trigger` is None where the edge does not draft for verification."""

    name: str
    mode: Mode
    trigger: Trigger | None

    @property
    def drafts(self) -> bool:
        """Whether the edge proposes tokens to the cloud."""
        return self.trigger is not None

    @property
    def uses_cloud(self) -> bool:
        return self.name != "local"


def make_strategy(name: str, draft_length: int) -> Strategy:
    """The preset `name`: `vanilla` asks after `draft_length` tokens and waits; `cloud` lets the target decode alone and
    only listens; `local` is the draft model alone, whose output is not the target's.

    Raises UsageError for any other name.
    """
    if name == "vanilla":
        return Strategy(name, Mode.NAV, FixedLength(draft_length))
    if name == "cloud":
        return Strategy(name, Mode.FREE, None)
    if name == "local":
        return Strategy(name, Mode.NAV, None)
    if name in PLANNED:
        raise UsageError(f"strategy {name!r} is not part of this version: choose one of {', '.join(PRESETS)}")
    raise UsageError(f"unknown strategy {name!r}: choose one of {', '.join(PRESETS)}")
