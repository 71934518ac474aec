"""Passes of a few sizes, recorded once and replayed: the form of CUDA, where starting kernels costs more than they do.

A pass is filled up to the next of `SIZES` rows. Everything that changes from pass to pass (ids, positions, places in
the cache, page table, tiles, wanted rows) is one vector of integers that goes to the device in one copy; the logits and
their arg-max come out at one address. So a CUDA graph of each size can be replayed with other numbers. Longer passes
run as they are. Where nothing is recorded, as on the CPU, a replay is a call of the same function.

With `exact` there is one size only, for short and long passes: every matrix product then has one shape and one kernel,
and a row the same bits in any pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.model import Decoder
from pipesd.cloud.paged_cache import PagedCache
from pipesd.cloud.pass_batches import arg_max, ids_and_wanted
from pipesd.policy.batch_choices import Batch

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows
EXACT_SIZE = SIZES[-1]

Run = Callable[[], tuple[Tensor, Tensor]]  # gives logits and ids, always at the same addresses where it is a replay


class RecordedPasses:
    """Runs passes of a decoder over a cache in pages; by `record` a pass becomes one that does the same from then on
    with the numbers that its buffer has by then (None: CUDA graphs on a CUDA device, else the pass itself)."""

    def __init__(
        self, decoder: Decoder, cache: PagedCache, *, exact: bool = False, record: Callable[[Run], Run] | None = None
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._device = cache.pool.device
        self._record = record or (cuda_graphs() if self._device.type == "cuda" else lambda run: run)
        self._sizes = (EXACT_SIZE,) if exact else SIZES
        self._recorded: dict[int, tuple[Tensor, Run]] = {}

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records all sizes, which takes a second or two; `progress(done, all)` is told of each."""
        with self._on_device():
            for done, size in enumerate(reversed(self._sizes), 1):  # smaller ones fit into the memory of larger ones
                self._pass_of(size)
                if progress is not None:
                    progress(done, len(self._sizes))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Appends each entry's ids; float32 logits (rows, width) of all wanted rows in order and their arg-max ids, -1
        where they are not finite. None if none is wanted."""
        ids, wanted = ids_and_wanted(batch)
        end = len(ids)
        size = next((size for size in self._sizes if size >= end), end)
        numbers = np.zeros(2 * size, np.int64)
        numbers[:end] = ids
        numbers[size : size + len(wanted)] = wanted
        plan = self._cache.plan([(slot, len(entry)) for slot, entry, _ in batch], size)
        with self._on_device():
            if size in self._sizes:
                buffer, run = self._pass_of(size)
                _upload(np.concatenate([numbers, plan]), buffer)
                logits, best = run()
                return (logits[: len(wanted)].clone(), best[: len(wanted)].clone()) if wanted else None
            buffer = torch.empty(len(numbers) + len(plan), dtype=torch.int64, device=self._device)
            _upload(np.concatenate([numbers, plan]), buffer)
            found = self._run(buffer, size, len(wanted))
            return None if found is None else (found, arg_max(found))

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _pass_of(self, size: int) -> tuple[Tensor, Run]:
        """The buffer of the passes of this size, and what runs one."""
        if size not in self._recorded:
            plan = self._cache.plan([], size)  # of rows that keep nothing
            buffer = torch.zeros(2 * size + len(plan), dtype=torch.int64, device=self._device)
            _upload(plan, buffer[2 * size :])

            def run() -> tuple[Tensor, Tensor]:
                logits = self._run(buffer, size, size)
                assert logits is not None
                return logits, arg_max(logits)

            self._recorded[size] = buffer, self._record(run)
        return self._recorded[size]

    def _run(self, buffer: Tensor, size: int, wanted: int) -> Tensor | None:
        """The pass that the numbers in `buffer` describe."""
        attention = self._cache.attention(buffer[2 * size :], size)
        attention.begin()
        return self._decoder(buffer[:size], attention, buffer[size : size + wanted] if wanted else None)


def cuda_graphs() -> Callable[[Run], Run]:
    """Makes CUDA graphs that share their memory: the results of one hold until another is made or replayed."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run) -> Run:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries take their memory before anything is recorded
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = run()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return results

        return replay

    return record


def _upload(numbers: np.ndarray, buffer: Tensor) -> None:
    """Copies to the device without waiting for it; torch keeps the pinned memory until the copy is done."""
    source = torch.from_numpy(numbers)
    if buffer.device.type == "cuda":
        source = source.pin_memory()
    buffer.copy_(source, non_blocking=True)
