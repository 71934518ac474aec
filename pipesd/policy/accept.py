"""How many draft tokens the target accepts, and what it commits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipesd.core import Logprobs
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Law


class Draw(NamedTuple):
    """What is to be drawn from one session's rows of logits: one row behind `prefix`, one more behind each id of
    `drafted`. The first row's token stands at position len(prefix). `p_draft`: for rejection sampling the draft's own
    probability of each, in its warped distribution, rounded up to a float16."""

    sampler: Sampler
    prefix: Sequence[int]
    drafted: Sequence[int]
    p_draft: Sequence[float] = ()


class Refused(NamedTuple):
    """What the edge is told of the target's distribution where a draft token was refused: pairs (id, probability).

    `first` None: they are that distribution, whole, or its most probable part where the method says so. Else they were
    drawn from it, one after the other, and are numbers `first`, `first` + 1, … of all that can be asked for.
    """

    pairs: tuple[tuple[int, float], ...]
    first: int | None = None


class Refusal:
    """The target's distribution at a position where a draft token was refused, kept until the edge has drawn."""

    def __init__(self, law: Law, sampler: Sampler, position: int) -> None: ...

    def told(self, tried: int) -> Refused:
        """What to tell an edge that refused the first `tried` proposals."""


class Choices(NamedTuple):
    """What the target makes of a draft: `ids[i]` is its own id behind the first i draft tokens, -1 where its logits
    were not finite; there is one more than there are draft tokens. `accepted`: how many of these it takes. `refusal`:
    it took fewer than all, and the edge draws what stands there; `ids[accepted]` is then of no meaning.
    `logprobs`: of each drafted id that was accepted and of ids[accepted], where asked for (with a refusal, of every
    pair that may come of it is not known: see `Refusal`)."""

    ids: tuple[int, ...]
    accepted: int
    refusal: Refusal | None = None
    logprobs: tuple[Logprobs, ...] | None = None


def accept_greedy(draft: Sequence[int], choices: Sequence[int]) -> int:
    """Length of the longest prefix of `draft` that equals the target's own choices.

    `choices[i]` is the target's id at the position of `draft[i]`, given that all before it were accepted; there is one
    choice more than there are draft tokens, and `choices[result]` is the id that the target commits itself.
    """
    assert len(choices) == len(draft) + 1, (
        f"{len(draft)} draft tokens need {len(draft) + 1} choices, not {len(choices)}"
    )
    for count, (drafted, chosen) in enumerate(zip(draft, choices, strict=False)):
        if drafted != chosen:
            return count
    return len(draft)


def choose(rows: Any, draw: Draw) -> Choices:
    """What the target makes of a draft, from float32 logits (1 + drafted, width)."""
    prefix = [*draw.prefix, *draw.drafted]
    start = len(draw.prefix)
    found = [draw.sampler.choose(row, start + i, prefix[: start + i]) for i, row in enumerate(rows)]
    ids = tuple(-1 if choice is None else choice.id for choice in found)
    return Choices(ids, accept_greedy(draw.drafted, ids))
