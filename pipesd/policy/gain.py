"""Asking for verification when one more draft token is no longer worth its drafting.

A round that ends behind n draft tokens takes round_s + gamma_s·n and brings 1 + Σ_{k≤n} Π_{i≤k} a_i tokens, where a_i
is the chance that token i is accepted if all before it are. One more token adds gamma_s and Π_{i≤n} a_i · a_{n+1}
tokens. In the long run the time per token is least if a round goes on exactly as long as what it adds costs less time
per token than the whole does (renewal rewards: Ross, Applied Probability Models, section 3.6; Dinkelbach, 1967), so

    go on while  Π_{i≤n} a_i · a_{n+1} · token_s > gamma_s.

The left side never rises within a draft while a_{n+1} stays the same, so looking one token ahead is enough (Chow and
Robbins, 1961). Measured on a run that follows the rule, token_s tends to its least value.

The probabilities of a draft model are not these chances, so the chances are learnt from the verdicts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from pipesd.policy.trigger import Costs, confidence

LONGEST_DRAFT = 32  # tokens without asking
FIRST_COSTS = Costs(gamma_s=0.3, round_s=1.0, token_s=1.0)  # until any are known; only their ratios matter

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)  # finer where most probabilities lie
PRIOR_TOKENS = 4.0  # how many verdicts the draft model's own probability weighs in each bin at first,
PRIOR_MEMORY = 20.0  # and half as many when there were so many verdicts in all
MEMORY_TOKENS = 100.0  # of each bin: what is older fades
SEEN_TOKENS = 256  # memory of how the probabilities are spread


class Calibration:
    """How often a token of some probability is accepted if all before it are: a table over bins of the probability.

    Each bin holds its middle, as if that came from some verdicts, and those seen, of which the last MEMORY_TOKENS
    count most. Bins whose rates fall as the probability rises are pooled, so that one without verdicts takes over from
    the others what contradicts it. A probability that is none counts as 0.
    """

    def __init__(self) -> None:
        ends = (0.0, *EDGES, 1.0)
        self._prior = [0.5 * (low + high) for low, high in pairwise(ends)]
        self._tokens = [0.0] * len(self._prior)
        self._accepted = [0.0] * len(self._prior)
        self._seen = [1.0] * len(self._prior)
        self._chances = list(self._prior)
        self.expected = 0.0  # chance of a token that is not drafted yet: the mean over the last ones
        self.fit()

    def chance(self, p_draft: float) -> float:
        """Of a token with that probability; 0 to 1, never falls as the probability rises."""
        return self._chances[_bin(p_draft)]

    def drafted(self, p_draft: float) -> None:
        """A token with that probability was drafted."""
        self._seen[_bin(p_draft)] += 1.0

    def decided(self, p_draft: float, accepted: bool) -> None:
        """A verdict on such a token, all before it being accepted."""
        i = _bin(p_draft)
        fade = min(1.0, MEMORY_TOKENS / (self._tokens[i] + 1.0))
        self._tokens[i] = (self._tokens[i] + 1.0) * fade
        self._accepted[i] = (self._accepted[i] + accepted) * fade

    def fit(self) -> None:
        """Make use of what was seen since the last time."""
        believed = PRIOR_TOKENS * PRIOR_MEMORY / (PRIOR_MEMORY + sum(self._tokens))
        weights = [believed + tokens for tokens in self._tokens]
        rates = [
            (believed * prior + accepted) / weight
            for prior, accepted, weight in zip(self._prior, self._accepted, weights, strict=True)
        ]
        self._chances = rising(rates, weights)
        seen = sum(self._seen)
        if seen > SEEN_TOKENS:
            self._seen = [SEEN_TOKENS / seen * count for count in self._seen]
            seen = SEEN_TOKENS
        self.expected = sum(map(float.__mul__, self._seen, self._chances)) / seen


class Gain:
    """Asks, by "gain", when one more draft token is not worth its drafting (the rule above), at the latest behind
    LONGEST_DRAFT tokens.

    Costs that are not finite, negative, or worth nothing are not adopted. A token is taken to be worth no more than
    round_s + gamma_s, which is what it costs at worst, so that a pause that went into token_s makes no long drafts.
    """

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._undecided: deque[float] = deque()
        self._drafted = 0
        self._chance = 1.0  # that all drafted since the last time are accepted
        self._least = 0.0  # go on while chance · expected is above it
        self.adopt(FIRST_COSTS)

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        p_draft = confidence(p_draft)
        self._undecided.append(p_draft)
        self.calibration.drafted(p_draft)
        self._drafted += 1
        self._chance *= self.calibration.chance(p_draft)
        if self._chance * self.calibration.expected > self._least and self._drafted < LONGEST_DRAFT:
            return None
        self.asked()
        return "gain"

    def asked(self) -> None:
        self._drafted, self._chance = 0, 1.0

    def reset(self) -> None:
        self._undecided.clear()
        self.asked()

    def decided(self, accepted: int, rejected: bool) -> None:
        for _ in range(min(accepted, len(self._undecided))):
            self.calibration.decided(self._undecided.popleft(), True)
        if rejected:
            if self._undecided:
                self.calibration.decided(self._undecided.popleft(), False)
            self.reset()
        self.calibration.fit()

    def adopt(self, costs: Costs) -> None:
        worth_s = min(costs.token_s, costs.round_s + costs.gamma_s)
        if all(math.isfinite(cost) and cost >= 0.0 for cost in costs) and worth_s > 0.0:
            self._least = costs.gamma_s / worth_s


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence without a fall that is nearest to `values` in weighted squares (pool adjacent violators; Ayer et
    al., 1955). Weights are above 0."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            mean, more, others = pools.pop()
            value = (mean * more + value * weight) / (more + weight)
            weight += more
            count += others
        pools.append((value, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _bin(p_draft: float) -> int:
    return bisect_right(EDGES, confidence(p_draft))
