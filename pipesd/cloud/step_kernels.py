"""The small steps of a layer as Triton kernels, one for each: see `steps`.

Imported where there is a CUDA device, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

__all__ = ["TritonError", "TritonSteps", "try_out"]

_GATES = 1024  # of one block


@triton.jit
def _unit(  # type: ignore[no-untyped-def]
    x, addend, floor, out, ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Block (row)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    values = tl.load(x + row * SIZE + i, mask=inside, other=0.0)
    if ADDS:
        added = values.to(tl.float32) + tl.load(addend + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        values = added.to(values.dtype)
        tl.store(x + row * SIZE + i, values, mask=inside)
    values = values.to(tl.float32)
    least = tl.load(floor)
    length = tl.sqrt(tl.sum(values * values, 0) + least)
    tl.store(out + row * SIZE + i, (values / length).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    heads, gains, rotation, floor, stride, NORMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Block (row, head)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < SIZE // 2
    where = heads + row * stride + head * SIZE + 2 * pair
    kind = heads.dtype.element_ty
    a = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(where + 1, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        least = tl.load(floor)
        length = tl.sqrt(tl.sum(a * a + b * b, 0) + least)
        a = a / length * tl.load(gains + head * SIZE + 2 * pair, mask=inside, other=0.0)
        b = b / length * tl.load(gains + head * SIZE + 2 * pair + 1, mask=inside, other=0.0)
    cosine = tl.load(rotation + row * SIZE + 2 * pair, mask=inside, other=0.0)
    sine = tl.load(rotation + row * SIZE + 2 * pair + 1, mask=inside, other=0.0)
    tl.store(where, (a * cosine - b * sine).to(kind), mask=inside)
    tl.store(where + 1, (a * sine + b * cosine).to(kind), mask=inside)


@triton.jit
def _gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + i, value.to(out.dtype.element_ty), mask=inside)


class TritonSteps:
    """The steps by these kernels."""

    def unit(self, x: Tensor, addend: Tensor | None, floor: Tensor) -> Tensor:
        assert x.is_contiguous() and (addend is None or addend.is_contiguous())
        out = torch.empty_like(x)
        rows, size = x.shape
        other = x if addend is None else addend
        _unit[(rows,)](
            x, other, floor, out,
            ADDS=addend is not None, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=8,
        )  # fmt: skip
        return out

    def turn(self, heads: Tensor, gains: Tensor | None, rotation: Tensor, floor: Tensor) -> None:
        rows, count, size = heads.shape
        assert heads.stride()[1:] == (size, 1) and rotation.is_contiguous()
        turns = torch.view_as_real(rotation)
        _turn[(rows, count)](
            heads, turns if gains is None else gains, turns, floor, heads.stride(0),
            NORMS=gains is not None, SIZE=size, BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
        )  # fmt: skip

    def gate(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
        _gate[(rows, triton.cdiv(size, _GATES))](gate_up, out, SIZE=size, BLOCK=_GATES, num_warps=4)
        return out


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Runs a small kernel; what triton raises where it cannot."""
    TritonSteps().gate(torch.zeros(1, 16, device=device, dtype=dtype))
