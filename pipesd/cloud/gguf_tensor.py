"""A tensor of a GGUF file, read by offset and dequantised in pieces: the largest temporary is one piece."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.stored_tensor import interleaved, sample_starts
from pipesd.errors import UsageError
from pipesd.gguf_layout import TensorPlace

_PIECE_VALUES = 1 << 18  # dequantised at a time: what is made of them on the way stays in a cache


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. `head_size`: 0, or the rows of an attention head whose rotary pairs lie half a head apart in the
    file; they are read with the two halves of a pair next to each other.
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    head_size: int = 0

    def read(self) -> Tensor:
        """float32 on the CPU. UsageError if the file is no longer what it was when it was opened."""
        kind = gguf.GGMLQuantizationType[self.kind]
        columns, rows = self.shape[-1], prod(self.shape[:-1])
        row_bytes = self.n_bytes // max(1, rows)
        values = np.empty((rows, columns), np.float32)
        step = max(1, _PIECE_VALUES // columns)
        heads = self.head_size if len(self.shape) > 1 else 0
        if heads:  # whole heads, so that a piece can be ordered by itself
            step = -(-step // heads) * heads
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                for start in range(0, rows, step):
                    end = min(rows, start + step)
                    stored = np.fromfile(file, np.uint8, (end - start) * row_bytes)
                    if stored.nbytes < (end - start) * row_bytes:
                        raise self._changed("ends early")
                    with np.errstate(all="ignore"):  # a scale without end or that is no number: told by who reads them
                        piece = gguf.quants.dequantize(stored.reshape(-1, row_bytes), kind)
                    values[start:end] = interleaved(piece, heads).reshape(piece.shape) if heads else piece
        except OSError as error:
            raise self._changed(f"cannot be read ({error.strerror})") from error
        if self.head_size and not heads:
            values = interleaved(values.reshape(-1), self.head_size)
        return torch.from_numpy(values.reshape(self.shape))

    def sample(self) -> bytes:
        """Stretches of its bytes; all of a small tensor. UsageError as in `read`."""
        starts, size = sample_starts(self.n_bytes)
        try:
            with self.path.open("rb") as file:
                return b"".join(os.pread(file.fileno(), size, self.offset + start) for start in starts)
        except OSError as error:
            raise self._changed(f"cannot be read ({error.strerror})") from error

    def _changed(self, what: str) -> UsageError:
        return UsageError(f"{self.path}: {what} within tensor {self.name}; it has changed since it was opened")


@cache
def _readable(type_id: int) -> tuple[str, int, int] | None:
    """Name, entries and bytes of a block of a type that can be read; None for others."""
    if type_id not in gguf.GGML_QUANT_SIZES:
        return None
    kind = gguf.GGMLQuantizationType(type_id)
    entries, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return None
    return kind.name, entries, size


def stored_tensor(path: Path, file_bytes: int, name: str, place: TensorPlace, head_size: int = 0) -> GgufTensor:
    """The tensor at `place` of a file of that size. UsageError: of a type that cannot be read, or not whole."""
    found = _readable(place.type_id)
    if found is None:
        known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
        raise UsageError(
            f"{path}: tensor {name} is stored as {known.get(place.type_id, f'type {place.type_id}')}, which cannot be "
            "read here; quantise the model to Q4_0 … Q8_0, a K-quant, F16, BF16 or F32"
        )
    kind, entries, size = found
    if not place.shape or not all(0 < length < 1 << 32 for length in place.shape) or place.shape[-1] % entries:
        raise UsageError(
            f"{path}: tensor {name} of shape {place.shape} does not fit blocks of {entries}; convert the model anew"
        )
    n_bytes = prod(place.shape) // entries * size
    if place.offset + n_bytes > file_bytes:
        raise UsageError(
            f"{path}: is cut off: {file_bytes} bytes, its tensor {name} ends at {place.offset + n_bytes}; "
            "copy or download it again"
        )
    return GgufTensor(path, name, kind, place.shape, place.offset, n_bytes, head_size)
