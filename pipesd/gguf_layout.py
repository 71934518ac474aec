"""Walks over the head of a GGUF file: its metadata and where its tensors lie. Standard library only.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The file is mapped
for the walk and let go: nothing of it stays in memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError
from pipesd.file_kinds import HEAD_BYTES, kind_of
from pipesd.regular_file import open_regular

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 24  # of anything counted in a header; more is garbage
_KEPT_ENTRIES = 4096  # longer arrays (the vocabulary) are walked over, not kept, unless they are asked for


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: its sizes with the outputs first, the number of its type, and where it begins in the file."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufLayout:
    """Scalars, strings and kept arrays by key, the length of every array, and the tensors in file order."""

    path: Path
    file_bytes: int
    values: dict[str, Any]
    lengths: dict[str, int]
    tensors: dict[str, TensorPlace]
    begin: int  # of the tensors, within the file
    digest: bytes  # of the whole head


def read_layout(path: Path, *, keep: frozenset[str] = frozenset()) -> GgufLayout:
    """The head of the GGUF file at `path`, with the arrays under the keys `keep` whatever their length.

    UsageError, one line, for a file that cannot be read, is no GGUF file, is damaged or is cut off before its last
    tensor begins.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise UsageError(f"{path}: is empty; download the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parsed(path, data, size, keep)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); check the disk") from error


def _parsed(path: Path, data: mmap.mmap, size: int, keep: frozenset[str]) -> GgufLayout:
    if data[:4] != b"GGUF":
        raise UsageError(f"{path}: is not a GGUF file but {kind_of(data[:HEAD_BYTES])}; give a GGUF model file")
    try:
        reader = _Reader(data, keep)
        version = reader.scalar("I")
        if version not in (2, 3):
            told = "big-endian GGUF" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
            raise UsageError(f"{path}: is {told}, wanted little-endian version 2 or 3; convert the model again")
        tensors, keys = reader.count("Q"), reader.count("Q")
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(keys):
            key = reader.string()
            if key in values or key in lengths:
                raise _Garbage(f"{key!r} twice")
            kind = reader.scalar("I")
            if kind == _ARRAY:
                lengths[key], kept = reader.array(key)
                if kept is not None:
                    values[key] = kept
            else:
                values[key] = reader.value(kind)
        relative = [reader.tensor() for _ in range(tensors)]
        alignment = int(values.get("general.alignment", 32))
        begin = -(-reader.at // alignment) * alignment
        places = {name: TensorPlace(shape, kind, begin + offset) for name, shape, kind, offset in relative}
        if len(places) < tensors:
            raise _Garbage("a tensor twice")
        furthest = max((place.offset for place in places.values()), default=0)
        if places and furthest >= size:
            raise UsageError(
                f"{path}: is cut off: {size} bytes, its last tensor begins at {furthest}; download it again"
            )
        if reader.at > size:
            raise struct.error("a text beyond the end")
        digest = hashlib.blake2b(data[: reader.at]).digest()
    except struct.error as error:
        raise UsageError(f"{path}: is cut off after {size} bytes, within its header; download it again") from error
    except (_Garbage, ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: its GGUF header is damaged ({error}); download it again") from error
    return GgufLayout(path, size, values, lengths, places, begin, digest)


class _Garbage(Exception):
    """What no GGUF header holds."""


class _Reader:
    """Walks over a header; `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap, keep: frozenset[str]) -> None:
        self._data = data
        self._keep = keep
        self.at = 4

    def scalars(self, form: str, length: int) -> tuple[Any, ...]:
        layout = f"<{length}{form}"
        values = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def scalar(self, form: str) -> Any:
        return self.scalars(form, 1)[0]

    def count(self, form: str) -> int:
        number = int(self.scalar(form))
        if number > _MOST_ENTRIES:
            raise _Garbage(f"a count of {number}")
        return number

    def string(self) -> str:
        length = int(self.scalar("Q"))
        begin, self.at = self.at, self.at + length  # beyond the end, the next read fails
        return self._data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise _Garbage(f"a value of type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, key: str) -> tuple[int, list[Any] | None]:
        """Its length, and its entries if they are few or asked for."""
        kind, length = self.scalar("I"), self.count("Q")
        kept = length <= _KEPT_ENTRIES or key in self._keep
        if kind == _STRING:
            if kept:
                return length, [self.string() for _ in range(length)]
            self._skip_strings(length)
        elif kind in _SCALARS:
            if kept:
                return length, list(self.scalars(_SCALARS[kind], length))
            self.at += length * struct.calcsize(f"<{_SCALARS[kind]}")
        else:
            raise _Garbage(f"an array of type {kind}")
        return length, None

    def _skip_strings(self, length: int) -> None:
        # the one loop that runs a hundred thousand times
        data, at = self._data, self.at
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(length):
            at += 8 + unpack(data, at)[0]
        self.at = at

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Its name, sizes (outputs first), type and offset."""
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > 8:
            raise _Garbage(f"a tensor of {dimensions} dimensions")
        shape = self.scalars("Q", dimensions)[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")
