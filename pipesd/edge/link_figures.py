"""What a measured link comes to: α, β, gap, latency, jitter and bandwidths from the times of probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipesd.policy.estimate import LineFit, fit_line
from pipesd.protocol.messages import ProbeStatus

Interval = tuple[float, float]  # 95 %


@dataclass(frozen=True)
class Rate:
    """Payload bits a second in one direction, with its interval; the upper end may be infinite."""

    bits_per_s: float
    interval: Interval

    @classmethod
    def of(cls, line: LineFit) -> Rate | None:
        """From the line of times over bytes; None where not even its order is told. The upper end may be infinite."""
        if not line.spread_enough or line.slope_s <= 0 or line.slope_high_s > 3 * line.slope_s:
            return None
        return cls(8 / line.slope_s, (8 / line.slope_high_s, 8 / line.slope_low_s if line.slope_low_s else math.inf))


@dataclass(frozen=True)
class LinkFigures:
    """A link as it was measured. Times in s, from the edge's clock; α, β and latency are one way."""

    alpha_s: float  # start-up: half of the round trip that a frame without tokens would take
    alpha_interval: Interval
    beta_s: (
        float | None
    )  # for one draft token more; 0 if it cannot be told from 0, None if sizes or answers were too few
    beta_interval: Interval
    gap_s: float | None  # what a frame occupies of the link beside its tokens, at most alpha_s
    gap_interval: Interval
    latency_s: float  # half the shortest round trip
    jitter_s: float  # of the times beyond the line: the 95th percentile above the median
    rtt_s: tuple[float, float, float]  # of the smallest frame: shortest, median, 95th percentile
    up: Rate | None
    down: Rate | None
    line: LineFit  # of the round trips over the draft tokens
    points: tuple[tuple[int, float], ...]  # draft tokens of a single probe, its round trip
    token_bytes: int  # bytes of a draft token
    codec_s: float  # encoding and decoding of a probe and its answer; in no other figure
    sent: int
    lost: int
    status: ProbeStatus  # of the cloud's workers, in the last answer
    took_s: float

    @property
    def beta_known(self) -> bool:
        """Whether size matters: β can be told from 0."""
        return bool(self.beta_s)

    def as_json(self) -> dict[str, Any]:
        """As `link --json` shows it, in ms and Mbit/s. What is not known is None."""
        up, down = (None if rate is None else rate.interval for rate in (self.up, self.down))
        least_s, middle_s, most_s = self.rtt_s
        return {
            "alpha_ms": to_ms(self.alpha_s),
            "beta_ms": to_ms(self.beta_s),
            "gap_ms": to_ms(self.gap_s),
            "latency_ms": to_ms(self.latency_s),
            "jitter_ms": to_ms(self.jitter_s),
            "rtt_ms": {"min": to_ms(least_s), "median": to_ms(middle_s), "p95": to_ms(most_s)},
            "up_mbps": None if self.up is None else to_mbps(self.up.bits_per_s),
            "down_mbps": None if self.down is None else to_mbps(self.down.bits_per_s),
            "intervals": {
                "alpha_ms": [to_ms(end) for end in self.alpha_interval],
                "beta_ms": None if self.beta_s is None else [to_ms(end) for end in self.beta_interval],
                "gap_ms": None if self.gap_s is None else [to_ms(end) for end in self.gap_interval],
                "up_mbps": None if up is None else [to_mbps(end) for end in up],
                "down_mbps": None if down is None else [to_mbps(end) for end in down],
            },
            "r2": round(self.line.r2, 4),
            "beta_known": self.beta_known,
            "spread_enough": self.line.spread_enough,
            "codec_ms": to_ms(self.codec_s),
            "token_bytes": self.token_bytes,
            "probes": self.sent,
            "lost": self.lost,
            "took_s": round(self.took_s, 3),
        }


def figures_of(
    points: Sequence[tuple[int, float]],
    gaps_s: Sequence[float],
    up: Rate | None,
    down: Rate | None,
    token_bytes: int,
    **rest: Any,
) -> LinkFigures:
    """The figures from the round trips of single probes (draft tokens, s), at least one, and from the trains' gaps.

    Where β cannot be told from 0, its upper end is what the round trips allow, which is no closer where their noise
    happens to fall with the size, or what a token's bytes take at the least bandwidth, whichever is more.
    """
    assert points, "no probe was answered"
    sizes, times_s = zip(*points, strict=True)
    line = fit_line(sizes, times_s)
    alpha_s = line.intercept_s / 2
    beyond_s = [took_s - line.intercept_s - line.slope_s * size for size, took_s in points]
    smallest_s = [took_s for size, took_s in points if size == min(sizes)]
    gap_low_s, gap_high_s = median_interval(gaps_s)
    beta_high_s = line.slope_high_s
    if line.spread_enough and not line.slope_known:
        by_rate_s = 0.0 if up is None else 8 * token_bytes / up.interval[0]
        beta_high_s = max(beta_high_s, line.slope_half_s, by_rate_s)
    return LinkFigures(
        alpha_s=alpha_s,
        alpha_interval=(line.intercept_low_s / 2, line.intercept_high_s / 2),
        beta_s=None if not line.spread_enough else line.slope_s if line.slope_known else 0.0,
        beta_interval=(line.slope_low_s, beta_high_s),
        gap_s=min(median(gaps_s), alpha_s) if gaps_s else None,
        gap_interval=(min(gap_low_s, alpha_s), gap_high_s),
        latency_s=min(times_s) / 2,
        jitter_s=quantile(beyond_s, 0.95) - median(beyond_s),
        rtt_s=(min(times_s), median(smallest_s), quantile(smallest_s, 0.95)),
        up=up,
        down=down,
        line=line,
        points=tuple(points),
        token_bytes=token_bytes,
        **rest,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """That share of the values lies below, between neighbours by a line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the median by the ranks of the values, whatever their law: at least the outermost two."""
    ordered = sorted(values)
    if not ordered:
        return 0.0, math.inf
    rank = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[rank], ordered[-1 - rank]


def to_ms(seconds: float | None) -> float | None:
    """Milliseconds to 0.1 µs; None for what is not known or has no bound."""
    return None if seconds is None or math.isinf(seconds) else round(seconds * 1000, 4)


def to_mbps(bits_per_s: float) -> float | None:
    """Mbit/s to four digits; None for what has no bound."""
    return None if math.isinf(bits_per_s) else float(f"{bits_per_s / 1e6:.4g}")
