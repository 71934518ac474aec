"""What a pass over several sessions makes of their drafts: each entry by itself, whoever its mates are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipesd.policy.accept import Choices, Draw, accept_greedy, choose
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling

Batch = Sequence[tuple[int, Sequence[int], int]]  # (slot, ids fed, rows of logits wanted of the last ones)

NOTHING = Choices((), 0)  # of a piece of a prefill
_HIGHEST = Sampler(Sampling(), 0)


def greedy_choices(batch: Batch, chosen: Iterable[Sequence[int]]) -> list[Choices]:
    """The same for each entry of a pass that chose the highest logits itself."""
    return [
        Choices(tuple(ids), accept_greedy(drafted(fed, rows), ids)) if rows else NOTHING
        for (_, fed, rows), ids in zip(batch, chosen, strict=True)
    ]


def drawn_choices(batch: Batch, logits: Iterable[Any], draws: Sequence[Draw | None]) -> list[Choices]:
    """For each entry what its draw makes of its float32 logits (rows, width); without a draw the highest is taken."""
    return [
        choose(rows, draw) if wanted else NOTHING
        for (_, _, wanted), rows, draw in zip(batch, logits, complete(batch, draws), strict=True)
    ]


def complete(batch: Batch, draws: Sequence[Draw | None]) -> list[Draw]:
    """The same draws; where there is none, one that takes the highest logits."""
    return [
        Draw(_HIGHEST, (), drafted(fed, rows)) if draw is None else draw
        for (_, fed, rows), draw in zip(batch, draws, strict=True)
    ]


def drafted(fed: Sequence[int], rows: int) -> Sequence[int]:
    """The draft tokens among the ids that an entry feeds: all that have a row before them."""
    return fed[len(fed) - rows + 1 :]
