"""Keys and values of several sessions in one pool of pages: nothing is copied when a session grows or is rolled back.

The form of CUDA. A pass is described by one vector of integers, its *plan*, so that all of it goes to the device in one
copy, and a pass of so many rows always has a plan of the same length: what is recorded once can be replayed with
another plan. The page table lives on the device; a plan carries the entries that are new.

Page 0 belongs to nobody: rows that only fill up a pass write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud.paged_attention import PAGE, PagedRead, PassRows, cut_tiles, most_tiles, span_at
from pipesd.cloud.progress import bytes_text
from pipesd.errors import UsageError
from pipesd.model_shape import CacheShape

_COLUMNS = 6  # of a plan, each with an entry for every row: positions, places, slots, spans, and two of the page table


@dataclass(frozen=True)
class PagedAttention:
    """One pass: where its new keys and values go, and what its rows read. Views of a plan on the device."""

    shape: CacheShape
    rows: PassRows
    places: Tensor  # (rows,) of the pool, that the pass writes
    entries: Tensor  # (2, rows) of the page table: where, and which page
    pool: Tensor  # (layers, places, 2 * kv_heads, head_size)
    table: Tensor  # (slots * pages of a slot + 1,); the last entry takes what fills up a plan
    read: PagedRead

    @property
    def positions(self) -> Tensor:
        """(rows,) int64."""
        return self.rows.positions

    def begin(self) -> None:
        """Brings the page table up to date; comes before the first layer."""
        self.table.index_copy_(0, self.entries[0], self.entries[1])

    def store(self, layer: int, kv: Tensor) -> None:
        """Puts the pass's keys and values, (rows, 2 * kv_heads, head_size), at their places."""
        self.pool[layer].index_copy_(0, self.places, kv)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """What `query`, (rows, groups * kv_heads * head_size) with heads by group first, reads; of the same shape."""
        table = self.table[:-1].view(-1, pages_of(self.shape.context))
        return self.read(query, self.pool[layer], table, self.rows, self.shape, self.shape.window(layer))


class PagedCache:
    """The slots of one model; like `KVCache`, but over pages. Not thread-safe; every tensor is on `device`.

    There are as many pages as all slots can fill: none is ever short. `read`: the form of the attention.
    """

    def __init__(
        self, shape: CacheShape, slots: int, *, device: torch.device, dtype: torch.dtype, read: PagedRead
    ) -> None:
        assert slots >= 1
        most = pages_of(shape.context)
        self.shape = shape
        self.slots = slots
        self.pages = slots * most
        size = (shape.layers, (1 + self.pages) * PAGE, 2 * shape.kv_heads, shape.head_size)
        self.pool = torch.empty(size, device=device, dtype=dtype)
        self._table = torch.zeros(slots * most + 1, dtype=torch.int64, device=device)
        self._read = read
        self._free = list(range(self.pages, 0, -1))
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._lengths = [0] * slots

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pages that the slots hold; the pool itself is there from the start."""
        return sum(map(len, self._held)) * page_bytes(self.shape, self.pool.dtype)

    def length(self, slot: int) -> int:
        """Positions stored in `slot`; 0 for one never used."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forgets everything at positions ≥ `length`, and gives back the pages that are free by that."""
        held = self.length(slot)
        assert 0 <= length <= held, f"slot {slot} holds {held} positions, not {length}"
        pages, kept = self._held[slot], pages_of(length)
        self._free += reversed(pages[kept:])
        del pages[kept:]
        self._lengths[slot] = length

    def extend(self, batch: Sequence[tuple[int, int]], least_rows: int = 1) -> PagedAttention:
        """Lengthens each (slot, count) by `count` ≥ 1 and returns the attention of the pass that fills the new rows.

        The rows of the pass are those of the batch in order, then some that read and keep nothing if they are fewer
        than `least_rows`. Slots must differ.
        """
        rows = max(least_rows, sum(count for _, count in batch))
        attention = self.attention(torch.from_numpy(self.plan(batch, rows)).to(self.pool.device), rows)
        attention.begin()
        return attention

    def plan_size(self, rows: int) -> int:
        """Length of the plan of a pass of `rows` rows."""
        return _COLUMNS * rows + 2 * most_tiles(self.shape, rows, self.slots)

    def plan(self, batch: Sequence[tuple[int, int]], rows: int) -> np.ndarray:
        """Lengthens the slots as `extend` does; the plan, int64 (plan_size,), of the pass, filled up to `rows` rows."""
        starts = [self.length(slot) for slot, _ in batch]
        counts = [count for _, count in batch]
        entries = self._grow(batch, starts)
        plan = np.zeros(self.plan_size(rows), np.int64)
        positions, places, slots, spans, where, pages = plan[: _COLUMNS * rows].reshape(_COLUMNS, rows)
        places[:] = np.arange(rows) % PAGE
        row = 0
        for (slot, count), start in zip(batch, starts, strict=True):
            own = slice(row, row + count)
            positions[own] = at = np.arange(start, start + count)
            first = start // PAGE
            held = np.array(self._held[slot][first : pages_of(start + count)])
            places[own] = held[at // PAGE - first] * PAGE + at % PAGE
            slots[own] = slot
            row += count
        spans[:row] = [span_at(position) for position in positions[:row].tolist()]
        where[:] = len(self._table) - 1
        if entries:
            where[: len(entries)], pages[: len(entries)] = zip(*entries, strict=True)
        tiles = [number for tile in cut_tiles(self.shape, starts, counts) for number in tile]
        plan[_COLUMNS * rows :][: len(tiles)] = tiles
        return plan

    def attention(self, plan: Tensor, rows: int) -> PagedAttention:
        """The pass that `plan`, on the device, describes: another one whenever its numbers are replaced."""
        positions, places, slots, spans, _where, _pages = plan[: _COLUMNS * rows].view(_COLUMNS, rows)
        entries = plan[(_COLUMNS - 2) * rows : _COLUMNS * rows].view(2, rows)
        tiles = plan[_COLUMNS * rows :].view(-1, 2)
        return PagedAttention(
            self.shape, PassRows(positions, slots, spans, tiles), places, entries, self.pool, self._table, self._read
        )

    def _grow(self, batch: Sequence[tuple[int, int]], starts: list[int]) -> list[tuple[int, int]]:
        """Takes the pages that the batch needs; (entry of the page table, page) of each."""
        assert len({slot for slot, _ in batch}) == len(batch) and all(count >= 1 for _, count in batch)
        most = pages_of(self.shape.context)
        needs = []
        for (slot, count), start in zip(batch, starts, strict=True):
            assert start + count <= self.shape.context, (
                f"{start + count} positions in a context of {self.shape.context}"
            )
            needs.append(pages_of(start + count) - len(self._held[slot]))
        entries = []
        for (slot, count), start, need in zip(batch, starts, needs, strict=True):
            for _ in range(need):
                page = self._free.pop()
                entries.append((slot * most + len(self._held[slot]), page))
                self._held[slot].append(page)
            self._lengths[slot] = start + count
        return entries


def pages_of(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE)


def page_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers."""
    return shape.layers * PAGE * 2 * shape.kv_heads * shape.head_size * dtype.itemsize


def session_bytes(shape: CacheShape, slots: int, dtype: torch.dtype) -> int:
    """Bytes of the pool of so many sessions of `shape.context` positions."""
    return (slots * pages_of(shape.context) + 1) * page_bytes(shape, dtype)  # page 0 holds nothing


def sessions_that_fit(shape: CacheShape, dtype: torch.dtype, room_bytes: int) -> int:
    """How many sessions so much memory holds at their longest. UsageError where one does not fit."""
    fitting = (room_bytes // page_bytes(shape, dtype) - 1) // pages_of(shape.context)
    if fitting < 1:
        raise UsageError(
            f"a session of {shape.context} positions takes {bytes_text(session_bytes(shape, 1, dtype))} of keys and "
            f"values, {bytes_text(max(0, room_bytes))} are free behind the weights; ask for a shorter --context"
        )
    return fitting
