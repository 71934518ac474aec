"""The autotuner: asks for settings to measure, is told what each cost, and knows the best (PipeSD, section 4.3).

The next setting is that of the greatest expected improvement by a model of what was measured. What is asked is a
function of the seed and of what was told, of nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from pipesd.errors import UsageError
from pipesd.policy.gp import Hyperparameters
from pipesd.policy.search_space import Parameter, SearchSpace, Setting
from pipesd.policy.surrogate import Model, Verdict

SAMPLES = 16  # measurements of one search (PipeSD, section 5.1)
PAPER_XI = 0.1  # PipeSD, section 4.3
XI = 0.01  # the default; the paper's does no better on the surfaces of bench/tuner.py
STARTS = 3  # settings spread over the box before the model is asked
REMEMBERED = 40  # the last measurements are modelled, those before are forgotten
STATE_VERSION = 1
LARGEST = 1e150  # what is beyond, in size, is no measurement: its square is no float

_CLOSING = 0.12  # of the samples, the last: they may measure the first again, where it may still be the best


class Trial(NamedTuple):
    setting: Setting
    tpt_s: float | None  # None: it failed


class Tuner:
    """Ask for a setting, measure it, tell the time per token, as often as there are samples.

    Args:
        space: name to Parameter, or to a pair (low, high) for a real parameter.
        seed: a whole number, or a generator that one is drawn from.
        samples: measurements of a search. It may go on beyond them; `done` says when they are used up.
        xi: margin, in standard deviations of what was measured, by which a setting should improve on the best to be
            worth a measurement; 0.1 is the paper's.
        first: the setting in force. It is measured first, is what `best` must beat, and what remains if nothing does.
            Without it the middle of the box is measured first, and nothing has to be beaten.
        least: a value below this counts as a failed measurement, as NaN, infinity and None do.

    Raises UsageError for bounds, settings and options that cannot be.
    """

    def __init__(
        self,
        space: Mapping[str, Parameter | tuple[float, float]],
        *,
        seed: int | np.random.Generator = 0,
        samples: int = SAMPLES,
        xi: float = XI,
        first: Mapping[str, Any] | None = None,
        least: float = -math.inf,
    ) -> None:
        self.space = SearchSpace(space)
        self.seed = int(seed.integers(2**32)) if isinstance(seed, np.random.Generator) else _count("seed", seed, 0)
        self.samples = _count("samples", samples, 1)
        self.xi = _number("xi", xi, 0.0)
        self.first = self.space.setting([0.5] * len(self.space.names)) if first is None else self.space.checked(first)
        self._in_force = first is not None
        self.least = _number("least", least, -math.inf)
        self.told = 0
        self.failed = 0
        self._trials: deque[Trial] = deque(maxlen=REMEMBERED)
        self._asked: Setting | None = None
        self._model: Model | None = None

    @property
    def done(self) -> bool:
        """All samples are used."""
        return self.told >= self.samples

    @property
    def samples_left(self) -> int:
        return max(self.samples - self.told, 0)

    def ask(self) -> Setting:
        """The setting to measure next. Asked again before anything was told, it is the same."""
        if self._asked is None:
            self._asked = self._next()
        return dict(self._asked)

    def tell(self, setting: Mapping[str, Any], tpt_s: float | None) -> None:
        """What a setting cost, in s per token: any setting of the space, asked for or not.

        None, NaN, infinity and what is below `least` say that the measurement failed. Raises UsageError for a setting
        outside the space and for what is no number.
        """
        trial = self._trial(setting, tpt_s)
        self._trials.append(trial)
        self.told += 1
        self.failed += trial.tpt_s is None
        self._asked = None
        self._learn()

    @property
    def best(self) -> tuple[Setting, float]:
        """The best setting measured and its expected time in s per token, by the model: not the luckiest sample.

        A `first` that was given is it unless another is better beyond noise. Before any measurement succeeded it is the
        first, and its time NaN.
        """
        verdict = self._verdict()
        if verdict is None:
            return dict(self.first), math.nan
        if self._in_force and not verdict.better and not self._first_failed:
            return dict(self.first), verdict.first_s
        return dict(verdict.best), verdict.best_s

    @property
    def _first_failed(self) -> bool:
        """The first setting was measured, and never with success."""
        values = [trial.tpt_s for trial in self._trials if trial.setting == self.first]
        return bool(values) and all(value is None for value in values)

    @property
    def worthwhile(self) -> bool:
        """Some setting is better than the first, beyond noise."""
        verdict = self._verdict()
        return verdict is not None and verdict.better

    @property
    def gain(self) -> float:
        """The share of the first setting's time that the best saves; 0 where none is better beyond noise."""
        verdict = self._verdict()
        return verdict.gain if verdict is not None and verdict.better else 0.0

    def state(self) -> dict[str, Any]:
        """All that it knows, ready for JSON: `restore` makes a tuner of it that goes on as this one would."""
        return {
            "version": STATE_VERSION,
            "space": {name: asdict(parameter) for name, parameter in self.space.parameters.items()},
            "seed": self.seed,
            "samples": self.samples,
            "xi": self.xi,
            "first": dict(self.first),
            "in_force": self._in_force,
            "least": None if self.least == -math.inf else self.least,
            "told": self.told,
            "failed": self.failed,
            "trials": [[dict(trial.setting), trial.tpt_s] for trial in self._trials],
            "fitted": None if self._model is None else self._model.gp.hyper.values(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Tuner:
        """The tuner whose state this is. Raises UsageError for what is none, or of a version that is not known."""
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            version = state.get("version") if isinstance(state, Mapping) else state
            raise UsageError(f"tuner state: got version {version!r}, wanted {STATE_VERSION}; search again")
        try:
            space = {name: Parameter(**bounds) for name, bounds in state["space"].items()}
            least = -math.inf if state["least"] is None else state["least"]
            options = {name: state[name] for name in ("seed", "samples", "xi")}
            tuner = cls(space, least=least, first=dict(state["first"]), **options)
            if type(state["in_force"]) is not bool:
                raise TypeError(f"in_force {state['in_force']!r}")
            tuner._in_force = state["in_force"]
            trials = [tuner._trial(setting, tpt_s) for setting, tpt_s in state["trials"]]
            tuner._trials.extend(trials)
            tuner.told = _count("told", state["told"], len(tuner._trials))
            tuner.failed = _count("failed", state["failed"], 0)
            tuner._learn(None if state["fitted"] is None else _hyperparameters(state["fitted"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"tuner state: got one that is damaged ({error!r}); search again") from None
        return tuner

    def _trial(self, setting: Mapping[str, Any], tpt_s: float | None) -> Trial:
        setting, value = self.space.checked(setting), math.nan if tpt_s is None else _real("tpt_s", tpt_s)
        return Trial(setting, value if abs(value) <= LARGEST and value >= self.least else None)

    def _verdict(self) -> Verdict | None:
        return None if self._model is None else self._model.verdict(self.space.unit(self.first))

    def _learn(self, hyper: Hyperparameters | None = None) -> None:
        """Model what is remembered, with these hyperparameters, or with those that fit it."""
        done = [(self.space.unit(trial.setting), trial.tpt_s) for trial in self._trials if trial.tpt_s is not None]
        warm = None if self._model is None else self._model.gp.hyper
        self._model = Model(self.space, done, hyper, warm) if done else None

    def _next(self) -> Setting:
        if not any(trial.setting == self.first for trial in self._trials):
            return self.first
        model = self._model
        if model is None or self.told < STARTS:
            start = np.random.default_rng(self.seed).random(self.space.free)
            return self.space.of_free(self.space.spread(1, start, self.told)[0])
        first = self.space.unit(self.first)
        if self.samples - max(1, round(_CLOSING * self.samples)) <= self.told < self.samples:
            verdict = model.verdict(first)
            if verdict.lead > 0.0 and not verdict.better:
                return self.first
        failures = [self.space.unit(trial.setting) for trial in self._trials if trial.tpt_s is None]
        return self.space.of_free(
            model.most_promising(self.xi, failures, np.random.default_rng([self.seed, self.told]))
        )


def _hyperparameters(found: Any) -> Hyperparameters:
    values = [_real("fitted", value) for value in found]
    if len(values) != 3 or not all(1e-9 < value < 1e9 for value in values):
        raise ValueError(f"hyperparameters {found!r}")
    return Hyperparameters(values[0], (values[1],), values[2])


def _real(name: str, value: Any) -> float:
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real:
        raise UsageError(f"{name}: got {value!r}, wanted a number")
    try:
        return float(value)
    except OverflowError:  # a whole number that no float can hold
        return math.inf if value > 0 else -math.inf


def _number(name: str, value: Any, low: float) -> float:
    number = _real(name, value)
    if not low <= number < math.inf:
        raise UsageError(f"{name}: got {value!r}, wanted a number, at least {low:g}")
    return number


def _count(name: str, value: Any, low: int) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < low:
        raise UsageError(f"{name}: got {value!r}, wanted a whole number, at least {low}")
    return int(value)
