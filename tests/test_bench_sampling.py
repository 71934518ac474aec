"""The bench of sampling: its formulas against slow ones, and that it runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))
import exactness_sampled  # noqa: E402
import sampling as bench  # noqa: E402
from acceptance import KINDS, VARIANTS, Tally, coupled, overlap, predictor_table, roc_area  # noqa: E402
from both_rows import Place  # noqa: E402
from replay import DictatedTarget, Replay  # noqa: E402
from sampled_runs import SUMS, row_of, run_table  # noqa: E402

from pipesd.errors import UsageError  # noqa: E402
from pipesd.policy.accept import Draw  # noqa: E402
from pipesd.policy.sampler import Sampler  # noqa: E402
from pipesd.policy.sampling import Sampling  # noqa: E402
from pipesd.sim.tokeniser import byte_vocabulary  # noqa: E402
from pipesd.sim.trace import Guess, Record, Trace  # noqa: E402


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=7))
def test_the_formula_of_shared_noise_is_the_plain_double_sum(weights: list[tuple[int, int]]) -> None:
    p, q = (np.array(side, float) for side in zip(*weights, strict=True))
    if not p.sum() or not q.sum():
        return
    p, q = p / p.sum(), q / q.sum()
    both = [i for i in range(len(p)) if p[i] and q[i]]
    assert coupled(p, q) == pytest.approx(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both))
    apart = 1 - overlap(p, q)
    assert (1 - apart) / (1 + apart) - 1e-12 <= coupled(p, q) <= 1 - apart + 1e-12


def test_the_area_under_the_curve_counts_pairs() -> None:
    random = np.random.default_rng(1)
    scores, right = random.integers(5, size=60).astype(float), random.random(60) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[right] for b in scores[~right]]
    assert roc_area(scores, right) == pytest.approx(np.mean(pairs))
    assert math.isnan(roc_area(scores, np.ones(60, bool)))


def test_a_tally_counts_what_its_formulas_say() -> None:
    """Six texts of logits that are mostly alike, at four places each."""
    random = np.random.default_rng(2)
    tally = Tally(0.8, 40)
    for _ in range(6):
        places = []
        for at in range(4):
            row = random.normal(0, 2, 60).astype(np.float32)
            near = (row + random.normal(0, 0.7, 60)).astype(np.float32)
            places.append(Place(tuple(range(5 + at)), near[:58], row))
        tally.text(places)
    found = tally.acceptance()
    assert tally.places == 24 and list(found) == list(VARIANTS)
    for rates in found.values():
        tested, counted, same, counted_too = (rates[kind] for kind in KINDS)
        assert counted.value == pytest.approx(tested.value, abs=0.05)
        assert counted_too.value == pytest.approx(same.value, abs=0.05)
        assert tested.low < tested.value < tested.high and same.value < tested.value
    areas = tally.predictors()
    assert all(0.5 < areas[name].value < 1 for name in ("p_draft", "margin", "both"))
    difference = areas["margin"].value - areas["p_draft"].value
    assert areas["margin - p_draft"].value == pytest.approx(difference)
    assert "foretells acceptance" in predictor_table({0.8: areas})[-1]


def test_a_trace_dictates_what_is_sampled() -> None:
    """Its ids come under any options, and a draft token that equals one is accepted."""
    guess = Guess(5, 0.5, 1.0, 6, 0.25)
    record = Record((1, 2), (5, 6, 7), (guess, guess, guess), {}, 3)
    trace = Trace("d", "t", "", 512, (), (record,), {"temperature": 1.0})
    target = Replay(trace, byte_vocabulary(), {})()
    assert isinstance(target, DictatedTarget)
    draw = Draw(Sampler(Sampling(temperature=100.0), 3), (1, 2), (5, 9))
    (choices,) = target.sample([(0, (1, 2, 5, 9), 3)], [draw])
    assert choices.ids[:2] == (5, 6) and choices.accepted == 1


def test_a_row_sums_its_generations() -> None:
    stats: dict[str, Any] = dict.fromkeys(SUMS, 0) | {"tokens": 10, "accepted": 6, "acceptance_per_token": 0.75}
    stats |= {"tpt_ms": 20.0, "bytes_up": 100, "bytes_down": 50, "sampling_error": 0.1}
    other = stats | {"tokens": 30, "tpt_ms": 40.0, "acceptance_per_token": 0.5, "sampling_error": 0.2}
    row = row_of(0.8, "picospec, 32", "vanilla", "real", [stats, other], 0)
    assert (row.ms_per_token, row.bytes_up_per_token, row.sampling_error) == (35.0, 5.0, 0.2)
    assert row.acceptance_per_token == pytest.approx(12 / 20)
    assert "0.600" in run_table([row])[1] and "real" in run_table([row])[1]


def test_the_cost_of_a_choice_needs_no_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--only", "cost", "--quick"])
    assert bench.main() == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    for forms in said["cost"]["rows"].values():
        assert {"numpy argmax", "plain draw", "greedy", "temperature"} < set(forms)
        assert all(0 < ms["best_ms"] <= ms["median_ms"] for ms in forms.values())


class FakeDrafter:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.tokeniser = self

    def encode(self, text: str, special: bool) -> list[int]:
        return list(text.encode())

    def close(self) -> None: ...


def test_work_on_exactness_is_taken_up_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[str, int]] = []

    @contextmanager
    def cloud(target: str, dtype: str) -> Iterator[tuple[str, int]]:
        yield dtype, 0

    def seed_of(checked: Any, where: tuple[str, int], seed: int, *_: object) -> dict[str, Any]:
        done.append((where[0], seed))
        if seed == 2:
            checked.findings.append("other ids from number 5 on")
        sums = dict.fromkeys(("ids", "runs", "accepted", "cut", "killed"), 1)
        return {"seed": seed, **sums}

    for name, stand_in in (("cloud", cloud), ("seed_of", seed_of), ("Drafter", FakeDrafter)):
        monkeypatch.setattr(exactness_sampled, name, stand_in)
    words = ["x", "--draft", "d", "--target", "t", "--results", str(tmp_path / "results")]

    def run(*more: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        code = exactness_sampled.main()
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    code, said = run("--seeds", "0:2")
    assert (code, said["seeds"], said["findings"]) == (0, 4, 0)
    assert done == [("float32", 0), ("float32", 1), ("bfloat16", 0), ("bfloat16", 1)]
    code, said = run("--seeds", "0:3", "--dtypes", "bfloat16")
    assert (code, said["seeds"], said["findings"]) == (1, 5, 1) and done[4:] == [("bfloat16", 2)]


@pytest.mark.parametrize(
    "words, why", [(["--only", "cost,what"], "no part 'what'"), ([], "give --draft FILE.gguf and --target")]
)
def test_what_is_missing_is_said(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", *words])
    with pytest.raises(UsageError, match=why):
        bench.main()
