"""The target model behind the cloud's worker: ragged passes over several sessions, and what is said of the model.

**What is promised.** On the CPU with one thread a row of logits has the same bits whatever shares its pass: any number
of rows, any sessions, a prefill in any pieces, in float32 and in bfloat16 (`TorchTarget.invariant`). That holds because
every kernel is given a fixed shape or treats rows alike; a check when loading compares passes of several shapes and
warns where it does not hold. On CUDA, with several threads or with `exact=False` nothing is promised beyond the usual
rounding.

Threads: a pass runs with `threads` torch threads (1) and leaves torch's own setting as it found it. One thread is the
default because one is exact, and because the weights' way through memory, not arithmetic, limits passes of few rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.device_sampling import choose_rows
from pipesd.cloud.kv_cache import KVCache
from pipesd.cloud.model import Decoder
from pipesd.core import ModelInfo, Vocabulary
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, complete, drawn_choices, greedy_choices

MOST_ROWS = 256  # of one pass through the layers; longer ones are cut, which bounds memory
LEAST_ROWS = 4  # on the CPU fewer are filled up: kernels for one row are not those for several, and slower ones


class TorchTarget:
    """A decoder with its cache. Not thread-safe: one worker drives it."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, info: ModelInfo, vocabulary: Vocabulary, *, threads: int, exact: bool
    ) -> None:
        self.info = info
        self.vocabulary = vocabulary
        self.slots = cache.slots
        self.invariant = exact
        self._decoder = decoder
        self._cache = cache
        self._threads = threads
        self._least_rows = LEAST_ROWS if info.device == "cpu" else 1
        self._draws_on_device = info.device != "cpu"
        self._longest_s = 0.0

    @property
    def pass_ms(self) -> int:
        """Longest time that one call of `forward`, `greedy` or `sample` has taken so far, rounded up, at least 1."""
        return max(1, math.ceil(self._longest_s * 1000))

    @property
    def memory_bytes(self) -> int:
        """Bytes that the sessions' keys and values hold."""
        return self._cache.memory_bytes

    def length(self, slot: int) -> int:
        """Positions that `slot` holds."""
        return self._cache.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Rolls `slot` back to `length` positions; 0 forgets the session and frees its memory."""
        self._cache.truncate(slot, length)

    def forward(self, batch: Batch) -> list[np.ndarray]:
        """Appends each entry's ids at its slot's end; float32 logits (rows, width) of its last `rows` positions."""
        return [part.cpu().numpy() for part in self._run(batch, lambda logits: logits)]

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        """The same pass; the arg-max ids of those rows, the lowest on a tie, -1 where the maximum is not finite."""
        return [tuple(part.tolist()) for part in self._run(batch, _arg_max)]

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
        found: list[list[Tensor]] = [[] for _ in batch]
        with torch.inference_mode(), torch_threads(self._threads):
            nothing = reduce(torch.empty(0, self._decoder.shape.width))
            for part in _cut(batch):
                rows = self._pass([(slot, ids, rows) for _, slot, ids, rows in part])
                if rows is None:
                    continue
                reduced = reduce(rows)
                for (entry, _, _, _), piece in zip(part, reduced.split([rows for _, _, _, rows in part]), strict=True):
                    found[entry].append(piece)
            results = [torch.cat(pieces) if pieces else nothing for pieces in found]
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        return results

    def _pass(self, batch: Batch) -> Tensor | None:
        """One pass through the layers: logits of all wanted rows of the batch, in order; None if none is wanted."""
        ids = [i for _, entry, _ in batch for i in entry]
        wanted: list[int] = []
        end = 0
        for _, entry, rows in batch:
            end += len(entry)
            wanted += range(end - rows, end)
        attention = self._cache.extend([(slot, len(entry)) for slot, entry, _ in batch], self._least_rows)
        ids += ids[:1] * (self._least_rows - len(ids))
        copies = wanted[:1] * (self._least_rows - len(wanted))
        device = attention.positions.device
        where = torch.tensor(wanted + copies, device=device) if wanted else None
        logits = self._decoder(torch.tensor(ids, device=device), attention, where)
        return None if logits is None else logits[: len(wanted)]


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
    drawn = drawn_choices(part, [logits[entry].cpu().numpy() for entry in here], [draws[entry] for entry in here])
    found = dict(zip(here, drawn, strict=True))
    found |= zip(there, greedy_choices([batch[entry] for entry in there], ids), strict=True)
    return [found[entry] for entry in range(len(batch))]


def _arg_max(logits: Tensor) -> Tensor:
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64)
    highest, ids = logits.max(dim=-1)
    return torch.where(highest.isfinite(), ids, -1)


def _cut(batch: Batch) -> Iterator[list[tuple[int, int, Sequence[int], int]]]:
    """The batch as parts of at most MOST_ROWS ids: (entry, slot, ids, rows) in order, without empty entries."""
    part: list[tuple[int, int, Sequence[int], int]] = []
    room = MOST_ROWS
    for entry, (slot, ids, rows) in enumerate(batch):
        assert 0 <= rows <= len(ids), f"{rows} rows of {len(ids)} ids"
        start = 0
        while start < len(ids):
            piece = ids[start : start + room]
            start += len(piece)
            room -= len(piece)
            behind = len(ids) - start  # ids of this entry that later parts take
            part.append((entry, slot, piece, min(len(piece), max(0, rows - behind))))
            if room == 0:
                yield part
                part, room = [], MOST_ROWS
    if part:
        yield part


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
