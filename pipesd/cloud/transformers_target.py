"""A target served through transformers: any causal decoder in a Hugging Face folder, slower than the plain decoder.

**What is promised** is the same as of the plain decoder: on the CPU with one thread a row of logits has the same bits
whatever shares its pass. transformers' kernels give a row other bits in a pass of another shape, so here every pass has
one shape: a tile of TILE positions that starts at a multiple of TILE, behind a cache that ends where the tile begins.
Places behind the known ids are filled with an id; a causal decoder lets nothing behind a row reach it. A tile that is
known in part is run again from its start when more of it is known. So the shapes of a row's kernels depend on its
position alone. A decoder whose rows touch each other in another way, as those of a mixture of experts may, is found out
when loading.

Without that promise (`exact=False`, several threads, CUDA unasked) a session's ids go through in one pass.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.hf_folder import Folder, open_folder
from pipesd.cloud.memory import check_all_fit, check_fits, remedy
from pipesd.cloud.pass_batches import BatchTarget, torch_threads
from pipesd.cloud.placing import DTYPES, checked_number, chosen_device, chosen_dtype
from pipesd.cloud.transformers_model import (
    CachedModel,
    TransformersModel,
    cached_numbers,
    import_transformers,
    load_model,
    positions_of,
    read_config,
)
from pipesd.core import ModelInfo, Vocabulary
from pipesd.errors import UsageError
from pipesd.free_memory import Free, all_on_host, free_on_host
from pipesd.policy.batch_choices import Batch
from pipesd.regular_file import shown

TILE = 8  # positions
MOST_ROWS = 256  # of one pass where the shape is free; longer ones are cut, which bounds memory
NEAR = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit: rounding, not another text
_log = logging.getLogger("pipesd.cloud")


class TransformersTarget(BatchTarget):
    """A decoder of transformers with a cache for each session. Not thread-safe: one worker drives it.

    `positions`: those that the model can tell apart; the last tile ends there. `make_session` gives an empty cache.
    """

    def __init__(
        self,
        make_session: Callable[[], CachedModel],
        info: ModelInfo,
        vocabulary: Vocabulary,
        *,
        slots: int,
        positions: int,
        threads: int,
        exact: bool,
    ) -> None:
        super().__init__(info, vocabulary, slots, threads=threads, exact=exact)
        self._positions = positions
        self._tiled = exact
        self._ids: list[list[int]] = [[] for _ in range(slots)]
        self._sessions = [make_session() for _ in range(slots)]

    @property
    def memory_bytes(self) -> int:
        """Bytes that the sessions' keys and values hold."""
        return sum(session.memory_bytes for session in self._sessions)

    def length(self, slot: int) -> int:
        """Positions that `slot` holds."""
        return len(self._ids[slot])

    def truncate(self, slot: int, length: int) -> None:
        """Rolls `slot` back to `length` positions; 0 forgets the session and frees its memory."""
        assert 0 <= length <= len(self._ids[slot]), f"{length} of {len(self._ids[slot])} positions"
        del self._ids[slot][length:]
        self._sessions[slot].cut(length - length % TILE if self._tiled and length < self._positions else length)

    def _logits(self, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = []
        for slot, ids, rows in batch:
            assert 0 <= rows <= len(ids), f"{rows} rows of {len(ids)} ids"
            end = len(self._ids[slot]) + len(ids)
            assert end <= self.info.context, f"{end} positions in a context of {self.info.context}"
            parts = self._tiles(slot, ids, rows) if self._tiled else self._pieces(slot, ids, rows)
            found.append(reduce(torch.cat(parts) if parts else torch.empty(0, self.vocabulary.size)))
        return found

    def _tiles(self, slot: int, ids: Sequence[int], rows: int) -> list[Tensor]:
        """Runs the tiles that the ids reach; the last one only if a row of it is wanted or it is known to its end."""
        known, session = self._ids[slot], self._sessions[slot]
        known += ids
        end, parts = len(known), []
        for start in range(session.length, end, TILE):
            size = min(TILE, self._positions - start)
            there = known[start : start + size]
            wanted = min(len(there), start + len(there) - (end - rows))
            if wanted <= 0 and len(there) < size:
                break
            logits = session(there + there[-1:] * (size - len(there)), size if wanted > 0 else 1)
            if wanted > 0:
                parts.append(logits[len(there) - wanted : len(there)])
            if len(there) < size:
                session.cut(start)
        return parts

    def _pieces(self, slot: int, ids: Sequence[int], rows: int) -> list[Tensor]:
        parts = []
        for start in range(0, len(ids), MOST_ROWS):
            piece = ids[start : start + MOST_ROWS]
            wanted = min(len(piece), start + len(piece) - (len(ids) - rows))
            logits = self._sessions[slot](piece, max(1, wanted))
            if wanted > 0:
                parts.append(logits)
        self._ids[slot] += ids
        return parts


def load_transformers_target(
    path: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    slots: int = 8,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    exact: bool | None = None,
    copies: int = 1,
    say: Callable[[str], None] = _log.warning,
) -> TransformersTarget:
    """Loads the Hugging Face folder at `path` as a target with `slots` sessions of up to `context` positions (None: as
    many as the model was trained for).

    `device`, `dtype`, `threads`: as for the plain decoder. `progress(done_bytes, all_bytes)` is called before and after
    loading. `exact`: row-invariant; None: on the CPU with one thread. `copies`: workers of this machine that
    load the same, each for itself. `say` takes warnings.
    UsageError for what cannot be served: no causal decoder, one whose state cannot be rolled back, weights that are
    missing or not safetensors, a folder whose code would have to run.
    """
    if os.path.isfile(os.path.expanduser(path)):
        raise UsageError(f"{path}: a file, --backend transformers reads Hugging Face folders; serve it with plain")
    import_transformers()
    folder = open_folder(path)
    layers = folder.config.get("num_hidden_layers")
    if isinstance(layers, (int, float)) and layers > len(folder.tensors):  # transformers would make a list of them
        raise UsageError(
            f"{folder.path}: has {len(folder.tensors)} tensors, too few for {shown(layers)} layers; download it again"
        )
    config = read_config(folder.path)
    place = chosen_device(device)
    precision = chosen_dtype(dtype, folder.file_dtype, place, say)
    threads = checked_number("threads", 1 if threads is None else threads, 1, None)
    slots = checked_number("slots", slots, 1, None)
    positions = positions_of(config)
    if context is None and positions is None:
        raise UsageError(f"{folder.path}: says nothing of its longest text; give a length with --context")
    context = checked_number("context", context or positions or 0, 2, positions)
    if progress is not None:
        progress(0, folder.size_bytes)
    exact = exact is not False and threads == 1 if place.type == "cpu" else exact is True
    _check_memory(folder, place, DTYPES[precision], slots * context * cached_numbers(config), copies)
    model = load_model(folder.path, config, place, DTYPES[precision], exact=exact)
    if progress is not None:
        progress(folder.size_bytes, folder.size_bytes)
    info = ModelInfo(
        name=folder.name,
        vocabulary_size=folder.vocabulary.size,
        context=context,
        end_ids=folder.end_ids,
        fingerprint=folder.fingerprint(f"{precision} transformers", place.type),
        device=str(place),
        dtype=precision,
    )
    target = TransformersTarget(
        lambda: CachedModel(model),
        info,
        folder.vocabulary,
        slots=slots,
        positions=positions or context,
        threads=threads,
        exact=exact,
    )
    with torch_threads(threads):
        check_rollback(target, model, say)
    return target


def _check_memory(folder: Folder, device: torch.device, dtype: torch.dtype, cached: int, copies: int) -> None:
    """UsageError if the weights, and the largest as it is stored, do not fit. `cached`: numbers in all caches."""
    largest = max(tensor.n_bytes for tensor in folder.tensors.values())
    weights = sum(math.prod(tensor.shape) for tensor in folder.tensors.values()) * dtype.itemsize
    half = weights // 2 + largest if dtype == torch.float32 else None
    name, cache, on_host = str(folder.path), cached * dtype.itemsize, free_on_host()
    advice = remedy(half, on_host, copies)
    check_fits(name, weights + largest, cache, on_host, advice)
    there = all_on_host()
    if device.type != "cpu":
        free, whole = (Free(count, str(device)) for count in torch.cuda.mem_get_info(device))
        check_fits(name, weights, cache, [free], advice)
        there = [whole]
    check_all_fit(name, weights, cache, copies, there, advice)


def check_rollback(target: TransformersTarget, model: TransformersModel, say: Callable[[str], None]) -> None:
    """Runs a few ids through a target that was just loaded, in passes of several sizes and after taking others back.

    UsageError where that gives other logits than the model without a cache: it cannot be served. Where only bits differ
    the target is told that it is not row-invariant, with a warning.
    """
    ids = np.random.default_rng(0).integers(target.vocabulary.size, size=min(target.info.context, 2 * TILE + 3))
    with model.on_trial():
        wanted = model.without_cache(ids.tolist())
        once, again = _at_once(target, ids.tolist()), _after_rollbacks(target, ids.tolist())
    if wanted.shape[1] != target.vocabulary.size:
        raise UsageError(
            f"{model.path}: has {wanted.shape[1]} logits and a vocabulary of {target.vocabulary.size}; "
            "copy or download the folder again"
        )
    near = NEAR[target.info.dtype] * max(1.0, float(np.abs(wanted).max()))
    if not all(np.abs(wanted - found).max() <= near for found in (once, again)):
        raise UsageError(
            f"{model.path}: {model.name} gives other logits after a draft was taken back from its cache; "
            "use another model"
        )
    if target.invariant and not np.array_equal(once, again):
        target.invariant = False
        say(
            f"WARNING: {model.path}: in {model.name} the bits of a row depend on the ids beside it; "
            "the output may leave the target's own at near ties"
        )


def _at_once(target: TransformersTarget, ids: Sequence[int]) -> np.ndarray:
    rows = target.forward([(0, ids, len(ids))])[0]
    target.truncate(0, 0)
    return rows


def _after_rollbacks(target: TransformersTarget, ids: Sequence[int]) -> np.ndarray:
    """The same rows from passes of several sizes, before each of which other ids were taken back."""
    rows, at = [], 0
    for size in (3, 1, TILE + 2, len(ids)):
        piece = ids[at : at + size]
        if not piece:
            break
        wrong = [(i + 1) % target.vocabulary.size for i in ids[at:]]
        target.forward([(0, wrong, len(wrong))])
        target.truncate(0, at)
        rows.append(target.forward([(0, piece, len(piece))])[0])
        at += len(piece)
    target.truncate(0, 0)
    return np.concatenate(rows)
