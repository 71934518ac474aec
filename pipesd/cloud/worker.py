"""One worker of the cloud: *drain, choose, verify, reply*.

A worker holds the target model and the cloud's side of its sessions. It hears and speaks on one endpoint, the front's;
the front knows which edge a session belongs to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from pipesd.clock import Clock, SystemClock
from pipesd.core import ModelInfo, Vocabulary
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, greedy_choices
from pipesd.policy.noise import warmup
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits, Work
from pipesd.protocol.messages import Beat, Close, Message, Ready
from pipesd.protocol.wire import decode, encode
from pipesd.transport import Context, PairSocket, pair_connect

IDLE_S = 0.25  # how long an idle worker waits before it looks at its sessions' age, at `stop` and at its parent
DRAIN_MOST = 256  # messages taken between two passes
BEAT_S = 0.5  # a busy worker says at least so often that it lives


class Target(Protocol):
    """A target model with room for several sequences, each in its slot."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def slots(self) -> int:
        """Sessions that have room at once, each as long as the context; maybe fewer than were asked for."""

    @property
    def pass_ms(self) -> int:
        """The longest pass seen or expected, in milliseconds."""

    def truncate(self, slot: int, length: int) -> None:
        """Keep the slot's first `length` positions; 0 gives up its memory."""

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        """Append ids to slots in one pass; for each (slot, ids, rows) the arg-max behind each of the last `rows` ids,
        -1 where the logits are not finite."""

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        """The same pass; for each entry what its draw makes of its rows, or the arg-max ids where there is none."""


def choices_of(target: Target, work: Sequence[Work]) -> list[Choices]:
    """What one pass over the sessions in `work` makes of their drafts."""
    for item in work:
        target.truncate(item.slot, item.keep)
    batch = [(item.slot, item.ids, item.rows) for item in work]
    if all(item.draw is None for item in work):
        return greedy_choices(batch, target.greedy(batch))
    return target.sample(batch, [item.draw for item in work])


def run_worker(
    endpoint: str,
    make_target: Callable[[], Target],
    *,
    context: Context,
    stop: threading.Event | None = None,
    clock: Clock | None = None,
    **bounds: float,
) -> None:
    """Load the target and what draws, and serve the front at `endpoint` until it says CLOSE of session 0, `stop` is
    set, or the parent process is gone. `bounds` are the fields of `CloudLimits` beyond those that the target gives."""
    with pair_connect(context, endpoint) as front:
        target = make_target()
        warmup()
        Worker(front, target, clock or SystemClock(), **bounds).run(stop or threading.Event())


class Worker:
    """The loop of one worker."""

    def __init__(self, front: PairSocket, target: Target, clock: Clock, **bounds: float) -> None:
        info = target.info
        limits = CloudLimits(context=info.context, vocabulary_size=target.vocabulary.size, **bounds)  # type: ignore[arg-type]
        limits = replace(limits, max_sessions=min(limits.max_sessions, target.slots))  # what surely fits
        self._front = front
        self._target = target
        self._clock = clock
        self._machine = CloudMachine(limits, target.pass_ms)
        self._parent = os.getppid()
        self._closed = False
        self._said_s = clock.now()
        self._say([Ready.of(info, target.vocabulary)])

    def run(self, stop: threading.Event) -> None:
        while not (self._closed or stop.is_set() or os.getppid() != self._parent):
            self._drain(0.0 if self._machine.work() else IDLE_S)
            self._say(self._machine.tick(self._clock.now()))
            for slot in self._machine.take_freed():
                self._target.truncate(slot, 0)
            if work := self._machine.work():
                self._verify(work)
            self._beat()

    def _drain(self, wait_s: float) -> None:
        """Take the messages that wait, so many at most that passes go on; wait up to `wait_s` for the first."""
        for _ in range(DRAIN_MOST):
            payload = self._front.receive(wait_s)
            if payload is None:
                return
            wait_s = 0.0
            message = decode(payload)
            if isinstance(message, Close) and message.session == 0:
                self._closed = True
                return
            self._say(self._machine.receive(message, self._clock.now()))

    def _verify(self, work: list[Work]) -> None:
        """One pass over the sessions in `work`, and what each is told."""
        started_s = self._clock.now()
        choices = choices_of(self._target, work)
        now_s = self._clock.now()
        for item, chosen in zip(work, choices, strict=True):
            self._say(self._machine.done(item, chosen, now_s - started_s, now_s))

    def _say(self, messages: Sequence[Message]) -> None:
        for message in messages:
            # a full queue means that the front is stuck or gone; the edge's deadlines repeat what is lost
            self._front.send(encode(message))
            self._said_s = self._clock.now()

    def _beat(self) -> None:
        if self._clock.now() - self._said_s >= BEAT_S:
            self._say([Beat(0, 0, self._machine.sessions, self._target.pass_ms)])
