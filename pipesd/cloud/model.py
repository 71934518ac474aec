"""The decoder of the llama family in plain PyTorch: RMS norm, rotary positions, grouped-query attention, SwiGLU.

One code path for CPU and CUDA, float32 and bfloat16. The attention and its cache are in `kv_cache`; what is left here
treats every row of a pass alike. Query heads are ordered by group first, so that the rows of a tile and the heads of a
group form one axis without a copy; rotary pairs are neighbours, as GGUF files of this family store them.

Between two matrices every operator costs more than its arithmetic, because the weights that stream by leave the caches
empty. Therefore there are few: the gain of a norm, and √hidden, are multiplied into the matrix behind it, and then
x / √(mean x² + ε) is x over the hypotenuse of |x| and √(hidden ε). On the demo model that saves a fifth of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipesd.cloud.kv_cache import Attention
from pipesd.cloud.shape import ModelShape


class Linear(Protocol):
    """A matrix in some form that multiplies rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) -> (rows, outputs)."""

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the weights."""


class PlainLinear:
    """y = W x by torch's own choice of kernel; the bits of a row may depend on the number of rows."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    @property
    def memory(self) -> tuple[int, int]:
        return self.weight.data_ptr(), self.weight.nbytes


class PackedLinear:
    """y = W x by oneDNN with a weight packed once: two to three times as fast as `F.linear` on few rows, and the bits
    of a row are the same for any number of rows from two on; four cost less than two. The operators are private to
    torch: see `packing_works`.
    """

    def __init__(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")  # type: ignore[no-any-return]

    @property
    def memory(self) -> tuple[int, int]:
        return torch.ops.mkldnn.data_ptr(self.packed), torch.ops.mkldnn._nbytes(self.packed)


class TiledLinear(PlainLinear):
    """y = W x by `F.linear` on eight rows at a time, the last ones filled up: one shape, hence one kernel, but slow."""

    ROWS = 8

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % self.ROWS))
        return torch.cat([F.linear(tile, self.weight) for tile in padded.split(self.ROWS)])[: x.shape[0]]


def packing_works(inputs: Iterable[int], dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` exists here, computes W x for these input sizes, and treats rows alike. A few ms."""
    draw = torch.Generator().manual_seed(0)
    for size in set(inputs):
        weight = (torch.randn(96, size, generator=draw) / size**0.5).to(dtype)
        x = torch.randn(33, size, generator=draw).to(dtype)
        try:
            linear = PackedLinear(weight)
            whole = linear(x)
            parts = [linear(part) for part in x.split([2, 3, 5, 8, 13, 2])]
            _ = linear.memory
        except (RuntimeError, AttributeError, TypeError):
            return False
        error = (whole.float() - x.float() @ weight.float().T).abs().max().item()
        if not torch.equal(whole, torch.cat(parts)) or error > (1e-4 if dtype == torch.float32 else 5e-2):
            return False
    return True


@dataclass(frozen=True)
class _Layer:
    qkv: Linear  # of the unit input; rows: queries (group, kv head), keys (kv head), values (kv head)
    out: Linear
    gate_up: Linear  # of the unit input
    down: Linear


class Decoder:
    """Weights on one device in one precision; no state.

    `weight(name)` is asked once for each tensor under its GGUF name and gives float32 on the CPU; `linear` makes the
    form in which matrices are kept, on `device` in `dtype`; `rope_divisors`, (head_size / 2,), divide the rotary
    frequencies where the checkpoint has any.
    """

    def __init__(
        self,
        shape: ModelShape,
        weight: Callable[[str], Tensor],
        linear: Callable[[Tensor], Linear],
        *,
        device: torch.device,
        dtype: torch.dtype,
        rope_divisors: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.embedding = weight("token_embd.weight").to(device, dtype)

        def place(matrix: Tensor) -> Linear:
            return linear(matrix.to(device, dtype))

        self.layers = [self._layer(f"blk.{i}.", weight, place) for i in range(shape.layers)]
        self.norm = weight("output_norm.weight").to(device, dtype)
        self.head = linear(self.embedding) if shape.tied else place(weight("output.weight"))
        self.rotation = _rotation(shape, rope_divisors).to(device)
        self._floor = torch.tensor((shape.hidden * shape.norm_eps) ** 0.5, device=device)

    def _layer(self, prefix: str, weight: Callable[[str], Tensor], linear: Callable[[Tensor], Linear]) -> _Layer:
        s = self.shape
        by_head = (s.kv_heads, s.groups, s.head_size)
        query, key, value = (weight(f"{prefix}attn_{name}.weight") for name in "qkv")
        query = query.unflatten(0, by_head).transpose(0, 1).flatten(0, 2)
        out = weight(prefix + "attn_output.weight").unflatten(1, by_head).transpose(1, 2).flatten(1, 3)
        gate_up = torch.cat([weight(prefix + "ffn_gate.weight"), weight(prefix + "ffn_up.weight")])
        scale = s.hidden**0.5
        return _Layer(
            qkv=linear(torch.cat([query, key, value]) * (weight(prefix + "attn_norm.weight") * scale)),
            out=linear(out),
            gate_up=linear(gate_up * (weight(prefix + "ffn_norm.weight") * scale)),
            down=linear(weight(prefix + "ffn_down.weight")),
        )

    def matrices(self) -> list[Linear]:
        """All linear layers."""
        return [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self.head]

    def shallow(self) -> Decoder:
        """The same weights with the first layer only: enough to try the kernels on."""
        other = copy(self)
        other.layers = self.layers[:1]
        return other

    def __call__(self, ids: Tensor, attention: Attention, wanted: Tensor | None) -> Tensor | None:
        """Runs the pass and returns the float32 logits (len(wanted), width) of the rows `wanted`, None if it is None.

        `ids`, int64, one per row of `attention`, whose slots take the new keys and values.
        """
        s = self.shape
        rotation = self.rotation[attention.positions]
        x = F.embedding(ids, self.embedding)
        for i, layer in enumerate(self.layers):
            heads = layer.qkv(self._unit(x))
            query = heads[:, : s.heads * s.head_size]
            heads = heads.unflatten(-1, (-1, s.head_size))
            _rotate(heads[:, : s.heads + s.kv_heads], rotation)
            attention.store(i, heads[:, s.heads :])
            x.add_(layer.out(attention.attend(i, query)))
            gate, up = layer.gate_up(self._unit(x)).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        if wanted is None:
            return None
        return self.head(F.rms_norm(x[wanted], (s.hidden,), self.norm, s.norm_eps)).float()

    def _unit(self, x: Tensor) -> Tensor:
        """x / √(Σ x² + hidden ε), the sum in float32."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._floor)
        return torch.div(x, length, out=torch.empty_like(x))


def _rotation(shape: ModelShape, divisors: Tensor | None) -> Tensor:
    """exp(i position θ_j), complex64 (context, 1, head_size / 2), with θ_j = base^(-2j / head_size).

    The angles are rounded to float32 step by step as in transformers, with which these models were trained.
    """
    frequencies = 1.0 / shape.rope.base ** (torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    if divisors is not None:
        frequencies /= divisors
    angles = torch.outer(torch.arange(shape.context).float(), frequencies / shape.rope.factor)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def _rotate(heads: Tensor, rotation: Tensor) -> None:
    """Turns the pairs of each head, (rows, heads, head_size), in place; in float32 whatever the precision."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    if heads.dtype == torch.float32:
        pairs.mul_(rotation)
    else:
        heads.copy_(torch.view_as_real(pairs * rotation).flatten(-2))
