"""The torch target: rows keep their bits whatever shares the pass, sessions do not disturb each other, rollback works.

The comparisons of bits are themselves tried: they must notice one weight, one cached row or one position that is off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny import TinySpec, write_tiny

pytest.importorskip("torch")

import torch

from pipesd.cloud import huge_pages, pass_batches
from pipesd.cloud import loading as loading_module
from pipesd.cloud import model as model_module
from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.kv_cache import BUCKET, TILE
from pipesd.cloud.loading import load_target, rows_agree
from pipesd.cloud.target import MOST_ROWS, TorchTarget

DTYPES = ("float32", "bfloat16")
LENGTH = 300  # more than one internal cut, several buckets of keys
assert LENGTH > MOST_ROWS > BUCKET > TILE


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(params=DTYPES)
def target(request: pytest.FixtureRequest, tiny_file: Path) -> TorchTarget:
    return load_target(tiny_file, device="cpu", dtype=request.param)


@pytest.fixture(scope="module", params=DTYPES)
def demo_target(request: pytest.FixtureRequest, demo_pair: tuple[Path, Path]) -> TorchTarget:
    return load_target(demo_pair[1], device="cpu", dtype=request.param)


def some_ids(target: TorchTarget, count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(target.vocabulary.size, size=count).tolist()
    return drawn


def alone(target: TorchTarget, ids: Sequence[int], slot: int = 0) -> np.ndarray:
    """Logits behind every id, from one prefill of an empty slot."""
    target.truncate(slot, 0)
    logits = target.forward([(slot, ids, len(ids))])[0]
    target.truncate(slot, 0)
    return logits


def in_pieces(target: TorchTarget, ids: Sequence[int], sizes: Iterator[int], slot: int = 0) -> np.ndarray:
    """The same logits from passes of these sizes."""
    target.truncate(slot, 0)
    rows = []
    start = 0
    while start < len(ids):
        piece = ids[start : start + next(sizes)]
        rows.append(target.forward([(slot, piece, len(piece))])[0])
        start += len(piece)
    target.truncate(slot, 0)
    return np.concatenate(rows)


def constant(size: int) -> Iterator[int]:
    while True:
        yield size


def drawn(low: int, high: int, seed: int) -> Iterator[int]:
    draw = np.random.default_rng(seed)
    while True:
        yield int(draw.integers(low, high + 1))


# --- the bits of a row ---


def test_passes_of_1_to_32_rows_have_the_same_bits(target: TorchTarget) -> None:
    ids = some_ids(target, LENGTH)
    whole = alone(target, ids)
    assert target.invariant and whole.shape == (LENGTH, 512) and whole.dtype == np.float32
    for size in range(1, 33):
        assert np.array_equal(in_pieces(target, ids, constant(size)), whole), f"passes of {size}"


@pytest.mark.parametrize("seed", range(4))
def test_a_prefill_in_any_pieces_has_the_same_bits(target: TorchTarget, seed: int) -> None:
    ids = some_ids(target, LENGTH)
    assert np.array_equal(in_pieces(target, ids, drawn(1, 100, seed)), alone(target, ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_matrices_keep_the_bits_of_a_lone_row(tmp_path: Path, dtype: str) -> None:
    spec = TinySpec(hidden=576, heads=9, kv_heads=3, feed_forward=1536, layers=1)  # kernels change with the width
    target = load_target(write_tiny(tmp_path / "m.gguf", spec), device="cpu", dtype=dtype)
    ids = some_ids(target, 40)
    whole = alone(target, ids)
    for size in (1, 2, 3, 5, 8):
        assert np.array_equal(in_pieces(target, ids, constant(size)), whole), f"passes of {size}"


def wander(target: TorchTarget, draw: np.random.Generator, rounds: int, start: int, most: int) -> None:
    """Sessions that share passes, accept different numbers and roll back; every row against that session alone."""
    sessions = range(4)
    texts = {slot: some_ids(target, start + 7 * slot, slot) for slot in sessions}
    target.forward([(slot, ids, 0) for slot, ids in texts.items()])
    for _ in range(rounds):
        drafts = {
            slot: draw.integers(target.vocabulary.size, size=draw.integers(1, most + 1)).tolist() for slot in sessions
        }
        order = draw.permutation(len(sessions))[: draw.integers(1, len(sessions) + 1)].tolist()
        rows = target.forward([(slot, drafts[slot], len(drafts[slot])) for slot in order])
        for slot, got in zip(order, rows, strict=True):
            whole = alone(target, texts[slot] + drafts[slot], slot=7)
            assert np.array_equal(got, whole[len(texts[slot]) :])
            accepted = int(draw.integers(0, len(drafts[slot]) + 1))  # 0, some or all of them
            texts[slot] = texts[slot] + drafts[slot][:accepted]
            target.truncate(slot, len(texts[slot]))
            assert target.length(slot) == len(texts[slot])
    for slot in sessions:
        target.truncate(slot, 0)


def test_sessions_that_share_passes_have_the_bits_of_each_alone(target: TorchTarget) -> None:
    wander(target, np.random.default_rng(5), rounds=25, start=50, most=12)


@pytest.mark.model
@pytest.mark.slow
def test_demo_model_keeps_its_bits(demo_target: TorchTarget) -> None:
    ids = some_ids(demo_target, 140)
    whole = alone(demo_target, ids)
    for size in range(1, 33):
        demo_target.forward([(0, ids[:100], 0)])
        rows = demo_target.forward([(0, ids[100 : 100 + size], size)])[0]
        assert np.array_equal(rows, whole[100 : 100 + size]), f"a pass of {size}"
        demo_target.truncate(0, 0)
    for seed in range(3):
        assert np.array_equal(in_pieces(demo_target, ids, drawn(1, 70, seed)), whole)
    wander(demo_target, np.random.default_rng(3), rounds=4, start=55, most=9)


def test_greedy_takes_the_arg_max_of_the_same_rows(target: TorchTarget) -> None:
    ids = some_ids(target, LENGTH)
    whole = alone(target, ids).argmax(axis=1).tolist()
    start = MOST_ROWS - 40  # the first entry is cut, within the rows that are wanted of it
    assert target.greedy([(0, ids, LENGTH - start), (1, ids[:20], 1), (2, [], 0), (3, ids[:3], 0)]) == [
        tuple(whole[start:]),
        (whole[19],),
        (),
        (),
    ]
    assert target.greedy([(4, ids, 5)]) == [tuple(whole[-5:])]
    assert [target.length(slot) for slot in range(5)] == [LENGTH, 20, 0, 3, LENGTH]


def test_a_text_of_the_target_alone_is_the_same_with_drafts_of_any_length(target: TorchTarget) -> None:
    prompt, count = some_ids(target, 9), 60
    ids = list(prompt)
    found = target.greedy([(0, ids, 1)])[0]
    while len(ids) < len(prompt) + count:
        ids += found
        found = target.greedy([(0, found, 1)])[0]
    target.truncate(0, 0)
    for length in range(1, 9):
        for slot, wrong in ((1, 0), (2, 3)):  # drafts that are right, and drafts that are wrong from the third token on
            text = list(prompt)
            target.greedy([(slot, text[:-1], 0)])
            while len(text) < len(prompt) + count:
                draft = ids[len(text) : len(text) + length]
                draft = draft[:2] + [i ^ wrong for i in draft[2:]]
                chosen = target.greedy([(slot, text[-1:] + draft, len(draft) + 1)])[0]
                right = next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
                text += chosen[: right + 1]
                target.truncate(slot, len(text) - 1)
            assert text[: len(ids)] == ids[: len(text)]
            target.truncate(slot, 0)


# --- the comparisons notice what is off ---


def disturb_position(target: TorchTarget) -> None:
    with torch.inference_mode():
        target._decoder.rotation[70] *= torch.polar(torch.ones(()), torch.tensor(0.01))


def disturb_cached_row(target: TorchTarget) -> None:
    with torch.inference_mode():
        target._cache._slots[0].data[1, 3, 70] *= 1.01  # layer 1, a head's values


@pytest.mark.parametrize("disturb", [disturb_position, disturb_cached_row])
def test_comparison_notices_a_disturbed(target: TorchTarget, disturb: Callable[[TorchTarget], None]) -> None:
    ids = some_ids(target, 90)
    whole = alone(target, ids)
    target.forward([(0, ids[:70], 0)])
    target.forward([(0, ids[70:80], 0)])
    if disturb is disturb_position:  # seen by what is at position 70 only
        target.truncate(0, 70)
    disturb(target)
    end = target.length(0)
    rows = target.forward([(0, ids[end:], len(ids) - end)])[0]
    assert not np.array_equal(rows, whole[end:])
    assert np.abs(rows - whole[end:]).max() < 1, "a small disturbance, so that a coarse comparison would not see it"


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparison_notices_a_disturbed_weight(tiny_file: Path, tmp_path: Path, dtype: str) -> None:
    import gguf

    tensor = next(t for t in gguf.GGUFReader(tiny_file).tensors if t.name == "blk.1.ffn_down.weight")
    data = bytearray(tiny_file.read_bytes())
    place = slice(int(tensor.data_offset) + 400, int(tensor.data_offset) + 404)
    weight = np.frombuffer(data[place], np.float32)[0]
    data[place] = np.float32(weight * 1.02).tobytes()
    (tmp_path / "other.gguf").write_bytes(data)
    ours = load_target(tiny_file, device="cpu", dtype=dtype)
    other = load_target(tmp_path / "other.gguf", device="cpu", dtype=dtype)
    ids = some_ids(ours, 90)
    whole, disturbed = alone(ours, ids), in_pieces(other, ids, constant(7))
    assert not np.array_equal(whole, disturbed) and np.abs(whole - disturbed).max() < 0.5


class UnequalLinear(model_module.PlainLinear):
    """A matrix whose rows depend on their number in the last bits, as MKL's do."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().__call__(x)
        return y * (1 + 2**-7) if x.shape[0] == 5 else y


def test_loading_warns_where_rows_do_not_agree(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "PackedLinear", UnequalLinear)
    said: list[str] = []
    target = load_target(tiny_file, device="cpu", say=said.append)
    assert not target.invariant
    assert len(said) == 1 and said[0].startswith("WARNING: on this CPU")


def test_loading_says_nothing_where_all_is_well(tiny_file: Path) -> None:
    said: list[str] = []
    assert load_target(tiny_file, device="cpu", say=said.append).invariant and said == []


@pytest.mark.parametrize("context", [2, 5, 13, 63, 64, 65, 512])
def test_the_check_of_rows_fits_any_context(tmp_path: Path, context: int) -> None:
    target = load_target(write_tiny(tmp_path / "m.gguf", context=context), device="cpu")
    assert rows_agree(target._decoder)


# --- the linear layers ---


class MissingPacking:
    def __init__(self, _: torch.Tensor) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


class WrongPacking(model_module.PlainLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().__call__(x)
        return y + 1


@pytest.mark.parametrize("broken", [MissingPacking, WrongPacking, UnequalLinear])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_packed_layers_passes_are_slower_but_as_exact(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch, broken: type, dtype: str
) -> None:
    monkeypatch.setattr(model_module, "PackedLinear", broken)
    said: list[str] = []
    target = load_target(tiny_file, device="cpu", dtype=dtype, say=said.append)
    assert len(said) == 1 and "oneDNN's packed linear layers do not work here" in said[0] and "\n" not in said[0]
    assert target.invariant
    ids = some_ids(target, 80)
    whole = alone(target, ids)
    assert np.array_equal(in_pieces(target, ids, drawn(1, 20, 1)), whole)
    monkeypatch.undo()
    tolerance = 1e-3 if dtype == "float32" else 1.0
    np.testing.assert_allclose(alone(load_target(tiny_file, device="cpu", dtype=dtype), ids), whole, atol=tolerance)


def resident_kb(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_huge_pages_leave_contents_as_they_are() -> None:
    values = torch.arange(8 << 20)
    before = resident_kb("AnonHugePages") if sys.platform.startswith("linux") else 0
    moved = huge_pages.gather([(values.data_ptr(), values.nbytes), (values.data_ptr(), 10)])
    assert 0 <= moved <= values.nbytes + 2 * huge_pages.HUGE_PAGE_BYTES
    assert torch.equal(values, torch.arange(8 << 20))
    if moved:
        assert resident_kb("AnonHugePages") >= before + (moved >> 11)  # at least half of it


def test_huge_pages_are_not_asked_for_where_they_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(1 << 20)
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "enabled")
    assert huge_pages.gather([(values.data_ptr(), values.nbytes)]) == 0
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert huge_pages.gather([(values.data_ptr(), values.nbytes)]) == 0


@pytest.mark.parametrize("options", [{"exact": False}, {"threads": 2}])
def test_what_is_not_exact_does_not_say_so_but_is_close(tiny_file: Path, options: dict[str, int]) -> None:
    exact = load_target(tiny_file, device="cpu")
    fast = load_target(tiny_file, device="cpu", **options)  # type: ignore[arg-type]
    assert exact.invariant and not fast.invariant
    ids = some_ids(exact, 70)
    whole = alone(exact, ids)
    for size in (3, 16, 70):
        np.testing.assert_allclose(in_pieces(fast, ids, constant(size)), whole, atol=1e-3)
    fast.forward([(0, ids[:40], 0), (1, ids[:3], 0)])
    mixed = fast.forward([(0, ids[40:45], 5), (1, ids[3:4], 1), (2, ids[:9], 2)])
    for rows, wanted in zip(mixed, (whole[40:45], whole[3:4], whole[7:9]), strict=True):
        np.testing.assert_allclose(rows, wanted, atol=1e-3)


# --- beside an independent implementation ---


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec(),
        TinySpec(tied=True, heads=4, kv_heads=1, rope_divisors=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)),
        TinySpec(layers=3, hidden=96, heads=6, kv_heads=3, feed_forward=100, n_vocab=301),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, spec: TinySpec) -> None:
    pytest.importorskip("transformers")
    from bench.target import transformers_model

    path = write_tiny(tmp_path / "m.gguf", spec)
    target = load_target(path, device="cpu")
    ids = some_ids(target, 200)
    with torch.inference_mode():
        wanted = transformers_model(open_checkpoint(path))(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(in_pieces(target, ids, constant(50)), wanted, atol=5e-4, rtol=0)


def test_rotary_frequencies_are_divided_as_the_file_says(tiny_file: Path, tmp_path: Path) -> None:
    linear = (("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0))
    specs = (TinySpec(extra=linear), TinySpec(rope_divisors=(4.0,) * 8), TinySpec(rope_divisors=(4.0,) * 7 + (5.0,)))
    ids = list(range(100))
    scaled, divided, other = (
        alone(load_target(write_tiny(tmp_path / f"{i}.gguf", spec), device="cpu"), ids) for i, spec in enumerate(specs)
    )
    plain = alone(load_target(tiny_file, device="cpu"), ids)
    np.testing.assert_allclose(scaled, divided, atol=1e-3)
    assert np.abs(scaled - plain).max() > 0.1 and np.abs(other - divided).max() > 1e-3


@pytest.mark.model
@pytest.mark.slow
def test_demo_logits_are_those_of_transformers(demo_pair: tuple[Path, Path]) -> None:
    pytest.importorskip("transformers")
    from bench.target import TEXT, encode, transformers_model

    target = load_target(demo_pair[1], device="cpu")
    ids = encode(target.vocabulary, TEXT)
    with torch.inference_mode():
        wanted = transformers_model(open_checkpoint(demo_pair[1]))(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(alone(target, ids), wanted, atol=5e-4, rtol=0)


# --- rows that are not finite ---


def test_arg_max_of_odd_rows() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        [0.0, 2.0, 2.0],
        [nan, 1.0, 2.0],
        [0.0, inf, 1.0],
        [-inf, -1.0, -inf],
        [nan] * 3,
        [-inf] * 3,
        [0.0, 1.0, nan],
    ]
    assert pass_batches.arg_max(torch.tensor(rows)).tolist() == [1, -1, -1, 1, -1, -1, -1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_session_whose_rows_are_not_finite_harms_no_other(target: TorchTarget, value: float) -> None:
    ids = some_ids(target, 60)
    whole = alone(target, ids)
    for slot in range(3):
        target.forward([(slot, ids[:50], 0)])
    with torch.inference_mode():
        target._cache._slots[1].data[0, 3, 20, 5] = value
    logits = target.forward([(slot, ids[50:55], 5) for slot in range(3)])
    assert not np.isfinite(logits[1]).all()
    assert np.array_equal(logits[0], whole[50:55]) and np.array_equal(logits[2], whole[50:55])
    chosen = target.greedy([(slot, ids[55:58], 3) for slot in range(3)])
    assert chosen[1] == (-1, -1, -1)
    assert chosen[0] == chosen[2] == tuple(whole[55:58].argmax(axis=1).tolist())
    target.truncate(1, 20)  # behind the bad row and all that it reached
    for start in range(20, 60, 5):  # each reads keys up to the end of the bucket, used before or not
        assert np.array_equal(target.forward([(1, ids[start : start + 5], 5)])[0], whole[start : start + 5])


# --- slots ---


def test_rollback_leaves_what_the_ids_alone_give(target: TorchTarget) -> None:
    draw = np.random.default_rng(2)
    ids: list[int] = []
    for _ in range(30):
        new = some_ids(target, int(draw.integers(1, 20)), int(draw.integers(1 << 30)))
        last = target.forward([(0, new, 1)])[0]
        ids += new
        assert np.array_equal(last, target.forward([(1, ids, 1)])[0])
        target.truncate(1, 0)
        ids = ids[: int(draw.integers(len(ids) // 2, len(ids) + 1))]
        target.truncate(0, len(ids))


def test_memory_follows_use_and_comes_back(tiny_file: Path) -> None:
    target = load_target(tiny_file, device="cpu", slots=5)
    assert target.memory_bytes == 0
    ids = some_ids(target, 512)
    target.greedy([(0, ids[:10], 1)])
    one = target.memory_bytes
    assert 0 < one <= 512 // 2 * 2 * 2 * 2 * 16 * 4, "a chunk of positions, not the whole context"
    target.greedy([(slot, ids[:10], 1) for slot in (1, 2, 3, 4)])
    assert target.memory_bytes == 5 * one
    target.greedy([(0, ids[10:], 1)])
    assert one < target.memory_bytes - 4 * one <= 2 * one and target.length(0) == 512
    for slot in range(5):
        target.truncate(slot, 0)
    assert target.memory_bytes == 0 and target.length(0) == 0


@pytest.mark.parametrize("context", [2, 63, 65, 300, 512])
def test_a_context_is_filled_to_its_end(tiny_file: Path, context: int) -> None:
    target = load_target(tiny_file, device="cpu", context=context)
    assert target.info.context == context
    ids = some_ids(target, context)
    whole = alone(target, ids)
    target.forward([(0, ids[:-1], 0)])
    assert np.array_equal(target.forward([(0, ids[-1:], 1)])[0], whole[-1:])
    with pytest.raises(AssertionError, match=f"{context + 1} positions in a context of {context}"):
        target.forward([(0, [1], 1)])


def test_wrong_slots_are_our_own_mistake(target: TorchTarget) -> None:
    for call in (
        lambda: target.length(8),
        lambda: target.truncate(-1, 0),
        lambda: target.truncate(0, 1),
        lambda: target.greedy([(0, [1], 1), (0, [2], 1)]),
        lambda: target.greedy([(0, [1], 2)]),
    ):
        with pytest.raises(AssertionError):
            call()


# --- what is said of the model, and the process around it ---


def test_info_tells_what_was_loaded(target: TorchTarget, tiny_file: Path) -> None:
    info = target.info
    assert (info.name, info.vocabulary_size, info.context, info.end_ids) == ("tiny", 512, 512, (256, 258))
    assert info.device == "cpu" and info.dtype in DTYPES and target.slots == 8
    assert info.fingerprint == open_checkpoint(tiny_file).fingerprint(info.dtype, "cpu")
    assert target.pass_ms >= 1


def test_padding_ids_are_part_of_the_width_but_never_chosen(tmp_path: Path) -> None:
    target = load_target(write_tiny(tmp_path / "m.gguf", n_vocab=512, n_real=470), device="cpu")
    assert (target.vocabulary.size, target.vocabulary.real_size, target.info.vocabulary_size) == (512, 470, 512)
    ids = some_ids(target, 100)  # padding ids among them: they can be fed
    assert max(ids) >= 470 and alone(target, ids).shape == (100, 512)
    assert max(target.greedy([(0, ids, 100)])[0]) < 470


def test_a_pass_leaves_torchs_threads_as_they_were(tiny_file: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        target = load_target(tiny_file, device="cpu")
        seen: list[int] = []

        def head(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return torch.zeros(len(x), 512)

        target._decoder.head = head  # type: ignore[assignment]
        target.greedy([(0, [1, 2], 1)])
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_time_of_the_longest_pass_is_kept(target: TorchTarget) -> None:
    target.greedy([(0, some_ids(target, 400), 1)])
    longest = target.pass_ms
    target.greedy([(0, [1], 1)])
    assert target.pass_ms >= longest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-3), ("bfloat16", 1.0), ("float16", 0.2)])
def test_cuda_gives_close_logits(tiny_file: Path, dtype: str, tolerance: float) -> None:
    cpu, cuda = load_target(tiny_file, device="cpu"), load_target(tiny_file, device="cuda", dtype=dtype)
    assert cuda.info.device.startswith("cuda") and not cuda.invariant
    ids = some_ids(cpu, LENGTH)
    whole = alone(cpu, ids)
    for size in (1, 5, 64, LENGTH):
        np.testing.assert_allclose(in_pieces(cuda, ids, constant(size)), whole, atol=tolerance)
    cuda.forward([(0, ids[:40], 0), (1, ids[:3], 0)])
    mixed = cuda.forward([(0, ids[40:45], 5), (1, ids[3:4], 1)])
    np.testing.assert_allclose(np.concatenate(mixed), np.concatenate([whole[40:45], whole[3:4]]), atol=tolerance)
    for slot in (0, 1):
        cuda.truncate(slot, 0)
    assert cuda.memory_bytes == 0
