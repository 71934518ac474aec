"""What the cloud's machine holds of one session, the bounds that it grants, and a session's share of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pipesd.core import LEAST_AHEAD, Logprobs, Mode
from pipesd.policy.accept import Draw, Refusal, ToldLaw
from pipesd.policy.sampler import Sampler

EAGER, FREE = Mode.EAGER, Mode.FREE  # looked up once: an enum's member costs ten times what a global does


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
    each of the last `rows` (none for a piece of the prefill). `draw` says how they are drawn, None: the highest logit
    each."""

    session: int
    slot: int
    keep: int
    ids: tuple[int, ...]
    rows: int
    draw: Draw | None = None


@dataclass
class CloudSession:
    """One session as its worker holds it."""

    session: int
    slot: int
    opening: int
    heard_s: float
    committed: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    p_draft: list[float] = field(default_factory=list)  # of each of `draft`, where it is tested
    sampler: Sampler | None = None  # None: the highest logit
    logprobs: list[Logprobs] = field(default_factory=list)  # of the committed ids from `known` on, where they are told
    refusal: Refusal | None = None  # the edge's draw is awaited
    tried: int = 0  # how many proposals of it the edge refused
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
        """A verdict is owed: asked for, not reached, the branch lives, and the edge has nothing to say first."""
        return len(self.committed) < self.want and not (self.ended or self.dead or self.refusal is not None)

    @property
    def tests(self) -> bool:
        """Draft tokens are tested against a random number."""
        return self.sampler is not None and self.sampler.sampling.tests

    @property
    def tells_logprobs(self) -> bool:
        return self.sampler is not None and self.sampler.sampling.logprobs is not None

    def logprobs_of(self, pos: int) -> tuple[Logprobs, ...]:
        """Those of the committed ids from `pos` on, which must be of this opening."""
        return tuple(self.logprobs[len(self.logprobs) - len(self.committed) + pos :])

    def acknowledge(self, known: int) -> None:
        """The edge has the ids below `known`: what goes with them is never repeated."""
        self.known = max(self.known, known)
        del self.logprobs[: max(0, len(self.logprobs) - len(self.committed) + self.known)]

    @property
    def told(self) -> ToldLaw | None:
        """What the edge is told of the refusal that stands."""
        return None if self.refusal is None else self.refusal.told(self.tried)

    def set_mode(self, mode: Mode) -> None:
        """The ladder's top rung would put tokens where the edge may have drawn some."""
        self.mode = min(mode, Mode.EAGER) if self.tests else mode

    def wants_pass(self, run_ahead: int) -> bool:
        if self.ended or not self.opened:
            return False
        if self.owed and self.end >= self.want_end:
            return True
        if self.draft:
            return self.mode >= EAGER
        return self.mode is FREE and len(self.committed) - self.known < run_ahead

    def kill_branch(self) -> None:
        self.dead = True
        self.drop_draft()
        self.want = self.want_end = 0

    def drop_draft(self) -> None:
        self.stale += len(self.draft)
        self.draft, self.p_draft = [], []

    def refuse(self, refusal: Refusal) -> None:
        """The first of the draft is refused: the edge draws what stands there."""
        self.refusal, self.tried, self.repeat = refusal, 0, True
        self.kill_branch()

    def ends_with(self, token: int, now_s: float) -> bool:
        """The edge drew `token` for what was awaited, and needs no verdict to know it; whether that is the end."""
        self.refusal = None
        self.committed.append(token)
        self.cached = len(self.committed) - 1  # the refusing pass went over the position before
        self.said = len(self.committed)
        assert len(self.committed) < self.limit, "no draft token is kept for the last place"
        self.owed_since_s = now_s
        self.ended = token in self.stop_ids
        return self.ended
