"""What a layer does between its matrices, each step in the form that the device is fastest with.

Torch computes most elements of a tensor many at a time and the last ones one by one. Where a row is one element, as the
lengths of rows are, only operators that round correctly give the same bits both ways: products, sums, roots, quotients.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipesd.cloud.placing import why_no_kernels


class Steps(Protocol):
    """The small steps of a layer. Every row is treated alike and by itself; sums are in float32."""

    def unit(self, x: Tensor, addend: Tensor | None, floor: Tensor) -> Tensor:
        """Adds `addend` to `x`, (rows, hidden), in place, and returns x / √(Σ x² + floor)."""

    def turn(self, heads: Tensor, gains: Tensor | None, rotation: Tensor, floor: Tensor) -> None:
        """Norms each head of (rows, heads, head_size) where there are `gains`, float32 (heads, head_size), with
        `floor` as in `unit`, and turns its pairs by `rotation`, complex64 (rows, 1, head_size / 2); in place, in
        float32 whatever the precision."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of (rows, 2 * size), gates first."""


class PlainSteps:
    """The steps as torch has them."""

    def unit(self, x: Tensor, addend: Tensor | None, floor: Tensor) -> Tensor:
        if addend is not None:
            x.add_(addend)
        return (x / _length(x, floor)).to(x.dtype)

    def turn(self, heads: Tensor, gains: Tensor | None, rotation: Tensor, floor: Tensor) -> None:
        values = heads.float()
        if gains is not None:
            values.div_(_length(values, floor)).mul_(gains)
        torch.view_as_complex(values.unflatten(-1, (-1, 2))).mul_(rotation)
        if heads.dtype != torch.float32:
            heads.copy_(values)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _length(x: Tensor, floor: Tensor) -> Tensor:
    """√(Σ x² + floor) over the last dimension, which stays, in float32."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return length.mul_(length).add_(floor).sqrt_()


def steps_for(device: torch.device) -> Steps:
    """Kernels of our own on CUDA where triton runs: there each operator of torch costs as much as a step."""
    if device.type == "cpu" or why_no_kernels(device) is not None:
        return PlainSteps()
    from pipesd.cloud.step_kernels import TritonSteps

    return TritonSteps()
