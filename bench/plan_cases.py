"""Token batching of a draft whose length is known: what each rule makes of it, and when its last token arrives.

The rules are the ones a run goes by (`pipesd.policy.token_batches`), driven token by token on the plan's clock: token j
is drafted at γ·j, a message of n tokens takes the link for gap + β·n, the trigger asks at the last token, and then all
that waits goes at once (PipeSD, section 3 and rule 1 of section 4).
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import numpy as np

from pipesd.core import LEAST_AHEAD
from pipesd.policy.token_batches import make_batching, plan_of, plan_token_batches
from pipesd.protocol.messages import ID_BYTES
from pipesd.sim.link_model import Link
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace
from pipesd.sim.trace import Record

POLICIES = ("dp", "greedy", "immediate", "none")
LONGEST = LEAST_AHEAD  # tokens of a drawn draft; the most that a trigger of fixed length can be set to
# Bounds that α, β and γ are drawn between, evenly on a logarithmic scale (s).
ALPHA_S, BETA_S, GAMMA_S = (0.001, 0.1), (1e-5, 0.2), (0.002, 0.15)
GRID_ALPHA_S, GRID_BETA_S, GRID_GAMMA_S = (0.005, 0.025, 0.1), (0.001, 0.029, 0.116, 0.232), (0.006, 0.036, 0.153)
GRID_LENGTHS = (1, 4, 6, 16)
FAST = 1e9  # bytes/s: what a message has beside its tokens takes no time
PASS_S = 0.01
ROUNDS = (16, 1, 4)  # of the generations that are simulated; link and drafting are known behind the first


class Case(NamedTuple):
    """A link, a draft model and the length of a draft; `gap_s` = `alpha_s` is Hockney's link."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    gap_s: float
    length: int


def cases(count: int, seed: int) -> list[Case]:
    """Half on Hockney's link, of a grid about the paper's constants and drawn ones, half drawn with any gap."""
    grid = itertools.product(GRID_ALPHA_S, GRID_BETA_S, GRID_GAMMA_S, GRID_LENGTHS)
    whole = [Case(alpha_s, beta_s, gamma_s, alpha_s, length) for alpha_s, beta_s, gamma_s, length in grid]
    part = []
    chance = np.random.default_rng(seed)
    for _ in range(count):
        alpha_s, beta_s, gamma_s = (math.exp(chance.uniform(*np.log(bounds))) for bounds in (ALPHA_S, BETA_S, GAMMA_S))
        length, share = int(chance.integers(1, LONGEST + 1)), float(chance.uniform(0.01, 1.0))
        whole.append(Case(alpha_s, beta_s, gamma_s, alpha_s, length))
        part.append(Case(alpha_s, beta_s, gamma_s, share * alpha_s, length))
    half = count // 2
    return [whole[i * len(whole) // (count - half)] for i in range(count - half)] + part[:half]


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


def simulated_s(policy: str, case: Case) -> float:
    """The same by the runtime in virtual time, whose trigger asks at that length and whose guesses are all right (s).

    Link and drafting are measured in a first generation; of two more, one longer than the other, the difference tells
    what a round takes, and without the target's pass and the answer's way that is the time wanted.
    """
    link = Link(
        gap_s=case.gap_s, latency_s=case.alpha_s - case.gap_s, up_bytes_per_s=FAST, down_bytes_per_s=FAST,
        up_bytes_per_draft_token=max(0.0, case.beta_s * FAST - ID_BYTES),
    )  # fmt: skip
    settings = {
        "strategy": "pipesd", "tuning": "off", "trigger": "fixed", "draft_length": case.length, "batching": policy,
        "waiting": "idle", "link_model": "hockney" if case.gap_s == case.alpha_s else "streamed",
    }  # fmt: skip
    records = [_sure(rounds * (case.length + 1)) for rounds in ROUNDS]
    done = simulate(records, link=link, gamma_s=case.gamma_s, pass_s=PASS_S, settings=settings)
    short_s, long_s = (stats["tpt_ms"] / 1e3 * stats["tokens"] for stats in done.each[1:])
    return (long_s - short_s) / (ROUNDS[2] - ROUNDS[1]) - PASS_S - case.alpha_s


@cache
def _sure(tokens: int) -> Record:
    """A text of so many tokens without a wrong guess."""
    return synthetic_trace(1, tokens, acceptance=1.0).records[0]
