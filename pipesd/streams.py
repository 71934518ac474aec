"""The standard streams, whatever was done to them: closed, full, read by nobody, of a narrow encoding."""

from __future__ import annotations

import os
import sys
from typing import IO, TextIO

from pipesd.errors import Cancelled, UsageError

_ESCAPED = "backslashreplace"
_results: TextIO | None = None  # stdout, while `Aside` leads what is printed elsewhere


class OutputClosed(Cancelled):
    """Whoever read stdout has gone; there is nobody left to tell."""


def prepare() -> None:
    """Make stdout and stderr take any text: characters that their encoding lacks are escaped, and closed ones lead
    nowhere, where otherwise the next socket would get their number and with it what is written there."""
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # it gets the lowest number that is free: this one
    sys.stdout = sys.stdout or _nowhere(1)
    sys.stderr = sys.stderr or _nowhere(2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ESCAPED)


def show(text: str) -> None:
    """Write to stdout, at once. Raises OutputClosed if nobody reads it any more, UsageError if it cannot be written."""
    out = _results or sys.stdout
    try:
        out.write(text)
        out.flush()
    except OSError as error:
        _give_up(out)
        if isinstance(error, BrokenPipeError):
            raise OutputClosed("nobody reads the output any more") from None
        raise UsageError(f"the output cannot be written: {error.strerror or error}; write it elsewhere") from error


def tell(line: str) -> None:
    """Write a line to stderr; where that cannot be written, there is nobody to tell."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def utf8_output() -> bool:
    """Whether stdout takes every character as it is."""
    out = _results or sys.stdout
    return (out.encoding or "").lower().replace("-", "") == "utf8"


class Aside:
    """In here what is printed goes to stderr. Stdout is for results, which `show` writes to it all the same."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        global _results
        self._before = sys.stdout
        if self._before is not sys.stderr:
            _results, sys.stdout = self._before, sys.stderr

    def __exit__(self, *_: object) -> None:
        global _results
        if self._before is not sys.stderr:  # else another one around this, or in another thread, puts it back
            _results, sys.stdout = None, self._before


def _nowhere(number: int) -> IO[str]:
    return open(number, "w", encoding="utf-8", errors=_ESCAPED, closefd=False)


def _give_up(stream: IO[str]) -> None:
    """Lead a stream nowhere, so that the interpreter's last flush of what it still holds does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
