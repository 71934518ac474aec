"""A Gaussian process with the Matérn 5/2 kernel, and the expected improvement on it: arrays in, arrays out.

The prior has mean 0 and covariance s · M(r) + n · [same measurement], with M(r) = (1 + √5 r + 5 r²/3) exp(-√5 r) and r
the distance after each coordinate is divided by its length scale; s is the signal's variance, n the noise's (Rasmussen
and Williams, Gaussian Processes for Machine Learning, equations 2.25, 2.26, 2.30, 4.17 and 5.9; PipeSD, section 4.3,
names the Matérn kernel). It is numpy alone: loading scipy would take longer than all that is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesd.errors import PipeSDError

Array = NDArray[np.floating[Any]]
Bounds = tuple[float, float]

SIGNAL_BOUNDS: Bounds = (0.05, 20.0)  # of values whose variance is 1
LENGTH_BOUNDS: Bounds = (0.05, 10.0)  # in a box of side 1
NOISE_BOUNDS: Bounds = (1e-6, 2.0)
JITTERS = (0.0, *(10.0**power for power in range(-12, -3)))  # shares of the mean diagonal
_ROOT5 = math.sqrt(5.0)
_ROWS = 128  # multiplied at once: larger products wake the threads of BLAS, which takes longer than they do


class NotPositiveDefinite(PipeSDError):
    """A matrix has no Cholesky factor, even with its diagonal raised as far as allowed."""


@dataclass(frozen=True)
class Hyperparameters:
    """Variance of the signal, length scales (one for all coordinates, or one for each), variance of the noise."""

    signal: float = 1.0
    lengths: tuple[float, ...] = (0.5,)
    noise: float = 0.01

    def values(self) -> list[float]:
        """Signal, lengths, noise in one list."""
        return [self.signal, *self.lengths, self.noise]

    def logs(self) -> Array:
        """Their logarithms, as one vector."""
        return np.log(self.values())

    @staticmethod
    def of_logs(logs: Array) -> Hyperparameters:
        signal, *lengths, noise = np.exp(logs).tolist()
        return Hyperparameters(signal, tuple(lengths), noise)


def cholesky(matrix: Array) -> tuple[Array, float]:
    """The lower Cholesky factor of a symmetric matrix (n, n), and the jitter that was added to its diagonal to get it.

    The jitter is 0 where that will do, else the least of JITTERS, a tenfold series, times the mean of the diagonal.
    Raises NotPositiveDefinite when the largest is not enough, or the matrix is not finite.
    """
    scale = float(np.mean(np.diagonal(matrix)))
    for share in JITTERS if math.isfinite(scale) else ():
        jitter = share * scale
        try:
            factor = np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)) if jitter else matrix)
        except np.linalg.LinAlgError:
            continue
        if math.isfinite(float(factor.sum())):
            return factor, jitter
    raise NotPositiveDefinite(
        f"got a matrix of {len(matrix)} rows that is not positive definite, even with {JITTERS[-1]:g} of its mean "
        "diagonal added; wanted a finite covariance"
    )


def matern52(left: Array, right: Array, lengths: Sequence[float]) -> Array:
    """M(r) between the rows of `left` (m, d) and of `right` (n, d): an array (m, n)."""
    scale = 1.0 / np.asarray(lengths, dtype=float)
    apart = (left * scale)[:, None, :] - (right * scale)[None, :, :]
    a = _ROOT5 * np.sqrt(np.einsum("mnd,mnd->mn", apart, apart))
    shape: Array = (1.0 + a + a * a / 3.0) * np.exp(-a)
    return shape


class GaussianProcess:
    """What the values (n,) at the points (n, d) say about every other point, for given hyperparameters.

    `jitter` is what the factorisation needed beyond the noise. Raises NotPositiveDefinite for what is not finite.
    """

    def __init__(self, points: Array, values: Array, hyper: Hyperparameters) -> None:
        self.points, self.hyper = points, hyper
        covariance = hyper.signal * matern52(points, points, hyper.lengths)
        covariance[np.diag_indices(len(points))] += hyper.noise
        factor, self.jitter = cholesky(covariance)
        self._whiten = np.linalg.inv(factor)  # numpy has no triangular solver; n is small
        whitened = self._whiten @ values
        self._weights: Array = self._whiten.T @ whitened
        #: log p(values | points, hyperparameters)
        self.log_likelihood = float(
            -0.5 * whitened @ whitened - np.log(np.diagonal(factor)).sum() - 0.5 * len(points) * math.log(2.0 * math.pi)
        )

    def predict(self, points: Array, *, noisy: bool = False) -> tuple[Array, Array]:
        """Mean and standard deviation (m,) at the rows of `points` (m, d): of the function, or with `noisy` of another
        measurement of it."""
        across = self.hyper.signal * matern52(points, self.points, self.hyper.lengths)
        slices = [across[start : start + _ROWS] @ self._whiten.T for start in range(0, len(across), _ROWS)]
        reduced = np.concatenate(slices)
        variance = self.hyper.signal - np.einsum("mn,mn->m", reduced, reduced)
        return across @ self._weights, np.sqrt(np.maximum(variance, 0.0) + (self.hyper.noise if noisy else 0.0))

    def covariance(self, points: Array) -> Array:
        """The covariance (m, m) of the function at the rows of `points` (m, d)."""
        reduced = self.hyper.signal * matern52(points, self.points, self.hyper.lengths) @ self._whiten.T
        covariance: Array = self.hyper.signal * matern52(points, points, self.hyper.lengths) - reduced @ reduced.T
        return covariance


def log_likelihood(points: Array, values: Array, logs: Array) -> tuple[float, Array]:
    """log p(values | points, hyperparameters) and its gradient by the logarithms of these, a vector like `logs`.

    Raises NotPositiveDefinite.
    """
    return _log_likelihood(_squares(points), values, logs)


def _squares(points: Array) -> Array:
    """Squared differences by coordinate, (d, n, n)."""
    columns = points.T
    squares: Array = (columns[:, :, None] - columns[:, None, :]) ** 2
    return squares


def _log_likelihood(squares: Array, values: Array, logs: Array) -> tuple[float, Array]:
    coordinates, count = squares.shape[:2]
    signal, noise = math.exp(logs[0]), math.exp(logs[-1])
    inverse_squares = np.exp(-2.0 * logs[1:-1])
    shared = len(inverse_squares) == 1
    weights = np.full(coordinates, inverse_squares[0]) if shared else inverse_squares
    a = _ROOT5 * np.sqrt(np.tensordot(weights, squares, 1))
    decay = signal * np.exp(-a)
    slope = (1.0 + a) * decay
    signal_part = slope + decay * (a * a / 3.0)
    covariance = signal_part.copy()
    covariance.flat[:: count + 1] += noise
    factor, _ = cholesky(covariance)
    whiten = np.linalg.inv(factor)
    whitened = whiten @ values
    solved = whiten.T @ whitened
    value = -0.5 * (whitened @ whitened + count * math.log(2.0 * math.pi)) - np.log(factor.flat[:: count + 1]).sum()
    # The gradient is half the trace of (K⁻¹y yᵀK⁻¹ - K⁻¹) ∂K/∂θ.
    outer = np.outer(solved, solved) - whiten.T @ whiten
    gradient = np.empty(len(logs))
    gradient[0] = 0.5 * np.vdot(outer, signal_part)
    by_coordinate = 5.0 / 6.0 * weights * (squares.reshape(coordinates, count * count) @ (outer * slope).ravel())
    gradient[1:-1] = by_coordinate.sum() if shared else by_coordinate
    gradient[-1] = 0.5 * noise * np.trace(outer)
    return float(value), gradient


# What is thought likely before any measurement, as mean and deviation of the logarithm. A dozen values do not tell a
# rough function from a noisy one; without an opinion the likelihood's choice between the two is a toss of a coin.
_SIGNAL_PRIOR = (0.0, 1.0)
_LENGTH_PRIOR = (math.log(0.4), 0.5)
_NOISE_PRIOR = (math.log(0.001), 3.0)


def fit(points: Array, values: Array, starts: Sequence[Hyperparameters], *, evaluations: int = 30) -> Hyperparameters:
    """The hyperparameters under which the values are the likeliest, weighed by a broad prior, within the bounds above.

    Args:
        points: (n, d) in a box of side 1.
        values: (n,) of mean about 0 and variance about 1.
        starts: where the search starts, in turn; all with as many length scales.
        evaluations: likelihoods computed from each start, at most.
    """
    lengths = len(starts[0].lengths)
    low, high = np.log([SIGNAL_BOUNDS, *[LENGTH_BOUNDS] * lengths, NOISE_BOUNDS]).T
    mean, deviation = np.array([_SIGNAL_PRIOR, *[_LENGTH_PRIOR] * lengths, _NOISE_PRIOR]).T
    squares = _squares(points)

    def posterior(logs: Array) -> tuple[float, Array]:
        value, gradient = _log_likelihood(squares, values, logs)
        away = (logs - mean) / deviation
        return value - 0.5 * float(away @ away), gradient - away / deviation

    ends = [climb(posterior, start.logs(), low, high, evaluations) for start in starts]
    return Hyperparameters.of_logs(max(ends, key=lambda end: end[1])[0])


def climb(
    function: Callable[[Array], tuple[float, Array]], start: Array, low: Array, high: Array, evaluations: int
) -> tuple[Array, float]:
    """Climb a function, which gives value and gradient, by BFGS steps cut to a box; returns place and value."""
    place = np.clip(start, low, high)
    value, gradient = function(place)
    inverse = None
    left = evaluations - 1
    while left > 0:
        free = ~(((place <= low) & (gradient < 0.0)) | ((place >= high) & (gradient > 0.0)))
        uphill = np.where(free, gradient, 0.0)
        if np.abs(uphill).max() < 1e-2:
            break
        direction = uphill if inverse is None else np.where(free, inverse @ uphill, 0.0)
        if direction @ uphill <= 0.0:
            inverse, direction = None, uphill
        step = min(1.0, 1.5 / float(np.abs(direction).max()))
        while left > 0:
            there = np.clip(place + step * direction, low, high)
            left -= 1
            new_value, new_gradient = function(there)
            if new_value >= value + 1e-4 * float(gradient @ (there - place)):
                break
            step *= 0.3
        else:
            break
        inverse = _bfgs(inverse, there - place, gradient - new_gradient)
        gained = new_value - value
        place, value, gradient = there, new_value, new_gradient
        if gained < 1e-3:
            break
    return place, value


def _bfgs(inverse: Array | None, moved: Array, turned: Array) -> Array | None:
    """The inverse of the curvature after a step and the change of the downhill gradient that it brought."""
    curvature = float(moved @ turned)
    if curvature <= 1e-10:
        return inverse
    if inverse is None:
        inverse = np.eye(len(moved)) * (curvature / float(turned @ turned))
    pushed = inverse @ turned
    crossed = np.outer(moved, pushed)
    updated: Array = (
        inverse
        - (crossed + crossed.T) / curvature
        + np.outer(moved, moved) * ((1.0 + float(turned @ pushed) / curvature) / curvature)
    )
    return updated


def expected_improvement(mean: Array, std: Array, best: float, xi: float = 0.0) -> Array:
    """E[max(best - xi - f, 0)] of f normal with `mean` and `std` (m,): by how much a minimisation is expected to get
    below `best`, beyond a margin `xi` (Jones, Schonlau and Welch 1998, equation 15). A std of 0 is a value known."""
    gain = (best - xi) - mean
    with np.errstate(over="ignore"):
        z = np.divide(gain, std, out=np.full_like(gain, np.inf), where=std > 0.0)
    known = np.isinf(z)
    z = np.where(known, 0.0, np.clip(z, -1e3, 1e3))
    below = np.fromiter(map(math.erfc, (z * -math.sqrt(0.5)).tolist()), float, len(z)) * 0.5
    density = np.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return np.where(known, np.maximum(gain, 0.0), np.maximum(gain * below + std * density, 0.0))
