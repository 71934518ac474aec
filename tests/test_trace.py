"""Traces: what a record says, the file, and one clear line for each file that is none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.errors import UsageError
from pipesd.sim.synthetic import synthetic_trace
from pipesd.sim.trace import Guess, Record, Trace

SIZE = 40  # of the vocabulary
RIGHT, WRONG = Guess(7, 0.75, 0.5, 8, 0.125, 0.25), Guess(9, 0.25, 1.5, 7, 0.125)
FURTHER = (Guess(1, 0.5, 1.0, 2, 0.25), Guess(2, 0.5, 1.0, 1, 0.25))
RECORD = Record((1, 2), (7, 7, 7, 7), (RIGHT, WRONG, RIGHT, RIGHT), {1: FURTHER, 3: FURTHER[:1]}, 11, "stop")
BIASES = ((3, -1.5), (4, float("-inf")))
TRACE = Trace(
    "draft", "target", "00ff", SIZE, (0,), (RECORD,), {"temperature": 0.5, "logit_bias": BIASES}, 4, 0.01,
    {1: 0.03, 4: 0.06},
)  # fmt: skip

ids = st.integers(0, SIZE - 1)
ends, others = st.integers(0, 2), st.integers(3, SIZE - 1)
share = st.floats(0, 1)
guesses = st.builds(Guess, ids, share, st.floats(0, 12), ids, share, share)


@st.composite
def records(draw: st.DrawFn) -> Record:
    output = draw(st.lists(others, min_size=1, max_size=6))
    own = [
        guess._replace(id=token_id) if draw(st.booleans()) else guess
        for token_id, guess in ((token_id, draw(guesses)) for token_id in output)
    ]
    places = [i for i in range(len(output)) if own[i].id != output[i] or i == len(output) - 1]
    behind = {i: tuple(draw(st.lists(guesses, max_size=5))) for i in places if draw(st.booleans())}
    prompt = draw(st.lists(ids, min_size=1, max_size=3))
    seed = draw(st.none() | st.integers(0, 2**64 - 1))
    return Record(tuple(prompt), tuple(output), tuple(own), behind, seed, draw(st.sampled_from(["length", "stop"])))


traces = st.builds(
    Trace, st.text(max_size=5), st.text(max_size=5), st.binary(max_size=8).map(bytes.hex), st.just(SIZE),
    st.lists(ends, max_size=3).map(tuple), st.lists(records(), max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["temperature", "top_p"]), share), st.just(6), st.floats(0, 9),
    st.dictionaries(st.integers(1, 32), st.floats(0, 9), max_size=3),
)  # fmt: skip


def test_what_the_draft_model_drafts_from_each_place() -> None:
    assert RECORD.continuation(0) == (RIGHT, WRONG, *FURTHER)
    assert RECORD.continuation(1) == (WRONG, *FURTHER)
    assert RECORD.continuation(2) == (RIGHT, RIGHT, FURTHER[0])
    assert RECORD.continuation(3) == (RIGHT, FURTHER[0])
    assert RECORD.continuation(0, 2) == (RIGHT, WRONG) and RECORD.continuation(1, 0) == ()
    assert [RECORD.right(i) for i in range(4)] == [True, False, True, True]


@given(records())
def test_a_continuation_is_that_of_the_place_before_without_its_right_guess(record: Record) -> None:
    for i in range(len(record.output) - 1):
        if record.right(i):
            for depth in (1, 2, 9):
                assert record.continuation(i, depth + 1) == (record.guesses[i], *record.continuation(i + 1, depth))
        else:
            assert record.continuation(i) == (record.guesses[i], *record.behind.get(i, ()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt": ()}, "prompt and output: want at least one id"),
        ({"output": (), "guesses": (), "behind": {}}, "prompt and output: want at least one id"),
        ({"guesses": (RIGHT,)}, "guesses: 1, want one for each of the 4 ids"),
        ({"behind": {4: FURTHER}}, "behind: of place 4, but output has 4 ids"),
        ({"behind": {-1: FURTHER}}, "behind: of place -1"),
        ({"behind": {2: FURTHER}}, "behind: of place 2, where the guess is right"),
    ],
)
def test_a_record_whose_parts_do_not_fit(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        replace(RECORD, **changes)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (replace(RECORD, prompt=(SIZE,)), "record 0: prompt: an id that is not below the vocabulary's size, 40"),
        (replace(RECORD, output=(7, 7, 7, SIZE)), "record 0: output: "),
        (replace(RECORD, guesses=(RIGHT, WRONG._replace(id=SIZE), RIGHT, RIGHT)), "record 0: guesses: "),
        (replace(RECORD, behind={1: (WRONG._replace(runner_up=-1),)}), "record 0: runner_up: "),
        (replace(RECORD, behind={1: (WRONG,) * 4}), "behind: 4 guesses at place 1, want at most 3"),
    ],
)
def test_a_record_of_another_pair(record: Record, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        replace(TRACE, records=(record,))


@settings(max_examples=60)
@given(traces)
def test_a_file_gives_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    one, other = (tmp_path_factory.getbasetemp() / name for name in ("one.gz", "other.gz"))
    trace.save(one)
    assert Trace.load(one) == trace
    lines = gzip.decompress(one.read_bytes()).splitlines()
    assert len(lines) == 1 + len(trace.records) and json.loads(lines[0])["format"] == "pipesd-trace"
    Trace.load(one).save(other)
    assert one.read_bytes() == other.read_bytes()


def test_all_fields_come_back_as_what_they_were(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "a.gz")
    found = Trace.load(tmp_path / "a.gz")
    assert found == TRACE and hash(found.records[0]) == hash(TRACE.records[0])
    assert list(found.pass_s) == [1, 4] and found.sampling["logit_bias"] == BIASES


def told(path: Path) -> str:
    """What is said of a file that cannot be read, but for its name: one line with what to do."""
    with pytest.raises(UsageError) as error:
        Trace.load(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and len(text) < 300 + len(str(path))
    return text.replace(str(path), "FILE")


def changed(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> str:
    """What is said of `TRACE`'s file with something else in it."""
    TRACE.save(path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(lines)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return told(path)


@pytest.mark.parametrize(
    ("line", "names", "value", "why"),
    [
        (0, ["format"], "other", "line 1: format: got other, want pipesd-trace"),
        (0, ["version"], 2, "line 1: version: got 2, want 1"),
        (0, ["version"], True, "line 1: version: got True, want an integer"),
        (0, ["draft"], 7, "line 1: draft: got 7, want a text"),
        (0, ["vocabulary"], "xyz", "line 1: vocabulary: non-hexadecimal"),
        (0, ["vocabulary_size"], 0, "line 1: vocabulary_size: got 0, want at least 1"),
        (0, ["end_ids"], {}, "line 1: end_ids: got {}, want a list"),
        (0, ["end_ids"], [-1], "line 1: end_ids: got -1, want an integer of at least 0"),
        (0, ["sampling"], [], "line 1: sampling: got [], want an object"),
        (0, ["sampling", "logit_bias"], [[3]], "line 1: sampling: not enough values"),
        (0, ["sampling", "logit_bias"], [[0.5, 1]], "line 1: sampling: got 0.5, want an integer"),
        (0, ["depth"], 0, "line 1: depth: got 0"),
        (0, ["gamma_s"], -1, "line 1: gamma_s: got -1, want a number from 0"),
        (0, ["gamma_s"], float("nan"), "line 1: gamma_s: got nan"),
        (0, ["pass_s"], {"1": float("inf")}, "line 1: pass_s: got inf"),
        (0, ["pass_s"], {"one": 1.0}, "line 1: pass_s: "),
        (0, ["records"], 2, "line 3: missing, the file is cut short"),
        (0, ["records"], 0, "line 2: more than the 0 records"),
        (1, ["prompt"], [1.5], "line 2: prompt: got 1.5, want an integer"),
        (1, ["prompt"], [True], "line 2: prompt: got True, want an integer"),
        (1, ["prompt"], [], "line 2: prompt and output: want at least one id"),
        (1, ["output"], [7, 7, 7, 40], "line 2: output: an id that is not below the vocabulary's size, 40"),
        (1, ["output"], [7, 0, 7, 7], "line 2: output: id 0, which ends a text, before its end"),
        (1, ["output"], [7], "line 2: guesses: 4, want one for each of the 1 ids"),
        (1, ["seed"], "x", "line 2: seed: got x"),
        (1, ["finish"], "tired", "line 2: finish: got tired, want length or stop"),
        (1, ["guesses"], [], "line 2: guesses: got [], want an object"),
        (1, ["guesses", "p_draft"], [0.5, 0.5, 0.5, 1.5], "line 2: guesses: got 1.5, want a number from 0 to 1"),
        (1, ["guesses", "entropy"], [0.5, 0.5, 0.5, -1], "line 2: guesses: got -1"),
        (1, ["guesses", "margin"], [0.5], "line 2: guesses: lists of 4, 4, 4, 4, 4, 1 items"),
        (1, ["guesses", "ids"], [7, 7, 7, "7"], "line 2: guesses: got 7, want an integer"),
        (1, ["behind"], {"0": {}}, "line 2: behind: "),
        (1, ["behind", "1", "p_runner_up"], None, "line 2: behind: got None, want a list"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_line(
    tmp_path: Path, line: int, names: list[str], value: object, why: str
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        at = lines[line]
        for name in names[:-1]:
            at = at[name]
        at[names[-1]] = value

    assert changed(tmp_path / "a.gz", change).startswith(f"FILE: {why}")


@pytest.mark.parametrize("line", [0, 1])
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, line: int) -> None:
    TRACE.save(tmp_path / "a.gz")
    names = list(json.loads(gzip.decompress((tmp_path / "a.gz").read_bytes()).splitlines()[line]))
    for name in names:
        assert changed(tmp_path / "a.gz", lambda lines, name=name: lines[line].pop(name)).startswith(
            f"FILE: line {line + 1}: {name}: "
        )


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    for content, why in (
        (b"", "line 1: missing"),
        (b'{"format": "pipesd-trace"}\n', "not gzipped, or damaged"),
        (gzip.compress(b"\x80 text\n"), "line 1: not JSON"),
        (gzip.compress(b"[1]\n"), "line 1: got a JSON list, want an object"),
        (gzip.compress(b'{"format": '), "line 1: not JSON, or cut short"),
        (gzip.compress(b"[" * 100_000), "line 1: not JSON"),
        (gzip.compress(b'{"question": "?"}\n'), "line 1: format: got None, want pipesd-trace"),
    ):
        path.write_bytes(content)
        assert told(path).startswith(f"FILE: {why}")
    assert "cannot be read" in told(tmp_path / "none.gz") and "not a regular file" in told(tmp_path)


def test_a_file_that_was_cut_or_damaged_on_its_way(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    synthetic_trace(2, 12).save(path)
    whole = path.read_bytes()
    for length in range(1, len(whole), max(1, len(whole) // 50)):
        path.write_bytes(whole[:length])
        assert told(path).endswith("; copy or record it again")
    unharmed = 0
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            assert Trace.load(path) == synthetic_trace(2, 12)
            unharmed += 1  # flags and the time in the first ten bytes say nothing of the content
        except UsageError as error:
            assert "\n" not in str(error)
    assert unharmed < 4


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "a.gz", tmp_path, Path("a\0b")):
        with pytest.raises(UsageError, match=r"cannot be written \(.+\); name another file"):
            TRACE.save(path)
