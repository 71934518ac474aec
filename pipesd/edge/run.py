"""What belongs to one generation: its iterator; its text, ids, pieces, times and counts."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from pipesd.clock import Clock
from pipesd.config import GenerateConfig
from pipesd.core import Drawn, FinishReason, Logprobs, Origin, Piece
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.edge.text import Stream, TextStream
from pipesd.errors import UsageError
from pipesd.metrics import Meter, Tally
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Chooser, Sampler
from pipesd.policy.sampling import Sampling, make_sampling
from pipesd.policy.strategy import Strategy

CLOSE_S = 5.0  # how long a step that was cancelled in another thread may take to end


class Pieces(Iterator[Piece]):
    """The output of one generation, piece by piece. Threads may share it: they advance it in turn."""

    def __init__(
        self,
        begin: Callable[[Callable[[], Pieces | None]], Generator[Piece, None, None]],
        cancelled: threading.Event,
        wake: Callable[[], None],
    ) -> None:
        """`begin` makes the generator behind it, given a reference to this iterator that does not keep it alive."""
        self._steps = begin(weakref.ref(self))
        self._cancelled = cancelled
        self._wake = wake
        self._turn = threading.Lock()

    def __next__(self) -> Piece:
        with self._turn:
            return next(self._steps)

    def cancel(self) -> None:
        """End the generation at its next step, from any thread or signal handler."""
        self._cancelled.set()
        self._wake()

    def close(self) -> None:
        """End the generation here. UsageError if a step that runs in another thread does not end within `CLOSE_S`."""
        self.cancel()
        if not self._turn.acquire(timeout=CLOSE_S):
            raise UsageError("a generation still runs in another thread: end it first")
        try:
            self._steps.close()
        finally:
            self._turn.release()


class Run:
    """What belongs to one generation; `begin` before its first token. `now_s` is the time of the call.

    `sampling` is what the cloud is told, None for plain greedy; `sampler` draws the draft tokens, and the draft model's
    most probable one is taken without. Where draft tokens are tested it is `proposals`.
    """

    stream: Stream

    def __init__(self, config: GenerateConfig, strategy: Strategy, seed: int, now_s: float, *, answer: bool) -> None:
        self.config = config
        self.seed = seed
        sampling = make_sampling(config)
        if not strategy.drafts:
            sampling = sampling.untested
        self.sampling: Sampling | None = None if sampling.plain else sampling
        self.sampler: Chooser | None = None
        self.proposals: Proposals | None = None
        margins = strategy.confidence == "margin"
        if margins or not sampling.plain:
            self.sampler = sampler = Sampler(sampling, seed, margins=margins)
            if sampling.tests:
                self.sampler = self.proposals = Proposals(sampler)
        self.answer = answer
        self.cancelled = threading.Event()
        self.meter = Meter(now_s, sampling="greedy" if sampling.greedy else sampling.method.name.lower())
        self.tally = Tally()
        self.ids: list[int] = []
        self.logprobs: list[Logprobs] = []  # one for each of the ids, or none at all
        self.pieces: deque[Piece] = deque()
        self.reason: FinishReason | None = None
        self.cloud_opened = self.prefilled = self.drafter_failed = False
        self.origin: Origin = "target"  # of the last piece

    def begin(self, tokeniser: Tokeniser, *, drafts: bool) -> None:
        """Make the text's stream; without drafts there is nothing to prefill here."""
        text = TextStream(
            tokeniser.vocabulary,
            self.config.stop,
            hidden=tokeniser.hidden_ids,
            strip_space=self.answer and tokeniser.add_space_prefix,
        )
        self.begin_into(text, drafts=drafts)

    def begin_into(self, stream: Stream, *, drafts: bool) -> None:
        """The same with a stream that is there."""
        self.prefilled = not drafts
        self.stream = stream

    @property
    def kept(self) -> tuple[int, ...]:
        """The ids committed so far that lie wholly before a stop text."""
        return tuple(self.ids[: self.stream.kept_ids]) if self.ids else ()

    @property
    def kept_logprobs(self) -> tuple[Logprobs, ...]:
        """What came with them."""
        return tuple(self.logprobs[: len(self.kept)])

    def commit(
        self, ids: Sequence[int], origins: Sequence[Origin], now_s: float, logprobs: Sequence[Logprobs] = ()
    ) -> None:
        """Take committed ids: one piece for each stretch of one origin. `logprobs`: one for each id, or none."""
        assert len(logprobs) in (0, len(ids)), f"{len(logprobs)} log-probabilities for {len(ids)} ids"
        self.meter.token(now_s, len(ids))
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or origins[end] != origins[start]:
                stretch = tuple(ids[start:end])
                self.origin = origins[start]
                said = tuple(logprobs[start:end])
                self.ids.extend(stretch)
                self.logprobs.extend(said)
                self.pieces.append(Piece(self.stream.push(stretch), stretch, origins[start], said))
                start = end

    def draft(self, drafter: Drafter, clock: Clock) -> tuple[Drawn, float]:
        """The drafter's next token, and how long it took (s)."""
        started_s = clock.now()
        drawn = drafter.draft(self.sampler)
        if self.proposals is not None:
            drawn = drawn._replace(p_sent=self.proposals.p_sent(len(drafter) - 1, drawn.id))
        took_s = clock.now() - started_s
        self.meter.draft_s += took_s
        return drawn, took_s

    def ready(self) -> Iterator[Piece]:
        """The pieces that were not handed out yet."""
        while self.pieces:
            yield self.pieces.popleft()

    def output(self, steps: Iterator[Piece]) -> Iterator[Piece]:
        """What `steps` yields and then what it left: also when an error ends it, as what is committed stays valid."""
        try:
            yield from steps
        except Exception:
            self.reason = "error"
            yield from self._rest()
            raise
        yield from self._rest()

    def _rest(self) -> Iterator[Piece]:
        yield from self.ready()
        text = self.stream.finish()
        if text:
            yield Piece(text, (), self.origin)

    def opened(self, now_s: float, *, cloud: bool = False, drafter: bool = False) -> None:
        """A side has prefilled. The output's time begins when both have."""
        self.cloud_opened |= cloud
        self.prefilled |= drafter
        if self.meter.opened_s is None and self.cloud_opened and self.prefilled:
            self.meter.opened_s = now_s
