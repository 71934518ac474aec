"""Keys and values of several sessions, and the attention of one ragged pass over them.

A *slot* holds one session: a tensor (layers, 2 * kv heads, capacity, head size), keys first, that grows in chunks as
the session grows, and a length. Rolling back is setting the length. Capacity beyond the length is always zero, so that
a row which was not finite cannot reach a later one through the padding.

**Row-invariant attention.** The bits of a query row must not depend on how many rows share the pass. Kernels choose
their blocking by shape, so every row is computed in a *tile* of one fixed shape and at a fixed place in it: `TILE`
query positions, aligned to multiples of `TILE`, over keys padded to the multiple of `BUCKET` that covers the tile. Rows
that are not part of the pass are filled with others and thrown away. Which tile, place and number of keys a row gets
follows from its position alone. With `exact=False` the rows of a session share one call of their own size, which is
faster.

**Windows.** In a layer with a window a row sees the last so many positions, by the mask. Buckets of keys that no row of
the tile's own bucket can see are not read, which again follows from the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipesd.model_shape import CacheShape

TILE = 4  # query positions computed together; 1 costs more for drafts, 8 for single tokens
BUCKET = 64  # keys are padded to a multiple of it
assert BUCKET % TILE == 0


@dataclass
class _Slot:
    data: Tensor  # (layers, 2 * kv_heads, capacity, head_size)
    length: int = 0


@dataclass(frozen=True)
class _Group:
    """Query tiles that read the same keys: one attention call per layer."""

    rows: slice  # of the gathered query rows
    tiles: int
    keys: tuple[Tensor, ...]  # per layer (tiles, kv_heads, keys, head_size), a view
    values: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]  # per layer (tiles, 1, query rows, keys), added to the scores


@dataclass(frozen=True)
class Attention:
    """One pass: where each layer's new keys and values go, and what each query row reads.

    Row i of the pass is at `positions[i]`. Rows beyond the batch's are copies of the first that are not stored.
    """

    shape: CacheShape
    positions: Tensor  # (rows,) int64
    writes: tuple[tuple[slice, tuple[Tensor, ...]], ...]  # pass rows -> per layer (2 * kv_heads, rows, head_size)
    groups: tuple[_Group, ...]
    gather: Tensor | None  # pass rows in tile order; None: already in order
    scatter: Tensor | None  # place of each pass row among the tiles' rows

    def store(self, layer: int, kv: Tensor) -> None:
        """Appends the pass's keys and values, (rows, 2 * kv_heads, head_size), to the slots."""
        for rows, targets in self.writes:
            targets[layer].copy_(kv[rows].transpose(0, 1))

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """What `query`, (rows, groups * kv_heads * head_size) with heads by group first, reads; of the same shape."""
        shape = self.shape
        if self.gather is not None:
            query = query.index_select(0, self.gather)
        outputs = []
        for group in self.groups:
            tiles = query[group.rows].reshape(group.tiles, -1, shape.kv_heads, shape.head_size).transpose(1, 2)
            keys, values, mask = group.keys[layer], group.values[layer], group.masks[layer]
            out = F.scaled_dot_product_attention(tiles, keys, values, attn_mask=mask)
            outputs.append(out.transpose(1, 2).reshape(-1, query.shape[1]))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self.scatter is None else joined.index_select(0, self.scatter)


class KVCache:
    """The slots of one model. Not thread-safe; every tensor is on `device`."""

    def __init__(
        self, shape: CacheShape, slots: int, *, device: torch.device, dtype: torch.dtype, exact: bool, chunk: int = 256
    ) -> None:
        assert slots >= 1 and chunk % BUCKET == 0
        self.shape = shape
        self.slots = slots
        self._exact = exact
        self._chunk = chunk
        self._device = device
        self._dtype = dtype
        self._slots: dict[int, _Slot] = {}
        windows = (shape.window(layer) for layer in range(shape.layers))
        self._windows = tuple(window if window < shape.context else 0 for window in windows)

    @property
    def memory_bytes(self) -> int:
        """Bytes held by all slots."""
        return sum(slot.data.nbytes for slot in self._slots.values())

    def length(self, slot: int) -> int:
        """Positions stored in `slot`; 0 for one never used."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self._slots[slot].length if slot in self._slots else 0

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """Forgets everything at positions ≥ `length`; 0 gives the memory back."""
        held = self.length(slot)
        assert 0 <= length <= held, f"slot {slot} holds {held} positions, not {length}"
        if length == 0:
            self._slots.pop(slot, None)
        elif length < held:
            self._slots[slot].data[:, :, length:held].zero_()
            self._slots[slot].length = length

    def _room(self, slot: int, length: int) -> _Slot:
        """The slot with capacity for `length` positions; grows by half at least, up to the context."""
        shape = self.shape
        assert length <= shape.context, f"{length} positions in a context of {shape.context}"
        held = self._slots.get(slot)
        if held is not None and held.data.shape[2] >= length:
            return held
        wanted = max(length, held.data.shape[2] * 3 // 2 if held else 0)
        most = _ceil(shape.context, BUCKET)
        capacity = min(_ceil(wanted, self._chunk), most)
        size = (shape.layers, 2 * shape.kv_heads, capacity, shape.head_size)
        data = torch.zeros(size, device=self._device, dtype=self._dtype)
        if held is None:
            held = self._slots[slot] = _Slot(data)
        else:
            data[:, :, : held.length] = held.data[:, :, : held.length]
            held.data = data
        return held

    @torch.inference_mode()
    def extend(self, batch: Sequence[tuple[int, int]], least_rows: int = 1) -> Attention:
        """Lengthens each (slot, count) by `count` ≥ 1 and returns the attention of the pass that fills the new rows.

        The rows of the pass are those of the batch in order, then copies of the first if they are fewer than
        `least_rows`. Slots must differ.
        """
        assert len({slot for slot, _ in batch}) == len(batch) and all(count >= 1 for _, count in batch)
        starts = [self.length(slot) for slot, _ in batch]
        held = [self._room(slot, start + count) for (slot, count), start in zip(batch, starts, strict=True)]
        positions = [p for (_, n), start in zip(batch, starts, strict=True) for p in range(start, start + n)]
        writes = []
        row = 0
        for slot, start, (_, count) in zip(held, starts, batch, strict=True):
            writes.append((slice(row, row + count), slot.data[:, :, start : start + count].unbind(0)))
            slot.length = start + count
            row += count
        copies = max(0, least_rows - row)
        counts = [count for _, count in batch]
        gather, scatter = list(range(row)), list(range(row))
        if self._exact:
            groups, gather, scatter = self._tiles(held, starts, counts)
        else:
            groups = self._runs(held, starts, counts)
        return Attention(
            self.shape,
            self._ids(positions + positions[:1] * copies),
            tuple(writes),
            tuple(groups),
            gather=self._ids(gather) if self._exact else None,
            scatter=self._ids(scatter + scatter[:1] * copies) if self._exact or copies else None,
        )

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _tiles(
        self, held: list[_Slot], starts: list[int], counts: list[int]
    ) -> tuple[list[_Group], list[int], list[int]]:
        """Aligned tiles of a fixed shape; those of one slot that end in the same bucket form a group."""
        groups: list[_Group] = []
        gather: list[int] = []
        scatter: list[int] = []
        row = 0
        for slot, start, count in zip(held, starts, counts, strict=True):
            end = start + count
            scatter += range(len(gather) + start % TILE, len(gather) + start % TILE + count)
            first = start - start % TILE
            while first < end:
                keys = _ceil(first + 1, BUCKET)
                last = min(keys, _ceil(end, TILE))
                places = range(first, last)
                groups.append(self._group(slot, slice(len(gather), len(gather) + len(places)), first, keys, TILE))
                gather += [row + p - start if start <= p < end else row for p in places]
                first = last
            row += count
        return groups, gather, scatter

    def _runs(self, held: list[_Slot], starts: list[int], counts: list[int]) -> list[_Group]:
        """One tile for all rows of a slot, over exactly the keys that there are."""
        groups = []
        row = 0
        for slot, start, count in zip(held, starts, counts, strict=True):
            groups.append(self._group(slot, slice(row, row + count), start, start + count, count))
            row += count
        return groups

    def _group(self, slot: _Slot, rows: slice, first: int, keys: int, tile: int) -> _Group:
        """Tiles of `tile` positions from position `first` on, over the slot's first `keys` positions."""
        count = (rows.stop - rows.start) // tile
        heads = self.shape.kv_heads
        parts = {}
        for window in set(self._windows):
            begin = self._begin(first, keys, window)
            spread = slot.data[:, None, :, begin:keys].expand(-1, count, -1, -1, -1)
            mask = self._mask(first, count, tile, range(begin, keys), window)
            parts[window] = spread[:, :, :heads].unbind(0), spread[:, :, heads:].unbind(0), mask
        return _Group(
            rows,
            count,
            tuple(parts[window][0][layer] for layer, window in enumerate(self._windows)),
            tuple(parts[window][1][layer] for layer, window in enumerate(self._windows)),
            tuple(parts[window][2] for window in self._windows),
        )

    def _begin(self, first: int, keys: int, window: int) -> int:
        """The first key that is read for tiles from position `first` on: none before it is seen."""
        if not window:
            return 0
        if not self._exact:
            return max(0, first + 1 - window)
        seen = max(0, keys - BUCKET + 1 - window)  # by the first row of the bucket in which the tiles end
        return seen - seen % BUCKET

    def _mask(self, first: int, count: int, tile: int, keys: range, window: int) -> Tensor | None:
        """Hides from `count` tiles of `tile` positions from `first` on what is behind them or before their window."""
        if tile == 1 and keys.stop == first + 1:
            return None
        position = torch.arange(first, first + count * tile, device=self._device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=self._device)
        hidden = key > position
        if window:
            hidden |= key <= position - window
        mask = torch.zeros(hidden.shape, device=self._device, dtype=self._dtype).masked_fill_(hidden, -math.inf)
        mask = mask.view(count, 1, tile, 1, len(keys)).expand(-1, -1, -1, self.shape.groups, -1)
        return mask.reshape(count, 1, tile * self.shape.groups, len(keys))


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
