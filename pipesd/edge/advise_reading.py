"""A draft model reads along: what it would guess at each place of a text, and how it would go on after a wrong guess.

Behind each true prefix the model draws an id, its most probable one where nothing else is said. Where that is not the
text's, it drafts on behind its own guess, as it does in a run until the verdict comes; then it is put back onto the
text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipesd.edge.local import PREFILL_CHUNK
from pipesd.edge.models import Drafter
from pipesd.policy.sampler import Choice, Chooser

MOST_AHEAD = 80.0  # of logits: beyond it no float32 tells a probability from 0


class Seen(NamedTuple):
    """A guess: its id, probability and entropy (nats) at temperature 1; the most probable other id; by how much the
    guess was ahead, as its chooser says."""

    id: int
    p_draft: float
    entropy: float
    runner_up: int
    p_runner_up: float
    margin: float = 0.0


class Reading(NamedTuple):
    """`guesses`: one for each id of the text. `behind`: by place, what follows a wrong guess, and the last one in any
    case. `times_s`: what each draft token took."""

    guesses: tuple[Seen, ...]
    behind: dict[int, tuple[Seen, ...]]
    times_s: tuple[float, ...]


class TwoBest:
    """What another chooser takes, by default the most probable id, and beside it the most probable of all others."""

    second, share = 0, 0.0  # which id, and how many times as probable as the chosen one
    took_s = 0.0  # the looks for it: no part of drafting

    def __init__(self, chooser: Chooser | None = None) -> None:
        self._chooser = chooser

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        choice = None if self._chooser is None else self._chooser.choose(row, position, prefix)
        begun_s = time.perf_counter()
        rest = row.copy()
        own = int(rest.argmax()) if choice is None else choice.id
        rest[own] = -math.inf
        self.second = int(rest.argmax())
        ahead = float(rest[self.second]) - float(row[own])
        self.share = math.exp(min(ahead, MOST_AHEAD)) if math.isfinite(ahead) else 0.0  # else no number to compare with
        self.took_s += time.perf_counter() - begun_s
        return Choice(own, 0.0, None) if self._chooser is None else choice


def read_along(
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    depth: int,
    tell: Callable[[int], None] = lambda place: None,
    chooser: Chooser | None = None,
) -> Reading:
    """Let `drafter` guess, as `chooser` draws, at each id of `text` behind `prompt`, and go on for up to `depth` ids
    behind each wrong guess and behind the last; `tell` is called with each place. Ends early where the model's context
    is full. Raises DrafterFailed."""
    drafter.rollback(0)
    drafter.extend(prompt)
    while drafter.prefill(PREFILL_CHUNK):
        pass
    guesses: list[Seen] = []
    behind: dict[int, tuple[Seen, ...]] = {}
    times_s: list[float] = []
    two_best = TwoBest(chooser)

    def guess() -> Seen:
        begun_s, looked_s = time.perf_counter(), two_best.took_s
        drawn = drafter.draft(two_best)
        times_s.append(time.perf_counter() - begun_s - (two_best.took_s - looked_s))
        share = two_best.share
        return Seen(drawn.id, drawn.p_draft, drawn.entropy, two_best.second, share * drawn.p_draft, drawn.margin)

    for place, said in enumerate(text[: drafter.room]):
        tell(place)
        guesses.append(guess())
        known = len(drafter) - 1
        right = guesses[-1].id == said
        if not right or place == len(text) - 1 or not drafter.room:
            behind[place] = tuple(guess() for _ in range(min(depth, drafter.room)))
        if not right:
            drafter.rollback(known)
            drafter.extend([said])
    return Reading(tuple(guesses), behind, tuple(times_s))
