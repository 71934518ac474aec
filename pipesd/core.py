"""The words that all parts share, as frozen values. Standard library only; no I/O, no clocks.

Glossary: a *draft token* is an id proposed by the edge; a *token batch* is the draft tokens of one message; *NAV* is
non-autoregressive verification, one target pass over several draft tokens; a *verdict* is the cloud's answer, the ids
committed since; *committed* is the prompt plus all verified tokens and `pos` an absolute index into it; an *opening*
numbers a generation (or a repeated OPEN) within a session; an *epoch* numbers the edge's branch within an opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

LEAST_AHEAD = 16  # tokens of draft, and of free run, that every cloud allows before it has said its own bounds

Origin = Literal["accepted", "target", "unverified"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Mode(IntEnum):
    """The cloud's ladder; each rung does all that the ones below do."""

    NAV = 0  # verify when asked
    EAGER = 1  # verify what has arrived whenever the worker is free
    FREE = 2  # and decode on alone when no draft waits


@dataclass(frozen=True)
class Vocabulary:
    """The bytes that each id stands for, as llama.cpp gives them; special tokens as their text, padding ids as b""."""

    pieces: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Width of the model's output layer, padding included."""
        return len(self.pieces)

    @cached_property
    def real_size(self) -> int:
        """Number of ids up to and including the last that has a text."""
        return next((i + 1 for i in range(len(self.pieces) - 1, -1, -1) if self.pieces[i]), 0)


@dataclass(frozen=True)
class ModelInfo:
    """What a worker says of its target model. `fingerprint` covers weights, precision and device kind (8 bytes)."""

    name: str
    vocabulary_size: int
    context: int
    end_ids: tuple[int, ...]
    fingerprint: bytes
    device: str
    dtype: str


class Logprobs(NamedTuple):
    """Log-probability (nats) of a committed id in the target's own distribution, at temperature 1 before any option,
    and of the most probable ids, highest first."""

    own: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A stretch of output: its text (possibly empty, while a character is incomplete) and the ids committed with it.
    `logprobs`: one for each of the ids where they were asked for, else none at all."""

    text: str
    token_ids: tuple[int, ...]
    origin: Origin
    logprobs: tuple[Logprobs, ...] = ()


class Drawn(NamedTuple):
    """One draft token, as the draft model drew it. Probability and entropy (nats) are those of its own distribution at
    temperature 1, whatever the sampling options.

    `margin`: by how much it was first of all ids, 0 (a tie) to 1; under the noise of the draw where there is any, else
    by probability. 0 where nobody asked. `p_sent`: for methods that test draft tokens, its probability in what it was
    drawn from, as the cloud is told.
    """

    id: int
    p_draft: float
    entropy: float
    margin: float = 0.0
    p_sent: float | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest beginning that two sequences of ids share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
