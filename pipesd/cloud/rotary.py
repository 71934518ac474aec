"""How far each pair of a head turns at each position: rotary embeddings and the ways of stretching them.

The angles are rounded to float32 step by step as in transformers (`modeling_rope_utils`), with which these models were
trained.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipesd.model_shape import Rope


def rotation_table(rope: Rope, head_size: int, context: int, divisors: Tensor | None = None) -> Tensor:
    """a exp(i position θ_j), complex64 (context, 1, head_size / 2), a being the attention factor.

    `divisors`, (head_size / 2,), divide the frequencies θ_j where a checkpoint has any.
    """
    frequencies = _frequencies(rope, head_size)
    if divisors is not None:
        frequencies /= divisors
    positions = torch.arange(context)
    angles = torch.outer(positions.float(), frequencies)
    if rope.kind == "dynamic" and context > rope.original_context:
        late = positions[rope.original_context :]
        stretched = _dynamic_frequencies(rope, head_size, late + 1)
        if divisors is not None:
            stretched /= divisors
        angles[rope.original_context :] = late.float()[:, None] * stretched
    return torch.polar(torch.full_like(angles, rope.attention_factor), angles)[:, None]


def _frequencies(rope: Rope, head_size: int) -> Tensor:
    """θ_j, the same at every position: for `dynamic` those within the original context."""
    frequencies = 1.0 / rope.base ** _exponents(head_size)
    match rope.kind:
        case "default" | "dynamic":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, head_size)


def _exponents(head_size: int) -> Tensor:
    return torch.arange(0, head_size, 2).float() / head_size


def _dynamic_frequencies(rope: Rope, head_size: int, lengths: Tensor) -> Tensor:
    """(len(lengths), head_size / 2): frequencies for texts of these lengths, int64, beyond the original context.

    In float64 until the end, so that a row of the result does not depend on how many there are.
    """
    growth = rope.factor * lengths.double() / rope.original_context - (rope.factor - 1)
    bases = rope.base * growth ** (head_size / (head_size - 2))
    return (1.0 / bases[:, None] ** _exponents(head_size).double()).float()


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones are left, those between are blended."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    waves = 2 * math.pi / frequencies
    blend = (rope.original_context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long, is_short = waves > rope.original_context / low, waves < rope.original_context / high
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(rope: Rope, head_size: int) -> Tensor:
    """Pairs that turn often within the original context are left, seldom ones stretched, those between blended."""

    def pair(turns: float) -> float:
        return head_size * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_size // 2).float() - low) / (high - low)).clamp(0, 1)
    left = 1 - ramp
    periods = rope.base ** _exponents(head_size)
    return 1.0 / (rope.factor * periods) * (1 - left) + 1.0 / periods * left
