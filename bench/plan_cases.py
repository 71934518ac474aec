"""Token batching of a draft whose length is known: what each rule makes of it, and when its last token arrives.

The rules are the ones a run goes by (`pipesd.policy.token_batches`), driven token by token on the plan's clock: token j
is drafted at γ·j, a message of n tokens takes the link for gap + β·n, the trigger asks at the last token, and then all
that waits goes at once (PipeSD, section 3 and rule 1 of section 4).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from pipesd.policy.token_batches import make_batching, plan_of, plan_token_batches

POLICIES = ("dp", "greedy", "immediate", "none")
LONGEST = 24  # tokens of a drawn draft
# Bounds that α, β and γ are drawn between, evenly on a logarithmic scale (s).
ALPHA_S, BETA_S, GAMMA_S = (0.001, 0.1), (1e-5, 0.2), (0.002, 0.15)
GRID_ALPHA_S, GRID_BETA_S, GRID_GAMMA_S = (0.005, 0.025, 0.1), (0.001, 0.029, 0.116, 0.232), (0.006, 0.036, 0.153)
GRID_LENGTHS = (1, 4, 6, 20)


class Case(NamedTuple):
    """A link, a draft model and the length of a draft; `gap_s` = `alpha_s` is Hockney's link."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    gap_s: float
    length: int


def cases(count: int, seed: int) -> list[Case]:
    """A grid about the paper's constants, then drawn ones: in turn with the gap of Hockney's link and with any gap."""
    grid = itertools.product(GRID_ALPHA_S, GRID_BETA_S, GRID_GAMMA_S, GRID_LENGTHS)
    made = [Case(alpha_s, beta_s, gamma_s, alpha_s, length) for alpha_s, beta_s, gamma_s, length in grid]
    chance = np.random.default_rng(seed)
    while len(made) < count:
        alpha_s, beta_s, gamma_s = (math.exp(chance.uniform(*np.log(bounds))) for bounds in (ALPHA_S, BETA_S, GAMMA_S))
        share = 1.0 if len(made) % 2 else float(chance.uniform(0.01, 1.0))
        made.append(Case(alpha_s, beta_s, gamma_s, share * alpha_s, int(chance.integers(1, LONGEST + 1))))
    return made[:count]


def sizes_by(policy: str, case: Case) -> tuple[int, ...]:
    """The token batches that a rule sends of such a draft."""
    batching = make_batching(policy, plan_token_batches(case.length, *case[:4]))
    sizes: list[int] = []
    now_s = free_s = 0.0

    def send(tokens: int, from_s: float) -> None:
        nonlocal free_s
        if tokens:
            sizes.append(tokens)
            free_s = max(free_s, from_s) + case.gap_s + case.beta_s * tokens

    for token in range(1, case.length + 1):
        now_s = case.gamma_s * token
        if free_s < now_s and batching.waiting:
            send(batching.idle(), free_s)
        send(batching.drafted(free_s <= now_s), now_s)
    send(batching.flush(), now_s)
    return tuple(sizes)


def total_s(policy: str, case: Case) -> float:
    """From the first token's drafting to the arrival of the last, by the plan's recurrence (s)."""
    return plan_of(sizes_by(policy, case), *case[:4]).total_s
