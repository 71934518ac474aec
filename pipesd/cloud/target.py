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

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pipesd.cloud.kv_cache import KVCache
from pipesd.cloud.model import Decoder
from pipesd.cloud.pass_batches import BatchTarget
from pipesd.core import ModelInfo, Vocabulary
from pipesd.policy.batch_choices import Batch

MOST_ROWS = 256  # of one pass through the layers; longer ones are cut, which bounds memory
LEAST_ROWS = 4  # on the CPU fewer are filled up: kernels for one row are not those for several, and slower ones


class TorchTarget(BatchTarget):
    """A decoder with its cache. Not thread-safe: one worker drives it."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, info: ModelInfo, vocabulary: Vocabulary, *, threads: int, exact: bool
    ) -> None:
        super().__init__(info, vocabulary, cache.slots, threads=threads, exact=exact)
        self._decoder = decoder
        self._cache = cache
        self._least_rows = LEAST_ROWS if info.device == "cpu" else 1

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

    def _logits(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in batch]
        nothing = reduce(torch.empty(0, self._decoder.shape.width))
        for part in _cut(batch):
            rows = self._pass([(slot, ids, rows) for _, slot, ids, rows in part])
            if rows is None:
                continue
            reduced = reduce(rows)
            for (entry, _, _, _), piece in zip(part, reduced.split([rows for _, _, _, rows in part]), strict=True):
                found[entry].append(piece)
        return [torch.cat(pieces) if pieces else nothing for pieces in found]

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
