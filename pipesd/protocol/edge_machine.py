"""The edge's side of a session as a state machine: events in, actions out, no I/O, no clock.

The edge holds the committed ids `K` (length k) and its draft `D` behind them, in epoch `e` of opening `o`. `sent` is
the position up to which the draft has been sent, `nav` what was asked and is not yet answered, as (end of the draft,
known).

    state         event                    condition                  action
    idle, done    generate                                            cut K, append the prompt; o += 1, e = 0, D = [];
                                                                      OPEN -> opening
    opening       OPENED or VERDICT                                   -> run
    opening       deadline                                            open again: o += 1, e = 0, nav stays and of D as
                                                                      much as every cloud allows; OPEN
    opening, run  drafted                  may_draft                  D += [id]
    opening, run  send                     sent < k + len(D)          DRAFT(pos = sent, known = k)
    opening, run  ask                      nav none or its end grows  the same with NAV; nav = (k + len(D), k)
    waiting       ask                                                 nav, said when the cloud was opened again
    run           VERDICT                  pos > k                    once per hole: DRAFT(all of D, again)
                                           each id at p >= k          D empty: commit, the drafter decodes it;
                                                                      D[0] equal: commit;
                                                                      D[0] differs: roll back to p, commit, D = [],
                                                                      e += 1, nav = none. Stop id or limit: done
                                           id at p < k                must be equal
                  then                     k >= nav's end, known + 1  nav = none, survivors are promoted
                  `rejected`               pos + n = k                D[0] is refused: Redraw; till it is answered
                                                                      nothing is drafted or sent
    run           redrawn                  a draw is due              roll back to k, commit, D = [], e += 1,
                                                                      nav = none; the next DRAFT begins with that id:
                                                                      pos = k - 1, known = k
    run           ask_more                 a draw is due              DRAFT(pos = k, no ids, again, tried)
    run           RESEND of own epoch      pos <= k + len(D)          DRAFT from there, NAV if nav; below k only a
                                                                      redrawn id, till the cloud has shown to have it
    opening       RESEND(0)                base > 0                   open again with base 0
                                           base = 0                   ProtocolError: nothing is left to prove
    run           deadline                                            DRAFT(all sent of D, again, NAV if nav), behind
                                                                      the redrawn id; or the question for more again
    opening, run  ERROR(unknown)           first since a commit       open again with base 0
                                           later                      Retry -> waiting, twice as long each time;
                                                                      Fail after too many
    opening, run  ERROR with a retry time                             Retry -> waiting
    waiting       reopen                                              open again
    opening, run  any other ERROR                                     Fail
    any           other opening; all while waiting                    dropped
    opening, run  stop_drafting            D = [] or not tested       D = []; open again in free run
                                           else                       nothing more is drafted, D is asked about; when it
                                                                      is empty, open again in free run
    opening, run  resume_drafting                                     open again, to be verified when asked
    opening, run  cancel                                              CANCEL; D = [] -> done

An edge that can only wait has a NAV outstanding, except with an empty draft behind a VERDICT that said `more`: `settle`
keeps this rule. In free run it acknowledges by an empty DRAFT when half the run-ahead bound was committed unsaid.

Where draft tokens are tested against a random number, each that was drafted is tested: whether the cloud draws in its
place must not hang on what it is. So nothing is drafted where the cloud was asked for a token of its own, drafting
stops behind the last test, and no more is drafted ahead than every cloud allows: an opening cuts nothing off. The
redrawn id may equal the refused one: that branch is over all the same. Until a message of the cloud has shown that it
has a redrawn id, a new opening does not ask it to prove that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from pipesd.core import LEAST_AHEAD, FinishReason, Logprobs, Mode
from pipesd.errors import ProtocolError
from pipesd.protocol.actions import Action, Committed, Done, Extend, Fail, Redraw, Request, Retry, Send
from pipesd.protocol.edge_branch import EdgeBranch
from pipesd.protocol.edge_counts import EdgeCounts
from pipesd.protocol.messages import (
    Cancel,
    Close,
    Error,
    ErrorCode,
    Message,
    Opened,
    Resend,
    Verdict,
)
from pipesd.protocol.redrawing import Redrawing

FIRST_REST_S, MOST_REST_S = 0.1, 5.0  # before opening again where nothing was committed since the last time
MOST_UNKNOWN = 16  # how often a cloud may forget a session without a new id: about a minute
RETRIED = frozenset({ErrorCode.FULL, ErrorCode.STARTING, ErrorCode.DRAINING})


class State(Enum):
    IDLE = "idle"
    OPENING = "opening"
    WAITING = "waiting"  # refused for now: what else comes of this opening is of no interest
    RUN = "run"
    DONE = "done"


# Looked up once: the name of an enum's member costs ten times what a global does, and states are asked for per token.
IDLE, OPENING, WAITING, RUN, DONE = State
RUNNING, TALKING = (RUN, OPENING, WAITING), (RUN, OPENING)


class EdgeMachine(EdgeBranch):
    """One session as the edge sees it. Drive it with `generate`, `receive`, `drafted`, `redrawn`, `ask_more`, `send`,
    `ask`, `settle`, `deadline`, `reopen`, `stop_drafting`, `resume_drafting`, `cancel`; perform what they return, in
    order."""

    def __init__(self, session: int, draft_ahead: int) -> None:
        super().__init__(session)
        self.state = IDLE
        self.more = False
        self._draft_ahead_wanted = draft_ahead
        self._most_ahead = draft_ahead  # in this generation, however much the cloud grants
        self._draft_ahead = draft_ahead
        self._run_ahead = 0
        self._limit = 0
        self._drafts = False
        self._stopping = False  # what was drafted is tested, then the cloud goes on alone
        self._ahead = False
        self._base = 0  # how many committed ids the cloud can be asked to prove
        self._proved = 0  # how many of them this opening asks it to
        self._unknown = 0  # how often the cloud knew nothing of the session since the last commit

    # -- what the driver asks -----------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.state in RUNNING

    @property
    def awaits(self) -> bool:
        """Whether the cloud owes an answer."""
        return self.nav is not None or self.more or self._redraw.tried is not None

    @property
    def redrawing(self) -> bool:
        """Whether a draft token was refused and what stands there is still to be drawn."""
        return self._redraw.pending

    @property
    def _talks(self) -> bool:
        return self.state in TALKING

    @property
    def may_draft(self) -> bool:
        """Whether another draft token is of use now."""
        if not self._drafts or self.state not in RUNNING or self._redraw.pending:
            return False
        nav, known, drafted = self.nav, len(self.committed), len(self.draft)
        if nav is not None and (not self._ahead or (nav[0] <= known and self._tests)):
            return False  # the edge is to wait, or there the cloud draws
        if drafted >= self._draft_ahead or known + drafted >= self._limit - 1:
            return False
        assert self._request is not None
        return not drafted or self.draft[-1] not in self._request.stop_ids

    @property
    def drafts(self) -> bool:
        """Whether this generation drafts now, or has a draft that is still to be tested."""
        return self._drafts or self._stopping

    @property
    def stopping(self) -> bool:
        """Whether it drafts no more, but has a draft that is still to be tested."""
        return self._stopping

    @property
    def nav_said(self) -> bool:
        """Whether the link took what asks for the NAV that is outstanding."""
        return self._nav_said

    @property
    def must_ask(self) -> bool:
        """Whether nothing can be done any more but to ask for verification, or for one token."""
        if self.nav is not None or self.state is not RUN or (self.more and not self.draft) or self._redraw.pending:
            return False
        return not self.may_draft

    # -- events -------------------------------------------------------------------------------------------------------

    def generate(
        self, keep: int, prompt: Sequence[int], request: Request, *, drafts: bool, ahead: bool = False
    ) -> list[Action]:
        """Begin a generation: the first `keep` committed ids stay, `prompt` follows. `ahead`: draft on while a NAV is
        outstanding."""
        assert not self.running, "one generation at a time"
        assert 0 <= keep <= len(self.committed) and keep + len(prompt) >= 1, "an opening needs at least one id"
        base = min(self._base, keep)
        del self.committed[keep:]
        self.committed.extend(prompt)
        self.draft, self.p_sent = [], []
        self._counts = EdgeCounts(round_start=len(self.committed))
        self._request = request
        self._most_ahead = min(self._draft_ahead_wanted, LEAST_AHEAD) if self._tests else self._draft_ahead_wanted
        self._limit = request.limit
        self._drafts, self._ahead, self._stopping = drafts, ahead, False
        self._unknown = 0
        return self._open(base)

    def receive(self, message: Message) -> list[Action]:
        """Take a message from the cloud; those of another session or opening are dropped."""
        if message.session != self.session or message.opening != self.opening or not self._talks:
            return []
        if isinstance(message, Verdict):
            return self._verdict(message)
        if isinstance(message, Opened):
            return self._opened(message)
        if isinstance(message, Resend):
            return self._resend(message)
        if isinstance(message, Error):
            return self._error(message)
        raise ProtocolError(f"the cloud sent a {type(message).__name__}, which only an edge may send")

    def drafted(self, token: int, p_sent: float | None = None) -> None:
        """The drafter drew `token` behind the draft; `p_sent` is its probability as the cloud is to be told it, needed
        where draft tokens are tested."""
        assert self.may_draft
        self._counts.drafted(self.end, proactive=self.nav is not None)
        self.draft.append(token)
        if self._tests:
            assert p_sent is not None, "a draft token that is tested needs its probability"
            self.p_sent.append(p_sent)

    def redrawn(self, token: int) -> list[Action]:
        """What the driver drew for the refused token's place; nothing comes of it if that is over by now."""
        if not self._redraw.due:
            return []
        pos = len(self.committed)
        if self.draft:
            self._counts.compared(pos, accepted=False)
        self.tally.rounds += not self._redraw.brought
        actions = self._lose_branch()
        self._redraw = Redrawing(unsaid=True, unheard=True)
        self.committed.append(token)
        self._counts.round_start = self.sent = pos + 1
        self._unknown = 0
        ended = self._ended_by(token)
        if ended:  # else it goes with the draft that follows
            actions.append(self._draft(pos + 1, pos + 1, nav=False))
        actions += [Extend((token,)), Committed(pos, (token,), (False,), True)]
        return actions + (self._finish(ended) if ended else [])

    def ask_more(self, tried: int) -> list[Action]:
        """The driver took none of the first `tried` proposals for the refused token's place."""
        if not self._redraw.due:
            return []
        self._redraw.ask(tried)
        return [self._ask_more()]

    def send(self) -> list[Action]:
        """Send what of the draft was not sent yet."""
        if not self._talks or self._redraw.pending or self.sent >= self.end:
            return []
        return [self._draft(self.sent, self.end, nav=False)]

    def ask(self, end: int | None = None) -> list[Action]:
        """Ask for verification of the draft up to position `end`, or all of it (NAV); an empty one asks for a token.
        What lies behind stays unsent."""
        end = self.end if end is None else end
        if self.draft and self._tests:
            end = max(end, len(self.committed) + 1)  # what was drawn is tested
        assert len(self.committed) <= end <= self.end
        if not self.running or self._redraw.pending or (self.nav is not None and end <= self.nav[0]):
            return []
        self.nav = (end, len(self.committed))
        self._nav_said = False
        self.tally.navs += 1
        return [self._draft(min(self.sent, end), end, nav=True)] if self._talks else []

    def settle(self) -> list[Action]:
        """Never wait in silence: ask when nothing else can be done, acknowledge in free run."""
        if not self._talks or self._redraw.due:
            return []
        if self._redraw.pending:
            return [] if self._redraw.asked else [self._ask_more()]
        if self._stopping and not self.draft:
            return self._go_alone()
        if self.nav is not None and not self._nav_said:
            return [self._draft(min(self.sent, self.nav[0]), self.nav[0], nav=True)]
        if self.must_ask:
            return self.ask()
        if self.more and self._run_ahead <= 2 * (len(self.committed) - self._told):
            return [self._draft(self.sent, self.sent, nav=False)]
        return []

    def deadline(self) -> list[Action]:
        """Nothing was heard of this opening for too long."""
        if self.state is OPENING:
            return self.reopen()
        if self.state is not RUN or self._redraw.due:
            return []
        return [self._ask_more() if self._redraw.pending else self._repeat(0, again=True)]

    def reopen(self) -> list[Action]:
        """Open again, with all committed ids; the draft stays."""
        return self._open(0) if self.running else []

    def stop_drafting(self) -> list[Action]:
        """Drafts cannot go on, or do not pay: drop the draft and open again in free run, so that the cloud decodes
        alone. Where drafts are tested this one is first: whether the cloud draws in its place must not hang on it."""
        if not self.running or not self._drafts:
            return []
        self._drafts = False
        self._stopping = self._tests and bool(self.draft)
        return [] if self._stopping else self._go_alone()

    def resume_drafting(self, mode: Mode) -> list[Action]:
        """Draft once more: open again on that rung of the cloud's ladder."""
        if not self.running or self._drafts:
            return []
        self._drafts = True
        if self._stopping:
            self._stopping = False
            return []
        assert self._request is not None
        self._request = replace(self._request, mode=mode)
        return [] if self.state is WAITING else self._open(self._base)

    def cancel(self, reason: FinishReason = "cancelled") -> list[Action]:
        """End this generation from the edge: the user interrupts, or a stop text was seen."""
        if not self.running:
            return []
        return [Send(Cancel(self.session, self.opening)), *self._finish(reason)]

    def close(self) -> list[Action]:
        """Tell the cloud to forget the session."""
        actions = self._finish("cancelled") if self.running else []
        self._base = 0
        return [*actions, Send(Close(self.session, self.opening))] if self.opening else actions

    # -- inside -------------------------------------------------------------------------------------------------------

    def _go_alone(self) -> list[Action]:
        assert self._request is not None
        self._stopping = False
        self._request = replace(self._request, mode=Mode.FREE)
        actions = self._shorten(0)
        return actions if self.state is WAITING else actions + self._open(self._base)

    def _open(self, base: int) -> list[Action]:
        assert self._request is not None
        request = self._request
        self._counts.keep()
        self._redraw = Redrawing()
        self._draft_ahead = min(self._most_ahead, LEAST_AHEAD)
        actions = self._shorten(self._draft_ahead)
        self.state = OPENING
        self.opening += 1
        self.tally.openings += 1
        self.epoch = 0
        self._nav_said = False
        self.more = False
        self.sent = self._told = len(self.committed)
        self._hole = False
        self._base, self._proved = 0, base
        self._run_ahead = LEAST_AHEAD
        opening = request.opening(self.session, self.opening, self.committed, base, drafts=self.drafts)
        return [*actions, Send(opening)]

    def _opened(self, message: Opened) -> list[Action]:
        self._run()
        assert self._request is not None
        self._limit = min(self._request.limit, message.limit)
        self._draft_ahead = min(self._most_ahead, message.draft_ahead)
        self._run_ahead = max(message.run_ahead, 1)
        room = max(self._limit - 1 - len(self.committed), 0)
        actions = self._shorten(min(self._draft_ahead, room))
        if len(self.committed) >= self._limit:
            actions += self._finish("length")
        return actions

    def _run(self) -> None:
        self.state = RUN
        self._base = len(self.committed) - self._redraw.unheard

    def _verdict(self, message: Verdict) -> list[Action]:
        if message.pos + len(message.ids) >= len(self.committed):
            self._redraw.unheard = self._redraw.unsaid = False
        self._run()
        self.more = message.more
        if message.pos > len(self.committed):
            if self._hole:
                return []
            self._hole = True
            return [self._repeat(0, again=True)]
        self._hole = False
        if message.counters is not None:  # those behind a hole count what may be verified once more elsewhere
            self._counts.hear(message.counters)
        before, at, refused = len(self.committed), message.pos + len(message.ids), message.refused
        if refused is not None and not (self._tests and at < self.end):
            raise ProtocolError(f"the cloud refused a draft token at position {at}, where it was to test none")
        actions = self._commit(message.pos, message.ids, self._logprobs(message))
        awaited = at == len(self.committed) and self.draft and self.running
        if refused is not None and awaited and self._redraw.answers(refused):
            self._redraw.begin(brought=at > before)
            if at > before:
                committed = actions.pop()
                assert isinstance(committed, Committed)
                actions.append(committed._replace(goes_on=True))
            actions.append(Redraw(at, refused))
        return actions

    def _logprobs(self, message: Verdict) -> tuple[Logprobs, ...]:
        """Those of the message's ids, where they were asked for."""
        assert self._request is not None
        if self._request.sampling is None or self._request.sampling.logprobs is None or not message.ids:
            return ()
        if message.logprobs is None:
            raise ProtocolError("the cloud said ids without the log-probabilities that it was asked for")
        return message.logprobs

    def _commit(self, pos: int, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[Action]:
        assert self._request is not None
        first = len(self.committed)
        for p, token in enumerate(ids[: first - pos], pos):
            if self.committed[p] != token:
                raise ProtocolError(
                    f"the cloud committed id {token} at position {p} where it had committed {self.committed[p]}"
                )
        committed, draft = self.committed, self.draft
        actions: list[Action] = []
        accepted: list[bool] = []
        fresh: list[int] = []  # behind the draft: the drafter has still to decode these
        rejected = False
        ended: FinishReason | None = None
        for token in ids[first - pos :]:
            equal = False
            if draft:
                equal = draft[0] == token
                self._counts.compared(len(committed), accepted=equal)
                if equal:
                    del draft[0], self.p_sent[:1]
                else:
                    rejected = True
                    actions += self._lose_branch()
            if not equal:
                fresh.append(token)
            committed.append(token)
            accepted.append(equal)
            ended = self._ended_by(token)
            if ended:
                break
        self.sent = max(self.sent, len(committed))
        if self.nav is not None and len(self.committed) >= max(self.nav[0], self.nav[1] + 1):
            self.nav = None
            self._counts.answered(len(self.committed), self.end)
        if self.nav is None:
            self._counts.round_start = len(self.committed)
        if accepted:
            self.tally.rounds += 1
            self._base = len(self.committed)
            self._unknown = 0
            if fresh:
                actions.append(Extend(tuple(fresh)))
            said = tuple(logprobs[first - pos : len(self.committed) - pos])
            actions.append(Committed(first, tuple(self.committed[first:]), tuple(accepted), rejected, said))
        return actions + (self._finish(ended) if ended else [])

    def _ended_by(self, token: int) -> FinishReason | None:
        """Whether the last committed id ends the generation."""
        assert self._request is not None
        if token in self._request.stop_ids:
            return "stop"
        return "length" if len(self.committed) >= self._limit else None

    def _finish(self, reason: FinishReason) -> list[Action]:
        actions = self._shorten(0)
        self._counts.keep()
        self._redraw = Redrawing()
        self.nav = None
        self.state = DONE
        return [*actions, Done(reason)]

    def _resend(self, message: Resend) -> list[Action]:
        if self.state is OPENING and message.pos == 0:
            if not self._proved:
                raise ProtocolError("the cloud asked for the whole prompt of an OPEN that had the whole prompt")
            return self.reopen()
        if message.epoch != self.epoch or message.pos > self.end or self._redraw.pending:
            return []
        return [self._repeat(message.pos, again=False)]

    def _error(self, message: Error) -> list[Action]:
        code = ErrorCode(message.code)
        if code is ErrorCode.UNKNOWN:
            self._unknown += 1
            if self._unknown == 1:
                return self.reopen()
            if self._unknown <= MOST_UNKNOWN:
                self.state = WAITING
                return [Retry(min(FIRST_REST_S * 2 ** (self._unknown - 2), MOST_REST_S), code, message.text)]
        if code in RETRIED:
            self.state = WAITING
            return [Retry(message.retry_ms / 1000, code, message.text)]
        return [*self._finish("error"), Fail(code, message.text)]
