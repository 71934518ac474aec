"""`pipesd-edge plan` as its users meet it: the answer, the plot at every width, wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipesd.edge.plan import describe
from pipesd.policy.token_batches import plan_of, plan_token_batches
from tests.programs import edge

PAPER = ["--alpha-ms", "25", "--beta-ms", "116", "--gamma-ms", "36"]
NAMES = ("window", "alpha-ms", "beta-ms", "gamma-ms", "gap-ms")


@pytest.mark.parametrize(("window", "total_ms"), [(6, 807.0), (20, 2456.0), (1, 177.0)])
def test_json_is_one_object(window: int, total_ms: float) -> None:
    ran = edge("plan", "--window", window, *PAPER, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1 and ran.out.endswith("\n")
    plan = plan_token_batches(window, 0.025, 0.116, 0.036)
    assert json.loads(ran.out) == {"batches": list(plan.sizes), "total_ms": total_ms}


def test_a_gap_makes_the_streamed_plan() -> None:
    ran = edge("plan", "--window", "20", *PAPER, "--gap-ms", "1", "--json")
    plan = plan_token_batches(20, 0.025, 0.116, 0.036, 0.001)
    assert json.loads(ran.out)["batches"] == list(plan.sizes)
    assert json.loads(ran.out)["total_ms"] == pytest.approx(1000 * plan.total_s, rel=1e-12)
    assert edge("plan", *PAPER, "--gap-ms", "25", "--json").out == edge("plan", *PAPER, "--json").out


def test_neither_numba_nor_numpy_is_loaded_for_one_plan() -> None:
    loaded = "print({'numba', 'numpy'} & set(sys.modules), file=sys.stderr)"
    ran = edge("plan", *PAPER, "--json", before=f"import atexit, sys; atexit.register(lambda: {loaded})\n")
    assert (json.loads(ran.out)["total_ms"], ran.err) == (2456.0, "set()\n")


def test_a_person_reads_sizes_total_and_course() -> None:
    ran = edge("plan", "--window", "6", *PAPER, COLUMNS="60", PYTHONIOENCODING="utf-8")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "6 draft tokens in 3 token batches: 807 ms (hockney)\n"
        "sizes: 1, 3, 2\n"
        "all in one: 937 ms; one each: 882 ms\n"
        "\n"
        "drafting ██▒▒▒▒▒▒▒████·····································\n"
        "link     ··█████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████████████\n"
        "         0                                           807 ms\n"
    )


def test_a_narrow_encoding_gets_ascii() -> None:
    ran = edge("plan", *PAPER, COLUMNS="70", PYTHONIOENCODING="ascii")
    assert ran.out.isascii() and "#" in ran.out and "=" in ran.out and "\\" not in ran.out


@pytest.mark.parametrize("columns", [1, 10, 29, 30, 31, 40, 79, 80, 81, 200])
@pytest.mark.parametrize("window", [1, 6, 500])
def test_the_plot_fits_the_terminal_or_is_left_out(columns: int, window: int) -> None:
    text = describe(plan_token_batches(window, 0.025, 0.003, 0.036, 0.001), columns, ascii_only=True)
    lines = text.splitlines()
    assert text.endswith("\n") and len(lines) == (7 if columns >= 30 else 3)
    assert all(len(line) < columns for line in lines[4:])
    assert len({len(line) for line in lines[4:]}) <= 1


def test_the_plot_shows_when_what_happens() -> None:
    plan = plan_of((1, 2), 0.04, 0.01, 0.01, 0.01)  # link: 0.01 to 0.03, 0.03 to 0.06; then 0.03 on its way
    assert plan.total_s == pytest.approx(0.09)
    drafting, link, axis = describe(plan, 9 + 90 + 1, ascii_only=True).splitlines()[-3:]
    assert drafting == "drafting " + "#" * 10 + "=" * 20 + "." * 60
    assert link == "link     " + "." * 10 + "#" * 20 + "=" * 30 + ">" * 30
    assert axis.split() == ["0", "90", "ms"]


def test_long_plans_count_equal_neighbours() -> None:
    plan = plan_of((1,) * 300 + (2, 5, 5), 0.04, 0.01, 0.01, 0.01)
    assert "sizes: 300 × 1, 2, 2 × 5\n" in describe(plan, 80, ascii_only=False)
    assert "sizes: 300 x 1, 2, 2 x 5\n" in describe(plan, 80, ascii_only=True)


def test_where_nothing_takes_time_there_is_no_plot() -> None:
    ran = edge("plan", "--window", "1", "--alpha-ms", "0", "--beta-ms", "0", "--gamma-ms", "0")
    assert ran.out.splitlines()[0] == "1 draft token in 1 token batch: 0 ms (hockney)"
    assert ran.out.count("\n") == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e300", "x"])
def test_a_bad_value_is_refused_by_its_name(name: str, value: str) -> None:
    others = [word for flag in NAMES[1:4] if flag != name for word in (f"--{flag}", "10")]
    ran = edge("plan", *others, f"--{name}={value}", "--json")
    assert ran.code == 2 and json.loads(ran.out)["error"], "one object, on failure too"
    assert f"{name}: " in ran.complaint


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--window", "0", *PAPER], "window: got 0, wanted 1 to 4096"),
        (["--window", "4097", *PAPER], "window: got 4097, wanted 1 to 4096"),
        (["--window", "2.5", *PAPER], "argument --window: invalid int value: '2.5' (see pipesd-edge plan --help)"),
        ([*PAPER, "--gap-ms", "26"], "gap-ms: got 26, wanted at most alpha-ms, 25, of which it is a part"),
        (PAPER[:4], "plan needs --gamma-ms X"),
        ([], "plan needs --alpha-ms X and --beta-ms X and --gamma-ms X"),
        ([*PAPER, "--windows", "6"], "unknown option --windows, did you mean --window?"),
    ],
)
def test_wrong_use(words: list[str], complaint: str) -> None:
    ran = edge("plan", *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaint.startswith(f"pipesd-edge: {complaint}")


def test_a_configuration_file_may_hold_the_numbers(tmp_path: Path) -> None:
    file = tmp_path / "link.toml"
    file.write_text("[plan]\nalpha-ms = 25\nbeta-ms = 116\ngamma-ms = 36\nwindow = 20\n[edge]\nthreads = 1\n")
    assert json.loads(edge("plan", "--config", file, "--window", "6", "--json").out)["total_ms"] == 807.0
    assert json.loads(edge("plan", "--config", file, "--json").out)["total_ms"] == 2456.0
    file.write_text("[plan]\nalpha-ms = -25\n")
    assert "plan needs --beta-ms X and --gamma-ms X" in edge("plan", "--config", file).complaint
    assert "alpha-ms: got -25," in edge("plan", "--config", file, *PAPER[2:]).complaint
