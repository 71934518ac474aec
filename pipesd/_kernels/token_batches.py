"""The best split of a window into token batches: the dynamic program, and the choice among plans that tie.

A batch that holds tokens i+1..j of N starts when the one before it has ended and its tokens are drafted, at γ·j, and
takes g + β·(j - i) of the link (PipeSD, algorithm 1, which has g = α). Times count from the first token's drafting.
"""

from __future__ import annotations

from typing import Any

from pipesd._kernels import Kernel

TIE = 1e-9  # plans tie within this share of the best total, and within as many seconds
ROUNDING = 1e-11  # share of a total that sums of thousands of terms leave open; from 100 s on it is what ties


def solve(
    window: int, alpha_s: float, beta_s: float, gamma_s: float, gap_s: float, gain: float, *, compiled: bool
) -> tuple[tuple[int, ...], float]:
    """The sizes of the chosen plan's token batches and its total (s), `alpha_s - gap_s` behind the last end included.

    The chosen plan: let a plan be good if its total is the best one or exceeds it by no more than the share `gain` or
    by what ties. Of the good plans those with the fewest token batches; of these the best total; among those that tie
    with it the smallest last token batch, then the smallest one before that, and so on.

    Arguments are taken as checked: 1 ≤ window, times finite and not negative, gap_s ≤ alpha_s. Compiled code is used
    if `compiled` and there is any; the result is the same.
    """
    run = PLAN.compiled() if compiled else None
    if run is None:
        slots = [0] * window
        count, total_s = PLAN.plain(window, alpha_s, beta_s, gamma_s, gap_s, gain, [0.0] * (window + 1), slots)
        return tuple(slots[:count]), total_s
    import numpy as np  # here, because what makes the flags of a command imports this module

    sizes = np.empty(window, np.int64)
    count, total_s = run(window, alpha_s, beta_s, gamma_s, gap_s, gain, np.empty(window + 1), sizes)
    return tuple(sizes[:count].tolist()), total_s


def _plan(
    window: int, alpha: float, beta: float, gamma: float, gap: float, gain: float, ends: Any, sizes: Any
) -> tuple[int, float]:
    """Number of token batches and total; writes the sizes to `sizes` (window) and uses `ends` (window + 1)."""
    # ends[j]: earliest end of tokens 1..j = min over i < j of max(ends[i], γ·j) + g + β·(j - i). It never falls with j,
    # so of all i that do not make token j wait only the last one counts.
    ends[0] = 0.0
    last = 0
    for j in range(1, window + 1):
        drafted = gamma * j
        while last + 1 < j and ends[last + 1] <= drafted:
            last += 1
        least = drafted + (gap + beta * (j - last))
        for i in range(last + 1, j):
            end = ends[i] + (gap + beta * (j - i))
            if end < least:
                least = end
        ends[j] = least

    total = ends[window] + (alpha - gap)
    tie = max(min(TIE, TIE * total), ROUNDING * total)
    spread = max(tie, gain * total)

    # A plan ends by a deadline if, for each of its batches, all that follows would still fit when sent without a pause
    # from that batch's drafting on: γ·j + k·g + β·(N - i) ≤ deadline for batch i+1..j, the k-th from the end. So the
    # largest batches, taken from the end, give the fewest. The first pass finds that number for what is good; where
    # more is good than ties, later ones halve the distance to the earliest deadline which that number can meet.
    count = 0
    low = ends[window]
    high = deadline = low + spread
    while True:
        k = 0
        j = window
        while j > 0:
            k += 1
            i = j
            while i > 0 and gamma * j + k * gap + beta * (window - i + 1) <= deadline:
                i -= 1
            assert i < j  # the plan found above meets every deadline that is asked for
            j = i
        if count == 0:
            count = k
        if k <= count:
            high = deadline
        else:
            low = deadline
        if spread <= tie:
            break
        spread *= 0.5
        deadline = 0.5 * (low + high)

    # From the front the largest batches that the same condition allows: what they take need not wait for later ones.
    i = 0
    end = 0.0
    for k in range(count, 0, -1):
        j = i + 1
        while j <= window - k and gamma * (j + 1) + k * gap + beta * (window - i) <= high:
            j += 1
        sizes[count - k] = j - i
        end = max(end, gamma * j) + (gap + beta * (j - i))
        i = j
    return count, end + (alpha - gap)


PLAN = Kernel(
    _plan,
    "Tuple((int64, float64))(int64, float64, float64, float64, float64, float64, float64[::1], int64[::1])",
)
