"""When the edge asks for verification: triggers see each draft token's probability and say whether to ask now."""

from __future__ import annotations

from typing import Protocol

from pipesd.errors import UsageError


class Trigger(Protocol):
    """Sees the draft model's own probability of each draft token, whatever the sampling options."""

    def observe(self, p_draft: float) -> str | None:
        """The name of the rule that asks for verification after this token, or None."""

    def reset(self) -> None:
        """Begin a new draft."""


class FixedLength:
    """Asks after every `length` draft tokens (the papers' vanilla speculative decoding)."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise UsageError(f"draft length {length} is too small: give at least 1")
        self._length = length
        self._seen = 0

    def observe(self, p_draft: float) -> str | None:
        self._seen += 1
        if self._seen < self._length:
            return None
        self._seen = 0
        return "length"

    def reset(self) -> None:
        self._seen = 0
