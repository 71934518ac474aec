"""The target model behind the cloud's worker: ragged passes over several sessions, and what is said of the model.

**What is promised.** On the CPU with one thread a row of logits has the same bits whatever shares its pass: any number
of rows, any sessions, a prefill in any pieces, in float32 and in bfloat16 (`TorchTarget.invariant`). That holds because
every kernel is given a fixed shape or treats rows alike; a check when loading compares passes of several shapes and
warns where it does not hold. With several threads or with `exact=False` nothing is promised beyond the usual rounding.

On CUDA the same is had at a price, by passes that all have one number of rows; unasked nothing is promised there. The
cache is in pages and the passes are recorded (`paged_cache`, `graphs`) where triton's kernels run.

Threads: a pass runs with `threads` torch threads (1) and leaves torch's own setting as it found it. One thread is the
default because one is exact, and because the weights' way through memory, not arithmetic, limits passes of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pipesd.cloud.device_sampling import ROWS
from pipesd.cloud.graphs import EXACT_SIZE, SIZES, RecordedPasses
from pipesd.cloud.kv_cache import KVCache
from pipesd.cloud.model import Decoder
from pipesd.cloud.paged_attention import splits
from pipesd.cloud.paged_cache import PagedCache, session_bytes, sessions_that_fit
from pipesd.cloud.pass_batches import BatchTarget, arg_max, ids_and_wanted
from pipesd.cloud.placing import why_no_kernels
from pipesd.core import ModelInfo, Vocabulary
from pipesd.model_shape import CacheShape, ModelShape
from pipesd.policy.batch_choices import Batch

MOST_ROWS = 256  # of one pass through the layers; longer ones are cut, which bounds memory
LEAST_ROWS = 4  # on the CPU fewer are filled up: kernels for one row are not those for several, and slower ones
LIBRARY_BYTES = 768 << 20  # of a device: cuBLAS on each stream that records, graphs, kernels, gaps between tensors
DRAWN_BYTES = 56  # for each logit of a row that is drawn: probabilities, the sorted ones with their sums, noise


class TorchTarget(BatchTarget):
    """A decoder with its cache. Not thread-safe: one worker drives it."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache | PagedCache,
        info: ModelInfo,
        vocabulary: Vocabulary,
        *,
        threads: int,
        exact: bool,
    ) -> None:
        super().__init__(info, vocabulary, cache.slots, threads=threads, exact=exact)
        self._decoder = decoder
        self._cache = cache
        on_cpu = info.device == "cpu"
        self._least_rows = LEAST_ROWS if on_cpu else EXACT_SIZE if exact else 1
        self._most_rows = EXACT_SIZE if exact and not on_cpu else MOST_ROWS
        self._recorded = RecordedPasses(decoder, cache, exact=exact) if isinstance(cache, PagedCache) else None

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

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records the passes that are replayed later, if this target has any; `progress(done, all)` is told of each."""
        if self._recorded is not None:
            with torch.inference_mode():
                self._recorded.prepare(progress)

    def _logits(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in batch]
        nothing = reduce(torch.empty(0, self._decoder.shape.width))
        for part in _cut(batch, self._most_rows):
            reduced = self._reduced([(slot, ids, rows) for _, slot, ids, rows in part], reduce)
            if reduced is None:
                continue
            for (entry, _, _, _), piece in zip(part, reduced.split([rows for _, _, _, rows in part]), strict=True):
                found[entry].append(piece)
        return [torch.cat(pieces) if pieces else nothing for pieces in found]

    def _reduced(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
        """`reduce(logits)` of one pass through the layers, which outlives the logits; None if no row is wanted."""
        if self._recorded is None:
            logits = self._pass(batch)
            return None if logits is None else reduce(logits)
        results = self._recorded(batch)
        if results is None:
            return None
        return results[1] if reduce is arg_max else reduce(results[0])

    def _pass(self, batch: Batch) -> Tensor | None:
        """One pass through the layers: logits of all wanted rows of the batch, in order; None if none is wanted."""
        assert isinstance(self._cache, KVCache)
        ids, wanted = ids_and_wanted(batch)
        attention = self._cache.extend([(slot, len(entry)) for slot, entry, _ in batch], self._least_rows)
        ids += ids[:1] * (self._least_rows - len(ids))
        copies = wanted[:1] * (self._least_rows - len(wanted))
        device = attention.positions.device
        where = torch.tensor(wanted + copies, device=device) if wanted else None
        logits = self._decoder(torch.tensor(ids, device=device), attention, where)
        return None if logits is None else logits[: len(wanted)]


def new_cache(
    shape: CacheShape,
    slots: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
    room: int | None,
    say: Callable[[str], None],
) -> KVCache | PagedCache:
    """The cache that suits the device: in pages on CUDA where the kernels run. There it has as many slots as surely fit
    into `room` bytes (None: any number), which `say` is told if they are fewer. UsageError where no session fits."""
    if device.type == "cpu":
        return KVCache(shape, slots, device=device, dtype=dtype, exact=exact)
    in_pages = why_no_kernels(device, dtype, shape) is None
    if room is not None and not in_pages:
        room -= growing_bytes(shape, dtype)
    sure = slots if room is None else sessions_that_fit(shape, dtype, room)
    if sure < slots:
        say(
            f"{device} has room for {sure} sessions of {shape.context} positions, not {slots}: no more are held at "
            "once; ask for a shorter --context to have more"
        )
    slots = min(slots, sure)
    if not in_pages:
        return KVCache(shape, slots, device=device, dtype=dtype, exact=exact)
    from pipesd.cloud.paged_kernels import triton_read

    return PagedCache(shape, slots, device=device, dtype=dtype, read=triton_read)


def growing_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """What sessions take beside their keys and values where these are not in pages: one that grows is there twice."""
    return session_bytes(shape, 2, dtype) - session_bytes(shape, 1, dtype)


def working_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """The most that passes on a CUDA device take beside weights and cache, libraries included."""
    recorded = sum(SIZES)  # rows whose results stay; a stream that records keeps what it had for its first try
    rows = MOST_ROWS + SIZES[-1] + recorded
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    values = 4 * (2 * shape.hidden + query + 2 * key + 3 * shape.feed_forward)  # some are float32 in any precision
    partial = 4 * shape.heads * splits(shape.cache(shape.context)) * (shape.head_size + 2)
    logits = (MOST_ROWS + 2 * recorded) * (4 + dtype.itemsize) + MOST_ROWS * 4 + ROWS * DRAWN_BYTES  # 4: for the host
    return rows * (values + partial) + logits * shape.width + LIBRARY_BYTES


def _cut(batch: Batch, most_rows: int) -> Iterator[list[tuple[int, int, Sequence[int], int]]]:
    """The batch as parts of at most so many ids: (entry, slot, ids, rows) in order, without empty entries."""
    part: list[tuple[int, int, Sequence[int], int]] = []
    room = most_rows
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
                part, room = [], most_rows
    if part:
        yield part
