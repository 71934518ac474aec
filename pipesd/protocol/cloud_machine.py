"""The cloud's side of all sessions of one worker as a state machine: messages in, messages and passes out; no I/O.

A session holds the committed ids `C` (length c) and the draft `B` behind them in epoch `E`; `end` is how far it has
seen this branch without a hole, `known` the longest committed length the edge has acknowledged, `want` up to where a
verdict is owed, `said` up to where verdicts were sent. Where draft tokens are tested against a random number and one is
refused, the session is `awaiting` what the edge draws for its place, c.

    message             condition                      action
    OPEN(o, base, ...)  o <= own                       dropped
                        digest does not fit            RESEND(0)
                        no room                        evict, or ERROR(full)
                        else                           C = kept + ids; E = -1, B = []; prefill; OPENED
    DRAFT               no session, o > own            ERROR(unknown, o)
                        o < own                        dropped
                        tested, without p_draft        ERROR(malformed), ended
                        awaiting, known = c + 1        if pos <= c < pos + n, C += [the id at c], awaiting nothing, a
                                                       stop id ends; else it goes on
                        known > c otherwise            ERROR(unknown, o)
                        always, in this order          known = max; `again`: said = min(said, known), OPENED and
                                                       VERDICT once more (the limit granted may have been lost), with
                                                       `tried` the VERDICT alone, what was tried left out
                        e < E, dead, or ended          stale += n, stop here
                        e > E                          E = e, B = [], want none, end = min(known, c)
                        NAV                            want = max(want, pos + n, known + 1)
                        pos > end                      RESEND(E, end), once per hole; stop here
                        each id at p                   p < c: unequal -> dead, B = [], want none, rest stale;
                                                       in B: must be equal; else append. end = max(end, pos + n)
    CANCEL(o)           o own                          ended (the ids stay for the next OPEN)
    CLOSE(o)            o own                          forget

    worker free         condition                      action
    pass                prefilled, not ended, not      accept B (on NAV up to want) while equal, or as the tests say; a
                        awaiting, and (owed, or mode   stop id or the limit ends; first difference: commit the own id,
                        >= eager and B, or mode =      dead, B = []; a refusal: awaiting, dead, B = [];
                        free, B empty,                 all accepted: commit the own id, compare it with B[0]
                        c - known < W)
    say                 said < c, asked to, or just    VERDICT(said, C[said:]), `rejected` while awaiting; said = c
                        refused

A verdict is owed while c < want, the branch lives and nothing is awaited; while `end` has not reached the end of what
was asked for, RESEND was sent and the pass waits. Where drafts are tested no own id stands where the edge may have
drawn one, or what is tested would hang on what it drew, and on what arrived in time: behind what was accepted whole
none is committed unless a verdict is owed still and nothing is drafted, and mode = free is taken for eager.

No session is evicted between OPEN and its first verdict, nor while a verdict is owed or a pass is due, unless cancelled
or idle too long. Passes and pieces of prefill take turns, so that neither holds up the other by more than one.
"""

from __future__ import annotations

from pipesd.core import Mode, common_prefix
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.sampler import Sampler
from pipesd.protocol.cloud_comparing import error, take_choices, take_draft
from pipesd.protocol.cloud_session import EAGER, FREE, CloudLimits, CloudSession, Work
from pipesd.protocol.fields import U32
from pipesd.protocol.messages import (
    Cancel,
    Close,
    Counters,
    Draft,
    Error,
    ErrorCode,
    Gone,
    Message,
    Open,
    Opened,
    Resend,
    Verdict,
)
from pipesd.protocol.vocabulary import digest

COUNTERS_EVERY = 8  # a free run tells its counters with every so many verdicts: they cost up to ten bytes


class CloudMachine:
    """All sessions of one worker. `receive` takes messages, `work` says what a pass should compute, `done` takes its
    result, `tick` forgets the idle. Messages returned are to be sent; slots in `take_freed` hold nothing of use."""

    def __init__(self, limits: CloudLimits, pass_ms: int = 1) -> None:
        self.limits = limits
        self._pass_ms = pass_ms  # the longest pass so far: edges wait at least as long before they ask again
        self._sessions: dict[int, CloudSession] = {}
        self._free_slots = list(range(limits.max_sessions))[::-1]
        self._freed: list[int] = []
        self._prefills = 0
        self._prefill_next = False

    @property
    def sessions(self) -> int:
        """Number of sessions that hold a slot."""
        return len(self._sessions)

    def committed(self, session: int) -> tuple[int, ...]:
        """The ids committed in a session (KeyError if it is unknown)."""
        return tuple(self._sessions[session].committed)

    def take_freed(self) -> list[int]:
        """Slots that were given up since the last call; the target may drop their caches."""
        freed, self._freed = self._freed, []
        return freed

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now_s: float) -> list[Message]:
        """Take one message of an edge; `now_s` only ever grows."""
        if isinstance(message, Open):
            return self._open(message, now_s)
        s = self._sessions.get(message.session)
        if isinstance(message, Draft):
            if s is None or message.opening > s.opening:
                text = "no such session here" if s is None else "no such opening here"
                return [error(message, ErrorCode.UNKNOWN, text)]
            if message.opening < s.opening:
                return []
            s.heard_s = now_s
            return self._draft(s, message, now_s)
        if s is None or message.opening != s.opening:
            return []
        s.heard_s = now_s
        if isinstance(message, Cancel):
            s.ended = True
            s.kill_branch()
        elif isinstance(message, Close):
            return [self._forget(s)]
        return []

    def _open(self, m: Open, now_s: float) -> list[Message]:
        s = self._sessions.get(m.session)
        if s is not None and m.opening <= s.opening:
            return []
        kept: list[int] = []
        if m.base:
            if s is None or len(s.committed) < m.base or digest(s.committed[: m.base]) != m.digest:
                if s is not None:
                    s.heard_s = now_s
                return [Resend(m.session, m.opening, 0, 0)]
            kept = s.committed[: m.base]
        length = len(kept) + len(m.ids)
        if length == 0:
            return [error(m, ErrorCode.MALFORMED, "an opening needs at least one id")]
        biased = () if m.sampling is None else (token for token, _ in m.sampling.logit_bias)
        outside = [token for token in (*m.ids, *biased) if token >= self.limits.vocabulary_size]
        if outside:
            return [self._outside(m, outside[0])]
        if length >= self.limits.context or m.limit <= length:
            bound = min(self.limits.context, m.limit)
            what = "the target's context" if bound == self.limits.context else "the limit"
            return [error(m, ErrorCode.LIMIT, f"the prompt has {length} ids, {what} is {bound}: shorten the prompt")]
        replies: list[Message] = []
        if s is None:
            if not self._free_slots:
                evicted = self._evict(now_s)
                if evicted is None:
                    text = f"all {self.limits.max_sessions} sessions of this worker are in use"
                    return [error(m, ErrorCode.FULL, text, self.limits.full_retry_ms)]
                replies.append(evicted)
            s = self._sessions[m.session] = CloudSession(m.session, self._free_slots.pop(), m.opening, now_s)
        fresh = CloudSession(m.session, s.slot, m.opening, now_s)
        fresh.committed = kept + list(m.ids)
        fresh.end = fresh.known = fresh.said = length
        fresh.sampler = None if m.sampling is None else Sampler(m.sampling, m.seed)
        fresh.set_mode(m.mode)
        fresh.limit = min(m.limit, self.limits.context)
        fresh.stop_ids = frozenset(m.stop_ids)
        fresh.ended = fresh.answered = False
        fresh.cached = min(s.cached, common_prefix(s.committed, fresh.committed), length - 1)
        self._sessions[m.session] = fresh
        return replies + self._open_if_ready(fresh)

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        length = len(s.committed)
        if m.known > length + (s.refusal is not None):
            return [error(m, ErrorCode.UNKNOWN, f"{m.known} ids are known at the edge, {length} here")]
        outside = [token for token in m.ids if token >= self.limits.vocabulary_size]
        if outside:
            s.ended = True
            return [self._outside(m, outside[0])]
        if m.ids and s.tests and (m.p_draft is None or s.tells_logprobs):
            s.ended = True
            why = "no log-probabilities, which go with none" if s.tells_logprobs else "p_draft"
            return [error(m, ErrorCode.MALFORMED, f"draft tokens that are tested need {why}")]
        drawn = m.known > length and not s.ended and m.pos <= length < m.pos + len(m.ids)
        if drawn and s.ends_with(m.ids[length - m.pos], now_s):
            return []
        s.acknowledge(m.known)
        replies: list[Message] = []
        if m.again:
            s.said = min(s.said, s.known)
            s.repeat, s.tried = True, m.tried or 0
            replies = self._opened(s) if m.tried is None else self._say(s)
        return replies + self._take(s, m, now_s)

    def _take(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        reply = take_draft(s, m, self.limits.draft_ahead, now_s)
        return [] if reply is None else [reply]

    # -- passes -------------------------------------------------------------------------------------------------------

    def work(self) -> list[Work]:
        """What the next pass should compute: every session that wants a verification, or one piece of one prefill, in
        turn, as do the prefills; empty when there is nothing to do. Changes nothing: `done` does."""
        passes = [self._verification(s) for s in self._sessions.values() if s.wants_pass(self.limits.run_ahead)]
        waiting = [s for s in self._sessions.values() if not s.opened and not s.ended]
        if not waiting or (passes and not self._prefill_next):
            return passes
        s = waiting[self._prefills % len(waiting)]
        piece = s.committed[s.cached : min(s.cached + self.limits.prefill_piece, len(s.committed) - 1)]
        return [Work(s.session, s.slot, s.cached, tuple(piece), 0)]

    def _verification(self, s: CloudSession) -> Work:
        length = len(s.committed)
        count = len(s.draft) if s.mode >= EAGER else min(len(s.draft), max(0, s.want_end - length))
        drafted, draw = tuple(s.draft[:count]), None
        if s.sampler is not None:
            draw = Draw(s.sampler, s.committed, drafted, tuple(s.p_draft[:count]))
        return Work(s.session, s.slot, length - 1, (s.committed[-1], *drafted), count + 1, draw)

    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        """Take a pass's result: what the target makes of the last `work.rows` ids (of no meaning for a piece of the
        prefill). `elapsed_s` is how long the pass took."""
        s = self._sessions[work.session]
        s.heard_s = now_s  # who waits for a long pass is not idle
        self._pass_ms = max(self._pass_ms, round(elapsed_s * 1000))
        self._prefill_next = work.rows > 0
        if not work.rows:
            self._prefills += 1
            s.cached += len(work.ids)
            return self._open_if_ready(s)
        was_owed = s.owed
        s.passes += 1
        finite = take_choices(s, work.ids[1:], choices)
        s.busy_s += (now_s - s.owed_since_s) if was_owed else elapsed_s
        s.owed_since_s = now_s
        replies = self._say(s, counters=was_owed)
        if not finite:
            text = f"the target gave logits that are not finite behind position {len(s.committed) - 1}"
            if s.sampler is not None and s.sampler.sampling.logit_bias:
                text += ", or logit-bias forbids all ids"
            replies.append(Error(s.session, s.opening, ErrorCode.INTERNAL, text, 0))
        return replies

    def set_mode(self, session: int, mode: Mode) -> list[Message]:
        """Put a session on another rung of the ladder; leaving free run is said."""
        s = self._sessions[session]
        left = s.mode is Mode.FREE and mode is not Mode.FREE
        s.set_mode(mode)
        s.repeat = s.repeat or left
        return self._say(s)

    def tick(self, now_s: float) -> list[Message]:
        """Forget the sessions that were not heard of for too long."""
        idle = [s for s in self._sessions.values() if now_s - s.heard_s > self.limits.idle_s]
        return [self._forget(s) for s in idle]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open_if_ready(self, s: CloudSession) -> list[Message]:
        s.opened = s.cached == len(s.committed) - 1
        return self._opened(s)

    def _opened(self, s: CloudSession) -> list[Message]:
        """What was granted, and what is to be said."""
        if not s.opened:
            return []
        limits = self.limits
        granted = Opened(s.session, s.opening, s.limit, limits.draft_ahead, limits.run_ahead, self._pass_ms)
        return [granted, *self._say(s)]

    def _say(self, s: CloudSession, *, counters: bool = False) -> list[Message]:
        if not s.opened or (s.said == len(s.committed) and not s.repeat):
            return []
        ids = tuple(s.committed[s.said :])
        counters = counters or s.ended or s.repeat or s.verdicts % COUNTERS_EVERY == 0
        told = None
        if counters:  # an edge can flood them
            busy_100us = min(round(s.busy_s * 1e4), U32)
            told = Counters(min(s.passes, U32), min(s.verified, U32), min(s.stale, U32), busy_100us)
        more = s.mode is FREE and not s.ended
        logprobs = s.logprobs_of(s.said) if ids and s.tells_logprobs else None
        verdict = Verdict(
            s.session, s.opening, max(s.epoch, 0), s.said, ids, more, s.refusal is not None, told, s.told, logprobs
        )
        s.said = len(s.committed)
        s.repeat = False
        s.answered = s.answered or bool(ids) or s.refusal is not None
        s.verdicts += 1
        return [verdict]

    def _evict(self, now_s: float) -> Message | None:
        """Make room: a session that ended, else the one unheard of for longest, if that is long enough."""
        quiet_s, run_ahead = self.limits.quiet_s, self.limits.run_ahead
        free = [
            s
            for s in self._sessions.values()
            if now_s - s.heard_s > self.limits.idle_s
            or s.ended
            or (s.answered and not s.owed and not s.wants_pass(run_ahead) and now_s - s.heard_s > quiet_s)
        ]
        return self._forget(min(free, key=lambda s: (not s.ended, s.heard_s))) if free else None

    def _forget(self, s: CloudSession) -> Message:
        del self._sessions[s.session]
        self._free_slots.append(s.slot)
        self._freed.append(s.slot)
        return Gone(s.session, s.opening)

    def _outside(self, m: Open | Draft, token: int) -> Message:
        text = f"id {token} is outside the target's vocabulary of {self.limits.vocabulary_size}"
        return error(m, ErrorCode.MALFORMED, text)
