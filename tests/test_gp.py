"""The Gaussian process against scikit-learn's, its gradient against differences, improvement against an integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.policy import gp
from pipesd.policy.gp import (
    LENGTH_BOUNDS,
    NOISE_BOUNDS,
    SIGNAL_BOUNDS,
    Array,
    GaussianProcess,
    Hyperparameters,
    NotPositiveDefinite,
    cholesky,
    climb,
    expected_improvement,
    fit,
    log_likelihood,
    matern52,
)

CASES = [
    (16, 2, Hyperparameters(1.3, (0.4,), 0.02)),
    (16, 2, Hyperparameters(0.7, (0.3, 1.7), 0.1)),
    (1, 1, Hyperparameters(2.0, (0.2,), 1e-4)),
    (40, 6, Hyperparameters(1.0, (0.5, 1.0, 2.0, 0.3, 0.7, 5.0), 1e-3)),
    (64, 3, Hyperparameters(5.0, (0.9,), 1e-2)),
]


def drawn(count: int, free: int, seed: int = 3) -> tuple[Array, Array]:
    chance = np.random.default_rng(seed)
    points = chance.random((count, free))
    return points, np.sin(5.0 * points.sum(1)) + 0.1 * chance.standard_normal(count)


@pytest.mark.parametrize(("count", "free", "hyper"), CASES)
def test_posterior_and_likelihood_are_those_of_scikit_learn(count: int, free: int, hyper: Hyperparameters) -> None:
    pytest.importorskip("sklearn")
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    points, values = drawn(count, free)
    lengths = hyper.lengths[0] if len(hyper.lengths) == 1 else hyper.lengths
    function = ConstantKernel(hyper.signal) * Matern(lengths, nu=2.5)
    asked = np.concatenate([np.random.default_rng(4).random((50, free)), points[:2]])
    ours = GaussianProcess(points, values, hyper)
    for noisy in (False, True):
        if noisy:
            theirs = GaussianProcessRegressor(function + WhiteKernel(hyper.noise), alpha=0.0, optimizer=None)
        else:
            theirs = GaussianProcessRegressor(function, alpha=hyper.noise, optimizer=None)
        mean, std = theirs.fit(points, values).predict(asked, return_std=True)
        our_mean, our_std = ours.predict(asked, noisy=noisy)
        np.testing.assert_allclose(our_mean, mean, rtol=0, atol=1e-8)
        np.testing.assert_allclose(our_std, std, rtol=0, atol=1e-8)
        if not noisy:
            _, covariance = theirs.predict(asked, return_cov=True)
            np.testing.assert_allclose(ours.covariance(asked), covariance, rtol=0, atol=1e-8)
    assert ours.jitter == 0.0
    np.testing.assert_allclose(
        matern52(points, asked, hyper.lengths), Matern(lengths, nu=2.5)(points, asked), atol=1e-12
    )

    # `theirs` is the one with the noise as a hyperparameter: its order is ours, signal, lengths, noise.
    value, gradient = theirs.log_marginal_likelihood(hyper.logs(), eval_gradient=True)
    our_value, our_gradient = log_likelihood(points, values, hyper.logs())
    assert our_value == pytest.approx(value, abs=1e-8) == ours.log_likelihood
    np.testing.assert_allclose(our_gradient, gradient, rtol=1e-8, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 1000))
def test_gradient_is_the_slope_of_the_likelihood(count: int, free: int, shared: bool, seed: int) -> None:
    points, values = drawn(count, free, seed)
    logs = np.random.default_rng(seed).uniform(-1.5, 0.5, 2 + (1 if shared else free))
    _, gradient = log_likelihood(points, values, logs)
    for k in range(len(logs)):
        step = np.zeros(len(logs))
        step[k] = 1e-5
        slope = (log_likelihood(points, values, logs + step)[0] - log_likelihood(points, values, logs - step)[0]) / 2e-5
        assert gradient[k] == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_jitter_grows_until_it_is_enough() -> None:
    assert cholesky(np.eye(3)) == (pytest.approx(np.eye(3)), 0.0)
    twice = np.ones((4, 4))  # four measurements of one point without noise
    factor, jitter = cholesky(twice)
    assert jitter == 0.0 or jitter in gp.JITTERS
    np.testing.assert_allclose(factor @ factor.T, twice + jitter * np.eye(4), atol=1e-9)
    slightly = np.diag([1.0, 1.0, -2e-7])  # what rounding makes of a singular matrix
    factor, jitter = cholesky(slightly)
    scale = float(np.mean(np.diagonal(slightly)))
    assert jitter == pytest.approx(1e-6 * scale)
    for before, after in zip(gp.JITTERS[1:], gp.JITTERS[2:], strict=False):
        assert after == pytest.approx(10 * before)


@pytest.mark.parametrize("matrix", [np.diag([1.0, -1.0]), np.full((2, 2), np.nan), np.diag([np.inf, 1.0])])
def test_a_matrix_that_jitter_cannot_help_is_refused_in_words(matrix: Array) -> None:
    with pytest.raises(NotPositiveDefinite, match="2 rows"):
        cholesky(matrix)


def test_duplicates_and_constants_are_ordinary_data() -> None:
    points = np.repeat(np.random.default_rng(1).random((3, 2)), 20, axis=0)
    for values in (np.zeros(60), np.tile([1.0, -1.0], 30), np.repeat([-1.0, 0.0, 1.0], 20)):
        hyper = fit(points, values, [Hyperparameters()])
        mean, std = GaussianProcess(points, values, hyper).predict(points)
        assert np.isfinite(mean).all() and np.isfinite(std).all()
        for bounds, found in [(SIGNAL_BOUNDS, hyper.signal), (NOISE_BOUNDS, hyper.noise)]:
            assert bounds[0] * (1 - 1e-9) <= found <= bounds[1] * (1 + 1e-9)
        assert LENGTH_BOUNDS[0] * (1 - 1e-9) <= hyper.lengths[0] <= LENGTH_BOUNDS[1] * (1 + 1e-9)
    # Repeats are averaged: mean and deviation are those of one measurement with a twentieth of the noise.
    hyper = Hyperparameters(1.0, (0.5,), 0.2)
    values = np.random.default_rng(2).standard_normal(60)
    many = GaussianProcess(points, values, hyper)
    one = GaussianProcess(points[::20], values.reshape(3, 20).mean(1), Hyperparameters(1.0, (0.5,), 0.01))
    asked = np.random.default_rng(3).random((9, 2))
    np.testing.assert_allclose(many.predict(asked), one.predict(asked), atol=1e-9)


def test_fit_finds_what_the_data_were_drawn_from() -> None:
    chance = np.random.default_rng(11)
    points = chance.random((60, 2))
    truth = Hyperparameters(1.0, (0.25,), 0.05)
    covariance = truth.signal * matern52(points, points, truth.lengths) + truth.noise * np.eye(60)
    values = cholesky(covariance)[0] @ chance.standard_normal(60)
    found = fit(points, values, [Hyperparameters()])
    assert 0.125 < found.lengths[0] < 0.5
    assert 0.015 < found.noise < 0.15
    assert log_likelihood(points, values, found.logs())[0] > log_likelihood(points, values, truth.logs())[0] - 1.0
    # No start, of those all over the bounds, ends at anything better.
    starts = [Hyperparameters(s, (length,), n) for s in (0.1, 5.0) for length in (0.1, 3.0) for n in (1e-5, 1.0)]
    best = fit(points, values, starts, evaluations=200)
    np.testing.assert_allclose(found.logs(), best.logs(), atol=0.1)
    assert fit(points, values, [Hyperparameters()]) == found


def test_climb_stops_at_the_top_and_at_the_walls() -> None:
    def hill(place: Array) -> tuple[float, Array]:
        away = place - np.array([0.3, 5.0])
        bent = np.array([[3.0, 1.0], [1.0, 2.0]])
        return -0.5 * float(away @ bent @ away), -bent @ away

    top, value = climb(hill, np.array([-4.0, -4.0]), np.full(2, -10.0), np.full(2, 10.0), 60)
    np.testing.assert_allclose(top, [0.3, 5.0], atol=0.05)
    assert value == pytest.approx(0.0, abs=1e-2)
    top, _ = climb(hill, np.array([-4.0, -4.0]), np.full(2, -10.0), np.array([10.0, 2.0]), 60)
    np.testing.assert_allclose(top, [0.3 + 1.0, 2.0], atol=0.05)  # the best with the second at its wall
    evaluated = []

    def counted(place: Array) -> tuple[float, Array]:
        evaluated.append(place)
        return hill(place)

    climb(counted, np.array([-4.0, -4.0]), np.full(2, -10.0), np.full(2, 10.0), 5)
    assert len(evaluated) <= 5


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 3), st.floats(1e-3, 3), st.floats(-3, 3), st.floats(0, 1))
def test_expected_improvement_is_the_integral(mean: float, std: float, best: float, xi: float) -> None:
    x = np.linspace(-12.0, 12.0, 200_001)
    gained = np.maximum(best - xi - (mean + std * x), 0.0) * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    expected = float(gained.sum() * (x[1] - x[0]))
    found = expected_improvement(np.array([mean]), np.array([std]), best, xi)
    assert found[0] == pytest.approx(expected, abs=1e-7)


def test_expected_improvement_of_what_is_known_and_of_extremes() -> None:
    mean, std = np.array([0.0, 2.0, 1.0, 0.0, 0.0, 1e300]), np.array([0.0, 0.0, 0.0, 1e-320, 1e300, 1.0])
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        found = expected_improvement(mean, std, 1.0)
    np.testing.assert_allclose(found, [1.0, 0.0, 0.0, 1.0, 1e300 / math.sqrt(2 * math.pi), 0.0], rtol=1e-6)
    assert (expected_improvement(np.linspace(-50, 50, 999), np.ones(999), 0.0) >= 0.0).all()
