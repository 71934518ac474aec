"""What the log of one generation says so far, for the checker of event logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipesd.sim.check_refusals import Refusals
from pipesd.sim.check_rules import DueRule, Event, LinkRule, TriggerRule

LEAST_AHEAD = 16  # tokens ahead, of draft and of free run, until the cloud has granted more
COUNTED = (
    "drafted", "accepted", "rejections", "navs", "rounds", "proactive", "promoted", "refusals", "proposals", "bytes_up",
    "bytes_down",
)  # fmt: skip


@dataclass
class Generation:
    """What one generation's log says so far. The rules remember what the session's earlier ones have shown."""

    start: Event
    trigger: TriggerRule
    rule: DueRule
    link: LinkRule
    known: int  # committed length
    limit: int
    now_s: float = 0.0
    draft: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # committed behind the prompt
    part: int = 0  # tokens accepted in a round that is not over
    expected: str | None = None  # a trigger that must come next
    nav: tuple[int, int] | None = None
    nav_said: bool = False  # in this opening
    window: int | None = None  # what a plan should have been made for when the last round ended
    asked: bool = False  # by what is being sent
    first: bool = True  # no earlier verdict was awaited then
    proactive: int = 0  # tokens at the draft's end that were drafted while a NAV was outstanding
    rollback: int | None = None  # just said; what it means shows the next event
    drafts: bool = True
    stopping: bool = False  # it drafts no more, but has a draft that is still to be tested
    state: str = "opening"  # waiting: the cloud named a time to come again
    sent: int = 0  # position up to which the draft has been sent in this opening
    told: int = 0  # the last acknowledgement
    more: bool = False
    ahead: int = LEAST_AHEAD
    run_ahead: int = LEAST_AHEAD
    tried: bool = False  # what was due was given to the link, which did not take it
    late: int = 0  # tokens drafted since what is due could have gone
    before: Event = field(default_factory=dict)  # the last event
    refusals: Refusals = field(default_factory=Refusals)
    openings: int = 0
    told_counters: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    triggers: Counter[str] = field(default_factory=Counter)

    @property
    def when_s(self) -> tuple[float, float]:
        """Between which times what is told now was decided."""
        return (self.before or self.start)["t"], self.now_s

    @property
    def end(self) -> int:
        """Position behind the draft."""
        return self.known + len(self.draft)

    @property
    def may_draft(self) -> bool:
        """Whether another token is of use, by the bounds."""
        ended = bool(self.draft) and self.draft[-1] in self.start["stop_ids"]
        most = min(self.ahead, self.start["draft_ahead"], LEAST_AHEAD if self.tested else self.ahead)
        full = len(self.draft) >= most or self.end >= self.limit - 1
        leaves_it = self.tested and self.nav is not None and self.nav[0] <= self.nav[1]  # the cloud draws there
        return (
            self.drafts
            and not (full or ended or leaves_it or self.refusals.pending)
            and (self.nav is None or self.start["waiting"] == "draft")
        )

    @property
    def tested(self) -> bool:
        """Whether the cloud tests draft tokens against a random number."""
        sampling = self.start.get("sampling") or {"method": "noise"}
        return sampling["method"] != "noise" and sampling["temperature"] > 0

    def promote(self, number: int) -> None:
        self.counts["promoted"] += number
        self.proactive -= number

    def ask(self) -> None:
        """Verification is asked for. From now on it is outstanding, until then it was due."""
        self.first = self.nav is None
        end = self.rule.asks[0] if self.rule.asks else self.end
        self.nav, self.nav_said = (end, self.known), False
        self.counts["navs"] += 1
        self.rule.asked(end)
        self.rule.held = False
        self.asked = True

    def content(self, pos: int, end: int) -> list[int]:
        """The ids from position `pos` to `end`: of the draft, or of it and the id before it that was drawn anew."""
        before = self.ids[-1:] if pos == self.known - 1 and self.refusals.unheard else []
        return before + self.draft[max(0, pos - self.known) : max(0, end - self.known)]

    def confidence(self, drafted: Event) -> float:
        """What the trigger takes for the confidence in a token."""
        return float(drafted.get("margin", 0.0) if self.start.get("confidence") == "margin" else drafted["p_draft"])

    @property
    def amount(self) -> int:
        """How many tokens a message would take that sends what is due."""
        return max(0, (self.rule.asks[0] if self.rule.asks else self.end) - max(self.sent, self.known))

    def worth_sending(self) -> bool | None:
        """Whether these may go while a verdict is awaited; None where the log cannot tell."""
        guess = self.nav is not None and max(self.sent, self.known) <= self.nav[0]
        return self.link.worth_sending(self.when_s, self.amount, guess=guess)

    def forget(self) -> None:
        """The draft, or its end, was dropped: the rules begin anew."""
        self.trigger.forget()
        self.rule.forget()
        self.link.forget()
        self.expected, self.late = None, 0

    def sends_due(self) -> bool:
        """Whether tokens were to go: by what was due, or as the link has become idle meanwhile."""
        greedy = self.rule.batching in ("greedy", "policy") and self.link.idle(self.when_s) is not False
        return greedy or self.rule.due or self.rule.may_be_due

    def lacks_plan(self) -> bool:
        """Whether a round has ended that should have brought a plan for another window, and did not."""
        wanted, self.window = self.window, None
        planned = self.rule.batching in ("dp", "policy") and self.link.plan_figures is not None
        return planned and wanted is not None and self.rule.planned != wanted

    def cut(self, pos: int) -> None:
        """The draft was dropped from `pos` on, and no verdict did it."""
        dropped = self.draft[max(0, pos - self.known) :]
        self.proactive = max(0, self.proactive - len(dropped))
        del self.draft[len(self.draft) - len(dropped) :]
        self.sent = min(self.sent, pos)
        if self.nav is not None:
            self.nav = min(self.nav[0], pos), self.nav[1]
        self.forget()
