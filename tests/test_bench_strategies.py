"""The benches of whole strategies: that they run, say what they are, and end in one JSON object."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FAST = ["--scripted", "--quick", "--pass-ms", "1", "--token-ms", "0", "--rtt-ms", "2", "--gamma-ms", "0.5"]

sys.path.append(str(ROOT / "bench"))
from paired import paired_ratio  # noqa: E402


def bench(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench" / name, *words], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def last_object(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["strategies.py"])
def test_help(name: str) -> None:
    done = bench(name, "--help")
    assert done.returncode == 0 and "--quick" in done.stdout


def test_strategies_of_scripted_parts() -> None:
    said = last_object(bench("strategies.py", *FAST, "--samples", "0", "--only", "cloud,local,vanilla"))
    assert said["wrong_outputs"] == 0 and list(said["rows"]) == ["cloud", "local", "vanilla"]
    for name, row in said["rows"].items():
        assert (row["kind"], row["tokens"]) == ("scripted", 48)
        assert len(row["each_ms_per_token"]) == 2 and row["ms_per_token"] > 0
        assert row["passes_per_token"] == {"cloud": 1.0, "local": 0.0}.get(name, row["passes_per_token"])
    assert 0.1 < said["rows"]["vanilla"]["passes_per_token"] < 0.6


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--scripted", "--only", "cloud,nothing"], "no row 'nothing'"),
        ([], "give --draft FILE.gguf, or --scripted"),
    ],
)
def test_strategies_say_what_is_missing(words: list[str], complaint: str) -> None:
    done = bench("strategies.py", *words)
    assert done.returncode == 2 and complaint in done.stderr


def test_a_paired_ratio_is_of_each_repetition() -> None:
    below = [10.0, 40.0, 20.0, 5.0, 80.0]
    same = paired_ratio([1.2 * value for value in below], below)
    assert (same.mean, same.low, same.high) == pytest.approx((1.2, 1.2, 1.2))
    assert same.verdict == "1.20 times"
    mixed = paired_ratio(
        [value * factor for value, factor in zip(below, (1.3, 0.8, 1.1, 0.9, 1.0), strict=True)], below
    )
    assert mixed.low < 1.0 < mixed.high and mixed.verdict == "no difference"
    assert mixed.mean == pytest.approx(math.prod((1.3, 0.8, 1.1, 0.9)) ** 0.2)
    assert math.isnan(paired_ratio([2.0], [1.0]).low)
