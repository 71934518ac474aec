"""What a session counts and writes down of a generation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clouds import LAW, Serving, edge, ids_of, recorded, said, serving

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.errors import UsageError
from pipesd.metrics import Meter, Tally, summary
from pipesd.sim.check import check_file
from pipesd.sim.drafters import Agreement, DraftScript, ScriptedDrafter
from pipesd.sim.tokeniser import ByteTokeniser

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(max_sessions=12) as served:
        yield served


def test_statistics_of_a_known_script() -> None:
    """Nine drafted and five accepted, three drafted and two accepted, none drafted for the one token that is left."""
    prompt = [*b"count"]
    law = recorded(prompt, [*b"0123456789"])
    with serving(law) as cloud:
        script = DraftScript([*b"01234x67x"], 0.5, start=len(prompt))
        with edge(cloud.address, proposal=script, strategy="vanilla", draft_length=9) as session:
            assert ids_of(session, prompt, max_tokens=10) == [*b"0123456789"]
            stats = session.stats
    assert (stats["drafted"], stats["verified"], stats["accepted"]) == (12, 12, 7)
    assert (stats["rounds"], stats["navs"], stats["target_passes"], stats["tokens"]) == (3, 3, 3, 10)
    assert stats["acceptance_rate"] == pytest.approx(7 / 12, abs=1e-6)
    assert stats["acceptance_per_token"] == pytest.approx(7 / 9, abs=1e-6)
    assert stats["acceptance_by_position"] == [1.0, 1.0, 0.5, 1.0, 1.0, 0.0]
    assert (stats["promoted"], stats["discarded"], stats["stale"], stats["openings"]) == (0, 0, 0, 1)
    assert session.finish_reason == "length"


def test_nothing_drafted_is_none_and_not_a_number_that_is_none(cloud: Serving) -> None:
    with edge(cloud.address, strategy="cloud") as session:
        ids_of(session, PROMPT, max_tokens=10)
        stats = session.stats
    assert [stats[n] for n in ("acceptance_rate", "acceptance_per_token", "gamma_ms")] == [None] * 3
    assert stats["acceptance_by_position"] == [] and stats["drafted"] == 0
    assert "NaN" not in json.dumps(stats) and stats["target_passes"] == 10


def test_every_statistic_is_explained() -> None:
    """Each name stands in the first column of the page's first table."""
    page = (Path(__file__).parents[1] / "docs" / "statistics.md").read_text(encoding="utf-8").split("## Event logs")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", "".join(row[1:]))}
    assert not summary(Tally(), Meter(0.0)).keys() - explained


def test_statistics_of_a_session_that_never_generated(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        assert (session.stats, session.text, session.token_ids, session.finish_reason) == ({}, "", (), None)


def test_a_token_costs_few_bytes(cloud: Serving) -> None:
    for strategy, most in (("vanilla", 25), ("cloud", 40), ("auto", 40)):
        with edge(cloud.address, agreement=0.8, draft_length=4, strategy=strategy) as session:
            ids_of(session, PROMPT, max_tokens=300)
            stats = session.stats
        assert stats["bytes_up"] + stats["bytes_down"] <= most * 300
        if strategy == "vanilla":  # how much `auto` drafts hangs on what drafts bring on this machine
            assert 0.6 < stats["acceptance_per_token"] < 0.95


def test_times_of_a_paced_target() -> None:
    with serving(target={"pass_s": 0.01}) as cloud:
        with edge(cloud.address, strategy="cloud") as session:
            ids_of(session, PROMPT, max_tokens=40)
            alone = session.stats
        with edge(cloud.address, agreement=1.0, strategy="vanilla", draft_length=4) as session:
            ids_of(session, PROMPT, max_tokens=40)
            drafted = session.stats
    assert 9.5 < alone["tpt_ms"] < 30 and alone["target_passes"] == 40
    assert drafted["target_passes"] == 8 and drafted["tpt_ms"] < alone["tpt_ms"] / 2
    assert 0.095 * 4 < alone["cloud_s"] < 0.5 * math.ceil(alone["tpt_ms"])
    for stats in (alone, drafted):
        assert 10 < stats["ttft_ms"] < 1000 and stats["rtt_ms"] < 500
        assert stats["wait_s"] > 0.7 * stats["target_passes"] * 0.01


def test_the_prompts_own_time_and_that_of_the_draft_model(cloud: Serving) -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.8), prefill_s=0.001, gamma_s=0.004)
    with edge(cloud.address, drafter=drafter, draft_length=2) as session:
        ids_of(session, [65] * 500, max_tokens=10)
        stats = session.stats
    assert stats["ttft_ms"] > 500 and stats["tpt_ms"] * 10 < 500, "TPT begins when both sides have read the prompt"
    assert 0.004 * stats["drafted"] < stats["draft_s"] < 0.5 and 4 < stats["gamma_ms"] < 100


def test_no_question_is_asked_within_the_time_that_a_pass_may_take(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with serving(target={"pass_s": 0.6}) as cloud:
        with edge(cloud.address, strategy="cloud", events=str(log)) as session:
            assert ids_of(session, [65], max_tokens=2) == said(LAW, [65], 2)
    assert '"deadline"' not in log.read_text()


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_the_event_log_passes_the_checker(cloud: Serving, strategy: str, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with edge(cloud.address, strategy=strategy, events=str(log)) as session:
        ids_of(session, PROMPT, max_tokens=30)
        ids_of(session, [*session.committed, 65], max_tokens=30, stop=["e"])
    assert check_file(log) == []
    assert log.stat().st_size > 1000


def test_models_that_the_session_loaded_are_closed_by_it(cloud: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.8))
    monkeypatch.setattr("pipesd.edge.session.load_models", lambda config, drafter: (own, ByteTokeniser()))
    own, config = drafter, EdgeConfig(cloud=cloud.address, draft="a file")
    with EdgeSession(config) as session:
        assert ids_of(session, PROMPT, max_tokens=5) == said(LAW, PROMPT, 5)
        assert not drafter.closed
    assert drafter.closed
    theirs = ScriptedDrafter(Agreement(LAW, 0.8))
    with edge(cloud.address, drafter=theirs):
        pass
    assert not theirs.closed, "what was handed in is its owner's"


def test_nothing_is_imported_beside_the_kernels(cloud: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    own = ScriptedDrafter(Agreement(LAW, 0.8))

    def step(name: str, result: object = None) -> Callable[..., object]:
        return lambda *_, **__: steps.append(name) or result

    monkeypatch.setattr("pipesd.edge.session.import_models", step("import"))
    monkeypatch.setattr("pipesd.edge.session.warmup", step("kernels", True))
    monkeypatch.setattr("pipesd.edge.session.load_models", step("load", (own, ByteTokeniser())))
    with EdgeSession(EdgeConfig(cloud=cloud.address, draft="a file", strategy="pipesd")):
        assert steps[0] == "import" and {*steps} == {"import", "kernels", "load"}


def test_an_event_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="event file"):
        edge("", events=str(tmp_path / "no" / "such" / "folder"))
