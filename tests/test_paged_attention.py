"""The attention over pages, as plain torch and as kernels, against torch's own attention.

Without a CUDA device the kernels run under Triton's interpreter; they are left out where triton is not installed.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from pipesd.cloud.paged_attention import (
    MOST_SPLITS,
    PAGE,
    SPLIT,
    PagedRead,
    cut_tiles,
    most_tiles,
    plain_read,
    span_at,
    splits,
    tile_rows,
)
from pipesd.cloud.paged_cache import PagedCache
from pipesd.model_shape import CacheShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERRORS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
DTYPES = ERRORS if DEVICE.type == "cuda" else ["float32", "float16"]  # the interpreter does not multiply bfloat16
SHAPE = CacheShape(layers=2, kv_heads=2, groups=4, head_size=32, context=330, windows=(0, 70))


@pytest.fixture(scope="session")
def kernels() -> PagedRead:
    pytest.importorskip("triton")
    return importlib.import_module("pipesd.cloud.paged_kernels").triton_read  # type: ignore[no-any-return]


@pytest.fixture(params=["plain", pytest.param("kernels", marks=pytest.mark.slow)])
def read(request: pytest.FixtureRequest) -> PagedRead:
    return plain_read if request.param == "plain" else request.getfixturevalue("kernels")


class Sessions:
    """Random keys and values in a cache whose pages begin as NaN, and as plain tensors beside it."""

    def __init__(self, shape: CacheShape, slots: int, read: PagedRead, dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        self.draw = torch.Generator(DEVICE).manual_seed(0)
        self.cache = PagedCache(shape, slots, device=DEVICE, dtype=dtype, read=read)
        self.cache.pool.fill_(torch.nan)
        self.dtype = dtype
        width = (shape.layers, 0, 2 * shape.kv_heads, shape.head_size)
        self.held = [torch.empty(width, dtype=dtype, device=DEVICE) for _ in range(slots)]

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.draw, device=DEVICE).to(self.dtype)

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)
        self.held[slot] = self.held[slot][:, :length]

    def run(self, batch: list[tuple[int, int]], least_rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass in every layer; queries (layers, rows, ·) and what they read."""
        shape = self.shape
        attention = self.cache.extend(batch, least_rows)
        rows = len(attention.positions)
        kv = self.random(shape.layers, rows, 2 * shape.kv_heads, shape.head_size)
        queries = self.random(shape.layers, rows, shape.groups * shape.kv_heads * shape.head_size)
        row = 0
        for slot, count in batch:
            self.held[slot] = torch.cat([self.held[slot], kv[:, row : row + count]], dim=1)
            row += count
        read = []
        for layer in range(shape.layers):
            attention.store(layer, kv[layer])
            read.append(attention.attend(layer, queries[layer]))
        return queries, torch.stack(read)

    def wanted(self, slot: int, position: int, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The same for one row by torch's own attention."""
        shape, window = self.shape, self.shape.window(layer)
        kv = self.held[slot][layer, max(0, position - window + 1) if window else 0 : position + 1].float()
        keys, values = kv.transpose(0, 1).split(shape.kv_heads)
        heads = query.float().view(shape.groups, shape.kv_heads, shape.head_size).transpose(0, 1)
        return F.scaled_dot_product_attention(heads, keys, values).transpose(0, 1).flatten()

    def check(self, batch: list[tuple[int, int]], least_rows: int = 1) -> None:
        starts = [self.cache.length(slot) for slot, _ in batch]
        queries, read = self.run(batch, least_rows)
        row = 0
        for (slot, count), start in zip(batch, starts, strict=True):
            for position in range(start, start + count):
                for layer in range(self.shape.layers):
                    wanted = self.wanted(slot, position, layer, queries[layer, row])
                    error = (read[layer, row].float() - wanted).abs().max().item()
                    assert error < ERRORS[str(self.dtype).removeprefix("torch.")], (slot, position, layer)
                row += 1
        assert not read[:, row:].any(), "rows that fill up a pass read nothing"


def filled(shape: CacheShape, lengths: list[int], read: PagedRead, dtype: torch.dtype = torch.float32) -> Sessions:
    sessions = Sessions(shape, len(lengths), read, dtype)
    for slot, length in enumerate(lengths):
        attention = sessions.cache.extend([(slot, length)])
        kv = sessions.random(shape.layers, length, 2 * shape.kv_heads, shape.head_size)
        for layer in range(shape.layers):
            attention.store(layer, kv[layer])
        sessions.held[slot] = kv
    return sessions


def test_any_ragged_pass_reads_what_each_session_alone_would(read: PagedRead) -> None:
    sessions = filled(SHAPE, [270, 63, 5, 130], read)
    draw = np.random.default_rng(1)
    for _ in range(3):
        slots = draw.permutation(4)[: draw.integers(1, 5)].tolist()
        batch = [(slot, int(draw.integers(1, 12))) for slot in slots]
        sessions.check(batch, int(draw.integers(1, 48)))
        for slot in slots:  # some of it is taken back, across the edge of a page now and then
            sessions.truncate(slot, sessions.cache.length(slot) - int(draw.integers(0, 12)) % batch[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "groups", "head_size"), [(2, 1, 80), (1, 7, 96), (1, 3, 128), (1, 20, 16), (1, 2, 256)]
)
def test_heads_of_any_size_and_number(
    kernels: PagedRead, dtype: str, kv_heads: int, groups: int, head_size: int
) -> None:
    shape = CacheShape(1, kv_heads, groups, head_size, 150, windows=(100,))
    filled(shape, [130, 3], kernels, getattr(torch, dtype)).check([(1, 2), (0, 4)], 8)


def test_what_was_taken_back_is_never_read(read: PagedRead) -> None:
    sessions = filled(SHAPE, [130, 90], read)
    attention = sessions.cache.extend([(0, 40)])
    for layer in range(SHAPE.layers):
        attention.store(layer, torch.full((40, 4, 32), torch.nan, device=DEVICE))
    sessions.truncate(0, 129)
    sessions.check([(1, 3), (0, 2)])
    sessions.truncate(1, 0)
    sessions.check([(1, 70), (0, 1)])  # a page of the one was the other's before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_do_not_depend_on_its_pass(kernels: PagedRead, dtype: str) -> None:
    shape = replace(SHAPE, layers=1, kv_heads=1, windows=(70,))
    sessions = filled(shape, [124, 90, 5], kernels, getattr(torch, dtype))
    kv, queries = sessions.random(8, 2, 32), sessions.random(8, 128)
    texts = []
    for sizes in ([8], [1, 3, 4], [7, 1]):
        row, read = 0, []
        for size in sizes:
            mates = (3 * row + size) % 5  # they move the rows to other tiles and other places in them
            attention = sessions.cache.extend([(1, mates + 1), (0, size), (2, 1)], 16)
            fill = len(attention.positions) - size - mates - 1
            attention.store(0, torch.cat([kv[: mates + 1] * 2, kv[row : row + size], sessions.random(fill, 2, 32)]))
            asked = [queries[: mates + 1] * 2, queries[row : row + size], sessions.random(fill, 128)]
            read.append(attention.attend(0, torch.cat(asked))[mates + 1 :][:size])
            row += size
        texts.append(torch.cat(read))
        sessions.truncate(0, 124)
    assert all(torch.equal(texts[0], other) for other in texts[1:])


@pytest.mark.slow
def test_long_texts_have_longer_splits(kernels: PagedRead) -> None:
    edge = SPLIT * MOST_SPLITS
    filled(CacheShape(1, 1, 2, 16, edge + 100), [edge - 1], kernels).check([(0, 2)])


def test_spans_and_tiles_cover_every_row_once() -> None:
    shape = replace(SHAPE, context=1 << 17)
    assert splits(shape) == MOST_SPLITS and splits(replace(SHAPE, context=200)) == 2
    assert splits(replace(SHAPE, context=SPLIT)) == 1
    for position in [*range(0, 9000, 7), 1 << 17]:
        assert span_at(position) % PAGE == 0 and position < span_at(position) * MOST_SPLITS
        assert span_at(position) == SPLIT or position >= span_at(position) * MOST_SPLITS / 2
    draw = np.random.default_rng(0)
    for _ in range(200):
        slots = int(draw.integers(1, 9))
        starts = draw.choice([0, 5, 4090, 4095, 8191, 100_000], slots).tolist()
        counts = draw.integers(1, 20, slots).tolist()
        tiles = list(cut_tiles(shape, starts, counts))
        assert len(tiles) <= most_tiles(shape, sum(counts), slots)
        rows = [row for first, count in tiles for row in range(first, first + count)]
        assert rows == list(range(sum(counts))) and max(count for _, count in tiles) <= tile_rows(shape)
        at = [p for start, count in zip(starts, counts, strict=True) for p in range(start, start + count)]
        for first, count in tiles:
            assert at[first : first + count] == list(range(at[first], at[first] + count))
            assert len({span_at(p) for p in at[first : first + count]}) == 1
