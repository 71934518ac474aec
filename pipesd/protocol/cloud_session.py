"""What the cloud's machine holds of one session, the bounds that it grants, and a session's share of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pipesd.core import LEAST_AHEAD, Mode


@dataclass(frozen=True)
class CloudLimits:
    """What one worker grants. `draft_ahead` bounds a session's draft, `run_ahead` its unacknowledged free run (tokens).

    A session unheard of for `quiet_s` may be evicted when there is no room, for `idle_s` it is forgotten.
    """

    context: int
    vocabulary_size: int
    max_sessions: int = 8
    draft_ahead: int = 32
    run_ahead: int = 64
    prefill_piece: int = 128
    idle_s: float = 600.0
    quiet_s: float = 5.0
    full_retry_ms: int = 500

    def __post_init__(self) -> None:
        assert self.max_sessions >= 1 and self.context >= 2 and self.prefill_piece >= 1
        assert min(self.draft_ahead, self.run_ahead) >= LEAST_AHEAD


class Work(NamedTuple):
    """One session's share of a pass: cut the slot to `keep` positions, append `ids`, and give the target's choice for
    each of the last `rows` (none for a piece of the prefill)."""

    session: int
    slot: int
    keep: int
    ids: tuple[int, ...]
    rows: int


@dataclass
class CloudSession:
    """One session as its worker holds it."""

    session: int
    slot: int
    opening: int
    heard_s: float
    committed: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    epoch: int = -1
    dead: bool = False
    end: int = 0
    known: int = 0
    want: int = 0  # a verdict is owed while the committed length is below
    want_end: int = 0  # the branch must be known up to here first
    said: int = 0
    repeat: bool = False
    mode: Mode = Mode.NAV
    limit: int = 0
    stop_ids: frozenset[int] = frozenset()
    ended: bool = True
    opened: bool = False  # OPENED was sent: the prefill is done
    answered: bool = True  # the first verdict of this opening was sent
    hole_asked: bool = False
    cached: int = 0  # positions of `committed` that the target's slot holds
    passes: int = 0
    verified: int = 0
    stale: int = 0
    busy_s: float = 0.0
    owed_since_s: float = 0.0
    verdicts: int = 0

    @property
    def owed(self) -> bool:
        """A verdict is owed: asked for, not reached, and the branch lives."""
        return not self.ended and not self.dead and len(self.committed) < self.want

    def wants_pass(self, run_ahead: int) -> bool:
        if self.ended or not self.opened:
            return False
        if self.owed and self.end >= self.want_end:
            return True
        if self.draft:
            return self.mode >= Mode.EAGER
        return self.mode is Mode.FREE and len(self.committed) - self.known < run_ahead

    def kill_branch(self) -> None:
        self.dead = True
        self.stale += len(self.draft)
        self.draft = []
        self.want = self.want_end = 0
