"""One edge: a draft model, a line to a cloud, generations one after the other. What happens in one is in `loop`."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

from pipesd.clock import Clock, SystemClock
from pipesd.config import EdgeConfig, GenerateConfig, make_config
from pipesd.core import FinishReason, Logprobs, Piece
from pipesd.edge.connection import Connection, Link
from pipesd.edge.local import generate_alone
from pipesd.edge.loop import Loop
from pipesd.edge.models import Drafter, Tokeniser, check_sampling, import_models, load_models, prompt_ids
from pipesd.edge.run import CLOSE_S, Pieces, Run
from pipesd.edge.tuning_file import default_path
from pipesd.energy_cpu import CpuEnergy
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.metrics import EventLog, summary
from pipesd.policy.sampling import make_sampling
from pipesd.policy.strategy import check_together, make_strategy
from pipesd.policy.token_batches import warmup
from pipesd.policy.tuning import Tuning
from pipesd.protocol.messages import Welcome

SEED_BITS = 53  # of a fresh seed: more would be rounded by readers of JSON that know no whole numbers


class EdgeSession:
    """A session with a cloud, as a context manager: `generate` yields the output; `stats`, `text`, `token_ids`,
    `logprobs` (one for each id, where asked for), `finish_reason` and `seed` describe the last generation afterwards.

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
        self.logprobs: tuple[Logprobs, ...] = ()
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.seed: int | None = None
        self._clock = clock or SystemClock()
        self._energy: CpuEnergy | None = None  # of the running generation
        self._metered = clock is None  # joules pass in no other time
        self._link = link
        self._drafter, self._tokeniser = drafter, tokeniser
        self._owned: list[Drafter | Tokeniser] = []
        self._events = EventLog(config.events, self._clock)
        self._loop = Loop(config, self.strategy, self._clock, self._events)
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
            self._loop.hang_up()
            raise
        self._opened = True

    def _open(self, config: EdgeConfig) -> None:
        steering = self._loop.steering
        needs_drafter = self.strategy.drafts or not self.strategy.uses_cloud
        needs_models = self._tokeniser is None or (needs_drafter and self._drafter is None)
        if needs_models:
            import_models()
        loading = threading.Thread(target=warmup, name="pipesd-kernels", daemon=True)
        if self.strategy.plans:
            loading.start()  # beside the models
        if self.strategy.uses_cloud:  # connects while the models load
            round_trips = steering.round_trips if steering else None
            self._loop.connection = Connection(
                config, self._clock, self._events, self._cancelled.is_set, link=self._link, round_trips=round_trips
            )
        if needs_models:
            self._drafter, self._tokeniser = load_models(config, drafter=needs_drafter)
            self._owned = [part for part in (self._drafter, self._tokeniser) if part is not None]
        assert self._tokeniser is not None
        self._loop.drafter = self._drafter
        if self._loop.connection is not None:
            self._welcome = self._loop.connection.greet(self._loop.machine.session, self._tokeniser)
        if steering is not None and self._welcome is not None and self.strategy.tuned:
            pair = f"{self._tokeniser.name} {self._welcome.model_fingerprint.hex()} {config.cloud}"
            path = default_path() if config.tuning == "auto" else config.tuning
            steering.remember(path, f"{self.strategy.key} {pair}")
        if self.strategy.plans:
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
            self._loop.hang_up()
            for part in self._owned:
                part.close()
            self._events.close()
        finally:
            self._busy.release()

    def cancel(self) -> None:
        """End the running generation, within one step of the draft model, the one asked for last before it begins, or
        `open` where it waits for the cloud. From any thread or signal handler; else nothing happens."""
        self._cancelled.set()
        self._next.set()
        self._wake()

    def _wake(self) -> None:
        if (connection := self._loop.connection) is not None:
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

    def check(self, options: GenerateConfig) -> None:
        """Raises UsageError or Refused for options that `generate` would not take, once the session is open."""
        check_together(self.strategy, options)
        sampling = make_sampling(options)
        check_sampling(options, None if sampling.plain else sampling, self.tokeniser, self._welcome)

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt, once the session is open. Raises UsageError or Refused for one that `generate` would not
        take."""
        return prompt_ids(self.tokeniser, prompt, (), self._welcome)

    def tune(self, tuning: Tuning) -> None:
        """Search by `tuning` from the next generation on, instead of as `config` says, and draft all the time."""
        assert self._loop.steering is not None, "a strategy that drafts"
        self._loop.steering.tune(tuning, alone=False)

    @property
    def tokeniser(self) -> Tokeniser:
        """The draft model's tokeniser, once the session is open."""
        assert self._tokeniser is not None, "the session is not open"
        return self._tokeniser

    @property
    def serving(self) -> tuple[str, int] | None:
        """Name and context of the target that the cloud serves; None without a cloud, and before `open`."""
        return None if self._welcome is None else (self._welcome.model, self._welcome.context)

    @property
    def fingerprint(self) -> str | None:
        """Of the target that the cloud serves, hexadecimal: what tells it from all others, whatever they are called."""
        return None if self._welcome is None else self._welcome.model_fingerprint.hex()

    @property
    def committed(self) -> tuple[int, ...]:
        """The ids of the last generation with a cloud: its prompt and what was committed behind it."""
        return tuple(self._loop.machine.committed)

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], *, answer: bool = False, **options: Any) -> Pieces:
        """Generate behind `prompt`, a text or ids; yields pieces as they are committed.

        `options` are the fields of `GenerateConfig` (max_tokens, temperature, seed, stop, …); `answer`: the output is a
        text of its own, not the prompt's continuation. What the prompt shares with the ids of the last generation is
        not computed again on either side. Raises UsageError for wrong options at once, everything else while iterating;
        what was yielded before stays valid. To close or drop the iterator ends the generation.
        """
        self._check_usable()
        config = make_config(GenerateConfig, options, {})
        check_together(self.strategy, config)
        seed = secrets.randbits(SEED_BITS) if config.seed is None else config.seed
        run = Run(config, self.strategy, seed, self._clock.now(), answer=answer)
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
            self.seed = run.seed
            try:
                self.open(run.cancelled)
                self._energy = CpuEnergy(self._clock.now()) if self._metered else None
                check_sampling(run.config, run.sampling, self.tokeniser, self._welcome)
                run.begin(self.tokeniser, drafts=self._loop.drafting)
                if run.sampler is not None and self._drafter is not None:
                    warmup()  # a draw takes many times as long without
                ids = prompt_ids(self.tokeniser, prompt, self._loop.machine.committed, self._welcome)
                if self.strategy.uses_cloud:
                    assert self._welcome is not None
                    steps = self._loop.generate(run, ids, self.tokeniser.end_ids, self._welcome)
                else:
                    steps = generate_alone(run, self._drafter, ids, self.tokeniser.end_ids, self._clock)
                for piece in run.output(steps):
                    self.text += piece.text
                    if self._energy is not None:
                        self._energy.keep_up(self._clock.now())
                    yield piece
            except PipeSDError as error:
                run.reason = "cancelled" if isinstance(error, Cancelled) else "error"
                raise
            finally:
                self._end(run)
        finally:
            self._busy.release()

    def _end(self, run: Run) -> None:
        if self._loop.steering is not None:
            self._loop.steering.end(run.meter)
        energy, self._energy = self._energy, None
        run.meter.energy_j = None if energy is None else energy.joules(self._clock.now())
        self.token_ids, self.logprobs = run.kept, run.kept_logprobs
        self.finish_reason = run.reason or "cancelled"
        self.stats = summary(run.tally, run.meter)
        self._events.record("end", finish_reason=self.finish_reason, stats=self.stats)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this session was made before the process forked: make a new one in the child")
        if self._closed:
            raise UsageError("this session is closed: make a new one")
