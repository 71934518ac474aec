"""Times in which an emulated link carries nothing: pairs (when one begins, how long it lasts), s from its own begin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pipesd.errors import UsageError

Cuts = tuple[tuple[float, float], ...]


def checked_cuts(cuts: Iterable[tuple[float, float]]) -> Cuts:
    """The cuts in order of time. UsageError unless each begins at 0 or later and lasts longer than 0, both finite."""
    made = []
    for cut in cuts if isinstance(cuts, Iterable) else (cuts,):
        if not (isinstance(cut, Sequence) and len(cut) == 2 and all(isinstance(each, int | float) for each in cut)):
            raise UsageError(f"link: the cut {cut!r:.60}; give pairs (when it begins, how long it lasts), in s")
        at_s, lasts_s = cut
        if not (0 <= at_s < math.inf and 0 < lasts_s < math.inf):
            raise UsageError(f"link: a cut at {at_s} s for {lasts_s} s; give a time from 0 and a length above 0")
        made.append((float(at_s), float(lasts_s)))
    return tuple(sorted(made))


def parse_cut(text: str) -> tuple[float, float]:
    """AT:LASTS, in s, as a command line gives it. UsageError for anything else."""
    at, _, lasts = text.partition(":")
    try:
        (cut,) = checked_cuts([(float(at), float(lasts))])
    except ValueError:
        raise UsageError(f"link: the cut {text!r}; give AT:LASTS in seconds, such as 10:2.5") from None
    return cut


def is_cut(cuts: Cuts, t_s: float) -> bool:
    """Whether the link carries nothing at that time; a cut's end is no part of it."""
    return any(at_s <= t_s < at_s + lasts_s for at_s, lasts_s in cuts)


def next_change_s(cuts: Cuts, t_s: float) -> float:
    """When behind that time the next cut begins or ends; infinite if none does."""
    return min((end_s for at_s, lasts_s in cuts for end_s in (at_s, at_s + lasts_s) if end_s > t_s), default=math.inf)
