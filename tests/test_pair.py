"""The real pair, as processes on a real link: the text is the target's own, whatever the strategy and whatever dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.sim.check import check_file

pytestmark = [pytest.mark.model, pytest.mark.slow]
PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
CLOUD = [sys.executable, "-c", "import sys; from pipesd.cloud.cli import main; sys.exit(main())", "serve"]
EDGE = [sys.executable, "-c", "import sys; from pipesd.edge.cli import main; sys.exit(main())"]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def cloud(request: pytest.FixtureRequest, demo_pair: Pair) -> Iterator[tuple[str, int, str]]:
    """A served target: address, process id, precision."""
    command = [*CLOUD, "--model", str(demo_pair[1]), "--bind", "tcp://127.0.0.1:0", "--dtype", request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid, request.param
        process.terminate()


def run(address: str, draft: Path, ids: list[int], tokens: int, **options: Any) -> EdgeSession:
    """One generation on a session of its own, whose event log has no findings."""
    with EdgeSession(EdgeConfig(draft=str(draft), cloud=address, threads=1, **options)) as session:
        for _ in session.generate(ids, max_tokens=tokens):
            pass
    if session.config.events:
        assert check_file(session.config.events) == []
    return session


def worker_of(front: int) -> int:
    children = [int(pid) for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split()]
    return max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


WAYS: list[dict[str, str]] = [
    {"strategy": "auto"},
    {"strategy": "pipesd"},
    {"strategy": "hsl"},
    {"strategy": "edgellm"},
    {"strategy": "pipesd", "batching": "immediate", "trigger": "gain"},
    {"strategy": "pipesd", "batching": "greedy", "trigger": "entropy", "waiting": "idle"},
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=[prompt["name"] for prompt in PROMPTS])
def test_every_strategy_gives_the_targets_own_ids(
    cloud: tuple[str, int, str], demo_pair: Pair, prompt: dict[str, Any], tmp_path: Path
) -> None:
    address, _, dtype = cloud
    draft, ids, tokens = demo_pair[0], prompt["ids"], 32
    own = run(address, draft, ids, tokens, strategy="cloud", events=str(tmp_path / "cloud")).token_ids
    for length in (1, 4, 8):
        session = run(
            address, draft, ids, tokens, strategy="vanilla", draft_length=length, events=str(tmp_path / f"{length}")
        )
        assert session.token_ids == own, f"{dtype}, {length} draft tokens"
        assert session.stats["drafted"] >= session.stats["verified"] >= session.stats["accepted"]
    for options in WAYS:
        events = str(tmp_path / "-".join(options.values()))
        session = run(address, draft, ids, tokens, events=events, tuning=str(tmp_path / "tuning"), **options)
        assert session.token_ids == own, f"{dtype}, {options}"
        assert check_file(events) == []


@pytest.mark.parametrize("prompt", PROMPTS, ids=[prompt["name"] for prompt in PROMPTS])
def test_the_ids_are_those_recorded(cloud: tuple[str, int, str], demo_pair: Pair, prompt: dict[str, Any]) -> None:
    """Recorded from an independent implementation (transformers, float32), with the margin of each choice: another CPU
    may choose differently at a near tie, never elsewhere."""
    address, _, dtype = cloud
    if dtype != "float32":
        pytest.skip("recorded in float32")
    got = run(address, demo_pair[0], prompt["ids"], len(prompt["reference"]), strategy="cloud").token_ids
    pairs = list(zip(got, prompt["reference"], strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert at is None or prompt["margins"][at] < 1e-3, f"position {at}: {pairs[at]}, margin {prompt['margins'][at]}"
    assert pairs


@pytest.mark.parametrize("strategy", ["vanilla", "pipesd", "edgellm"])
def test_a_killed_worker_changes_nothing(cloud: tuple[str, int, str], demo_pair: Pair, strategy: str) -> None:
    address, front, _ = cloud
    draft, ids = demo_pair[0], PROMPTS[0]["ids"]
    own = run(address, draft, ids, 48, strategy="cloud").token_ids
    victim, at = worker_of(front), random.Random(5).randrange(8, 32)
    with EdgeSession(EdgeConfig(draft=str(draft), cloud=address, threads=1, strategy=strategy)) as session:
        killed_s = None
        for _ in session.generate(ids, max_tokens=48):
            if killed_s is None and len(session.committed) - len(ids) >= at:
                os.kill(victim, signal.SIGKILL)
                killed_s = time.monotonic()
        assert killed_s is not None and time.monotonic() - killed_s < 40
    assert session.token_ids == own
    assert session.stats["openings"] > 1
    assert worker_of(front) != victim


def test_a_chat_reuses_what_both_sides_have(cloud: tuple[str, int, str], demo_pair: Pair) -> None:
    """Two turns of a conversation on one session say what two fresh sessions say."""
    from pipesd.edge.chat import Conversation

    address, draft = cloud[0], demo_pair[0]
    answers = []
    with EdgeSession(EdgeConfig(draft=str(draft), cloud=address, threads=1)) as session:
        conversation = Conversation(session.tokeniser)
        for question in ("What is the capital of France?", "And of Spain?"):
            turn = conversation.next_turn(question)
            text = "".join(piece.text for piece in session.generate(turn.ids, answer=True, max_tokens=24))
            conversation.answered(text, session.token_ids)
            answers.append((list(turn.ids), session.token_ids))
        assert turn.keep > 20 and not turn.rewritten
    for prompt, ids in answers:
        assert run(address, draft, prompt, 24, strategy="cloud").token_ids == ids


def test_the_programs_as_a_user_runs_them(cloud: tuple[str, int, str], demo_pair: Pair) -> None:
    command = [*EDGE, "generate", "--draft", str(demo_pair[0]), "--cloud", cloud[0], "--prompt", "One, two, three,"]
    results = [
        json.loads(
            subprocess.run([*command, "--max-tokens", "12", "--json", *more], capture_output=True, check=True).stdout
        )
        for more in ([], ["--strategy", "cloud"])
    ]
    assert results[0]["token_ids"] == results[1]["token_ids"] and results[0]["text"] == results[1]["text"]
    assert [result["finish_reason"] for result in results] == ["length", "length"]
    assert results[0]["stats"]["target_passes"] < results[1]["stats"]["target_passes"] == 12
    plain = subprocess.run([*command, "--max-tokens", "12"], capture_output=True, check=True, text=True)
    assert plain.stdout == results[0]["text"] + "\n"
    assert "12 tokens" in plain.stderr and "One, two" not in plain.stderr
