"""What a decoder makes of the tensors that it is given: how much memory that takes, and what it shares."""

from __future__ import annotations

import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from pipesd.cloud.model import Decoder, PackedLinear, PlainLinear
from pipesd.model_shape import ModelShape

SHAPE = ModelShape(
    family="llama", layers=3, hidden=1024, heads=8, kv_heads=4, head_size=128, feed_forward=4096, width=2000,
    context=64, norm_eps=1e-5, biases=frozenset({"attn_q", "attn_v", "ffn_down"}), head_norms=True,
)  # fmt: skip
CPU = torch.device("cpu")


def size_of(name: str, shape: ModelShape) -> tuple[int, ...]:
    """(outputs, inputs) or (size,) of a tensor."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrices = {
        "token_embd": (shape.width, hidden), "output": (shape.width, hidden), "attn_q": (queries, hidden),
        "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, queries),
        "ffn_gate": (shape.feed_forward, hidden), "ffn_up": (shape.feed_forward, hidden),
        "ffn_down": (hidden, shape.feed_forward),
    }  # fmt: skip
    kind = name.split(".")[-2]
    if kind in ("attn_q_norm", "attn_k_norm"):
        return (shape.head_size,)
    if kind not in matrices:
        return (hidden,)
    return matrices[kind][:1] if name.endswith(".bias") else matrices[kind]


class Reader:
    """Gives tensors of one number, and sees which of the matrices that it gave are still there at the next."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.asked: list[str] = []
        self.most_alive = 0
        self._given: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, name: str) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self._given))
        self.asked.append(name)
        values = torch.full(size_of(name, self.shape), 0.01)
        if values.ndim == 2:
            self._given.append(weakref.ref(values))
        return values


@pytest.mark.parametrize("linear", [PlainLinear, PackedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_read_once_and_let_go_before_the_next(linear: type, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, hidden=64, head_size=8, feed_forward=128)
    reader = Reader(shape)
    Decoder(shape, reader, linear, device=CPU, dtype=dtype)
    assert len(reader.asked) == len(set(reader.asked)) == 3 + 3 * (9 + 3 + 2)
    assert reader.most_alive == (1 if dtype == torch.float32 else 0)  # the embeddings


def memory_kb(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("linear", "dtype"),
    [(PackedLinear, torch.float32), (PackedLinear, torch.bfloat16), (PlainLinear, torch.bfloat16)],
)
def test_loading_takes_the_weights_and_one_matrix_in_float32(linear: type, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, layers=2, feed_forward=12288)
    reader = Reader(shape)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    except OSError:
        pytest.skip("the peak of this process cannot be set back")
    before = memory_kb("VmRSS")
    decoder = Decoder(shape, reader, linear, device=CPU, dtype=dtype)
    peak = (memory_kb("VmHWM") - before) << 10
    weights = decoder.embedding.nbytes + sum(matrix.memory[1] for matrix in decoder.matrices())
    largest = 4 * 2 * shape.feed_forward * shape.hidden
    kept = 64 << 20  # freed memory that the C library keeps at most
    assert weights > largest > kept and weights < peak + kept < weights + largest + 2 * kept


def test_a_tied_output_layer_is_the_embeddings_themselves() -> None:
    shape = replace(SHAPE, layers=0, tied=True)
    decoder = Decoder(shape, Reader(shape), PlainLinear, device=CPU, dtype=torch.bfloat16)
    assert isinstance(decoder.head, PlainLinear) and decoder.head.weight is decoder.embedding
