"""Whether a model will fit, before it is loaded: what it needs against what the machine has left. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipesd.cloud.progress import bytes_text
from pipesd.errors import UsageError
from pipesd.free_memory import Free
from pipesd.model_shape import ModelShape

CONTEXT_BYTES = 512 << 20  # that the driver takes of a device for each process
_FIXED_BYTES = 96 << 20  # beside the tensors: pieces, small tensors, and up to 64 MB of freed memory that glibc keeps


@dataclass(frozen=True)
class Need:
    """Bytes that a loaded model takes, and the most that loading takes at once on the host and on the device."""

    weights: int
    rotation: int
    cache: int  # of all sessions at their longest; it grows as they do
    largest: int  # the largest fused matrix in float32, which exists while it is placed

    @property
    def loading(self) -> int:
        """At the worst moment of loading, where the weights stay on the host."""
        return self.weights + self.rotation + self._making + _FIXED_BYTES

    @property
    def staging(self) -> int:
        """At the worst moment of loading on the host, where the weights go to a device."""
        return self._making * 3 // 2 + self.rotation + _FIXED_BYTES  # it is rounded to the device's precision here

    @property
    def _making(self) -> int:
        return max(self.largest, self.rotation)  # the table of rotations is made when the last matrix is in its place

    @property
    def in_place(self) -> int:
        """When it is loaded; on a device of its own, at any time."""
        return self.weights + self.rotation + _FIXED_BYTES


def need_of(shape: ModelShape, item_bytes: int, slots: int, *, packed: bool) -> Need:
    """What a model of this shape takes with weights of `item_bytes`. `shape.context`: the positions that are served.

    `packed`: matrices are kept in a form of their own, so that a tied output layer is a second copy of the embeddings.
    """
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    qkv, gate_up = (query + 2 * key) * shape.hidden, 2 * shape.feed_forward * shape.hidden
    layer = qkv + gate_up + (query + shape.feed_forward) * shape.hidden
    table = shape.width * shape.hidden
    tables = 1 if shape.tied and not packed else 2
    return Need(
        weights=(shape.layers * layer + tables * table) * item_bytes,
        rotation=shape.context * (shape.head_size // 2) * 8,
        cache=slots * shape.layers * 2 * key * shape.context * item_bytes,
        largest=max(qkv, gate_up, table, shape.feed_forward * shape.hidden) * 4,
    )


def room_for_cache(free: int, there: int, in_place: int, working: int, copies: int) -> int:
    """Bytes of a device that the cache of one of `copies` workers may take, of `there` in all and `free` behind its
    weights. Each keeps to its share, so that all fit whichever loads first."""
    share = there if copies == 1 else there // copies - in_place - CONTEXT_BYTES
    return min(free, share) - working


def remedy(in_16_bits: int | None, bound: Iterable[Free], copies: int, dtype: str = "bfloat16") -> str:
    """What to do about a model that does not fit into the least of `bound`. `in_16_bits`: what would be needed there
    with `dtype`, None if that is no way out."""
    least = min(bound, key=lambda each: each.bytes, default=None)
    ways = []
    if in_16_bits is not None and least is not None and in_16_bits <= least.bytes:
        ways.append(f"--dtype {dtype}")
    if copies > 1:
        ways.append("fewer --workers (each loads its own copy)")
    return f"use {', '.join([*ways, 'a smaller model'])} or another machine"


def check_fits(name: str, need: int, cache: int, free: Iterable[Free], advice: str) -> None:
    """UsageError, one line with both numbers, if `need` is more than the least of `free`. Unknown memory fits."""
    least = min(free, key=lambda each: each.bytes, default=None)
    if least is not None and need > least.bytes:
        raise UsageError(
            f"{name}: needs {bytes_text(need)} to load, {least.where} has {bytes_text(least.bytes)} free "
            f"(its sessions take up to {bytes_text(cache)} more); {advice}"
        )


def check_all_fit(name: str, need: int, cache: int, copies: int, there: Iterable[Free], advice: str) -> None:
    """UsageError if `copies` workers, each with a copy of its own, do not fit into the least of `there`, taken empty.

    Workers load at the same time, and start anew while others serve: what is free says nothing of their sum.
    """
    least = min(there, key=lambda each: each.bytes, default=None)
    if copies > 1 and least is not None and copies * need > least.bytes:
        raise UsageError(
            f"{name}: {copies} workers need {bytes_text(copies * need)}, {least.where} has {bytes_text(least.bytes)} "
            f"in all (their sessions take up to {bytes_text(copies * cache)} more); {advice}"
        )
