"""The target's own choices made where its logits are, so that only ids leave the device: the arithmetic of
`pipesd.policy` on tensors. Hashes are the same integers; exponentials and logarithms may differ in the last place, so
an id may differ from that of the CPU where two are as good as tied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesd.policy.accept import Draw
from pipesd.policy.noise import FIRST_FACTOR, GOLDEN, SECOND_FACTOR, UNIT, Stream, stream_key
from pipesd.policy.sampling import LEAST_TEMPERATURE, behind_penalties, threshold

ROWS = 16  # at a time, each of which takes some 50 bytes for each id
UNLIMITED = 1 << 31


def choose_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The id that each of `rows` asks for, int64 (rows,), where `logits` (rows, width) are, which stay as they are; -1
    where the highest logit is not finite. The host does not wait for the device."""
    assert len(rows) == logits.shape[0], f"{logits.shape[0]} rows of logits for {len(rows)} choices"
    parts = [_chosen(logits[start : start + ROWS], rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def rows_of(draw: Draw) -> list[Row]:
    """What `draw` asks of its rows of logits, 1 + drafted: the ids that `pipesd.policy.accept.choose` finds, its own
    choice behind its prefix and behind each draft token. For draws that neither test draft tokens nor want
    log-probabilities."""
    return [Row(draw, behind) for behind in range(1 + len(draw.drafted))]


def units(keys: Tensor, numbers: Tensor) -> Tensor:
    """Noise as `pipesd.policy.noise.unit` gives it: float64 (keys, numbers), from uint64 keys held in int64 (n,) and
    non-negative numbers, int64 (m,)."""
    z = keys[:, None] + (numbers + 1) * _signed(GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(FIRST_FACTOR)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND_FACTOR)
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 12).double() + 0.5) * UNIT


class Row:
    """What is wanted of one row: of `draw`, behind so many of its draft tokens."""

    def __init__(self, draw: Draw, behind: int) -> None:
        self.sampling = draw.sampler.sampling
        assert not self.sampling.tests and self.sampling.logprobs is None
        self.draw = draw
        self.behind = behind
        self.key = _signed(stream_key(draw.sampler.seed, len(draw.prefix) + behind, Stream.CHOICE))

    def occurring(self) -> tuple[Any, Any]:
        """Which ids stand before it, and how often."""
        ids, times = self.draw.sampler.occurring([*self.draw.prefix, *self.draw.drafted[: self.behind]])
        return ids.copy(), times.copy()


def _chosen(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """An id for each row, on the device."""
    logits = _adjusted(logits.float(), rows)
    highest, ids = logits.max(dim=-1, keepdim=True)
    drawn = [not row.sampling.greedy for row in rows]
    if any(drawn):
        ids = torch.where(_column(drawn, torch.bool, logits), _raced(logits - highest, rows), ids)
    return ids.masked_fill(~highest.isfinite(), -1).flatten()  # `where` with a number would wait for the device


def _raced(below: Tensor, rows: Sequence[Row]) -> Tensor:
    """The winner of the race of each row, (rows, 1), by logits below its highest."""
    temperatures = [max(row.sampling.temperature, LEAST_TEMPERATURE) for row in rows]
    weights = torch.exp(below / _column(temperatures, torch.float32, below))
    cut = [place for place, row in enumerate(rows) if row.sampling.truncates and not row.sampling.greedy]
    if cut:
        where = _uploaded(cut, torch.int64, below)
        weights = weights.index_copy(0, where, _truncated(weights[where], [rows[place] for place in cut]))
    noise = units(_uploaded([row.key for row in rows], torch.int64, below), _numbers(below))
    return (-torch.log1p(-noise) / weights).argmin(dim=-1, keepdim=True)


def _truncated(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """The same weights, 0 for ids that top-k, top-p and min-p leave out."""
    options = [row.sampling for row in rows]
    least = threshold(
        weights.sort(dim=-1, descending=True).values,
        weights.sum(dim=-1, keepdim=True, dtype=torch.float64),
        _column([o.top_k or UNLIMITED for o in options], torch.int64, weights),
        _column([o.top_p for o in options], torch.float64, weights),
        _column([o.min_p for o in options], torch.float32, weights),
        torch,
    )
    return weights.masked_fill(weights < least, 0.0)


def _adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The logits behind bias and penalties."""
    bias = [(place, *row.sampling.biases) for place, row in enumerate(rows) if row.sampling.logit_bias]
    seen = [(place, *row.occurring()) for place, row in enumerate(rows) if row.sampling.penalised]
    if bias or seen:
        logits = logits.clone()
    if bias:
        where, values = _entries(bias, logits)
        logits[where] += values
    if seen:
        where, times = _entries(seen, logits)
        options = [row.sampling for row in rows]
        repetition, presence, frequency = (
            _uploaded(each, torch.float32, logits)[where[0]]
            for each in (
                [o.repetition_penalty for o in options],
                [o.presence_penalty for o in options],
                [o.frequency_penalty for o in options],
            )
        )
        logits[where] = behind_penalties(logits[where], times, repetition, presence, frequency, torch)
    return logits


def _entries(parts: Sequence[tuple[int, Any, Any]], like: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Of parts (row, ids, values) the places (row, id) that the logits have, and the values there."""
    rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in parts])
    ids = np.concatenate([ids for _, ids, _ in parts])
    values = np.concatenate([values for _, _, values in parts])
    known = ids < like.shape[1]
    places = _uploaded(rows[known], torch.int64, like), _uploaded(ids[known], torch.int64, like)
    return places, _uploaded(values[known], torch.float32, like)


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device)


def _column(values: Sequence[Any], dtype: torch.dtype, like: Tensor) -> Tensor:
    return _uploaded(values, dtype, like)[:, None]


def _uploaded(values: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    """(n,) on the device of `like`; the host does not wait for what the device still does."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if like.device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(like.device, non_blocking=True)


def _signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, count: int) -> Tensor:
    """The bits of a uint64 held in int64, shifted right: the sign's copies are masked off."""
    return (z >> count) & ((1 << (64 - count)) - 1)
