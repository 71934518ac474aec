"""Where the tensors of a safetensors file lie. Standard library only.

A file is eight bytes (the header's length, little endian), the header (JSON: name -> dtype, shape, data_offsets), and
the tensors' bytes. Format: https://github.com/huggingface/safetensors. Only the header is read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError
from pipesd.file_kinds import HEAD_BYTES, kind_of
from pipesd.regular_file import open_regular, shown

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class SafetensorsPlace:
    """One tensor of a file. `shape` has the outputs first; `kind` is the file's dtype, a key of ITEM_BITS."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # in the file
    n_bytes: int


def read_places(path: Path) -> dict[str, SafetensorsPlace]:
    """Name -> tensor of the file at `path`, in its order. UsageError, one line, if it is not a whole one."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(HEAD_BYTES)
        _check_kind(path, start)
        length = int.from_bytes(start[:8], "little")
        if length > _HEADER_LIMIT:
            raise UsageError(f"{path}: not a safetensors file (its header would have {length} bytes); {_AGAIN}")
        if 8 + length > size:
            raise UsageError(f"{path}: cut short ({size} bytes, its header alone has {length}); {_AGAIN}")
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: its header is damaged ({shown(error)}); {_AGAIN}") from error
    if not isinstance(header, dict):
        raise UsageError(f"{path}: its header is damaged (no table of tensors); {_AGAIN}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.n_bytes))
    end = 8 + length
    for tensor in ordered:
        if tensor.offset < end:
            raise UsageError(f"{path}: tensor {shown(tensor.name)} overlaps another; {_AGAIN}")
        end = tensor.offset + tensor.n_bytes
    if end != size:
        found = "cut short" if end > size else "longer than its tensors"
        raise UsageError(f"{path}: {found} ({size} bytes, {end} were wanted); {_AGAIN}")
    return {tensor.name: tensor for tensor in ordered}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1)
        raise ValueError(f"{twice} stands in it twice")
    return made


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsPlace:
    table = entry if isinstance(entry, dict) else {}
    shape, offsets, kind = _naturals(table.get("shape")), _naturals(table.get("data_offsets")), table.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UsageError(f"{path}: tensor {shown(name)} has no shape and place in its header; {_AGAIN}")
    if not isinstance(kind, str) or kind not in ITEM_BITS:
        raise UsageError(
            f"{path}: tensor {shown(name)} is stored as {shown(kind)}, an unknown type; save it as bfloat16"
        )
    n_bytes = offsets[1] - offsets[0]
    if prod(shape) * ITEM_BITS[kind] != n_bytes * 8:
        raise UsageError(
            f"{path}: tensor {shown(name)} has {n_bytes} bytes for {kind} of shape {str(tuple(shape))[:60]}; {_AGAIN}"
        )
    return SafetensorsPlace(path, name, kind, tuple(shape), data_start + offsets[0], n_bytes)


def _naturals(values: Any) -> list[int] | None:
    """The list, if it is one of whole numbers from 0 on."""
    right = isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    return values if right else None


def _check_kind(path: Path, start: bytes) -> None:
    """Refuses, by its first bytes, what is no safetensors file at all."""
    if start[8:9] != b"{":
        what = kind_of(start)
        danger = " (never opened: it could run code)" if "PyTorch" in what else ""
        found = "not a safetensors file" if what == "something else" else f"{what}{danger}"
        raise UsageError(f"{path}: {found}, a safetensors file was wanted; {_AGAIN}")
