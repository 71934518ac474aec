"""How often each id stands in a text: what penalties count. The text mostly grows at its end and is cut back there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Counts:
    """Of one text at a time; going to another costs what differs behind the first difference."""

    def __init__(self) -> None:
        import numpy as np

        self._text: list[int] = []
        self._slots: dict[int, int] = {}  # of each id that occurs
        self._ids = np.empty(64, np.int64)  # by slot: in the order of their first occurrences
        self._times = np.empty(64, np.float32)

    def of(self, text: Sequence[int]) -> tuple[Any, Any]:
        """The ids that occur in `text`, in no order, and how often: int64 and float32 (distinct,), to be read at
        once."""
        if not isinstance(text, list):
            text = list(text)
        kept = _agreeing(self._text, text)
        for token in reversed(self._text[kept:]):
            self._remove(token)
        del self._text[kept:]
        for token in text[kept:]:
            self._add(token)
        self._text += text[kept:]
        count = len(self._slots)
        return self._ids[:count], self._times[:count]

    def _add(self, token: int) -> None:
        import numpy as np

        slot = self._slots.get(token)
        if slot is not None:
            self._times[slot] += 1.0
            return
        slot = self._slots[token] = len(self._slots)
        if slot == len(self._ids):
            self._ids, self._times = np.resize(self._ids, 2 * slot), np.resize(self._times, 2 * slot)
        self._ids[slot], self._times[slot] = token, 1.0

    def _remove(self, token: int) -> None:
        slot = self._slots[token]
        self._times[slot] -= 1.0
        if self._times[slot] == 0:  # the first occurrence was cut, so those of all ids in later slots were before
            del self._slots[token]


def _agreeing(one: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first difference lies in low .. high
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
