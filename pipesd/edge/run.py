"""What belongs to one generation: its text, ids, pieces, times and counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pipesd.clock import Clock
from pipesd.config import GenerateConfig
from pipesd.core import FinishReason, Origin, Piece
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.edge.text import TextStream
from pipesd.metrics import Meter, Tally


class Run:
    """What belongs to one generation."""

    def __init__(self, tokeniser: Tokeniser, config: GenerateConfig, now_s: float, *, answer: bool) -> None:
        self.config = config
        self.stream = TextStream(
            tokeniser.vocabulary,
            config.stop,
            hidden=tokeniser.hidden_ids,
            strip_space=answer and tokeniser.add_space_prefix,
        )
        self.meter = Meter(now_s)
        self.tally = Tally()
        self.ids: list[int] = []
        self.pieces: deque[Piece] = deque()
        self.reason: FinishReason | None = None
        self.cloud_opened = False
        self.prefilled = False
        self.origin: Origin = "target"  # of the last piece

    def commit(self, ids: Sequence[int], origins: Sequence[Origin], now_s: float) -> None:
        """Take committed ids: one piece for each stretch of one origin."""
        self.meter.token(now_s, len(ids))
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or origins[end] != origins[start]:
                stretch = tuple(ids[start:end])
                self.origin = origins[start]
                self.ids.extend(stretch)
                self.pieces.append(Piece(self.stream.push(stretch), stretch, origins[start]))
                start = end

    def draft(self, drafter: Drafter, clock: Clock) -> tuple[int, float]:
        """The drafter's next token and its probability, timed."""
        started_s = clock.now()
        drawn = drafter.draft()
        self.meter.draft_s += clock.now() - started_s
        return drawn

    def ready(self) -> Iterator[Piece]:
        """The pieces that were not handed out yet."""
        while self.pieces:
            yield self.pieces.popleft()

    def rest(self) -> Iterator[Piece]:
        """What was held back of the text, once all is committed."""
        text = self.stream.finish()
        if text:
            yield Piece(text, (), self.origin)

    def opened(self, now_s: float, *, drafts: bool) -> None:
        """The output's time begins when both sides have prefilled."""
        if self.meter.opened_s is None and self.cloud_opened and (self.prefilled or not drafts):
            self.meter.opened_s = now_s
