"""Tells an operator how far the loading of a model is; silent where it is quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

_SILENT_S = 1.0
_LINE_S = 0.2  # between two states of a line on a terminal
_LOG_S = 10.0  # between two lines of a log


class LoadingProgress:
    """`with LoadingProgress(name, say, sys.stderr) as progress: load_target(path, progress=progress)`.

    On a terminal one line is rewritten in place and wiped at the end; elsewhere `say` gets a whole line every ten
    seconds. `stream` None: never a terminal. Nothing is told of the first second. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        stream: IO[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._say = say
        self._terminal = stream if stream is not None and stream.isatty() else None
        self._clock = clock
        self._next = clock() + (_LOG_S if self._terminal is None else _SILENT_S)
        self._width = 0  # of the line that stands there

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """`done_bytes` of `all_bytes` have been read."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (_LOG_S if self._terminal is None else _LINE_S)
        line = f"loading {self._name}: {_amount(done_bytes, all_bytes)}"
        if self._terminal is None:
            self._say(line)
        else:
            self._rewrite(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._terminal is not None and self._width:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        assert self._terminal is not None
        blank = " " * (self._width - len(line))
        try:
            self._terminal.write(f"\r{line}{blank}" if line else f"\r{blank}\r")
            self._terminal.flush()
        except OSError:  # nobody watches any more
            self._terminal, self._next = None, float("inf")
        self._width = len(line)


def bytes_text(count: float) -> str:
    """ "14.2 GB", "512 MB", "12 kB": three digits are enough for a person."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size * 0.9995:
            return f"{count / size:.1f} {unit}" if unit in ("TB", "GB") else f"{count / size:.0f} {unit}"
    return f"{count:.0f} bytes"


def _amount(done: int, of: int) -> str:
    return f"{100 * done // max(of, 1)} % of {bytes_text(of)}"
