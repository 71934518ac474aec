"""Lines through noisy times: what they recover, what they withstand, how often their intervals hold; and estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from pipesd.policy.estimate import Estimate, LineFit, PlanFigures, changed, fit_line, student_95
from pipesd.policy.token_batches import plan_for_run

ALPHA_S, BETA_S = 0.040, 0.002
EIGHT = np.arange(1.0, 9.0)

MS = 1e-3
NOISES: dict[str, Callable[[Generator, Any], Any]] = {
    "normal": lambda rng, x: rng.normal(0, MS, len(x)),
    "laplace": lambda rng, x: rng.laplace(0, MS, len(x)),
    "student": lambda rng, x: MS * rng.standard_t(2, len(x)),  # of infinite variance
    "uniform": lambda rng, x: rng.uniform(-MS, MS, len(x)),
    "quantised": lambda rng, x: np.round(rng.normal(0, MS, len(x)), 3),
    "growing": lambda rng, x: rng.normal(0, 0.2 * MS, len(x)) * x,
    "exponential": lambda rng, x: rng.exponential(MS, len(x)),
    "lognormal": lambda rng, x: MS * rng.lognormal(0, 1, len(x)),
}
SKEWED = {"exponential", "lognormal"}  # their line is a matter of definition: that of very many samples is taken


def times_of(rng: Generator, noise: str, sizes: Any) -> Any:
    return ALPHA_S + BETA_S * sizes + NOISES[noise](rng, sizes)


def outliers(rng: Generator, times: Any, share: float) -> Any:
    return np.where(rng.random(len(times)) < share, 50 * times, times)


samples = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 10)), max_size=40)
few_sizes = st.lists(
    st.tuples(st.integers(1, 4).map(float), st.floats(0, 1), st.sampled_from([0.0, 0.01])), max_size=40
)


def check(fit: LineFit) -> None:
    """What holds of any line, whatever it went through."""
    assert not any(math.isnan(value) for value in fit)
    assert 0 <= fit.intercept_low_s <= fit.intercept_s <= fit.intercept_high_s
    assert 0 <= fit.slope_low_s <= fit.slope_s <= fit.slope_high_s
    assert math.isfinite(fit.intercept_s) and math.isfinite(fit.slope_s)
    assert 0 <= fit.r2 <= 1
    assert fit.slope_known <= fit.spread_enough
    assert not fit.slope_known or fit.slope_low_s > 0


@given(samples | few_sizes)
def test_no_figure_is_ever_negative_or_nan(drawn: list[tuple[float, float, float]]) -> None:
    sizes, times, lags = zip(*drawn, strict=True) if drawn else ((), (), ())
    fit = fit_line(sizes, times, lags)
    check(fit)
    assert fit.samples + fit.outliers == len(drawn) and fit.dropped == 0


@given(few_sizes, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(drawn: list[tuple[float, float, float]], random: Any) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)
    assert not drawn or fit_line(*zip(*drawn, strict=True)) == fit_line(*zip(*shuffled, strict=True))


@given(few_sizes, st.sampled_from([float("nan"), float("inf"), -1e-9, -2.0, 1e10]), st.integers(0, 2))
def test_what_is_no_measurement_is_dropped_and_counted(
    drawn: list[tuple[float, float, float]], bad: float, place: int
) -> None:
    worse = [1.0, 0.02, 0.0]
    worse[place] = bad if bad != 1e10 or place else 1e16
    fit = fit_line(*zip(*drawn, tuple(worse), strict=True))
    assert fit.dropped == 1
    assert fit._replace(dropped=0) == (fit_line(*zip(*drawn, strict=True)) if drawn else fit_line((), ()))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([1.0, 1e-3, 12.0, 1e6]))
def test_a_line_without_noise_is_recovered(intercept: float, slope: float, unit: float) -> None:
    fit = fit_line(EIGHT * unit, intercept + slope / unit * (EIGHT * unit))
    assert fit.intercept_s == pytest.approx(intercept, rel=1e-6, abs=1e-6)
    assert fit.slope_s * unit == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert fit.spread_enough


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("rounds", "share"), [(1, 0.0), (12, 0.1)])
def test_intervals_hold_as_often_as_they_say(noise: str, rounds: int, share: float) -> None:
    """95 times of 100; of 150 lines, 87 % or less would hold once in ten thousand times."""
    rng = default_rng(5)
    sizes, truth = np.tile(EIGHT, rounds), (ALPHA_S, BETA_S)
    if noise in SKEWED:
        large = np.tile(EIGHT, 4000)
        fit = fit_line(large, times_of(rng, noise, large))
        truth = (fit.intercept_s, fit.slope_s)
    intercepts = slopes = 0
    for _ in range(150):
        fit = fit_line(sizes, outliers(rng, times_of(rng, noise, sizes), share))
        intercepts += fit.intercept_low_s <= truth[0] <= fit.intercept_high_s
        slopes += fit.slope_low_s <= truth[1] <= fit.slope_high_s
    assert min(intercepts, slopes) > 0.87 * 150


def test_noise_with_long_tails_does_less_harm_than_to_least_squares() -> None:
    rng, sizes = default_rng(10), np.tile(EIGHT, 12)
    errors: list[tuple[float, float]] = []
    for _ in range(200):
        times = times_of(rng, "laplace", sizes)
        errors.append((fit_line(sizes, times).slope_s - BETA_S, np.polyfit(sizes, times, 1)[0] - BETA_S))
    robust, plain = np.sqrt(np.mean(np.square(errors), axis=0))
    assert robust < 0.92 * plain


def test_intervals_shrink_with_samples() -> None:
    rng = default_rng(3)
    widths = []
    for rounds in (1, 4, 16, 64):
        sizes = np.tile(EIGHT, rounds)
        fits = [fit_line(sizes, times_of(rng, "laplace", sizes)) for _ in range(15)]
        widths.append(float(np.median([fit.slope_high_s - fit.slope_low_s for fit in fits])))
    assert all(1.5 < wide / narrow < 4 for wide, narrow in pairwise(widths))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("count", [100, 1000, 10_000])
def test_samples_fifty_times_too_long_do_not_move_the_line(share: float, count: int) -> None:
    rng = default_rng(2)
    sizes = rng.integers(1, 21, count).astype(float)
    times = outliers(rng, times_of(rng, "normal", sizes), share)
    fit = fit_line(sizes, times)
    assert fit.intercept_s == pytest.approx(ALPHA_S, rel=0.02)
    assert fit.slope_s == pytest.approx(BETA_S, rel=0.04)
    assert fit.outliers == sum(times > 1.0)
    assert fit.r2 > 0.95


def test_outliers_leave_what_the_others_say() -> None:
    rng, sizes = default_rng(7), np.tile(EIGHT, 120)
    for _ in range(5):
        times = outliers(rng, times_of(rng, "exponential", sizes), 0.1)
        good = times < 1.0
        alone = fit_line(sizes[good], times[good])
        assert fit_line(sizes, times).intercept_s == pytest.approx(alone.intercept_s, abs=0.01 * MS)


@given(st.sets(st.integers(0, 15), max_size=4), st.sampled_from([0.0, 0.2, 2.0, 50.0]))
def test_a_quarter_of_the_samples_may_be_anything(places: set[int], wrong_s: float) -> None:
    sizes = np.tile(EIGHT, 2)
    times = times_of(default_rng(4), "uniform", sizes)
    times[sorted(places)] = wrong_s
    fit = fit_line(sizes, times)
    assert fit.intercept_s == pytest.approx(ALPHA_S, abs=2 * MS)
    assert fit.slope_s == pytest.approx(BETA_S, abs=0.5 * MS)


def test_lost_packets_are_outliers() -> None:
    """At 40 ms of round trip a lost packet costs about 140 ms more."""
    rng = default_rng(8)
    sizes = rng.integers(1, 9, 100).astype(float)
    times = ALPHA_S + rng.exponential(MS, 100) + np.where(rng.random(100) < 0.05, 0.140, 0.0)
    assert fit_line(sizes, times).intercept_high_s < ALPHA_S + 2 * MS


def test_a_slope_of_nothing_is_said_to_be_unknown() -> None:
    rng = default_rng(6)
    fits = [fit_line(EIGHT, ALPHA_S + rng.normal(0, MS, 8)) for _ in range(300)]
    assert sum(fit.slope_known for fit in fits) <= 0.06 * len(fits)
    assert sum(fit.slope_s == 0 for fit in fits) >= 0.4 * len(fits)  # not below
    assert all(fit.spread_enough and fit.slope_low_s == 0 for fit in fits if not fit.slope_known)


def test_a_slope_that_would_be_negative_is_nothing_and_the_intercept_is_fitted_anew() -> None:
    fit = fit_line(EIGHT, 0.1 - 0.01 * EIGHT)
    assert (fit.slope_s, fit.slope_known) == (0.0, False)
    assert fit.intercept_s == pytest.approx(0.055)


def test_an_intercept_that_would_be_negative_is_nothing_and_the_slope_is_fitted_anew() -> None:
    times = np.maximum(0.01 * EIGHT - 0.005, 0)
    fit = fit_line(EIGHT, times)
    assert (fit.intercept_s, fit.intercept_low_s) == (0.0, 0.0)
    assert fit.slope_s == pytest.approx(0.0091, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "enough"),
    [
        ([1, 2, 3, 1, 2], True),
        ([1, 2, 3, 1], False),  # four samples
        ([1, 2, 1, 2, 1, 2], False),  # two sizes
        ([10, 15, 19, 10, 15, 19], False),  # too close together
        ([10, 15, 20, 10, 15, 20], True),
        ([0, 1, 2, 0, 1], True),
        ([5] * 50, False),
    ],
)
def test_what_spread_a_slope_needs(sizes: list[float], enough: bool) -> None:
    fit = fit_line(sizes, [0.02 + 0.01 * size for size in sizes])
    assert fit.spread_enough is enough
    assert fit.slope_known is enough
    check(fit)


def test_nothing_and_a_single_sample() -> None:
    none, one = fit_line([], []), fit_line([4], [0.02])
    assert (none.intercept_s, none.intercept_high_s, none.slope_high_s, none.samples) == (0.0, math.inf, math.inf, 0)
    assert (one.intercept_s, one.slope_s, one.samples) == (0.02, 0.0, 1)
    assert not none.spread_enough and not one.spread_enough
    check(none)
    check(one)


@pytest.mark.parametrize("others", [[], [4.0], [40.0]])
def test_one_size_bounds_the_slope_by_the_line_from_the_origin(others: list[float]) -> None:
    fit = fit_line([4.0] * 20 + others, [*default_rng(1).normal(0.02, 1e-4, 20), *[9.0 for _ in others]])
    assert fit.intercept_s == pytest.approx(0.02, rel=0.01) and fit.intercept_low_s == 0.0
    assert fit.slope_high_s == pytest.approx(0.005, rel=0.01) and fit.slope_s == 0.0


def test_a_time_that_may_be_far_off_weighs_less() -> None:
    rng = default_rng(9)
    errors: list[list[float]] = [[], []]
    for _ in range(100):
        sizes = np.tile(EIGHT, 4)
        lags = np.where(rng.random(32) < 0.6, 0.02, 0.0)
        times = times_of(rng, "normal", sizes) + rng.uniform(-lags, lags)
        for i, told in enumerate((lags, None)):
            errors[i].append(fit_line(sizes, times, told).slope_s - BETA_S)
    weighed, not_weighed = (float(np.sqrt(np.mean(np.square(part)))) for part in errors)
    assert weighed < 0.4 * not_weighed


def test_quantiles_of_student() -> None:
    for freedom, wanted in ((1, 12.706), (2, 4.303), (3, 3.182), (6, 2.447), (30, 2.042), (1000, 1.962)):
        assert student_95(freedom) == pytest.approx(wanted, rel=0.01)


# --- estimates ---


def test_a_plan_can_be_made_once_alpha_and_gamma_are_known() -> None:
    assert Estimate().plan_figures() is None
    assert Estimate(alpha_s=0.01).plan_figures() is None
    assert Estimate(gamma_s=0.01, beta_s=0.1, gap_s=0.0).plan_figures() is None
    figures = Estimate(alpha_s=0.01, gamma_s=0.006).plan_figures()
    assert figures == PlanFigures(0.01, 0.0, 0.006, 0.01)  # a gap that nobody measured is the whole start-up
    assert figures is not None and sum(plan_for_run(20, *figures, one_each=False, compiled=False).sizes) == 20


def test_the_gap_is_never_above_alpha() -> None:
    assert Estimate(alpha_s=0.01, beta_s=1e-4, gamma_s=0.006, gap_s=0.02).plan_figures() == (0.01, 1e-4, 0.006, 0.01)


KNOWN = Estimate(alpha_s=0.02, beta_s=0.001, gamma_s=0.03, gap_s=0.001, tpt_s=0.05)


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("alpha", 0.0239, 0.0241),
        ("beta", 0.00119, 0.00079),
        ("gamma", 0.0241, 0.0361),
        ("gap", 0.00119, 0.0013),
        ("tpt", 0.041, 0.039),
    ],
)
def test_a_figure_has_changed_when_it_differs_by_more_than_the_share(name: str, same: float, other: float) -> None:
    def with_figure(value: float | None) -> Estimate:
        return replace(KNOWN, **{f"{name}_s": value})

    assert changed(KNOWN, with_figure(same)) == frozenset()
    assert changed(KNOWN, with_figure(other)) == {name}
    assert changed(KNOWN, with_figure(other), share=0.5) == frozenset()
    assert changed(with_figure(None), KNOWN) == {name}
    assert changed(KNOWN, with_figure(None)) == frozenset()


def test_differences_that_no_plan_notices_are_none() -> None:
    assert changed(Estimate(beta_s=1e-5), Estimate(beta_s=2e-5)) == frozenset()
    assert changed(Estimate(beta_s=0.0, alpha_s=1e-4), Estimate(beta_s=4e-5, alpha_s=4e-4)) == frozenset()
    assert changed(Estimate(beta_s=0.0), Estimate(beta_s=1e-4)) == {"beta"}
