"""A trace says what a session would have drafted: the committed ones against the real pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))
from exactness import cloud  # noqa: E402
from recording import Recorder, Said  # noqa: E402

from pipesd import EdgeConfig, EdgeSession  # noqa: E402
from pipesd.edge.drafter import Drafter  # noqa: E402
from pipesd.sim.trace import Guess, Record, Trace  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.slow]
TRACES = ROOT / "bench" / "traces"
TOKENS = 24
AGAIN = 40  # ids of a record that are recorded again; a guess hangs on nothing behind it
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "vanilla", "draft_length": 5},
    {"strategy": "hsl"},
    {"strategy": "edgellm"},
    {"strategy": "pipesd", "tuning": "off"},
    {"strategy": "pipesd", "tuning": "off", "batching": "immediate", "trigger": "entropy"},
)
CLOSE = 2e-3  # of a probability: other pieces, other kernels, other last bits


class Pair(NamedTuple):
    """The draft model, and where the target is served."""

    drafter: Drafter
    address: str


@pytest.fixture(scope="module")
def pair(demo_pair: tuple[Path, Path]) -> Iterator[Pair]:
    draft, target = demo_pair
    drafter = Drafter(draft, threads=1)
    try:
        with cloud(str(target)) as (address, _):
            yield Pair(drafter, address)
    finally:
        drafter.close()


def generated(pair: Pair, settings: dict[str, Any], record: Record, tokens: int, **options: Any) -> tuple[int, ...]:
    """What a real session says behind the record's prompt."""
    config = EdgeConfig(cloud=pair.address, **settings)
    with EdgeSession(config, drafter=pair.drafter, tokeniser=pair.drafter.tokeniser) as session:
        for _ in session.generate(record.prompt, max_tokens=tokens, seed=record.seed, **options):
            pass
        return session.token_ids


def values(guess: Guess) -> tuple[float, ...]:
    return guess.p_draft, guess.entropy, guess.p_runner_up, guess.margin


@pytest.mark.parametrize("name", ["humaneval", "sampled"])
def test_a_record_comes_again_as_it_was(pair: Pair, name: str) -> None:
    trace = Trace.load(TRACES / f"{name}.jsonl.gz")
    record = max(trace.records, key=lambda one: sum(map(one.right, range(len(one.output)))))  # the soonest drafted
    output = generated(pair, {"strategy": "cloud"}, record, AGAIN, **trace.sampling)
    assert output == record.output[:AGAIN]
    again = Recorder(pair.drafter, trace.sampling, trace.depth).record(Said(record.prompt, output, record.seed))
    behind = {i: guesses for i, guesses in record.behind.items() if i < AGAIN - 1}
    assert len(behind) >= 4 and set(again.behind) == {*behind, AGAIN - 1}, "the last has some whatever the guess"
    for found, kept in (
        (again.guesses, record.guesses[:AGAIN]),
        *((again.behind[i], guesses) for i, guesses in behind.items()),
    ):
        assert [(guess.id, guess.runner_up) for guess in found] == [(guess.id, guess.runner_up) for guess in kept]
        for one, other in zip(found, kept, strict=True):
            assert values(one) == pytest.approx(values(other), rel=1e-6, abs=1e-6)


def told(record: Record, live: list[int], pos: int) -> tuple[int, Guess | None]:
    """How far behind a wrong guess `pos` is on the branch `live`, and what the record says is drafted there, if its
    depth goes so far."""
    begin = len(record.prompt)
    wrong = next((i for i in range(begin, pos) if live[i] != record.output[i - begin]), pos)
    drafted = record.continuation(wrong - begin)
    return pos - wrong, drafted[pos - wrong] if pos - wrong < len(drafted) else None


def drafts(record: Record, events: Path) -> Iterator[tuple[dict[str, Any], int, Guess]]:
    """Each draft token of a session's event log, with how far it is behind a wrong one and what the record says."""
    live = list(record.prompt)
    for line in events.read_text().splitlines():
        event = json.loads(line)
        match event["event"]:
            case "drafted":
                del live[event["pos"] :]
                behind, guess = told(record, live, event["pos"])
                if guess is not None:
                    yield event, behind, guess
                live.append(event["id"])
            case "rollback":
                del live[event["pos"] :]
            case "committed":
                live[event["pos"] : event["pos"] + len(event["ids"])] = event["ids"]


@pytest.mark.parametrize("name", ["humaneval", "sampled"])
def test_sessions_draft_what_the_trace_says(pair: Pair, name: str, tmp_path: Path) -> None:
    trace = Trace.load(TRACES / f"{name}.jsonl.gz")
    deepest = 0
    for number, settings in enumerate(STRATEGIES):
        record = trace.records[number % len(trace.records)]
        log = tmp_path / f"{number}.jsonl"
        ids = generated(pair, settings | {"events": str(log)}, record, TOKENS, **trace.sampling)
        assert ids == record.output[:TOKENS], settings
        compared = list(drafts(record, log))
        assert len(compared) >= TOKENS // 2, settings
        for event, behind, guess in compared:
            assert event["id"] == guess.id, (settings, event, guess)
            assert (event["p_draft"], event["entropy"]) == pytest.approx((guess.p_draft, guess.entropy), abs=CLOSE)
            if trace.sampling:
                assert event["margin"] == pytest.approx(guess.margin, abs=CLOSE)
            deepest = max(deepest, behind)
    assert deepest >= 4, "hardly anything behind a wrong guess was drafted, so little of the depth was compared"
