"""What goes up the link and when: token batching, the trigger, and what the link can take now, put together.

A token batch that is due goes at once while no verdict is awaited. While one is, the draft may turn out wrong, and what
was handed to the link cannot be called back: then a batch waits at the edge until the link has taken what came before,
and until to send it ahead is worth what it costs if the draft is dropped. A draft that is dropped takes what waits with
it (PipeSD, rules 1 and 2; the weighing is ours).
"""

from __future__ import annotations

from enum import Enum

from pipesd.core import Drawn
from pipesd.policy.token_batches import Batching
from pipesd.policy.trigger import Trigger

SURVIVAL_MEMORY = 0.1  # weight of the last verdict in the share of drafts that survived theirs


class Step(Enum):
    """What is to be done now."""

    NOTHING = 0
    SEND = 1  # give the link what was drafted
    ASK = 2  # and ask for verification
    HOLD = 3  # something became due that the link does not get yet; said once


class Uplink:
    """How long the link is still busy with what it was given, by the measured gap and β (PipeSD, section 3)."""

    def __init__(self) -> None:
        self.gap_s = self.beta_s = 0.0
        self._free_s = 0.0

    def adopt(self, gap_s: float, beta_s: float) -> None:
        """What a message takes, and each of its tokens."""
        self.gap_s, self.beta_s = gap_s, beta_s

    def takes_s(self, tokens: int) -> float:
        """What a message of so many tokens takes of the link."""
        return self.gap_s + self.beta_s * tokens

    def sent(self, now_s: float, tokens: int) -> None:
        """A message was handed to the link."""
        self._free_s = max(self._free_s, now_s) + self.takes_s(tokens)

    def busy_s(self, now_s: float) -> float:
        """How long the link has still to do with what it was given."""
        return max(0.0, self._free_s - now_s)


class Sending:
    """Decides for each draft token; `next_step` says what of it is to be done now."""

    def __init__(self, batching: Batching, trigger: Trigger, uplink: Uplink) -> None:
        self.batching, self.trigger, self.uplink = batching, trigger, uplink
        self.gamma_s = 0.0  # what drafting a token takes
        self.answer_s = 0.0  # from asking to the verdict
        self.since_trigger = 0  # draft tokens since verification was last asked for
        self._unsent = 0
        self._due = Step.NOTHING
        self._held = False
        self._survival = 0.5  # share of drafts that outlived the verdict on what was before them
        self._answered_s = 0.0  # when the verdict that is awaited should come

    def reset(self) -> None:
        """The draft was dropped, or a generation begins: nothing is due, the trigger and the period begin anew."""
        self.batching.reset()
        self.trigger.reset()
        self.since_trigger = self._unsent = 0
        self._due, self._held = Step.NOTHING, False

    def drafted(self, drawn: Drawn, now_s: float) -> str | None:
        """One more token was drafted; returns the rule that asks for verification, if one does."""
        self.since_trigger += 1
        self._unsent += 1
        rule = self.trigger.observe(drawn.p_draft, drawn.entropy)
        if self.batching.drafted(self.uplink.busy_s(now_s) == 0.0) and self._due is Step.NOTHING:
            self._due = Step.SEND
        if rule is not None:
            self._due = Step.ASK
        return rule

    def next_step(self, now_s: float, *, awaiting: bool) -> Step:
        """What is to be done now; `awaiting`: the verdict on an earlier draft is outstanding."""
        if self._due is Step.NOTHING and self.uplink.busy_s(now_s) == 0.0 and self.batching.idle():
            self._due = Step.SEND
        if self._due is Step.NOTHING:
            return Step.NOTHING
        if awaiting and not self._worth_sending(now_s):
            held, self._held = self._held, True
            return Step.NOTHING if held else Step.HOLD
        return self._due

    def sent(self, now_s: float, tokens: int) -> None:
        """A message with so many tokens, all that were not sent yet, was handed to the link."""
        self.uplink.sent(now_s, tokens)
        self.batching.taken()
        self._unsent = 0
        self._due, self._held = Step.NOTHING, False

    def asked(self, now_s: float) -> None:
        """Verification was asked for, by the trigger or not: the period ends (PipeSD, rule 1), and the draft. Where the
        link did not take it, whoever keeps count of what was sent says it again."""
        self._due, self._held = Step.NOTHING, False
        self.trigger.asked()
        self.batching.flush()
        self.since_trigger = 0
        self._answered_s = now_s + self.uplink.busy_s(now_s) + self.answer_s

    def decided(self, accepted: int, *, rejected: bool) -> None:
        """A verdict came: so many draft tokens were accepted, the next one not if `rejected`."""
        self.trigger.decided(accepted, rejected)
        self._survival += SURVIVAL_MEMORY * ((not rejected) - self._survival)
        if rejected:
            self.reset()

    def wait_s(self, now_s: float) -> float | None:
        """When to ask for `next_step` again although nothing was drafted or heard; None: never."""
        busy_s = self.uplink.busy_s(now_s)
        if not self._unsent or busy_s == 0.0:
            return None
        if not self._held:
            return busy_s
        return busy_s - self.gamma_s if busy_s > self.gamma_s else None

    def _worth_sending(self, now_s: float) -> bool:
        """Whether to hand the link a batch of a draft that may yet be dropped.

        Not before it has taken the rest, to within the time of a draft token, as the next look comes after one. If the
        draft is dropped, the next batch comes no sooner than the verdict and one draft token: only what the link is
        busy with beyond that is lost. If it lives, all that the batch takes is gained.
        """
        if self.uplink.busy_s(now_s) > self.gamma_s:
            return False
        takes_s = self.uplink.busy_s(now_s) + self.uplink.takes_s(self._unsent)
        lost_s = takes_s - max(0.0, self._answered_s - now_s) - self.gamma_s
        return self._survival * takes_s >= (1.0 - self._survival) * lost_s
