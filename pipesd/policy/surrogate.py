"""What measurements say about settings that were not measured: where to look next, and whether the best is better.

The times are modelled by a Gaussian process over the unit cube of the free parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pipesd.policy.gp import Array, GaussianProcess, Hyperparameters, expected_improvement, fit
from pipesd.policy.search_space import SearchSpace, Setting

_SPREAD = 384  # candidates over the whole box
_ROUNDS = (0.1, 0.03, 0.01)  # how far the candidates of each further round lie about the best of the one before
_CLOSE = 48  # candidates of one round about one of the best
_MANY = 20  # measurements beyond which one more turns the hyperparameters only a little
_FEW_EVALUATIONS = 8
_SHUNNED = 0.15  # how far a failed setting reaches
_TRUST = 0.2  # that a setting far from all others will not fail, in settings that did not
_LEAD = 1.5  # deviations by which a setting must be ahead of the first to be called better
_SURE = 4.5  # lead, evidence and worth: what less than a tenth of searches of pure noise reaches
_WORTH = 10.0  # of a gain of all


class Verdict(NamedTuple):
    """The best setting and the first, compared by the model."""

    best: Setting
    best_s: float
    first_s: float
    lead: float  # of the best, in deviations of the difference
    evidence: float  # by how much the model's log likelihood is above that of one value for all settings, and noise

    @property
    def better(self) -> bool:
        """The best is better than the first beyond noise. The lead alone would not do: as the largest of many it is
        found in one of four searches of pure noise. A large gain needs less of both, as missing it costs more."""
        return self.lead >= _LEAD and self.lead + self.evidence + _WORTH * self.gain >= _SURE

    @property
    def gain(self) -> float:
        """The share of the first's time that the best saves."""
        return 1.0 - self.best_s / self.first_s if self.first_s > 0.0 else 0.0


class Model:
    """The process fitted to what was measured, in the coordinates of the free parameters."""

    def __init__(
        self,
        space: SearchSpace,
        done: list[tuple[Array, float]],
        hyper: Hyperparameters | None,
        warm: Hyperparameters | None,
    ) -> None:
        """Without `hyper` they are fitted, from `warm` on, what fitted before."""
        self.space = space
        self.points = np.array([point for point, _ in done])
        tpt_s = np.array([value for _, value in done])
        self.scale = Scale(tpt_s)
        self.values = values = self.scale.standard(tpt_s)
        if hyper is None and warm is not None and len(done) > _MANY:
            hyper = fit(self.points, values, [warm], evaluations=_FEW_EVALUATIONS)
        elif hyper is None:
            hyper = fit(self.points, values, [Hyperparameters()] if warm is None else [warm, Hyperparameters()])
        self.gp = GaussianProcess(self.points, values, hyper)

    def verdict(self, first: Array) -> Verdict:
        """The best of the settings measured, against the one at `first`."""
        mean, _ = self.gp.predict(self.points)
        best = int(np.argmin(mean))
        both = np.array([first, self.points[best]])
        means, _ = self.gp.predict(both)
        covariance = self.gp.covariance(both)
        deviation = math.sqrt(max(covariance[0, 0] + covariance[1, 1] - 2.0 * covariance[0, 1], 1e-12))
        flat = -0.5 * (float(self.values @ self.values) + len(self.values) * math.log(2.0 * math.pi))
        first_s, best_s = self.scale.seconds(means)
        lead = float(means[0] - means[1]) / deviation
        return Verdict(self.space.of_free(both[1]), best_s, first_s, lead, self.gp.log_likelihood - flat)

    def most_promising(self, xi: float, failures: list[Array], chance: np.random.Generator) -> Array:
        """The point to measure next: by expected improvement with a margin `xi`, away from `failures`."""
        best = float(self.gp.predict(self.points)[0].min())
        noise_std = math.sqrt(self.gp.hyper.noise)
        failed = np.array(failures).reshape(len(failures), self.space.free)
        gp = self.gp
        if len(failed):  # here alone they count, as the mean: no promise, and no more said by one lost connection
            values = np.concatenate([self.values, np.zeros(len(failed))])
            gp = GaussianProcess(np.concatenate([self.points, failed]), values, self.gp.hyper)

        def worth(points: Array) -> Array:
            mean, std = gp.predict(points)
            # A place known as well as one measurement could tell is not worth another (Huang, Allen, Notz and Zeng
            # 2006, equation 15): without this, noise draws the search to where it was lucky.
            news = 1.0 - noise_std / np.sqrt(noise_std**2 + std**2)
            value: Array = expected_improvement(mean, std, best, xi) * news + 1e-12 * std
            if len(failed):
                good, bad = _nearness(points, self.points), _nearness(points, failed)
                value *= ((good + _TRUST) / (good + bad + _TRUST)) ** 2  # the chance that it will not fail
            return value

        points = self.space.snap(self.space.spread(_SPREAD, chance.random(self.space.free), 0))
        values = worth(points)
        top = np.argsort(-values, kind="stable")[:4]
        points, values = points[top], values[top]
        points = np.concatenate([points, self.points[np.argsort(self.gp.predict(self.points)[0], kind="stable")[:2]]])
        values = np.concatenate([values, worth(points[len(values) :])])
        for reach in _ROUNDS:
            near = points[:, None, :] + reach * chance.standard_normal((len(points), _CLOSE, self.space.free))
            more = self.space.snap(np.clip(near.reshape(-1, self.space.free), 0.0, 1.0))
            points, values = np.concatenate([points, more]), np.concatenate([values, worth(more)])
            top = np.argsort(-values, kind="stable")[:3]
            points, values = points[top], values[top]
        found: Array = points[0]
        return found


def _nearness(points: Array, others: Array) -> Array:
    """How many of the others (n, d) are at each point (m, d), more or less."""
    squares = ((points[:, None, :] - others[None, :, :]) ** 2).sum(2)
    near: Array = np.exp(-0.5 * squares / _SHUNNED**2).sum(1)
    return near


class Scale:
    """Times to values of mean 0 and deviation 1, and back: by their logarithms, since noise on times is a share of them
    and a few long ones should not drown the rest; where some are not above 0, as they are."""

    def __init__(self, tpt_s: Array) -> None:
        self._ratios = bool(tpt_s.min() > 0.0)
        values = np.log(tpt_s) if self._ratios else tpt_s
        # Values are halved before they are added up: the largest floats have no sum.
        self._mean = float((values / 2.0).mean() * 2.0)
        deviation = float((values / 2.0 - self._mean / 2.0).std() * 2.0)
        self._deviation = deviation if deviation > 1e-9 * max(1.0, abs(self._mean)) else 1.0

    def standard(self, tpt_s: Array) -> Array:
        values: Array = np.log(tpt_s) if self._ratios else tpt_s
        return (values - self._mean) / self._deviation

    def seconds(self, standard: Array) -> list[float]:
        values = standard * self._deviation + self._mean
        seconds: list[float] = (np.exp(values) if self._ratios else values).tolist()
        return seconds
