"""Both state machines and the policy of sampling in virtual time, without wire, sockets or sessions: quick enough to
count a hundred thousand draws. What comes next depends on the last two ids alone, so that each of the few contexts is
met thousands of times, and its law is known."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipesd.core import Mode
from pipesd.policy.accept import choose
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling
from pipesd.policy.trigger import DualThreshold
from pipesd.protocol import actions as act
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import MAJOR
from pipesd.sim.distributions import Distribution, probabilities
from pipesd.sim.texts import state_of

IDS = 5
PROMPT = (0, 1)
Context = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How the edge goes about it: whether it drafts on while a verdict is awaited, sends each token at once or with the
    next question only, and the thresholds that ask, on the probability of a token and of the draft. `turn_s`: other
    sessions keep the cloud busy, so that a pass begins at multiples of it."""

    ahead: bool
    immediate: bool = True
    sequence: float = 0.15
    token: float = 0.25
    mode: Mode = Mode.NAV
    context: int = 1 << 20  # of the draft model
    draft_s: float = 1.0
    delay_s: float = 1.7
    pass_s: float = 2.3
    turn_s: float = 0.0


VANILLA = Way(ahead=False)
PIPESD = Way(ahead=True)
LATE = Way(ahead=True, immediate=False)
EAGER = Way(ahead=True, mode=Mode.EAGER)


@dataclass
class Seen:
    """What came of it: how often each id followed each context; of the draft tokens that were decided, how many were
    accepted, and the contexts they stood behind."""

    followed: Counter[tuple[Context, int]] = field(default_factory=Counter)
    decided: Counter[Context] = field(default_factory=Counter)
    accepted: int = 0

    @property
    def draws(self) -> int:
        return sum(self.followed.values())


def law_of(law: Distribution, context: Sequence[int]) -> Any:
    """Logits behind a text."""
    return law.row(state_of(context[-2:]), IDS)


class Machines:
    """One edge and one cloud, for one generation after the other."""

    def __init__(self, target: Distribution, draft: Distribution, sampling: Sampling, way: Way) -> None:
        self._target, self._draft, self._sampling, self._way = target, draft, sampling, way

    def generate(self, seed: int, count: int, seen: Seen | None = None) -> list[int]:
        """The ids behind the prompt; what came of them is added to `seen`."""
        self._seen = Seen() if seen is None else seen
        self._sampler = Sampler(self._sampling, seed)
        self._proposals = Proposals(self._sampler) if self._sampling.tests else None
        self._edge = EdgeMachine(1, 16)
        limit = len(PROMPT) + count
        self._cloud = CloudMachine(CloudLimits(context=limit + 1, vocabulary_size=IDS))
        self._trigger = DualThreshold(self._way.sequence, self._way.token)
        self._now_s, self._busy = 0.0, False
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        request = act.Request(limit, frozenset(), self._way.mode, seed, bytes(8), bytes(8), MAJOR, self._sampling)
        self._perform(self._edge.generate(0, PROMPT, request, drafts=True, ahead=self._way.ahead))
        while self._edge.running:
            if self._edge.may_draft:
                self._draft_one()
                self._run(self._now_s + self._way.draft_s)
            self._perform(self._edge.settle())
            if not self._edge.may_draft and self._edge.running:
                self._run(self._events[0][0])
        return self._edge.committed[len(PROMPT) :]

    def _draft_one(self) -> None:
        if self._edge.end >= self._way.context:
            self._perform(self._edge.stop_drafting())
            return
        edge, text = self._edge, [*self._edge.committed, *self._edge.draft]
        row = law_of(self._draft, text)
        chooser = self._proposals or self._sampler
        choice = chooser.choose(row, len(text), text)
        assert choice is not None
        edge.drafted(choice.id, None if self._proposals is None else self._proposals.p_sent(len(text), choice.id))
        if self._trigger.observe(float(probabilities(row)[choice.id])):
            self._trigger.reset()
            self._perform(edge.ask())
        elif self._way.immediate:
            self._perform(edge.send())

    def _perform(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Send(message):
                    self._at(self._way.delay_s, lambda message=message: self._to_cloud(message))
                case act.Rollback(pos):
                    self._trigger.reset()
                    if self._proposals is not None:
                        self._proposals.forget(pos)
                case act.Redraw(pos, refused):
                    assert self._proposals is not None
                    token = self._proposals.redraw(pos, refused)
                    edge = self._edge
                    self._perform(edge.ask_more(refused.end) if token is None else edge.redrawn(token))
                case act.Committed(pos, ids, accepted, rejected):
                    self._count(pos, ids, accepted, rejected)
                    if self._proposals is not None:
                        self._proposals.settle(pos + len(ids))
                case act.Fail(code, text):
                    raise AssertionError(f"{code}: {text}")

    def _count(self, pos: int, ids: Sequence[int], accepted: Sequence[bool], rejected: bool) -> None:
        seen = self._seen
        for at, (token, equal) in enumerate(zip(ids, accepted, strict=True), pos):
            context = tuple(self._edge.committed[at - 2 : at])
            seen.followed[context, token] += 1
            last = rejected and not equal and not any(accepted[at - pos :])
            if equal or (last and (at == pos or accepted[at - pos - 1])):
                seen.decided[context] += 1
                seen.accepted += equal
                rejected = rejected and equal

    def _to_cloud(self, message: Any) -> None:
        self._say(self._cloud.receive(message, self._now_s))
        self._work()

    def _work(self) -> None:
        if self._busy or not self._cloud.work():
            return
        self._busy = True
        turn_s = self._way.turn_s
        self._at(math.ceil(self._now_s / turn_s) * turn_s - self._now_s if turn_s else 0.0, self._pass)

    def _pass(self) -> None:
        work = self._cloud.work()
        results = []
        for item in work:
            if item.rows:
                assert item.draw is not None
                text = [*item.draw.prefix, *item.draw.drafted]
                base = len(item.draw.prefix)
                rows = [law_of(self._target, text[: base + i]) for i in range(item.rows)]
                results.append(choose(np.stack(rows), item.draw))
            else:
                results.append(None)

        def finish() -> None:
            self._busy = False
            for item, choices in zip(work, results, strict=True):
                self._say(self._cloud.done(item, choices, 0.0, self._now_s))  # type: ignore[arg-type]
            self._work()

        self._at(self._way.pass_s, finish)

    def _say(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._at(self._way.delay_s, lambda message=message: self._perform(self._edge.receive(message)))

    def _at(self, after_s: float, do: Any) -> None:
        heapq.heappush(self._events, (self._now_s + after_s, next(self._order), do))

    def _run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, do = heapq.heappop(self._events)
            do()
        self._now_s = until_s
