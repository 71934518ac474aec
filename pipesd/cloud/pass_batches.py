"""What every target in torch makes of the logits of a pass: rows for the host, ids, samples. And torch's threads."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.device_sampling import choose_rows
from pipesd.core import ModelInfo, Vocabulary
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, complete, drawn_choices, greedy_choices


class BatchTarget(ABC):
    """A target whose passes give logits; a subclass runs them. `invariant`: a row's bits do not depend on its pass."""

    def __init__(self, info: ModelInfo, vocabulary: Vocabulary, slots: int, *, threads: int, exact: bool) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.slots = slots
        self.invariant = exact
        self._threads = threads
        self._draws_on_device = info.device != "cpu"
        self._longest_s = 0.0

    @abstractmethod
    def _logits(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Appends each entry's ids at its slot's end; the rows of `reduce(logits)` of its last `rows` positions."""

    @property
    def pass_ms(self) -> int:
        """Longest time that one call of `forward`, `greedy` or `sample` has taken so far, rounded up, at least 1."""
        return max(1, math.ceil(self._longest_s * 1000))

    def forward(self, batch: Batch) -> list[np.ndarray]:
        """Appends each entry's ids at its slot's end; float32 logits (rows, width) of its last `rows` positions."""
        return _fetched(self._run(batch, lambda logits: logits))

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        """The same pass; the arg-max ids of those rows, the lowest on a tie, -1 where the maximum is not finite."""
        return [tuple(part.tolist()) for part in _fetched(self._run(batch, arg_max))]

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        """The same pass; for each entry what its draw makes of its rows, or the arg-max ids where there is none. On a
        device of its own the ids are drawn there, unless draft tokens are tested or log-probabilities are wanted."""
        began = time.perf_counter()
        logits = self._run(batch, lambda rows: rows)
        if self._draws_on_device:
            choices = _drawn_on_device(batch, logits, complete(batch, draws))
        else:
            choices = drawn_choices(batch, [rows.numpy() for rows in logits], draws)
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        return choices

    def _run(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The rows of `reduce(logits)` for each entry of the batch."""
        began = time.perf_counter()
        with torch.inference_mode(), torch_threads(self._threads):
            results = self._logits(batch, reduce)
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        return results


def _drawn_on_device(batch: Batch, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Choices]:
    """What each draw makes of its rows of logits; only those come to the host that have to."""
    there = [
        entry
        for entry, draw in enumerate(draws)
        if batch[entry][2] and not draw.sampler.sampling.tests and draw.sampler.sampling.logprobs is None
    ]
    with torch.inference_mode():
        rows = torch.cat([logits[entry] for entry in there]) if there else torch.empty(0, 0)
        ids = choose_rows(rows, [draws[entry] for entry in there])
    here = [entry for entry in range(len(batch)) if entry not in there]
    part = [batch[entry] for entry in here]
    drawn = drawn_choices(part, _fetched([logits[entry] for entry in here]), [draws[entry] for entry in here])
    found = dict(zip(here, drawn, strict=True))
    found |= zip(there, greedy_choices([batch[entry] for entry in there], ids), strict=True)
    return [found[entry] for entry in range(len(batch))]


def _fetched(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """The parts on the host, which waits for the device once."""
    full = [part for part in parts if len(part)]
    if not full:
        return [part.numpy() for part in parts]
    joined = (full[0] if len(full) == 1 else torch.cat(full)).cpu().numpy()
    return np.split(joined, np.cumsum([len(part) for part in parts])[:-1])


def arg_max(logits: Tensor) -> Tensor:
    """The id of the highest logit of each row, the lowest on a tie, -1 where the highest is not finite."""
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    highest, ids = logits.max(dim=-1)
    return ids.masked_fill(~highest.isfinite(), -1)  # `where` would copy the number to the device, and wait


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Runs the body with so many torch threads; the number belongs to the process, so it is put back."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
