"""Traces without models: guesses that are right as often, and as sure of themselves, as somebody wishes."""

from __future__ import annotations

import math
import random
from typing import NamedTuple, Protocol

from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.texts import LETTERS
from pipesd.sim.tokeniser import ByteTokeniser
from pipesd.sim.trace import DEPTH, Guess, Record, Trace


class Confidence(Protocol):
    """A distribution of probabilities that a draft model gives its guesses."""

    def draw(self, chance: random.Random) -> float:
        """One of them, 0 to 1."""


class Beta(NamedTuple):
    """The beta distribution: mean a / (a + b); the smaller both, the more lies at 0 and at 1."""

    a: float
    b: float

    def draw(self, chance: random.Random) -> float:
        return chance.betavariate(self.a, self.b)


class Even(NamedTuple):
    """Evenly from `low` to `high`."""

    low: float
    high: float

    def draw(self, chance: random.Random) -> float:
        return chance.uniform(self.low, self.high)


SURE, UNSURE = Even(0.44, 1.0), Even(0.10, 0.66)  # means 0.72 and 0.38, as of a small model cut down to two bits


def synthetic_trace(
    records: int = 8,
    tokens: int = 128,
    *,
    acceptance: float = 0.8,
    right: Confidence = SURE,
    wrong: Confidence = UNSURE,
    second: float = 0.5,
    depth: int = DEPTH,
    seed: int = 0,
) -> Trace:
    """`records` texts of `tokens` random letters over the byte vocabulary, with a prompt of its own each.

    Each guess is right with probability `acceptance`, independently of all others, and has a probability drawn from
    `right` or `wrong`; a wrong one has the target's id as its runner-up with probability `second`. What follows a wrong
    guess is as sure of itself as everything else. No times: gamma_s and pass_s are for who replays it to say.
    """
    assert records >= 0 and tokens > 0 and depth > 0, f"{records} records of {tokens} tokens, depth {depth}"
    assert 0.0 <= acceptance <= 1.0 and 0.0 <= second <= 1.0, f"acceptance {acceptance}, second {second}"
    tokeniser, chance = ByteTokeniser(), random.Random(seed)
    size = tokeniser.vocabulary.size

    def guess(said: int) -> Guess:
        is_right = chance.random() < acceptance
        p = min(1.0, max(0.0, (right if is_right else wrong).draw(chance)))
        token_id = said if is_right else _other(chance, said)
        runner_up = said if not is_right and chance.random() < second else _other(chance, token_id)
        p_runner_up = min(p, (1.0 - p) * chance.random())
        margin = 1.0 - p_runner_up / p if p else 0.0
        return Guess(token_id, p, _entropy(p, p_runner_up, size), runner_up, p_runner_up, margin)

    made = []
    for number in range(records):
        output = tuple(chance.choices(LETTERS, k=tokens))
        guesses = tuple(map(guess, output))
        behind = {
            i: tuple(guess(chance.choice(LETTERS)) for _ in range(depth - 1))
            for i in range(tokens)
            if guesses[i].id != output[i] or i == tokens - 1
        }
        made.append(Record(tuple(tokeniser.encode(f"Prompt {number}:")), output, guesses, behind))
    return Trace(
        draft="synthetic",
        target="synthetic",
        vocabulary=vocabulary_hash(tokeniser.vocabulary).hex(),
        vocabulary_size=size,
        end_ids=tuple(sorted(tokeniser.end_ids)),
        records=tuple(made),
        depth=depth,
    )


def table7(records: int = 8, tokens: int = 128, seed: int = 1) -> Trace:
    """A trace on which `hsl` with the token threshold 0.99 drafts as PipeSD's table 7 prints it (HumanEval): .256
    verifications a token, 3.18 tokens in a draft, of which .915 are accepted.

    How sure wrong guesses are of themselves the table does not say, so it is a choice; what other strategies do here
    hangs on it, and is measured. `edgellm` with its defaults drafts further than its row says (.15, 7.2, .84 for .191,
    4.74, .892). The .962 of the row of `pipesd` are out of reach: guesses do not hang on each other here, so of the
    tokens that are tested no rule has many more than .915 right.
    """
    return synthetic_trace(records, tokens, acceptance=0.915, right=Beta(1.0, 0.0635), wrong=Beta(1.0, 9.0), seed=seed)


def _other(chance: random.Random, token_id: int) -> int:
    """A letter that is another one."""
    found = chance.choice(LETTERS)
    while found == token_id:
        found = chance.choice(LETTERS)
    return found


def _entropy(p: float, p_runner_up: float, size: int) -> float:
    """Of a distribution in nats, whose other `size` - 2 ids share the rest evenly."""
    rest = max(0.0, 1.0 - p - p_runner_up)
    parts = (p, 1), (p_runner_up, 1), (rest / (size - 2), size - 2)
    return max(0.0, -sum(count * share * math.log(share) for share, count in parts if share > 0.0))
