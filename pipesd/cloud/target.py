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

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud import huge_pages
from pipesd.cloud.checkpoint import Checkpoint, open_checkpoint
from pipesd.cloud.device_sampling import choose_rows
from pipesd.cloud.kv_cache import BUCKET, KVCache
from pipesd.cloud.model import Decoder, Linear, PackedLinear, PlainLinear, TiledLinear, packing_works
from pipesd.core import ModelInfo, Vocabulary
from pipesd.errors import UsageError
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, complete, drawn_choices, greedy_choices

MOST_ROWS = 256  # of one pass through the layers; longer ones are cut, which bounds memory
MOST_UNASKED_CONTEXT = 1 << 22  # positions; their rotations alone take a gigabyte or two
LEAST_ROWS = 4  # on the CPU fewer are filled up: kernels for one row are not those for several, and slower ones
_log = logging.getLogger("pipesd.cloud")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        with torch.inference_mode(), _torch_threads(self._threads):
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
def _torch_threads(threads: int) -> Iterator[None]:
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


def load_target(
    path: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    slots: int = 8,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    exact: bool = True,
    say: Callable[[str], None] = _log.warning,
) -> TorchTarget:
    """Loads the GGUF file at `path` as a target with `slots` sessions of up to `context` positions (None: the model's).

    `device`: auto (CUDA if there is any), cpu, cuda or cuda:N. `dtype`: auto (float32 on the CPU, the file's on CUDA),
    float32, bfloat16 or float16. `threads`: torch threads of a pass, None: 1. `progress(done_bytes, all_bytes)` is
    called per tensor. `exact`: row-invariant where that is promised (see above); without it single tokens and long
    drafts are somewhat faster. `say` takes warnings. UsageError for what cannot be served.
    """
    checkpoint = open_checkpoint(path)
    place = _device(device)
    precision = _dtype(dtype, checkpoint, place)
    threads = _checked("threads", 1 if threads is None else threads, 1, None)
    slots = _checked("slots", slots, 1, None)
    trained = checkpoint.shape.context
    if context is None and trained > MOST_UNASKED_CONTEXT:
        raise UsageError(
            f"{checkpoint.path}: was trained for {trained} positions, more than fits; ask for fewer with --context"
        )
    context = _checked("context", trained if context is None else context, 2, trained)
    checkpoint = replace(checkpoint, shape=replace(checkpoint.shape, context=context))
    exact = exact and place.type == "cpu" and threads == 1
    with torch.inference_mode(), _torch_threads(threads):
        decoder = _load(checkpoint, place, _DTYPES[precision], exact, progress, say)
        cache = KVCache(checkpoint.shape.cache(context), slots, device=place, dtype=_DTYPES[precision], exact=exact)
    info = ModelInfo(
        name=checkpoint.name,
        vocabulary_size=checkpoint.vocabulary.size,
        context=context,
        end_ids=checkpoint.end_ids,
        fingerprint=checkpoint.fingerprint(precision, place.type),
        device=str(place),
        dtype=precision,
    )
    target = TorchTarget(decoder, cache, info, checkpoint.vocabulary, threads=threads, exact=exact)
    if exact and not rows_agree(decoder, threads):
        target.invariant = False
        say(
            f"WARNING: on this CPU the bits of a row depend on the pass that it shares (torch {torch.__version__}); "
            "the output may leave the target's own at near ties"
        )
    return target


def rows_agree(decoder: Decoder, threads: int = 1) -> bool:
    """Whether the same rows get the same bits in passes of several shapes, alone and with mates: one layer, the head.

    The positions cross from one bucket of keys into the next.
    """
    shape = replace(decoder.shape.cache(min(decoder.shape.context, BUCKET + 6)), layers=1)
    table = decoder.embedding
    cache = KVCache(shape, 3, device=table.device, dtype=table.dtype, exact=True)
    info = ModelInfo("", decoder.shape.width, shape.context, (), b"", "cpu", "")
    target = TorchTarget(decoder.shallow(), cache, info, Vocabulary(()), threads=threads, exact=True)
    draw = np.random.default_rng(0)
    ids = draw.integers(decoder.shape.width, size=shape.context).tolist()
    late = max(0, shape.context - 12)
    target.forward([(0, ids[:late], 0), (1, ids[:late][:1], 0)])
    target.forward([(1, ids[:late][1:3], 0)])
    target.forward([(2, ids[:7], 0), (1, ids[:late][3:], 0)])
    target.truncate(2, 0)
    whole = target.forward([(0, ids[late:], len(ids) - late)])[0]
    parts = []
    for start, end in pairwise([late, late + 1, late + 3, late + 7, len(ids)]):
        part = ids[start:end]
        mates = [(2, ids[:2], 0)] if len(part) == 2 else []
        parts.append(target.forward([*mates, (1, part, len(part))])[-1])
    return bool(np.array_equal(whole, np.concatenate(parts)))


def _load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
    progress: Callable[[int, int], None] | None,
    say: Callable[[str], None],
) -> Decoder:
    done = 0

    def weight(name: str) -> Tensor:
        nonlocal done
        values = checkpoint.weight(name)
        assert values is not None, f"open_checkpoint let a file without {name} pass"
        done += checkpoint.tensor_bytes(name)
        if progress is not None:
            progress(done, checkpoint.size_bytes)
        return values

    shape = checkpoint.shape
    linear: Callable[[Tensor], Linear] = PlainLinear
    if device.type == "cpu":
        if packing_works((shape.hidden, shape.feed_forward, shape.heads * shape.head_size), dtype):
            linear = PackedLinear
        else:
            linear = TiledLinear if exact else PlainLinear
            say(
                f"oneDNN's packed linear layers do not work here (torch {torch.__version__}, "
                f"{str(dtype).removeprefix('torch.')}); passes are slower, not less exact"
            )
    divisors = checkpoint.weight("rope_freqs.weight")
    decoder = Decoder(shape, weight, linear, device=device, dtype=dtype, rope_divisors=divisors)
    if device.type == "cpu":
        huge_pages.gather(matrix.memory for matrix in decoder.matrices())
    return decoder


def _device(text: str) -> torch.device:
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"device {text!r}: auto, cpu, cuda or cuda:N was wanted") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {text!r}: auto, cpu, cuda or cuda:N was wanted")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {text!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def _dtype(text: str, checkpoint: Checkpoint, device: torch.device) -> str:
    if text == "auto":
        return "float32" if device.type == "cpu" else checkpoint.file_dtype
    if text not in _DTYPES:
        raise UsageError(f"dtype {text!r}: auto, {', '.join(_DTYPES)} was wanted")
    if text == "float16" and device.type == "cpu":
        raise UsageError("dtype float16 is for CUDA; use float32 or bfloat16 on the CPU")
    return text


def _checked(name: str, value: int, least: int, most: int | None) -> int:
    if value < least or (most is not None and value > most):
        raise UsageError(f"{name} {value}: {least} to {most or 'any number'} was wanted")
    return value
