"""The attention of a ragged pass over pages: how rows are cut into tiles and keys into splits, and a plain form.

A cache in pages is a pool (places, 2 * kv heads, head size) for each layer, keys first; `PAGE` places in a row are a
page. Position p of a slot is at place `table[slot, p // PAGE] * PAGE + p % PAGE`. Row i of a pass belongs to `slots[i]`
and sees there the positions up to `positions[i]`, of a window the last ones alone. What else the pages hold, from
texts that were taken back or sessions that are gone, is never read into a row.

**Splits.** Several blocks of a device share the keys of one row: each takes `spans[i]` keys, and what they find is
combined. How many keys that is follows from the row's position alone, so the bits of a row do not depend on its pass.
A text has `MOST_SPLITS` splits at most, so that what lies between the two steps stays small at any context.

**Tiles.** Rows that follow each other in one slot share the keys that are read: as many as fill the 16 rows which
matrix units take at least, with the query heads of a group beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipesd.model_shape import CacheShape

PAGE = 64  # positions
SPLIT = 2 * PAGE  # keys of a split as long as the text is short
MOST_SPLITS = 32
MATRIX_ROWS = 16  # of the smallest matrix product


@dataclass(frozen=True)
class PassRows:
    """Where the rows of a pass stand; int64 tensors on the device of the pool."""

    positions: Tensor  # (rows,)
    slots: Tensor  # (rows,)
    spans: Tensor  # (rows,) keys of a split; 0: a row that fills up the pass and reads nothing
    tiles: Tensor  # (tiles, 2) first row and number of rows; 0 rows: nothing to do


class PagedRead(Protocol):
    """A form of the attention."""

    def __call__(
        self, query: Tensor, kv: Tensor, table: Tensor, rows: PassRows, shape: CacheShape, window: int
    ) -> Tensor:
        """What `query`, (rows, groups * kv heads * head size) with heads by group first, reads; of the same shape.

        `kv`: one layer's pool; `table`: (slots, pages of a slot) int64; `window`: positions seen, 0: all.
        """


def tile_rows(shape: CacheShape) -> int:
    """Rows of a tile."""
    return max(1, MATRIX_ROWS // shape.groups)


def most_tiles(shape: CacheShape, rows: int, slots: int) -> int:
    """How many tiles a pass of so many rows has at most, however they are spread over the slots."""
    return min(rows, rows // tile_rows(shape) + 2 * slots)


def splits(shape: CacheShape) -> int:
    """How many splits a row of this cache may have: a power of two."""
    return min(MOST_SPLITS, 1 << (-(-shape.context // SPLIT) - 1).bit_length())


def span_at(position: int) -> int:
    """Keys of a split for a row at `position`; doubles whenever the text would need more than MOST_SPLITS of them."""
    return SPLIT << (position // (SPLIT * MOST_SPLITS)).bit_length()


def cut_tiles(shape: CacheShape, starts: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each tile of a pass with entries of `counts` rows from positions `starts` on."""
    row = 0
    for start, count in zip(starts, counts, strict=True):
        end = start + count
        while start < end:
            same = span_at(start) * MOST_SPLITS  # rows of a tile have splits of one size
            taken = min(tile_rows(shape), end - start, same - start)
            yield row, taken
            row += taken
            start += taken


def plain_read(query: Tensor, kv: Tensor, table: Tensor, rows: PassRows, shape: CacheShape, window: int) -> Tensor:
    """The attention in plain torch, one row at a time over all pages of its slot, in float32. For tests and trials: it
    reads far more than a row sees."""
    pages = table[rows.slots]
    places = (pages[:, :, None] * PAGE + torch.arange(PAGE, device=table.device)).flatten(1)
    at = rows.positions[:, None]
    keys_at = torch.arange(places.shape[1], device=table.device)
    seen = (keys_at <= at) & (keys_at > at - window if window else True) & (rows.spans[:, None] > 0)
    read = torch.where(seen[..., None, None], kv[torch.where(seen, places, 0)].float(), 0.0)
    keys, values = read.split(shape.kv_heads, dim=2)
    heads = query.float().unflatten(1, (shape.groups, shape.kv_heads, shape.head_size))
    scores = torch.einsum("rghd,rkhd->rghk", heads, keys) * shape.head_size**-0.5
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = torch.where(rows.spans[:, None, None, None] > 0, scores.softmax(-1), 0.0)
    return torch.einsum("rghk,rkhd->rghd", weights, values).flatten(1).to(query.dtype)
