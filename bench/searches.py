"""Ways to look for two thresholds with the same budget: the runtime's tuner, a grid, chance (PipeSD, table 3).

Each sample holds one setting over the next 20 tokens, as a run would measure it: sample k of every way is measured on
the same piece of text, so that no way has easier ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipesd.config import EdgeConfig
from pipesd.policy.search_space import Parameter, Setting
from pipesd.policy.strategy import make_strategy
from pipesd.policy.tuner import PAPER_XI, SAMPLES, XI, Tuner
from pipesd.policy.tuning import TRIAL_TOKENS, point_of, settings_of, space_of
from pipesd.sim.search import asked
from pipesd.sim.trace import Record

GRID_SIDE = 4
R1, R2 = "sequence_threshold", "token_threshold"
SQUARE = {R1: Parameter(0.01, 0.99), R2: Parameter(0.01, 0.99)}  # (0, 1)², as the paper searches it
Thresholds = Mapping[str, float]
Cost = Callable[[int, Thresholds], float]  # number of the sample, the setting: s per token


class Sample(NamedTuple):
    """One setting and what it cost."""

    thresholds: Thresholds
    tpt_s: float


class Found(NamedTuple):
    """What a search came to, and on what grounds."""

    thresholds: Thresholds
    samples: tuple[Sample, ...]


Way = Callable[[Cost, int, int], Found]  # the cost, samples, seed


def by_tuner(xi: float) -> Way:
    """The runtime's tuner over the useful part of the square, from the thresholds that a run begins with."""
    strategy = make_strategy(EdgeConfig(strategy="pipesd", tuning="off"))

    def search(cost: Cost, samples: int, seed: int) -> Found:
        tuner = Tuner(space_of(strategy), seed=seed, samples=samples, xi=xi, first=point_of(strategy), least=0.0)
        return _asked(tuner, lambda point: settings_of(strategy, point), cost, samples)

    return search


def by_paper(cost: Cost, samples: int, seed: int) -> Found:
    """The tuner as the paper describes it: over the whole square, with its margin, from one random setting, and the
    best sample is what it finds."""
    chance = random.Random(seed)
    first = {name: chance.uniform(parameter.low, parameter.high) for name, parameter in SQUARE.items()}
    tuner = Tuner(SQUARE, seed=seed, samples=samples, xi=PAPER_XI, first=first, least=0.0)
    return _best(_asked(tuner, lambda point: point, cost, samples).samples)


def by_grid(cost: Cost, samples: int, seed: int) -> Found:
    """The middles of 4 × 4 squares; with fewer samples, some of them by chance."""
    middles = [(step + 0.5) / GRID_SIDE for step in range(GRID_SIDE)]
    points = [{R1: r1, R2: r2} for r1, r2 in itertools.product(middles, middles)]
    random.Random(seed).shuffle(points)  # so that a setting is not always measured on the same piece
    return _listed(points[:samples], cost)


def by_chance(cost: Cost, samples: int, seed: int) -> Found:
    """Even over the square."""
    chance = random.Random(seed)
    return _listed([{R1: chance.random(), R2: chance.random()} for _ in range(samples)], cost)


WAYS: Mapping[str, Way] = {
    "tuner": by_tuner(XI),
    "tuner xi 0.1": by_tuner(PAPER_XI),
    "paper's tuner": by_paper,
    "grid": by_grid,
    "random": by_chance,
}


def pieces(records: Sequence[Record], count: int, seed: int, tokens: int = TRIAL_TOKENS) -> Iterator[Record]:
    """`count` pieces of text, `tokens` behind each other, of all records in a random order; again from the first where
    they are used up. A piece is the rest of its record: the draft may run on behind what is measured."""
    places = [
        (record, start) for record in records for start in range(0, max(1, len(record.output) - tokens + 1), tokens)
    ]
    random.Random(seed).shuffle(places)
    for record, start in itertools.islice(itertools.cycle(places), count):
        yield replace(
            record,
            prompt=record.prompt + record.output[:start],
            output=record.output[start:],
            guesses=record.guesses[start:],
            behind={at - start: guesses for at, guesses in record.behind.items() if at >= start},
        )


def _asked(tuner: Tuner, thresholds_of: Callable[[Setting], Mapping[str, Any]], cost: Cost, samples: int) -> Found:
    """Ask and tell until the budget is spent; what the tuner calls best is found."""
    number = itertools.count()
    tried = asked(tuner, lambda point: cost(next(number), thresholds_of(point)), samples)
    return Found(thresholds_of(tuner.best[0]), tuple(Sample(thresholds_of(point), tpt_s) for point, tpt_s in tried))


def _listed(points: Sequence[Thresholds], cost: Cost) -> Found:
    return _best(tuple(Sample(point, cost(number, point)) for number, point in enumerate(points)))


def _best(samples: Sequence[Sample]) -> Found:
    return Found(min(samples, key=lambda sample: sample.tpt_s).thresholds, tuple(samples))


assert GRID_SIDE**2 == SAMPLES, "the grid has as many settings as the tuner has samples"
