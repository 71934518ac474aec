"""A measured link for people: a table, the round trips over the frame's size, and what planning would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from pipesd.policy.token_batches import FIRST_WINDOW, plan_token_batches

if TYPE_CHECKING:
    from pipesd.edge.link_figures import LinkFigures, Rate

NARROWEST = 40  # columns of a plot that still shows something
_WIDEST, _HEIGHT = 72, 10
_UNICODE, _ASCII = ("●", "·", "│", "─", "└", " to "), ("o", ".", "|", "-", "+", " to ")
_NO_BETA = "cannot be told from 0"
_NO_SPREAD = "not enough spread: too few sizes or answers"


def describe(figures: LinkFigures, address: str, gamma_ms: float, columns: int, *, ascii_only: bool) -> str:
    """What was measured, in lines that end with a newline; the plot is left out where it has no room."""
    signs = _ASCII if ascii_only else _UNICODE
    lost = "none lost" if not figures.lost else f"{figures.lost} lost"
    lines = [
        f"link to {address}: {figures.sent} probes, {lost}, {figures.took_s:.1f} s",
        "",
        *(f"{name:<11}{value:>9} {unit:<7}{note}".rstrip() for name, value, unit, note in _rows(figures, signs)),
    ]
    if figures.status.name in ("STARTING", "DOWN"):
        lines += ["", "the cloud's front answers, but no worker of it is ready"]
    if columns > NARROWEST:
        lines += ["", *_plot(figures, min(columns - 1, _WIDEST), signs)]
    return "\n".join([*lines, "", _advice(figures, gamma_ms)]) + "\n"


def _rows(figures: LinkFigures, signs: Sequence[str]) -> list[tuple[str, str, str, str]]:
    to = signs[-1]
    least_s, middle_s, most_s = figures.rtt_s
    return [
        ("alpha", _ms(figures.alpha_s), "ms", f"{_span(figures.alpha_interval, to)}; one way, of any message"),
        *_beta(figures, to),
        ("gap", _ms(figures.gap_s), "ms", "of alpha, what a message keeps the next one waiting"),
        ("latency", _ms(figures.latency_s), "ms", "half the shortest round trip"),
        ("jitter", _ms(figures.jitter_s), "ms", "95 % of round trips are at most this above usual"),
        ("round trip", _ms(middle_s), "ms", f"of the smallest frame; from {_ms(least_s)}, 95 % below {_ms(most_s)}"),
        ("up", *_rate(figures.up, to)),
        ("down", *_rate(figures.down, to)),
        ("codec", _ms(figures.codec_s), "ms", "encoding and decoding; in none of the above"),
    ]


def _beta(figures: LinkFigures, to: str) -> list[tuple[str, str, str, str]]:
    """One row, and where β is too small to be seen another with what it should be."""
    if figures.beta_s is None:
        return [("beta", "-", "ms", _NO_SPREAD)]
    if figures.beta_known:
        note = f"{_span(figures.beta_interval, to)}; a token of {figures.token_bytes} bytes; R2 {figures.line.r2:.3f}"
        return [("beta", _ms(figures.beta_s), "ms", note)]
    rows = [("beta", "0", "ms", f"a draft token: {_NO_BETA}, at most {_ms(figures.beta_interval[1])}")]
    if figures.up is not None:
        by_rate = _ms(8 * figures.token_bytes / figures.up.bits_per_s)
        rows.append(("", "", "", f"(its {figures.token_bytes} bytes take {by_rate} ms by the bandwidth)"))
    return rows


def _rate(rate: Rate | None, to: str) -> tuple[str, str, str]:
    if rate is None:
        return "-", "Mbit/s", "cannot be told in this time"
    low, high = (f"{end / 1e6:.4g}" for end in rate.interval)
    return f"{rate.bits_per_s / 1e6:.4g}", "Mbit/s", f"{low}{to}{high}, of payload"


def _span(interval: tuple[float, float], to: str) -> str:
    low, high = map(_ms, interval)
    return f"{low}{to}{high}"


def _advice(figures: LinkFigures, gamma_ms: float) -> str:
    gap_s = figures.alpha_s if figures.gap_s is None else figures.gap_s
    plan = plan_token_batches(
        FIRST_WINDOW, figures.alpha_s, figures.beta_s or 0.0, gamma_ms / 1000, gap_s, compiled=False
    )
    return (
        f"plan: at {gamma_ms:g} ms a draft token, {FIRST_WINDOW} of them go in {len(plan.sizes)} token "
        f"{'batch' if len(plan.sizes) == 1 else 'batches'}, in {plan.total_s * 1000:.4g} ms"
    )


def _plot(figures: LinkFigures, width: int, signs: Sequence[str]) -> list[str]:
    """Median round trip of each size and the line through them, over the draft tokens."""
    dot, course, side, bottom, corner, _ = signs
    by_size: dict[int, list[float]] = {}
    for size, took_s in figures.points:
        by_size.setdefault(size, []).append(took_s)
    medians = {size: median(times_s) for size, times_s in by_size.items()}
    line, most = figures.line, max(medians)
    ends_s = (line.intercept_s, line.intercept_s + line.slope_s * most)
    low_s, high_s = min(*medians.values(), *ends_s), max(*medians.values(), *ends_s)
    margin_s = max((high_s - low_s) * 0.05, 0.02 * high_s, 1e-6)
    low_s, high_s = max(0.0, low_s - margin_s), high_s + margin_s
    labels = [f"{_ms(high_s)} ms", f"{_ms(low_s)} ms"]
    left = max(map(len, labels)) + 1
    columns = width - left - 1
    grid = [[" "] * columns for _ in range(_HEIGHT)]

    def put(size: float, took_s: float, sign: str) -> None:
        row = round((high_s - took_s) / (high_s - low_s) * (_HEIGHT - 1))
        grid[min(max(row, 0), _HEIGHT - 1)][round(size / most * (columns - 1))] = sign

    for column in range(columns):
        at = most * column / (columns - 1)
        put(at, line.intercept_s + line.slope_s * at, course)
    for size, took_s in medians.items():
        put(size, took_s, dot)
    names = {0: labels[0], _HEIGHT - 1: labels[1]}
    rows = [f"{names.get(k, ''):>{left - 1}} {side}{''.join(row)}".rstrip() for k, row in enumerate(grid)]
    end = f"{most} draft tokens"
    return [
        *rows,
        f"{'':>{left}}{corner}{bottom * columns}",
        f"{'':>{left}} {'0':<{columns - len(end)}}{end}",
    ]


def _ms(seconds: float | None) -> str:
    """Milliseconds to three digits or more."""
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}" if ms >= 0.1 else f"{ms:.4f}"
