"""`pipesd-edge plan`: the best split of a window into token batches, for a link that is given in numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipesd.config import check, option
from pipesd.errors import UsageError
from pipesd.policy.token_batches import (
    FIRST_WINDOW,
    LONGEST_S,
    LONGEST_WINDOW,
    TokenBatchPlan,
    plan_of,
    plan_token_batches,
)
from pipesd.streams import show, utf8_output

_LONGEST_MS = LONGEST_S * 1000
_NARROWEST = 20  # columns of a plot that still shows something
_UNICODE, _ASCII = tuple("█▒·»"), tuple("#=.>")  # token batches in turn, nothing, the last one on its way


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for. Raises UsageError for a value out of bounds and for one that is missing."""

    window: int = option(FIRST_WINDOW, "draft tokens to plan for", low=1, high=LONGEST_WINDOW)
    alpha_ms: float = option(None, "start-up of the link, one way; needed", low=0, high=_LONGEST_MS)
    beta_ms: float = option(None, "time a draft token takes of the link; needed", low=0, high=_LONGEST_MS)
    gamma_ms: float = option(None, "time that drafting a token takes; needed", low=0, high=_LONGEST_MS)
    gap_ms: float | None = option(
        None, "time a message takes of the link beside its tokens, at most alpha; without it alpha", low=0
    )

    def __post_init__(self) -> None:
        missing = [name for name in ("alpha", "beta", "gamma") if getattr(self, f"{name}_ms") is None]
        if missing:
            raise UsageError(f"plan needs {' and '.join(f'--{name}-ms X' for name in missing)}")
        check(self)
        if self.gap_ms is not None and self.gap_ms > self.alpha_ms:
            raise UsageError(
                f"gap-ms: got {self.gap_ms:g}, wanted at most alpha-ms, {self.alpha_ms:g}, of which it is a part"
            )

    def plan(self) -> TokenBatchPlan:
        gap_s = None if self.gap_ms is None else self.gap_ms / 1000
        alpha_s, beta_s, gamma_s = self.alpha_ms / 1000, self.beta_ms / 1000, self.gamma_ms / 1000
        return plan_token_batches(self.window, alpha_s, beta_s, gamma_s, gap_s, compiled=False)


def show_plan(config: PlanConfig, *, as_json: bool) -> int:
    """Plan and print; returns the exit code."""
    plan = config.plan()
    if as_json:
        show(json.dumps({"batches": plan.sizes, "total_ms": _ms(plan.total_s)}) + "\n")
    else:
        show(describe(plan, shutil.get_terminal_size().columns, ascii_only=not utf8_output()))
    return 0


def plan_failed(interrupted: bool) -> str:
    """What stdout gets from `plan --json` that was refused."""
    return json.dumps({"batches": None, "total_ms": None, "error": "nothing was planned; stderr says why"}) + "\n"


def describe(plan: TokenBatchPlan, columns: int, *, ascii_only: bool) -> str:
    """The plan in a line, what the two simplest ones would take in another, and where there is room its course."""
    times_s = (plan.alpha_s, plan.beta_s, plan.gamma_s, plan.gap_s)
    at_once, one_each = (plan_of(sizes, *times_s).total_s for sizes in ((plan.window,), (1,) * plan.window))
    lines = [
        f"{_counted(plan.window, 'draft token')} in {_counted(len(plan.sizes), 'token batch')}: "
        f"{_ms(plan.total_s):.6g} ms ({plan.link_model})",
        f"sizes: {_sizes(plan.sizes, ' x ' if ascii_only else ' × ')}",
        f"all in one: {_ms(at_once):.6g} ms; one each: {_ms(one_each):.6g} ms",
    ]
    width = columns - len("drafting ") - 1
    if width >= _NARROWEST and plan.total_s > 0:
        lines += ["", *_plot(plan, width, _ASCII if ascii_only else _UNICODE)]
    return "\n".join(lines) + "\n"


def _plot(plan: TokenBatchPlan, width: int, signs: Sequence[str]) -> list[str]:
    """Drafting and link side by side, a column for each slice of the time; its middle decides what it shows."""
    *batches, nothing, under_way = signs
    steps = plan.timeline()
    drafting, link = [], []
    for column in range(width):
        at_s = (column + 0.5) / width * plan.total_s
        drafted = [k for k, step in enumerate(steps) if step.drafting_s <= at_s < step.drafted_s]
        sent = [k for k, step in enumerate(steps) if step.start_s <= at_s < step.end_s]
        drafting.append(batches[drafted[-1] % 2] if drafted else nothing)
        link.append(batches[sent[-1] % 2] if sent else nothing if at_s < steps[-1].end_s else under_way)
    end = f"{_ms(plan.total_s):.6g} ms"
    return [
        f"drafting {''.join(drafting)}",
        f"link     {''.join(link)}",
        f"         {'0':<{width - len(end)}}{end}",
    ]


def _sizes(sizes: Sequence[int], times: str) -> str:
    """`1, 3 × 2, 5`: equal neighbours are counted."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return ", ".join(str(size) if count == 1 else f"{count}{times}{size}" for size, count in runs)


def _counted(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{count} {thing if count == 1 else plural}"


def _ms(seconds: float) -> float:
    """Milliseconds to the 15 digits that a float surely has, so that 0.807 s are 807 ms."""
    return float(f"{seconds * 1000:.15g}")
