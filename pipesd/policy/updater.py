"""When the plan and the thresholds change: at the end of a round, when what they were made for has changed.

The planner runs again for a new window, and when drafting or the link have changed by more than a fifth; the thresholds
follow the search in `tuning` (PipeSD, section 4, with the δ of a reproduction). Between two rounds nothing changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipesd.core import Mode
from pipesd.policy.estimate import Estimate, changed
from pipesd.policy.sending import Sending
from pipesd.policy.strategy import Strategy
from pipesd.policy.token_batches import FIRST_WINDOW, TokenBatchPlan, Window, plan_for_run, plan_of
from pipesd.policy.trigger import Costs
from pipesd.policy.tuning import Tuning


class Change(NamedTuple):
    """Something that is in force from now on: `what` is `plan` or `thresholds`."""

    what: str
    why: str
    values: dict[str, Any]


def first_plan() -> TokenBatchPlan:
    """The plan until something is known of link and drafting: one token each."""
    return plan_of((1,) * FIRST_WINDOW, 0.0, 0.0, 0.0)


class Updater:
    """Watches rounds and gives new parameters to what sends and asks."""

    def __init__(self, strategy: Strategy, link_model: str, sending: Sending) -> None:
        self.window = Window()
        self.plan = first_plan()
        self.tuning: Tuning | None = None
        self._strategy, self._hockney = strategy, link_model == "hockney"
        self._sending = sending
        self._planned_for: Estimate | None = None

    def begin(self, estimate: Estimate) -> list[Change]:
        """A generation begins; returns all that is in force."""
        self._update(estimate)
        changes = []
        if self._strategy.plans:
            changes.append(self._plan_change("begin"))
        if self.tuning is not None:
            changes.append(self._thresholds("begin"))
        return changes

    def asked(self, draft_length: int) -> None:
        """Verification was asked for, so many tokens after the last time."""
        if draft_length:
            self.window.observe(draft_length)

    def round_end(self, estimate: Estimate, tokens: int, took_s: float | None) -> list[Change]:
        """A round brought so many tokens in that time, if it is known; returns what changes by it."""
        changes = []
        if why := self._update(estimate):
            changes.append(self._plan_change(why))
        if self.tuning is not None and took_s is not None and (why := self.tuning.round_end(tokens, took_s)):
            changes.append(self._thresholds(why))
        return changes

    def _update(self, estimate: Estimate) -> str | None:
        """Give what was measured to those who go by it; returns why there is another plan, or None."""
        sending = self._sending
        sending.gamma_s = estimate.gamma_s or 0.0
        sending.answer_s = 2.0 * (estimate.alpha_s or 0.0) + (estimate.pass_s or 0.0)
        sending.uplink.adopt(estimate.gap_s or 0.0, estimate.beta_s or 0.0)
        if estimate.gamma_s and estimate.tpt_s:
            sending.trigger.adopt(Costs(estimate.gamma_s, sending.answer_s, estimate.tpt_s))
        if not self._strategy.plans or (figures := estimate.plan_figures()) is None:
            return None
        if (why := self._reason(estimate)) is None:
            return None
        gap_s = figures.alpha_s if self._hockney else figures.gap_s
        one_each = self._strategy.mode is Mode.EAGER
        self._planned_for = estimate
        self.plan = plan_for_run(
            self.window.tokens, figures.alpha_s, figures.beta_s, figures.gamma_s, gap_s, one_each=one_each
        )
        sending.batching.adopt(self.plan)
        return why

    def _reason(self, estimate: Estimate) -> str | None:
        """Why to plan again (PipeSD, section 4: for another γ, α, β, or window)."""
        if self._planned_for is None:
            return "first figures"
        names = changed(self._planned_for, estimate) - {"tpt"}
        if self.window.tokens != self.plan.window:
            names |= {"window"}
        return f"another {', '.join(sorted(names))}" if names else None

    def _plan_change(self, why: str) -> Change:
        plan = self.plan
        values = {
            "window": plan.window, "sizes": plan.sizes, "total_s": plan.total_s, "alpha_s": plan.alpha_s,
            "beta_s": plan.beta_s, "gamma_s": plan.gamma_s, "gap_s": plan.gap_s,
        }  # fmt: skip
        return Change("plan", why, values)

    def _thresholds(self, why: str) -> Change:
        assert self.tuning is not None
        options = self.tuning.options
        for name, value in options.items():
            assert hasattr(self._sending.trigger, name), f"the trigger has no {name}"
            setattr(self._sending.trigger, name, value)
        return Change("thresholds", why, options)
