"""What a draft model would have drafted at every place of what a target said: recorded once, replayed at will.

A trace is a gzipped file of JSON lines: a header, then one record for each prompt. `docs/traces.md` has it field by
field; `bench/record.py` makes one of two real models, `pipesd.sim.synthetic` one without models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from pipesd.errors import UsageError

DEPTH = 32  # guesses that are recorded behind a place


class Guess(NamedTuple):
    """One draft token as the draft model drew it. Probabilities and entropy (nats) are those of its own distribution at
    temperature 1, whatever it was drawn by.

    `runner_up`: the most probable of all other ids. `margin`: by how much the id was ahead when it was drawn, as in
    `Drawn` of a session that asks for it: under the noise of the draw, or by probability where there is none.
    """

    id: int
    p_draft: float
    entropy: float
    runner_up: int
    p_runner_up: float
    margin: float = 0.0


@dataclass(frozen=True)
class Record:
    """One prompt, what the target said behind it, and what the draft model would have drafted at each place.

    `guesses[i]` is the draft model's guess behind the prompt and `output[:i]`. `behind[i]` is what it goes on with
    after that guess where the guess is not `output[i]`, and behind the last place in any case. `seed` is the one that
    both drew with, None where they took the most probable ids. `finish`: whether the last id of `output` ends it
    ("stop") or only the recording was to be no longer ("length"). `end_ids`: what ends a text, and so a draft; a trace
    gives its own to its records.

    Raises UsageError where the parts do not fit each other.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    guesses: tuple[Guess, ...]
    behind: Mapping[int, tuple[Guess, ...]] = field(hash=False)
    seed: int | None = None
    finish: Literal["length", "stop"] = "length"
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not self.output:
            raise UsageError("prompt and output: want at least one id in each")
        if len(self.guesses) != len(self.output):
            raise UsageError(f"guesses: {len(self.guesses)}, want one for each of the {len(self.output)} ids of output")
        for i in self.behind:
            if not 0 <= i < len(self.output):
                raise UsageError(f"behind: of place {i}, but output has {len(self.output)} ids")
            if i < len(self.output) - 1 and self.right(i):
                raise UsageError(f"behind: of place {i}, where the guess is right")

    def right(self, i: int) -> bool:
        """Whether the draft model guesses `output[i]`."""
        return self.guesses[i].id == self.output[i]

    def continuation(self, i: int, depth: int = DEPTH) -> tuple[Guess, ...]:
        """What the draft model drafts behind the prompt and `output[:i]` with nothing said in between: at most `depth`
        guesses, fewer only where no more were recorded."""
        assert 0 <= i < len(self.output) and depth >= 0, f"{depth} guesses from place {i} of {len(self.output)}"
        last = len(self.output) - 1
        end = i
        while end < last and end - i < depth and self.right(end):
            end += 1
        drafted = self.guesses[i : end + 1]
        return (drafted + tuple(islice(self.behind.get(end, ()), max(0, depth - len(drafted)))))[:depth]


@dataclass(frozen=True)
class Trace:
    """Records of one pair of models.

    `vocabulary` is the hash of both models' vocabulary (`pipesd.protocol.vocabulary`), hexadecimal; `sampling` holds
    the options of `generate` that were given, {} where both took the most probable ids. `gamma_s`: what a draft token
    took, `pass_s`: what a pass of the target over so many ids took, in s, on the machine that recorded; they belong to
    no other machine. Raises UsageError where the parts do not fit each other.
    """

    draft: str
    target: str
    vocabulary: str
    vocabulary_size: int
    end_ids: tuple[int, ...]
    records: tuple[Record, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    depth: int = DEPTH
    gamma_s: float = 0.0
    pass_s: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for number, record in enumerate(self.records):
            try:
                self.check(record)
            except UsageError as error:
                raise UsageError(f"record {number}: {error}") from error
        records = tuple(replace(record, end_ids=self.end_ids) for record in self.records)
        object.__setattr__(self, "records", records)

    def check(self, record: Record) -> None:
        """UsageError, with the field, for a record that is none of this pair's."""
        size, deepest = self.vocabulary_size, self.depth - 1
        all_guesses = (record.guesses, *record.behind.values())
        for name, ids in (
            ("prompt", record.prompt), ("output", record.output),
            *(("guesses", [g.id for g in guesses]) for guesses in all_guesses),
            *(("runner_up", [g.runner_up for g in guesses]) for guesses in all_guesses),
        ):  # fmt: skip
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise UsageError(f"{name}: an id that is not below the vocabulary's size, {size}")
        if ends := set(self.end_ids).intersection(record.output[:-1]):
            raise UsageError(f"output: id {min(ends)}, which ends a text, before its end")
        for i, guesses in record.behind.items():
            if len(guesses) > deepest:
                raise UsageError(f"behind: {len(guesses)} guesses at place {i}, want at most {deepest}: depth less one")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; the same trace always gives the same bytes. UsageError where it cannot be written."""
        from pipesd.sim.trace_file import write_trace

        write_trace(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """The trace in the file at `path`. UsageError, one line with the line and field of the file, if it is missing,
        cut short, damaged or something else."""
        from pipesd.sim.trace_file import read_trace

        return read_trace(path)
