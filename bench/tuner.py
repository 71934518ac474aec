"""What the tuner finds and what it costs, beside scikit-optimize and bayesian-optimization: `python bench/tuner.py`.

Objectives: Branin, Hartmann in 3 and in 6 dimensions (raised by 4, so that they are positive as times are), and the
time per token over the two thresholds of PipeSD's trigger, for a thin and a fat payload, computed from drawn draft
confidences and measured with 10 % and 30 % noise. Every tuner gets 16 samples, over the same seeds, at two margins ξ of
the expected improvement: the paper's 0.1, and 0.01, in standard deviations of what was measured (the others take ξ in
the units of the objective and are given it so). They begin as they do by default, "one start" with a single random
setting as in the paper.

Regret is by how much the least true value among the samples is above the optimum or, with noise, the true value of what
the tuner calls best; of times it is a share of the optimum. Medians over the seeds stand in the table, after 4, 8, 12
and 16 samples. The ratio of mean regrets to scikit-optimize's at the same ξ, paired by seed, has a 95 % bootstrap
interval; one that contains 1 reads "no difference". The cost is that of one ask and one tell at the last sample, the
median over the objectives of two parameters; the tuners take turns in one process. A library that is missing is named
and left out. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np
from stamp import end_with

from pipesd.policy.tuner import Tuner

Setting = dict[str, float]
Box = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Objective:
    name: str
    box: Box
    true: Callable[[Setting], float]
    optimum: float
    noise: float = 0.0  # share
    relative: bool = False

    def measured(self, setting: Setting, chance: np.random.Generator) -> float:
        """The true value times a factor of mean 1, as long times come more often than short ones."""
        value = self.true(setting)
        if self.noise:
            shape = self.noise**-2
            value *= float(chance.gamma(shape, 1.0 / shape))
        return value

    def regret(self, setting: Setting) -> float:
        beyond = self.true(setting) - self.optimum
        return beyond / self.optimum if self.relative else beyond


def branin(setting: Setting) -> float:
    x, y = setting["x"], setting["y"]
    bent = y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6
    return bent**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


HARTMANN_HEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
HARTMANN_3 = (
    np.array([[3.0, 10, 30], [0.1, 10, 35], [3.0, 10, 30], [0.1, 10, 35]]),
    1e-4 * np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]]),
)
HARTMANN_6 = (
    np.array(
        [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
    ),
    1e-4
    * np.array(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    ),
)


def hartmann(steepness: Any, centres: Any) -> Callable[[Setting], float]:
    def value(setting: Setting) -> float:
        place = np.array(list(setting.values()))
        return 4.0 - float(HARTMANN_HEIGHTS @ np.exp(-(steepness * (place - centres) ** 2).sum(1)))

    return value


LIBRARIES = {"scikit-optimize": "skopt", "bayesian-optimization": "bayes_opt"}
GRID = 48  # thresholds a side at which the surface is computed
TRACE = 4000  # draft tokens that it is computed from


@cache
def threshold_surface(gamma_s: float, beta_s: float, wait_s: float) -> Any:
    """Time per token (GRID, GRID) over both thresholds: `wait_s` a round beside drafting (γ) and sending (β) in turn.

    Every pair of thresholds is run through the same trace of confidences, drawn from a mixture of sure and unsure
    tokens; each token is accepted with a chance a little below its confidence.
    """
    chance = np.random.default_rng(7)
    sure = chance.random(TRACE) < 0.65
    confidence = np.where(sure, chance.beta(12, 0.7, TRACE), chance.beta(2.0, 1.8, TRACE))
    accepted = chance.random(TRACE) < confidence**1.15
    side = np.linspace(0.0, 1.0, GRID)
    sequence, token = np.meshgrid(side, side, indexing="ij")
    product, good = np.ones_like(sequence), np.ones_like(sequence, dtype=bool)
    spent_s, tokens, length = np.zeros_like(sequence), np.zeros_like(sequence), np.zeros_like(sequence)
    for p_draft, right in zip(confidence.tolist(), accepted.tolist(), strict=True):
        good &= right
        tokens += good
        product *= p_draft
        length += 1
        spent_s += gamma_s + beta_s
        fires = (product <= sequence) | (p_draft <= token) | (length >= 16)
        spent_s += np.where(fires, wait_s, 0.0)
        tokens += fires
        product[fires], good[fires], length[fires] = 1.0, True, 0.0
    surface = spent_s / tokens
    for _ in range(2):  # a finite trace is rough, a mean over all texts is smooth
        padded = np.pad(surface, 1, mode="edge")
        surface = (4 * surface + padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]) / 8
    return surface


def on_surface(*link: float) -> tuple[Callable[[Setting], float], float]:
    """The surface between its grid points, and its least value."""
    surface = threshold_surface(*link)

    def value(setting: Setting) -> float:
        x, y = (setting[name] * (GRID - 1) for name in ("sequence_threshold", "token_threshold"))
        i, j = min(int(x), GRID - 2), min(int(y), GRID - 2)
        u, v = x - i, y - j
        near, far = surface[i : i + 2, j : j + 2]
        return float((1 - u) * ((1 - v) * near[0] + v * near[1]) + u * ((1 - v) * far[0] + v * far[1]))

    return value, float(surface.min())


def objectives() -> list[Objective]:
    cube = [(0.0, 1.0)] * 6
    found = [
        Objective("branin", {"x": (-5.0, 10.0), "y": (0.0, 15.0)}, branin, 0.39788735772973816),
        Objective("hartmann3", dict(zip("abc", cube, strict=False)), hartmann(*HARTMANN_3), 4.0 - 3.8627797873327),
        Objective("hartmann6", dict(zip("abcdef", cube, strict=False)), hartmann(*HARTMANN_6), 4.0 - 3.3223680114155),
    ]
    links = {"thin": (0.006, 0.00001, 0.060), "fat": (0.036, 0.116, 0.075)}
    thresholds = {"sequence_threshold": (0.0, 1.0), "token_threshold": (0.0, 1.0)}
    for name, link in links.items():
        for noise in (0.1, 0.3):
            true, least = on_surface(*link)
            found.append(Objective(f"{name} {noise:.0%}", thresholds, true, least, noise, True))
    return found


class Searcher(Protocol):
    def ask(self) -> Setting: ...

    def tell(self, setting: Setting, value: float) -> None: ...

    def best(self) -> Setting: ...


Maker = Callable[[Objective, int], Searcher]


class Ours:
    def __init__(self, objective: Objective, seed: int, xi: float) -> None:
        self._tuner = Tuner(objective.box, seed=seed, xi=xi)

    def ask(self) -> Setting:
        return self._tuner.ask()

    def tell(self, setting: Setting, value: float) -> None:
        self._tuner.tell(setting, value)

    def best(self) -> Setting:
        return self._tuner.best[0]


class Kept:
    """What the other libraries are given: the best is the least sample, as they have it; ξ is turned into the
    objective's units."""

    def __init__(self, objective: Objective, xi: float) -> None:
        self.names, self.xi = list(objective.box), xi
        self.values: list[float] = []
        self.settings: list[Setting] = []

    def keep(self, setting: Setting, value: float) -> float:
        """Returns ξ."""
        self.values.append(value)
        self.settings.append(setting)
        return self.xi * (statistics.pstdev(self.values) or 1.0)

    def best(self) -> Setting:
        return self.settings[self.values.index(min(self.values))]


class ScikitOptimize(Kept):
    def __init__(self, objective: Objective, seed: int, xi: float, starts: int) -> None:
        import skopt

        super().__init__(objective, xi)
        self._search = skopt.Optimizer(
            list(objective.box.values()), "GP", n_initial_points=starts, acq_func="EI", random_state=seed
        )

    def ask(self) -> Setting:
        return dict(zip(self.names, self._search.ask(), strict=True))

    def tell(self, setting: Setting, value: float) -> None:
        self._search.acq_func_kwargs = {"xi": self.keep(setting, value)}
        self._search.tell(list(setting.values()), value)


class BayesianOptimization(Kept):
    def __init__(self, objective: Objective, seed: int, xi: float, starts: int) -> None:
        from bayes_opt import BayesianOptimization as Library
        from bayes_opt.acquisition import ExpectedImprovement

        super().__init__(objective, xi)
        self._margin = ExpectedImprovement(xi=xi)
        self._search = Library(None, objective.box, acquisition_function=self._margin, random_state=seed, verbose=0)
        self._chance, self._box, self._starts = np.random.default_rng(seed), objective.box, starts

    def ask(self) -> Setting:
        if len(self.values) < self._starts:
            return {name: float(self._chance.uniform(low, high)) for name, (low, high) in self._box.items()}
        return {name: float(value) for name, value in self._search.suggest().items()}

    def tell(self, setting: Setting, value: float) -> None:
        self._margin.xi = self.keep(setting, value)
        self._search.register(setting, -value)


class Random(Kept):
    def __init__(self, objective: Objective, seed: int) -> None:
        super().__init__(objective, 0.0)
        self._chance, self._box = np.random.default_rng(seed), objective.box

    def ask(self) -> Setting:
        return {name: float(self._chance.uniform(low, high)) for name, (low, high) in self._box.items()}

    def tell(self, setting: Setting, value: float) -> None:
        self.keep(setting, value)


def tuners() -> dict[str, Maker]:
    made: dict[str, Maker] = {"random": Random}
    for xi in (0.1, 0.01):
        made[f"pipesd, ξ {xi}"] = partial(Ours, xi=xi)
        if find_spec("skopt"):
            made[f"skopt, ξ {xi}"] = partial(ScikitOptimize, xi=xi, starts=10)
        if find_spec("bayes_opt"):
            made[f"bayes_opt, ξ {xi}"] = partial(BayesianOptimization, xi=xi, starts=5)
    if find_spec("skopt"):
        made["skopt, ξ 0.1, one start"] = partial(ScikitOptimize, xi=0.1, starts=1)
    return made


class Run(NamedTuple):
    regrets: list[float]  # after CHECKED samples
    last_s: float  # ask and tell of the last sample


SAMPLES = 16
CHECKED = (4, 8, 12, 16)


def run(maker: Maker, objective: Objective, seed: int) -> Run:
    searcher, chance = maker(objective, seed), np.random.default_rng([seed, 1])
    regrets, least, took_s = [], math.inf, 0.0
    for sample in range(1, SAMPLES + 1):
        begun = time.perf_counter()
        setting = searcher.ask()
        took_s = time.perf_counter() - begun
        value = objective.measured(setting, chance)
        begun = time.perf_counter()
        searcher.tell(setting, value)
        took_s += time.perf_counter() - begun
        least = min(least, objective.regret(setting))
        if sample in CHECKED:
            regrets.append(objective.regret(searcher.best()) if objective.noise else least)
    return Run(regrets, took_s)


def paired_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Ratio of the means, and its 95 % interval over resampled seeds."""
    a, b = np.array(ours), np.array(theirs)
    picks = np.random.default_rng(0).integers(len(a), size=(4000, len(a)))
    low, high = np.quantile(a[picks].mean(1) / np.maximum(b[picks].mean(1), 1e-12), [0.025, 0.975])
    return float(a.mean() / max(b.mean(), 1e-12)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="searches of each kind")
    parser.add_argument("--quick", action="store_true", help="two seeds of two objectives: only to see that it works")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these objectives alone")
    options = parser.parse_args()
    found, seeds = objectives(), 2 if options.quick else options.seeds
    if options.quick:
        found = [found[0], found[-1]]
    if options.only:
        found = [objective for objective in found if objective.name in options.only]
    missing = [name for name, module in LIBRARIES.items() if not find_spec(module)]
    for name in missing:
        print(f"{name} is missing: it is left out (pip install {name})")
    warnings.simplefilter("ignore")  # of the others: points that repeat, fits that end at a bound

    makers, costs_s = tuners(), dict[str, list[float]]()
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for objective in found:
        runs: dict[str, list[Run]] = {name: [] for name in makers}
        for seed in range(seeds):
            for name, maker in makers.items():
                runs[name].append(run(maker, objective, seed))
        print(f"{objective.name:26}" + "".join(f"{f'after {count}':>11}" for count in CHECKED) + f"{'ms':>9}")
        for name, done in runs.items():
            curve = [statistics.median(each.regrets[k] for each in done) for k in range(len(CHECKED))]
            last_ms = 1000 * statistics.median(each.last_s for each in done)
            print(f"  {name:24}" + "".join(f"{regret:11.4f}" for regret in curve) + f"{last_ms:9.2f}", flush=True)
            rows.append({"objective": objective.name, "tuner": name, "regret": [round(each, 5) for each in curve]})
            if len(objective.box) == 2:
                costs_s.setdefault(name, []).append(last_ms / 1000)
        for xi in (0.1, 0.01):
            if f"skopt, ξ {xi}" in runs:
                both = [[each.regrets[-1] for each in runs[f"{name}, ξ {xi}"]] for name in ("pipesd", "skopt")]
                ratio, low, high = paired_ratio(*both)
                says = "no difference" if low <= 1 <= high else "less" if high < 1 else "more"
                print(f"  mean regret / skopt's at ξ {xi}: {ratio:.2f} [{low:.2f}, {high:.2f}], {says}")
                ratios.append({"objective": objective.name, "xi": xi, "ratio": ratio, "low": low, "high": high})
    costs = {name: statistics.median(times) for name, times in costs_s.items()}
    libraries = [name for name in costs if not name.startswith(("pipesd", "random"))]
    longer = {name: round(costs[name] / costs["pipesd, ξ 0.1"], 1) for name in libraries}
    result = {
        "bench": "tuner",
        "kind": "real",
        "seeds": seeds,
        "missing": missing,
        "ask_and_tell_ms": {name: round(1000 * cost_s, 2) for name, cost_s in costs.items()},
        "times_as_long_as_ours": longer,
        "regret_ratios": [
            {key: round(v, 3) if isinstance(v, float) else v for key, v in each.items()} for each in ratios
        ],
        "reached": bool(ratios) and all(each["low"] <= 1 for each in ratios) and longer.get("skopt, ξ 0.1", 0.0) >= 10,
        "rows": rows,
    }
    print(json.dumps(result, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    end_with(main)
