"""Small files of the user's, read whole and replaced whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


class NoOrdinaryFile(OSError):
    """The path is a device, a pipe or a folder."""

    def __init__(self) -> None:
        super().__init__("it is no ordinary file")
        self.strerror = "it is no ordinary file"


def place_of(path: str) -> Path:
    """The file behind a path as a user gives it: `~` and links are followed. Raises ValueError for a name that no file
    can have."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def read_file(place: Path, most_bytes: int) -> bytes:
    """The first `most_bytes` of an ordinary file. Raises OSError, NoOrdinaryFile among them; waits for no pipe."""
    with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoOrdinaryFile
        return file.read(most_bytes)


def replace_file(place: Path, content: bytes, *, mode: int | None = None) -> None:
    """Put the content in the place of an ordinary file or of none, at once or not at all; with these permissions, or
    those of a new private file. Raises OSError, NoOrdinaryFile among them; then nothing is left behind."""
    if place.exists() and not place.is_file():
        raise NoOrdinaryFile
    made = ""
    try:
        descriptor, made = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(made, mode)
        os.replace(made, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
