"""The recorder on scripted models: a trace says what the draft model drafts, what the target says, and how long both
take. And the committed traces: that they are what their README says."""

from __future__ import annotations

import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))
import record as program  # noqa: E402
from clouds import LAW, serving  # noqa: E402
from recording import LONGEST_PROMPT, Recorder, Said, Wish, prompts_of, record_trace  # noqa: E402

from pipesd.edge.advise_reading import TwoBest  # noqa: E402
from pipesd.errors import UsageError  # noqa: E402
from pipesd.policy.sampler import Sampler  # noqa: E402
from pipesd.policy.sampling import Sampling  # noqa: E402
from pipesd.sim.distributions import KeyedDistribution, draft_of, probabilities, sampled_continuation  # noqa: E402
from pipesd.sim.drafters import Agreement, ScriptedDrafter  # noqa: E402
from pipesd.sim.link_model import Link  # noqa: E402
from pipesd.sim.simulate import simulate  # noqa: E402
from pipesd.sim.synthetic import synthetic_trace  # noqa: E402
from pipesd.sim.texts import KeyedText, Law, continuation  # noqa: E402
from pipesd.sim.tokeniser import END_ID, ByteTokeniser  # noqa: E402
from pipesd.sim.trace import Guess, Record, Trace  # noqa: E402

TRACES = ROOT / "bench" / "traces"
PROMPTS = ["A first one", "The second", "x" * 300, "Number four", "And the last"]
USABLE = [prompt for prompt in PROMPTS if len(prompt) < LONGEST_PROMPT]
DEPTH, TOKENS, PASS_S = 6, 24, 0.004
SHARP = KeyedDistribution(3)


def recorded(law: Law, drafter: ScriptedDrafter, wish: Wish) -> Trace:
    with serving(law, target={"pass_s": PASS_S, "end_ids": (END_ID,)}) as cloud:
        return record_trace(cloud.address, drafter, ByteTokeniser(), PROMPTS, wish)


def drafted(drafter: ScriptedDrafter, record: Record, i: int, depth: int, sampler: Sampler) -> list[Any]:
    """What a fresh drafter draws behind the record's prompt and its first `i` ids."""
    drafter.rollback(0)
    drafter.extend([*record.prompt, *record.output[:i]])
    return [drafter.draft(sampler) for _ in range(depth)]


def check_guesses(trace: Trace, drafter: ScriptedDrafter, sampling: Sampling) -> None:
    """From every place as many guesses as the trace is deep, and each is what the drafter draws there."""
    for record in trace.records:
        sampler = Sampler(sampling, record.seed or 0, margins=True)
        for i in range(len(record.output)):
            found = record.continuation(i, trace.depth)
            wanted = drafted(drafter, record, i, trace.depth, sampler)
            assert [guess.id for guess in found] == [drawn.id for drawn in wanted]
            for guess, drawn in zip(found, wanted, strict=True):
                assert (guess.p_draft, guess.entropy, guess.margin) == pytest.approx(drawn[1:4], rel=1e-6)


def test_what_is_recorded_is_said_and_drafted() -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.7))
    trace = recorded(LAW, drafter, Wish(4, TOKENS, depth=DEPTH))
    assert [record.prompt for record in trace.records] == [tuple(ByteTokeniser().encode(text)) for text in USABLE]
    for record in trace.records:
        assert record.output == tuple(continuation(LAW, record.prompt, TOKENS))
        assert (record.seed, record.finish) == (None, "length")
    check_guesses(trace, drafter, Sampling())
    assert (trace.depth, trace.sampling, trace.vocabulary_size) == (DEPTH, {}, 512)
    assert list(trace.pass_s) == [1, 2, 4, 8, 16] and min(trace.pass_s.values()) >= PASS_S and trace.gamma_s > 0


def test_what_is_recorded_of_samples() -> None:
    drafter = ScriptedDrafter(draft_of(SHARP, 0.6))
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
    trace = recorded(SHARP, drafter, Wish(3, TOKENS, depth=DEPTH, sampling=options, seed=40))
    sampling = Sampling(**options)
    assert trace.sampling == options and [record.seed for record in trace.records] == [40, 41, 43]
    for record in trace.records:
        told = sampled_continuation(SHARP, record.prompt, TOKENS, Sampler(sampling, record.seed or 0))
        assert record.output == tuple(told)
    check_guesses(trace, drafter, sampling)
    guesses = [guess for record in trace.records for guess in record.guesses]
    assert any(guess.p_runner_up > guess.p_draft for guess in guesses) and len({guess.margin for guess in guesses}) > 9


def test_outputs_end_where_the_target_ends_them_and_some_may_be_left_out() -> None:
    law = KeyedText(11, end_id=END_ID, end_rate=0.1)
    drafter = ScriptedDrafter(Agreement(law, 0.8))
    outputs = [tuple(continuation(law, ByteTokeniser().encode(text), TOKENS, (END_ID,))) for text in USABLE]
    lengths = sorted(map(len, outputs))
    assert lengths[0] < lengths[-1], "another key: these texts are all as long"
    trace = recorded(law, drafter, Wish(4, TOKENS, depth=DEPTH))
    assert [record.output for record in trace.records] == outputs
    for record in trace.records:
        assert record.finish == ("stop" if record.output[-1] == END_ID else "length")
    check_guesses(trace, drafter, Sampling())
    (longest,) = recorded(law, drafter, Wish(1, TOKENS, least=lengths[-1], depth=1)).records
    assert longest.output == next(output for output in outputs if len(output) == lengths[-1])
    (third,) = recorded(law, drafter, Wish(1, TOKENS, skip=2, depth=1)).records
    assert third.output == outputs[2]


def test_a_chat_template_is_put_around_prompts() -> None:
    (record,) = recorded(LAW, ScriptedDrafter(Agreement(LAW)), Wish(1, 4, depth=1, chat=True)).records
    wanted = ByteTokeniser().encode("<s>user: A first one</s><s>assistant: ", special=True)
    assert record.prompt == tuple(wanted)


def test_what_cannot_be_recorded_is_said() -> None:
    drafter = ScriptedDrafter(Agreement(LAW))
    with pytest.raises(UsageError, match="4 of the prompts can be recorded, wanted 9"):
        recorded(LAW, drafter, Wish(9, 4))
    with pytest.raises(UsageError, match="only with sampling noise"):
        recorded(LAW, drafter, Wish(1, 4, sampling={"temperature": 1.0, "sampling": "rejection"}))
    with pytest.raises(UsageError, match="do not fit into the draft model's context"):
        Recorder(ScriptedDrafter(Agreement(LAW), context=4), {}, 2).record(Said((1, 2), (3, 4, 5, 6)))


def test_the_draft_models_context_may_end_within_the_last_guesses() -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.5), context=30)
    output = tuple(continuation(LAW, (1, 2), 26))
    record = Recorder(drafter, {}, 8).record(Said((1, 2), output))
    assert len(record.continuation(25)) == 3 and len(record.guesses) == 26


def test_the_runner_up_is_the_most_probable_other_id() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        row = rng.normal(size=30).astype(np.float32)
        watched = TwoBest(Sampler(Sampling(temperature=1.0), seed))
        choice = watched.choose(row, 3, (1, 2, 3))
        assert choice is not None
        share, order = probabilities(row), np.argsort(-row)
        assert watched.second == next(i for i in order if i != choice.id)
        assert watched.share == pytest.approx(share[watched.second] / share[choice.id], rel=1e-5)
    nothing = TwoBest(Sampler(Sampling(temperature=1.0), 0))
    assert nothing.choose(np.full(4, math.nan, np.float32), 0, ()) is None and nothing.share == 0.0


def test_files_without_prompts(tmp_path: Path) -> None:
    for content in ("[", '{"answer": "4"}\n', "7\n", "[7]"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(UsageError, match=r"a\.json: no prompts can be read"):
            prompts_of([str(tmp_path / "a.json")])
    with pytest.raises(UsageError, match="no prompts can be read"):
        prompts_of([str(tmp_path / "none.json.gz")])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give either --target PATH or --cloud ADDRESS"),
        (["--target", "a", "--cloud", "b"], "give either --target PATH or --cloud ADDRESS"),
        (["--target", "a", "--depth", "0"], "--depth 0: want at least 1"),
        (["--target", "a", "--temperature", "-1"], "temperature"),
        (["--target", "a", "--seed", "-1"], "--seed -1: want at least 0"),
        (["--target", "a", "--out", "no/such/folder/o"], "there is no such folder"),
    ],
)
def test_wrong_use(monkeypatch: pytest.MonkeyPatch, words: list[str], why: str) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py", "--draft", "d", "--prompts", "p", "--out", "o", *words])
    with pytest.raises(UsageError, match=why):
        program.main()


@pytest.mark.parametrize(("name", "count", "tokens"), [("humaneval", 12, 128), ("gsm8k", 12, 128), ("sampled", 4, 64)])
def test_the_committed_traces(name: str, count: int, tokens: int) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    assert path.stat().st_size < 500_000 and path.name in (TRACES / "README.md").read_text()
    trace = Trace.load(path)
    assert (len(trace.records), trace.depth, trace.vocabulary_size) == (count, 32, 49152)
    assert trace.sampling == ({"temperature": 0.8} if name == "sampled" else {})
    for record in trace.records:
        length = len(record.output)
        assert len(record.prompt) <= LONGEST_PROMPT
        assert (record.finish == "stop") == (record.output[-1] in trace.end_ids) and 0.7 * tokens < length <= tokens
        assert length == tokens or record.finish == "stop"
        assert (record.seed is None) == (name != "sampled")
        assert {len(record.continuation(i)) for i in range(length)} == {32}
        for guesses in (record.guesses, *record.behind.values()):
            assert all(guess.id != guess.runner_up and 0 < guess.p_draft <= 1 for guess in guesses)
            if name != "sampled":
                assert all(guess.p_draft >= guess.p_runner_up for guess in guesses)
    assert [record.finish for record in trace.records].count("stop") == (3 if name == "gsm8k" else 0)
    assert len({record.prompt for record in trace.records}) == count
    right = [record.right(i) for record in trace.records for i in range(len(record.output))]
    assert 0.6 < sum(right) / len(right) < 0.95


def example() -> dict[str, Any]:
    """What the example of the documentation defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "traces.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(("name", "length"), [("humaneval", 4), ("gsm8k", 1), ("gsm8k", 7)])
def test_the_example_of_the_documentation(name: str, length: int) -> None:
    """What it counts is what the simulator finds by running the product's own code."""
    path = TRACES / f"{name}.jsonl.gz"
    found = example()["vanilla_tpt_ms"](path, length, 0.01, 0.04, 0.003, 0.02)
    done = simulate(
        Trace.load(path).records, link=Link(latency_s=0.01), gamma_s=0.01, pass_s=0.04, token_s=0.003,
        settings={"strategy": "vanilla", "draft_length": length, "tuning": "off"},
    )  # fmt: skip
    assert found == pytest.approx(done.tpt_ms, rel=1e-4)


def with_ends(trace: Trace, chance: random.Random) -> Trace:
    """The same with end ids among the wrong guesses, early ones too, and texts that end by themselves."""
    end = trace.end_ids[0]

    def turned(guess: Guess, said: int | None = None) -> Guess:
        return guess._replace(id=end) if guess.id != said and chance.random() < 0.3 else guess

    records = []
    for record in trace.records:
        guesses = tuple(map(turned, record.guesses, record.output))
        behind = {place: tuple(map(turned, seen)) for place, seen in record.behind.items()}
        stops = chance.random() < 0.4
        output = (*record.output[:-1], end) if stops else record.output
        finish = "stop" if stops else "length"
        records.append(replace(record, output=output, guesses=guesses, behind=behind, finish=finish, end_ids=(end,)))
    return replace(trace, records=tuple(records))


@pytest.mark.parametrize("seed", range(16))
def test_the_example_of_the_documentation_on_any_trace(tmp_path: Path, seed: int) -> None:
    """Also where the first draft ends early, or takes longer than the prompt; without ties of two times."""
    chance, path = random.Random(seed), tmp_path / "trace.jsonl.gz"
    with_ends(synthetic_trace(3, 30, acceptance=0.7, seed=seed), chance).save(path)
    length, gamma_s, pass_s = chance.randint(1, 16), chance.uniform(0, 0.04), chance.uniform(0.02, 0.2)
    token_s, round_trip_s = chance.uniform(0, 0.01), chance.uniform(0, 0.2)
    found = example()["vanilla_tpt_ms"](path, length, gamma_s, pass_s, token_s, round_trip_s)
    done = simulate(
        Trace.load(path).records, link=Link(latency_s=round_trip_s / 2), gamma_s=gamma_s, pass_s=pass_s,
        token_s=token_s, settings={"strategy": "vanilla", "draft_length": length, "tuning": "off"},
    )  # fmt: skip
    assert found == pytest.approx(done.tpt_ms, rel=1e-4)
