"""Thresholds searched for while a run goes on: trials, the best, another search, and what another run goes on from."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from clouds import LAW, PROMPT, edge, ids_of, said, serving

from pipesd.config import EdgeConfig
from pipesd.edge.tuning_file import load
from pipesd.errors import UsageError
from pipesd.policy.strategy import make_strategy, make_trigger
from pipesd.policy.tuning import SPACES, TRIAL_TOKENS, Tuning, point_of, settings_of, values_of

P_DRAFT = [(7 * k % 10) / 10 for k in range(1, 60)]
ENTROPY = [(3 * k % 11) / 2 for k in range(1, 60)]


def strategy(**options: Any) -> Any:
    return make_strategy(EdgeConfig(**options))


def search(tuning: Tuning, tpt_s: Callable[[dict[str, Any]], float], rounds: int = 500) -> list[str]:
    """Rounds of 5 tokens in the time that the setting in force takes; why there was another one."""
    whys = []
    for _ in range(rounds):
        why = tuning.round_end(5, 5 * tpt_s(tuning.options))
        if why:
            whys.append(why)
        if tuning.done:
            break
    return whys


@pytest.mark.parametrize("trigger", SPACES)
def test_every_point_of_a_space_can_be_set_and_is_what_it_stands_for(trigger: str) -> None:
    chance = random.Random(trigger)
    known = {f.name for f in fields(EdgeConfig)}
    for _ in range(50):
        point = {name: p.value(chance.choice([0.0, 1.0, chance.random()])) for name, p in SPACES[trigger].items()}
        bare = strategy(strategy="pipesd", trigger=trigger)
        options = settings_of(bare, point)
        assert set(options) <= known and options == values_of(bare, point)
        made = strategy(strategy="pipesd", trigger=trigger, **options)
        assert point_of(made) == pytest.approx(point, abs=1e-9)
        running = make_trigger(strategy(strategy="pipesd", trigger=trigger))
        for name, value in options.items():
            setattr(running, name, value)
        fresh = make_trigger(made)
        asked = [(running.observe(p, h), fresh.observe(p, h)) for p, h in zip(P_DRAFT, ENTROPY, strict=True)]
        assert all(a == b for a, b in asked), "set while it runs, or from the start"


def test_the_region_searched_is_where_the_token_threshold_matters() -> None:
    space = SPACES["dual"]
    for unit in (0.0, 0.3, 1.0):
        for share in (0.0, 0.5, space["token_share"].high):
            point = {"sequence_threshold": space["sequence_threshold"].value(unit), "token_share": share}
            options = values_of(strategy(), point)
            assert options["sequence_threshold"] <= options["token_threshold"] <= 1.0


def test_a_search_is_sixteen_trials_of_twenty_tokens_and_finds_what_is_faster() -> None:
    tuning = Tuning(strategy())
    first = tuning.options

    def tpt_s(options: dict[str, Any]) -> float:
        return 0.03 + 0.05 * (options["sequence_threshold"] - 0.6) ** 2 + 0.02 * (options["token_threshold"] - 0.8) ** 2

    whys = search(tuning, tpt_s)
    assert whys == ["next trial"] * 15 + ["best of the search"]
    assert tuning.trials[0][0] == first, "what is in force is the first to be measured"
    assert tpt_s(tuning.options) < tpt_s(first) - 0.003


def test_a_trial_goes_on_over_rounds_until_it_has_its_tokens() -> None:
    tuning = Tuning(strategy())
    assert tuning.round_end(TRIAL_TOKENS - 1, 1.0) is None
    assert tuning.round_end(1, 1.0) == "next trial"
    ((_, tpt_s),) = tuning.trials
    assert tpt_s == pytest.approx(2.0 / TRIAL_TOKENS)


def test_where_nothing_is_better_the_first_stays() -> None:
    tuning = Tuning(strategy())
    first = tuning.options
    search(tuning, lambda options: 0.03)
    assert tuning.done and tuning.options == pytest.approx(first)


def test_another_time_per_token_begins_another_search_from_what_is_in_force() -> None:
    tuning = Tuning(strategy())
    search(tuning, lambda options: 0.03 + 0.05 * abs(options["sequence_threshold"] - 0.5))
    best = tuning.options

    def rounds(tpt_s: float) -> list[str | None]:
        return [tuning.round_end(5, 5 * tpt_s) for _ in range(40)]

    assert set(rounds(0.03)) == {None}, "what it is compared with"
    assert set(rounds(0.035)) == {None}, "a sixth is chance"
    assert "the time per token changed" in rounds(0.04)
    assert not tuning.done and tuning.trials == [] and tuning.options == pytest.approx(best)


def test_another_run_goes_on_where_the_last_one_stopped() -> None:
    tuning, whole = Tuning(strategy()), Tuning(strategy())

    def tpt_s(options: dict[str, Any]) -> float:
        return 0.03 + 0.05 * abs(options["sequence_threshold"] - 0.5)

    search(tuning, tpt_s, rounds=20)
    assert tuning.news
    state = json.loads(json.dumps(tuning.state()))
    assert not tuning.news
    resumed = Tuning(strategy(), state)
    assert resumed.options == tuning.options
    search(resumed, tpt_s)
    search(whole, tpt_s)
    assert resumed.done and resumed.options == pytest.approx(whole.options, abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("tuner"),
        lambda state: state.update(searches="x"),
        lambda state: state.update(searches=-5),
        lambda state: state.update(reference_s="x"),
        lambda state: state.update(reference_s=math.nan),
        lambda state: state["tuner"].update(trials=[[state["tuner"]["first"], 10**400]]),
        lambda state: state["tuner"].update(version=99),
        lambda state: state["tuner"]["space"].pop("token_share"),
        lambda state: state["tuner"]["space"]["token_share"].update(high=2.0),
    ],
)
def test_a_state_that_is_none_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    state = json.loads(json.dumps(Tuning(strategy()).state()))
    change(state)
    with pytest.raises(UsageError):
        Tuning(strategy(), state)


def test_a_threshold_that_is_given_is_kept() -> None:
    assert strategy().tuned
    assert not strategy(token_threshold=0.5).tuned and not strategy(tuning="off").tuned
    assert not strategy(strategy="hsl").tuned and not strategy(trigger="gain").tuned
    assert strategy(sequence_threshold=0.0).sequence_threshold == 0.0


def test_what_a_run_learns_the_next_one_knows(tmp_path: Path) -> None:
    """Two sessions, one after the other, with a file between them: the trials of both make one search."""
    file = tmp_path / "folder" / "tuning.json"
    tokens = 5 * TRIAL_TOKENS
    told = []
    with serving() as cloud:
        for _ in range(2):
            with edge(cloud.address, tuning=str(file), strategy="pipesd") as session:
                assert ids_of(session, PROMPT, max_tokens=tokens) == said(LAW, PROMPT, tokens)
            (state,) = (load(str(file)) or {}).values()
            told.append(state["tuner"]["told"])
    assert told[0] >= 2 and told[1] >= told[0] + 2


def test_a_file_that_is_damaged_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tuning.json"
    file.write_text("{")
    with serving() as cloud, edge(cloud.address, tuning=str(file)) as session:
        assert ids_of(session, PROMPT, max_tokens=50) == said(LAW, PROMPT, 50)
    assert "damaged" in caplog.text and file.read_text() == "{"
