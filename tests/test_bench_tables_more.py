"""The benches of the tuner, of thresholds, of token batching, of many clients and of the fit: what each has to hold."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipesd.errors import UsageError
from pipesd.policy.token_batches import TokenBatchPlan, plan_of
from pipesd.policy.tuning import TRIAL_TOKENS
from pipesd.sim.link_model import Link
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace
from pipesd.sim.trace import Record

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))
import autotuner  # noqa: E402
import batching  # noqa: E402
import fitting  # noqa: E402
import plan_cases  # noqa: E402
import searches  # noqa: E402
import stamp  # noqa: E402
import thresholds  # noqa: E402
import users  # noqa: E402
from measuring import Cell, Row, run_row  # noqa: E402
from plan_cases import Case  # noqa: E402

FEW = ("--seeds", "2", "--samples", "2", "--tune-tokens", "4", "--tokens", "6", "--regime", "fat")
STANDING = {"cloud only", "edge only", "co-located", "vanilla", "hsl", "edgellm", "pipesd"}
PAPER = Case(0.025, 0.116, 0.036, 0.025, 6)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "humaneval.jsonl.gz"
    synthetic_trace(6, 24, acceptance=0.8, seed=3).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def _no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "commit", lambda: {"commit": None, "dirty": None})


def run(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *words: str
) -> tuple[int, str, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", [f"{bench.__name__}.py", *words, "--results", str(folder)])
    code = bench.main()
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


def test_the_tuner_stands_beside_grid_and_chance_with_equal_budgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    code, out, found = run(autotuner, monkeypatch, capsys, tmp_path, *FEW, "--traces", trace)
    assert code == 0
    (cell,) = found["cells"]
    rows = cell["rows"]
    assert {*STANDING, "first", "online", *searches.WAYS} <= set(rows)
    assert {tuple(rows[way]["samples"]) for way in searches.WAYS} == {(2, 2)}
    assert all(len(tried) == 2 for way in searches.WAYS for tried in rows[way]["tried"])
    assert rows["grid"]["printed"] == {"ms_per_token": 139} and rows["tuner"]["printed"] == {"ms_per_token": 129}
    assert {"mean", "low", "high", "verdict"} == set(rows["grid"]["over_tuner"])
    assert all({"kind", "ms_per_token", "cloud_s_per_1000_tokens"} <= set(row) for row in rows.values())
    assert "over tuner" in out


@pytest.mark.parametrize("samples", ["0", "17"])
def test_samples_that_a_grid_cannot_have_are_refused(samples: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["autotuner", "--samples", samples])
    with pytest.raises(UsageError, match=f"got {samples}, wanted 1 to 16"):
        importlib.import_module("autotuner").main()


def test_every_way_asks_for_as_many_samples_of_the_same_pieces() -> None:
    asked: dict[str, list[int]] = {}
    for way, search in searches.WAYS.items():
        asked[way] = []

        def cost(number: int, thresholds: searches.Thresholds, way: str = way) -> float:
            asked[way].append(number)
            return 0.1 + (thresholds["sequence_threshold"] - 0.3) ** 2 + (thresholds["token_threshold"] - 0.6) ** 2

        found = search(cost, 16, 0)
        assert len(found.samples) == 16
        if way not in ("tuner", "tuner xi 0.1"):  # theirs is the best beyond noise, not the luckiest
            assert found.thresholds in [sample.thresholds for sample in found.samples]
    assert set(map(tuple, asked.values())) == {tuple(range(16))}


def test_the_grid_is_4_by_4_in_the_square() -> None:
    found = searches.by_grid(lambda number, thresholds: 1.0 + number, 16, 3)
    sides = sorted({sample.thresholds["sequence_threshold"] for sample in found.samples})
    assert sides == [0.125, 0.375, 0.625, 0.875]
    assert len({tuple(sample.thresholds.values()) for sample in found.samples}) == 16


def test_a_piece_is_the_rest_of_its_record() -> None:
    (record,) = synthetic_trace(1, 3 * TRIAL_TOKENS, acceptance=0.7).records
    made = list(searches.pieces([record], 6, 0))
    assert len(made) == 6 and len({piece.prompt for piece in made}) == 3
    for piece in made:
        assert piece.prompt + piece.output == record.prompt + record.output
        start = len(record.output) - len(piece.output)
        assert [piece.continuation(i) for i in range(5)] == [record.continuation(start + i) for i in range(5)]


def test_thresholds_say_what_of_the_square_is_useless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    plot = tmp_path / "map.png"
    words = ("--side", "3", "--traces", trace, "--plot", str(plot))
    code, out, found = run(thresholds, monkeypatch, capsys, tmp_path, *FEW, *words)
    assert code == 0 and plot.stat().st_size > 0
    (cell,) = found["cells"]
    assert set(cell["rows"]) >= STANDING
    here = cell["surface"]
    assert here["useless_settings"] == 6 and here["settings"] == 9
    assert here["useless_changes_nothing"] and len(here["ms_per_token"]) == 3
    assert here["best"]["ms_per_token"] == min(map(min, here["ms_per_token"]))
    assert "useless, as R2 <= R1" in out and cell["rows"]["pipesd"]["over_best"] > 0


def test_a_surface_where_r2_matters_although_it_is_below_r1_is_a_finding() -> None:
    flat = ((5.0, 4.0, 3.0), (2.0, 2.0, 1.0), (1.0, 1.0, 1.0))
    assert thresholds.Surface((0.1, 0.5, 0.9), flat).useless_changes_nothing()
    bent = (*flat[:2], (1.0, 1.1, 1.0))
    assert not thresholds.Surface((0.1, 0.5, 0.9), bent).useless_changes_nothing()


def test_the_plan_is_never_behind_for_a_known_length() -> None:
    assert plan_cases.total_s("dp", PAPER) == pytest.approx(0.807)
    assert plan_cases.total_s("none", PAPER) == pytest.approx(0.937)
    assert plan_cases.total_s("immediate", PAPER) == pytest.approx(0.882)
    made = plan_cases.cases(300, seed=1)
    assert {case.gap_s == case.alpha_s for case in made} == {True, False}
    for case in made:
        times = {policy: plan_cases.total_s(policy, case) for policy in plan_cases.POLICIES}
        assert times["dp"] <= min(times.values()) * (1 + 1e-9), (case, times)
        assert sum(plan_cases.sizes_by("greedy", case)) == case.length


def test_the_runtime_takes_what_the_recurrence_says() -> None:
    for policy in plan_cases.POLICIES:
        wanted = plan_cases.total_s(policy, PAPER)
        assert plan_cases.simulated_s(policy, PAPER) == pytest.approx(wanted, rel=0.01), policy


def behind(known: dict[str, Any]) -> int:
    return sum(len(said["plan_behind"]) for regime in known.values() for kind in batching.BEHIND
               for said in regime[kind].values())  # fmt: skip


@pytest.fixture
def broken_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A planner that always gives one token batch."""

    def plan(window: int, *link: float, **_: Any) -> TokenBatchPlan:
        return plan_of((window,), *link)

    monkeypatch.setattr(plan_cases, "plan_token_batches", plan)
    monkeypatch.setattr("pipesd.policy.token_batches.plan_token_batches", plan)
    yield


SOME = [PAPER, PAPER._replace(gap_s=0.001, beta_s=0.03)]


def test_a_plan_that_is_not_behind_is_said_to_be_so() -> None:
    assert behind(batching.known_length(SOME)) == 0


def test_a_broken_plan_is_found_by_recurrence_and_simulation(broken_plan: None) -> None:
    known = batching.known_length(SOME)
    assert all(regime[kind]["greedy"]["plan_behind"] for regime in known.values() for kind in batching.BEHIND)


def test_batching_ends_with_1_where_the_plan_is_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    monkeypatch.setattr(batching, "cases", lambda count, seed: SOME)
    words = (*FEW, "--traces", trace)
    code, out, found = run(batching, monkeypatch, capsys, tmp_path, *words)
    assert code == 0
    (cell,) = found["cells"]
    assert {*STANDING, "greedy", "immediate", "none"} <= set(cell["rows"])
    assert cell["known_length"]["printed"] == [1.02, 2.06]
    assert "random length" in out and "known length" in out
    monkeypatch.setattr(plan_cases, "plan_token_batches", lambda window, *link: plan_of((window,), *link))
    code, out, _ = run(batching, monkeypatch, capsys, tmp_path, *words)
    assert code == 1 and "THE PLAN IS BEHIND" in out


def test_one_client_of_many_is_the_single_one() -> None:
    records = synthetic_trace(3, 24, acceptance=0.8, seed=5).records
    link = Link.streamed(0.025, 0.0001, up_bytes_per_s=2.5e6, down_bytes_per_s=25e6, jitter_s=0.002)
    cell = Cell("", "", records, link, 0.036, 0.03, 0.0005, 1)
    row = Row({"strategy": "pipesd"})
    each = run_row(row, cell, records[:1], tokens=24, seed=4, found={})
    alone = simulate(records[:1], link=link, gamma_s=0.036, pass_s=0.03, token_s=0.0005, max_tokens=24, seed=4,
                     settings={"strategy": "pipesd", "tuning": "off"})  # fmt: skip
    assert each[0].items() >= alone.each[0].items() and len(alone.each) == 1
    together = run_row(row, cell._replace(users=3), records, tokens=24, seed=4, found={})
    assert len(together) == 3 and {stats["user"] for stats in together} == {0, 1, 2}


def test_clients_have_all_rows_and_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str
) -> None:
    words = (*FEW, "--traces", trace, "--users", "1", "2")
    code, out, found = run(users, monkeypatch, capsys, tmp_path, *words)
    assert code == 0
    one, two = found["cells"]
    assert (one["users"], two["users"]) == (1, 2) and set(two["rows"]) >= STANDING
    assert two["rows"]["vanilla"]["printed"]["pipesd_lower_percent"] == [22.9, 37.1]
    assert "pipesd_lower_percent" not in one["rows"]["vanilla"]["printed"]
    lower = two["rows"]["hsl"]["pipesd_lower_percent"]["mean"]
    assert lower == pytest.approx(100 * (1 - 1 / two["rows"]["hsl"]["over_pipesd"]["mean"]), abs=1e-3)
    assert "22.9 to 37.1" in out


CLEAN = {
    "hockney": Link.hockney(0.02, up_bytes_per_s=1e6, down_bytes_per_s=1e7, up_bytes_per_draft_token=30_000),
    "streamed": Link.streamed(0.02, 0.002, up_bytes_per_s=1e6, down_bytes_per_s=1e7, up_bytes_per_draft_token=3000),
}


@pytest.mark.parametrize("name", CLEAN)
def test_the_fit_finds_a_clean_link(name: str) -> None:
    records: tuple[Record, ...] = synthetic_trace(2, 60, acceptance=0.8, seed=2).records
    settings = {"link_model": name, "waiting": "idle"}  # else answers lie unread while a token is drafted
    cell = Cell("", "", records, CLEAN[name], 0.03, 0.02, settings=settings)
    before = fitting.Monitor.round_trip
    with fitting.watched() as seen:
        run_row(Row({"strategy": "pipesd"}), cell, records, tokens=60, seed=0, found={})
    assert fitting.Monitor.round_trip is before  # nothing stays watched
    known = fitting.known_of(CLEAN[name], 0.03, seen.elapsed_s)
    found = fitting.Known.of(seen.estimate)
    for figure, true in known._asdict().items():
        assert getattr(found, figure) == pytest.approx(true, rel=0.01), figure
    assert len(seen.samples) > 5 and seen.begun_s
    off = fitting.errors_ms(found._replace(alpha_s=0.021), known)["alpha"]
    assert off == pytest.approx(1.0, abs=0.05)
