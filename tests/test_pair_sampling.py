"""The real pair samples: the ids of a seed are the target's own, whatever the strategy and whatever breaks; rejection
sampling has the target's law. The long form of the first is bench/exactness_sampled.py."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pair import CLOUD, PROMPTS, worker_of

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.policy.accept import Draw, choose
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from pipesd.sim.check import check_file
from pipesd.sim.proxy import LinkProxy

pytestmark = [pytest.mark.model, pytest.mark.slow]
Cloud = tuple[str, int]  # address, process id
LONG = [prompt["ids"] for prompt in PROMPTS if len(prompt["reference"]) > 32]  # the others may end at once
WAYS: list[dict[str, Any]] = [
    {"strategy": "pipesd"},
    {"strategy": "vanilla", "draft_length": 3},
    {"strategy": "auto"},
    {"strategy": "hsl"},
    {"strategy": "edgellm"},
    {"strategy": "pipesd", "batching": "immediate", "trigger": "gain"},
    {"strategy": "pipesd", "confidence": "margin"},
    {"strategy": "pipesd", "batching": "greedy", "trigger": "entropy", "waiting": "idle"},
    {"strategy": "vanilla", "draft_length": 8},
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.2},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.3, "frequency_penalty": 0.2},
]


@pytest.fixture(scope="module")
def drafter(demo_pair: tuple[Path, Path]) -> Iterator[Any]:
    """Loaded once; sessions use it in turn."""
    from pipesd.edge.drafter import Drafter

    loaded = Drafter(demo_pair[0], threads=1)
    yield loaded
    loaded.close()


def serving(target: Path, dtype: str) -> Iterator[Cloud]:
    command = [*CLOUD, "--model", str(target), "--bind", "tcp://127.0.0.1:0", "--dtype", dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
        process.terminate()


@pytest.fixture(scope="module")
def cloud(demo_pair: tuple[Path, Path]) -> Iterator[Cloud]:
    yield from serving(demo_pair[1], "float32")


@pytest.fixture(scope="module")
def bfloat16_cloud(demo_pair: tuple[Path, Path]) -> Iterator[Cloud]:
    yield from serving(demo_pair[1], "bfloat16")


class Pair:
    """Generations of one drafter, the event log of each checked."""

    def __init__(self, drafter: Any, folder: Path) -> None:
        self.drafter, self._log = drafter, folder / "events"

    def session(self, address: str, **way: Any) -> EdgeSession:
        self._log.unlink(missing_ok=True)
        config = EdgeConfig(cloud=address, tuning="off", events=str(self._log), **way)
        return EdgeSession(config, drafter=self.drafter, tokeniser=self.drafter.tokeniser)

    def run(
        self, address: str, way: dict[str, Any], ids: Sequence[int], tokens: int, *,
        at: int = 0, then: Callable[[], object] | None = None, **options: Any,
    ) -> EdgeSession:  # fmt: skip
        """One generation; `then` is called when `at` tokens have come."""
        with self.session(address, **way) as session:
            for _ in session.generate(ids, max_tokens=tokens, **options):
                if then is not None and len(session.committed) - len(ids) >= at:
                    then()
                    then = None
        assert check_file(self._log) == []
        return session


@pytest.fixture
def pair(drafter: Any, tmp_path: Path) -> Pair:
    return Pair(drafter, tmp_path)


def check_seed(pair: Pair, cloud: Cloud, seed: int) -> None:
    """Two strategies give the ids of `cloud`, and so does one that meets a fault: a cut link, now and then a kill."""
    address, front = cloud
    ids, sampling = LONG[seed % len(LONG)], SAMPLINGS[seed % len(SAMPLINGS)] | {"seed": seed}
    own = pair.run(address, {"strategy": "cloud"}, ids, 64, **sampling).token_ids
    way, faulty = (WAYS[(2 * seed + i) % len(WAYS)] for i in range(2))
    session = pair.run(address, way, ids, 64, **sampling)
    assert session.token_ids == own, f"seed {seed}, {way}, {sampling}"
    half = max(1, len(own) // 2)
    if seed % 5 == 4:
        victim = worker_of(front)
        session = pair.run(address, faulty, ids, 64, at=half, then=lambda: os.kill(victim, signal.SIGKILL), **sampling)
        assert session.stats["openings"] > 1
    else:
        with LinkProxy(address, delay_s=0.002) as link:
            session = pair.run(link.address, faulty, ids, 64, at=half, then=link.cut, **sampling)
            assert link.counts().connections > 1
    assert session.token_ids == own, f"seed {seed}, {faulty}, {sampling}, with a fault"


@pytest.mark.parametrize("seed", range(12))
def test_the_ids_of_a_seed_are_the_targets_own(pair: Pair, cloud: Cloud, seed: int) -> None:
    check_seed(pair, cloud, seed)


@pytest.mark.parametrize("seed", range(20, 23))
def test_they_are_in_bfloat16_too(pair: Pair, bfloat16_cloud: Cloud, seed: int) -> None:
    check_seed(pair, bfloat16_cloud, seed)


def test_other_seeds_give_other_texts_and_the_same_seed_the_same(pair: Pair, cloud: Cloud) -> None:
    way = {"strategy": "vanilla"}
    texts = [pair.run(cloud[0], way, LONG[1], 24, temperature=1.0, seed=seed).token_ids for seed in (1, 2, 3, 1)]
    assert len(set(texts)) == 3 and texts[0] == texts[3]
    fresh = [pair.run(cloud[0], way, LONG[1], 24, temperature=1.0) for _ in range(2)]
    assert fresh[0].seed != fresh[1].seed
    assert pair.run(cloud[0], {"strategy": "pipesd"}, LONG[1], 24, temperature=1.0, seed=fresh[0].seed).token_ids == (
        fresh[0].token_ids
    )


def test_a_second_turn_samples_as_a_fresh_session(pair: Pair, cloud: Cloud) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    with pair.session(cloud[0], strategy="pipesd") as session:
        turns = []
        ids = list(LONG[1])
        for seed in (5, 6):
            for _ in session.generate(ids, max_tokens=24, seed=seed, **sampling):
                pass
            turns.append((list(ids), seed, session.token_ids))
            ids = [*ids, *session.token_ids, *LONG[3]]
    for ids, seed, got in turns:
        own = pair.run(cloud[0], {"strategy": "cloud"}, ids, 24, seed=seed, **sampling).token_ids
        assert got == own and len(own) > 8


def test_a_stop_text_ends_a_sample_at_the_same_place(pair: Pair, cloud: Cloud) -> None:
    sampling = {"temperature": 0.8, "seed": 11}
    whole = pair.run(cloud[0], {"strategy": "cloud"}, LONG[1], 48, **sampling)
    stop = whole.text[len(whole.text) // 2 :][:6]
    texts = set()
    for way in ({"strategy": "cloud"}, *WAYS[:2]):
        session = pair.run(cloud[0], way, LONG[1], 48, stop=(stop,), **sampling)
        assert session.finish_reason == "stop"
        texts.add((session.text, session.token_ids))
    ((text, ids),) = texts
    assert text == whole.text[: whole.text.index(stop)] and ids == whole.token_ids[: len(ids)]


@pytest.fixture(scope="module")
def target(demo_pair: tuple[Path, Path]) -> Any:
    from pipesd.cloud.loading import load_target

    return load_target(demo_pair[1], device="cpu", dtype="float32", slots=1)


def rows_behind(target: Any, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """The target's logits at each position of `ids`, float32 (ids, width), in one pass."""
    target.truncate(0, 0)
    rows: np.ndarray = target.forward([(0, [*prompt, *ids[:-1]], len(ids))])[0]
    return rows


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_are_those_of_the_targets_logits(
    pair: Pair, cloud: Cloud, target: Any, temperature: float
) -> None:
    import torch

    options = {"temperature": temperature, "seed": 3, "top_p": 0.9, "logprobs": 4}
    sessions = [pair.run(cloud[0], way, LONG[1], 24, **options) for way in ({"strategy": "cloud"}, *WAYS[:2])]
    ids = sessions[0].token_ids
    assert [session.token_ids for session in sessions] == [ids] * 3
    wanted = torch.log_softmax(torch.from_numpy(rows_behind(target, LONG[1], ids)).double(), dim=-1)
    for session in sessions:
        assert len(session.logprobs) == len(ids)
        for token, row, said in zip(ids, wanted, session.logprobs, strict=True):
            top = row.topk(4)
            assert said.own == pytest.approx(float(row[token]), abs=1e-4)
            assert [token for token, _ in said.top] == top.indices.tolist()
            assert [own for _, own in said.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_the_draft_model_alone_samples(pair: Pair) -> None:
    """As its own logits and the noise of the seed say."""
    options = {"temperature": 0.9, "seed": 8, "top_k": 50}
    first = pair.run("tcp://127.0.0.1:1", {"strategy": "local"}, LONG[1], 24, **options).token_ids
    assert first == pair.run("tcp://127.0.0.1:1", {"strategy": "local"}, LONG[1], 24, **options).token_ids
    greedy = pair.run("tcp://127.0.0.1:1", {"strategy": "local"}, LONG[1], 24).token_ids
    assert first != greedy
    pair.drafter.rollback(0)
    pair.drafter.extend(LONG[1])
    sampler = Sampler(Sampling(temperature=0.9, top_k=50), 8)
    assert tuple(pair.drafter.draft(sampler).id for _ in first) == first


# -- rejection sampling

TESTING: dict[str, dict[str, Any]] = {
    "whole law": {"sampling": "rejection", "top_k": 40},
    "proposals": {"sampling": "rejection"},
    "most probable": {"sampling": "picospec", "top_mass": 16},
}


@pytest.mark.parametrize("name", TESTING)
def test_a_run_that_tests_its_drafts(pair: Pair, cloud: Cloud, name: str) -> None:
    options = {"temperature": 1.0, "seed": 7, **TESTING[name]}
    for way in WAYS[:2]:
        session = pair.run(cloud[0], way, LONG[1], 48, **options)
        stats = session.stats
        assert session.finish_reason in ("length", "stop") and len(session.token_ids) == stats["tokens"]
        assert stats["refusals"] > 0 and stats["accepted"] > stats["tokens"] / 4
        assert (stats["sampling_error"] or 0.0) > 0.0 if name == "most probable" else not stats["sampling_error"]
        assert (stats["proposals"] > 0) == (name == "proposals")


def test_where_no_time_decides_what_is_tested_a_seed_repeats(pair: Pair, cloud: Cloud) -> None:
    """One draft after the other, each of one length: then rejection sampling too has the same ids again."""
    options = {"temperature": 1.0, "seed": 9, "sampling": "rejection"}
    runs = [pair.run(cloud[0], {"strategy": "vanilla", "draft_length": 4}, LONG[1], 40, **options) for _ in range(2)]
    assert runs[0].token_ids == runs[1].token_ids
    own = pair.run(cloud[0], {"strategy": "cloud"}, LONG[1], 40, **options).token_ids
    assert runs[0].token_ids != own, "and yet they are not those of the target alone"


def test_a_link_that_is_cut_does_not_end_rejection_sampling(pair: Pair, cloud: Cloud) -> None:
    options = {"temperature": 1.0, "seed": 4, "sampling": "rejection"}
    with LinkProxy(cloud[0], delay_s=0.002) as link:
        for way in WAYS[:2]:
            session = pair.run(link.address, way, LONG[1], 40, at=15, then=link.cut, **options)
            assert session.finish_reason in ("length", "stop") and session.stats["tokens"] > 15
        assert link.counts().connections > 2


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}], ids=["all", "top-p"])
def test_rejection_sampling_has_the_targets_law(drafter: Any, target: Any, options: dict[str, Any]) -> None:
    """On the pair's own logits: the token that comes of draft, test and redraw is distributed as the target says.

    Chi-square over 4000 seeds of the ids that are expected 5 times or more, the rest as one.
    """
    from scipy.stats import chisquare

    prompt, seeds = LONG[2], 4000
    p_row = rows_behind(target, prompt, [0])[0]
    q_row = draft_row(drafter, prompt)
    law = Sampler(Sampling(**options), 0).law(p_row, prompt)
    assert law is not None
    p = np.zeros(len(p_row))
    p[slice(len(law.weights)) if law.ids is None else law.ids] = law.weights
    p /= p.sum()
    sampling = Sampling(method=Method.REJECTION, **options)
    found = Counter(drawn_by_rejection(p_row, q_row, prompt, Sampler(sampling, seed)) for seed in range(seeds))
    expected = seeds * p
    common = np.flatnonzero(expected >= 5)
    counts = np.array([found[token] for token in common.tolist()], float)
    result = chisquare(
        [*counts, seeds - counts.sum()], [*expected[common], seeds - expected[common].sum()], sum_check=False
    )
    assert result.pvalue > 1e-3, f"{result}: {counts} of {expected[common]}"
    assert set(found) <= set(np.flatnonzero(p).tolist())


class Seen:
    """Stands in for a sampler to see what it is given; draws nothing."""

    row: np.ndarray

    def choose(self, row: np.ndarray, position: int, prefix: Sequence[int]) -> None:
        self.row = row.copy()


def draft_row(drafter: Any, prompt: Sequence[int]) -> np.ndarray:
    """The draft model's logits behind a prompt."""
    drafter.rollback(0)
    drafter.extend(prompt)
    seen = Seen()
    drafter.draft(seen)
    return seen.row


def drawn_by_rejection(p_row: np.ndarray, q_row: np.ndarray, prompt: Sequence[int], sampler: Sampler) -> int:
    """The token behind `prompt`, through both sides' code, without messages."""
    at, proposals = len(prompt), Proposals(sampler)
    drafted = proposals.choose(q_row, at, prompt)
    assert drafted is not None
    draw = Draw(sampler, prompt, (drafted.id,), (proposals.p_sent(at, drafted.id),))
    choices = choose((p_row, p_row), draw)
    if choices.refusal is None:
        assert choices.accepted == 1
        return drafted.id
    tried = 0
    while True:
        refused = choices.refusal.told(tried)
        token = proposals.redraw(at, refused)
        if token is not None:
            return token
        tried = refused.end
