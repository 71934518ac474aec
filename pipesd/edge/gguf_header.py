"""Reads the head of a GGUF file: what is wrong with the file, and how much memory its model will take.

llama.cpp answers many bad files with an abort or a bare "failed to load model"; looking first turns them into one line.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 24  # of anything counted in a header; more is garbage
_KEPT_ENTRIES = 4096  # longer arrays (the vocabulary) are walked over, not kept
_CACHE_CELLS = 256  # llama.cpp rounds a context up to a multiple of it
_HALF_BYTES = 2  # the cache is kept in float16


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a model file: scalars, strings and short arrays by key, and the length of every array.

    `tensors`: the number of entries of each tensor by its name. `weight_bytes`: of the file, behind the header.
    """

    path: Path
    file_bytes: int
    weight_bytes: int
    values: dict[str, Any]
    lengths: dict[str, int]
    tensors: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """The model's own name, else the file's."""
        return str(self.values.get("general.name") or self.path.stem)

    @property
    def vocabulary_size(self) -> int:
        """0 for a file without a tokeniser."""
        return self.lengths.get("tokenizer.ggml.tokens", 0)

    @property
    def context(self) -> int:
        """Positions that the model was trained for; 0 if the file does not say."""
        return self._whole("context_length")

    def _whole(self, key: str, default: int = 0) -> int:
        value = self._wholes(key, default)
        return value if isinstance(value, int) else default

    def _wholes(self, key: str, default: Any) -> Any:
        """A whole number or one a layer; `default` for anything else: llama.cpp says what it does not take."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        every = value if isinstance(value, list) else [value]
        return value if all(isinstance(each, int) for each in every) else default

    def cache_bytes(self, context: int) -> int:
        """Memory for keys and values of `context` positions, in bytes; 0 for a model without attention."""
        layers, heads = self._whole("block_count"), self._wholes("attention.head_count", 0)
        heads_kv = self._wholes("attention.head_count_kv", heads)
        first_heads = max(heads, default=0) if isinstance(heads, list) else heads
        if not layers or not first_heads:
            return 0
        per_head = self._whole("embedding_length") // first_heads
        width = self._whole("attention.key_length", per_head) + self._whole("attention.value_length", per_head)
        rows = sum(heads_kv[:layers]) if isinstance(heads_kv, list) else layers * heads_kv
        cells = -(-context // _CACHE_CELLS) * _CACHE_CELLS
        return int(rows * width * cells * _HALF_BYTES)


def resolve_model(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a model file, `~` expanded; raises `UsageError` unless it is a readable, regular file."""
    try:
        resolved = Path(path).expanduser().resolve()
        if resolved.is_dir():
            inside = sorted(entry.name for entry in resolved.glob("*.gguf"))[:3]
            advice = f"give one of the files in it, such as {', '.join(inside)}" if inside else "give a GGUF file"
            raise UsageError(f"{resolved}: is a folder; {advice}")
        if not resolved.exists():
            raise UsageError(f"{resolved}: no such file; give the path of a GGUF model file")
        if not resolved.is_file():
            raise UsageError(f"{resolved}: not a regular file; give the path of a GGUF model file")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home folder, a NUL in the name
        raise UsageError(f"{os.fspath(path)!r}: {error}; give the path of a GGUF model file") from error
    return resolved


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The header of the model file at `path`; raises `UsageError` with the reason if it is not a whole GGUF header."""
    resolved = resolve_model(path)
    try:
        with resolved.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise UsageError(f"{resolved}: is empty; download the model again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parsed(resolved, data, size)
    except OSError as error:
        raise UsageError(f"{resolved}: cannot be read ({error.strerror}); check its permissions") from error


def _parsed(path: Path, data: mmap.mmap, size: int) -> GgufHeader:
    if data[:4] != b"GGUF":
        raise UsageError(f"{path}: is not a GGUF file but {_kind(data[:512])}; give a GGUF model file")
    try:
        reader = _Reader(data)
        version = reader.scalar("<I")
        if version not in (2, 3):
            told = "big-endian GGUF" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
            raise UsageError(f"{path}: is {told}, wanted little-endian version 2 or 3; convert the model again")
        tensors, keys = reader.count("<Q"), reader.count("<Q")
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(keys):
            key = reader.string()
            kind = reader.scalar("<I")
            if kind == _ARRAY:
                lengths[key], kept = reader.array()
                if kept is not None:
                    values[key] = kept
            else:
                values[key] = reader.value(kind)
        furthest = 0
        entries: dict[str, int] = {}
        for _ in range(tensors):
            name, entries_of, offset = reader.tensor()
            entries[name] = entries_of
            furthest = max(furthest, offset)
        alignment = int(values.get("general.alignment", 32))
        begin = -(-reader.at // alignment) * alignment
        if tensors and begin + furthest >= size:
            raise UsageError(
                f"{path}: is cut off: {size} bytes, its last tensor begins at {begin + furthest}; download it again"
            )
    except struct.error as error:
        raise UsageError(f"{path}: is cut off after {size} bytes, within its header; download it again") from error
    except (_Garbage, ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: its GGUF header is damaged ({error}); download it again") from error
    return GgufHeader(path, size, max(0, size - begin), values, lengths, entries)


class _Garbage(Exception):
    """A number that no GGUF header holds."""


class _Reader:
    """Walks over a header; `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 4

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self._data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def count(self, form: str) -> int:
        number = int(self.scalar(form))
        if number > _MOST_ENTRIES:
            raise _Garbage(f"a count of {number}")
        return number

    def string(self) -> str:
        begin, end = self._span()
        return self._data[begin:end].decode("utf-8", "replace")

    def _span(self) -> tuple[int, int]:
        length = int(self.scalar("<Q"))
        begin, self.at = self.at, self.at + length  # beyond the end, the next read fails
        return begin, self.at

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise _Garbage(f"a value of type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> tuple[int, list[Any] | None]:
        """Its length, and its entries if they are few."""
        kind, length = self.scalar("<I"), self.count("<Q")
        if length <= _KEPT_ENTRIES and kind != _ARRAY:
            return length, [self.value(kind) for _ in range(length)]
        if kind == _STRING:
            self._skip_strings(length)
        elif kind in _SCALARS:
            self.at += length * struct.calcsize(_SCALARS[kind])
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

    def tensor(self) -> tuple[str, int, int]:
        """Its name, number of entries and offset."""
        name, dimensions = self.string(), self.scalar("<I")
        if dimensions > 8:
            raise _Garbage(f"a tensor of {dimensions} dimensions")
        entries = math.prod(int(self.scalar("<Q")) for _ in range(dimensions))
        self.at += 4  # its type
        return name, entries, int(self.scalar("<Q"))


def _kind(head: bytes) -> str:
    """What a file that does not begin like GGUF seems to be."""
    if head[8:10] in (b'{"', b"{ ") or head[8:9] == b"{":
        return "safetensors (convert it with llama.cpp's convert_hf_to_gguf.py)"
    if head[:4] == b"PK\x03\x04":
        return "a zip or PyTorch archive"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer (run `git lfs pull`)"
    if head[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        return "an old ggml format"
    if head.lstrip()[:1] == b"<":
        return "a web page (the download failed)"
    if not head.strip(b"\0"):
        return "all zeros (an unfinished download)"
    return "something else"
