"""The benches of whole strategies: that they run, say what they are, and end in one JSON object."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesd.errors import UsageError
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary

ROOT = Path(__file__).parents[1]
FAST = ["--scripted", "--quick", "--pass-ms", "1", "--token-ms", "0", "--rtt-ms", "2", "--gamma-ms", "0.5"]

sys.path.append(str(ROOT / "bench"))
from overhead import Stopwatch  # noqa: E402
from paired import paired_ratio  # noqa: E402
from replay import Recording, checked, prompts_of, scripted_recording  # noqa: E402


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


@pytest.mark.parametrize("name", ["strategies.py", "overhead.py"])
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


@pytest.mark.slow
def test_overhead_of_scripted_parts() -> None:
    said = last_object(bench("overhead.py", *FAST[1:]))
    assert said["rounds"] >= 100 and said["wrong_outputs"] == 0 and said["kind"] == "scripted"
    assert set(said["percent"]) == {"tuner", "planner", "measuring", "rest"}
    assert all(said["calls"][group] > 0 and said["percent"][group] > 0 for group in ("planner", "measuring", "rest"))
    together = sum(said["percent"][group] for group in ("tuner", "planner", "measuring"))
    assert said["together_percent"] == pytest.approx(together, abs=1e-3)


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


def test_prompts_come_from_the_files_in_turn(tmp_path: Path) -> None:
    code = tmp_path / "code.jsonl.gz"
    code.write_bytes(gzip.compress(b'{"prompt": "a", "test": "x"}\n{"prompt": "b"}\n{"prompt": "c"}\n'))
    maths, own = tmp_path / "maths.jsonl", tmp_path / "own.json"
    maths.write_text('{"question": "d", "answer": "4"}\n')
    own.write_text('[{"name": "n", "text": "e"},\n{"text": "f"}]')
    assert prompts_of([str(code), str(maths), str(own)]) == ["a", "d", "e", "b", "f", "c"]


def test_a_recording_is_kept_and_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    recording = scripted_recording(ByteTokeniser(), 3, 20)
    assert [len(record.output) for record in recording.records] == [20] * 3
    recording.save(tmp_path / "kept.json")
    assert Recording.load(tmp_path / "kept.json") == recording
    assert checked(recording, ByteTokeniser(), 3, 20) is recording
    for tokeniser, count, tokens, why in (
        (ByteTokeniser(), 4, 20, "3 outputs of 20 ids, wanted 4"),
        (ByteTokeniser(), 3, 21, "0 outputs of 21 ids, wanted 3"),
        (ByteTokeniser(byte_vocabulary(300)), 3, 20, "whose vocabulary is not the draft model's"),
    ):
        with pytest.raises(UsageError, match=why):
            checked(recording, tokeniser, count, tokens)


def test_a_stopwatch_gives_each_group_its_own_time_alone() -> None:
    class Clock:
        def outer(self) -> str:
            time.sleep(0.01)
            return self.inner

        @property
        def inner(self) -> str:
            time.sleep(0.03)
            return "said"

    stopwatch = Stopwatch()
    stopwatch.watch_method("outer", Clock, "outer")
    stopwatch.watch_method("inner", Clock, "inner")
    assert Clock().outer() == "said"
    assert stopwatch.calls == {"outer": 1, "inner": 1}
    assert stopwatch.spent_s["outer"] >= 0.01 and stopwatch.spent_s["inner"] >= 0.03
    assert stopwatch.spent_s["outer"] + stopwatch.spent_s["inner"] == pytest.approx(sum(stopwatch.longest_s.values()))


def test_an_interval_of_few_repetitions_holds_the_true_ratio() -> None:
    random = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        found = paired_ratio(np.exp(random.normal(0.1, 0.05, 6)), np.ones(6))
        held += found.low <= math.exp(0.1) <= found.high
    assert 0.92 <= held / 300 <= 0.98
