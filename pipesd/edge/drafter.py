"""The draft model: what comes next after the committed ids and the live draft, with its probability.

Kept are the ids that the drafter was told or drew, and how many of them llama.cpp's cache holds. The cache is always
the beginning of the ids: a rollback cuts both, what is behind it is fed with the next `draft` or `prefill`. So after a
full acceptance the last guess is fed together with the target's own id, and after a rejection nothing of the dead
branch stays. Models that cannot drop the end of their cache (recurrent ones) are found out when loading; their cache
is emptied and fed again, which is right but slow.

llama.cpp computes a piece of several ids with other kernels than a single id, so logits depend in their last bits on
how a text was cut into pieces. That may change a guess at a near tie, never what the target commits.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipesd.core import Drawn
from pipesd.cpu import usable_cpus
from pipesd.edge.gguf_header import read_header
from pipesd.edge.llama import log, native
from pipesd.edge.tokeniser import Tokeniser, Weights
from pipesd.errors import DrafterFailed, PipeSDError, UsageError
from pipesd.policy.sampler import Chooser

__all__ = ["DraftContextFull", "Drafter", "DrafterFailed", "Tokeniser", "estimate_bytes"]

MOST_DEFAULT_CONTEXT = 8192  # positions
MOST_DEFAULT_THREADS = 8  # a small model's step is bound by memory long before that
PIECE = 64  # most ids fed in one call of llama.cpp: bounds the wait for an interruption, and memory
_ALL = -1
_LEAST_LOGIT = np.float32(-200.0)  # under the highest: exp gives 0, and unlike -inf it may be multiplied by 0
_TRIED = 4  # positions that it takes to try whether the end of a cache can be dropped


def default_threads() -> int:
    """All processors that this process may use but one: llama.cpp's threads wait for each other at every step, so one
    that anything else keeps from running stops them all."""
    return min(max(1, usable_cpus() - 1), MOST_DEFAULT_THREADS)


class DraftContextFull(PipeSDError):
    """The draft model's context is used up: go on without drafts, or roll back."""


def estimate_bytes(path: str | os.PathLike[str], context: int = 0) -> int:
    """Memory that a `Drafter` with this `context` (0: its default) will take, in bytes, from the file's header alone.

    Weights, keys and values of the context, and one piece's logits: nothing grows with context × vocabulary. Raises
    `UsageError` for a file that is no model.
    """
    header = read_header(path)
    working = PIECE * header.vocabulary_size * ctypes.sizeof(ctypes.c_float)
    return header.file_bytes + header.cache_bytes(_context_for(context, header.context)) + working


def _context_for(asked: int, trained: int) -> int:
    """Positions to make room for; 0 stands for "not asked" and "does not say"."""
    wanted = asked or MOST_DEFAULT_CONTEXT
    return min(wanted, trained) if trained > 0 else wanted


class Drafter:
    """A draft model and the ids it knows. One call at a time: calls from several threads queue."""

    def __init__(
        self, path: str | os.PathLike[str], *, context: int = 0, threads: int = 0, gpu_layers: int = 0
    ) -> None:
        """Loads the GGUF file at `path`; raises `UsageError` if it cannot serve as a draft model.

        `context`: positions to make room for, at most the model's own (0: the model's own, at most 8192). `threads`: 0
        for `default_threads()`. `gpu_layers`: how many layers go to a GPU.
        """
        assert min(context, threads, gpu_layers) >= 0, f"context {context}, threads {threads}, GPU layers {gpu_layers}"
        self._weights = weights = Weights(path, vocab_only=False, gpu_layers=gpu_layers)
        self.tokeniser = Tokeniser(weights)
        self.name, self.vocabulary = self.tokeniser.name, self.tokeniser.vocabulary
        self.end_ids = self.tokeniser.end_ids
        self.threads = threads or default_threads()
        self._llama = llama = native()
        wanted = _context_for(context, llama.llama_model_n_ctx_train(weights.handle))
        log.forget()
        room = max(wanted, _TRIED)  # llama.cpp takes no more ids at once than its context has room for, else it aborts
        self._context: Any = llama.llama_init_from_model(weights.handle, self._parameters(room))
        if not self._context:
            weights.close()
            raise UsageError(
                f"{weights.path}: no context of {wanted} positions ({log.complaint()}); ask for a smaller one"
            )
        self.context = min(wanted, llama.llama_n_ctx(self._context))
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(PIECE, 0, 1)
        self._free = weakref.finalize(self, _free, llama, self._context, self._batch, weights)
        self._batch_ids, self._batch_positions, self._batch_rows = self._batch_views()
        self._width, self._real = self.vocabulary.size, self.vocabulary.real_size
        self._below, self._exp = np.empty((2, self._width), np.float32)
        self._row_address, self._row = 0, self._below
        self._stand_in = next(iter(self.tokeniser.encode(" ", add_bos=False)), 0)
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._fed = 0
        self._row_of = 0  # the logits at hand are those behind this many ids; 0: none
        self.drops_tail = True
        try:
            self.drops_tail = self._try_to_drop()
        except DrafterFailed as error:
            self.close()
            raise UsageError(f"{weights.path}: cannot serve as a draft model: {error}; give another one") from error

    def _parameters(self, context: int) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch = parameters.n_ubatch = PIECE
        parameters.n_seq_max = 1
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.swa_full = True  # a sliding window that forgot its beginning could not go back
        parameters.no_perf = True
        if hasattr(parameters, "n_outputs_max"):  # newer releases: room for one row of logits is enough
            parameters.n_outputs_max = 1
        return parameters

    def _batch_views(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The batch's ids, positions and wishes for logits as arrays; all its ids belong to sequence 0."""
        batch = self._batch
        for i in range(PIECE):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
        ids, positions, rows = (
            np.ctypeslib.as_array(part, (PIECE,)) for part in (batch.token, batch.pos, batch.logits)
        )
        rows[:] = 0
        return ids, positions, rows

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def room(self) -> int:
        """How many ids may still be drafted; 0 from the end of the context on."""
        return max(0, self.context - len(self._ids))

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about this draft model, one line each."""
        if self.drops_tail:
            return ()
        return (
            f"{self.name} cannot drop the end of its memory, so it reads everything again after each rejection: slow",
        )

    @property
    def cached(self) -> list[int]:
        """The ids that llama.cpp's cache holds, for tests: always the first of those that the drafter knows."""
        last = self._llama.llama_memory_seq_pos_max(self._memory, 0)
        assert last == self._fed - 1, f"the cache ends at {last}, {self._fed} ids were fed"
        return self._ids[: self._fed]

    def rollback(self, pos: int) -> None:
        """Forget every id at or behind `pos`."""
        with self._lock:
            self._check_open()
            assert 0 <= pos <= len(self._ids), f"{len(self._ids)} ids, cannot be cut to {pos}"
            del self._ids[pos:]
            self._cut(pos)

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids; they are fed with the next `draft` or `prefill`, and may go beyond the context."""
        assert all(token_id >= 0 for token_id in ids), f"not ids: {ids}"
        with self._lock:
            self._ids.extend(ids)

    def prefill(self, most: int) -> int:
        """Feed at most `most` pending ids; how many remain. Nothing is fed of a text too long for the context."""
        assert most >= 0, f"prefill of {most} ids"
        with self._lock:
            self._check_open()
            if len(self._ids) > self.context:
                return 0
            self._feed(min(len(self._ids), self._fed + most))
            return len(self._ids) - self._fed

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        """The next id: of those that have a text what `sampler` draws, or the most probable. Probability and entropy
        (nats) are those of the softmax at temperature 1 over the whole row, whatever it was drawn by; the margin is the
        sampler's.

        A row that holds NaN or +inf gives probability 0 and the entropy of knowing nothing, log of the row's width, so
        that no rule takes such a guess for a sure one. The id is appended. Raises `DraftContextFull` when `room` is 0,
        `DrafterFailed` when llama.cpp fails.
        """
        with self._lock:
            self._check_open()
            assert self._ids, "a draft behind no ids"
            if len(self._ids) >= self.context:
                raise DraftContextFull(f"{self.name}: its context of {self.context} positions is used up")
            if self._row_of != len(self._ids):
                self._cut(len(self._ids) - 1)  # what was fed without asking for logits is fed again
                self._feed(len(self._ids))
            drawn = self._choose(sampler)
            self._ids.append(drawn.id)
            return drawn

    def close(self) -> None:
        """Free context and model; may be called again, no other call may follow."""
        with self._lock:
            self._free()

    def _check_open(self) -> None:
        if not self._free.alive:
            raise UsageError(f"the drafter of {self.name} is closed; open it again")

    def _cut(self, length: int) -> None:
        """Leave at most `length` ids in the cache, fewer if the model cannot go back to there."""
        if length >= self._fed:
            return
        self._row_of = 0
        dropped = (
            length > 0
            and self.drops_tail
            and self._llama.llama_memory_seq_rm(self._memory, 0, length, _ALL)
            and self._llama.llama_memory_seq_pos_max(self._memory, 0) == length - 1
        )
        if dropped:
            self._fed = length
        else:
            self._empty()

    def _empty(self) -> None:
        # a recurrent state must go, a cache of keys and values only be forgotten
        self._llama.llama_memory_clear(self._memory, not self.drops_tail)
        self._fed = self._row_of = 0

    def _feed(self, end: int) -> None:
        """Feed the ids up to `end` in pieces; asks for the logits of the last id known only."""
        while self._fed < end:
            begin = self._fed
            piece = self._ids[begin : min(end, begin + PIECE)]
            count, last = len(piece), begin + len(piece) == len(self._ids)
            width, stand_in = self._width, self._stand_in
            self._batch_ids[:count] = [token_id if token_id < width else stand_in for token_id in piece]
            self._batch_positions[:count] = range(begin, begin + count)
            self._batch_rows[count - 1] = last
            self._batch.n_tokens = count
            log.forget()
            code = self._llama.llama_decode(self._context, self._batch)
            self._batch_rows[count - 1] = 0
            if code != 0:
                self._empty()
                raise DrafterFailed(f"{self.name}: llama.cpp fails with code {code} ({log.complaint()})")
            self._fed = begin + count
            self._row_of = self._fed if last else 0

    def _logits(self) -> np.ndarray:
        """llama.cpp's own memory of the last row, float32 of the vocabulary's width; good until the next call."""
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        address = ctypes.addressof(pointer.contents)
        if address != self._row_address:
            self._row_address = address
            self._row = np.ctypeslib.as_array((ctypes.c_float * self._width).from_address(address))
        return self._row

    def _choose(self, sampler: Chooser | None = None) -> Drawn:
        row = self._logits()
        real = row[: self._real]
        choice = None if sampler is None else sampler.choose(real, len(self._ids), self._ids)
        token_id, margin = (int(real.argmax()), 0.0) if choice is None else (choice.id, choice.margin)
        top = row.max()
        if not np.isfinite(top):
            return Drawn(token_id, 0.0, math.log(self._width), margin)
        below, weights = self._below, self._exp
        np.subtract(row, top, out=below)
        if row.min() - top < _LEAST_LOGIT:
            np.maximum(below, _LEAST_LOGIT, out=below)
        np.exp(below, out=weights)
        own, total = float(weights[token_id]), float(weights.sum())
        np.multiply(below, weights, out=below)
        # with p = w / Σw and log p = x - log Σw, -Σ p·log p is log Σw - Σ w·x / Σw
        return Drawn(token_id, own / total, max(0.0, math.log(total) - float(below.sum()) / total), margin)

    def _try_to_drop(self) -> bool:
        """Whether the end of the cache can be dropped, tried: what follows must have the logits of a fresh cache.

        Both are fed in the same pieces: quantised matrices have other kernels for pieces of another length, and then
        logits may differ by as much as wrong ids would make them.
        """
        begin, dropped, end = ([(7 * i + self._stand_in) % self._real for i in range(at, at + 2)] for at in (1, 9, 3))
        self._feed_parts(begin, dropped)
        self.rollback(2)
        kept = self._fed
        self._feed_parts(end)
        after = self._logits().copy()
        self.rollback(0)
        self._feed_parts(begin, end)
        agrees = bool(np.allclose(after, self._logits(), rtol=1e-2, atol=1e-2))
        self.rollback(0)
        return kept == 2 and agrees

    def _feed_parts(self, *parts: Sequence[int]) -> None:
        for part in parts:
            self.extend(part)
            self._feed(len(self._ids))


def _free(llama: Any, context: Any, batch: Any, weights: Weights) -> None:
    """The context before the model; not a method, so that it can run when the drafter is gone."""
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    weights.close()
