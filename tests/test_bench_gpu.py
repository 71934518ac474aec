"""The bench of CUDA runs from one end to the other, on the CPU with tiny shapes, and says where there is no device."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch

FILE = Path(__file__).parents[1] / "bench" / "gpu.py"


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # the number belongs to the process
    code: int = bench.main()
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bench, monkeypatch) == 2
    assert capsys.readouterr().out.count("\n") == 1
