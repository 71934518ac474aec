"""What a layer does between its matrices, each step in the form that the device is fastest with."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Steps(Protocol):
    """The small steps of a layer. Every row is treated alike and by itself; sums are in float32."""

    def unit(self, x: Tensor, addend: Tensor | None, floor: Tensor) -> Tensor:
        """Adds `addend` to `x`, (rows, hidden), in place, and returns x / √(Σ x² + floor²)."""

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
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(floor)
        return torch.div(x, length, out=torch.empty_like(x))

    def turn(self, heads: Tensor, gains: Tensor | None, rotation: Tensor, floor: Tensor) -> None:
        values = heads.float()
        if gains is not None:
            length = torch.linalg.vector_norm(values, dim=-1, keepdim=True).hypot_(floor)
            values.div_(length).mul_(gains)
        torch.view_as_complex(values.unflatten(-1, (-1, 2))).mul_(rotation)
        if heads.dtype != torch.float32:
            heads.copy_(values)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def steps_for(device: torch.device) -> Steps:
    """Kernels of our own on CUDA where triton is installed: there each operator of torch costs as much as a step."""
    if device.type == "cuda":
        try:
            from pipesd.cloud.step_kernels import TritonSteps
        except ImportError:
            return PlainSteps()
        return TritonSteps()
    return PlainSteps()
