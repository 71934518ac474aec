"""A draft model reads along: what it would guess at each place of a text, and how it would go on after a wrong guess.

Behind each true prefix the model draws its most probable id. Where that is not the text's, it drafts on behind its own
guess, as it does in a run until the verdict comes; then it is put back onto the text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipesd.edge.models import Drafter
from pipesd.policy.sampler import Choice

PREFILL_CHUNK = 128  # ids between two looks at a signal


class Seen(NamedTuple):
    """A guess: its id, probability and entropy (nats) at temperature 1; the second most probable id."""

    id: int
    p_draft: float
    entropy: float
    runner_up: int
    p_runner_up: float


class Reading(NamedTuple):
    """`guesses`: one for each id of the text. `behind`: by place, what follows a wrong guess, and the last one in any
    case. `times_s`: what each draft token took."""

    guesses: tuple[Seen, ...]
    behind: dict[int, tuple[Seen, ...]]
    times_s: tuple[float, ...]


class _TwoBest:
    """Takes the most probable id, and remembers the second."""

    def __init__(self) -> None:
        self.second, self.share = 0, 0.0  # which id, and its probability as a share of the first's
        self.took_s = 0.0  # all looks together: no part of drafting

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        begun_s = time.perf_counter()
        rest = row.copy()
        best = int(rest.argmax())
        rest[best] = -math.inf
        self.second = int(rest.argmax())
        share = math.exp(min(float(rest[self.second]) - float(row[best]), 0.0))
        self.share = share if share <= 1.0 else 0.0  # what is not finite is no number to compare with
        self.took_s += time.perf_counter() - begun_s
        return Choice(best, 0.0, None)


def read_along(
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    depth: int,
    tell: Callable[[int], None] = lambda place: None,
) -> Reading:
    """Let `drafter` guess at each id of `text` behind `prompt`, and go on for up to `depth` ids behind each wrong guess
    and behind the last; `tell` is called with each place. Ends early where the model's context is full. Raises
    DrafterFailed."""
    drafter.rollback(0)
    drafter.extend(prompt)
    while drafter.prefill(PREFILL_CHUNK):
        pass
    guesses: list[Seen] = []
    behind: dict[int, tuple[Seen, ...]] = {}
    times_s: list[float] = []
    two_best = _TwoBest()

    def guess() -> Seen:
        begun_s, looked_s = time.perf_counter(), two_best.took_s
        drawn = drafter.draft(two_best)
        times_s.append(time.perf_counter() - begun_s - (two_best.took_s - looked_s))
        share = two_best.share
        return Seen(drawn.id, drawn.p_draft, drawn.entropy, two_best.second, share * drawn.p_draft)

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
