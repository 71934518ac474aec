"""Reads the tensors of safetensors files as float32, by offset and in pieces.

Nothing is mapped into memory and nothing can be unpickled; the largest temporary is one piece.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from pipesd.cloud.stored_tensor import interleaved, sample_starts
from pipesd.errors import UsageError
from pipesd.regular_file import open_regular, shown
from pipesd.safetensors_layout import ITEM_BITS, SafetensorsPlace

if TYPE_CHECKING:
    from torch import Tensor

READABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # kind -> torch's name of it
_PIECE_BYTES = 1 << 20  # read at a time; small enough to stay near the processor
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class SafetensorsTensor(SafetensorsPlace):
    """One tensor of a file, read when asked for, if its `kind` is READABLE.

    `head_size`: 0, or the rows of an attention head whose rotary pairs lie half a head apart in the file; they are
    read with the two halves of a pair next to each other.
    """

    head_size: int = 0

    def read(self) -> Tensor:
        """The tensor as float32 on the CPU. UsageError if the file is no longer what it was when it was opened."""
        import torch

        assert self.kind in READABLE
        rows, row, item = self.shape[0] if self.shape else 1, prod(self.shape[1:]), ITEM_BITS[self.kind] // 8
        step = max(1, _PIECE_BYTES // max(1, row * item))
        if self.head_size:  # whole heads, so that a piece can be ordered by itself
            step = -(-step // self.head_size) * self.head_size
        values = torch.empty(rows, row)
        buffer = np.empty(max(1, min(step, rows) * row) * item, np.uint8)
        with open_regular(self.path) as file:
            for first in range(0, rows if row else 0, step):
                piece = values[first : first + step]
                raw = buffer[: piece.numel() * item]
                self._fill(file.fileno(), raw, first * row * item)
                raw = raw.reshape(-1, row * item)
                raw = interleaved(raw, self.head_size) if self.head_size else raw
                stored = torch.from_numpy(raw).view(getattr(torch, READABLE[self.kind]))
                piece.view(stored.shape).copy_(stored)
        return values.view(self.shape)

    def _fill(self, descriptor: int, raw: np.ndarray, start: int) -> None:
        """Fills the bytes `raw` with those of the tensor from `start` on."""
        view, done = memoryview(raw.data), 0
        while done < len(view):
            try:
                got = os.preadv(descriptor, [view[done:]], self.offset + start + done)
            except OSError as error:
                raise UsageError(f"{self.path}: cannot be read ({error.strerror}); check the disk") from error
            if not got:
                raise UsageError(f"{self.path}: tensor {shown(self.name)} is cut short; {_AGAIN}")
            done += got

    def sample(self) -> bytes:
        """Bytes from all over the tensor, as the file has them; all of a small one."""
        starts, length = sample_starts(self.n_bytes)
        raw = np.empty((len(starts), length), np.uint8)
        with open_regular(self.path) as file:
            for piece, start in zip(raw, starts, strict=True):
                self._fill(file.fileno(), piece, start)
        return raw.tobytes()
