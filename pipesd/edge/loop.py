"""The loop of the edge: it drafts a token, sends without blocking, listens. `Loop.turns` is the whole of it.

The state machine decides what a message means and what is to be said, the strategy when to send and when to ask for
verification. One thread does it all: ZeroMQ sends in the background by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from pipesd.clock import Clock
from pipesd.config import EdgeConfig
from pipesd.core import Mode, Origin, Piece, common_prefix
from pipesd.edge.connection import Connection, refusal
from pipesd.edge.local import PREFILL_CHUNK
from pipesd.edge.models import Drafter
from pipesd.edge.patience import Patience
from pipesd.edge.run import Run
from pipesd.edge.steering import Steering
from pipesd.errors import DrafterFailed
from pipesd.metrics import EventLog
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Sampling
from pipesd.policy.sending import ASK, SEND
from pipesd.policy.strategy import Strategy
from pipesd.protocol import actions as act
from pipesd.protocol.edge_machine import RUN, WAITING, EdgeMachine
from pipesd.protocol.messages import MAJOR, Draft, Error, Message, Open, Opened, Probed, ProbeStatus, Verdict, Welcome
from pipesd.protocol.vocabulary import new_session

log = logging.getLogger("pipesd.edge")
NO_GAIN = "drafts are slower than the cloud alone"


class Loop:
    """Drives the edge's machine over a connection, one generation after the other. `connection` and `drafter` are set
    before the first; without a strategy that drafts there is no `steering`."""

    def __init__(self, config: EdgeConfig, strategy: Strategy, clock: Clock, events: EventLog) -> None:
        self.machine = EdgeMachine(new_session(), config.draft_ahead)
        self.steering = Steering(strategy, config.link_model, events) if strategy.drafts else None
        self.connection: Connection | None = None
        self.drafter: Drafter | None = None
        self._config, self._strategy = config, strategy
        self._clock, self._events = clock, events
        self._patience = Patience(config.patience_s, config.stall_s)
        self._pid = os.getpid()

    def hang_up(self) -> None:
        """Tell the cloud that the session is over, and close the connection."""
        if self.connection is not None:
            self.connection.adopt()
            self._perform(None, self.machine.close())
            self.connection.close()
            self.connection = None

    def generate(self, run: Run, ids: Sequence[int], end_ids: frozenset[int], welcome: Welcome) -> Iterator[Piece]:
        """Generate behind `ids` until the target or the run ends it; yields pieces as they are committed. `end_ids`
        are those of the draft model's file, `welcome` what the cloud said of the target."""
        with closing(self.turns(run, ids, end_ids, welcome)) as turns:
            for _ in turns:
                if run.pieces:
                    yield from run.ready()
                    self._line.adopt()  # one thread after the other may advance the iterator
            yield from run.ready()

    def turns(
        self, run: Run, ids: Sequence[int], end_ids: frozenset[int], welcome: Welcome
    ) -> Generator[float, None, None]:
        """The same generation turn by turn, its pieces left in `run`. Before each turn it yields for how long (s) this
        will wait for a message, 0 while there is something to draft. Blocks only in the link's `receive`, which waits
        no longer: who has other things to do resumes it when a message is there or that time is over."""
        machine, connection, patience = self.machine, self._line, self._patience
        sent_before, heard_before = connection.bytes_up, connection.bytes_down
        try:
            connection.adopt()
            patience.start(self._clock.now(), connection.rtt_s)
            patience.moved(self._clock.now())
            self._perform(run, self._begin(run, ids, end_ids, welcome))
            while machine.running:
                wait_s = self._wait_s()
                yield wait_s
                if run.cancelled.is_set():
                    self._perform(run, machine.cancel())
                    break
                self._listen(run, self._wait_s() if wait_s else 0.0)  # some of it may be over
                self._ask_again(run)
                if self._strategy.guarded:
                    self._choose_way(run)
                if machine.may_draft:
                    self._draft(run)
                self._send(run)
                if actions := machine.settle():
                    self._perform(run, actions)
        finally:
            if self._pid == os.getpid():  # a forked child only drops its copy
                connection.adopt()
                self._perform(run, machine.cancel())  # of use if the iterator was left, or an error ends it
            run.tally, run.meter.rtt_s = machine.tally, connection.rtt_s
            if run.proposals is not None and run.config.sampling == "picospec":
                run.meter.sampling_error = run.proposals.error_bound
            run.meter.bytes_up = connection.bytes_up - sent_before
            run.meter.bytes_down = connection.bytes_down - heard_before

    def _begin(self, run: Run, ids: Sequence[int], end_ids: frozenset[int], welcome: Welcome) -> list[act.Action]:
        """Keep what the prompt shares with the last generation, and open."""
        machine, strategy = self.machine, self._strategy
        keep = common_prefix(machine.committed, ids)
        drafting = self.drafting
        mode = strategy.mode if drafting or not strategy.drafts else Mode.FREE
        limit = min(len(ids) + run.config.max_tokens, welcome.context)
        request = act.Request(
            limit, end_ids.union(welcome.end_ids or ()), mode,
            run.seed, welcome.model_fingerprint, welcome.vocabulary_hash, MAJOR, run.sampling,
        )  # fmt: skip
        self._events.record(
            "start", session=f"{machine.session:016x}", opening=machine.opening, prompt_tokens=len(ids),
            limit=request.limit, stop_ids=sorted(request.stop_ids), link_model=self._config.link_model,
            draft_ahead=self._config.draft_ahead, seed=run.seed, sampling=_recorded(run.sampling),
            **strategy.recorded(),
        )  # fmt: skip
        if self.steering is not None:
            assert self.drafter is not None
            self.steering.begin()
            self.drafter.rollback(min(keep, len(self.drafter)))
            self.drafter.extend(ids[len(self.drafter) :])
        if strategy.drafts and not drafting:
            self._events.record("without_drafts", why=NO_GAIN)
        return machine.generate(keep, ids[keep:], request, drafts=drafting, ahead=strategy.ahead)

    @property
    def drafting(self) -> bool:
        """Whether the edge drafts for verification now."""
        return self.steering is not None and self.steering.drafting

    def _wait_s(self) -> float:
        """How long to wait for a message: not at all while there is something to draft."""
        if self.machine.may_draft:
            return 0.0
        now_s = self._clock.now()
        wait_s = self._patience.wait_s(now_s)
        return wait_s if self.steering is None else self.steering.wait_s(now_s, wait_s)

    def _listen(self, run: Run, wait_s: float) -> None:
        """Take every message that is there; wait for the first."""
        line = self._line
        if wait_s > 0:
            waited_from_s = self._clock.now()
            message = line.receive(wait_s)
            run.meter.wait_s += self._clock.now() - waited_from_s
        else:
            message = line.receive(0.0)
        while message is not None:
            self._take(run, message)
            message = line.receive(0.0) if self.machine.running else None

    def _take(self, run: Run, message: Message) -> None:
        machine, now_s = self.machine, self._clock.now()
        own = message.session == machine.session and message.opening == machine.opening
        self._patience.heard(now_s, own=own and not isinstance(message, Error))
        if isinstance(message, Probed):
            if self._line.crossed:
                self._patience.crossed(now_s)
            if message.status is ProbeStatus.OK:
                self._patience.alive(now_s)
            elif message.status is ProbeStatus.UNKNOWN_SESSION and self._line.crossed and not self._patience.put_off:
                self._perform(run, machine.reopen())
            return
        if own and isinstance(message, (Verdict, Opened)):
            run.opened(now_s, cloud=True)
        if own and isinstance(message, Opened):
            self._patience.start(now_s, self._line.rtt_s, message.pass_ms / 1000)
        self._perform(run, machine.receive(message))

    def _ask_again(self, run: Run) -> None:
        """What is due: a try that the cloud put off, or a deadline. What may still be crossing is not repeated: on a
        thin link a second copy would only delay the first."""
        machine, now_s = self.machine, self._clock.now()
        if self.steering is not None:
            self._patience.taken(self.steering.round_trips.link_free_s)
        awaits = machine.awaits
        if awaits and self._patience.quiet(now_s):
            return
        self._patience.check(now_s)
        if self._patience.retry_due(now_s):
            self._perform(run, machine.reopen())
        elif machine.state is RUN and not awaits:
            self._patience.rest(now_s)
        elif self._patience.due(now_s, self._line.explain):
            self._events.record("deadline")
            if self._line.crossed:
                self._perform(run, machine.deadline())
            self._line.probe(machine.session)

    def _draft(self, run: Run) -> None:
        """One chunk of the prompt, or one draft token."""
        machine, drafter, steering = self.machine, self.drafter, self.steering
        assert drafter is not None and steering is not None
        if drafter.room <= 0:
            self._go_on_without_drafts(run, "the draft model's context is full")
            return
        try:
            if not run.prefilled:
                if drafter.prefill(PREFILL_CHUNK) == 0:
                    run.opened(self._clock.now(), drafter=True)
                return
            drawn, took_s = run.draft(drafter, self._clock)
        except DrafterFailed as error:
            self._go_on_without_drafts(run, str(error))
            return
        steering.drafted(drawn, machine.end, took_s, self._clock.now())
        machine.drafted(drawn.id, drawn.p_sent)

    def _send(self, run: Run) -> None:
        """Give the link what is due of the draft, and ask for verification where the trigger or necessity says so."""
        machine, steering = self.machine, self.steering
        if steering is None or machine.state is WAITING or machine.redrawing:
            return
        step = ASK
        while step is ASK:  # behind one draft to verify there may be the next
            awaiting, must_ask = machine.nav is not None, machine.must_ask
            step, upto = steering.step(
                self._clock.now(), machine.sent, machine.end, awaiting=awaiting, must_ask=must_ask
            )
            if step is SEND:
                self._perform(run, machine.send())
            elif step is ASK:
                self._perform(run, machine.ask(upto))
                steering.asked(self._clock.now(), upto)
                if not machine.nav_said:  # the link takes nothing now
                    break

    def _redraw(self, run: Run, pos: int, refused: ToldLaw) -> None:
        """Draw what stands at `pos`, where the cloud refused the draft token."""
        assert run.proposals is not None
        before, told = refused.first or 0, len(refused.pairs)
        run.meter.refusals += not before
        run.meter.proposals += told if refused.first is not None else 0
        self._events.record("refused", pos=pos, told=told, first=refused.first)
        token = run.proposals.redraw(pos, refused)
        if token is None:
            self._perform(run, self.machine.ask_more(refused.end))
        else:
            self._events.record("redrawn", pos=pos, id=token)
            self._perform(run, self.machine.redrawn(token))

    def _go_on_without_drafts(self, run: Run, why: str) -> None:
        log.warning("%s: going on without drafts", why)
        self._events.record("without_drafts", why=why)
        run.drafter_failed = True
        run.opened(self._clock.now(), drafter=True)
        self._perform(run, self.machine.stop_drafting())

    def _choose_way(self, run: Run) -> None:
        """Leave the cloud alone where drafts do not pay, and draft again when they get another trial."""
        machine = self.machine
        done = run.drafter_failed or machine.stopping
        settled = not machine.running or done or machine.drafts == self.drafting
        if settled:
            return
        if machine.drafts:
            self._events.record("without_drafts", why=NO_GAIN)
            self._perform(run, machine.stop_drafting())
        else:
            self._events.record("with_drafts")
            run.prefilled = False  # the draft model has not read what the cloud said alone
            self._perform(run, machine.resume_drafting(self._strategy.mode))

    def _perform(self, run: Run | None, actions: Sequence[act.Action]) -> None:
        """Do what the machine says, in order."""
        for action in actions:
            if isinstance(action, act.Send):
                self._say(action.message)
            elif isinstance(action, act.Committed):
                if run is not None:
                    self._commit(run, action)
            elif isinstance(action, act.Rollback):
                self._roll_back(run, action.pos)
            elif isinstance(action, act.Extend):
                if self.drafter is not None and self._strategy.drafts:
                    self.drafter.extend(action.ids)
            elif isinstance(action, act.Redraw):
                if run is not None and self.machine.redrawing:  # no stop text came before
                    self._redraw(run, action.pos, action.refused)
            elif isinstance(action, act.Retry):
                self._patience.retry(self._clock.now(), action.after_s, refusal(action.code, action.text))
                self._events.record("retry", code=action.code.name, after_s=action.after_s)
            elif isinstance(action, act.Fail):
                raise refusal(action.code, action.text)
            elif isinstance(action, act.Done) and run is not None:
                run.reason = "stop" if run.stream.stopped else action.reason
        if self.steering is not None:
            self.steering.settled()

    def _say(self, message: Message) -> None:
        steering = self.steering
        if steering is not None and isinstance(message, Open) and self.machine.tally.openings > 1:
            steering.disturbed()
        if not self._line.send(message):
            self.machine.not_sent(message)
        elif steering is not None and isinstance(message, Draft):
            everything = self.machine.sent >= self.machine.end
            steering.sent(len(message.ids), self._clock.now(), everything=everything)

    def _roll_back(self, run: Run | None, pos: int) -> None:
        if self.drafter is not None:
            self.drafter.rollback(min(pos, len(self.drafter)))
        if run is not None and run.proposals is not None:
            run.proposals.forget(pos)
        self._events.record("rollback", pos=pos)
        if self.steering is not None:
            self.steering.dropped()

    def _commit(self, run: Run, committed: act.Committed) -> None:
        """Ids are committed: the text, the counts and the policies learn of it."""
        pos, ids, accepted, now_s = committed.pos, committed.ids, committed.accepted, self._clock.now()
        if self._events.wanted:
            self._events.record("committed", pos=pos, ids=ids, accepted=accepted)
        self._patience.moved(now_s)
        if run.proposals is not None:
            run.proposals.settle(pos + len(ids))
        origins: list[Origin] = ["accepted" if own else "target" for own in accepted]
        run.commit(ids, origins, now_s, committed.logprobs)
        steering, drafts = self.steering, self.machine.drafts
        if self._strategy.guarded and not drafts and not run.drafter_failed:
            run.meter.alone_tokens += len(ids)
        if steering is not None:
            steering.committed(committed, self._clock.now(), run.meter.opened_s, drafts=drafts)
        if run.stream.stopped:
            self._perform(run, self.machine.cancel("stop"))
        elif steering is not None and (size := steering.probe_due(self._clock.now())):
            self._line.probe(self.machine.session, size)

    @property
    def _line(self) -> Connection:
        assert self.connection is not None, "the session is not open"
        return self.connection


def _recorded(sampling: Sampling | None) -> dict[str, Any] | None:
    """The options as the event log has them; a logit bias as on the command line, as JSON has no infinity."""
    if sampling is None:
        return None
    bias = [f"{token}={value:g}" for token, value in sampling.logit_bias]
    return {**asdict(sampling), "method": sampling.method.name.lower(), "logit_bias": bias}
