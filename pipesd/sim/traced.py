"""Draft and target model of a recorded trace, for the simulator and for real sessions: they say what was recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pipesd.clock import Clock
from pipesd.core import Drawn, common_prefix
from pipesd.policy.accept import Choices, accept_greedy
from pipesd.policy.batch_choices import NOTHING
from pipesd.policy.sampler import Chooser
from pipesd.protocol.cloud_session import Work
from pipesd.sim.trace import Guess, Record


class TraceDrafter:
    """A drafter that guesses what `record` says; each guess takes `gamma_s` of `clock`. `read` another record before
    the next prompt.

    It may be told the record's own ids only, but may draft on behind its wrong guesses, as was recorded to the trace's
    depth; deeper it repeats the last guess, which no target accepts.
    """

    def __init__(self, gamma_s: float, clock: Clock) -> None:
        self.gamma_s = gamma_s
        self._clock = clock
        self._text: tuple[int, ...] = ()
        self._length = 0
        self._wrong: int | None = None  # where it left the record's text

    def read(self, record: Record) -> None:
        """What is drafted from now on; what that shares with the last prompt and output is still known."""
        text = (*record.prompt, *record.output)
        if self._wrong is not None:
            self.rollback(self._wrong)
        self._length = min(self._length, common_prefix(self._text, text))
        self._record, self._text, self._begin = record, text, len(record.prompt)

    @property
    def room(self) -> int:
        return 1 << 20

    def __len__(self) -> int:
        return self._length

    def rollback(self, pos: int) -> None:
        """Forget every position from `pos` on."""
        assert 0 <= pos <= self._length, f"{self._length} ids, cannot be cut to {pos}"
        self._length = pos
        if self._wrong is not None and pos <= self._wrong:
            self._wrong = None

    def extend(self, ids: Sequence[int]) -> None:
        """Append committed ids, which must be the record's."""
        assert self._wrong is None, "ids were committed behind a wrong guess that was not rolled back"
        end = self._length + len(ids)
        assert self._text[self._length : end] == tuple(ids), f"other ids than were recorded, from {self._length} on"
        self._length = end

    def prefill(self, most: int) -> int:
        """Nothing takes time but drafting."""
        return 0

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        """The guess that was recorded here."""
        record, place = self._record, self._length - self._begin
        if self._wrong is None and place < len(record.output):
            guess = record.guesses[place]
            if guess.id != record.output[place]:
                self._wrong = self._length
        else:
            guess = self._behind(place)
        self._length += 1
        self._clock.sleep(self.gamma_s)
        return Drawn(guess.id, guess.p_draft, guess.entropy, guess.margin)

    def _behind(self, place: int) -> Guess:
        """What is guessed at that place of the output, behind a wrong guess or the output's end."""
        record = self._record
        if self._wrong is None:
            self._wrong = self._length
        at = min(self._wrong - self._begin, len(record.output) - 1)
        behind = record.behind.get(at, ())
        depth = place - at - 1
        return behind[min(depth, len(behind) - 1)] if behind else record.guesses[at]

    def close(self) -> None:
        """Nothing is held."""


class TraceTarget:
    """Chooses what was recorded, as long as a slot holds nothing else; behind other ids it chooses wrong ones."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[int, ...]] = {}
        self._slots: dict[int, tuple[tuple[int, ...], int]] = {}  # text, and how much of it the slot surely holds

    def read(self, session: int, record: Record) -> None:
        """What the session generates from now on."""
        self._texts[session] = (*record.prompt, *record.output)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the slot's first `length` positions."""
        text, held = self._slots.get(slot, ((), 0))
        self._slots[slot] = text, min(held, length)

    def choices(self, work: Work) -> Choices:
        """What a pass makes of one session's share of it."""
        assert work.draw is None, "a recorded target draws nothing"
        text, (known, held) = self._texts[work.session], self._slots.get(work.slot, ((), 0))
        if known is not text:
            held = min(held, common_prefix(known, text))
        keep, ids, rows = work.keep, work.ids, work.rows
        end = keep + len(ids)
        held = min(held, keep)
        if held == keep:
            held = end if text[keep:end] == ids else keep + common_prefix(ids, text[keep:end])
        self._slots[work.slot] = text, held
        if not rows:
            return NOTHING
        first = end - rows + 1
        right = text[first : min(first + rows, held + 1)]
        said = right if len(right) == rows else right + (WRONG,) * (rows - len(right))
        return Choices(said, accept_greedy(ids[len(ids) - rows + 1 :], said))


WRONG = 0  # what the target says behind ids that are not the record's
