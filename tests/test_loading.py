"""Before and while a model is loaded: whether it fits, what the operator is told, how much memory the way takes."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

pytest.importorskip("torch")

from pipesd.cloud import loading, server
from pipesd.cloud.loading import load_target
from pipesd.cloud.memory import check_all_fit, check_fits, need_of, remedy
from pipesd.cloud.progress import LoadingProgress, bytes_text
from pipesd.config import CloudConfig
from pipesd.errors import UsageError
from pipesd.free_memory import Free, all_on_host, available_bytes, container_free, container_limit, free_on_host
from pipesd.model_shape import ModelShape

SHAPE = ModelShape(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, feed_forward=14336, width=128256,
    context=8192, norm_eps=1e-5,
)  # fmt: skip


# --- what a model needs ---


def test_needs_of_a_known_model() -> None:
    parameters = 8.03e9  # Llama 3 8B; the gains are multiplied into the matrices
    assert need_of(SHAPE, 2, 8, packed=True).weights == pytest.approx(2 * parameters, rel=1e-3)
    assert need_of(SHAPE, 4, 8, packed=True).weights == pytest.approx(4 * parameters, rel=1e-3)
    assert need_of(SHAPE, 2, 8, packed=True).cache == 8 * 8192 * 128 * 1024  # 128 kB a position
    assert need_of(SHAPE, 2, 8, packed=True).rotation == 8192 * 64 * 8
    assert need_of(SHAPE, 2, 8, packed=True).largest == 128256 * 4096 * 4


def test_a_tied_output_layer_is_held_twice_only_where_it_is_packed() -> None:
    tied = ModelShape(**(vars(SHAPE) | {"tied": True}))
    table = 128256 * 4096 * 2
    assert need_of(tied, 2, 1, packed=True).weights == need_of(SHAPE, 2, 1, packed=True).weights
    assert need_of(tied, 2, 1, packed=False).weights == need_of(SHAPE, 2, 1, packed=False).weights - table


# --- what is free ---

MEMINFO = "MemTotal:       16315048 kB\nMemFree:          300000 kB\nMemAvailable:    8000000 kB\nBuffers: 1 kB\n"


def test_available_memory() -> None:
    assert available_bytes(MEMINFO) == 8_000_000 * 1024
    assert available_bytes("MemTotal: 5 kB\n") is None and available_bytes("") is None


def put(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    put(tmp_path / "a", memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 1\n")
    put(tmp_path / "a/b", memory__max="1000\n", memory__current="700\n", memory__stat="anon 5\ninactive_file 50\n")
    assert container_free("0::/a/b\n", tmp_path) == 350
    assert container_free("0::/a\n", tmp_path) is None
    put(tmp_path / "a", memory__max="800\n", memory__current="790\n")
    assert container_free("0::/a/b\n", tmp_path) == 11, "a group above bounds it too"
    assert container_free("0::/a/b/c\n", tmp_path) == 11, "the own group is not to be seen"
    assert container_limit("0::/a/b\n", tmp_path) == 800 and container_limit("0::/\n", tmp_path) is None


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    own = "12:cpu,cpuacct:/x\n5:memory:/docker/1\n1:name=systemd:/y\n0::/\n"
    put(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="10\n")
    assert container_free(own, tmp_path) is None
    put(tmp_path / "memory", memory__limit_in_bytes="100\n", memory__stat="total_inactive_file 3\ninactive_file 9\n")
    assert container_free(own, tmp_path) == 93, "in a container, the group itself is mounted at the top"


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::\n", "0::/../../etc\n"])
def test_no_control_groups(tmp_path: Path, own: str) -> None:
    assert container_free(own, tmp_path / "nothing") is None


def test_a_full_group_has_nothing_left(tmp_path: Path) -> None:
    put(tmp_path, memory__max="100\n", memory__current="120\n")
    assert container_free("0::/\n", tmp_path) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine_has_some_memory() -> None:
    free, there = ({each.where: each.bytes for each in found} for found in (free_on_host(), all_on_host()))
    assert free.keys() == there.keys() and "this machine" in free
    assert all(1 << 20 < free[where] <= there[where] for where in free)


def test_the_least_of_what_is_free_decides() -> None:
    free = [Free(10_000_000_000, "this machine"), Free(2_000_000_000, "this container")]
    check_fits("m", 2_000_000_000, 1, free, "")
    check_fits("m", 1 << 60, 1, [], "")
    with pytest.raises(UsageError) as caught:
        check_fits("/m.gguf", 3_210_000_000, 940_000_000, free, "use another machine")
    assert str(caught.value) == (
        "/m.gguf: needs 3.2 GB to load, this container has 2.0 GB free (its sessions take up to 940 MB more); "
        "use another machine"
    )


def test_workers_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_fit("m", 500_000_000, 0, 4, [Free(2_000_000_000, "cuda:0")], "")
    check_all_fit("m", 500_000_000, 0, 4, [], "")
    check_all_fit("m", 500_000_000, 0, 1, [Free(1, "cuda:0")], "what one takes is compared with what is free")
    with pytest.raises(UsageError) as caught:
        check_all_fit("/m.gguf", 600_000_000, 10_000_000, 4, [Free(2_000_000_000, "cuda:0")], "use fewer --workers")
    assert str(caught.value) == (
        "/m.gguf: 4 workers need 2.4 GB, cuda:0 has 2.0 GB in all (their sessions take up to 40 MB more); "
        "use fewer --workers"
    )
    monkeypatch.setattr(loading, "all_on_host", lambda: [Free(200_000_000, "this container")])
    path = write_tiny(tmp_path / "m.gguf")
    load_target(path, "cpu")
    with pytest.raises(UsageError, match="3 workers need 304 MB, this container has 200 MB in all"):
        server.load_target(CloudConfig(model=str(path), device="cpu", workers=3))


def test_what_does_not_fit_is_refused_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    monkeypatch.setattr(loading, "free_on_host", lambda: [Free(50_000_000, "this machine")])
    read: list[int] = []
    with pytest.raises(
        UsageError,
        match=r"needs 101 MB to load, this machine has 50 MB free .*; use a smaller model or another machine",
    ) as told:
        load_target(path, device="cpu", progress=lambda done, _: read.append(done))
    assert read == [] and "\n" not in str(told.value)
    with pytest.raises(UsageError, match=r"; use fewer --workers"):
        load_target(path, device="cpu", copies=2)


@pytest.mark.parametrize(
    ("in_16_bits", "copies", "ways"),
    [
        (9, 1, "--dtype bfloat16, a smaller model"),
        (11, 1, "a smaller model"),
        (None, 1, "a smaller model"),
        (11, 2, "fewer --workers (each loads its own copy), a smaller model"),
    ],
)
def test_only_what_would_help_is_advised(in_16_bits: int | None, copies: int, ways: str) -> None:
    assert remedy(in_16_bits, [Free(10, "this machine")], copies) == f"use {ways} or another machine"


def test_the_16_bits_that_a_device_has_are_advised() -> None:
    assert remedy(9, [Free(10, "cuda:0")], 1, "float16").startswith("use --dtype float16, ")


# --- what the operator is told ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_progress(stream: io.StringIO | None, times: list[float]) -> list[str]:
    said: list[str] = []
    clock = Clock()
    with LoadingProgress("m.gguf", said.append, stream, clock=clock) as progress:
        for i, now in enumerate(times):
            clock.now = 100.0 + now
            progress((i + 1) * 1_000_000, len(times) * 1_000_000)
    return said


@pytest.mark.parametrize("stream", [None, io.StringIO(), Terminal()])
def test_quick_loading_is_silent(stream: io.StringIO | None) -> None:
    assert run_progress(stream, [0.1, 0.5, 0.9]) == []
    assert stream is None or stream.getvalue() == ""


def test_a_log_has_a_line_every_ten_seconds() -> None:
    said = run_progress(io.StringIO(), [0.5, 1.5, 5.0, 11.0, 11.6, 30.0])
    assert said == [f"loading m.gguf: {part}" for part in ("66 % of 6 MB", "100 % of 6 MB")]


def test_a_terminal_has_one_line_that_is_wiped() -> None:
    terminal = Terminal()
    assert run_progress(terminal, [1.5, 1.6, 2.0]) == []
    shown = "\rloading m.gguf: 33 % of 3 MB\rloading m.gguf: 100 % of 3 MB"
    assert terminal.getvalue() == f"{shown}\r{' ' * 29}\r"


def test_a_terminal_that_is_gone_does_not_end_the_loading() -> None:
    class Gone(Terminal):
        def flush(self) -> None:
            raise OSError("gone")

    assert run_progress(Gone(), [1.5, 2.5, 3.5]) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (12_345, "12 kB"), (999_950, "1 MB"), (14_234_000_000, "14.2 GB")],
)
def test_bytes_for_persons(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_the_first_line_says_what_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    with caplog.at_level(logging.INFO, "pipesd.cloud"):
        load_target(path, device="cpu")
    assert caplog.messages == [f"loading {path}: 558 kB from 1 file"]


# --- the memory of the way ---

PEAK = """
import sys
from pathlib import Path
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
import torch, gguf, numpy
from pipesd.cloud.loading import load_target
load_target(sys.argv[1], "cpu")  # what kernels and libraries take the first time
before = peak()
target = load_target(sys.argv[2], "cpu", sys.argv[3], slots=1)
print(before, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("stored", "dtype"), [("q8_0", "float32"), ("float16", "bfloat16")])
def test_loading_takes_the_weights_and_one_matrix(tmp_path: Path, stored: str, dtype: str) -> None:
    changes: dict[str, Any] = {"hidden": 1024, "heads": 16, "kv_heads": 8, "feed_forward": 4096, "layers": 5}
    path = write_tiny(tmp_path / "large.gguf", dtype=stored, n_vocab=8192, n_real=512, **changes)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(write_tiny(tmp_path / "tiny.gguf")), str(path), dtype],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    before, after = map(int, done.stdout.split())
    shape = loading.open_checkpoint(path).shape
    need = need_of(shape, 4 if dtype == "float32" else 2, 1, packed=True)
    assert need.weights * 0.8 < after - before < need.loading
    assert after - before + path.stat().st_size > need.loading, "a mapping that stays would be seen"
