"""Every strategy, and every combination of its parts, gives what the target alone says, and its log holds: on random
links, models, clouds and troubles, in virtual time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from virtual import EXACT_S, TROUBLES, Scene, Trouble, VirtualWorld

from pipesd.config import BATCHINGS, TRIGGERS, WAITINGS
from pipesd.policy.strategy import PRESETS
from pipesd.sim.check import check_events
from pipesd.sim.drafters import Agreement
from pipesd.sim.texts import LETTERS, KeyedText, continuation
from pipesd.sim.tokeniser import END_ID, ByteTokeniser

WITH_CLOUD = [name for name in PRESETS if name != "local"]
DRAFTING = [name for name in WITH_CLOUD if name != "cloud"]
FAST = 24  # scenes of each kind by default
MANY = 600


def log_uniform(chance: random.Random, low: float, high: float) -> float:
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def random_scene(seed: int, edge: dict[str, Any], *, troubled: bool) -> Scene:
    """Any world: fast and slow models and links, good and bad drafts, short and long bounds."""
    chance = random.Random(seed)
    ends = (END_ID,) if chance.random() < 0.4 else ()
    law = KeyedText(seed, end_id=END_ID, end_rate=0.02) if ends else KeyedText(seed)
    wrong = (*LETTERS, END_ID) if chance.random() < 0.3 else LETTERS
    agreement = chance.choice((0.0, 0.5, 0.8, 0.9, 0.97, 1.0, chance.random()))
    confidence = chance.choice((None, None, None, 0.0, 0.5, 1.0))
    gamma_s, delay_s = log_uniform(chance, 0.0005, 0.06), chance.choice((1e-5, log_uniform(chance, 0.0005, 0.2)))
    rate = chance.choice((math.inf, log_uniform(chance, 600, 1e6)))
    pass_s = log_uniform(chance, 0.0005, 0.2)
    limits = {
        "draft_ahead": chance.choice((16, 20, 32, 64)),
        "run_ahead": chance.choice((16, 64)),
        "prefill_piece": chance.choice((4, 16, 128)),
    }
    troubles = [
        Trouble(chance.uniform(0.0, 40 * (pass_s + delay_s)), chance.choice(TROUBLES), log_uniform(chance, 0.001, 0.5))
        for _ in range(chance.randrange(1, 8) if troubled else 0)
    ]
    return Scene(
        seed=seed,
        law=law,
        proposal=Agreement(law, agreement, seed, wrong, confidence),
        end_ids=ends,
        gamma_s=chance.choice((0.0, gamma_s, gamma_s, gamma_s, gamma_s)),
        gamma_jitter=chance.choice((0.0, 0.0, 1.0)),
        draft_context=chance.choice((2048, 2048, 2048, 70)),
        delay_s=delay_s,
        jitter_s=delay_s * chance.choice((0.0, 0.1, 1.0)),
        up_bytes_per_s=rate,
        down_bytes_per_s=rate * 4,
        up_bytes_per_draft_token=chance.choice((0, 0, 0, 500)) if rate > 2e4 else 0,
        pass_s=pass_s,
        token_s=chance.choice((0.0, pass_s / 10)),
        context=chance.choice((2048, 2048, 2048, 90)),
        limits=limits,
        troubles=tuple(troubles),
        edge={
            "draft_ahead": chance.choice((16, 32, 32, 100)),
            "draft_length": chance.randrange(1, 17),
            **edge,
        },
    )


def random_parts(seed: int) -> dict[str, Any]:
    """Any combination of a strategy's parts."""
    chance = random.Random(seed)
    return {
        "strategy": chance.choice(DRAFTING),
        "batching": chance.choice(BATCHINGS),
        "trigger": chance.choice(TRIGGERS),
        "waiting": chance.choice(WAITINGS),
        "link_model": chance.choice(("streamed", "hockney")),
        "sequence_threshold": chance.choice((None, 0.0, 1.0, chance.random())),
        "token_threshold": chance.choice((None, 0.0, 0.5, 1.0, chance.random())),
        "entropy_threshold": chance.choice((None, 0.0, chance.random())),
    }


def until_stop(ids: Sequence[int], stops: Sequence[str]) -> list[int]:
    """The ids wholly before the first stop text."""
    pieces = ByteTokeniser().vocabulary.pieces
    shown = [b"" if token == END_ID else pieces[token] for token in ids]
    text = b"".join(shown)
    found = [at for stop in stops if (at := text.find(stop.encode())) >= 0]
    if not found:
        return list(ids)
    kept = 0
    while kept < len(ids) and len(b"".join(shown[: kept + 1])) <= min(found):
        kept += 1
    return list(ids[:kept])


def play(scene: Scene, folder: Path) -> VirtualWorld:
    """A chat of some turns in that world; its ids must be the target's own, and its log without findings."""
    chance, log = random.Random(scene.seed), folder / "events"
    (folder / "tuning").unlink(missing_ok=True)
    world = VirtualWorld(replace(scene, edge={"tuning": str(folder / "tuning"), "events": str(log), **scene.edge}))
    session = world.session
    prompt = [chance.choice(LETTERS) for _ in range(chance.randrange(1, 40))]
    with session:
        for _ in range(chance.randrange(1, 4)):
            wanted = chance.randrange(1, 70)
            room = scene.context - len(prompt)
            if room < 1:
                break
            expected = continuation(scene.law, prompt, min(wanted, room), scene.end_ids)
            stops = [chr(chance.choice(LETTERS)) + chr(chance.choice(LETTERS))] if chance.random() < 0.3 else []
            pieces = list(session.generate(prompt, max_tokens=wanted, stop=stops))
            assert list(session.token_ids) == until_stop(expected, stops)
            shown = [token for piece in pieces for token in piece.token_ids]
            assert shown[: len(session.token_ids)] == list(session.token_ids)
            tally = session._loop.machine.tally
            assert tally.proactive == tally.promoted + tally.dropped, "the fate of each proactive token is decided once"
            assert tally.drafted >= tally.accepted + tally.rejections
            prompt = [*(session.committed if chance.random() < 0.7 else prompt[:5]), *b" and "]
    findings = check_events(map(json.loads, log.read_text().splitlines()), slack_s=EXACT_S)
    assert not findings, "\n".join(findings[:5])
    return world


def check_all(folder: Path, seeds: range, edge: dict[str, Any], *, troubled: bool, parts: bool = False) -> None:
    for seed in seeds:
        scene = random_scene(seed, {**edge, **(random_parts(seed) if parts else {})}, troubled=troubled)
        try:
            play(scene, folder)
        except Exception as error:
            error.add_note(f"seed {seed}: {scene}")
            raise


@pytest.mark.parametrize("troubled", [False, True])
@pytest.mark.parametrize("strategy", WITH_CLOUD)
def test_every_preset_gives_the_targets_ids(tmp_path: Path, strategy: str, troubled: bool) -> None:
    check_all(tmp_path, range(FAST), {"strategy": strategy}, troubled=troubled)


@pytest.mark.parametrize("troubled", [False, True])
def test_every_combination_of_parts_gives_the_targets_ids(tmp_path: Path, troubled: bool) -> None:
    check_all(tmp_path, range(2 * FAST), {}, troubled=troubled, parts=True)


@pytest.mark.parametrize("batching", ["dp", "greedy"])
def test_a_thin_link_that_token_batches_wait_for(tmp_path: Path, batching: str) -> None:
    edge = {"strategy": "pipesd", "batching": batching, "tuning": "off"}
    for seed in range(FAST):
        scene = random_scene(seed, edge, troubled=seed % 3 == 0)
        rate = 500.0 * 2 ** (seed % 4)
        play(replace(scene, gamma_s=0.01, delay_s=0.03, up_bytes_per_s=rate, up_bytes_per_draft_token=0), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("troubled", [False, True])
@pytest.mark.parametrize("strategy", WITH_CLOUD)
def test_every_preset_in_many_worlds(tmp_path: Path, strategy: str, troubled: bool) -> None:
    check_all(tmp_path, range(FAST, FAST + MANY), {"strategy": strategy}, troubled=troubled)


@pytest.mark.slow
@pytest.mark.parametrize("troubled", [False, True])
def test_parts_in_many_worlds(tmp_path: Path, troubled: bool) -> None:
    check_all(tmp_path, range(1000, 1000 + 3 * MANY), {}, troubled=troubled, parts=True)


def test_a_world_can_be_repeated(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        world = play(random_scene(11, {"strategy": WITH_CLOUD[0]}, troubled=True), tmp_path)
        log = (tmp_path / "events").read_text()
        logs.append(
            (log.replace(f"{world.session._loop.machine.session:016x}", ""), world.clock.now(), world.link.sent)
        )
    assert logs[0] == logs[1]
