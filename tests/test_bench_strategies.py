"""The benches of whole strategies: that they run, say what they are, and end in one JSON object."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesd.errors import UsageError
from pipesd.sim.simulate import SUMMED
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary

ROOT = Path(__file__).parents[1]
FAST = ["--scripted", "--quick", "--pass-ms", "1", "--token-ms", "0", "--rtt-ms", "2", "--gamma-ms", "0.5"]

sys.path.append(str(ROOT / "bench"))
import strategies  # noqa: E402
from overhead import Stopwatch  # noqa: E402
from paired import paired_ratio  # noqa: E402
from recording import prompts_of  # noqa: E402
from runs import ESTIMATES, Measured, add_options, edge_of, joined, scripted_trace  # noqa: E402
from stamp import rounded  # noqa: E402
from table import standing_rows  # noqa: E402


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


@pytest.mark.slow
def test_strategies_of_scripted_parts(tmp_path: Path) -> None:
    said = last_object(
        bench(
            "strategies.py",
            *FAST,
            "--samples",
            "0",
            "--only",
            "cloud only,edge only,vanilla",
            "--results",
            str(tmp_path),
        )
    )
    assert said["wrong_outputs"] == 0 and list(said["rows"]) == ["cloud only", "edge only", "vanilla"]
    for name, row in said["rows"].items():
        assert (row["kind"], row["tokens"]) == ("replayed", 48)
        assert len(row["each_ms_per_token"]) == 2 and row["ms_per_token"] > 0
        assert row["passes_per_token"] == {"cloud only": 1.0, "edge only": 0.0}.get(name, row["passes_per_token"])
    assert 0.1 < said["rows"]["vanilla"]["passes_per_token"] < 0.6


class FakeEdge:
    """Takes as long as its settings say, errs with one of them, and with one cannot always say what it took."""

    trace = scripted_trace(30, 4)
    wrong_for: str | None = None
    unmetered_for: str | None = None

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], tuple[Any, ...], int, bool]] = []

    def run(self, settings: dict[str, Any], records: Any, tokens: int, *, linked: bool = True) -> Measured:
        self.seen.append((settings, tuple(records), tokens, linked))
        ms = 20.0 + 10 * (settings["strategy"] == "vanilla") + abs(settings.get("draft_length", 4) - 6)
        wrong = [f"{settings}: differs"] if settings["strategy"] == self.wrong_for else []
        sums = dict.fromkeys(SUMMED, 2) | {"tokens": tokens * len(self.seen[-1][1])}
        said = {"energy_j": None if settings["strategy"] == self.unmetered_for and len(self.seen) % 2 else 1.5}
        return Measured(ms, sums, dict.fromkeys(ESTIMATES), {"length": 1}, wrong, [said, said])


ROWS = [*standing_rows(), *strategies.OWN_ROWS]


def of_fake(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """(exit code, last object, all that was printed before it) of a run with a fake edge."""
    monkeypatch.setattr(sys, "argv", ["strategies.py", *words])
    monkeypatch.setattr(strategies, "edge_of", lambda *_: nullcontext(edge))
    monkeypatch.setattr(strategies, "finish", lambda name, stamp, options, found: print(json.dumps(rounded(found))))
    code = strategies.main()
    *lines, last = capsys.readouterr().out.splitlines()
    return code, json.loads(last), "\n".join(lines)


def test_every_row_is_tuned_alike_on_other_prompts_and_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = FakeEdge()
    code, said, table = of_fake(edge, monkeypatch, capsys, "--samples", "12", "--tune-tokens", "31", "--tokens", "64")
    assert code == 0 and list(said["rows"]) == ROWS
    records = edge.trace.records
    tuning, measuring = ([one for one in edge.seen if one[2] == tokens] for tokens in (31, 64))
    assert {one[1] for one in tuning} == {records[:3]}
    searched = [name for name, row in said["rows"].items() if row["tuning_ms_per_token"] is not None]
    assert set(ROWS).difference(searched) == {"cloud only", "edge only", "gain", "online"}
    assert len(tuning) == 12 * len(searched)
    rows = len(ROWS)
    for repetition in range(9):
        turn = measuring[repetition * rows :][:rows]
        assert {one[1] for one in turn} == {records[3 + 2 * repetition : 5 + 2 * repetition]}
        assert len({json.dumps(one[0]) + str(one[3]) for one in turn}) == rows
    assert [one[0]["strategy"] for one in measuring[:rows]] != [one[0]["strategy"] for one in measuring[rows:][:rows]]
    assert said["rows"]["vanilla"]["settings"]["draft_length"] in (5, 6, 7)
    assert said["rows"]["vanilla"]["over_pipesd"]["verdict"] == said["rows"]["co-located"]["over_pipesd"]["verdict"]
    assert [one[3] for one in edge.seen].count(False) == 1 + 12 + 9  # co-located
    length = said["rows"]["vanilla"]["settings"]["draft_length"]
    assert said["rows"]["vanilla"]["over_pipesd"]["mean"] == pytest.approx((30 + abs(length - 6)) / 22, abs=1e-4)
    assert table.count("no difference") == rows - 1 - 3  # but vanilla, co-located and fixed


def test_ids_that_differ_are_printed_and_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = FakeEdge()
    edge.wrong_for = "hsl"
    code, said, table = of_fake(edge, monkeypatch, capsys, "--samples", "0", "--only", "hsl,pipesd")
    assert (code, said["wrong_outputs"], said["rows"]["hsl"]["wrong_outputs"]) == (1, 9, 9)
    assert said["rows"]["pipesd"]["wrong_outputs"] == 0 and table.count("differs") == 9


def test_joules_are_summed_and_unknown_where_one_generations_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = FakeEdge()
    edge.unmetered_for = "hsl"
    _, said, _ = of_fake(edge, monkeypatch, capsys, "--samples", "0", "--only", "hsl,pipesd", "--repetitions", "4")
    assert said["rows"]["pipesd"]["energy_j"] == 4 * 2 * 1.5
    assert said["rows"]["hsl"]["energy_j"] is None


def test_an_edge_compares_its_ids_with_the_trace() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(["--scripted", "--pass-ms", "0", "--token-ms", "0", "--rtt-ms", "0"])
    with edge_of(options, 1, 12) as edge:
        (good,) = edge.trace.records
        other = replace(good, output=(*good.output[:5], good.output[5] + 1, *good.output[6:]), behind={})
        settings = {"strategy": "vanilla"}
        assert edge.run(settings, [good], 12).wrong == []
        (line,) = edge.run(settings, [good, other], 12).wrong
        assert "the ids differ from number 5 on" in line
        assert edge.run({"strategy": "local"}, [good], 12).wrong == []


@pytest.mark.slow
def test_overhead_of_scripted_parts(tmp_path: Path) -> None:
    said = last_object(bench("overhead.py", *FAST[1:], "--results", str(tmp_path)))
    assert said["rounds"] >= 100 and said["wrong_outputs"] == 0 and said["kind"] == "replayed"
    assert set(said["percent"]) == {"tuner", "planner", "measuring", "rest"}
    assert all(said["calls"][group] > 0 and said["percent"][group] > 0 for group in ("planner", "measuring", "rest"))
    together = sum(said["percent"][group] for group in ("tuner", "planner", "measuring"))
    assert said["together_percent"] == pytest.approx(together, abs=1e-3)


def test_what_is_missing_is_said_in_one_line() -> None:
    done = bench("strategies.py", "--scripted", "--only", "vanilla,nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: --only: no row 'nothing'; there are cloud only, edge only,")
        and done.stderr.count("\n") == 1
    )


def test_models_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["strategies.py"])
    with pytest.raises(UsageError, match=r"give --draft FILE\.gguf, or --scripted"):
        strategies.main()


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
    once = paired_ratio([2.0], [1.0])
    assert math.isnan(once.low) and "no interval" in once.verdict


def test_prompts_come_from_the_files_in_turn(tmp_path: Path) -> None:
    code = tmp_path / "code.jsonl.gz"
    code.write_bytes(gzip.compress(b'{"prompt": "a", "test": "x"}\n{"prompt": "b"}\n{"prompt": "c"}\n'))
    maths, own = tmp_path / "maths.jsonl", tmp_path / "own.json"
    maths.write_text('{"question": "d", "answer": "4"}\n')
    own.write_text('[{"name": "n", "text": "e"},\n{"text": "f"}]')
    assert prompts_of([str(code), str(maths), str(own)]) == ["a", "d", "e", "b", "f", "c"]


def test_traces_are_joined_and_refused_where_they_do_not_fit() -> None:
    trace = scripted_trace(3, 20)
    assert [len(record.output) for record in trace.records] == [20] * 3
    assert joined([trace], ByteTokeniser(), 3, 20) == trace
    longer = replace(scripted_trace(6, 30), end_ids=(1,))
    both = joined([trace, longer], ByteTokeniser(), 9, 20)
    one, other = ([record.output for record in each.records] for each in (trace, longer))
    assert [record.output for record in both.records] == [one[0], other[0], one[1], other[1], one[2], *other[2:]]
    assert both.end_ids == (1, *trace.end_ids)
    for traces, tokeniser, count, tokens, why in (
        ([trace], ByteTokeniser(), 4, 20, "3 outputs of 20 ids, wanted 4"),
        ([trace, longer], ByteTokeniser(), 9, 21, "6 outputs of 21 ids, wanted 9"),
        ([trace], ByteTokeniser(byte_vocabulary(300)), 3, 20, "whose vocabulary is not the draft model's"),
        ([trace, replace(trace, sampling={"temperature": 1.0})], ByteTokeniser(), 1, 20, "not sampled alike"),
        ([trace, replace(trace, target="other")], ByteTokeniser(), 1, 20, "of scripted and other"),
    ):
        with pytest.raises(UsageError, match=why):
            joined(traces, tokeniser, count, tokens)


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


def test_an_interval_over_few_prompts_and_few_seeds_holds_the_true_ratio() -> None:
    random = np.random.default_rng(6)
    for of_prompts, of_seeds in ((0.1, 0.02), (0.02, 0.1)):
        held = 0
        for _ in range(50):
            luck = random.normal(0.0, of_prompts, (8, 1)) + random.normal(0.0, of_seeds, (1, 5))
            found = paired_ratio(np.exp(0.1 + luck + random.normal(0.0, 0.02, (8, 5))), np.ones((8, 5)))
            held += found.low <= math.exp(0.1) <= found.high
        assert held / 50 >= 0.9
