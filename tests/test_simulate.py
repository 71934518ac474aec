"""The simulator against the real session in another virtual world: the same ids, counts and times."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traced import both, link_of, random_scene, record_of
from virtual import Scene

from pipesd import simulate
from pipesd.errors import UsageError
from pipesd.sim.check import check_file
from pipesd.sim.synthetic import synthetic_trace

PROMPTS = ([256, 72, 105], [256, 72, 105, 33, 10], [256, 87])
TOKENS = 50


def agree(told: dict[str, Any], simulated: dict[str, Any], rounded: int = 0) -> None:
    """Statistics are the same: counts exactly, times to what they are rounded to. A wait is rounded up to whole ms: as
    the two clocks began at different times, so many waits may have been rounded up to the next."""
    assert told.keys() == simulated.keys() - {"user", "record"}
    near_s = 2e-6 + 1e-3 * rounded
    for name, value in told.items():
        if isinstance(value, float):
            assert simulated[name] == pytest.approx(value, abs=near_s * (1e3 if name.endswith("_ms") else 1)), name
        else:
            assert simulated[name] == value, name


@pytest.mark.parametrize("seed", range(20))
def test_it_shows_what_a_real_session_shows(seed: int) -> None:
    scene = random_scene(seed)
    _, told, simulated = both(scene, PROMPTS, TOKENS)
    assert [ids for ids, _ in told] == list(simulated.ids)
    for (_, stats), each in zip(told, simulated.each, strict=True):
        agree(stats, dict(each))


@pytest.mark.parametrize("seed", range(8))
def test_it_shows_the_same_when_the_link_is_cut(seed: int) -> None:
    scene = replace(random_scene(100 + seed), up_bytes_per_draft_token=0)
    cuts, lasts_s = [0.31 + 0.1 * seed, 1.7], 0.04 + 0.05 * (seed % 5)
    world, told, simulated = both(scene, PROMPTS, TOKENS, cuts, lasts_s)
    assert "cut" in world.happened
    assert [ids for ids, _ in told] == list(simulated.ids)
    for (_, stats), each in zip(told, simulated.each, strict=True):
        agree(stats, dict(each), rounded=4)


def test_jitter_that_is_always_the_same_is_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = random_scene(3)
    records, pace = [record_of(scene, prompt, TOKENS) for prompt in PROMPTS], {"gamma_s": 0.007, "pass_s": 0.041}
    late = simulate(
        records, link=replace(link_of(scene), latency_s=scene.delay_s + 0.0031), settings=scene.edge, **pace
    )
    monkeypatch.setattr("random.Random.random", lambda _: 0.5)
    jittered = simulate(records, link=link_of(scene, jitter_s=0.0062), settings=scene.edge, **pace)
    assert jittered.tpt_ms == pytest.approx(late.tpt_ms, abs=1e-3) and jittered.ids == late.ids


def test_what_is_tried_while_it_runs_follows_the_seed() -> None:
    records = synthetic_trace(3, 90, seed=4).records
    runs = [simulate(records, gamma_s=0.01, pass_s=0.05, seed=seed) for seed in (0, 1, 1)]
    assert runs[0].tpt_ms != runs[1].tpt_ms == runs[2].tpt_ms


def test_chance_follows_its_seed() -> None:
    scene = random_scene(4)
    records = [record_of(scene, prompt, TOKENS) for prompt in PROMPTS]

    def run(seed: int) -> Any:
        link = link_of(scene, jitter_s=0.01, loss=0.02, cuts=[(1.0, 0.2)])
        return simulate(records, link=link, gamma_s=0.01, pass_s=0.05, users=2, seed=seed, settings={"strategy": "hsl"})

    assert run(1) == run(1)
    assert run(1).elapsed_s != run(2).elapsed_s


@pytest.mark.parametrize("strategy", ["cloud", "vanilla", "edgellm", "pipesd", "auto"])
def test_its_event_log_stands_up_to_the_checker(strategy: str, tmp_path: Path) -> None:
    scene = replace(random_scene(5), edge={"strategy": strategy, "tuning": "off"})
    log = str(tmp_path / "events.jsonl")
    link = link_of(scene, jitter_s=0.004, loss=0.01, cuts=[(0.9, 0.3)])
    simulate(
        [record_of(scene, prompt, TOKENS) for prompt in PROMPTS], link=link, gamma_s=0.006, pass_s=0.04,
        settings={**scene.edge, "events": log},
    )  # fmt: skip
    assert not check_file(log)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"users": 4}, "users 4"),
    ({"users": 0}, "users 0"),
    ({"gamma_s": -1.0}, "gamma_s -1"),
    ({"pass_s": math.nan}, "pass_s nan"),
    ({"max_tokens": 0}, "max_tokens 0"),
    ({"gamma_s": "1"}, "gamma_s '1': want seconds from 0"),
    ({"pass_s": None}, "pass_s None"),
    ({"users": 1.5}, "users 1.5: want a whole number"),
    ({"users": True}, "users True"),
    ({"seed": "x"}, "seed 'x': want a whole number"),
    ({"max_tokens": "8"}, "max_tokens '8': want a whole number"),
    ({"settings": {"foo": 1}}, "unknown option 'foo'"),
    ({"settings": {"strateg": "cloud"}}, "did you mean 'strategy'"),
    ({"settings": {"draft_length": "4"}}, "draft-length: got '4'"),
    ({"settings": {"strategy": "none"}}, "unknown strategy"),
    ({"settings": {"events": "log"}, "users": 2}, "events"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=str)
def test_what_cannot_be_run_is_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    records = [record_of(Scene(), prompt, 8) for prompt in PROMPTS]
    with pytest.raises(UsageError, match=said) as caught:
        simulate(records, **{"gamma_s": 0.01, "pass_s": 0.05, **given})
    assert "\n" not in str(caught.value)
