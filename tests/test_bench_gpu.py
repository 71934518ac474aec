"""The bench of CUDA runs from one end to the other, on the CPU with tiny shapes, and says where there is no device."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

FILE = Path(__file__).parents[1] / "bench" / "gpu.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FILE.parent)
    spec = importlib.util.spec_from_file_location("bench_gpu", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    before = torch.get_num_threads()
    try:
        code: int = bench.main()
    finally:
        torch.set_num_threads(before)  # the number belongs to the process
    return code


@pytest.mark.slow
def test_everything_runs_on_the_cpu(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "HEADS", bench.HEADS[:2])
    assert run(bench, monkeypatch, "--device", "cpu", "--quick") == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["bench"] == "gpu" and found["device"] == "cpu" and found["float32_ids_equal"] == 64
    rows = found["models"]["tiny"]["rows"]
    assert len(rows) == 3 * 6 and {row["form"] for row in rows} == {"recorded", "no graphs", "row-invariant"}
    assert all(row["ms"] >= row["host_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert found["figures_reached"] and all(found["figures_reached"].values())


def test_a_wrong_kernel_or_id_is_noticed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "HEADS", bench.HEADS[:1])
    monkeypatch.setattr(bench, "measure_model", lambda *arguments: {"weight_bytes": 1, "ideal_ms": 1.0, "rows": []})
    monkeypatch.setattr(bench, "same_ids", lambda device, count: 63)
    wrong = [("kernels", 1.0, False)]
    monkeypatch.setattr(bench, "kernel_errors", lambda device, read: iter(wrong))
    assert run(bench, monkeypatch, "--device", "cpu", "--quick") == 1
    reached = json.loads(capsys.readouterr().out.splitlines()[-1])["figures_reached"]
    assert reached == {"kernels, kernels": False, "float32 ids": False}


def test_figures_are_judged_by_the_recorded_passes(bench: ModuleType) -> None:
    def row(form: str, sessions: int, tokens: int, ms: float) -> dict[str, object]:
        return {"form": form, "text": 512, "sessions": sessions, "tokens": tokens, "ms": ms, "ratio": ms / 10}

    rows = [row("recorded", 1, 5, 12.9), row("recorded", 8, 5, 19.3), row("no graphs", 1, 5, 99)]
    found: dict[str, dict[str, object]] = {"7B": {"rows": rows, "rows_agree": True, "waits": False}}
    names = ("passes", "sessions", "rows agree", "no hidden waits")
    assert bench._figures(found) == {f"7B: {name}": True for name in names}
    found["7B"]["waits"] = True
    assert not bench._figures(found)["7B: no hidden waits"]
    rows[1] = row("recorded", 8, 5, 19.5)
    assert not bench._figures(found)["7B: sessions"]
    rows[0] = row("recorded", 1, 5, 13.1)
    assert not bench._figures(found)["7B: passes"]


class Told:
    """A target that says 7 i + 3 behind i, and notes what it is asked; slot 0 alone is kept."""

    info = SimpleNamespace(vocabulary_size=50)

    def __init__(self) -> None:
        self.text: list[int] = []
        self.asked: list[list[int]] = []
        self.cut: list[int] = []

    def greedy(self, batch: list[tuple[int, list[int], int]]) -> list[tuple[int, ...]]:
        self.text += batch[0][1]
        self.asked.append(batch[0][1])
        return [tuple((7 * i + 3) % 50 for i in ids[len(ids) - rows :]) for _, ids, rows in batch]

    def truncate(self, slot: int, length: int) -> None:
        if slot == 0:
            assert length <= len(self.text)
            self.cut.append(len(self.text) - length)
            del self.text[length:]


def test_drafts_are_judged_in_one_pass_and_what_is_wrong_is_taken_back(bench: ModuleType) -> None:
    target = Told()
    found = bench.greedy_ids(target, 30)
    wanted, last = [], 39
    for _ in range(30):
        wanted.append(last := (7 * last + 3) % 50)
    assert found == wanted and target.text == []
    drafts = [ids for ids in target.asked if len(ids) == 5]
    assert len(drafts) > 8 and set(target.cut) >= {0, 1, 2, 3, 4}, "a draft was wrong at each place, and nowhere"


@pytest.mark.parametrize(
    ("error", "hidden"), [(None, False), (RuntimeError("called a synchronizing CUDA operation"), True)]
)
def test_hidden_waits_are_what_torch_raises(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, error: Exception | None, hidden: bool
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run() -> None:
        assert modes == ["error"]
        if error is not None:
            raise error

    assert bench.waits_hidden(run) is hidden and modes == ["error", "default"]
    with pytest.raises(RuntimeError, match="another"):
        bench.waits_hidden(lambda: (_ for _ in ()).throw(RuntimeError("another")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bench, monkeypatch) == 77
    assert capsys.readouterr().out.count("\n") == 1
