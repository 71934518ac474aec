"""When draft tokens are sent: plans of token batches, their cursor, the other rules, and the window they are made for.

The model (PipeSD, section 3): token j is drafted at γ·j; the link starts a token batch when it has ended the one before
and the batch's tokens are drafted, and takes g + β·n for n tokens; the last one arrives α - g after its end. With the
gap g = α every batch is a request of its own (`hockney`); a measured g < α is that of messages that overlap in flight
on one connection (`streamed`). Verification and its answer are outside this model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

from pipesd import _kernels
from pipesd._kernels import token_batches as kernel
from pipesd.config import BATCHINGS
from pipesd.errors import UsageError

LONGEST_WINDOW = 4096  # tokens
LONGEST_S = 1e9  # what any time given may be
RUN_GAIN = 0.01  # at run time a gain below this share is none
FIRST_WINDOW = 20  # tokens, until a draft has ended
REMEMBERED_DRAFTS = 100


class Transmission(NamedTuple):
    """One token batch on the plan's clock, in s from the drafting of the window's first token on."""

    tokens: int
    drafting_s: float  # its first token's drafting starts
    drafted_s: float  # its last token is drafted
    start_s: float  # the link takes it
    end_s: float  # the link is free again


@dataclass(frozen=True)
class TokenBatchPlan:
    """How a window is split: `sizes` in order of sending, all at least 1, and when the last token arrives, `total_s`,
    counted from the drafting of the first; with what the plan was made for."""

    sizes: tuple[int, ...]
    total_s: float
    alpha_s: float
    beta_s: float
    gamma_s: float
    gap_s: float

    @property
    def window(self) -> int:
        """Tokens planned for."""
        return sum(self.sizes)

    @property
    def link_model(self) -> str:
        """`hockney` or `streamed`."""
        return "hockney" if self.gap_s == self.alpha_s else "streamed"

    def timeline(self) -> tuple[Transmission, ...]:
        """The course of each token batch."""
        return _timeline(self.sizes, self.beta_s, self.gamma_s, self.gap_s)

    def cursor(self) -> PlanCursor:
        """A reader of the plan, at its start."""
        return PlanCursor(self)


def plan_token_batches(
    window: int,
    alpha_s: float,
    beta_s: float,
    gamma_s: float,
    gap_s: float | None = None,
    *,
    gain: float = 0.0,
    compiled: bool = True,
) -> TokenBatchPlan:
    """The split of `window` draft tokens into token batches that lets the last one arrive first (PipeSD, algorithm 1).

    Args:
        window: tokens, 1 to LONGEST_WINDOW.
        alpha_s: one-way start-up of the link (s).
        beta_s: time a token takes of the link (s).
        gamma_s: time that drafting a token takes (s).
        gap_s: time a message takes of the link beside its tokens (s), at most `alpha_s`; None is `alpha_s`.
        gain: 0 to 1; a plan of fewer token batches is preferred unless another is better by more than this share.
        compiled: whether numba may be used. Loading it takes longer than a single plan in plain Python, which is equal.

    Plans tie that differ by no more than 1e-9 s and 1e-9 of the best total, or by 1e-11 of it, which only matters from
    100 s on, where rounding takes its place. Of those the one with the fewest token batches is given, then with the
    smallest last one, then with the smallest one before that, and so on.

    Raises UsageError that names the argument for one out of its bounds, not finite, or no number.
    """
    window = _count("window", window)
    alpha_s, beta_s, gamma_s = _number("alpha_s", alpha_s), _number("beta_s", beta_s), _number("gamma_s", gamma_s)
    gap_s = alpha_s if gap_s is None else _number("gap_s", gap_s)
    if gap_s > alpha_s:
        raise UsageError(f"gap_s: got {gap_s!r}, wanted at most alpha_s, {alpha_s!r}, of which it is a part")
    gain = _number("gain", gain, 1.0)
    sizes, total_s = kernel.solve(window, alpha_s, beta_s, gamma_s, gap_s, gain, compiled=compiled)
    return TokenBatchPlan(sizes, total_s, alpha_s, beta_s, gamma_s, gap_s)


def plan_for_run(
    window: int,
    alpha_s: float,
    beta_s: float,
    gamma_s: float,
    gap_s: float,
    *,
    one_each: bool,
    compiled: bool = True,
) -> TokenBatchPlan:
    """The plan that a run uses on measured figures: gains under 1 % count as none.

    Among plans that are equal in this sense the one with the fewest messages is taken; with `one_each`, for a cloud
    that verifies what has arrived whenever it is free, one token a message where that is among them. A gap measured
    above α, as noise can show it, counts as α. Raises UsageError as `plan_token_batches` does.
    """
    gap_s = min(gap_s, alpha_s)
    if not one_each:
        return plan_token_batches(window, alpha_s, beta_s, gamma_s, gap_s, gain=RUN_GAIN, compiled=compiled)
    best = plan_token_batches(window, alpha_s, beta_s, gamma_s, gap_s, compiled=compiled)
    single = plan_of((1,) * best.window, alpha_s, beta_s, gamma_s, gap_s)
    return single if single.total_s <= best.total_s * (1 + RUN_GAIN) else best


def plan_of(
    sizes: Sequence[int], alpha_s: float, beta_s: float, gamma_s: float, gap_s: float | None = None
) -> TokenBatchPlan:
    """The plan with these sizes, good or not, and its total. The arguments are taken as checked."""
    gap_s = alpha_s if gap_s is None else gap_s
    total_s = _timeline(sizes, beta_s, gamma_s, gap_s)[-1].end_s + (alpha_s - gap_s)
    return TokenBatchPlan(tuple(sizes), total_s, alpha_s, beta_s, gamma_s, gap_s)


def warmup() -> bool:
    """Load the compiled planner, or compile it where that was never done (a second or two), so that no later plan has
    to; returns whether there is one. Without numba plans are made in plain Python."""
    return _kernels.warmup()


class Batching(Protocol):
    """When drafted tokens are sent. Each number returned is that of tokens to send now in one message, the oldest of
    the waiting ones, which is all of them or none; they count as sent from then on."""

    waiting: int  # drafted tokens not sent yet

    def drafted(self, link_idle: bool) -> int:
        """One more token was drafted; `link_idle`: nothing handed to the link is still on its way into it."""

    def idle(self) -> int:
        """The link has become idle, or is, and no token was drafted."""

    def flush(self) -> int:
        """The trigger asks for verification: everything goes and the period ends (PipeSD, rule 1)."""

    def taken(self) -> None:
        """All that waits was sent out of turn; the period goes on with the next token batch."""

    def reset(self) -> None:
        """The draft was rejected: nothing waits any more and the period ends."""

    def adopt(self, plan: TokenBatchPlan) -> None:
        """A new plan; it holds from the next period on."""


class _Waiting:
    """Counts what waits; sends it at the trigger."""

    def __init__(self) -> None:
        self.waiting = 0

    def drafted(self, link_idle: bool) -> int:
        self.waiting += 1
        return 0

    def idle(self) -> int:
        return 0

    def flush(self) -> int:
        count, self.waiting = self.waiting, 0
        return count

    def taken(self) -> None:
        self.waiting = 0

    def reset(self) -> None:
        self.waiting = 0

    def adopt(self, plan: TokenBatchPlan) -> None:
        pass


class AtTrigger(_Waiting):
    """`none`: all that was drafted goes in one token batch when the trigger asks."""


class Immediate(_Waiting):
    """`immediate`: every token goes by itself as soon as it is drafted."""

    def drafted(self, link_idle: bool) -> int:
        return 1


class Greedy(_Waiting):
    """`greedy`: whenever the link is idle, all that has accumulated goes."""

    def drafted(self, link_idle: bool) -> int:
        self.waiting += 1
        return self.idle() if link_idle else 0

    def idle(self) -> int:
        count, self.waiting = self.waiting, 0
        return count


class PlanCursor(_Waiting):
    """`dp`: goes through a plan as tokens are drafted, over and over. Whether the link is idle is part of the plan."""

    def __init__(self, plan: TokenBatchPlan) -> None:
        super().__init__()
        self._plan = self._next_plan = plan
        self._batch = 0

    @property
    def plan(self) -> TokenBatchPlan:
        """The plan of the present period."""
        return self._plan

    def drafted(self, link_idle: bool = True) -> int:
        self.waiting += 1
        if self.waiting < self._plan.sizes[self._batch]:
            return 0
        count = self.waiting
        self.taken()
        return count

    def taken(self) -> None:
        if self.waiting:
            self.waiting = 0
            self._batch += 1
            if self._batch == len(self._plan.sizes):
                self._begin()

    def flush(self) -> int:
        self._begin()
        return super().flush()

    def reset(self) -> None:
        self._begin()
        super().reset()

    def adopt(self, plan: TokenBatchPlan) -> None:
        self._next_plan = plan
        if self._batch == 0 and self.waiting == 0:
            self._begin()

    def _begin(self) -> None:
        self._plan, self._batch = self._next_plan, 0


def make_batching(name: str, plan: TokenBatchPlan) -> Batching:
    """The rule of that name, one of BATCHINGS; `plan` is what `dp` starts with. Raises UsageError for another name."""
    if name == "dp":
        return plan.cursor()
    if name == "greedy":
        return Greedy()
    if name == "immediate":
        return Immediate()
    if name == "none":
        return AtTrigger()
    raise UsageError(f"unknown token batching {name!r}: choose one of {', '.join(BATCHINGS)}")


class Window:
    """The scheduling window N̂: the mean of the last draft lengths, at most 100 of them, rounded half up, at least 1 and
    at most LONGEST_WINDOW; 20 until the first."""

    def __init__(self) -> None:
        self.tokens = FIRST_WINDOW
        self._lengths: deque[int] = deque(maxlen=REMEMBERED_DRAFTS)
        self._sum = 0

    def observe(self, draft_length: int) -> bool:
        """A draft ended at that many tokens since the last trigger; returns whether the window changed by it."""
        assert draft_length >= 0, f"a draft of {draft_length} tokens"
        if len(self._lengths) == REMEMBERED_DRAFTS:
            self._sum -= self._lengths[0]
        self._lengths.append(draft_length)
        self._sum += draft_length
        before, count = self.tokens, len(self._lengths)
        self.tokens = min(max((2 * self._sum + count) // (2 * count), 1), LONGEST_WINDOW)
        return self.tokens != before


def _timeline(sizes: Sequence[int], beta_s: float, gamma_s: float, gap_s: float) -> tuple[Transmission, ...]:
    steps, drafted, end_s = [], 0, 0.0
    for size in sizes:
        drafting_s, drafted = gamma_s * drafted, drafted + size
        start_s = max(end_s, gamma_s * drafted)
        end_s = start_s + (gap_s + beta_s * size)
        steps.append(Transmission(size, drafting_s, gamma_s * drafted, start_s, end_s))
    return tuple(steps)


def _count(name: str, value: Any) -> int:
    if type(value) is int and 1 <= value <= LONGEST_WINDOW:  # the usual case first: the others cost a microsecond
        return value
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 1 <= value <= LONGEST_WINDOW:
        raise UsageError(f"{name}: got {value!r}, wanted a whole number of tokens, 1 to {LONGEST_WINDOW}")
    return int(value)


def _number(name: str, value: Any, high: float = LONGEST_S) -> float:
    if type(value) is float and 0.0 <= value <= high:
        return value
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not 0 <= value <= high:
        raise UsageError(f"{name}: got {value!r}, wanted a number, 0 to {high:g}")
    return float(value)
