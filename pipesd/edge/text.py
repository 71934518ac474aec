"""Ids to text while they arrive: what has been shown is never changed later.

A character may be spread over several ids and a stop text over several characters, so what could still become part of
one is held back. A stop text counts as soon as it is complete; of two that are completed by the same character the
longer one counts. The text up to it is the output, and it does not depend on how the ids were handed over.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from typing import Protocol

from pipesd.core import Vocabulary


class Stream(Protocol):
    """What a run gives its committed ids to: `TextStream`, or what stands in for it where nobody reads the text."""

    stopped: bool

    @property
    def kept_ids(self) -> int: ...

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Text of one generation, pushed as ids are committed.

    `hidden` are the ids that show nothing (control and end ids: `Tokeniser.hidden_ids`), ids beyond the vocabulary show
    nothing either. `strip_space` drops one space at the very beginning: SentencePiece models glue one to the first word
    (`Tokeniser.add_space_prefix`), which is right behind a prompt and wrong at the beginning of an answer.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        hidden: Container[int] = frozenset(),
        strip_space: bool = False,
    ) -> None:
        assert all(stop), "a stop text is empty"
        self.stopped = False
        self._pieces = vocabulary.pieces
        self._hidden = hidden
        self._stop = tuple(stop)
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, but may become part of a stop text
        self._shown = 0  # characters given out
        self._ends: list[int] = []  # for each id the number of characters that its bytes reach into
        self._kept: int | None = None

    @property
    def kept_ids(self) -> int:
        """How many of the ids pushed lie wholly before the stop text; all of them as long as there was none."""
        return len(self._ends) if self._kept is None else self._kept

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now. After a stop text, ids are ignored."""
        if self.stopped:
            return ""
        for token_id in ids:
            self._held += self._decoder.decode(self._bytes(token_id))
            unfinished = bool(self._decoder.getstate()[0])
            self._ends.append(self._shown + len(self._held) + unfinished)
        return self._take(self._certain())

    def finish(self) -> str:
        """The rest: what was held back, bytes that never became a character as U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        self._certain()
        return self._take(len(self._held))

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._hidden or not 0 <= token_id < len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if self._strip_space and piece:
            self._strip_space = False
            return piece.removeprefix(b" ")
        return piece

    def _certain(self) -> int:
        """How many held characters can be given out; finds a stop text and forgets what lies behind its beginning."""
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at = min(found)[1]
            self.stopped, self._held = True, self._held[:at]
            self._kept = sum(end <= self._shown + at for end in self._ends)
            return at
        return len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._shown += count
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def decode(vocabulary: Vocabulary, ids: Sequence[int], *, hidden: Container[int] = frozenset()) -> str:
    """The whole text of `ids` at once."""
    stream = TextStream(vocabulary, hidden=hidden)
    return stream.push(ids) + stream.finish()
