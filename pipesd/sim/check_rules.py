"""What the checker of event logs knows of the rules: when verification is asked for, when tokens are due, what a plan
is worth. Written from the rules' definitions alone, plain and slow; it shares no code with what decides in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

Event = dict[str, Any]

FORCED = "must"  # the rule of an edge that can do nothing else
FIRST_WINDOW, MOST_DRAFTS = 20, 100
LEAST_ADAPTIVE = 1e-12
SETTINGS = ("sequence_threshold", "token_threshold", "entropy_threshold", "draft_length")


class TriggerRule:
    """Recomputes a trigger. Its settings, and what it has learnt, last for the whole session."""

    def __init__(self, start: Event) -> None:
        self.name = start["trigger"]
        self.settings = {name: start[name] for name in SETTINGS}
        self._drafts: list[list[float]] = [[]]  # the probabilities of what is undecided; the last one is not asked for
        self._accepted = 0  # tokens of the first of them that are accepted

    def adopt(self, settings: Event) -> None:
        """Other settings, from a `thresholds` event."""
        self.settings.update((name, settings[name]) for name in SETTINGS if name in settings)

    def observe(self, p_draft: float, entropy: float) -> str | None:
        """The rule that must ask behind this token, or None; of `gain` it cannot be said, see `may_ask`."""
        draft = self._drafts[-1]
        draft.append(p_draft)
        product = math.prod(draft)
        fires = {
            "fixed": [("length", len(draft) >= self.settings["draft_length"])],
            "sequence": [("sequence", product <= self.settings["sequence_threshold"])],
            "token": [("token", p_draft <= self.settings["token_threshold"])],
            "dual": [
                ("sequence", product <= self.settings["sequence_threshold"]),
                ("token", p_draft <= self.settings["token_threshold"]),
            ],
            "entropy": [("entropy", math.sqrt(max(entropy, 0.0)) > self.settings["entropy_threshold"])],
            "adaptive": [("sequence", product <= max(self.settings["sequence_threshold"], LEAST_ADAPTIVE))],
        }
        rule = next((name for name, fired in fires.get(self.name, ()) if fired), None)
        if rule is not None:
            self.asked()
        return rule

    def may_ask(self, rule: str) -> bool:
        """Whether the trigger may ask by `rule` where `observe` could not tell."""
        return self.name == "policy" or self.name == rule == "gain"

    def asked(self) -> None:
        """Verification was asked for: a new draft begins."""
        if self._drafts[-1]:
            self._drafts.append([])

    def forget(self) -> None:
        """The draft was dropped."""
        self._drafts, self._accepted = [[]], 0

    def decided(self, accepted: int, rejected: bool) -> None:
        """So many more of the undecided tokens were accepted, the next one not if `rejected`."""
        whole = False
        self._accepted += accepted
        while len(self._drafts) > 1 and self._accepted >= len(self._drafts[0]):
            self._accepted -= len(self._drafts[0])
            self._learn(self._drafts.pop(0), 0)
            whole = True
        self._accepted = min(self._accepted, len(self._drafts[0]))
        left = len(self._drafts[0]) - self._accepted
        if rejected:
            if left > 0 and not (whole and self._accepted == 0):
                self._learn(self._drafts[0], left)
            self.forget()

    def _learn(self, draft: Sequence[float], wrong: int) -> None:
        """R1 of EdgeLLM behind the verdict on a draft of which the last `wrong` tokens were not accepted."""
        if self.name != "adaptive":
            return
        before = max(self.settings["sequence_threshold"], LEAST_ADAPTIVE)
        product = max(math.prod(draft), LEAST_ADAPTIVE)
        after = before / 2 if not wrong else before / math.pow(product, wrong / len(draft))
        self.settings["sequence_threshold"] = min(max(after, LEAST_ADAPTIVE), 1.0)


class DueRule:
    """Recomputes which tokens are due when, by the token batching in force, and which drafts are to be verified."""

    def __init__(self, batching: str) -> None:
        self.batching = batching
        self.due = False  # tokens are to go by the token batching
        self.may_be_due = False  # the same where it hangs on a moment that the log does not tell
        self.asks: list[int] = []  # ends of drafts whose verification is to be asked for
        self.held = False  # it was said that what is due waits for the link
        self.since = 0  # tokens since a trigger asked last, which is a draft's length
        self.lengths: list[int] = []
        self.waiting = 0  # tokens of the present token batch
        self.planned = 0  # tokens of the last plan
        self._sizes: Sequence[int] = (1,)
        self._next_sizes: Sequence[int] = (1,)
        self._at = 0

    def adopt(self, sizes: Sequence[int]) -> None:
        """Another plan: at once where a period begins, else from the next period on."""
        self._next_sizes, self.planned = sizes, sum(sizes)
        if self._at == 0 and self.waiting == 0:
            self._sizes = sizes

    def drafted(self, link_idle: bool | None) -> None:
        """One more token; `link_idle` is None where that is not known."""
        self.since += 1
        self.waiting += 1
        if self.batching == "dp" and self.waiting >= self._sizes[self._at]:
            self.due = True
            self._next_batch()
        elif self.batching == "immediate" or (self.batching == "greedy" and link_idle):
            self.due = True
            self.waiting = 0
        elif self.batching == "policy" or (self.batching == "greedy" and link_idle is None):
            self.may_be_due = True  # that a policy has its own is all that the log tells of it

    def sent(self, *, everything: bool) -> None:
        """A message was handed to the link; `everything`: it took all that waited."""
        if everything:
            if self.waiting:
                self._next_batch()
            self.due = self.may_be_due = self.held = False

    def ask(self, end: int) -> None:
        """A trigger asked, or had to: the draft and the period end, and the verification up to `end` is due."""
        if self.since:
            self.lengths = [*self.lengths, self.since][-MOST_DRAFTS:]
        self.since, self.due, self.may_be_due = 0, False, False
        self.asks.append(end)
        self._begin()

    def asked(self, end: int) -> None:
        """Verification up to `end` was asked for, or is needless."""
        self.asks = [ask for ask in self.asks if ask > end]

    def forget(self) -> None:
        """The draft was dropped, and what was due with it."""
        self.due, self.may_be_due, self.held, self.since, self.asks = False, False, False, 0, []
        self._begin()

    @property
    def window(self) -> int:
        """The window that plans are made for now: the mean draft length, rounded half up."""
        if not self.lengths:
            return FIRST_WINDOW
        return max(1, math.floor(sum(self.lengths) / len(self.lengths) + 0.5))

    def _next_batch(self) -> None:
        self.waiting = 0
        self._at += 1
        if self._at >= len(self._sizes):
            self._begin()

    def _begin(self) -> None:
        self._sizes, self._at, self.waiting = self._next_sizes, 0, 0


class LinkRule:
    """How long the link has to do with what it was given, by the figures logged, and whether a draft that may yet be
    dropped is worth to be sent. A decision lies between two events, so a question is about `(earliest, latest)`; None
    where the answer changes in between or within `slack_s`, or there are no figures.

    A verdict shows that what it is on is through, which may free the link sooner than the figures say: by how much, the
    log does not tell, so both are asked, the figures and what was sent since alone."""

    MEMORY = 0.1  # weight of the last verdict in the share of drafts that outlived theirs

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self._figures: Event | None = None
        self.plan_figures: Event | None = None  # what a plan is made of, once α and γ are known
        self._free_s = 0.0
        # Time, tokens, and what it takes by the figures of then, of what was sent since the last verdict.
        self._since_verdict: list[tuple[float, int, float]] = []
        # When the verdicts that are awaited should come, at the earliest and at the latest.
        self._answers_s: list[tuple[float, float]] = []
        self._survival = 0.3

    def adopt(self, figures: Event) -> None:
        """What was measured, from an `estimate` event."""
        names = ("alpha_s", "gap_s", "beta_s", "gamma_s", "rtt_s", "pass_s")
        self._figures = {name: figures[name] or 0.0 for name in names}
        alpha_s, gamma_s, gap_s = figures["alpha_s"], figures["gamma_s"], figures["gap_s"]
        if alpha_s is not None and gamma_s is not None:
            gap_s = alpha_s if gap_s is None else min(gap_s, alpha_s)
            self.plan_figures = {
                "alpha_s": alpha_s,
                "beta_s": figures["beta_s"] or 0.0,
                "gamma_s": gamma_s,
                "gap_s": gap_s,
            }

    def sent(self, now_s: float, tokens: int) -> None:
        """A message was handed to the link."""
        if self._figures is not None:
            takes_s = self._takes_s(tokens)
            self._free_s = max(self._free_s, now_s) + takes_s
            self._since_verdict.append((now_s, tokens, takes_s))

    def asked(self, now_s: float, *, first: bool) -> None:
        """Verification was asked for, by what was sent last; `first`: no earlier verdict is awaited."""
        if first:
            self._answers_s.clear()
        if self._figures is not None:
            answer_s = 2 * self._figures["alpha_s"] + self._figures["pass_s"]
            soonest_s, latest_s = (max(free_s, now_s) + answer_s for free_s in (self._soonest_s(), self._free_s))
            self._answers_s.append((soonest_s, latest_s))

    def forget(self) -> None:
        """The draft was dropped: no verdict on it is awaited."""
        self._answers_s = []

    def heard(self) -> None:
        """A verdict came: what was sent before it may be through."""
        self._since_verdict.clear()

    def decided(self, rejected: bool, *, behind: bool) -> None:
        """A verdict came; `behind`: there were tokens behind what it was on."""
        self._answers_s = [] if rejected else self._answers_s[1:]
        if rejected or behind:
            self._survival += self.MEMORY * ((0.0 if rejected else 1.0) - self._survival)

    def idle(self, when_s: tuple[float, float]) -> bool | None:
        """Whether nothing is on its way into the link."""
        if self._figures is None:
            return None
        if self._free_s < when_s[0] - self._slack_s:
            return True
        return False if self._soonest_s() > when_s[1] + self._slack_s else None

    def worth_sending(self, when_s: tuple[float, float], tokens: int, *, guess: bool) -> bool | None:
        """Whether so many tokens, all that were not sent, may go while a verdict is awaited: the link must have taken
        the rest to within the drafting of a token, and what is gained if the draft lives must outweigh by how much the
        next one would be late if it does not. `guess`: the first stands at the place of the target's own token."""
        if self._figures is None:
            return None
        slack_s, answers = self._slack_s, set()
        # What was handed over and asked for stands in the log somewhat apart from when the edge reckoned with it.
        frees_s = (self._soonest_s() - slack_s, self._free_s + slack_s)
        soonest_s, latest_s = self._answers_s[0] if self._answers_s else (-math.inf, -math.inf)
        for free_s, answer_s in product(frees_s, (soonest_s - slack_s, latest_s + slack_s)):
            turns_s = (free_s - self._figures["gamma_s"] + 1e-9, free_s, answer_s)
            times_s = [*when_s, *(turn_s for turn_s in turns_s if when_s[0] < turn_s < when_s[1])]
            answers |= {self._worth(time_s, tokens, free_s, answer_s, guess) for time_s in times_s}
        return answers.pop() if len(answers) == 1 else None

    def _soonest_s(self) -> float:
        """When the link is free at the earliest."""
        free_s = -math.inf
        for at_s, tokens, takes_s in self._since_verdict:
            free_s = max(free_s, at_s) + min(takes_s, self._takes_s(tokens))
        return min(free_s, self._free_s)

    def _worth(self, now_s: float, tokens: int, free_s: float, answer_s: float, guess: bool) -> bool:
        assert self._figures is not None
        busy_s, gamma_s = max(0.0, free_s - now_s), self._figures["gamma_s"]
        left_s = max(0.0, answer_s - now_s)
        gain_s = max(left_s - busy_s, gamma_s)
        if guess:
            gain_s -= self._figures["beta_s"]
        loss_s = max(0.0, busy_s + self._takes_s(tokens) - left_s - gamma_s)
        return bool(busy_s <= gamma_s and self._survival * gain_s >= (1.0 - self._survival) * loss_s)

    def _takes_s(self, tokens: int) -> float:
        assert self._figures is not None
        gap_s, beta_s = self._figures["gap_s"], self._figures["beta_s"]
        return float(gap_s + beta_s * tokens)


def plan_findings(plan: Event, link_model: str, window: int | None, figures: Event | None) -> Iterator[str]:
    """What is wrong with a plan: its total, how far it is from the best one, and where they are known the window and
    the figures that it was made for."""
    sizes, total_s = plan["sizes"], plan["total_s"]
    alpha_s, beta_s, gamma_s, gap_s = (plan[name] for name in ("alpha_s", "beta_s", "gamma_s", "gap_s"))
    if plan["window"] != sum(sizes) or min(sizes) < 1:
        yield f"token batches {sizes} for a window of {plan['window']}"
        return
    if gap_s > alpha_s or (link_model == "hockney" and gap_s != alpha_s):
        yield f"gap {gap_s} s with alpha {alpha_s} s, planned by the {link_model} model"
    end_s, drafted = 0.0, 0
    for size in sizes:
        drafted += size
        end_s = max(end_s, drafted * gamma_s) + gap_s + beta_s * size
    own_s = end_s + alpha_s - gap_s
    if not math.isclose(own_s, total_s, rel_tol=1e-9, abs_tol=1e-9):
        yield f"the plan's total is {total_s} s, recomputed {own_s}"
    best_s = _least_end_s(drafted, beta_s, gamma_s, gap_s) + alpha_s - gap_s
    if own_s > best_s * 1.01 + 1e-9:
        yield f"the plan takes {own_s} s, the best one for {drafted} tokens {best_s}"
    if figures is not None:
        wanted = {**figures, "gap_s": figures["alpha_s"]} if link_model == "hockney" else figures
        if any(plan[name] != value for name, value in wanted.items()):
            yield f"the plan is for other figures than were measured: {wanted}"
    if window is not None and plan["window"] != window:
        yield f"planned for a window of {plan['window']}, the drafts so far make it {window}"


def _least_end_s(window: int, beta_s: float, gamma_s: float, gap_s: float) -> float:
    """When the last of `window` tokens can have left at the earliest: every last token batch is tried."""
    ends_s = [0.0]
    for j in range(1, window + 1):
        ends_s.append(min(max(ends_s[i], gamma_s * j) + gap_s + beta_s * (j - i) for i in range(j)))
    return ends_s[window]
