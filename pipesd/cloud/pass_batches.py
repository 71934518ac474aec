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

from pipesd.cloud.device_sampling import choose_rows, rows_of
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
        if self._draws_on_device:
            choices = self._drawn_on_device(batch, complete(batch, draws))
        else:
            logits = self._run(batch, lambda rows: rows)
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

    def _drawn_on_device(self, batch: Batch, draws: Sequence[Draw]) -> list[Choices]:
        """What each draw makes of its rows of logits. Each piece of the pass is drawn from before the next is computed,
        so that the logits of one piece are all that the device holds; only those come to the host that have to."""
        here = [draw.sampler.sampling.tests or draw.sampler.sampling.logprobs is not None for draw in draws]
        there = complete(batch, [None if fetches else draw for fetches, draw in zip(here, draws, strict=True)])
        rows = [row for (_, _, wanted), draw in zip(batch, there, strict=True) if wanted for row in rows_of(draw)]
        to_host = [fetches for (_, _, wanted), fetches in zip(batch, here, strict=True) for _ in range(wanted)]
        fetched: list[np.ndarray] = []
        done = 0

        def draw_piece(logits: Tensor) -> Tensor:
            nonlocal done
            piece = slice(done, done + len(logits))
            done = piece.stop
            if places := [place for place, fetches in enumerate(to_host[piece]) if fetches]:
                fetched.append((logits if len(places) == len(logits) else logits[places]).cpu().numpy())
            return choose_rows(logits, rows[piece])

        ids = greedy_choices(batch, [part.tolist() for part in _fetched(self._run(batch, draw_piece))])
        if not fetched:
            return ids
        local = [entry for entry in range(len(batch)) if here[entry]]
        part = [batch[entry] for entry in local]
        logits = np.split(np.concatenate(fetched), np.cumsum([wanted for _, _, wanted in part])[:-1])
        drawn = drawn_choices(part, logits, [draws[entry] for entry in local])
        return list((dict(enumerate(ids)) | dict(zip(local, drawn, strict=True))).values())


def _fetched(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """The parts on the host, which waits for the device once."""
    full = [part for part in parts if len(part)]
    if not full:
        return [part.numpy() for part in parts]
    joined = (full[0] if len(full) == 1 else torch.cat(full)).cpu().numpy()
    return np.split(joined, np.cumsum([len(part) for part in parts])[:-1])


def ids_and_wanted(batch: Batch) -> tuple[list[int], list[int]]:
    """All ids of a pass in order, and the rows among them, by number, whose logits are wanted."""
    ids: list[int] = []
    wanted: list[int] = []
    for _, entry, rows in batch:
        ids += entry
        wanted += range(len(ids) - rows, len(ids))
    return ids, wanted


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
