"""How long the edge waits: when to ask again, and when to give up. Pure: times are arguments, in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable

from pipesd.errors import PipeSDError, Unreachable

LEAST_DEADLINE_S = 0.5  # below, ordinary recovery of a lost packet would be taken for a loss of ours
MOST_DEADLINE_S = 15.0
ASKS = 3  # the least number of times to ask before giving up
RTTS = 5  # one lost small packet costs several round trips before TCP sends it again
GIVE_UP_FACTOR = 10  # with a cloud that answers probes but has no worker for this session


def _advice() -> str:
    return "check that it runs and can be reached"


class Patience:
    """Deadlines of one generation. `start`, then `heard` at each message; `due` says that it is time to ask again.

    A deadline counts from the last message of the cloud, or from when the link has taken what was said, where that is
    known and later. It is at least 5 round trips and the longest pass announced, but at most a third of `patience_s`;
    it doubles while nothing of this opening comes and goes back at any message of it. The generation ends after silence
    of `patience_s`, or ten times that without a word of this opening or of a living worker from a cloud that answers
    probes, or `stall_s` without anything new whatever the cloud says. Time by which a question comes too late does not
    count: then it was this side that did not listen (a long step of the draft model, a process that was stopped).
    """

    def __init__(self, patience_s: float, stall_s: float = math.inf) -> None:
        self.patience_s, self.stall_s = patience_s, stall_s
        self._most_s = MOST_DEADLINE_S
        self._base_s = self._step_s = LEAST_DEADLINE_S
        self._next_s = self._any_s = self._own_s = self._moved_s = 0.0
        self._retry_since_s: float | None = None
        self._retry: tuple[float, PipeSDError] | None = None

    def start(self, now_s: float, rtt_s: float, pass_s: float = 0.0) -> None:
        """Begin a generation, or learn a longer pass."""
        self._most_s = min(MOST_DEADLINE_S, max(self.patience_s / ASKS, 2 * rtt_s))
        self._base_s = min(self._most_s, max(RTTS * rtt_s, 2 * pass_s, LEAST_DEADLINE_S))
        self._any_s = self._own_s = now_s
        self._retry = self._retry_since_s = None
        self._step_s = self._base_s
        self._next_s = now_s + self._step_s

    def heard(self, now_s: float, *, own: bool) -> None:
        """Something came from the cloud; `own`: a message of this opening."""
        self._any_s = now_s
        if own:
            self._own_s = now_s
            self._retry = self._retry_since_s = None
            self._step_s = self._base_s
            self._next_s = now_s + self._step_s

    def taken(self, free_s: float) -> None:
        """The link will have taken all that was said by `free_s`, so a deadline begins there: but not later than the
        longest one after the last message that came, lest a link that is thought to be busy for ever hides a loss."""
        self._next_s = max(self._next_s, min(free_s, self._any_s + self._most_s) + self._step_s)

    def crossed(self, now_s: float) -> None:
        """The cloud has had what was said last, if it came: now its answer should not be long."""
        self._step_s = self._base_s
        self._next_s = min(self._next_s, now_s + self._step_s)

    def alive(self, now_s: float) -> None:
        """The session's worker lives, whatever keeps it busy: the cloud itself ends one that stands still."""
        self._own_s = now_s

    def moved(self, now_s: float) -> None:
        """A generation began, or something new was committed."""
        self._moved_s = now_s

    def quiet(self, now_s: float) -> bool:
        """Whether `check`, `retry_due` and `due` have nothing to say now: one question in place of three, at every
        draft token."""
        return self._retry is None and now_s < self._next_s and now_s - self._moved_s <= self.stall_s

    def check(self, now_s: float) -> None:
        """Raises Unreachable when nothing new has come for `stall_s`, whatever else the cloud says."""
        if now_s - self._moved_s > self.stall_s:
            raise Unreachable(f"the cloud lives, but has brought nothing new for {self.stall_s:g} s")

    def rest(self, now_s: float) -> None:
        """Nothing is awaited: silence until now does not count."""
        self._any_s = self._own_s = self._moved_s = now_s
        self._next_s = now_s + self._step_s

    def retry(self, now_s: float, after_s: float, why: PipeSDError) -> None:
        """The cloud cannot serve just now and named a time to come again, which is waited for up to `patience_s`."""
        self._any_s = self._own_s = now_s
        if self._retry_since_s is None:
            self._retry_since_s = now_s
        self._retry = (now_s + min(max(after_s, 0.05), self.patience_s), why)

    @property
    def put_off(self) -> bool:
        """Whether the cloud named a time to come again that has not come."""
        return self._retry is not None

    def wait_s(self, now_s: float) -> float:
        """Time until something is due."""
        return max(0.0, (self._retry[0] if self._retry else self._next_s) - now_s)

    def retry_due(self, now_s: float) -> bool:
        """Whether it is time to come again; raises what the cloud said once that has gone on for `patience_s`."""
        if self._retry is None or now_s < self._retry[0]:
            return False
        assert self._retry_since_s is not None
        self._retry_since_s += now_s - self._retry[0]
        if now_s - self._retry_since_s > self.patience_s:
            raise self._retry[1]
        self._retry = None
        self._next_s = now_s + self._step_s
        return True

    def due(self, now_s: float, explain: Callable[[], str] = _advice) -> bool:
        """Whether it is time to ask again (each time doubles the deadline); raises Unreachable when it is time to give
        up, with what `explain` says of the silence."""
        if self._retry is not None or now_s < self._next_s:
            return False
        self._any_s += now_s - self._next_s
        self._own_s += now_s - self._next_s
        if now_s - self._any_s > self.patience_s:
            raise Unreachable(f"nothing heard from the cloud for {self.patience_s:g} s: {explain()}")
        if now_s - self._own_s > GIVE_UP_FACTOR * self.patience_s:
            raise Unreachable(
                f"the cloud answers, but has had no worker for this session for {GIVE_UP_FACTOR * self.patience_s:g} s"
            )
        self._step_s = min(2 * self._step_s, self._most_s)
        self._next_s = now_s + self._step_s
        return True
