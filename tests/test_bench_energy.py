"""The table of energy: its figures from readings that are known, and a run of scripted models without a meter."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipesd.energy import Reading
from pipesd.errors import UsageError

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))
import printed  # noqa: E402
from energy_report import FIGURE, Turn, drawn, energy, lines  # noqa: E402


def turn(tokens: int, gpu: float | None, cpu: float | None = None, why: str = "NVML: no driver") -> Turn:
    return Turn([{"tokens": tokens}], [()], Reading(gpu, "" if gpu else why), Reading(cpu, "" if cpu else "no right"))


def test_joules_are_over_all_tokens_and_ratios_are_paired() -> None:
    turns = {
        "vanilla": [turn(50, 40.0), turn(150, 120.0), turn(100, 80.0)],
        "pipesd": [turn(100, 40.0), turn(100, 40.0), turn(100, 40.0)],
        "cloud only": [turn(100, 10.0), turn(100, 160.0), turn(100, 40.0)],
    }
    figures = printed.ENERGY["humaneval"]
    said = {name: energy(name, turns, figures, on_gpu=True) for name in turns}
    assert {name: row[FIGURE] for name, row in said.items()} == {"vanilla": 80.0, "pipesd": 40.0, "cloud only": 70.0}
    assert said["vanilla"]["joules_over_pipesd"]["mean"] == pytest.approx(2.0)
    assert said["vanilla"]["joules_over_pipesd"]["verdict"] == "2.00 times"
    assert said["cloud only"]["joules_over_pipesd"]["verdict"] == "no difference"
    assert "joules_over_pipesd" not in said["pipesd"]
    assert said["vanilla"]["joules_over_printed"] == pytest.approx(80 / 68)
    assert said["vanilla"]["printed_joules_over_pipesd"] == pytest.approx(68 / 56)
    assert (
        said["cloud only"]["printed_joules_per_100_tokens"] is None and "joules_over_printed" not in said["cloud only"]
    )
    shown = list(lines("a cell", said))
    assert shown[2].split()[:5] == ["vanilla", "80.00", "68.00", "1.18", "1.21"]
    assert "2.00 times" in shown[2] and shown[4].split()[:3] == ["cloud", "only", "70.00"]
    assert drawn(said)["vanilla"]["printed"] == {FIGURE: 68}


def test_a_row_with_one_turn_unread_has_no_figure_and_says_why() -> None:
    turns = {"vanilla": [turn(50, 40.0), turn(50, None)], "pipesd": [turn(50, 20.0), turn(50, 20.0)]}
    said = energy("vanilla", turns, printed.ENERGY["gsm8k"], on_gpu=True)
    assert said[FIGURE] is None and said["energy_why"] == "not readable: NVML: no driver"
    assert said["printed_joules_per_100_tokens"] == 98 and "joules_over_pipesd" not in said
    assert "joules_over_pipesd" not in energy("pipesd", turns, {}, on_gpu=True)
    row = list(lines("a cell", {"vanilla": said}))[2]
    assert row.split()[:2] == ["vanilla", "none"] and row.endswith("not readable: NVML: no driver")


def test_the_processors_are_not_taken_for_the_gpu() -> None:
    turns = {"pipesd": [turn(100, None, 30.0)]}
    assert energy("pipesd", turns, {}, on_gpu=True)[FIGURE] is None
    said = energy("pipesd", turns, {}, on_gpu=False)
    assert said[FIGURE] == 30.0 and said["energy_of"] == "processors, edge and cloud"
    assert said["readings"][0]["gpu"]["why"] == "NVML: no driver"


def test_the_papers_own_reductions_come_out_of_the_printed_figures() -> None:
    """17.6, 21.1 and 25.3 % less for code, 14.3, 17.6 and 16.0 % for maths."""
    for dataset, wanted in (("humaneval", (17.6, 21.1, 25.3)), ("gsm8k", (14.3, 17.6, 16.0))):
        figures = printed.ENERGY[dataset]
        less = [100 * (1 - figures["pipesd"] / figures[name]) for name in ("vanilla", "hsl", "edgellm")]
        assert less == pytest.approx(wanted, abs=0.06)


POLICY = """
from pipesd.policy.plugin import BaseTrigger, Policy

class Third(BaseTrigger):
    def observe(self, p_draft, entropy=0.0):
        self.seen += 1
        return "length" if self.seen >= 3 else None

    def reset(self):
        self.seen = 0

POLICY = Policy(name="third", trigger=Third)
"""


@pytest.mark.slow
def test_where_no_meter_can_be_read_the_rest_of_the_row_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("pipesd.energy_cpu.POWERCAP", tmp_path / "powercap")
    (tmp_path / "third.py").write_text(POLICY)
    words = ["--scripted", "--regime", "thin", "--seeds", "2", "--samples", "1", "--tokens", "6", "--tune-tokens", "3"]
    words += ["--each", "2", "--pass-ms", "2", "--policy", str(tmp_path / "third.py"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["energy", *words])
    assert importlib.import_module("energy").main() == 0
    output = capsys.readouterr().out
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    (cell,) = found["cells"]
    names = ["cloud only", "edge only", "co-located", "vanilla", "hsl", "edgellm", "pipesd", "auto", "third"]
    assert list(cell["rows"]) == names
    for row in cell["rows"].values():
        assert row["kind"] == "replayed" and row["ms_per_token"] > 0 and row["other_outputs"] == 0
        assert row[FIGURE] is None and row["energy_why"].startswith("not readable: ")
        assert len(row["readings"]) == 2 and str(tmp_path) in row["energy_why"]
    assert cell["rows"]["cloud only"]["passes_per_token"] == 1.0
    assert cell["rows"]["vanilla"]["ms_per_token"] > 8 > cell["rows"]["co-located"]["ms_per_token"], "25 ms each way"
    assert output.count("not readable: ") == len(names) + output.splitlines()[-1].count("not readable: ")
    assert list(tmp_path.glob("energy-*.json"))


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "--scripted"), (["--scripted", "--each", "0"], "--each"), (["--scripted", "--plot", "x.nothing"], "--plot")],
)
def test_wrong_use(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["energy", *words])
    with pytest.raises(UsageError, match=says):
        importlib.import_module("energy").main()


def test_other_ids_are_told_and_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = importlib.import_module("energy")
    rows = {name: {"other_outputs": count, "energy_of": "GPUs"} for name, count in (("hsl", 2), ("vanilla", 0))}
    monkeypatch.setattr(program, "cell_of", lambda *_: {"name": "a cell", "rows": rows})
    words = ["--scripted", "--regime", "thin", "--tokens", "2", "--each", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["energy", *words])
    assert program.main() == 1
    assert "a cell: hsl: not the ids of the other rows" in capsys.readouterr().err
