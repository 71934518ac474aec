"""What a session is told of its link and what it makes of it, beside what is true of a simulated link."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pipesd.edge.link_probe import frame_bytes
from pipesd.edge.round_trips import RoundTrips
from pipesd.policy.estimate import CHANGE, Estimate
from pipesd.policy.monitor import Monitor
from pipesd.protocol.messages import ID_BYTES
from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule

REMEMBERED = 100  # points that count, as in the paper


class Known(NamedTuple):
    """A link and its drafting, one way, in s; None is not known."""

    alpha_s: float | None
    beta_s: float | None
    gap_s: float | None
    gamma_s: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> Known:
        return cls(estimate.alpha_s, estimate.beta_s, estimate.gap_s, estimate.gamma_s)

    def as_ms(self) -> dict[str, float | None]:
        return {
            name.removesuffix("_s"): None if value is None else 1e3 * value for name, value in self._asdict().items()
        }


class Sample(NamedTuple):
    """A round trip as the monitor takes it: without the cloud's own time and half of what the answer may have lain
    unread."""

    at_s: float
    tokens: int
    took_s: float


@dataclass
class Seen:
    """All round trips of a session, and each estimate with its time. Times are the session's; the first generation
    begins at `begun_s`, when the greeting is over."""

    samples: list[Sample] = field(default_factory=list)
    estimates: list[tuple[float, Estimate]] = field(default_factory=list)
    now_s: float = 0.0
    begun_s: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The last."""
        return self.estimates[-1][1]

    @property
    def elapsed_s(self) -> float:
        """Since the first generation began."""
        return self.now_s - (self.begun_s or 0.0)


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """While it lasts, what the monitors of this process are told and make of it; one session at a time."""
    seen = Seen()

    def received(inner: Callable[..., Any], self: RoundTrips, message: Any, now_s: float, lag_s: float) -> Any:
        seen.now_s = now_s
        return inner(self, message, now_s, lag_s)

    def restart(inner: Callable[..., Any], self: RoundTrips, opening: int) -> Any:
        seen.begun_s = seen.now_s if seen.begun_s is None else seen.begun_s
        return inner(self, opening)

    def round_trip(
        inner: Callable[..., Any], self: Monitor, tokens: int, took_s: float, cloud_s: float, lag_s: float = 0.0
    ) -> Any:
        link_s = took_s - cloud_s
        if link_s >= 0.0:
            seen.samples.append(Sample(seen.now_s, tokens, link_s - min(lag_s, link_s) / 2))
        return inner(self, tokens, took_s, cloud_s, lag_s)

    def snapshot(inner: Callable[..., Any], self: Monitor) -> Any:
        estimate = inner(self)
        if not seen.estimates or seen.estimates[-1][1] is not estimate:
            seen.estimates.append((seen.now_s, estimate))
        return estimate

    watchers = (RoundTrips, received), (RoundTrips, restart), (Monitor, round_trip), (Monitor, snapshot)
    with contextlib.ExitStack() as stack:
        for kind, watcher in watchers:
            name = watcher.__name__
            inner = getattr(kind, name)
            setattr(kind, name, functools.partialmethod(_bound, watcher, inner))
            stack.callback(setattr, kind, name, inner)
        yield seen


def _bound(self: Any, watcher: Callable[..., Any], inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return watcher(inner, self, *given, **named)


def known_of(link: Link, gamma_s: float, at_s: float) -> Known:
    """What is true of a simulated link at a time, for a message as large as a DRAFT: its head is part of what it
    occupies, and half of the round trip without tokens is α."""
    up, down = link.up_bytes_per_s, link.down_bytes_per_s
    if link.bandwidths is not None:
        up, down = link.bandwidths.at(at_s)
    head_bytes = frame_bytes(0, 0) + link.message_bytes
    gap_s = link.gap_s + head_bytes / up
    alpha_s = link.latency_s + (gap_s + link.gap_s + head_bytes / down) / 2 + link.jitter_s / 2
    return Known(alpha_s, (ID_BYTES + link.up_bytes_per_draft_token) / up, gap_s, gamma_s)


def by_least_squares(seen: Seen) -> Known:
    """As the paper fits: the mean time of each size over the last 100 points, and least squares through the means; the
    round trip's start-up is twice α. It has neither gap nor γ."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    for sample in seen.samples[-REMEMBERED:]:
        times[sample.tokens].append(sample.took_s)
    if len(times) < 2:
        return Known(None, None, None, None)
    means = [statistics.fmean(times[size]) for size in times]
    slope, intercept = np.polyfit(list(times), means, 1)
    return Known(float(intercept) / 2, float(slope), None, None)


def errors_ms(found: Known, known: Known) -> dict[str, float | None]:
    """By how much each figure is off, in ms; None where it was not found."""
    return {
        name.removesuffix("_s"): None if value is None or true is None else 1e3 * abs(value - true)
        for (name, value), true in zip(found._asdict().items(), known, strict=True)
    }


def followed(several: Sequence[Seen], link: Link, schedule: Schedule) -> dict[str, Any]:
    """After how long β was within CHANGE of what a change of bandwidth made of it."""
    delays: list[float] = []
    missed = 0
    for seen in several:
        end_s, begun_s = seen.elapsed_s, seen.begun_s or 0.0
        changed_s = schedule.next_change_s(0.0)
        while changed_s < end_s:
            until_s = schedule.next_change_s(changed_s)
            true = (ID_BYTES + link.up_bytes_per_draft_token) / schedule.at(changed_s)[0]
            told = (at_s - begun_s for at_s, estimate in seen.estimates if changed_s <= at_s - begun_s < until_s
                    and estimate.beta_s is not None and abs(estimate.beta_s - true) <= CHANGE * true)  # fmt: skip
            first_s = next(told, None)
            if first_s is not None:
                delays.append(first_s - changed_s)
            elif until_s <= end_s:
                missed += 1
            changed_s = until_s
    changes = len(delays) + missed
    return {"changes": changes, "missed": missed, "median_s": statistics.median(delays) if delays else None}
