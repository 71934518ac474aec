"""Plans against every possible one, their choice among ties, the cursor, the other rules, the window."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import pipesd
from pipesd.errors import UsageError
from pipesd.policy import token_batches
from pipesd.policy.token_batches import (
    BATCHINGS,
    FIRST_WINDOW,
    LONGEST_S,
    LONGEST_WINDOW,
    Batching,
    TokenBatchPlan,
    Window,
    make_batching,
    plan_for_run,
    plan_of,
    plan_token_batches,
)

Number = TypeVar("Number", float, Fraction)
PAPER = (0.025, 0.116, 0.036)  # α, β, γ: a fat payload at 20 Mbps


def splits(window: int) -> Iterator[tuple[int, ...]]:
    """Every split of a window into token batches: a cut or none behind each token but the last."""
    for cuts in range(1 << (window - 1)):
        ends = [j for j in range(1, window) if cuts >> (j - 1) & 1] + [window]
        yield tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def arrival(sizes: tuple[int, ...], alpha: Number, beta: Number, gamma: Number, gap: Number) -> Number:
    """When the last token arrives, step by step as the model says, in the arithmetic of the arguments."""
    end = 0 * alpha
    drafted = 0
    for size in sizes:
        drafted += size
        start: Number = gamma * drafted
        end = (start if start > end else end) + (gap + beta * size)
    return end + (alpha - gap)


def chosen(window: int, link: Sequence[Fraction], gain: Fraction) -> tuple[int, ...]:
    """The plan that the definition names, of all there are."""
    totals = {sizes: arrival(sizes, *link) for sizes in splits(window)}
    best = min(totals.values())
    tie = max(min(best, Fraction(1)) * Fraction(1, 10**9), best * Fraction(1, 10**11))
    good = {sizes: total for sizes, total in totals.items() if total <= best + max(tie, gain * best)}
    fewest = min(map(len, good))
    least = min(total for sizes, total in good.items() if len(sizes) == fewest)
    tied = [sizes for sizes, total in good.items() if len(sizes) == fewest and total <= least + tie]
    return min(tied, key=lambda sizes: sizes[::-1])


def tie_s(total_s: float) -> float:
    """What ties with a total, and what adding up its dozen terms may round away."""
    return max(min(1e-9 * total_s, 1e-9), 1e-11 * total_s) + 1e-14 * total_s


# Times from nothing to a day, with those that are equal or a million times each other drawn often.
ordinary = st.floats(1e-6, 10.0)
scales = st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6])
times = st.one_of(ordinary, scales, st.builds(float.__mul__, ordinary, scales), st.floats(0.0, 86_400.0))


@st.composite
def links(draw: st.DrawFn, time: st.SearchStrategy[float] = times) -> tuple[float, float, float, float]:
    """(α, β, γ, gap)"""
    alpha = draw(time)
    beta, gamma = (draw(st.one_of(time, st.just(alpha))) for _ in range(2))
    share = draw(st.one_of(st.sampled_from([0.0, 1e-6, 1.0]), st.floats(0.0, 1.0)))
    return alpha, beta, gamma, min(alpha * share, alpha)


# Times that are whole numbers of 1/1024 s add up without rounding, so what ties is the same in any order of adding.
exact_links = st.tuples(*[st.integers(0, 200)] * 4).map(
    lambda ticks: (max(ticks[0], ticks[3]) / 1024, ticks[1] / 1024, ticks[2] / 1024, ticks[3] / 1024)
)


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def compiled(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("numba")
        assert token_batches.warmup()
    return bool(request.param)


@pytest.mark.parametrize(
    ("window", "best", "at_once", "one_each"), [(6, 0.807, 0.937, 0.882), (20, 2.456, 3.065, 2.856)]
)
def test_the_papers_operating_point(window: int, best: float, at_once: float, one_each: float, compiled: bool) -> None:
    plan = plan_token_batches(window, *PAPER, compiled=compiled)
    assert plan.total_s == pytest.approx(best, rel=1e-12)
    assert plan_of((window,), *PAPER).total_s == pytest.approx(at_once, rel=1e-12)
    assert plan_of((1,) * window, *PAPER).total_s == pytest.approx(one_each, rel=1e-12)


def test_three_plans_attain_the_papers_best_for_six() -> None:
    best = {sizes for sizes in splits(6) if arrival(sizes, 0.025, 0.116, 0.036, 0.025) < 0.807 + 1e-9}
    assert best == {(1, 1, 4), (1, 2, 3), (1, 3, 2)}
    assert plan_token_batches(6, *PAPER).sizes == (1, 3, 2)


@pytest.mark.parametrize("window", range(1, 13))
@given(link=links())
@example(link=(0.0, 0.0, 0.0, 0.0))
@example(link=(1.0, 1.0, 1.0, 1.0))
@example(link=(1e6, 1.0, 1e-6, 1e6))
@example(link=(1e-6, 1.0, 1e6, 0.0))
@example(link=(5e-324, 5e-324, 5e-324, 0.0))
def test_the_total_is_the_best_of_all_splits(window: int, link: tuple[float, float, float, float]) -> None:
    best = min(arrival(sizes, *link) for sizes in splits(window))
    plan = plan_token_batches(window, *link)
    assert best <= plan.total_s <= best + tie_s(best)
    assert sum(plan.sizes) == window and min(plan.sizes) >= 1
    assert plan.total_s == arrival(plan.sizes, *link)


@given(st.integers(1, 9), links())
def test_the_total_is_the_best_without_any_rounding(window: int, link: tuple[float, float, float, float]) -> None:
    precise = [Fraction(value) for value in link]
    best = float(min(arrival(sizes, *precise) for sizes in splits(window)))
    assert plan_token_batches(window, *link).total_s == pytest.approx(best, rel=1.1e-9, abs=1e-300)


@given(st.integers(1, 10), exact_links, st.sampled_from([0.0, 1 / 64, 1 / 8, 1.0]))
@example(6, (25 / 1024, 116 / 1024, 36 / 1024, 25 / 1024), 0.0)
def test_of_plans_that_tie_the_defined_one_is_taken(
    window: int, link: tuple[float, float, float, float], gain: float
) -> None:
    plan = plan_token_batches(window, *link, gain=gain)
    assert plan.sizes == chosen(window, [Fraction(value) for value in link], Fraction(gain))


@pytest.mark.parametrize("seconds", [1.0, 1e-6, 1e3])
@pytest.mark.parametrize(("off", "ties"), [(0.5, True), (2.0, False)])
def test_what_ties(seconds: float, off: float, ties: bool) -> None:
    """With gap 0 two tokens at once end at 2γ + 2β, one by one at 2γ + β: they differ by β."""
    beta_s = gamma_s = off * tie_s(seconds)
    assert plan_token_batches(2, seconds, beta_s, gamma_s, 0.0).sizes == ((2,) if ties else (1, 1))


@given(st.integers(1, 300), links(), st.sampled_from([0.0, 0.01, 0.5]))
@example(LONGEST_WINDOW, (0.025, 0.5, 0.001, 0.001), 0.01)
def test_compiled_and_plain_give_the_same_bits(
    window: int, link: tuple[float, float, float, float], gain: float
) -> None:
    pytest.importorskip("numba")
    fast, plain = (plan_token_batches(window, *link, gain=gain, compiled=compiled) for compiled in (True, False))
    assert fast == plain
    assert all(type(size) is int for size in fast.sizes) and type(fast.total_s) is float


@given(st.integers(1, 60), links(), st.sampled_from(range(5)), st.floats(1.0, 2.0), times)
def test_the_best_total_never_falls_when_anything_grows(
    window: int, link: tuple[float, float, float, float], which: int, factor: float, more: float
) -> None:
    grown = [*link, window]
    grown[which] = window + 1 if which == 4 else grown[which] * factor + more
    alpha, beta, gamma, gap, longer = grown
    assume(gap <= alpha)
    before = plan_token_batches(window, *link).total_s
    after = plan_token_batches(int(longer), alpha, beta, gamma, gap).total_s
    assert after >= before - tie_s(before)


@given(st.integers(1, 60), links())
def test_a_gap_of_alpha_is_the_papers_model(window: int, link: tuple[float, float, float, float]) -> None:
    alpha, beta, gamma, gap = link
    hockney = plan_token_batches(window, alpha, beta, gamma)
    assert hockney == plan_token_batches(window, alpha, beta, gamma, alpha)
    assert hockney.link_model == "hockney"
    streamed = plan_token_batches(window, *link)
    assert streamed.link_model == ("hockney" if gap == alpha else "streamed")
    assert streamed.total_s <= hockney.total_s * (1 + 1e-8)


@given(st.integers(1, 60), links())
def test_one_token_a_message_is_best_where_the_link_keeps_up(
    window: int, link: tuple[float, float, float, float]
) -> None:
    alpha, beta, gamma, gap = link
    assume(gap + beta <= gamma)
    single = plan_of((1,) * window, *link)
    assert plan_token_batches(window, *link).total_s == pytest.approx(single.total_s, rel=1e-8, abs=1e-300)
    assert single.total_s == pytest.approx(gamma * window + gap + beta + (alpha - gap), rel=1e-9, abs=1e-300)


@given(st.integers(1, 60), links())
def test_the_timeline_adds_up(window: int, link: tuple[float, float, float, float]) -> None:
    alpha, beta, gamma, gap = link
    plan = plan_token_batches(window, *link)
    steps = plan.timeline()
    assert tuple(step.tokens for step in steps) == plan.sizes
    assert steps[-1].end_s + (alpha - gap) == plan.total_s
    free_s = 0.0
    for step, upto in zip(steps, accumulate(plan.sizes), strict=True):
        assert (step.drafting_s, step.drafted_s) == (gamma * (upto - step.tokens), gamma * upto)
        assert step.start_s == max(free_s, step.drafted_s)
        assert step.end_s == step.start_s + (gap + beta * step.tokens)
        free_s = step.end_s


def test_a_plan_is_frozen_and_says_what_it_was_made_for() -> None:
    plan = plan_token_batches(6, 0.025, 0.116, 0.036, 0.01)
    assert plan.window == 6
    assert (plan.alpha_s, plan.beta_s, plan.gamma_s, plan.gap_s) == (0.025, 0.116, 0.036, 0.01)
    with pytest.raises(AttributeError):
        plan.sizes = (6,)  # type: ignore[misc]
    assert hash(plan) == hash(plan_token_batches(6, 0.025, 0.116, 0.036, 0.01))


def test_the_public_names() -> None:
    assert pipesd.plan_token_batches is plan_token_batches
    assert pipesd.TokenBatchPlan is TokenBatchPlan


GOOD: dict[str, object] = {"window": 6, "alpha_s": 0.2, "beta_s": 0.1, "gamma_s": 0.1, "gap_s": 0.1}
NO_NUMBERS = [True, False, "1", b"1", None, [1.0], 1j, np.array(1.0), math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, -5e-324, 2e9, 10**400, np.bool_(True)], ids=repr)
def test_what_is_no_time_and_no_window_is_refused_by_name(name: str, value: object) -> None:
    if name == "gap_s" and value is None:
        return  # that is the default
    with pytest.raises(UsageError, match=rf"^{name}: got .*, wanted") as raised:
        plan_token_batches(**{**GOOD, name: value})  # type: ignore[arg-type]
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2


@pytest.mark.parametrize("window", [0, -1, LONGEST_WINDOW + 1, 6.0, 6.5, np.float64(6)])
def test_a_window_is_a_whole_number_within_its_limit(window: int) -> None:
    with pytest.raises(UsageError, match=f"^window: got .*, wanted a whole number of tokens, 1 to {LONGEST_WINDOW}$"):
        plan_token_batches(window, 0.1, 0.1, 0.1)


def test_a_gap_beyond_alpha_is_refused() -> None:
    assert plan_token_batches(2, 0.1, 0.1, 0.1, 0.1).gap_s == 0.1
    with pytest.raises(UsageError, match=r"^gap_s: got 0\.2, wanted at most alpha_s, 0\.1"):
        plan_token_batches(2, 0.1, 0.1, 0.1, 0.2)


@pytest.mark.parametrize("gain", [-0.1, 1.1, math.nan, True, "1"])
def test_a_gain_is_a_share(gain: float) -> None:
    with pytest.raises(UsageError, match=r"^gain: got"):
        plan_token_batches(2, 0.1, 0.1, 0.1, gain=gain)


def test_numbers_of_any_kind_are_taken(compiled: bool) -> None:
    wanted = plan_token_batches(6, 1.0, 0.5, 2.0, 0.0, compiled=compiled)
    for number in (np.float64, np.float32, Fraction, lambda value: int(value) if value == int(value) else value):
        times_s = [number(value) for value in (1.0, 0.5, 2.0, 0.0)]
        plan = plan_token_batches(np.int64(6), *times_s, compiled=compiled)  # type: ignore[arg-type]
        assert plan == wanted and all(type(value) is float for value in (plan.alpha_s, plan.gap_s))
    assert plan_token_batches(LONGEST_WINDOW, LONGEST_S, LONGEST_S, LONGEST_S).total_s < math.inf


def test_at_run_time_small_gains_count_as_none() -> None:
    best = plan_token_batches(20, *PAPER)
    plan = plan_for_run(20, *PAPER, 0.025, one_each=False)
    assert len(plan.sizes) < len(best.sizes) and best.total_s < plan.total_s <= 1.01 * best.total_s
    assert plan_for_run(20, 0.025, 0.001, 0.036, 0.001, one_each=True).sizes == (1,) * 20
    assert len(plan_for_run(20, 0.025, 0.001, 0.036, 0.001, one_each=False).sizes) < 20
    assert plan_for_run(20, *PAPER, 0.025, one_each=True) == best, "one each would be a sixth slower"
    assert plan_for_run(20, *PAPER, 0.026, one_each=False) == plan, "a gap beyond alpha is noise"


# ---- the cursor and the other rules


@pytest.mark.parametrize(("name", "sent"), [("dp", "102001"), ("immediate", "111111"), ("none", "000000")])
def test_what_goes_after_each_token(name: str, sent: str) -> None:
    rule = make_batching(name, plan_of((1, 2, 3), *PAPER))
    assert "".join(str(rule.drafted(True)) for _ in range(3)) == sent[:3]


def test_a_plan_repeats_over_windows() -> None:
    cursor = plan_of((1, 3, 2), *PAPER).cursor()
    assert [cursor.drafted() for _ in range(14)] == [1, 0, 0, 3, 0, 2, 1, 0, 0, 3, 0, 2, 1, 0]
    assert cursor.waiting == 1


@pytest.mark.parametrize("name", BATCHINGS)
def test_the_trigger_sends_all_that_waits_and_ends_the_period(name: str) -> None:
    rule = make_batching(name, plan_of((2, 3), *PAPER))
    sent = sum(rule.drafted(False) for _ in range(4))
    assert rule.waiting == 4 - sent
    assert rule.flush() == 4 - sent
    assert (rule.waiting, rule.flush()) == (0, 0)
    if name == "dp":
        assert [rule.drafted(False) for _ in range(5)] == [0, 2, 0, 0, 3], "a new period began"


@pytest.mark.parametrize("name", BATCHINGS)
def test_a_rejection_forgets_what_waits_and_ends_the_period(name: str) -> None:
    rule = make_batching(name, plan_of((2, 3), *PAPER))
    for _ in range(4):
        rule.drafted(False)
    rule.reset()
    assert (rule.waiting, rule.flush()) == (0, 0)
    if name == "dp":
        rule.drafted(False)
        assert rule.drafted(False) == 2


def test_greedy_sends_what_has_gathered_when_the_link_is_idle() -> None:
    rule = make_batching("greedy", plan_of((1,), *PAPER))
    assert [rule.drafted(idle) for idle in (True, False, False, True, False)] == [1, 0, 0, 3, 0]
    assert (rule.idle(), rule.idle()) == (1, 0)


@pytest.mark.parametrize("name", ["dp", "immediate", "none"])
def test_the_other_rules_do_not_look_at_the_link(name: str) -> None:
    free, busy = (make_batching(name, plan_of((2, 1), *PAPER)) for _ in range(2))
    assert [free.drafted(True) for _ in range(7)] == [busy.drafted(False) for _ in range(7)]
    assert free.idle() == busy.idle() == 0


def test_a_new_plan_holds_from_the_next_period_on() -> None:
    old, new = plan_of((2, 3), *PAPER), plan_of((1,), *PAPER)
    cursor = old.cursor()
    assert [cursor.drafted() for _ in range(3)] == [0, 2, 0]
    cursor.adopt(new)
    assert cursor.plan is old
    assert [cursor.drafted() for _ in range(4)] == [0, 3, 1, 1]
    assert cursor.plan is new
    for end_period in ("flush", "reset"):
        cursor = old.cursor()
        cursor.drafted()
        cursor.adopt(new)
        getattr(cursor, end_period)()
        assert cursor.drafted() == 1
    cursor = old.cursor()
    cursor.adopt(new)
    assert cursor.drafted() == 1, "no period was under way"


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'often'.*dp, greedy, immediate, none"):
        make_batching("often", plan_of((1,), *PAPER))


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.sampled_from(["draft", "draft busy", "idle", "flush", "reset"]), max_size=60),
)
def test_every_token_is_sent_once_or_forgotten(sizes: list[int], steps: list[str]) -> None:
    """Also of `dp`: what it sends is what the plan says of the tokens since the period began."""
    plan = plan_of(sizes, *PAPER)
    for name in BATCHINGS:
        rule = make_batching(name, plan)
        waiting = since = 0
        for step in steps:
            held = waiting
            if step in ("draft", "draft busy"):
                sent = rule.drafted(step == "draft")
                waiting, since = waiting + 1, since % plan.window + 1
                if name == "dp":
                    assert sent == (waiting if since in accumulate(sizes) else 0)
            elif step == "idle":
                sent = rule.idle()
                assert sent == (held if name == "greedy" else 0)
            elif step == "flush":
                sent, since = rule.flush(), 0
                assert sent == held
            else:
                rule.reset()
                sent, waiting, since = 0, 0, 0
            assert sent in (0, waiting)
            waiting -= sent
            assert rule.waiting == waiting


def simulate(rule: Batching, window: int, alpha: float, beta: float, gamma: float, gap: float) -> float:
    """When the last of `window` tokens arrives if the rule decides and the trigger fires after them; the link takes one
    message after the other and the rule is asked whenever a token is drafted or the link falls idle."""
    free_s = 0.0
    sent = 0

    def send(count: int, at_s: float) -> None:
        nonlocal free_s, sent
        if count:
            sent += count
            free_s = max(free_s, at_s) + (gap + beta * count)

    for token in range(1, window + 1):
        now_s = gamma * token
        while rule.waiting and free_s < now_s:
            count = rule.idle()
            if not count:
                break
            send(count, free_s)
        send(rule.drafted(free_s <= now_s), now_s)
    send(rule.flush(), gamma * window)
    assert sent == window
    return free_s + (alpha - gap)


@given(st.integers(1, 30), links(ordinary))
def test_no_rule_beats_the_plan(window: int, link: tuple[float, float, float, float]) -> None:
    plan = plan_token_batches(window, *link)
    took_s = {name: simulate(make_batching(name, plan), window, *link) for name in BATCHINGS}
    assert took_s["dp"] == pytest.approx(plan.total_s, rel=1e-12)
    assert took_s["none"] == pytest.approx(plan_of((window,), *link).total_s, rel=1e-12)
    assert took_s["immediate"] == pytest.approx(plan_of((1,) * window, *link).total_s, rel=1e-12)
    assert min(took_s.values()) >= took_s["dp"] * (1 - 2e-9)


# ---- the window


def test_the_window_is_twenty_until_a_draft_has_ended() -> None:
    window = Window()
    assert window.tokens == FIRST_WINDOW == 20
    assert window.observe(4) and window.tokens == 4


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [([2, 3], 3), ([2, 2, 3], 2), ([0], 1), ([0, 0, 0], 1), ([10**6], LONGEST_WINDOW), ([1, 2, 2, 2], 2)],
)
def test_the_window_is_rounded_half_up_and_bounded(lengths: list[int], tokens: int) -> None:
    window = Window()
    for length in lengths:
        window.observe(length)
    assert window.tokens == tokens


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_window_is_the_mean_of_the_last_hundred_and_tells_changes(most: int, random: Random) -> None:
    window = Window()
    lengths = [random.randint(0, most) for _ in range(250)]
    for seen in range(1, len(lengths) + 1):
        before = window.tokens
        changed = window.observe(lengths[seen - 1])
        last = lengths[max(0, seen - 100) : seen]
        assert window.tokens == max(1, math.floor(Fraction(sum(last), len(last)) + Fraction(1, 2)))
        assert changed == (window.tokens != before)
