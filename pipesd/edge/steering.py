"""The policies of one session put to work: what they see of a run, what they decide, and the record of both."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from pipesd.core import Drawn
from pipesd.edge.round_trips import RoundTrips
from pipesd.edge.tuning_file import load, save
from pipesd.errors import UsageError
from pipesd.metrics import EventLog, Meter
from pipesd.policy.estimate import Estimate
from pipesd.policy.guard import Guard
from pipesd.policy.monitor import Monitor
from pipesd.policy.sending import ASK, HOLD, NOTHING, Sending, Step, Uplink
from pipesd.policy.strategy import Strategy, batching_of, make_trigger
from pipesd.policy.tuning import Tuning
from pipesd.policy.updater import Change, Updater, first_plan
from pipesd.policy.watched import FORCED
from pipesd.protocol.actions import Committed

log = logging.getLogger("pipesd.edge")
SETTINGS = ("draft_length", "sequence_threshold", "token_threshold", "entropy_threshold")  # of triggers


class Steering:
    """For a strategy that drafts. Times are those of the session's clock; figures last from one generation to the
    next."""

    def __init__(self, strategy: Strategy, link_model: str, events: EventLog) -> None:
        self.monitor = Monitor()
        self.triggers: Counter[str] = Counter()  # how often each rule asked in this generation
        uplink = Uplink()
        self.round_trips = RoundTrips(self.monitor, uplink)
        self._events = events
        self._sending = Sending(batching_of(strategy, first_plan()), make_trigger(strategy), uplink)
        self._updater = Updater(strategy, link_model, self._sending)
        self._round_s: float | None = None  # when the last round ended
        self._dropped = self._disturbed = False
        self._tokens = self._accepted = 0  # of the part of a round that came before a refusal
        self._known: Estimate | None = None
        self._strategy = strategy
        self._by_margin = strategy.confidence == "margin"
        self._guard = Guard() if strategy.guarded else None
        self._kept: tuple[str, str] | None = None  # where what tuning learns is kept: file and key

    @property
    def drafting(self) -> bool:
        """Whether drafts are wanted; else the cloud goes on alone."""
        return self._guard is None or self._guard.drafting

    def tune(self, tuning: Tuning, *, alone: bool = True) -> None:
        """Search for thresholds from now on; `alone`: the cloud may still go on alone where drafts do not pay."""
        self._updater.tuning = tuning
        if not alone:
            self._guard = None

    def remember(self, path: str, key: str) -> None:
        """Search for thresholds from where the last run with this key left off, which the file at `path` knows; what
        this one learns goes there too."""
        state = (load(path) or {}).get(key)
        try:
            self.tune(Tuning(self._strategy, state))
        except UsageError as error:
            log.warning("tuning file %s: %s: what earlier runs have learnt is not used", path, error)
            self.tune(Tuning(self._strategy))
        self._kept = path, key

    def begin(self) -> None:
        """A generation begins."""
        self.triggers.clear()
        self._sending.reset()
        self._round_s = None
        self._dropped = self._disturbed = False
        self._tokens = self._accepted = 0
        self._record(self._updater.begin(self._estimate()))

    def end(self, meter: Meter) -> None:
        """The generation ended; writes to `meter` what it showed. The time until the next one counts for nothing."""
        self.monitor.paused()
        estimate = self.monitor.snapshot()
        meter.alpha_s, meter.beta_s, meter.gap_s = estimate.alpha_s, estimate.beta_s, estimate.gap_s
        meter.triggers = dict(self.triggers)
        if self._guard is not None:
            meter.drafts_s, meter.alone_s = self._guard.drafts_s, self._guard.alone_s
        known = SETTINGS if self._strategy.policy is None else tuple(self._strategy.policy.parameters)
        names = (name for name in known if hasattr(self._sending.trigger, name))
        meter.thresholds = {name: getattr(self._sending.trigger, name) for name in names}
        meter.window = self._updater.window.tokens
        tuning = self._updater.tuning
        if tuning is not None:
            meter.tuning = "done" if tuning.done else "searching"
        if self._kept is not None and tuning is not None and tuning.news:
            path, key = self._kept
            save(path, {key: tuning.state()})

    def drafted(self, drawn: Drawn, pos: int, took_s: float, now_s: float) -> None:
        """A token was drafted at position `pos`, which took so long."""
        if self._events.wanted:
            margin = {"margin": drawn.margin} if drawn.margin else {}
            self._events.record("drafted", pos=pos, id=drawn.id, p_draft=drawn.p_draft, entropy=drawn.entropy, **margin)
        confidence = drawn.margin if self._by_margin else drawn.p_draft
        self.monitor.drafted(took_s)
        sending = self._sending
        length = sending.since_trigger + 1
        rule = sending.drafted(confidence, drawn.entropy, pos + 1, now_s)
        if rule is not None:
            self._triggered(rule, pos + 1, length)

    def step(self, now_s: float, sent: int, end: int, *, awaiting: bool, must_ask: bool) -> tuple[Step, int]:
        """What is to be done now with the draft that was sent up to `sent` and ends at `end`: SEND, ASK or NOTHING, up
        to which position. `awaiting`: a verdict is outstanding; `must_ask`: nothing else is left to do."""
        step, upto = self._sending.next_step(now_s, sent, end, awaiting=awaiting)
        if step is HOLD:
            self._events.record("held", end=end)
            return NOTHING, sent
        if must_ask and step is not ASK:
            self._triggered(FORCED, end, self._sending.ask(end))
            return ASK, end
        return step, upto

    def wait_s(self, now_s: float, most_s: float) -> float:
        """How long to wait for a message: at most `most_s`, less where something is held back."""
        wait_s = self._sending.wait_s(now_s)
        return most_s if wait_s is None else min(wait_s, most_s)

    def sent(self, tokens: int, now_s: float, *, everything: bool) -> None:
        """A message with so many tokens was handed to the link; `everything`: nothing of the draft is unsent now."""
        self._sending.sent(now_s, tokens, everything=everything)

    def asked(self, now_s: float, end: int) -> None:
        """Verification of the draft up to `end` was asked for."""
        self._sending.asked(now_s, end)

    def dropped(self) -> None:
        """The draft, or its end, was dropped."""
        self._dropped = True

    def committed(self, committed: Committed, now_s: float, opened_s: float | None, *, drafts: bool) -> None:
        """A round ended, or a part of it; `opened_s`: when both sides were ready, which is when the first one began;
        `drafts`: whether the edge drafts now, wanted or not."""
        known = committed.pos + len(committed.ids)
        self._tokens += len(committed.ids)
        self._accepted += sum(committed.accepted)
        if committed.goes_on:
            return
        tokens, accepted = self._tokens, self._accepted
        self._tokens = self._accepted = 0
        if drafts:
            self._sending.decided(accepted, known, rejected=committed.rejected)
        self._dropped = self._dropped and not committed.rejected
        self.monitor.committed(tokens, now_s)
        begun_s, self._round_s = opened_s if self._round_s is None else self._round_s, now_s
        took_s = None if begun_s is None or self._disturbed else now_s - begun_s
        self._disturbed = False
        estimate = self._estimate()
        self._record(self._updater.round_end(estimate, tokens, took_s if drafts else None))
        if self._guard is not None and took_s is not None and drafts == self.drafting:
            self._guard.round_end(tokens, took_s, estimate.alone_s, estimate.gamma_s)

    def probe_due(self, now_s: float) -> int:
        """For how many tokens a probe should stand that would tell more of the link; 0: none would, or not now."""
        return self.round_trips.probe_due(now_s)

    def disturbed(self) -> None:
        """Something went wrong or changed, which the present round takes longer for: it says nothing of drafts."""
        self._disturbed = True

    def settled(self) -> None:
        """All that a message or a deadline brought with it is done."""
        if self._dropped:
            self._sending.reset()
            self._dropped = False

    def _estimate(self) -> Estimate:
        """What is known now; another than the last time is recorded."""
        estimate = self.monitor.snapshot()
        if estimate is not self._known:
            self._known = estimate
            if self._events.wanted:
                self._events.record("estimate", **estimate.figures())
        return estimate

    def _triggered(self, rule: str, end: int, length: int) -> None:
        """Verification of the draft up to `end`, which has so many tokens, is to be asked for."""
        self.triggers[rule] += 1
        self._updater.asked(length)
        self._events.record("trigger", rule=rule, end=end)

    def _record(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._events.record(change.what, why=change.why, **change.values)
