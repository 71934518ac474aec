"""Sampling through a session: seeds, what is refused, what is reported, what triggers see."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clouds import PROMPT, CloudProcess, FakeCloud, Serving, at_once, edge, ids_of, serving, wait_until
from sampled import DRAFT, PROMPT_IDS, TARGET, WIDTH, alone, sampling_edge

from pipesd.clock import SystemClock
from pipesd.config import EdgeConfig
from pipesd.core import Drawn
from pipesd.edge.aio import AsyncEdgeSession
from pipesd.edge.session import EdgeSession
from pipesd.edge.steering import Steering
from pipesd.errors import Refused, UsageError
from pipesd.metrics import EventLog
from pipesd.policy.strategy import make_strategy
from pipesd.protocol.actions import Committed
from pipesd.protocol.messages import ErrorCode, Hello, Message, Probe, Probed, ProbeStatus, Welcome
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.check import check_file
from pipesd.sim.distributions import Distribution, TableDistribution
from pipesd.sim.drafters import ScriptedDrafter
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary

DRAFTING = ("pipesd", "vanilla", "hsl", "edgellm", "auto")


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(TARGET) as served:
        yield served


def sampled_ids(cloud: Serving, count: int = 40, **given: Any) -> list[int]:
    config = {name: given.pop(name) for name in ("strategy", "draft_length") if name in given}
    with sampling_edge(cloud.address, **config) as session:
        return ids_of(session, PROMPT, max_tokens=count, **given)


# ---- temperatures and seeds


@pytest.mark.parametrize("strategy", ["vanilla", "cloud", "local"])
def test_temperature_0_takes_the_highest_whatever_the_seed_and_1e_8_does_too(cloud: Serving, strategy: str) -> None:
    highest = alone(DRAFT if strategy == "local" else TARGET, 40)
    with sampling_edge(cloud.address, strategy=strategy) as session:
        for temperature in (0, 0.0, 1e-8, 5e-324):
            for seed in (1, 2, None):
                assert ids_of(session, PROMPT, max_tokens=40, temperature=temperature, seed=seed) == highest
                assert session.stats["sampling"] == ("noise" if temperature else "greedy")
        for temperature in (-1, math.nan):
            with pytest.raises(UsageError, match=r"^temperature: got"):
                session.generate(PROMPT, temperature=temperature)


@pytest.mark.parametrize("strategy", ["pipesd", "cloud", "local"])
def test_seeds(cloud: Serving, strategy: str) -> None:
    with sampling_edge(cloud.address, strategy=strategy) as session:

        def run(seed: int | None) -> tuple[int | None, list[int]]:
            ids = ids_of(session, PROMPT, max_tokens=40, temperature=1, seed=seed)
            return session.seed, ids

        first, again, other, fresh, fresher = [run(seed) for seed in (1, 1, 2, None, None)]
        assert first == again == (1, alone(DRAFT if strategy == "local" else TARGET, 40, temperature=1, seed=1))
        assert len({tuple(ids) for _, ids in (first, other, fresh, fresher)}) == 4
        assert fresh[0] is not None and fresher[0] is not None and fresh[0] != fresher[0]
        assert run(fresh[0]) == fresh, "the seed that is reported is the one that was used"
        assert run((1 << 64) - 1)[1] != run(0)[1]


@pytest.mark.slow
def test_the_same_ids_with_every_strategy_through_crashes_and_in_other_processes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "seed": 12}
    wanted = alone(TARGET, 100, **options)
    with CloudProcess(tmp_path, TARGET, pass_s=0.003) as process:
        sessions = [sampling_edge(process.address, strategy=name) for name in (*DRAFTING, "cloud")]
        try:

            def user(session: EdgeSession) -> list[int]:
                return ids_of(session, PROMPT, max_tokens=100, **options)

            def reaper() -> list[int]:
                wait_until(lambda: len(sessions[-1].text) >= 20, "some output")
                process.kill_worker()
                return wanted

            found = at_once([*(lambda s=session: user(s) for session in sessions), reaper])  # type: ignore[misc]
            assert found == [wanted] * len(found)
            assert sessions[-1].stats["openings"] >= 2
        finally:
            for session in sessions:
                session.close()


def test_sessions_with_other_seeds_at_the_same_time_say_what_each_says_alone(cloud: Serving) -> None:
    def user(seed: int) -> list[int]:
        return sampled_ids(cloud, 80, strategy="vanilla", temperature=1, seed=seed)

    assert at_once([lambda: user(1), lambda: user(2), lambda: user(1)]) == [
        alone(TARGET, 80, temperature=1, seed=seed) for seed in (1, 2, 1)
    ]


def test_a_second_turn_goes_on_in_the_noise_where_the_first_ended(cloud: Serving) -> None:
    options = {"temperature": 1.0, "frequency_penalty": 0.2, "seed": 4}
    with sampling_edge(cloud.address, strategy="pipesd") as session:
        first = ids_of(session, PROMPT_IDS, max_tokens=20, **options)
        turn = [*session.committed, *b" and "]
        second = ids_of(session, turn, max_tokens=20, **options)
        assert second == alone(TARGET, 20, turn, **options) != first
        assert session.stats["openings"] == 1


# ---- methods that test draft tokens


@pytest.mark.parametrize("strategy", [name for name in DRAFTING if name != "auto"])
@pytest.mark.parametrize("method", [{"sampling": "rejection"}, {"sampling": "picospec", "top_mass": 4}], ids=str)
def test_what_a_run_that_tests_reports(cloud: Serving, tmp_path: Path, strategy: str, method: dict[str, Any]) -> None:
    events = tmp_path / "events"
    with sampling_edge(cloud.address, strategy=strategy, events=str(events)) as session:
        ids_of(session, PROMPT, max_tokens=60, temperature=1.0, seed=3, **method)
        stats = session.stats
    assert stats["sampling"] == method["sampling"] and len(session.token_ids) == 60
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    refused, redrawn = ([e for e in recorded if e["event"] == name] for name in ("refused", "redrawn"))
    assert stats["refusals"] == len(redrawn) == len(refused) > 0 == stats["proposals"]
    for event in redrawn:
        assert session.committed[event["pos"]] == event["id"]
    if method["sampling"] == "picospec":
        assert 0.0 < stats["sampling_error"] < 1.0
    else:
        assert stats["sampling_error"] is None
    start = next(event for event in recorded if event["event"] == "start")
    assert start["seed"] == 3 and start["sampling"]["method"] == method["sampling"]
    assert check_file(events) == []


def test_a_broad_distribution_is_proposed_from_until_something_is_taken() -> None:
    """More ids than are told whole; target and draft are nearly one, so most proposals are refused."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(500))
    law, draft = TableDistribution(tuple(p)), TableDistribution(tuple(0.9 * p + 0.1 * rng.dirichlet(np.ones(500))))
    tokeniser = ByteTokeniser(byte_vocabulary())
    with serving(law, target={"vocabulary": byte_vocabulary()}) as cloud:
        with sampling_edge(cloud.address, draft=draft, strategy="pipesd", tokeniser=tokeniser) as session:
            ids = [t for piece in session.generate(PROMPT, max_tokens=300, temperature=1, seed=1, sampling="rejection")
                   for t in piece.token_ids]  # fmt: skip
            stats = session.stats
    assert len(ids) == 300 and stats["refusals"] > 5
    assert stats["proposals"] > 16 * stats["refusals"], "some needed more than the first lot"


@pytest.mark.parametrize("strategy", ["vanilla", "pipesd"])
def test_a_run_that_tests_ends_at_a_stop_text_a_limit_and_a_cancelled_reader(cloud: Serving, strategy: str) -> None:
    """Wherever that is: before a refusal, at the redrawn id, behind it."""
    with sampling_edge(cloud.address, strategy=strategy) as session:
        ended = set()
        for seed in range(12):
            options: dict[str, Any] = {"temperature": 1.0, "sampling": "rejection", "seed": seed}
            list(session.generate(PROMPT, max_tokens=30, stop=("e",), **options))
            ended.add(session.finish_reason)
            assert "e" not in session.text and len(session.token_ids) <= 30
            assert len(list(session.generate(PROMPT, max_tokens=1 + seed % 3, **options))) > 0
            assert len(session.token_ids) == 1 + seed % 3 and session.finish_reason == "length"
            pieces = session.generate(PROMPT, max_tokens=300, **options)
            next(pieces)
            pieces.close()
            assert session.finish_reason == "cancelled"
        assert "stop" in ended


def test_draft_logits_that_are_not_finite_cost_acceptance_only(cloud: Serving) -> None:
    class Broken(Distribution):
        """Says nothing behind every third text."""

        width = TARGET.width

        def row(self, state: int, width: int) -> Any:
            row = DRAFT.row(state, width)
            return np.full_like(row, np.nan) if state % 3 == 0 else row

    class Drafter(ScriptedDrafter):
        """Guesses where its logits are not finite, as llama.cpp's does."""

        def _drawn(self, sampler: Any) -> Drawn:
            row = self.row(len(self.ids), self._states[-1])
            if np.isfinite(row).any():
                return super()._drawn(sampler)
            assert sampler.choose(row, len(self.ids), self.ids) is None
            return Drawn(101, 0.0, 1.0)

    options: dict[str, Any] = {"temperature": 1.0, "seed": 6}
    for strategy in ("vanilla", "pipesd"):
        with edge(cloud.address, drafter=Drafter(Broken()), strategy=strategy, tuning="off") as session:
            assert ids_of(session, PROMPT, max_tokens=60, **options) == alone(TARGET, 60, **options)
            assert len(ids_of(session, PROMPT, max_tokens=60, sampling="rejection", **options)) == 60
            assert session.stats["refusals"] > 0


# ---- what is refused


def test_logprobs_that_nobody_has_are_refused_by_name(cloud: Serving) -> None:
    with sampling_edge(cloud.address, strategy="local") as session:
        with pytest.raises(UsageError, match=r"^logprobs .* strategy local"):
            session.generate(PROMPT, logprobs=0)
    for strategy in DRAFTING:
        session = sampling_edge(cloud.address, strategy=strategy)
        with pytest.raises(UsageError, match=r"^logprobs do not go with sampling rejection"):
            session.generate(PROMPT, temperature=0.5, sampling="rejection", logprobs=2)
        session.close()


def test_a_bias_outside_the_vocabulary_is_refused_before_the_first_token(cloud: Serving) -> None:
    for strategy in ("vanilla", "cloud", "local"):
        with sampling_edge(cloud.address, strategy=strategy) as session:
            with pytest.raises(
                UsageError, match=rf"^logit-bias: got id {WIDTH}, outside the vocabulary of {WIDTH} ids"
            ):
                next(session.generate(PROMPT, logit_bias={5: 1.0, WIDTH: -math.inf}))
            assert ids_of(session, PROMPT, max_tokens=5, logit_bias={WIDTH - 1: 1.0})


def test_a_cloud_that_knows_nothing_of_sampling_is_told_from_one_that_does() -> None:
    vocabulary = byte_vocabulary()

    def old(message: Message) -> Sequence[Message | bytes]:
        if isinstance(message, Probe):
            return [Probed(message.session, 0, message.token, ProbeStatus.OK, 0)]
        if not isinstance(message, Hello):
            return []
        size, hashed = vocabulary.size, vocabulary_hash(vocabulary)
        return [Welcome(message.session, 0, 1, 0, 0, "old", size, hashed, bytes(8), 4096, "cpu", "float32")]

    with FakeCloud(old) as fake, edge(fake.address, strategy="vanilla") as session:
        for options, names in (
            ({"temperature": 0.5, "top_k": 3}, "temperature"),
            ({"presence_penalty": 0.5, "logprobs": 0}, "presence-penalty, logprobs"),
            ({"logit_bias": {5: 1.0}}, "logit-bias"),
        ):
            with pytest.raises(Refused, match=f"knows nothing of sampling: leave out {names} ") as refused:
                next(session.generate(PROMPT, **options))
            assert refused.value.code is ErrorCode.FEATURE
        assert "Open" not in fake.kinds(), "refused before the cloud hears of it"


# ---- log-probabilities and stop texts


def test_logprobs_come_with_their_ids_and_end_with_them(cloud: Serving) -> None:
    options = {"temperature": 1.0, "seed": 9, "logprobs": 2}
    for strategy in ("pipesd", "cloud"):
        with sampling_edge(cloud.address, strategy=strategy) as session:
            whole = list(session.generate(PROMPT, max_tokens=40, **options))
            assert all(len(piece.logprobs) == len(piece.token_ids) for piece in whole)
            said = session.logprobs
            assert said == tuple(one for piece in whole for one in piece.logprobs) and len(said) == 40
            assert all(len(one.top) == 2 and one.own <= 0 for one in said)
            stop = session.text[20:23]
            list(session.generate(PROMPT, max_tokens=40, stop=(stop,), **options))
            assert session.finish_reason == "stop" and 0 < len(session.token_ids) <= 20
            assert session.logprobs == said[: len(session.token_ids)]
            list(session.generate(PROMPT, max_tokens=3, temperature=1.0))
            assert session.logprobs == ()


def test_the_session_for_asyncio_passes_all_on(cloud: Serving) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "logprobs": 2, "logit_bias": {101: 1.0}}

    async def body() -> tuple[list[int], tuple[Any, ...], int | None]:
        config = EdgeConfig(cloud=cloud.address, strategy="vanilla")
        session = AsyncEdgeSession(config, drafter=ScriptedDrafter(DRAFT), tokeniser=ByteTokeniser())
        async with session:
            pieces = session.generate(PROMPT, max_tokens=20, **options)
            ids = [token async for piece in pieces for token in piece.token_ids]
            return ids, session.logprobs, session.seed

    ids, logprobs, seed = asyncio.run(body())
    assert (ids, seed, len(logprobs)) == (alone(TARGET, 20, **options), 9, 20)


# ---- what triggers see


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_triggers_see_the_margin_where_it_is_asked_for(cloud: Serving, tmp_path: Path, temperature: float) -> None:
    ids: dict[str, list[int]] = {}
    for confidence in ("probability", "margin"):
        events = tmp_path / confidence
        config = {"strategy": "hsl", "token_threshold": 0.5, "confidence": confidence, "events": str(events)}
        with sampling_edge(cloud.address, **config) as session:
            ids[confidence] = ids_of(session, PROMPT, max_tokens=40, temperature=temperature, seed=2)
        recorded = [json.loads(line) for line in events.read_text().splitlines()]
        drafted = [event for event in recorded if event["event"] == "drafted"]
        ends = {event["end"] for event in recorded if event["event"] == "trigger" and event["rule"] == "token"}
        name = "p_draft" if confidence == "probability" else "margin"
        assert {event["pos"] + 1 for event in drafted if event.get(name, 0.0) <= 0.5} == ends
        assert any(event["p_draft"] != event.get("margin") for event in drafted)
        assert ("margin" in drafted[0]) == (temperature > 0 or confidence == "margin"), "it costs nothing, or is wanted"
        assert check_file(events) == []
    assert ids["probability"] == ids["margin"] == alone(TARGET, 40, temperature=temperature, seed=2)


def test_the_probability_that_triggers_see_does_not_depend_on_the_options(cloud: Serving, tmp_path: Path) -> None:
    seen: dict[tuple[int, ...], set[float]] = {}
    for number, options in enumerate(({"temperature": 0.1}, {"temperature": 1}, {"temperature": 2}, {"top_k": 1})):
        events = tmp_path / str(number)
        with sampling_edge(cloud.address, strategy="vanilla", events=str(events)) as session:
            ids_of(session, PROMPT, max_tokens=30, **{"temperature": 1, "seed": 5, **options})
        drafted = [e for e in map(json.loads, events.read_text().splitlines()) if e["event"] == "drafted"]
        assert drafted[0]["pos"] == len(PROMPT_IDS)
        seen.setdefault((drafted[0]["id"],), set()).add(drafted[0]["p_draft"])
    assert all(len(probabilities) == 1 for probabilities in seen.values()) and len(seen) < 4


def test_a_round_with_a_refusal_is_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the verdict brought, then what the edge drew in the refused token's place."""
    clock = SystemClock()
    steering = Steering(make_strategy(EdgeConfig(strategy="auto")), "streamed", EventLog("", clock))
    rounds: list[int] = []
    decided: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(steering._updater, "round_end", lambda estimate, tokens, took_s: rounds.append(tokens) or [])
    monkeypatch.setattr(
        steering._sending, "decided", lambda accepted, known, rejected: decided.append((accepted, known, rejected))
    )
    steering.begin()
    steering.committed(Committed(9, (1, 2), (True, True), goes_on=True), 1.0, 0.0, drafts=True)
    assert not rounds and not decided
    steering.committed(Committed(11, (3,), (False,), True), 1.1, 0.0, drafts=True)
    assert (rounds, decided) == ([3], [(2, 12, True)])


def test_the_machine_says_that_a_round_goes_on(cloud: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Committed] = []
    heard = Steering.committed

    def committed(steering: Steering, action: Committed, *rest: Any, **named: Any) -> None:
        seen.append(action)
        heard(steering, action, *rest, **named)

    monkeypatch.setattr(Steering, "committed", committed)
    with sampling_edge(cloud.address, strategy="vanilla") as session:
        ids_of(session, PROMPT, max_tokens=60, temperature=1.0, seed=3, sampling="rejection")
        assert sum(not one.goes_on for one in seen) == session.stats["rounds"]
    behind = [later for one, later in pairwise(seen) if one.goes_on]
    assert behind and all(one.rejected and len(one.ids) == 1 for one in behind)
    assert {one.goes_on for one in seen if not one.rejected} == {True, False}
