"""Finds and opens what somebody named, as long as it is a file: a pipe or a device would be read for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from pipesd.errors import UsageError

_SHOWN = 80  # characters of a text from a file that a message repeats


def locate(path: str | os.PathLike[str]) -> tuple[Path, Literal["file", "folder", "other", "nothing"]]:
    """The absolute path, `~` expanded and links followed, and what is there; "other": a pipe, a device … UsageError,
    one line, for a path that cannot be, and for a folder that cannot be listed.

    A file keeps its name where that is a link: in a hub's cache only the link says which part of a model it is.
    """
    try:
        given = Path(path).expanduser()
        resolved = given.resolve()
        if resolved.is_dir():
            os.scandir(resolved).close()
            return resolved, "folder"
        if not resolved.is_file():
            return resolved, "other" if resolved.exists() else "nothing"
        return given.parent.resolve() / given.name, "file"
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a loop of links, no home folder, a NUL
        raise UsageError(f"{os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}; check the path") from error


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, unbuffered. UsageError, one line, if it is missing, unreadable or no regular file."""
    try:
        # a pipe that nobody writes into would hold up the opening itself
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UsageError(f"{path}: not a regular file; put the file itself there")
        return os.fdopen(descriptor, "rb", buffering=0)
    except (OSError, ValueError) as error:  # a NUL in its name
        told = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read ({told}); check that it is there and readable") from error


def shown(text: object) -> str:
    """A text out of a file as a message may repeat it: on one line, printable, not too long."""
    told = str(text)[: _SHOWN + 1]
    told = told if told.isprintable() else repr(told)[1:-1]
    return told if len(told) <= _SHOWN else f"{told[:_SHOWN]}…"
