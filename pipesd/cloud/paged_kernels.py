"""The attention over pages as Triton kernels: one reads the keys of a split, one combines the splits of a row.

Both have a grid that depends on the sizes of the pass alone, so that they can be recorded; blocks without work end at
once. Sums are in float32. What a block adds for keys that a row does not see is an exact zero; with that, and with
splits that follow from a row's position, its bits are the same in any pass.

Imported where there is a CUDA device, and by tests under Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipesd.cloud.paged_attention import PAGE, SPLIT, PassRows, splits, tile_rows
from pipesd.model_shape import CacheShape

_EVERYTHING = 1 << 40  # a window that no text fills


@triton.jit
def _read_split(  # type: ignore[no-untyped-def]
    query,
    kv,
    table,
    positions,
    slots,
    spans,
    tiles,
    sums,
    marks,
    query_stride,
    kv_stride,
    table_stride,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Block (tile, kv head, split): the weighted values `sums` (rows, heads, SPLITS, HEAD) of its keys, unnormalised,
    and `marks` (rows, heads, SPLITS, 2): the highest score, as a power of 2, and the sum of weights relative to it."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(tiles + 2 * tile)
    count = tl.load(tiles + 2 * tile + 1)
    if count == 0:
        return
    start = tl.load(positions + first)
    span = tl.load(spans + first)
    end = start + count  # of the keys that the last row sees
    low = tl.maximum(split * span, start - window + 1) // BLOCK_KEYS
    low = tl.maximum(low, 0)
    high = (tl.minimum(split * span + span, end) + BLOCK_KEYS - 1) // BLOCK_KEYS
    if low >= high:
        return

    slot = tl.load(slots + first)
    line = tl.arange(0, BLOCK_ROWS)
    row = line // GROUPS
    head = line % GROUPS * KV_HEADS + kv_head
    at = start + row
    used = row < count
    d = tl.arange(0, BLOCK_HEAD)
    inside = d < HEAD
    q = tl.load(
        query + (first + row)[:, None] * query_stride + head[:, None] * HEAD + d[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    values = tl.zeros([BLOCK_ROWS, BLOCK_HEAD], tl.float32)
    for block in range(low, high):
        key_at = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + slot * table_stride + block * BLOCK_KEYS // PAGE_SIZE)
        place = page * PAGE_SIZE + key_at % PAGE_SIZE
        there = (key_at < end)[:, None] & inside[None, :]
        where = kv + place[:, None] * kv_stride + kv_head * HEAD + d[None, :]
        k = tl.load(where, mask=there, other=0.0)
        v = tl.load(where + KV_HEADS * HEAD, mask=there, other=0.0)
        seen = (key_at[None, :] <= at[:, None]) & (key_at[None, :] > at[:, None] - window)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        values = values * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * kept + tl.sum(weights, 1)
        highest = higher
    own = ((first + row) * (GROUPS * KV_HEADS) + head) * SPLITS + split
    tl.store(sums + own[:, None] * HEAD + d[None, :], values, mask=used[:, None] & inside[None, :])
    tl.store(marks + own * 2, highest, mask=used)
    tl.store(marks + own * 2 + 1, total, mask=used)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    sums,
    marks,
    positions,
    spans,
    out,
    window,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Block (row, head): what the row reads, out of its splits; zeros for a row that fills up the pass."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.load(positions + row)
    span = tl.load(spans + row)
    split = tl.arange(0, SPLITS)
    begin = split * span
    live = (begin <= at) & (begin + span > at - window + 1) & (begin + span > begin)
    own = (row * HEADS + head).to(tl.int64) * SPLITS + split
    d = tl.arange(0, BLOCK_HEAD)
    highest = tl.load(marks + own * 2, mask=live, other=float("-inf"))
    total = tl.load(marks + own * 2 + 1, mask=live, other=0.0)
    there = live[:, None] & (d < HEAD)[None, :]
    values = tl.load(sums + own[:, None] * HEAD + d[None, :], mask=there, other=0.0)
    top = tl.max(highest, 0)
    kept = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
    weight = tl.sum(kept * total, 0)
    weight = tl.where(weight == 0.0, 1.0, weight)
    value = tl.sum(kept[:, None] * values, 0) / weight
    tl.store(out + (row * HEADS + head) * HEAD + d, value.to(out.dtype.element_ty), mask=d < HEAD)


def _block_keys(dtype: torch.dtype) -> int:
    """Keys that are multiplied at once; in float32 it is done without matrix units, by code that grows with them."""
    return 16 if dtype == torch.float32 else PAGE


def triton_read(query: Tensor, kv: Tensor, table: Tensor, rows: PassRows, shape: CacheShape, window: int) -> Tensor:
    """The attention by these kernels: see `PagedRead`. float32 is multiplied as float32, never rounded to TF32."""
    assert query.stride(1) == 1 and kv.is_contiguous() and table.stride(1) == 1
    count, heads = query.shape[0], shape.groups * shape.kv_heads
    parts = splits(shape)
    sums = torch.empty(count * heads * parts * shape.head_size, dtype=torch.float32, device=query.device)
    marks = torch.empty(count * heads * parts * 2, dtype=torch.float32, device=query.device)
    out = torch.empty((count, heads * shape.head_size), dtype=query.dtype, device=query.device)
    block_head = max(16, triton.next_power_of_2(shape.head_size))
    reach = window or _EVERYTHING
    _read_split[(rows.tiles.shape[0], shape.kv_heads, parts)](
        query, kv, table, rows.positions, rows.slots, rows.spans, rows.tiles, sums, marks,
        query.stride(0), kv.stride(0), table.stride(0), reach, shape.head_size**-0.5 * math.log2(math.e),
        KV_HEADS=shape.kv_heads, GROUPS=shape.groups, HEAD=shape.head_size, BLOCK_HEAD=block_head,
        BLOCK_ROWS=max(16, triton.next_power_of_2(tile_rows(shape) * shape.groups)),
        BLOCK_KEYS=_block_keys(query.dtype), PAGE_SIZE=PAGE, SPLITS=parts, PRECISION="ieee", num_warps=4, num_stages=2,
    )  # fmt: skip
    _combine[(count, heads)](
        sums, marks, rows.positions, rows.spans, out, reach,
        HEADS=heads, HEAD=shape.head_size, BLOCK_HEAD=block_head, SPLITS=parts, num_warps=4,
    )  # fmt: skip
    return out


def try_out(device: torch.device, dtype: torch.dtype, shape: CacheShape) -> None:
    """Runs the kernels on one row, compiled as passes over such caches have them; what triton raises where they cannot
    run, for want of shared memory too."""
    row, tile = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([[0, 1]], device=device)
    rows = PassRows(row, row, row + SPLIT, tile)
    query = torch.zeros(1, shape.groups * shape.kv_heads * shape.head_size, device=device, dtype=dtype)
    kv = torch.zeros(PAGE, 2 * shape.kv_heads, shape.head_size, device=device, dtype=dtype)
    triton_read(query, kv, row[:, None], rows, shape, 0)
