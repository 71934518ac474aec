"""The search for the best setting of a strategy, when each can be measured for itself: ask the runtime's tuner, tell it
what the setting cost, until the budget is spent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipesd.policy.search_space import Parameter, Setting
from pipesd.policy.tuner import Tuner

Space = Mapping[str, Parameter]
Cost = Callable[[Setting], float]  # s per token with that setting; inf where it failed


class Tried(NamedTuple):
    """A setting, and what it cost: s per token."""

    setting: Setting
    tpt_s: float


def asked(tuner: Tuner, cost: Cost, samples: int) -> list[Tried]:
    """What the tuner asked for, `samples` times, in order, each told before the next is asked."""
    made = []
    for _ in range(samples):
        setting = tuner.ask()
        made.append(Tried(setting, cost(setting)))
        tuner.tell(*made[-1])
    return made


def fastest(space: Space, first: Setting, samples: int, seed: int, cost: Cost) -> Tried:
    """The setting that cost least in the mean of its measurements, of `samples` of the tuner's, from `first` on."""
    costs: dict[tuple[float, ...], list[float]] = {}
    for setting, tpt_s in asked(Tuner(space, seed=seed, samples=samples, first=first), cost, samples):
        costs.setdefault(tuple(setting[name] for name in space), []).append(tpt_s)
    means = {values: statistics.fmean(each) for values, each in costs.items()}
    best = min(means, key=means.__getitem__)
    return Tried(dict(zip(space, best, strict=True)), means[best])
