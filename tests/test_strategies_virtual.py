"""Every strategy, and every combination of its parts, gives what the target alone says, and its log holds: on random
links, models, clouds and troubles, in virtual time. The target takes the most probable id, or samples: then with shared
noise it is the same ids too, and where draft tokens are tested each position holds what the tests make of it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from slow_sampling import position_of, random_options
from virtual import EXACT_S, TROUBLES, VOCABULARY, Scene, Trouble, VirtualWorld

from pipesd.config import BATCHINGS, TRIGGERS, WAITINGS, GenerateConfig
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Law, Method, Sampling, make_sampling
from pipesd.policy.strategy import PRESETS
from pipesd.sim.check import check_events
from pipesd.sim.distributions import Distribution, KeyedDistribution, draft_of, sampled_continuation
from pipesd.sim.drafters import Agreement
from pipesd.sim.texts import LETTERS, KeyedText, continuation
from pipesd.sim.tokeniser import BEGIN_ID, END_ID, ByteTokeniser

WITH_CLOUD = [name for name in PRESETS if name != "local"]
DRAFTING = [name for name in WITH_CLOUD if name != "cloud"]
FAST = 24  # scenes of each kind by default
SAMPLED = 3  # of those that are sampled
MANY = 600
TESTING = ["rejection", "rejection", "picospec"]


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


def sampled_scene(seed: int, edge: dict[str, Any], *, troubled: bool) -> Scene:
    """The same with models that have real distributions: those of few ids, or of all."""
    chance, scene = random.Random(-seed - 1), random_scene(seed, edge, troubled=troubled)
    end_id, floor = END_ID if scene.end_ids else None, chance.choice((-math.inf, -math.inf, -5.0))
    law = KeyedDistribution(seed, LETTERS, chance.choice((1.0, 2.0, 4.0)), end_id, floor)
    draft: Distribution = draft_of(law, chance.choice((0.0, 0.5, 0.8, 0.9, 1.0)), seed)
    if chance.random() < 0.15:  # many ids that only one of them knows
        draft = KeyedDistribution(seed, tuple(range(64, 112)), 2.0, floor=floor)
    return replace(scene, law=law, proposal=draft)


def random_parts(seed: int) -> dict[str, Any]:
    """Any combination of a strategy's parts."""
    chance = random.Random(seed)
    return {
        "strategy": chance.choice(DRAFTING),
        "batching": chance.choice(BATCHINGS),
        "trigger": chance.choice(TRIGGERS),
        "waiting": chance.choice(WAITINGS),
        "link_model": chance.choice(("streamed", "hockney")),
        "confidence": chance.choice(("probability", "probability", "margin")),
        "sequence_threshold": chance.choice((None, 0.0, 1.0, chance.random())),
        "token_threshold": chance.choice((None, 0.0, 0.5, 1.0, chance.random())),
        "entropy_threshold": chance.choice((None, 0.0, chance.random())),
    }


def until_stop(ids: Sequence[int], stops: Sequence[str]) -> list[int]:
    """The ids wholly before the first stop text."""
    pieces = ByteTokeniser().vocabulary.pieces
    shown = [b"" if token in (BEGIN_ID, END_ID) else pieces[token] for token in ids]
    text = b"".join(shown)
    found = [at for stop in stops if (at := text.find(stop.encode())) >= 0]
    if not found:
        return list(ids)
    kept = 0
    while kept < len(ids) and len(b"".join(shown[: kept + 1])) <= min(found):
        kept += 1
    return list(ids[:kept])


class Sum:
    """Whether as many positions hold the most probable id as should: those that do, those expected, the variance."""

    def __init__(self) -> None:
        self.found = self.expected = self.variance = 0.0

    def add(self, token: int, law: Law) -> None:
        place = int(law.weights.argmax())
        likely = place if law.ids is None else int(law.ids[place])
        p = law.probability(likely)
        self.found += token == likely
        self.expected += p
        self.variance += p * (1 - p)

    @property
    def deviations(self) -> float:
        return (self.found - self.expected) / math.sqrt(max(self.variance, 1.0))


def check_tested(scene: Scene, sampling: Sampling, seed: int, prompt: list[int], log: list[Any], sum: Sum) -> None:
    """Each position holds the draft token if it passes its test, else what is drawn in its place. The target's own draw
    stands only where the edge cannot draft: at the last place, or once it was said to go on without drafts."""
    assert isinstance(scene.law, Distribution) and isinstance(scene.proposal, Distribution)
    text, drawn_at, alone = list(prompt), set(), log[0]["strategy"] == "cloud"
    last = min(log[0]["limit"], scene.context) - 1
    drawn_behind = prefixes_drawn_behind(prompt, log)
    for event in log:
        alone = (alone or event["event"] == "without_drafts") and event["event"] != "with_drafts"
        if event["event"] == "redrawn":
            drawn_at.add(event["pos"])
        if event["event"] != "committed":
            continue
        assert event["pos"] == len(text)
        for token, accepted in zip(event["ids"], event["accepted"], strict=True):
            here = position_of(scene.law, scene.proposal, sampling, seed, text, VOCABULARY.size)
            if accepted:
                assert (token, here.taken) == (here.drafted, True)
            elif len(text) in drawn_at:
                assert (token, here.taken) == (here.redrawn, False)
            else:
                assert token == here.own and (alone or len(text) == last)
                assert tuple(text) not in drawn_behind, "what the edge drew is tested, whatever it is"
            if sampling.method is Method.REJECTION:
                sum.add(token, here.p)
            text.append(token)


def prefixes_drawn_behind(prompt: list[int], log: list[Any]) -> set[tuple[int, ...]]:
    """Every text behind which the edge drew a draft token, in a draft that no refusal ended before it was reached: what
    lay behind a refused token goes untested, whatever it was, even where the same token is drawn anew."""
    text, draft, found, cut = list(prompt), list[int](), set(), None
    for event in log:
        match event["event"]:
            case "drafted":
                del draft[len(draft) if cut is None else max(0, cut - len(text)) :]
                cut = None
                assert event["pos"] == len(text) + len(draft)
                found.add((*text, *draft))
                draft.append(event["id"])
            case "redrawn":
                found = {prefix for prefix in found if len(prefix) <= event["pos"]}
            case "rollback":
                cut = event["pos"] if cut is None else min(cut, event["pos"])
            case "committed":
                for token, accepted in zip(event["ids"], event["accepted"], strict=True):
                    del draft[: 1 if accepted else len(draft)]
                    text.append(token)
                del draft[len(draft) if cut is None else max(0, cut - len(text)) :]
                cut = None
    return found


def play(scene: Scene, folder: Path, methods: Sequence[str] = (), sum: Sum | None = None) -> VirtualWorld:
    """A chat of some turns in that world; its ids must be the target's own, and its log without findings. `methods`:
    of sampling, of which each turn takes one; without them the most probable ids are taken."""
    chance, log = random.Random(scene.seed), folder / "events"
    (folder / "tuning").unlink(missing_ok=True)
    world = VirtualWorld(replace(scene, edge={"tuning": str(folder / "tuning"), "events": str(log), **scene.edge}))
    session = world.session
    prompt = [chance.choice(LETTERS) for _ in range(chance.randrange(1, 40))]
    turns: list[tuple[dict[str, Any], list[int]]] = []
    with session:
        for _ in range(chance.randrange(1, 4)):
            wanted = chance.randrange(1, 70)
            room = scene.context - len(prompt)
            if room < 1:
                break
            options = random_options(chance, methods) if methods else {"seed": scene.seed}
            stops = [chr(chance.choice(LETTERS)) + chr(chance.choice(LETTERS))] if chance.random() < 0.3 else []
            pieces = list(session.generate(prompt, max_tokens=wanted, stop=stops, **options))
            if options.get("sampling", "noise") == "noise":
                expected = said_alone(scene, prompt, min(wanted, room), options)
                assert list(session.token_ids) == until_stop(expected, stops)
            else:
                assert list(session.token_ids) == until_stop(session.committed[len(prompt) :], stops)
            turns.append((options, prompt))
            assert len(session.logprobs) == (len(session.token_ids) if options.get("logprobs") is not None else 0)
            shown = [token for piece in pieces for token in piece.token_ids]
            assert shown[: len(session.token_ids)] == list(session.token_ids)
            tally = session._loop.machine.tally
            assert tally.proactive == tally.promoted + tally.dropped, "the fate of each proactive token is decided once"
            assert tally.drafted >= tally.accepted + tally.rejections
            prompt = [*(session.committed if chance.random() < 0.7 else prompt[:5]), *b" and "]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [at for at, event in enumerate(events) if event["event"] == "start"]
    for (options, prompt), (start, end) in zip(turns, pairwise([*starts, len(events)]), strict=True):
        if options.get("sampling", "noise") != "noise":
            sampling = make_sampling(GenerateConfig(**options))
            check_tested(scene, sampling, options["seed"], prompt, events[start:end], sum or Sum())
    findings = check_events(events, slack_s=EXACT_S)
    assert not findings, "\n".join(findings[:5])
    return world


def said_alone(scene: Scene, prompt: Sequence[int], count: int, options: dict[str, Any]) -> list[int]:
    """What the target says by itself."""
    if "temperature" not in options:
        return continuation(scene.law, prompt, count, scene.end_ids)
    assert isinstance(scene.law, Distribution)
    sampler = Sampler(make_sampling(GenerateConfig(**options)), options["seed"])
    return sampled_continuation(scene.law, prompt, count, sampler, scene.end_ids, VOCABULARY.size)


def check_all(
    folder: Path,
    seeds: Sequence[int],
    edge: dict[str, Any],
    *,
    troubled: bool,
    parts: bool = False,
    methods: Sequence[str] = (),
    sum: Sum | None = None,
) -> None:
    for seed in seeds:
        make = sampled_scene if methods else random_scene
        scene = make(seed, {**edge, **(random_parts(seed) if parts else {})}, troubled=troubled)
        try:
            play(scene, folder, methods, sum)
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


@pytest.mark.parametrize("troubled", [False, True])
@pytest.mark.parametrize("strategy", WITH_CLOUD)
def test_every_preset_samples_the_targets_ids(tmp_path: Path, strategy: str, troubled: bool) -> None:
    check_all(tmp_path, range(SAMPLED), {"strategy": strategy}, troubled=troubled, methods=["noise"])


@pytest.mark.parametrize("troubled", [False, True])
def test_every_combination_of_parts_samples_the_targets_ids(tmp_path: Path, troubled: bool) -> None:
    check_all(tmp_path, range(SAMPLED), {}, troubled=troubled, parts=True, methods=["noise"])


@pytest.mark.parametrize("troubled", [False, True])
@pytest.mark.parametrize("strategy", WITH_CLOUD)
def test_every_preset_holds_what_tests_of_draft_tokens_make(tmp_path: Path, strategy: str, troubled: bool) -> None:
    check_all(tmp_path, range(SAMPLED), {"strategy": strategy}, troubled=troubled, methods=TESTING)


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
@pytest.mark.parametrize("strategy", [*WITH_CLOUD, "any"])
@pytest.mark.parametrize("method", ["noise", "rejection", "picospec"])
def test_sampling_in_many_worlds(tmp_path: Path, strategy: str, troubled: bool, method: str) -> None:
    parts, total = strategy == "any", Sum()
    edge = {} if parts else {"strategy": strategy}
    seeds = range(SAMPLED, SAMPLED + MANY // 10)
    check_all(tmp_path, seeds, edge, troubled=troubled, parts=parts, methods=[method], sum=total)
    if method == "rejection":
        assert abs(total.deviations) < 4, "the law"


@pytest.mark.slow
@pytest.mark.parametrize("troubled", [False, True])
def test_parts_in_many_worlds(tmp_path: Path, troubled: bool) -> None:
    check_all(tmp_path, range(1000, 1000 + 3 * MANY), {}, troubled=troubled, parts=True)


@pytest.mark.parametrize("strategy", ["cloud", "vanilla", "edgellm"])
def test_a_worker_lost_at_the_contexts_end_ends_no_text_in_a_refusal(strategy: str) -> None:
    opened = Trouble(at_s=0.07, kind="lose_down")  # what would have told the edge how far this generation may go
    for step in range(80):
        troubles = (opened, Trouble(at_s=step / 100, kind="crash"))
        scene = Scene(seed=1, context=24, troubles=troubles, edge={"strategy": strategy, "tuning": "off"})
        with VirtualWorld(scene).session as session:
            list(session.generate(list(b"to the end"), max_tokens=100))
            assert (session.finish_reason, len(session.committed)) == ("length", 24)


def test_a_world_can_be_repeated(tmp_path: Path) -> None:
    logs = []
    for _ in range(2):
        world = play(random_scene(11, {"strategy": WITH_CLOUD[0]}, troubled=True), tmp_path)
        log = (tmp_path / "events").read_text()
        logs.append(
            (log.replace(f"{world.session._loop.machine.session:016x}", ""), world.clock.now(), world.link.sent)
        )
    assert logs[0] == logs[1]
