"""The tables of strategies: that each has its rows and columns, what is tuned on, what is printed, what is kept."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

import pipesd
from pipesd.errors import UsageError
from pipesd.sim.synthetic import synthetic_trace

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"

sys.path.append(str(BENCH))
import plots  # noqa: E402
import printed  # noqa: E402
import scenarios  # noqa: E402
import stamp  # noqa: E402
import table  # noqa: E402
from measuring import Row  # noqa: E402

STANDING = ("cloud only", "edge only", "co-located", "vanilla", "hsl", "edgellm", "pipesd", "auto")
COLUMNS = ("kind", "ms_per_token", "cloud_s_per_1000_tokens", "passes_per_token", "bytes_per_token", "acceptance")
TABLES = [
    path.stem
    for path in sorted(BENCH.glob("*.py"))
    if "options_of(__doc__" in path.read_text() and path.stem != "energy"
]
MINE = ("ablation", "bandwidth", "overall", "verification")
FEW = ("--seeds", "2", "--samples", "1", "--tune-tokens", "4", "--tokens", "6")
SHORT = {
    "overall": ("--scenarios", "3"), "batching": ("--cases", "4"), "fit": ("--seconds", "0"),
    "thresholds": ("--side", "2"), "breakeven": ("--rtts", "0", "50", "--gammas", "5"),
}  # fmt: skip
POLICY = """
from pipesd.policy.plugin import BaseTrigger, Parameter, Policy

class Every(BaseTrigger):
    def observe(self, p_draft, entropy=0.0):
        self.seen += 1
        return "length" if self.seen >= self.length else None

    def reset(self):
        self.seen = 0

POLICY = Policy(name="every", trigger=Every, parameters={"length": Parameter(1, 8, integer=True)}, first={"length": 3})
"""


def load_program() -> Any:
    """bench/__main__.py as a module."""
    found = importlib.util.spec_from_file_location("bench_program", BENCH / "__main__.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


program = load_program()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace of six short records, under a name that has printed figures."""
    path = tmp_path_factory.mktemp("traces") / "humaneval.jsonl.gz"
    synthetic_trace(6, 12, acceptance=0.8, seed=3).save(path)
    return str(path)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policies") / "every.py"
    path.write_text(POLICY)
    return str(path)


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs a bench with options: its last line, as an object."""

    def run(name: str, *words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *words, "--results", str(tmp_path / "results")])
        assert importlib.import_module(name).main() == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    return run


@pytest.mark.parametrize(
    "name", [name if name in MINE else pytest.param(name, marks=pytest.mark.slow) for name in TABLES]
)
def test_every_table_has_its_rows_and_columns(name: str, tiny: str, policy: str, said: Callable[..., Any]) -> None:
    words = SHORT.get(name, ())
    found = said(name, *FEW, *words, "--traces", tiny, "--policy", policy)
    assert found["bench"] == name and found["cells"]
    for cell in found["cells"]:
        rows = cell["rows"]
        assert set(rows) >= {"cloud only", "edge only", "co-located", "pipesd", "every"}, cell["name"]
        if name in MINE:
            assert tuple(rows)[: len(STANDING)] == STANDING
        for row in rows.values():
            assert set(row) >= set(COLUMNS)
            assert row["kind"] in ("real", "replayed", "simulated")
            assert row["ms_per_token"] > 0 and row["passes_per_token"] <= 1.0
        assert rows["cloud only"]["passes_per_token"] == 1.0
        assert rows["edge only"]["passes_per_token"] == 0.0 == rows["edge only"]["cloud_s_per_1000_tokens"]
        for row_name in set(rows) - {"pipesd"}:
            ratio = rows[row_name]["over_pipesd"]
            assert ratio["low"] <= ratio["mean"] <= ratio["high"]
            assert (ratio["verdict"] == "no difference") == (ratio["low"] <= 1.0 <= ratio["high"])


# Benches that compare no strategies. Any other one has the standing rows and a policy's own.
OF_NO_STRATEGIES = {
    "codec", "exactness", "exactness_sampled", "fidelity", "gpu", "planner", "record", "sampling", "simulator",
    "target", "transport", "tuner",
}  # fmt: skip
REAL = ("--pass-ms", "1", "--samples", "1")
OTHERS = {
    "energy": ("--scripted", "--regime", "thin", "--seeds", "1", "--tokens", "6", "--tune-tokens", "3", "--each", "1"),
    "overhead": ("--token-ms", "0", "--rtt-ms", "2", "--gamma-ms", "0.5", "--rounds", "3", "--seeds", "1", "--quick"),
    "strategies": ("--scripted", "--token-ms", "0", "--rtt-ms", "2", "--quick", "--repetitions", "1"),
}  # fmt: skip


def test_every_bench_that_compares_strategies_is_known_here() -> None:
    assert set(program.benches()) == OF_NO_STRATEGIES | set(TABLES) | set(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_a_policy_has_its_row_beside_all_others_where_the_runtime_itself_runs(
    name: str, policy: str, tmp_path: Path
) -> None:
    words = [*OTHERS[name], *REAL, "--only", "cloud only,edge only,pipesd,every", "--policy", policy]
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, *words, "--results", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob(f"{name}-*.json"))) == 1
    *shown, last = done.stdout.splitlines()
    found = json.loads(last)
    for cell in found.get("cells", [found]):
        assert list(cell["rows"]) == ["cloud only", "edge only", "pipesd", "every"]
        for row in cell["rows"].values():
            assert row["kind"] == "replayed" and row["ms_per_token"] > 0  # the models are scripted
        assert "no interval" in cell["rows"]["every"]["over_pipesd"]["verdict"]
    assert any(line.startswith("every ") for line in shown)


def test_every_row_stands_on_the_map_of_round_trips(
    tiny: str, policy: str, said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakeven = importlib.import_module("breakeven")
    told: list[str] = []
    beside = breakeven.beside
    monkeypatch.setattr(breakeven, "beside", lambda found: told.extend(beside(found)) or told)
    words = (
        "--seeds",
        "1",
        "--samples",
        "0",
        "--tokens",
        "4",
        "--regime",
        "thin",
        "--rtts",
        "0",
        "50",
        "--gammas",
        "5",
    )
    near, far = said("breakeven", *words, "--traces", tiny, "--policy", policy)["cells"]
    assert all(any(name in line for line in told) for name in (*STANDING, "every"))
    assert sum(line.count("/") for line in told) == 1 + 2 * (len(STANDING) + 1)
    for cell in (near, far):
        assert cell["fastest"] not in cell["ties"] and {*cell["ties"]} <= {*cell["rows"]} - {"edge only", "co-located"}


def test_what_is_given_holds_with_quick_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["overall", "--quick", "--tokens", "40", "--seeds", "3"])
    options = table.options_of("", None, rtts=(1.0,))
    assert (options.tokens, options.seeds, options.samples, options.tune_tokens) == (40, 3, 2, 8)
    assert options.rtts == (1.0,)
    monkeypatch.setattr(sys, "argv", ["overall"])
    options = table.options_of("", None, rtts=(1.0,))
    assert (options.tokens, options.seeds, options.samples, options.tune_tokens) == (128, 5, 16, 64)


def test_own_rows_stand_behind_and_printed_figures_beside(tiny: str, said: Callable[..., Any]) -> None:
    found = said("overall", *FEW, "--traces", tiny, "--regime", "fat", "--scenarios", "1,4")
    assert [cell["scenario"] for cell in found["cells"]] == [1, 4]
    rows = found["cells"][0]["rows"]
    for name in ("vanilla", "vanilla-paper"):
        assert rows[name]["printed"] == {"ms_per_token": 194}
        assert rows[name]["ours_over_printed"]["ms_per_token"] == pytest.approx(rows[name]["ms_per_token"] / 194)
        assert rows[name]["printed_over_pipesd"] == pytest.approx(194 / 129)
    assert "printed_over_pipesd" not in rows["pipesd"] and rows["cloud only"]["printed"] == {}
    assert rows["vanilla-paper"]["tuned"] == [{}, {}] and rows["vanilla-paper"]["settings"]["draft_length"] == 6
    assert all("draft_length" in setting for setting in rows["vanilla"]["tuned"])
    assert rows["vanilla"]["bytes_per_token"] > scenarios.FAT_BYTES > rows["co-located"]["bytes_per_token"]


def test_other_figures_stand_beside_the_printed_ones(tiny: str, said: Callable[..., Any]) -> None:
    found = said("verification", *FEW, "--traces", tiny, "--only", "hsl,hsl-paper")
    row = found["cells"][0]["rows"]["hsl-paper"]
    assert row["printed"] == printed.VERIFICATION["hsl"]
    assert row["ours_over_printed"]["acceptance"] == pytest.approx(row["acceptance"] / 0.915)
    assert row["verifications_per_token"] == pytest.approx(row["rounds"] / row["tokens"])
    assert row["draft_length"] == pytest.approx(row["verified"] / row["rounds"])


def test_results_are_kept_with_their_stamp(tiny: str, said: Callable[..., Any], tmp_path: Path) -> None:
    words = (*FEW, "--traces", tiny, "--only", "cloud only", "--regime", "thin")
    found = [said("ablation", *words) for _ in range(2)]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("ablation-*Z*.json")]
    assert len(kept) == 2 and all(one in kept for one in found)
    assert set(found[0]["machine"]) == {"cpu", "cores", "system", "python", "numpy", "pipesd", "load"}
    assert found[0]["machine"]["numpy"] == numpy.__version__ and found[0]["machine"]["pipesd"] == pipesd.__version__
    assert set(found[0]) >= {"commit", "dirty", "seconds", "begun", "options"}
    assert found[0]["cells"] == found[1]["cells"]  # the same seeds, the same figures


# -- what is printed, and options -------------------------------------------------------------------------------------


def test_printed_figures_agree_with_each_other_and_with_the_papers_headlines() -> None:
    every = [figures for sets in printed.OVERALL.values() for figures in sets.values()]
    for name, low, high in (("vanilla", 1.33, 2.16), ("hsl", 1.19, 1.61), ("edgellm", 1.16, 1.32)):
        values = [figures[name] / figures["pipesd"] for figures in every]
        assert (round(min(values), 2), round(max(values), 2)) == pytest.approx((low, high), abs=0.011)
    first = printed.OVERALL[1]
    assert all(printed.AUTOTUNER[name]["pipesd"] == first[name]["pipesd"] for name in printed.DATASETS)
    assert printed.ABLATION["pipesd"] == first["humaneval"]["pipesd"]
    for name, figure in printed.BANDWIDTH[20].items():
        assert abs(figure - first["humaneval"][name]) <= 3  # it was read off a chart
    for row in printed.VERIFICATION.values():  # a verification brings what was accepted and the target's own
        assert row["verifications_per_token"] == pytest.approx(
            1 / (1 + row["draft_length"] * row["acceptance"]), rel=0.003
        )


def test_the_papers_settings() -> None:
    assert scenarios.FAT.link().up_bytes_per_draft_token / scenarios.FAT.link().up_bytes_per_s == pytest.approx(
        0.116, abs=5e-4
    )
    assert scenarios.FAT.link().gap_s == scenarios.ALPHA_S
    thin = scenarios.THIN.link(80)
    assert thin.up_bytes_per_draft_token == 0 and thin.gap_s + thin.latency_s == pytest.approx(scenarios.ALPHA_S)
    assert thin.up_bytes_per_s == 10e6
    assert scenarios.gamma_s(3) == pytest.approx(0.153)
    schedule = scenarios.scenario_link(4, scenarios.THIN).bandwidths
    assert schedule is not None and schedule.every_s == 20
    assert 10 <= min(schedule.up_mbps) < max(schedule.up_mbps) <= 80
    assert scenarios.paper_settings("gsm8k")["vanilla-paper"]["draft_length"] == 4
    assert scenarios.paper_settings("table7")["hsl-paper"]["token_threshold"] == 0.99


@pytest.mark.parametrize(
    "words",
    [
        ("--seeds", "0"),
        ("--samples", "-1"),
        ("--pass-ms", "0"),
        ("--pass-ms", "nan"),
        ("--only", "nothing"),
        ("--scenarios", "5"),
        ("--traces", "no/such.jsonl.gz"),
        ("--policy", "no/such.py"),
        ("--plot", "no/such/folder.png"),
        ("--plot", "picture.nothing"),
    ],
)
def test_wrong_options_give_one_line(words: tuple[str, ...], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["overall", "--traces", tiny, *words])
    with pytest.raises(UsageError) as raised:
        importlib.import_module("overall").main()
    assert "\n" not in str(raised.value)


def test_rows_that_share_a_name_are_refused(policy: str) -> None:
    with pytest.raises(UsageError, match="'every'"):
        table.standing_rows([policy, policy])
    with pytest.raises(UsageError, match="another name"):
        table.joined(table.standing_rows(), {"hsl": Row({})})


def test_traces_need_records_to_measure_and_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl.gz"
    synthetic_trace(4, 4).save(path)
    with pytest.raises(UsageError, match="it has 4 records, of which 4 tune"):
        table.traces_of(argparse.Namespace(quick=False, traces=[str(path)]))
    with pytest.raises(UsageError, match="two are named 'table7'"):
        table.traces_of(argparse.Namespace(quick=False, traces=["table7", "table7"]))


def test_results_that_cannot_be_kept_give_one_line(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(UsageError, match="give a folder"):
        stamp.finish("x", stamp.begin(), argparse.Namespace(results=str(taken)), {})


def test_json_has_no_infinite_numbers() -> None:
    assert stamp.rounded({"a": [float("inf"), float("nan"), 1 / 3], 2: "b"}) == {"a": [None, None, 0.333333], "2": "b"}


# -- plots ------------------------------------------------------------------------------------------------------------


def drawn_cells() -> list[dict[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {
        "pipesd": {"ms_per_token": 20.0, "printed": {"ms_per_token": 30.0}},
        "cloud only": {"ms_per_token": 25.0, "printed": {}},
    }
    return [{"name": f"cell {x}", "x": x, "regime": "fat", "rows": rows} for x in (10, 20)]


def test_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.check(str(tmp_path / "bars.png"))
    plots.bars(drawn_cells(), str(tmp_path / "bars.png"))
    plots.lines(drawn_cells(), str(tmp_path / "lines.svg"), "x", "uplink", ("regime",))
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG" and b"<svg" in (tmp_path / "lines.svg").read_bytes()


def test_without_matplotlib_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        plots.check("x.png")


# -- all benches by name ----------------------------------------------------------------------------------------------


def test_list_names_every_bench() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "--list"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0]: line for line in done.stdout.splitlines()}
    programs = {path.stem for path in BENCH.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    assert set(listed) == programs - {"__main__"}
    assert {*MINE, "codec", "strategies", "transport"} <= set(listed)
    assert all(len(line.split()) > 3 for line in listed.values())
    assert "needs --draft --target" in listed["exactness"] and "needs" not in listed["overall"]
    assert "needs --draft|--scripted)" in listed["strategies"]
    assert listed["simulator"].endswith("is: committed tokens a second on one core")


def test_a_bench_is_run_by_its_name() -> None:
    words = [sys.executable, "-m", "bench", "overall", "--seeds", "none"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "--seeds" in done.stderr


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["overal"]) == 2
    assert capsys.readouterr().err == "error: no bench 'overal': did you mean overall?\n"


def test_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("first", "needy", "last", "slow")
    made = {name: program.Bench(name, "", ("--draft",) if name == "needy" else (), name != "slow") for name in names}
    ran: list[tuple[str, list[str]]] = []

    def run(bench: Any, words: list[str]) -> int:
        ran.append((bench.name, words))
        return {"first": 3, "slow": program.NOT_HERE}.get(bench.name, 0)

    monkeypatch.setattr(program, "benches", lambda: made)
    monkeypatch.setattr(program, "run", run)
    assert program.main(["all", "--quick"]) == 1
    assert ran == [("first", ["--quick"]), ("last", ["--quick"]), ("slow", [])]
    told = capsys.readouterr().err
    assert "first: failed with 3" in told and "needy: left out, it needs --draft" in told and "last: done" in told
    assert "slow: not for this machine" in told
    del made["first"]
    assert program.main(["all", "--quick"]) == 0
