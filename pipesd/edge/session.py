"""One edge: a draft model, a line to a cloud, generations one after the other. The loop is `_with_cloud`.

The edge drafts a token, sends without blocking, listens. The state machine decides what a message means and what is to
be said, the strategy when to ask for verification. One thread does it all: ZeroMQ sends in the background by itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Self

from pipesd.clock import Clock, SystemClock
from pipesd.config import EdgeConfig, GenerateConfig, make_config
from pipesd.core import FinishReason, Mode, Piece, common_prefix
from pipesd.edge.connection import Connection, Link, refusal
from pipesd.edge.local import PREFILL_CHUNK, generate_alone
from pipesd.edge.models import Drafter, Tokeniser, load_models, prompt_ids
from pipesd.edge.patience import Patience
from pipesd.edge.run import CLOSE_S, Pieces, Run
from pipesd.edge.steering import Steering
from pipesd.edge.tuning_file import default_path
from pipesd.errors import Cancelled, DrafterFailed, PipeSDError, UsageError
from pipesd.metrics import EventLog, summary
from pipesd.policy.sending import Step
from pipesd.policy.strategy import make_strategy
from pipesd.policy.token_batches import warmup
from pipesd.policy.tuning import Tuning
from pipesd.protocol import actions as act
from pipesd.protocol.edge_machine import EdgeMachine, State
from pipesd.protocol.messages import MAJOR, Draft, Error, Message, Opened, Probed, ProbeStatus, Verdict, Welcome
from pipesd.protocol.vocabulary import new_session

log = logging.getLogger("pipesd.edge")
NO_GAIN = "drafts are slower than the cloud alone"


class EdgeSession:
    """A session with a cloud, as a context manager: `generate` yields the output; `stats`, `text`, `token_ids`,
    `finish_reason` and `seed` describe the last generation afterwards.

    Models and connection are made on entering (or by the first `generate`). One generation at a time; `cancel` may be
    called from any thread. `drafter` and `tokeniser` stand in for those of `config.draft` and are not closed,
    `link` for a connection to `config.cloud`.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        drafter: Drafter | None = None,
        tokeniser: Tokeniser | None = None,
        clock: Clock | None = None,
        link: Link | None = None,
    ) -> None:
        self.config = config
        self.strategy = make_strategy(config)
        self.stats: dict[str, Any] = {}
        self.token_ids: tuple[int, ...] = ()
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.seed: int | None = None
        self._clock = clock or SystemClock()
        self._link = link
        self._drafter, self._tokeniser = drafter, tokeniser
        self._owned: list[Drafter | Tokeniser] = []
        self._machine = EdgeMachine(new_session(), config.draft_ahead)
        self._patience = Patience(config.patience_s, config.stall_s)
        self._events = EventLog(config.events, self._clock)
        self._steering = Steering(self.strategy, config.link_model, self._events) if self.strategy.drafts else None
        self._connection: Connection | None = None
        self._welcome: Welcome | None = None
        self._opened = self._closed = False
        self._busy = threading.Lock()  # held from a generation's first step to its last
        self._active: Callable[[], Pieces | None] = lambda: None  # the iterator of the last generation that began
        self._cancelled = threading.Event()  # of the last generation or opening that began
        self._next = self._cancelled  # of the last generation asked for
        self._pid = os.getpid()

    # -- opening and closing ------------------------------------------------------------------------------------------

    def open(self, cancelled: threading.Event | None = None) -> None:
        """Load the models, connect, compare vocabularies; nothing once the session is open. Raises what any of these
        has to say, and Cancelled if `cancelled` is set while it waits for the cloud, by `cancel` or otherwise; it may
        then be called again."""
        self._check_usable()
        if self._opened:
            return
        self._cancelled = cancelled or threading.Event()
        try:
            self._open(self.config)
        except BaseException:
            self._disconnect()
            raise
        self._opened = True

    def _open(self, config: EdgeConfig) -> None:
        loading = threading.Thread(target=warmup, name="pipesd-kernels", daemon=True)
        if self.strategy.batching == "dp":
            loading.start()  # beside the models
        if self.strategy.uses_cloud:  # connects while the models load
            round_trips = self._steering.round_trips if self._steering else None
            self._connection = Connection(
                config, self._clock, self._events, self._cancelled.is_set, link=self._link, round_trips=round_trips
            )
        needs_drafter = self.strategy.drafts or not self.strategy.uses_cloud
        if self._tokeniser is None or (needs_drafter and self._drafter is None):
            self._drafter, self._tokeniser = load_models(config, drafter=needs_drafter)
            self._owned = [part for part in (self._drafter, self._tokeniser) if part is not None]
        if self._connection is not None:
            self._welcome = self._connection.greet(self._machine.session, self._tokeniser)
        if self._steering is not None and self._welcome is not None and self.strategy.tuned:
            pair = f"{self._tokeniser.name} {self._welcome.model_fingerprint.hex()}"
            path = default_path() if config.tuning == "auto" else config.tuning
            self._steering.remember(path, f"{self.strategy.key} {pair}")
        if self.strategy.batching == "dp":
            loading.join()

    def close(self) -> None:
        """End what is running, tell the cloud, free the models. May be called twice, and from any thread."""
        if self._closed or self._pid != os.getpid():
            return
        self.cancel()
        if (pieces := self._active()) is not None:
            pieces.close()
        if not self._busy.acquire(timeout=CLOSE_S):  # an iterator that was dropped may still be ending
            raise UsageError("another generation has begun in another thread: end it before the session")
        try:
            self._closed = True
            self._disconnect()
            for part in self._owned:
                part.close()
            self._events.close()
        finally:
            self._busy.release()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.adopt()
            self._perform(None, self._machine.close())
            self._connection.close()
            self._connection = None

    def cancel(self) -> None:
        """End the running generation, within one step of the draft model, the one asked for last before it begins, or
        `open` where it waits for the cloud. From any thread or signal handler; else nothing happens."""
        self._cancelled.set()
        self._next.set()
        self._wake()

    def _wake(self) -> None:
        if (connection := self._connection) is not None:
            connection.wake()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tune(self, tuning: Tuning) -> None:
        """Search by `tuning` from the next generation on, instead of as `config` says."""
        assert self._steering is not None, "a strategy that drafts"
        self._steering.tune(tuning)

    @property
    def tokeniser(self) -> Tokeniser:
        """The draft model's tokeniser, once the session is open."""
        assert self._tokeniser is not None, "the session is not open"
        return self._tokeniser

    @property
    def committed(self) -> tuple[int, ...]:
        """The ids of the last generation with a cloud: its prompt and what was committed behind it."""
        return tuple(self._machine.committed)

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], *, answer: bool = False, **options: Any) -> Pieces:
        """Generate behind `prompt`, a text or ids; yields pieces as they are committed.

        `options` are the fields of `GenerateConfig` (max_tokens, temperature, seed, stop, …); `answer`: the output is a
        text of its own, not the prompt's continuation. What the prompt shares with the ids of the last generation is
        not computed again on either side. Raises UsageError for wrong options at once, everything else while iterating;
        what was yielded before stays valid. To close or drop the iterator ends the generation.
        """
        self._check_usable()
        run = Run(make_config(GenerateConfig, options, {}), self._clock.now(), answer=answer)
        self._next = run.cancelled
        return Pieces(lambda pieces: self._generate(pieces, run, prompt), run.cancelled, self._wake)

    def _generate(
        self, pieces: Callable[[], Pieces | None], run: Run, prompt: str | Sequence[int]
    ) -> Generator[Piece, None, None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError("this session is generating already: end that first, or make a second session")
        try:
            self._active, self._cancelled = pieces, run.cancelled
            self.text = ""
            self.seed = secrets.randbits(64) if run.config.seed is None else run.config.seed
            try:
                self.open(run.cancelled)
                run.begin(self.tokeniser, drafts=self._drafting)
                ids = prompt_ids(self.tokeniser, prompt, self._machine.committed, self._welcome)
                if self.strategy.uses_cloud:
                    steps = self._with_cloud(run, ids)
                else:
                    steps = generate_alone(run, self._drafter, ids, self.tokeniser.end_ids, self._clock)
                for piece in run.output(steps):
                    self.text += piece.text
                    yield piece
            except PipeSDError as error:
                run.reason = "cancelled" if isinstance(error, Cancelled) else "error"
                raise
            finally:
                self._end(run)
        finally:
            self._busy.release()

    def _with_cloud(self, run: Run, ids: list[int]) -> Iterator[Piece]:
        machine, connection, patience = self._machine, self._line, self._patience
        sent_before, heard_before = connection.bytes_up, connection.bytes_down
        try:
            connection.adopt()
            patience.start(self._clock.now(), connection.rtt_s)
            patience.moved(self._clock.now())
            self._perform(run, self._begin(run, ids))
            while machine.running:
                if run.cancelled.is_set():
                    self._perform(run, machine.cancel())
                    break
                self._listen(run, self._wait_s())
                self._ask_again(run)
                self._choose_way(run)
                if machine.may_draft:
                    self._draft(run)
                self._send(run)
                self._perform(run, machine.settle())
                yield from run.ready()
                connection.adopt()  # one thread after the other may advance the iterator
            yield from run.ready()
        finally:
            if self._pid == os.getpid():  # a forked child only drops its copy
                connection.adopt()
                self._perform(run, machine.cancel())  # of use if the iterator was left, or an error ends it
            run.tally, run.meter.rtt_s = machine.tally, connection.rtt_s
            run.meter.bytes_up = connection.bytes_up - sent_before
            run.meter.bytes_down = connection.bytes_down - heard_before

    def _begin(self, run: Run, ids: list[int]) -> list[act.Action]:
        """Keep what the prompt shares with the last generation, and open."""
        machine, strategy, welcome = self._machine, self.strategy, self._welcome
        assert welcome is not None and self._tokeniser is not None
        keep = common_prefix(machine.committed, ids)
        drafting = self._drafting
        mode = strategy.mode if drafting or not strategy.drafts else Mode.FREE
        request = act.Request(
            len(ids) + run.config.max_tokens, self._tokeniser.end_ids.union(welcome.end_ids or ()), mode,
            self.seed or 0, welcome.model_fingerprint, welcome.vocabulary_hash, MAJOR,
        )  # fmt: skip
        self._events.record(
            "start", session=f"{machine.session:016x}", opening=machine.opening, prompt_tokens=len(ids),
            limit=request.limit, stop_ids=sorted(request.stop_ids), link_model=self.config.link_model,
            draft_ahead=self.config.draft_ahead, **{**asdict(strategy), "strategy": strategy.name},
        )  # fmt: skip
        if self._steering is not None:
            assert self._drafter is not None
            self._steering.begin()
            self._drafter.rollback(min(keep, len(self._drafter)))
            self._drafter.extend(ids[len(self._drafter) :])
        if strategy.drafts and not drafting:
            self._events.record("without_drafts", why=NO_GAIN)
        return machine.generate(keep, ids[keep:], request, drafts=drafting, ahead=strategy.ahead)

    @property
    def _drafting(self) -> bool:
        """Whether the edge drafts for verification now."""
        return self._steering is not None and self._steering.drafting

    def _wait_s(self) -> float:
        """How long to wait for a message: not at all while there is something to draft."""
        if self._machine.may_draft:
            return 0.0
        now_s = self._clock.now()
        wait_s = self._patience.wait_s(now_s)
        return wait_s if self._steering is None else self._steering.wait_s(now_s, wait_s)

    def _listen(self, run: Run, wait_s: float) -> None:
        """Take every message that is there; wait for the first."""
        waited_from_s = self._clock.now()
        message = self._line.receive(wait_s)
        if wait_s > 0:
            run.meter.wait_s += self._clock.now() - waited_from_s
        while message is not None:
            self._take(run, message)
            message = self._line.receive(0.0) if self._machine.running else None

    def _take(self, run: Run, message: Message) -> None:
        machine, now_s = self._machine, self._clock.now()
        own = message.session == machine.session and message.opening == machine.opening
        self._patience.heard(now_s, own=own and not isinstance(message, Error))
        if isinstance(message, Probed):
            if message.status is ProbeStatus.OK:
                self._patience.alive(now_s)
            elif message.status is ProbeStatus.UNKNOWN_SESSION and self._line.crossed and not self._patience.put_off:
                self._perform(run, machine.reopen())
            return
        if own and isinstance(message, Opened | Verdict):
            run.opened(now_s, cloud=True)
        if own and isinstance(message, Opened):
            self._patience.start(now_s, self._line.rtt_s, message.pass_ms / 1000)
        self._perform(run, machine.receive(message))

    def _ask_again(self, run: Run) -> None:
        """What is due: a try that the cloud put off, or a deadline. An OPEN that may still be crossing is not repeated:
        on a thin link a second copy would only delay the first, whose answer would then be of a former opening."""
        machine, now_s = self._machine, self._clock.now()
        self._patience.check(now_s)
        if self._patience.retry_due(now_s):
            self._perform(run, machine.reopen())
        elif machine.state is State.RUN and machine.nav is None and not machine.more:
            self._patience.rest(now_s)
        elif self._patience.due(now_s, self._line.explain):
            self._events.record("deadline")
            if machine.state is State.RUN or self._line.crossed:
                self._perform(run, machine.deadline())
            self._line.probe(machine.session)

    def _draft(self, run: Run) -> None:
        """One chunk of the prompt, or one draft token."""
        machine, drafter, steering = self._machine, self._drafter, self._steering
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
        machine.drafted(drawn.id)

    def _send(self, run: Run) -> None:
        """Give the link what is due of the draft, and ask for verification where the trigger or necessity says so."""
        machine, steering = self._machine, self._steering
        if steering is None:
            return
        awaiting = machine.nav is not None
        step = steering.step(self._clock.now(), machine.end, awaiting=awaiting, must_ask=machine.must_ask)
        if step is Step.SEND:
            self._perform(run, machine.send())
        elif step is Step.ASK:
            self._perform(run, machine.ask())
            steering.asked(self._clock.now())

    def _go_on_without_drafts(self, run: Run, why: str) -> None:
        log.warning("%s: going on without drafts", why)
        self._events.record("without_drafts", why=why)
        run.drafter_failed = True
        run.opened(self._clock.now(), drafter=True)
        self._perform(run, self._machine.stop_drafting())

    def _choose_way(self, run: Run) -> None:
        """Leave the cloud alone where drafts do not pay, and draft again when they get another trial."""
        machine = self._machine
        settled = not machine.running or run.drafter_failed or machine.drafts == self._drafting
        if not self.strategy.guarded or settled:
            return
        if machine.drafts:
            self._events.record("without_drafts", why=NO_GAIN)
            self._perform(run, machine.stop_drafting())
        else:
            self._events.record("with_drafts")
            run.prefilled = False  # the draft model has not read what the cloud said alone
            self._perform(run, machine.resume_drafting())

    def _perform(self, run: Run | None, actions: Sequence[act.Action]) -> None:
        """Do what the machine says, in order."""
        for action in actions:
            match action:
                case act.Send(message):
                    if not self._line.send(message):
                        self._machine.not_sent(message)
                    elif self._steering is not None and isinstance(message, Draft):
                        self._steering.sent(len(message.ids), self._clock.now())
                case act.Rollback(pos):
                    if self._drafter is not None:
                        self._drafter.rollback(min(pos, len(self._drafter)))
                    self._events.record("rollback", pos=pos)
                    if self._steering is not None:
                        self._steering.dropped()
                case act.Extend(ids) if self._drafter is not None and self.strategy.drafts:
                    self._drafter.extend(ids)
                case act.Committed(pos, ids, accepted, _) if run is not None:
                    self._events.record("committed", pos=pos, ids=ids, accepted=accepted)
                    self._patience.moved(self._clock.now())
                    run.commit(ids, ["accepted" if own else "target" for own in accepted], self._clock.now())
                    if self.strategy.guarded and not self._machine.drafts:
                        run.meter.alone_tokens += len(ids)
                    if self._steering is not None:
                        self._steering.committed(action, self._clock.now(), run.meter.opened_s)
                    if run.stream.stopped:
                        self._perform(run, self._machine.cancel("stop"))
                    elif self._steering is not None and self._machine.running and self._steering.probe_due:
                        self._line.probe(self._machine.session, self._steering.probe_due)
                case act.Retry(after_s, code, text):
                    self._patience.retry(self._clock.now(), after_s, refusal(code, text))
                    self._events.record("retry", code=code.name, after_s=after_s)
                case act.Fail(code, text):
                    raise refusal(code, text)
                case act.Done(reason) if run is not None:
                    run.reason = "stop" if run.stream.stopped else reason
        if self._steering is not None:
            self._steering.settled()

    @property
    def _line(self) -> Connection:
        assert self._connection is not None, "the session is not open"
        return self._connection

    def _end(self, run: Run) -> None:
        if self._steering is not None:
            self._steering.end(run.meter)
        self.token_ids = run.kept
        self.finish_reason = run.reason or "cancelled"
        self.stats = summary(run.tally, run.meter)
        self._events.record("end", finish_reason=self.finish_reason, stats=self.stats)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this session was made before the process forked: make a new one in the child")
        if self._closed:
            raise UsageError("this session is closed: make a new one")
