"""How often a draft token is accepted when both sides sample, and what the edge could tell of it beforehand.

All of it is of logits that were computed once, without sessions: `Tally` takes the places of texts (see `both_rows`)
and keeps a few numbers of each; intervals are bootstraps over whole texts, as the places of one are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from both_rows import Place

from pipesd.policy.accept import Draw, choose
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Choice, Sampler
from pipesd.policy.sampling import Law, Method, Sampling

RESAMPLED = 1000
FIRST_SEED = 1 << 32  # of those that are counted with; the texts themselves have lower ones
KINDS = ("rejection", "counted", "shared noise", "counted too")  # by the formula, then with the real code
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "top-p .95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "min-p .05": {"min_p": 0.05},
}


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def over_texts(texts: int, figure: Callable[[np.ndarray], float], seed: int = 0) -> Interval:
    """`figure(chosen)` of all texts, and its percentile interval over draws of as many texts with replacement."""
    draws = np.random.default_rng(seed).integers(texts, size=(RESAMPLED, texts))
    low, high = np.nanquantile([figure(chosen) for chosen in draws], (0.025, 0.975))
    return Interval(figure(np.arange(texts)), float(low), float(high))


def mean_over(sums: np.ndarray, counts: np.ndarray) -> Interval:
    """The mean over all places, from each text's sum and number of places."""
    return over_texts(len(sums), lambda chosen: float(sums[chosen].sum() / counts[chosen].sum()))


def dense(law: Law, width: int) -> np.ndarray:
    """Its probabilities over all ids, float64 (width,)."""
    found = np.zeros(width)
    found[slice(len(law.weights)) if law.ids is None else law.ids] = law.weights
    return found / found.sum()


def overlap(p: np.ndarray, q: np.ndarray) -> float:
    """Σ min(p, q): how often a draft token is accepted in rejection sampling (Leviathan et al. 2023, theorem 3.5)."""
    return float(np.minimum(p, q).sum())


def coupled(p: np.ndarray, q: np.ndarray) -> float:
    """Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i): how often two races under the same noise have the same winner (Daliri,
    Musco and Suresh 2024). Of one i, the left part is the larger for each j of which q_j / p_j ≤ q_i / p_i."""
    both = (p > 0) & (q > 0)
    order = np.argsort(q[both] / p[both], kind="stable")
    some_p, some_q = p[both][order], q[both][order]
    # ids that one side alone can draw stand at the ends of that order: the target's before, the draft's behind all
    p_before = p[~both].sum() + np.cumsum(some_p)
    q_behind = q[~both].sum() + some_q.sum() - np.cumsum(some_q)
    return float((1 / (p_before / some_p + q_behind / some_q)).sum())


class Seen(NamedTuple):
    """One draft token under the noise of one seed: what the edge knows of it, and whether it was accepted."""

    p_draft: float  # at temperature 1, before all options
    certainty: float  # 1 - entropy ÷ its maximum, at temperature 1
    margin: float
    accepted: bool


class Tally:
    """The figures of one temperature, text by text."""

    def __init__(self, temperature: float, seeds: int) -> None:
        """`seeds`: how many to count with at each place, others for each text."""
        self.samplings = {name: Sampling(temperature=temperature, **options) for name, options in VARIANTS.items()}
        self._seeds = seeds
        self._rates: list[dict[str, list[tuple[float, ...]]]] = []
        self._draws: list[list[Seen]] = []

    def text(self, places: Sequence[Place]) -> None:
        """Take in the places of one text."""
        rates: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
        draws: list[Seen] = []
        for place in places:
            for name, sampling in self.samplings.items():
                p, q = (law_of(row, sampling, place) for row in (place.target, place.draft))
                pairs = [self._pair(place, sampling, seed) for seed in self._seeds_now]
                tested = [accepted(place, replace(sampling, method=Method.REJECTION), seed) for seed in self._seeds_now]
                same = [own.id == drafted.id for own, drafted in pairs]
                rates[name].append((overlap(p, q), float(np.mean(tested)), coupled(p, q), float(np.mean(same))))
                if not name:
                    draws += self._seen(place, pairs)
        self._rates.append(rates)
        self._draws.append(draws)

    @property
    def _seeds_now(self) -> range:
        first = FIRST_SEED + len(self._rates) * self._seeds
        return range(first, first + self._seeds)

    def _pair(self, place: Place, sampling: Sampling, seed: int) -> tuple[Choice, Choice]:
        """What target and draft model draw at a place under shared noise."""
        sampler = Sampler(sampling, seed)
        own, drafted = (sampler.choose(row, len(place.prefix), place.prefix) for row in (place.target, place.draft))
        assert own is not None and drafted is not None, "logits that are not finite"
        return own, drafted

    def _seen(self, place: Place, pairs: Sequence[tuple[Choice, Choice]]) -> list[Seen]:
        """The draft tokens with what the edge's triggers may know of them."""
        below = place.draft.astype(float) - place.draft.max()
        weights = np.exp(below)
        total = weights.sum()
        entropy = math.log(total) - float((weights * below).sum()) / total
        certainty = 1 - entropy / math.log(len(below))
        return [Seen(weights[d.id] / total, certainty, d.margin, own.id == d.id) for own, d in pairs]

    def acceptance(self) -> dict[str, dict[str, Interval]]:
        """For each variant those of `KINDS`."""
        found = {}
        for name in VARIANTS:
            columns = [np.array([np.sum(text[name], axis=0) for text in self._rates])[:, n] for n in range(len(KINDS))]
            counts = np.array([len(text[name]) for text in self._rates])
            found[name] = {kind: mean_over(column, counts) for kind, column in zip(KINDS, columns, strict=True)}
        return found

    def predictors(self) -> dict[str, Interval]:
        """Area under the ROC curve of each score as a predictor of acceptance under noise; `both` is of probability and
        margin together, weighted as the other half of the texts says. Then two differences."""
        texts = [np.array(draws) for draws in self._draws]
        halves = [fitted(np.concatenate(texts[1 - half :: 2])) for half in range(2)]
        texts = [np.column_stack((text, features(text) @ halves[i % 2])) for i, text in enumerate(texts)]

        def area(column: int) -> Callable[[np.ndarray], float]:
            def of(chosen: np.ndarray) -> float:
                drawn = np.concatenate([texts[i] for i in chosen])
                return roc_area(drawn[:, column], drawn[:, 3] > 0)

            return of

        p_draft, certainty, margin, both = (area(column) for column in (0, 1, 2, 4))
        figures: dict[str, Callable[[np.ndarray], float]] = {
            "p_draft": p_draft,
            "entropy": certainty,
            "margin": margin,
            "both": both,
            "margin - p_draft": lambda chosen: margin(chosen) - p_draft(chosen),
            "both - p_draft": lambda chosen: both(chosen) - p_draft(chosen),
        }
        return {name: over_texts(len(texts), figure) for name, figure in figures.items()}

    @property
    def places(self) -> int:
        return sum(len(text[""]) for text in self._rates)


def law_of(row: np.ndarray, sampling: Sampling, place: Place) -> np.ndarray:
    law = Sampler(sampling, 0).law(row, place.prefix)
    assert law is not None, "logits that are not finite"
    return dense(law, len(place.target))


def accepted(place: Place, sampling: Sampling, seed: int) -> bool:
    """Whether the target accepts what the draft model draws at a place, in rejection sampling."""
    sampler, at = Sampler(sampling, seed), len(place.prefix)
    proposals = Proposals(sampler)
    drafted = proposals.choose(place.draft, at, place.prefix)
    assert drafted is not None, "logits that are not finite"
    draw = Draw(sampler, place.prefix, (drafted.id,), (proposals.p_sent(at, drafted.id),))
    return choose((place.target, place.target), draw).accepted == 1


def features(draws: np.ndarray) -> np.ndarray:
    """The logarithms of the odds that the probability gives, and of the factor between second and first of the race."""
    p, margin = (np.clip(draws[:, column], 1e-6, 1 - 1e-6) for column in (0, 2))
    return np.column_stack((np.ones(len(draws)), np.log(p / (1 - p)), -np.log(1 - margin)))


def fitted(draws: np.ndarray) -> np.ndarray:
    """The weights of `features` by logistic regression: a few steps of Newton's, held back a little."""
    x, accepted = features(draws), draws[:, 3]
    weights = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ weights))
        steepness = (x * (p * (1 - p))[:, None]).T @ x + np.eye(x.shape[1])
        weights += np.linalg.solve(steepness, x.T @ (accepted - p) - weights)
    return weights


def roc_area(scores: np.ndarray, right: np.ndarray) -> float:
    """Probability that a score of `right` is above one of the others, ties counted half; nan where one has none."""
    good, bad = scores[right], np.sort(scores[~right])
    if not len(good) or not len(bad):
        return math.nan
    below = np.searchsorted(bad, good, "left") + np.searchsorted(bad, good, "right")
    return float(below.mean() / 2 / len(bad))


def acceptance_table(found: Mapping[float, Mapping[str, Mapping[str, Interval]]]) -> list[str]:
    lines = [f"{'T':>4} {'options':10}" + "".join(f"{kind:>24}" for kind in KINDS)]
    for temperature, variants in found.items():
        for name, rates in variants.items():
            lines.append(f"{temperature:4g} {name:10}" + "".join(f"{rate!s:>24}" for rate in rates.values()))
    return lines


def predictor_table(found: Mapping[float, Mapping[str, Interval]]) -> list[str]:
    """One line a temperature, and one that says what follows."""
    names = list(next(iter(found.values())))
    lines = [f"{'T':>4} " + "".join(f"{name:>24}" for name in names)]
    lines += [f"{t:4g} " + "".join(f"{area!s:>24}" for area in areas.values()) for t, areas in found.items()]
    differences = [areas["margin - p_draft"] for areas in found.values()]
    if all(d.low > 0 for d in differences):
        verdict = "the margin under the noise foretells acceptance better than the probability, at every temperature"
    elif all(d.high < 0 for d in differences):
        verdict = "the probability foretells acceptance better than the margin under the noise, at every temperature"
    else:
        verdict = "neither the margin nor the probability foretells acceptance better at every temperature"
    return [*lines, verdict]
