"""Strategies: presets, parts by themselves, thresholds, and options that change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pipesd.config import BATCHINGS, CONFIDENCES, TRIGGERS, EdgeConfig, GenerateConfig
from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.policy.strategy import (
    FIRST,
    PRESETS,
    check_together,
    idle_options,
    make_strategy,
    make_trigger,
    without_effect,
)

DRAFTING = [name for name, preset in PRESETS.items() if preset.drafts]


def test_the_presets_are_those_of_the_papers() -> None:
    parts = {name: (p.batching, p.trigger, p.waiting, p.mode) for name, p in PRESETS.items()}
    assert parts["pipesd"] == parts["auto"] == ("dp", "dual", "draft", Mode.NAV)
    assert parts["vanilla"] == ("none", "fixed", "idle", Mode.NAV)
    assert parts["hsl"] == ("none", "token", "idle", Mode.NAV)
    assert parts["edgellm"] == ("none", "adaptive", "draft", Mode.NAV)
    assert parts["cloud"][3] is Mode.FREE and not PRESETS["cloud"].drafts
    assert not PRESETS["local"].uses_cloud
    assert [name for name, preset in PRESETS.items() if preset.guarded] == ["auto"]


@pytest.mark.parametrize("strategy", DRAFTING)
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_each_part_can_be_chosen_by_itself(strategy: str, trigger: str) -> None:
    for batching in BATCHINGS:
        made = make_strategy(EdgeConfig(strategy=strategy, trigger=trigger, batching=batching, waiting="idle"))
        assert (made.name, made.trigger, made.batching, made.waiting) == (strategy, trigger, batching, "idle")
        make_trigger(made)


@pytest.mark.parametrize("trigger", FIRST)
def test_a_threshold_is_that_of_the_trigger_unless_it_is_given(trigger: str) -> None:
    first = make_strategy(EdgeConfig(trigger=trigger))
    assert (first.sequence_threshold, first.token_threshold, first.entropy_threshold) == FIRST[trigger]
    given = make_strategy(EdgeConfig(trigger=trigger, sequence_threshold=0.0, token_threshold=1.0))
    assert (given.sequence_threshold, given.token_threshold, given.entropy_threshold) == (0.0, 1.0, FIRST[trigger][2])


@pytest.mark.parametrize(
    "options, idle",
    [
        ({}, ()),
        ({"strategy": "pipesd", "draft_length": 7}, ("draft_length",)),
        ({"strategy": "vanilla", "draft_length": 7, "token_threshold": 0.5}, ("token_threshold",)),
        ({"strategy": "vanilla", "tuning": "f"}, ("tuning",)),
        ({"strategy": "vanilla", "tuning": "off"}, ()),
        ({"tuning": "f"}, ()),
        ({"tuning": "f", "token_threshold": 0.5}, ("tuning",)),
        ({"trigger": "gain", "sequence_threshold": 0.5}, ("sequence_threshold",)),
        ({"trigger": "entropy", "entropy_threshold": 0.5}, ()),
        ({"strategy": "hsl", "link_model": "hockney"}, ("link_model",)),
        ({"strategy": "hsl", "link_model": "hockney", "batching": "dp"}, ()),
        ({"strategy": "cloud", "batching": "dp", "threads": 2}, ("batching", "threads")),
        ({"confidence": "margin"}, ()),
        ({"trigger": "gain", "confidence": "margin"}, ()),
        ({"trigger": "entropy", "confidence": "margin"}, ("confidence",)),
        ({"strategy": "vanilla", "confidence": "margin"}, ("confidence",)),
        ({"strategy": "cloud", "confidence": "margin"}, ("confidence",)),
        ({"strategy": "local", "trigger": "gain", "connect_s": 1.0, "threads": 2}, ("connect_s", "trigger")),
    ],
)
def test_options_that_change_nothing_are_named(options: dict[str, Any], idle: tuple[str, ...]) -> None:
    assert sorted(without_effect(EdgeConfig(**options))) == sorted(idle)


def test_other_thresholds_are_learnt_for_the_margin() -> None:
    keys = {make_strategy(EdgeConfig(confidence=name)).key for name in CONFIDENCES}
    assert len(keys) == len(CONFIDENCES) and "dual dp draft" in keys, "what was learnt before stays known"


@pytest.mark.parametrize("strategy", PRESETS)
def test_log_probabilities_are_refused_where_nobody_has_them(strategy: str) -> None:
    made = make_strategy(EdgeConfig(strategy=strategy))
    for sampling in ("noise", "rejection"):
        for temperature in (0.0, 0.5):
            options = GenerateConfig(sampling=sampling, temperature=temperature, logprobs=0)
            tested = made.drafts and temperature > 0 and sampling == "rejection"
            if strategy == "local" or tested:
                with pytest.raises(UsageError, match=r"^logprobs "):
                    check_together(made, options)
            else:
                check_together(made, options)
    check_together(made, GenerateConfig(sampling="rejection", temperature=1))


@pytest.mark.parametrize("strategy", PRESETS)
def test_methods_without_effect_are_named_where_nothing_is_drafted(strategy: str) -> None:
    made = make_strategy(EdgeConfig(strategy=strategy))
    named = [] if made.drafts else ["sampling", "top_mass"]
    assert idle_options(made, GenerateConfig(temperature=1, sampling="picospec", top_mass=1)) == named
    assert idle_options(made, GenerateConfig(sampling="picospec", top_mass=1)) == [], "that is said of the temperature"
    assert idle_options(made, GenerateConfig(temperature=1, top_k=2, seed=1)) == []


@pytest.mark.parametrize("name", ["flow", "Pipesd", ""])
def test_other_names_are_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(UsageError, match=r"choose one of auto, pipesd, vanilla"):
        make_strategy(EdgeConfig(strategy=name))
