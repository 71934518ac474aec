"""Recorded passes over pages give what plain passes give, whatever is replayed, and the host waits once for each.

There is no CUDA device here as a rule: a record is then a call of the same function over the same buffers, or a
stand-in that, like a CUDA graph, gives its results at one address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tiny import write_tiny

pytest.importorskip("torch")

import torch

from pipesd.cloud import target as target_module
from pipesd.cloud.graphs import SIZES, RecordedPasses, Run
from pipesd.cloud.loading import load_target
from pipesd.cloud.paged_attention import PAGE, PagedRead, plain_read
from pipesd.cloud.paged_cache import PagedCache, page_bytes, pages_of, session_bytes, sessions_that_fit
from pipesd.cloud.target import TorchTarget, new_cache
from pipesd.errors import UsageError
from pipesd.model_shape import CacheShape
from pipesd.policy.accept import Draw
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=200)


@pytest.fixture(scope="module")
def plain(tiny_file: Path) -> TorchTarget:
    return load_target(tiny_file, device="cpu", exact=False)


def paged(plain: TorchTarget, *, exact: bool = False, read: PagedRead = plain_read) -> TorchTarget:
    """The same weights with a cache in pages, whose unused places are not finite."""
    shape = plain._decoder.shape.cache(plain.info.context)
    cache = PagedCache(shape, plain.slots, device=CPU, dtype=torch.float32, read=read)
    cache.pool.fill_(torch.nan)
    # named as a device of its own, it is one to all that does not touch the device itself
    info = replace(plain.info, device="cuda:0")
    target = TorchTarget(plain._decoder, cache, info, plain.vocabulary, threads=1, exact=exact)
    target.prepare()
    return target


@pytest.fixture(params=[False, True], ids=["sizes", "exact"])
def target(request: pytest.FixtureRequest, plain: TorchTarget) -> Iterator[TorchTarget]:
    yield paged(plain, exact=request.param)
    for slot in range(plain.slots):
        plain.truncate(slot, 0)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)


def test_any_passes_with_rollback_give_what_plain_ones_give(plain: TorchTarget, target: TorchTarget) -> None:
    draw = np.random.default_rng(0)
    for turn in range(14):
        slots = draw.permutation(plain.slots)[: draw.integers(1, 5)].tolist()
        batch = []
        for slot in slots:
            ids = draw.integers(512, size=draw.choice([1, 2, 5, 30])).tolist()
            batch.append((slot, ids, int(draw.integers(0, len(ids) + 1))))
        if turn % 3:
            same(target.forward(batch), plain.forward(batch))
        else:
            assert target.greedy(batch) == plain.greedy(batch)
        for slot in slots:  # each accepts a number of its own
            kept = 0 if plain.length(slot) > 120 else plain.length(slot) - int(draw.integers(0, 2))
            for each in (plain, target):
                each.truncate(slot, kept)
                assert each.length(slot) == kept


def test_a_long_prefill_is_cut_and_its_rows_are_those_of_plain_passes(plain: TorchTarget, target: TorchTarget) -> None:
    ids = np.random.default_rng(1).integers(512, size=190).tolist()
    batch = [(3, ids[:80], 10), (1, ids, 130), (2, [], 0)]
    same(target.forward(batch), plain.forward(batch))
    target.truncate(1, 0)
    target.greedy([(1, ids, 0)])
    plain.truncate(1, 190)
    same(target.forward([(1, [5], 1)]), plain.forward([(1, [5], 1)]))


def test_a_context_is_filled_to_its_end(plain: TorchTarget, target: TorchTarget) -> None:
    ids = np.random.default_rng(2).integers(512, size=200).tolist()
    target.forward([(0, ids[:195], 0)])
    plain.forward([(0, ids[:195], 0)])
    same(target.forward([(0, ids[195:], 5)]), plain.forward([(0, ids[195:], 5)]))
    with pytest.raises(AssertionError, match="201 positions in a context of 200"):
        target.forward([(0, [1], 1)])


def test_a_pass_takes_the_next_size_and_long_ones_their_own(plain: TorchTarget) -> None:
    made: list[int] = []
    run = RecordedPasses._run

    def seen(self: RecordedPasses, buffer: torch.Tensor, size: int, wanted: int) -> torch.Tensor | None:
        made.append(size)
        return run(self, buffer, size, wanted)

    for exact, counts, sizes in (
        (False, (1, 2, 3, 5, 9, 40, 64, 65, 100), (1, 2, 4, 8, 16, 64, 64, 65, 100)),
        (True, (1, 5, 64, 65), (64, 64, 64, 64, 64)),
    ):
        target = paged(plain, exact=exact)
        with mock.patch.object(RecordedPasses, "_run", seen):
            for count in counts:
                target.greedy([(0, [1] * count, 1)])
                target.truncate(0, 0)
        assert tuple(made) == sizes
        made.clear()


def test_results_outlive_the_next_replay(plain: TorchTarget) -> None:
    """Like a CUDA graph: recorded once, with results at the same place from then on."""
    recorded = []

    def record(run: Run) -> Run:
        results = run()
        recorded.append(len(results[1]))

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            for old, new in zip(results, run(), strict=True):
                old.copy_(new)
            return results

        return replay

    cache = PagedCache(plain._decoder.shape.cache(200), 2, device=CPU, dtype=torch.float32, read=plain_read)
    passes = RecordedPasses(plain._decoder, cache, record=record)
    with torch.inference_mode():
        told: list[tuple[int, int]] = []
        passes.prepare(lambda done, all_: told.append((done, all_)))
        assert sorted(recorded) == list(SIZES) and told == [(i + 1, len(SIZES)) for i in range(len(SIZES))]
        assert cache.memory_bytes == 0 and cache.length(0) == 0
        first = passes([(0, [1, 2, 3], 2)])
        assert first is not None
        kept = [part.clone() for part in first]
        second = passes([(1, [7, 8, 9], 3)])
        assert second is not None and all(map(torch.equal, first, kept))
        assert not torch.equal(first[0], second[0][1:]) and len(recorded) == len(SIZES)


@contextmanager
def waits() -> Iterator[list[str]]:
    """What the host reads of tensors, and so waits for, while the block runs."""
    found: list[str] = []
    with mock.patch.multiple(torch.Tensor, **{name: _counted(name, found) for name in ("cpu", "tolist", "item")}):
        yield found


def _counted(name: str, found: list[str]) -> object:
    real = getattr(torch.Tensor, name)

    def read(tensor: torch.Tensor, *arguments: object) -> object:
        found.append(name)
        return real(tensor, *arguments)

    return read


def test_the_host_waits_once_for_a_pass(plain: TorchTarget, target: TorchTarget) -> None:
    sampler = Sampler(Sampling(temperature=0.7, top_k=20), 3)
    batch = [(0, [1, 2, 3], 3), (1, [4, 5], 2), (2, [6], 0), (4, [8, 9], 1)]
    draws = [Draw(sampler, (1,), (2, 3)), None, None, Draw(sampler, (8, 9), ())]
    target.greedy([(3, list(range(200)), 0)])
    for call in (
        lambda: target.greedy(batch),
        lambda: target.forward(batch),
        lambda: target.sample(batch, draws),
        lambda: target.greedy([(5, list(range(150)), 100)]),  # of several parts
    ):
        with waits() as found:
            call()
        assert len(found) == 1, found
    with waits() as found:
        target.greedy([(6, [1, 2], 0)])
    assert not found, "nothing was wanted"


def test_samples_are_those_of_plain_passes(plain: TorchTarget, target: TorchTarget) -> None:
    sampler = Sampler(Sampling(temperature=2.0, top_p=0.95), 3)
    text = (1, 2)
    for turn in range(12):
        batch = [(0, [text[-1], 7], 2), (1, [turn], 1)]
        draws = [Draw(sampler, text, (7,)), None]
        wanted = plain.sample(batch, draws)
        assert target.sample(batch, draws) == wanted
        text += (wanted[0].ids[0],)


def test_what_is_not_finite_stays_with_its_session(
    plain: TorchTarget, target: TorchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(3).integers(300, size=50).tolist()
    wanted = plain.greedy([(0, ids, 50)])
    embedding = plain._decoder.embedding.clone()
    embedding[300] = torch.nan
    monkeypatch.setattr(plain._decoder, "embedding", embedding)
    bad, good = target.greedy([(1, [5, 300, 6], 3), (0, ids, 50)])
    assert bad[1:] == (-1, -1) and good == wanted[0]
    target.truncate(1, 1)
    assert min(target.greedy([(1, [6], 1)])[0]) >= 0, "what was taken back is gone"
    target.truncate(1, 0)
    assert target.greedy([(2, ids, 50)]) == wanted, "the same page is another's now"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("exact", [False, True])
def test_cuda_waits_nowhere_within_a_pass(tiny_file: Path, exact: bool) -> None:
    """Torch raises where its host would wait for the device; only what is fetched at the end of a pass is outside."""
    target = load_target(tiny_file, device="cuda", exact=exact)
    run = target._recorded
    assert run is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            for batch in ([(0, [1, 2, 3], 3), (1, [4], 0)], [(0, [5], 1)], [(1, list(range(100)), 1)]):
                assert run(batch) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_keeps_the_bits_of_a_row_where_that_is_asked_for(tiny_file: Path, dtype: str) -> None:
    said: list[str] = []
    target = load_target(tiny_file, device="cuda", dtype=dtype, exact=True, say=said.append)
    assert target.invariant and not said
    ids = np.random.default_rng(0).integers(512, size=150).tolist()
    whole = target.forward([(0, ids, 150)])[0]
    for sizes in ([1, 2, 5, 64, 78], [100, 50], [3] * 50):
        target.truncate(1, 0)
        rows, start = [], 0
        for size in sizes:
            rows.append(target.forward([(2, ids[:7], 0), (1, ids[start : start + size], size)])[1])
            target.truncate(2, 0)
            start += size
        assert np.array_equal(np.concatenate(rows), whole)


# --- pages ---

SHAPE = CacheShape(layers=1, kv_heads=1, groups=1, head_size=2, context=5 * PAGE - 3)


def test_pages_come_back_and_none_is_held_twice() -> None:
    cache = PagedCache(SHAPE, 4, device=CPU, dtype=torch.float32, read=plain_read)
    assert cache.pages == 20
    draw = np.random.default_rng(0)
    for _ in range(300):
        slot = int(draw.integers(4))
        count = int(draw.integers(1, 2 * PAGE))
        if cache.length(slot) + count > SHAPE.context:
            cache.truncate(slot, int(draw.integers(cache.length(slot) + 1)))
        else:
            cache.extend([(slot, count)])
        held = [page for pages in cache._held for page in pages]
        assert sorted(held + cache._free) == list(range(1, 21)), "each is held once or free; page 0 is nobody's"
        assert cache.memory_bytes == len(held) * PAGE * 2 * 2 * 4
        for each in range(4):
            most = pages_of(SHAPE.context)
            assert cache._table[each * most :][: len(cache._held[each])].tolist() == cache._held[each]
    for slot in range(4):
        cache.truncate(slot, 0)
    assert cache.memory_bytes == 0


def test_nothing_is_copied_when_a_session_grows_or_is_rolled_back() -> None:
    cache = PagedCache(SHAPE, 2, device=CPU, dtype=torch.float32, read=plain_read)
    address = cache.pool.data_ptr()
    cache.extend([(0, PAGE + 1)]).store(0, torch.ones(PAGE + 1, 2, 2))
    pages = list(cache._held[0])
    cache.extend([(1, 3)])
    cache.extend([(0, PAGE)])
    assert cache._held[0][:2] == pages and cache.pool.data_ptr() == address
    cache.truncate(0, PAGE)
    assert cache._held[0] == pages[:1] and cache.pool.view(-1, PAGE * 4)[pages[0]].eq(1).all()


def test_sessions_fit_as_long_as_they_may_get() -> None:
    page = page_bytes(SHAPE, torch.float16)
    assert page == PAGE * 2 * 2 * 2 and session_bytes(SHAPE, 3, torch.float16) == 16 * page
    assert sessions_that_fit(SHAPE, torch.float16, 16 * page) == 3
    assert sessions_that_fit(SHAPE, torch.float16, 16 * page - 1) == 2
    with pytest.raises(UsageError, match=r"a session of 317 positions takes .* are free behind the weights; .*--cont"):
        sessions_that_fit(SHAPE, torch.float16, 5 * page)
    with pytest.raises(UsageError, match=r"0 bytes are free"):
        sessions_that_fit(SHAPE, torch.float16, -5)


def test_all_slots_can_be_full_at_once() -> None:
    cache = PagedCache(SHAPE, 3, device=CPU, dtype=torch.float16, read=plain_read)
    assert cache.pool.nbytes == session_bytes(SHAPE, 3, torch.float16)
    for slot in range(3):
        cache.extend([(slot, SHAPE.context)])
    assert [cache.length(slot) for slot in range(3)] == [SHAPE.context] * 3


def cache_on_cuda(monkeypatch: pytest.MonkeyPatch, why: str | None, room: int | None, said: list[str]) -> object:
    """The cache that a CUDA device would get, with its pages on the CPU."""
    monkeypatch.setattr(target_module, "why_no_kernels", lambda device, dtype, shape: why)
    monkeypatch.setitem(sys.modules, "pipesd.cloud.paged_kernels", mock.Mock(triton_read=plain_read))
    monkeypatch.setattr(
        target_module, "PagedCache", lambda *given, device, **options: PagedCache(*given, device=CPU, **options)
    )
    monkeypatch.setattr(target_module, "KVCache", lambda shape, slots, **options: f"one of {slots} that grow")
    return new_cache(SHAPE, 3, device=torch.device("cuda"), dtype=torch.float32, exact=True, room=room, say=said.append)


def test_a_device_gets_pages_only_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cache = new_cache(SHAPE, 2, device=CPU, dtype=torch.float32, exact=True, room=None, say=said.append)
    assert not isinstance(cache, PagedCache)
    assert cache_on_cuda(monkeypatch, "no C compiler", None, said) == "one of 3 that grow"
    assert isinstance(cache_on_cuda(monkeypatch, None, None, said), PagedCache) and not said


def test_no_more_sessions_are_held_than_surely_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    page = page_bytes(SHAPE, torch.float32)
    for pages, slots, growing in ((16, 3, 2), (100, 3, 3), (15, 2, 1), (11, 2, 1)):
        said.clear()
        cache = cache_on_cuda(monkeypatch, None, pages * page, said)
        assert isinstance(cache, PagedCache) and cache.slots == slots
        assert said == [] if slots == 3 else f"room for {slots} sessions of 317 positions, not 3" in said[0]
        cache = cache_on_cuda(monkeypatch, "no C compiler", pages * page, said)
        assert cache == f"one of {growing} that grow"
    for why, pages in (("no C compiler", 10), (None, 5)):
        with pytest.raises(UsageError, match="a session of 317 positions"):
            cache_on_cuda(monkeypatch, why, pages * page, said)
