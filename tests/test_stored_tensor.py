"""Samples, fingerprints, precision and rotary order of tensors, whatever the format of their files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pipesd.cloud.stored_tensor import file_dtype, fingerprint, interleaved, sample_starts


@dataclass(frozen=True)
class Stored:
    kind: str = "F32"
    n_bytes: int = 4
    shape: tuple[int, ...] = (1,)
    bytes_: bytes = b"abcd"

    def read(self) -> Any:
        raise AssertionError("a fingerprint reads samples alone")

    def sample(self) -> bytes:
        return self.bytes_


def test_a_sample_is_all_of_a_small_tensor_and_both_ends_of_a_large_one() -> None:
    assert sample_starts(0) == ([0], 0) and sample_starts(65536) == ([0], 65536)
    for size in (65537, 10**6, 7 * 10**9):
        starts, length = sample_starts(size)
        assert (len(starts), length, starts[0], starts[-1] + length) == (64, 1024, 0, size)
        steps = np.diff(starts)
        assert steps.min() > 0 and steps.max() - steps.min() <= 1


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"F32": 3, "F16": 2}, "float32"),
        ({"F64": 3, "F16": 2}, "float32"),
        ({"F16": 3, "F32": 2}, "float16"),
        ({"F16": 3, "Q4_K": 4}, "bfloat16"),
        ({"BF16": 3}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_precision_of_files_is_that_of_most_bytes(sizes: dict[str, int], wanted: str) -> None:
    parts = {f"{kind}{i}": Stored(kind, size) for kind, size in sizes.items() for i in range(2)}
    assert file_dtype(parts) == wanted


def test_a_fingerprint_changes_with_all_but_the_order() -> None:
    tensors = {"a": Stored(), "b": Stored(bytes_=b"efgh")}
    first = fingerprint(b"h", tensors, "float32", "cpu")
    assert fingerprint(b"h", dict(reversed(tensors.items())), "float32", "cpu") == first and len(first) == 8
    others = [
        fingerprint(b"i", tensors, "float32", "cpu"),
        fingerprint(b"h", tensors, "float16", "cpu"),
        fingerprint(b"h", tensors, "float32", "cuda"),
        fingerprint(b"h", {"a": tensors["b"], "b": tensors["a"]}, "float32", "cpu"),
        *(
            fingerprint(b"h", tensors | {"a": replace(tensors["a"], **change)}, "float32", "cpu")
            for change in ({"kind": "F16"}, {"shape": (1, 1)}, {"bytes_": b"abce"})
        ),
    ]
    assert len({first, *others}) == 8


def test_halves_of_heads_become_neighbours() -> None:
    rows = np.arange(12)
    assert interleaved(rows, 6).reshape(-1).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    wide = rows[:, None] + np.arange(2) * 100
    assert np.array_equal(interleaved(wide, 6).reshape(12, 2)[:, 1], interleaved(rows, 6).reshape(-1) + 100)
    assert np.shares_memory(interleaved(wide, 6), wide)
