"""What a meter of energy says at the end of a run: so many joules, or why there is no figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reading(NamedTuple):
    """`joules` over `seconds`, idle time included; None where it cannot be read, and then `why` says so in one line.

    `source`: "counter", of the device itself, or "sampled", power integrated over time. Where both can be had the
    counter is taken and `sampled_joules` stands beside it; `samples` and `longest_gap_s` tell how closely was looked.
    """

    joules: float | None
    why: str = ""
    seconds: float = 0.0
    source: str = ""
    sampled_joules: float | None = None
    samples: int = 0
    longest_gap_s: float = 0.0


def total(readings: Iterable[Reading]) -> Reading:
    """All of them together; without a figure where one has none, as the rest would be taken for the whole."""
    parts = list(readings)
    for part in parts:
        if part.joules is None:
            return part
    if not parts:
        return Reading(None, "there is nothing to read")
    sampled = [part.sampled_joules for part in parts]
    return Reading(
        sum(part.joules or 0.0 for part in parts),
        seconds=max(part.seconds for part in parts),
        source=" and ".join(sorted({part.source for part in parts})),
        sampled_joules=None if None in sampled else sum(joules or 0.0 for joules in sampled),
        samples=min(part.samples for part in parts),
        longest_gap_s=max(part.longest_gap_s for part in parts),
    )
