"""The decoder of llama, mistral, qwen2 and qwen3 in plain PyTorch: RMS norm, rotary positions, grouped-query attention,
SwiGLU; with biases, norms of single heads and windows where its shape says so.

One code path for CPU and CUDA, float32 and bfloat16. The attention and its cache are in `kv_cache`; what is left here
treats every row of a pass alike. Query heads are ordered by group first, so that the rows of a tile and the heads of a
group form one axis without a copy; the two halves of a rotary pair are neighbours.

Between two matrices every operator costs more than its arithmetic, because the weights that stream by leave the caches
empty. Therefore there are few: the gain of a norm, and √hidden, are multiplied into the matrix behind it, and then
x / √(mean x² + ε) is x / √(Σ x² + hidden ε). On the demo model that saves a fifth of a pass. A matrix adds its bias
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipesd.cloud.rotary import rotation_table
from pipesd.cloud.steps import PlainSteps, Steps
from pipesd.model_shape import ModelShape


class Linear(Protocol):
    """A matrix in some form that multiplies rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) -> (rows, outputs)."""

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the weights."""


class Attention(Protocol):
    """One pass over a cache: where each layer's new keys and values go, and what each row reads."""

    @property
    def positions(self) -> Tensor:
        """(rows,) int64."""

    def store(self, layer: int, kv: Tensor) -> None:
        """Appends the pass's keys and values, (rows, 2 * kv_heads, head_size)."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """What `query`, (rows, groups * kv_heads * head_size) with heads by group first, reads; of the same shape."""


class PlainLinear:
    """y = W x + b by torch's own choice of kernel; the bits of a row may depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def memory(self) -> tuple[int, int]:
        return self.weight.data_ptr(), self.weight.nbytes


class PackedLinear:
    """y = W x + b by oneDNN with a weight packed once: two to three times as fast as `F.linear` on few rows, and the
    bits of a row are the same for any number of rows from two on; four cost less than two. The operators are private to
    torch: see `packing_works`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    @property
    def memory(self) -> tuple[int, int]:
        return torch.ops.mkldnn.data_ptr(self.packed), torch.ops.mkldnn._nbytes(self.packed)


class TiledLinear(PlainLinear):
    """y = W x + b by `F.linear` on eight rows at a time, the last filled up: one shape, hence one kernel, but slow."""

    ROWS = 8

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % self.ROWS))
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in padded.split(self.ROWS)])[: x.shape[0]]


def packing_works(inputs: Iterable[int], dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` exists here, computes W x + b for these input sizes, and treats rows alike. A few ms."""
    draw = torch.Generator().manual_seed(0)
    for size in set(inputs):
        weight = (torch.randn(96, size, generator=draw) / size**0.5).to(dtype)
        x = torch.randn(33, size, generator=draw).to(dtype)
        product = x.float() @ weight.float().T
        for bias in (torch.zeros(96, dtype=dtype), torch.randn(96, generator=draw).to(dtype)):
            try:
                linear = PackedLinear(weight, bias if bias.any() else None)
                whole = linear(x)
                parts = [linear(part) for part in x.split([2, 3, 5, 8, 13, 2])]
                _ = linear.memory
            except (RuntimeError, AttributeError, TypeError):
                return False
            error = (whole.float() - (product + bias.float())).abs().max().item()
            if not torch.equal(whole, torch.cat(parts)) or error > (1e-4 if dtype == torch.float32 else 5e-2):
                return False
    return True


@dataclass(frozen=True)
class _Layer:
    qkv: Linear  # of the unit input; rows: queries (group, kv head), keys (kv head), values (kv head)
    head_gains: Tensor | None  # float32 (heads + kv_heads, head_size), of the unit queries and keys
    out: Linear
    gate_up: Linear  # of the unit input
    down: Linear


class Decoder:
    """Weights on one device in one precision; no state.

    `weight(name)` is asked once for each tensor under its GGUF name and gives float32 on the CPU, to be overwritten;
    `linear(matrix, bias or None)` makes the form in which matrices are kept, of tensors on `device` in `dtype`;
    `rope_divisors`, (head_size / 2,), divide the rotary frequencies where the checkpoint has any. `steps`: what is done
    between the matrices, by torch's own operators if it is None.

    While it is made there are in memory the weights so far, one tensor as it was read, and the matrix of which that
    becomes a part. A tied output layer is the embeddings, unless `linear` copies what it is given, as `PackedLinear`
    does: then they are held twice.
    """

    def __init__(
        self,
        shape: ModelShape,
        weight: Callable[[str], Tensor],
        linear: Callable[[Tensor, Tensor | None], Linear],
        *,
        device: torch.device,
        dtype: torch.dtype,
        rope_divisors: Tensor | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.shape = shape
        self.steps = steps or PlainSteps()
        self.embedding = weight("token_embd.weight").to(device, dtype)
        loader = _Loader(shape, weight, linear, device, dtype)
        self.layers = [loader.layer(f"blk.{i}.") for i in range(shape.layers)]
        self.norm = weight("output_norm.weight").to(device, dtype)
        self.head = linear(self.embedding if shape.tied else weight("output.weight").to(device, dtype), None)
        self.rotation = rotation_table(shape.rope, shape.head_size, shape.context, rope_divisors).to(device)
        self._floor = torch.tensor(shape.hidden * shape.norm_eps, device=device)
        self._head_floor = torch.tensor(shape.head_size * shape.norm_eps, device=device)

    def matrices(self) -> list[Linear]:
        """All linear layers."""
        return [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self.head]

    def shallow(self, most_window: int) -> Decoder:
        """The same weights with one layer only, enough to try the kernels on: the first that has a window, which is cut
        to `most_window`, or the first.
        """
        layer = next((i for i, window in enumerate(self.shape.windows) if window), 0)
        windows = tuple(min(window, most_window) for window in self.shape.windows[layer : layer + 1])
        other = copy(self)
        other.layers = self.layers[layer : layer + 1]
        other.shape = replace(self.shape, layers=1, windows=windows)
        return other

    def __call__(self, ids: Tensor, attention: Attention, wanted: Tensor | None) -> Tensor | None:
        """Runs the pass and returns the float32 logits (len(wanted), width) of the rows `wanted`, None if it is None.

        `ids`, int64, one per row of `attention`, whose slots take the new keys and values.
        """
        s = self.shape
        rotation = self.rotation[attention.positions]
        x = F.embedding(ids, self.embedding)
        steps, addend = self.steps, None
        for i, layer in enumerate(self.layers):
            heads = layer.qkv(steps.unit(x, addend, self._floor))
            query = heads[:, : s.heads * s.head_size]
            heads = heads.unflatten(-1, (-1, s.head_size))
            steps.turn(heads[:, : s.heads + s.kv_heads], layer.head_gains, rotation, self._head_floor)
            attention.store(i, heads[:, s.heads :])
            addend = layer.out(attention.attend(i, query))
            addend = layer.down(steps.gate(layer.gate_up(steps.unit(x, addend, self._floor))))
        if wanted is None:
            return None
        assert addend is not None
        x.add_(addend)
        return self.head(F.rms_norm(x[wanted], (s.hidden,), self.norm, s.norm_eps)).float()


@dataclass(frozen=True)
class _Loader:
    """Makes the layers of a decoder out of single tensors."""

    shape: ModelShape
    weight: Callable[[str], Tensor]
    linear: Callable[[Tensor, Tensor | None], Linear]
    device: torch.device
    dtype: torch.dtype

    def layer(self, prefix: str) -> _Layer:
        """The layer whose tensors' names begin with `prefix`."""
        s = self.shape
        queries, keys = s.heads * s.head_size, s.kv_heads * s.head_size
        return _Layer(
            qkv=self._matrix(prefix, {"attn_q": queries, "attn_k": keys, "attn_v": keys}, s.hidden, "attn_norm"),
            head_gains=self._head_gains(prefix) if s.head_norms else None,
            out=self._matrix(prefix, {"attn_output": s.hidden}, queries),
            gate_up=self._matrix(prefix, dict.fromkeys(("ffn_gate", "ffn_up"), s.feed_forward), s.hidden, "ffn_norm"),
            down=self._matrix(prefix, {"ffn_down": s.hidden}, s.feed_forward),
        )

    def _matrix(self, prefix: str, parts: dict[str, int], columns: int, norm: str | None = None) -> Linear:
        """The matrices `parts`, name -> outputs, one below the other; their input has the gains of `norm`."""
        gains = None if norm is None else self.weight(f"{prefix}{norm}.weight").mul_(self.shape.hidden**0.5)
        rows = sum(parts.values())
        matrix = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
        biased = not self.shape.biases.isdisjoint(parts)
        bias = torch.zeros(rows, device=self.device, dtype=self.dtype) if biased else None
        start = 0
        for name, count in parts.items():
            self._place(f"{prefix}{name}.weight", matrix[start : start + count], gains)
            if bias is not None and name in self.shape.biases:
                self._place(f"{prefix}{name}.bias", bias[start : start + count], None)
            start += count
        return self.linear(matrix, bias)

    def _place(self, name: str, target: Tensor, gains: Tensor | None) -> None:
        """Reads a tensor into its place; what belongs to query heads is ordered by group first."""
        values = self.weight(name)
        if gains is not None:
            values.mul_(gains)
        s = self.shape
        dimension = 0 if "attn_q." in name else 1 if name.endswith("attn_output.weight") else None
        if dimension is not None:
            values = values.unflatten(dimension, (s.kv_heads, s.groups, s.head_size))
            values = values.transpose(dimension, dimension + 1)
        target.view(values.shape).copy_(values)

    def _head_gains(self, prefix: str) -> Tensor:
        s = self.shape
        query, key = (self.weight(f"{prefix}attn_{name}_norm.weight") for name in "qk")
        gains = torch.cat([query.expand(s.heads, -1), key.expand(s.kv_heads, -1)])
        return gains.mul_(s.head_size**0.5).to(self.device)
