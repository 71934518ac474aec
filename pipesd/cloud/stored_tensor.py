"""What tensors in files have in common, whatever the format: samples, a fingerprint, precision, and rotary order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_SAMPLES = 64  # stretches of each tensor that go into a fingerprint,
_SAMPLE_BYTES = 1024  # of this size each; a tensor no larger than their sum goes in whole


class StoredTensor(Protocol):
    """A tensor in a file that is read when asked for; no mapping of the file stays behind."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs first."""

    @property
    def n_bytes(self) -> int:
        """In the file."""

    @property
    def kind(self) -> str:
        """How it is stored: "F32", "BF16", "Q4_K" …"""

    def read(self) -> Tensor:
        """float32 on the CPU, the two halves of each rotary pair next to each other. UsageError: the file changed."""

    def sample(self) -> bytes:
        """Stretches of its bytes, enough to tell two tensors of one model apart; all of a small one."""


def sample_starts(n_bytes: int) -> tuple[list[int], int]:
    """Where the stretches of a sample begin in a tensor of `n_bytes`, and how many bytes each has."""
    if n_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [0], n_bytes
    return [i * (n_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1) for i in range(_SAMPLES)], _SAMPLE_BYTES


def fingerprint(header: bytes, tensors: Mapping[str, StoredTensor], dtype: str, device: str) -> bytes:
    """8 bytes that change with `header`, with samples of any tensor, with precision and kind of device, but not with
    how the tensors are spread over files."""
    digest = hashlib.blake2b(header, digest_size=8)
    digest.update(f"{dtype} {device}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.kind} {tensor.shape}".encode())
        digest.update(tensor.sample())
    return digest.digest()


def file_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """The precision that most bytes are stored in: "float32", "float16", or "bfloat16" for anything else."""
    kinds: dict[str, int] = {}
    for tensor in tensors.values():
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.n_bytes
    most = max(kinds, key=kinds.__getitem__, default="BF16")
    return {"F64": "float32", "F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def interleaved(rows: np.ndarray, head_size: int) -> np.ndarray:
    """A view of whole heads whose rotary pairs lie half a head apart, with the two halves of each pair next to each
    other: (entries, …) -> (heads, head_size // 2, 2, …)."""
    return rows.reshape(-1, 2, head_size // 2, *rows.shape[1:]).swapaxes(1, 2)
