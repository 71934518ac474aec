"""What the monitor makes of a run: links that are known, noise, lost packets, clocks that step, conditions that change.

Nothing here looks at a clock: times are drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesd.policy.estimate import SPREAD, Estimate, changed
from pipesd.policy.level import REMEMBERED, RUN
from pipesd.policy.monitor import LONGEST_S, PROBED_SIZES, REMEMBERED_ROUNDS, WARM_UP, Monitor

CLOUD_S = 0.040
HANDLING_S = 3e-5  # between two answers of a train, on average
MS = 1e-3


class Link(NamedTuple):
    """A link to simulate, in s; `lag` is how long an answer may lie unread."""

    alpha: float
    beta: float = 2e-6
    gap: float = 1e-4
    jitter: float = 0.5 * MS
    lag: float = 0.0
    lost: float = 0.0  # share of messages that take 200 ms more

    def delay(self, random: Random) -> float:
        return random.expovariate(1 / self.jitter) + (0.2 if random.random() < self.lost else 0.0)

    def trip(self, monitor: Monitor, random: Random, tokens: int) -> None:
        unread = random.uniform(0, self.lag)
        took = 2 * self.alpha + self.beta * tokens + CLOUD_S + self.delay(random) + unread
        monitor.round_trip(tokens, took, CLOUD_S, self.lag)

    def train(self, monitor: Monitor, random: Random) -> None:
        arrival, replies = 2 * self.alpha + self.beta + self.delay(random), []
        for tokens in range(1, 9):
            replies.append((tokens, arrival))
            arrival += self.gap + self.beta * (tokens + 1) + random.expovariate(1 / HANDLING_S)
        monitor.train(replies)


def observe(monitor: Monitor, link: Link, random: Random, count: int, sizes: Any = range(1, 9)) -> Iterator[Estimate]:
    for _ in range(count):
        link.trip(monitor, random, random.choice(list(sizes)))
        yield monitor.snapshot()


def known(link: Link, seed: int = 1, count: int = 60) -> tuple[Monitor, Random]:
    monitor, random = Monitor(), Random(seed)
    link.train(monitor, random)
    for _ in observe(monitor, link, random, count):
        pass
    return monitor, random


def number(value: float | None) -> float:
    assert value is not None
    return value


# --- what is known ---


def test_at_first_nothing_is_known() -> None:
    monitor = Monitor()
    assert monitor.snapshot() == Estimate()
    assert monitor.snapshot().plan_figures() is None
    assert monitor.needs_probes == (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("lost", [0.0, 0.1])
@pytest.mark.parametrize("lag", [0.0, 0.006])
@pytest.mark.parametrize(
    "link",
    [
        Link(0.010, 2e-6, 5e-5, 0.3 * MS),  # ids alone
        Link(0.010, 1.5e-4, 1e-4, 0.3 * MS),  # with 64 probabilities each
        Link(0.025, 0.116, 2e-3, 1 * MS),  # with whole distributions, at 20 Mbps
        Link(0.050, 1e-3, 1e-4, 2 * MS),
    ],
)
def test_links_are_recovered(link: Link, lag: float, lost: float) -> None:
    link = link._replace(lag=lag, lost=lost)
    estimate = known(link, seed=2, count=100)[0].snapshot()
    assert estimate.alpha_s == pytest.approx(link.alpha + link.jitter / 2, rel=0.05)
    assert estimate.gap_s == pytest.approx(link.gap + HANDLING_S, rel=0.5)
    assert estimate.rtt_s == pytest.approx(2 * link.alpha + link.jitter + 4.5 * link.beta, rel=0.08)
    if link.beta > 1e-5:
        assert estimate.beta_s == pytest.approx(link.beta, rel=0.1)
        assert not estimate.beta_is_zero
    else:
        assert (estimate.beta_s, estimate.beta_is_zero) == (0.0, True)


def test_beta_comes_from_round_trips_where_there_was_no_train() -> None:
    monitor, random = Monitor(), Random(3)
    link = Link(0.020, 2 * MS)
    *_, estimate = observe(monitor, link, random, 100)
    assert estimate.beta_s == pytest.approx(link.beta, rel=0.05)  # not half of it: answers do not grow
    assert estimate.gap_s is None
    assert estimate.samples == 100 - WARM_UP


def test_of_a_link_without_beta_almost_never_anything_but_zero_is_told() -> None:
    told = []
    for seed in range(40):
        monitor = Monitor()
        *_, estimate = observe(monitor, Link(0.020, 0.0), Random(seed), 30)
        told.append(estimate.beta_is_zero)
        assert 0 <= number(estimate.beta_s) < 0.2 * MS
    assert sum(told) >= 38


def test_without_spread_beta_is_not_known_and_then_stays_the_last_known() -> None:
    monitor, random = Monitor(), Random(4)
    *_, estimate = observe(monitor, Link(0.02, 2 * MS), random, 40, sizes=[4])
    assert estimate.beta_s is None and not estimate.beta_is_zero
    assert estimate.alpha_s == pytest.approx(0.02 + 4 * MS, rel=0.05)  # one size cannot tell the two apart
    monitor, random = known(Link(0.02, 2 * MS))
    before = number(monitor.snapshot().beta_s)
    *_, estimate = observe(monitor, Link(0.1, 2 * MS), random, 100, sizes=[4])
    assert estimate.beta_s == before == pytest.approx(2 * MS, rel=0.05)
    assert estimate.alpha_s == pytest.approx(0.1, rel=0.05)


def test_gamma_is_that_of_steady_drafting() -> None:
    monitor, random = Monitor(), Random(5)
    for _ in range(30):
        for place in range(6):  # the first token after a rollback takes three times as long
            monitor.drafted(0.03 * random.uniform(0.9, 1.1) * (3 if place == 0 else 1))
        monitor.snapshot()
    assert monitor.snapshot().gamma_s == pytest.approx(0.03, rel=0.02)


def test_the_passes_of_the_cloud() -> None:
    monitor = Monitor()
    for pass_s in (0.5, 0.04, 0.04, 2.0, 0.042, 0.041, 0.039):
        monitor.passed(pass_s)
    assert monitor.snapshot().pass_s == pytest.approx(0.0404)


def test_time_per_output_token_leaves_pauses_out() -> None:
    monitor = Monitor()
    monitor.committed(0, 100.0)
    monitor.committed(4, 100.2)
    monitor.committed(1, 100.3)
    assert monitor.snapshot().tpt_s == pytest.approx(0.3 / 5)
    monitor.paused()
    monitor.committed(3, 150.0)  # only starts the clock
    monitor.committed(0, 150.1)  # a verdict without an id: its time is the next one's
    monitor.committed(2, 150.3)
    assert monitor.snapshot().tpt_s == pytest.approx(0.6 / 7)


def test_time_per_output_token_is_that_of_the_last_rounds() -> None:
    monitor = Monitor()
    now_s = 0.0
    for took_s in [0.5] * 50 + [0.1] * 32:
        monitor.committed(2, now_s)
        now_s += took_s
    monitor.committed(2, now_s)
    assert monitor.snapshot().tpt_s == pytest.approx(0.05)


# --- warm-up, outliers, lag ---


def test_the_first_three_round_trips_do_not_count() -> None:
    """A connection's first messages can take 50 times as long."""
    monitor, random, link = Monitor(), Random(6), Link(0.01)
    for _ in range(WARM_UP):
        Link(0.5).trip(monitor, random, 1)
        assert monitor.snapshot().alpha_s == pytest.approx(0.5, rel=0.01)  # better than nothing
    for estimate in observe(monitor, link, random, 20):
        assert estimate.alpha_s == pytest.approx(0.01, rel=0.12)
    assert monitor.snapshot().samples == 20


def test_a_warm_up_goes_by_its_shortest_round_trip() -> None:
    monitor = Monitor()
    for took_s in (0.5, 0.02, 0.5):
        monitor.round_trip(1, took_s, 0.0)
    assert monitor.snapshot().alpha_s == 0.01


def test_probes_that_start_slowly() -> None:
    monitor, random, link = Monitor(), Random(7), Link(0.01)
    monitor.train([(tokens, 1.0 if tokens <= 3 else 1.0 + 1e-4 * tokens) for tokens in range(1, 9)])
    *_, estimate = observe(monitor, link, random, WARM_UP + 2)
    assert estimate.alpha_s == pytest.approx(0.01, rel=0.12)
    assert number(estimate.gap_s) < 0.5 * MS


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_lost_packets_move_nothing(share: float) -> None:
    for seed in range(5):
        link = Link(0.02, lost=share)
        monitor, random = known(link, seed)
        for estimate in observe(monitor, link, random, 150):
            assert estimate.alpha_s == pytest.approx(0.02, rel=0.05)


def test_an_answer_that_may_have_lain_unread_counts_by_its_middle() -> None:
    monitor = Monitor()
    for _ in range(20):
        monitor.round_trip(1, 0.07, CLOUD_S, 0.01)
    assert monitor.snapshot().alpha_s == pytest.approx(0.0125)


def test_a_precise_round_trip_weighs_more_than_one_with_lag() -> None:
    errors = []
    for seed in range(20):
        monitor, random = Monitor(), Random(seed)
        for count in range(40):
            Link(0.02, lag=0.0 if count % 4 == 0 else 0.03).trip(monitor, random, 1 + count % 8)
        errors.append(abs(number(monitor.snapshot().alpha_s) - 0.02025))
    assert sorted(errors)[10] < 0.2 * MS  # the mean of all would be off by 0.6 ms and more


def beat(monitor: Monitor, link: Link, count: int, step_s: float = 0.036) -> None:
    """Round trips that are read at a steady beat: each size always too late by as much."""
    for place in range(count):
        tokens = 1 + place % 3
        took = 2 * link.alpha + link.beta * tokens + CLOUD_S
        monitor.round_trip(tokens, math.ceil(took / step_s) * step_s, CLOUD_S, step_s)


def test_a_few_precise_round_trips_tell_more_than_many_that_are_read_at_a_steady_beat() -> None:
    monitor, link = Monitor(), Link(0.020, 0.0, jitter=1e-6)
    beat(monitor, link, 40)
    for _ in range(3):
        link.trip(monitor, Random(1), 1)
    beat(monitor, link, 40)
    assert monitor.snapshot().alpha_s == pytest.approx(0.020, rel=0.01)


def test_a_steady_beat_makes_no_slope() -> None:
    """One to three tokens read at 144 and 180 ms are no 18 ms a token."""
    link = Link(0.025, 0.029, 0.025, jitter=1e-6)
    monitor, _ = known(link, count=0)
    before = number(monitor.snapshot().beta_s)
    beat(monitor, link, 100)
    assert monitor.snapshot().beta_s == before == pytest.approx(link.beta, rel=0.01)
    unknown = Monitor()
    beat(unknown, link, 100)
    assert unknown.snapshot().beta_s is None


def test_a_lag_longer_than_the_round_trip_takes_nothing_below_zero() -> None:
    monitor = Monitor()
    for _ in range(10):
        monitor.round_trip(2, 0.05, CLOUD_S, 5.0)
    assert monitor.snapshot().alpha_s == pytest.approx(0.0025)


# --- clocks ---

BAD = [-2.0, -1e-9, float("nan"), float("inf"), -float("inf"), LONGEST_S + 1]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_duration_is_dropped_and_counted(bad: float) -> None:
    monitor, _ = known(Link(0.02))
    monitor.drafted(0.03)
    monitor.passed(0.04)
    before = monitor.snapshot()
    monitor.drafted(bad)
    monitor.passed(bad)
    monitor.round_trip(3, bad, 0.0)
    monitor.train([(1, bad)])
    assert monitor.dropped == 4
    assert monitor.snapshot() == before
    for cloud_s, lag_s in ((bad, 0.0), (0.0, bad)):
        if bad != LONGEST_S + 1:
            monitor.round_trip(3, 0.05, cloud_s, lag_s if lag_s != math.inf else -1.0)
    assert monitor.dropped == 4 + 2 * (bad != LONGEST_S + 1)
    assert monitor.snapshot() == before


def test_a_cloud_whose_own_time_is_longer_than_the_round_trip_is_not_believed() -> None:
    monitor = Monitor()
    monitor.round_trip(1, 0.02, 3600.0)
    assert (monitor.dropped, monitor.snapshot()) == (1, Estimate())


def test_a_clock_that_steps_back_in_a_round_loses_that_round_alone() -> None:
    monitor = Monitor()
    for now_s in (10.0, 10.1, 8.2, 8.3):
        monitor.committed(1, now_s)
    assert monitor.dropped == 1
    assert monitor.snapshot().tpt_s == pytest.approx(0.1)
    monitor.committed(1, float("nan"))
    monitor.committed(-1, 8.4)
    assert monitor.dropped == 3


def test_a_reply_that_came_before_the_one_before_it_is_dropped() -> None:
    monitor = Monitor()
    monitor.train([(1, 0.02), (2, 0.0202), (3, 0.01), (4, 0.0204), (5, 0.0206)])
    assert monitor.dropped == 1
    assert monitor.snapshot().gap_s == pytest.approx(2e-4)


# --- the gap ---


def test_answers_that_are_read_in_pairs_do_not_change_the_gap() -> None:
    monitor = Monitor()
    monitor.train([(tokens, 0.1 + 4e-3 * (tokens // 2)) for tokens in range(1, 9)])
    assert monitor.snapshot().gap_s == pytest.approx(2e-3, rel=0.2)


def test_a_delay_within_a_train_is_no_gap() -> None:
    for late in range(2, 9):
        monitor = Monitor()
        monitor.train([(tokens, 0.1 + 1e-3 * tokens + (0.2 if tokens >= late else 0)) for tokens in range(1, 9)])
        assert monitor.snapshot().gap_s == pytest.approx(1e-3, rel=0.05)


def test_the_gap_is_at_most_alpha() -> None:
    monitor = Monitor()
    monitor.train([(1, 0.01), (1, 0.03), (1, 0.05)])
    assert monitor.snapshot().gap_s == monitor.snapshot().alpha_s == 0.005


def test_a_gap_that_would_be_negative_is_nothing() -> None:
    monitor, _ = known(Link(0.02, 2 * MS))
    before = number(monitor.snapshot().gap_s)
    for _ in range(4):
        monitor.train([(8, 0.06), (8, 0.061)])  # its answers came more closely than β allows
    assert before > 0 and monitor.snapshot().gap_s == 0.0


# --- change ---


def until_known(alpha: float, monitor: Monitor, link: Link, random: Random) -> int:
    """Samples until α is within 30 % of what it has become."""
    for count, estimate in enumerate(observe(monitor, link, random, 100), start=1):
        if abs(number(estimate.alpha_s) - alpha) < 0.3 * alpha:
            return count
    return 101


@pytest.mark.parametrize(
    ("before", "after", "lag"),
    [(0.005, 0.120, lag) for lag in (0.0, 0.006, 0.036)]
    + [(0.120, 0.005, lag) for lag in (0.0, 0.006)]  # what is smaller than the lag is seen later
    + [(0.005, 0.015, lag) for lag in (0.0, 0.006)],
)
def test_a_link_that_changes_is_followed_within_eight_samples(before: float, after: float, lag: float) -> None:
    for seed in range(10):
        link = Link(before, lag=lag)
        monitor, random = known(link, seed)
        assert until_known(after, monitor, link._replace(alpha=after), random) <= 8
        assert 5 <= monitor.snapshot().samples < 12  # nothing of before counts any more


def test_a_link_that_changes_is_followed_although_packets_are_lost() -> None:
    counts = []
    for seed in range(20):
        monitor, random = known(Link(0.005), seed)
        counts.append(until_known(0.120, monitor, Link(0.120, lost=0.1), random))
    assert max(counts) <= 12 and sorted(counts)[15] <= 8


def test_drafting_that_slows_down_is_followed_within_eight_tokens() -> None:
    for seed in range(20):
        monitor, random = Monitor(), Random(seed)
        for _ in range(100):
            monitor.drafted(random.lognormvariate(math.log(0.02), 0.1))
            monitor.snapshot()
        old = monitor.snapshot()
        for _ in range(8):
            monitor.drafted(random.lognormvariate(math.log(0.04), 0.1))
        assert monitor.snapshot().gamma_s == pytest.approx(0.04, rel=0.15)
        assert changed(old, monitor.snapshot()) == {"gamma"}


def test_a_thinner_link_is_seen_by_the_time_that_tokens_take() -> None:
    monitor, random = known(Link(0.025, 0.116, 2e-3))
    for tokens in (1, 5, 3, 8, 2):
        Link(0.025, 0.232, 2e-3).trip(monitor, random, tokens)
    estimate = monitor.snapshot()
    assert estimate.beta_s == pytest.approx(0.232, rel=0.02)
    assert estimate.alpha_s == pytest.approx(0.025, rel=0.3)


def test_a_beta_that_may_matter_is_not_taken_for_zero_because_it_is_not_sure() -> None:
    for seed in range(10):
        monitor, random = known(Link(0.025, 0.145, 2e-3), seed)
        *_, estimate = observe(monitor, Link(0.025, 0.029, jitter=0.03), random, 10)
        assert 0.015 < number(estimate.beta_s) < 0.12  # another than before, and not 0
        monitor, random = known(Link(0.025), seed)
        *_, estimate = observe(monitor, Link(0.025, 0.029, jitter=0.03), random, 10)
        assert 0.01 < number(estimate.beta_s) < 0.06


def test_a_beta_that_cannot_matter_is_zero_once_it_is_not_seen_any_more() -> None:
    for seed in range(10):
        monitor, random = known(Link(0.025, 0.145, 2e-3), seed)
        *_, estimate = observe(monitor, Link(0.025), random, 30)
        assert number(estimate.beta_s) < 0.5 * MS


def test_a_beta_known_well_is_not_given_up_for_one_known_less_that_agrees() -> None:
    monitor, random = known(Link(0.02, 1 * MS))
    before = number(monitor.snapshot().beta_s)
    *_, estimate = observe(monitor, Link(0.1, 1 * MS, jitter=6 * MS), random, 30)
    assert estimate.beta_s == before == pytest.approx(1 * MS, rel=0.05)


def test_a_round_trip_shorter_than_its_tokens_should_take_leaves_alpha_at_nothing() -> None:
    monitor = Monitor()
    monitor.train([(1, 0.001), (2, 0.2), (3, 0.5), (4, 0.9), (5, 1.4), (6, 2.0), (7, 2.7)])
    assert monitor.snapshot().beta_s == pytest.approx(0.1, rel=0.01)
    assert (monitor.snapshot().alpha_s, monitor.snapshot().gap_s) == (0.0, 0.0)


def test_a_wider_link_leaves_no_negative_alpha_though_it_shows_one_size_only() -> None:
    monitor, random = known(Link(0.025, 0.232, 2e-3))
    link = Link(0.025, 0.116, 2e-3)
    *_, estimate = observe(monitor, link, random, 30, sizes=[4])
    message_s = 2 * number(estimate.alpha_s) + 4 * number(estimate.beta_s)
    assert message_s == pytest.approx(2 * link.alpha + 4 * link.beta, rel=0.02)


def test_an_estimate_does_not_flap_under_jitter() -> None:
    """The updater's question is asked after each round; on a steady link the answer is no."""
    monitor, random = known(Link(0.02, jitter=4 * MS, lost=0.05))
    held = monitor.snapshot()
    for estimate in observe(monitor, Link(0.02, jitter=4 * MS, lost=0.05), random, 500):
        assert changed(held, estimate) == frozenset()


# --- probes ---


def test_probes_are_wanted_until_eight_sizes_were_seen() -> None:
    monitor, random = Monitor(), Random(8)
    for _ in range(WARM_UP):
        Link(0.02).trip(monitor, random, 3)
    assert monitor.needs_probes == (1, 2, 3, 4, 5, 6, 7, 8)  # a warm-up is no sight of a size
    for tokens in (3, 5, 20):
        Link(0.02).trip(monitor, random, tokens)
    assert monitor.needs_probes == (1, 2, 4, 6, 7)
    for tokens in monitor.needs_probes:
        Link(0.02).trip(monitor, random, tokens)
    assert monitor.needs_probes == ()


def test_a_train_is_a_sight_of_its_sizes_and_a_change_asks_for_another() -> None:
    monitor, random = known(Link(0.005), count=30)
    assert monitor.needs_probes == ()
    for _ in observe(monitor, Link(0.12), random, RUN, sizes=[2]):
        pass
    assert monitor.needs_probes == (1, 3, 4, 5, 6, 7, 8)
    Link(0.12).train(monitor, random)
    assert monitor.needs_probes == ()


def test_sizes_too_close_together_ask_for_a_small_one() -> None:
    monitor, random = Monitor(), Random(9)
    for _ in observe(monitor, Link(0.02), random, 60, sizes=range(20, 30)):
        pass
    assert monitor.needs_probes == (1,)
    Link(0.02).trip(monitor, random, 1)
    assert monitor.needs_probes == ()


def test_old_knowledge_asks_for_a_probe() -> None:
    monitor, random = known(Link(0.02))
    for _ in range(2001):
        assert monitor.needs_probes == ()
        monitor.drafted(0.006)
    assert monitor.needs_probes == (1,)
    Link(0.02).trip(monitor, random, 1)
    assert monitor.needs_probes == ()


# --- snapshots ---


def test_a_snapshot_is_the_same_object_until_something_was_seen_and_cannot_be_altered() -> None:
    monitor, _ = known(Link(0.02))
    held = monitor.snapshot()
    assert monitor.snapshot() is held
    with pytest.raises(dataclasses.FrozenInstanceError):
        held.alpha_s = 1.0  # type: ignore[misc]
    copy = dataclasses.astuple(held)
    for act in (
        lambda: monitor.drafted(0.5),
        lambda: monitor.round_trip(1, 0.5, 0.1),
        lambda: monitor.passed(0.5),
        lambda: monitor.committed(1, 1.0),
        lambda: monitor.train([(1, 0.1), (2, 0.2)]),
    ):
        before = monitor.snapshot()
        act()
        assert monitor.snapshot() is not before
    assert dataclasses.astuple(held) == copy


durations = st.floats(0, 1) | st.floats(allow_nan=True, allow_infinity=True) | st.just(0.0)
events = st.one_of(
    st.tuples(st.just("drafted"), durations),
    st.tuples(st.just("passed"), durations),
    st.tuples(st.just("round_trip"), st.integers(0, 50), durations, durations, durations),
    st.tuples(st.just("train"), st.lists(st.tuples(st.integers(0, 50), durations), max_size=9)),
    st.tuples(st.just("committed"), st.integers(0, 5), durations),
    st.tuples(st.just("paused")),
)


@given(st.lists(events, max_size=60))
def test_whatever_is_seen_no_figure_is_negative_or_nan(seen: list[tuple[Any, ...]]) -> None:
    monitor = Monitor()
    for name, *arguments in seen:
        getattr(monitor, name)(*arguments)
        estimate = monitor.snapshot()
        for name, value in estimate.figures().items():
            assert value is None or (value >= 0 and math.isfinite(value)), name
        assert estimate.gap_s is None or estimate.gap_s <= number(estimate.alpha_s)
        assert not estimate.beta_is_zero or estimate.beta_s == 0
        figures = estimate.plan_figures()
        assert (figures is None) == (estimate.alpha_s is None or estimate.gamma_s is None)
        assert all(size >= 1 for size in monitor.needs_probes)


@given(st.lists(events, max_size=60), st.integers(1, 4))
def test_what_is_summed_as_it_comes_is_the_sum(seen: list[tuple[Any, ...]], times: int) -> None:
    """The time of a round trip is that of the mean message of those remembered, the time per token that of the rounds:
    as from all of them anew, bit by bit."""
    monitor = Monitor()
    for name, *arguments in seen * times:
        getattr(monitor, name)(*arguments)
        estimate, trips = monitor.snapshot(), list(monitor._trips)
        assert len(trips) == estimate.samples <= REMEMBERED
        if estimate.alpha_s is not None:
            mean = fmean(tokens for tokens, _, _ in trips)
            assert estimate.rtt_s == 2 * estimate.alpha_s + (estimate.beta_s or 0.0) * mean
        rounds = list(zip(monitor._round_tokens, monitor._round_times_s, strict=True))[-REMEMBERED_ROUNDS:]
        assert estimate.tpt_s == (sum(s for _, s in rounds) / sum(n for n, _ in rounds) if rounds else None)
        sizes = monitor._sizes
        unseen = [size for size in range(1, 100) if size not in sizes]
        close = len(sizes) >= PROBED_SIZES and max(sizes) < SPREAD * min(sizes)
        asked = tuple(unseen[: max(0, PROBED_SIZES - len(sizes))]) or ((1,) if close else ())
        assert monitor.needs_probes == asked
        assert 0 <= estimate.samples <= 100


def test_what_a_pass_without_drafts_takes_is_told_from_passes_with_them() -> None:
    """40 ms and 3 for each draft token: what the cloud alone takes is 40, not the mean of what verifications take."""
    chance = Random(3)
    monitor = Monitor()
    assert monitor.snapshot().alone_s is None
    monitor.passed(0.052, 4)
    assert monitor.snapshot().alone_s == pytest.approx(0.052), "one size tells no more"
    for _ in range(60):
        tokens = chance.randrange(1, 9)
        monitor.passed(0.040 + 0.003 * tokens + 0.3 * (chance.random() < 0.05), tokens)
    estimate = monitor.snapshot()
    assert estimate.alone_s == pytest.approx(0.040, abs=0.002)
    assert estimate.pass_s is not None and estimate.pass_s > 0.045
