"""The map of where drafts pay: its links, the closed form beside it, what it says of a cell, what it looks like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipesd.sim.synthetic import synthetic_trace

BENCH = Path(__file__).parents[1] / "bench"

sys.path.append(str(BENCH))
import breakeven  # noqa: E402
from measuring import Cell, Outcome  # noqa: E402
from scenarios import FAT, GAP_S, REGIMES, THIN  # noqa: E402

RECORDS = synthetic_trace(6, 24, acceptance=0.8, seed=2).records


def cell(rtt_ms: float, *, gamma_s: float = 0.005, a: float = 0.8) -> Cell:
    facts = {"rtt_ms": rtt_ms, "regime": "thin", "acceptance": a}
    return Cell("a cell", "humaneval", RECORDS, breakeven.link_of(THIN, rtt_ms / 1e3), gamma_s, 0.03, facts=facts)


@pytest.mark.parametrize("rtt_s", [0.0, 0.00005, 0.02, 0.5])
def test_a_link_has_the_round_trip_of_its_column_and_the_payload_of_its_regime(rtt_s: float) -> None:
    for regime in REGIMES.values():
        link = breakeven.link_of(regime, rtt_s)
        assert 2 * (link.latency_s + link.gap_s) == pytest.approx(rtt_s) and link.jitter_s == 0.0
        assert link.up_bytes_per_draft_token == regime.link().up_bytes_per_draft_token
    assert breakeven.link_of(FAT, rtt_s).latency_s == 0.0
    assert breakeven.link_of(THIN, rtt_s).gap_s == pytest.approx(min(GAP_S, rtt_s / 2))


def test_the_closed_form_takes_the_length_that_reaches_furthest() -> None:
    """Where right guesses are sure it is the longest; where they cost more than they bring, none."""
    assert breakeven.limit_s(1.0, 0.03, 0.005) == pytest.approx(16 * 0.025)
    assert breakeven.limit_s(0.5, 0.03, 0.01) == pytest.approx(0.5 * 0.03 - 0.01)
    assert breakeven.limit_s(0.8, 0.03, 0.036) == 0.0
    by_hand = max(sum(0.8**i for i in range(1, k + 1)) * 0.03 - k * 0.005 for k in range(1, 17))
    assert breakeven.limit_s(0.8, 0.03, 0.005) == pytest.approx(by_hand)


def judged(rtt_ms: float, times_ms: dict[str, float]) -> dict[str, Any]:
    """What is said of a cell where each row takes that time, behind two prompts and with two seeds, to a percent."""
    reports: dict[str, Any] = {name: {"ms_per_token": value} for name, value in times_ms.items()}
    outcomes = {
        name: [Outcome({}, {prompt: {"tpt_ms": value * (1 + prompt / 100)} for prompt in range(2)}) for _ in range(2)]
        for name, value in times_ms.items()
    }
    return breakeven.judged(cell(rtt_ms), reports, outcomes)


def test_what_is_said_of_a_cell() -> None:
    times = {"cloud only": 30.0, "edge only": 1.0, "co-located": 2.0, "vanilla": 24.0, "pipesd": 15.0, "hsl": 15.0}
    said = judged(20.0, times)
    assert (said["fastest"], said["pipesd_over_cloud"], said["vanilla_over_cloud"]) == ("pipesd", 0.5, 0.8)
    assert said["ties"] == ["hsl"], "no slower for sure"
    assert said["agrees"] and said["closed_form_rtt_ms"] == pytest.approx(1e3 * breakeven.limit_s(0.8, 0.03, 0.005))
    assert not judged(200.0, times)["agrees"], "vanilla wins where the form says that it cannot"
    times["vanilla"] = 31.0
    assert not judged(20.0, times)["agrees"] and judged(200.0, times)["agrees"]
    assert "agrees" not in judged(20.0, {"cloud only": 30.0})


def test_acceptance_is_of_the_records_that_are_measured() -> None:
    right = [record.right(i) for record in RECORDS[4:] for i in range(24)]
    assert breakeven.acceptance(RECORDS) == pytest.approx(sum(right) / 48)


def test_the_map_is_printed_drawn_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "made.jsonl.gz"
    synthetic_trace(6, 24, acceptance=0.8, seed=2).save(trace)
    words = ["--quick", "--regime", "thin", "--traces", str(trace), "--only", "cloud only,vanilla,pipesd"]
    words += ["--plot", str(tmp_path / "map.png"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["breakeven.py", *words])
    assert breakeven.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    cells = {(each["rtt_ms"], each["gamma_ms"]): each for each in found["cells"]}
    assert set(cells) == {(rtt, gamma) for rtt in breakeven.QUICK_RTTS_MS for gamma in breakeven.QUICK_GAMMAS_MS}
    assert cells[500.0, 36.0]["fastest"] == "cloud only" and cells[500.0, 36.0]["pipesd_over_cloud"] > 1.0
    assert cells[0.0, 5.0]["fastest"] != "cloud only" and cells[0.0, 5.0]["agrees"]
    shown = next(line for line in lines if line.strip().startswith("36 ms") and line.rstrip().endswith(" ms"))
    assert f"c {cells[500.0, 36.0]['pipesd_over_cloud']:5.2f}" in shown
    assert any(line.startswith("vanilla disagrees with the closed form in ") for line in lines)
    assert (tmp_path / "map.png").stat().st_size > 1000 and list(tmp_path.glob("breakeven-*.json"))
