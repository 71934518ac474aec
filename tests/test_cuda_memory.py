"""What a CUDA device has room for, and what it can compute, is found out before weights are read. No device is needed:
what torch says of one is put in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import write_tiny

pytest.importorskip("torch")

import torch

import pipesd.cloud
from pipesd.cloud import loading, placing
from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.device_sampling import ROWS
from pipesd.cloud.loading import load_target
from pipesd.cloud.memory import CONTEXT_BYTES, need_of
from pipesd.cloud.paged_cache import session_bytes
from pipesd.cloud.placing import chosen_dtype, why_no_kernels
from pipesd.cloud.steps import PlainSteps
from pipesd.cloud.target import LIBRARY_BYTES, MOST_ROWS, working_bytes
from pipesd.errors import UsageError
from pipesd.model_shape import CacheShape, ModelShape

CUDA = torch.device("cuda")
GB = 10**9
SHAPE = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5)
IN_PLACE = need_of(SHAPE, 2, 1, packed=False).in_place
WORKING = working_bytes(SHAPE, torch.bfloat16)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """One CUDA device with `free` bytes of `there`, on which the kernels run."""
    found = SimpleNamespace(free=24 * GB, there=24 * GB, capability=(9, 0), why=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found.free, found.there))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(loading, "why_no_kernels", lambda device, dtype, shape: found.why)
    monkeypatch.setattr(loading, "steps_for", lambda device: PlainSteps())
    yield found


def room(copies: int) -> int:
    found = loading._room(SHAPE, CUDA, torch.bfloat16, copies)
    assert found is not None
    return found


# --- room ---


def test_one_worker_gets_what_is_free_but_what_passes_take(memory: SimpleNamespace) -> None:
    memory.free = 8 * GB
    assert room(1) == 8 * GB - WORKING
    assert loading._room(SHAPE, torch.device("cpu"), torch.bfloat16, 1) is None


@pytest.mark.parametrize("order", [*permutations(range(4), 4)][::5])
def test_all_workers_fit_whichever_loads_first(memory: SimpleNamespace, order: tuple[int, ...]) -> None:
    """Each of four takes its weights at one time and its cache at a later one, in any order."""
    memory.there, memory.free = 140 * GB, 140 * GB - 4 * CONTEXT_BYTES
    rooms = []
    for worker in order:
        memory.free -= IN_PLACE
        if worker % 2:
            rooms.append(room(4))
            memory.free -= rooms[-1] + WORKING
    for _ in range(2):
        rooms.append(room(4))
        memory.free -= rooms[-1] + WORKING
    assert memory.free >= 0 and len(set(rooms)) == 1
    assert rooms[0] > 14 * GB, "and little is left over"


def test_a_worker_that_finds_less_takes_less(memory: SimpleNamespace) -> None:
    memory.there, memory.free = 140 * GB, 10 * GB
    assert room(2) == 10 * GB - WORKING


def test_what_passes_take_follows_from_the_shape() -> None:
    assert LIBRARY_BYTES + 0.9 * GB < WORKING < 2 * GB
    narrow = working_bytes(replace(SHAPE, width=0), torch.bfloat16)
    logits = MOST_ROWS * SHAPE.width * 4  # of one piece: as computed, in float32, some of them for the host
    assert 2.5 * logits + ROWS * SHAPE.width * 50 < WORKING - narrow < 6 * logits, "few rows are drawn at a time"
    for longer in ({"width": 200_000}, {"hidden": 8192}, {"feed_forward": 30_000}, {"heads": 64}):
        assert working_bytes(replace(SHAPE, **longer), torch.bfloat16) > WORKING  # type: ignore[arg-type]
    assert working_bytes(replace(SHAPE, context=200), torch.bfloat16) < WORKING, "fewer splits"
    assert working_bytes(SHAPE, torch.float32) > WORKING


# --- before a weight is read ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m.gguf", context=1 << 16)


def load(path: Path, said: list[str] | None = None, **options: object) -> None:
    def told(done: int, _: int) -> None:
        raise AssertionError("a weight was read")

    heard: Callable[[str], None] = ([] if said is None else said).append
    load_target(path, device="cuda", progress=told, say=heard, **options)  # type: ignore[arg-type]


def test_a_session_that_does_not_fit_is_refused_with_the_longest_that_does(
    memory: SimpleNamespace, model: Path
) -> None:
    shape = open_checkpoint(model).shape
    need = need_of(shape, 4, 1, packed=False).in_place + working_bytes(shape, torch.float32)
    memory.free = memory.there = need + session_bytes(shape.cache(shape.context), 1, torch.float32) // 2
    line = r"a session of 65536 positions takes 34 MB .* has 17 MB .*--context \d+$"
    with pytest.raises(UsageError, match=line) as e:
        load(model)
    assert "\n" not in str(e.value)
    longest = int(str(e.value).rpartition(" ")[2])
    assert 32768 < longest < 60000, "a shorter text has fewer rotations too"
    with pytest.raises(UsageError, match=f"--context {longest}"):
        load(model, context=longest + 1)
    with pytest.raises(AssertionError, match="a weight was read"):
        load(model, context=longest)
    memory.free = need // 2
    with pytest.raises(UsageError, match="use a smaller model or a larger device"):
        load(model)


def test_where_caches_grow_there_must_be_room_for_two(memory: SimpleNamespace, model: Path) -> None:
    """What is admitted before weights are read gets a cache behind them."""
    memory.why = "no C compiler"
    shape = open_checkpoint(model).shape
    need = need_of(shape, 4, 1, packed=False).in_place + working_bytes(shape, torch.float32)
    one = session_bytes(shape.cache(shape.context), 1, torch.float32)
    memory.free = memory.there = need + 2 * one
    with pytest.raises(AssertionError, match="a weight was read"):
        load(model)
    memory.free -= one // 2
    with pytest.raises(
        UsageError, match=r"takes 67 MB of keys and values, twice while it grows, .* --context \d+$"
    ) as e:
        load(model)
    longest = int(str(e.value).rpartition(" ")[2])
    assert 32768 < longest < 60000
    with pytest.raises(AssertionError, match="a weight was read"):
        load(model, context=longest)


def test_of_a_shared_device_the_share_decides(memory: SimpleNamespace, model: Path) -> None:
    memory.free = memory.there = 2 * (CONTEXT_BYTES + LIBRARY_BYTES)  # for two no more than that
    with pytest.raises(AssertionError, match="a weight was read"):
        load(model, copies=1, context=100)
    with pytest.raises(UsageError, match="a session of 100 positions"):
        load(model, copies=2, context=100)


def test_the_cache_gets_the_room_of_its_share(
    memory: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def new_cache(*_: object, room: int, **__: object) -> object:
        raise Asked(room)

    monkeypatch.setattr(loading, "_load", lambda *_: None)
    monkeypatch.setattr(loading, "new_cache", new_cache)
    shape = open_checkpoint(model).shape
    for copies in (1, 3):
        with pytest.raises(Asked) as e:
            load(model, copies=copies)
        assert e.value.args[0] == loading._room(shape, CUDA, torch.float32, copies)


def test_16_bits_are_advised_where_they_would_fit(memory: SimpleNamespace, model: Path) -> None:
    """In the name that the device has for them, and for as many workers as there are."""
    shape = open_checkpoint(model).shape
    whole, half = (need_of(shape, size, 1, packed=False).in_place for size in (4, 2))
    memory.free = whole - 1
    for capability, name in (((9, 0), "bfloat16"), ((7, 5), "float16")):
        memory.capability = capability
        with pytest.raises(UsageError, match=f"use --dtype {name}, a smaller model or another machine$"):
            load(model)
    memory.free = 24 * GB
    for there, ways in ((3 * half, "use --dtype float16, fewer --workers "), (3 * half - 1, "use fewer --workers ")):
        memory.there = there
        with pytest.raises(UsageError, match=f"3 workers need .* {ways}"):
            load(model, copies=3)


def test_a_device_that_fills_up_while_loading_is_one_line(
    memory: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        memory.free = 3_000_000
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")

    monkeypatch.setattr(loading, "_load", full)
    with pytest.raises(UsageError, match=r"m\.gguf: cuda has 3 MB left, too little to go on loading; ") as e:
        load(model)
    assert "\n" not in str(e.value) and str(e.value).endswith("or ask for a smaller --context")
    memory.free = 24 * GB
    with pytest.raises(UsageError, match=r"or ask for a smaller --context or fewer --workers$"):
        load(model, copies=2)


def test_why_no_kernels_run_is_said_once_before_weights_are_read(memory: SimpleNamespace, model: Path) -> None:
    memory.why = "triton's kernels do not run here (Failed to find C compiler)"
    said: list[str] = []
    with pytest.raises(AssertionError, match="a weight was read"):
        load(model, said)
    assert len(said) == 1 and said[0] == f"{memory.why}: passes on cuda are not recorded, and slower"


# --- precision ---


def test_devices_without_bfloat16_get_float16(memory: SimpleNamespace) -> None:
    said: list[str] = []
    memory.capability = (8, 0)
    assert chosen_dtype("auto", "bfloat16", CUDA, said.append) == "bfloat16"
    assert chosen_dtype("bfloat16", "float32", CUDA, said.append) == "bfloat16" and not said
    memory.capability = (7, 5)
    assert chosen_dtype("auto", "bfloat16", CUDA, said.append) == "float16"
    assert len(said) == 1 and "no bfloat16 arithmetic: the model runs in float16" in said[0]
    assert chosen_dtype("auto", "float32", CUDA, said.append) == "float32"
    assert chosen_dtype("float16", "bfloat16", CUDA, said.append) == "float16" and len(said) == 1
    with pytest.raises(UsageError, match="dtype bfloat16: cuda has no arithmetic for it; use float16 or float32"):
        chosen_dtype("bfloat16", "float32", CUDA, said.append)
    assert chosen_dtype("bfloat16", "float32", torch.device("cpu"), said.append) == "bfloat16"


def test_loading_says_that_it_takes_float16(memory: SimpleNamespace, tmp_path: Path) -> None:
    memory.capability = (7, 0)
    said: list[str] = []
    with pytest.raises(AssertionError, match="a weight was read"):
        load(write_tiny(tmp_path / "b.gguf", dtype="bfloat16"), said)
    assert len(said) == 1 and "float16" in said[0]


# --- kernels ---


class OfTriton(Exception):
    pass


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What each module's trial is `asked` and what it raises (`faults`); a device is not touched."""
    faults: dict[str, Exception | None] = {"paged_kernels": None, "step_kernels": None}
    found = SimpleNamespace(faults=faults, asked=[], capability=(7, 0))

    def module(name: str) -> SimpleNamespace:
        def try_out(*given: object) -> None:
            found.asked.append(given)
            if (fault := faults[name]) is not None:
                raise fault

        return SimpleNamespace(try_out=try_out, TritonError=OfTriton)

    for name in faults:
        monkeypatch.setitem(sys.modules, f"pipesd.cloud.{name}", module(name))
        monkeypatch.setattr(pipesd.cloud, name, sys.modules[f"pipesd.cloud.{name}"], raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    placing._tried.cache_clear()
    yield found
    placing._tried.cache_clear()


@pytest.mark.parametrize("name", ["paged_kernels", "step_kernels"])
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (RuntimeError("Failed to find C compiler.\nPlease specify"), r"\(Failed to find C compiler\.; they want"),
        (OfTriton("\nat 3:5"), r"\(at 3:5; "),
        (PermissionError(13, "Permission denied", "/.triton"), "Permission denied"),
        (OSError(), r"\(OSError; "),
    ],
)
def test_kernels_that_do_not_run_are_a_reason(tried: SimpleNamespace, name: str, fault: Exception, line: str) -> None:
    assert why_no_kernels(CUDA) is None
    placing._tried.cache_clear()
    tried.faults[name] = fault
    why = why_no_kernels(CUDA)
    assert why is not None and "\n" not in why
    with pytest.raises(ValueError, match=f"^triton's kernels do not run here .*{line}"):
        raise ValueError(why)


def test_without_triton_there_are_none(tried: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipesd.cloud, "step_kernels")
    monkeypatch.setitem(sys.modules, "pipesd.cloud.step_kernels", None)
    assert str(why_no_kernels(CUDA)).startswith("triton is not installed (")


def test_a_device_that_triton_does_not_compile_for_is_not_tried(tried: SimpleNamespace) -> None:
    tried.capability = (6, 1)
    assert why_no_kernels(CUDA) == "triton's kernels want compute capability 7.0, cuda has 6.1"
    assert not tried.asked


def test_kernels_are_tried_once_as_they_will_be_served(tried: SimpleNamespace) -> None:
    shape = SHAPE.cache(8192)
    for windows in ((), (100,) * 32):
        assert why_no_kernels(CUDA, torch.bfloat16, replace(shape, windows=windows)) is None
    assert tried.asked == [(CUDA, torch.bfloat16, replace(shape, layers=1)), (CUDA, torch.bfloat16)]


@pytest.mark.parametrize("shape", [SHAPE.cache(8192), CacheShape(1, 1, 1, 16, 2)])
def test_each_module_has_a_trial_that_runs(shape: CacheShape) -> None:
    pytest.importorskip("triton")
    from pipesd.cloud import paged_kernels, step_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paged_kernels.try_out(device, torch.float32, shape)
    step_kernels.try_out(device, torch.float32)
