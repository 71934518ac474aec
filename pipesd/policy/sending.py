"""What goes up the link and when: token batching, the trigger, and what the link can take now, put together.

A token batch that is due goes at once while no verdict is awaited. While one is, the draft may turn out wrong, and what
was handed to the link cannot be called back: then a batch waits at the edge until the link has taken what came before,
and until to send it ahead is worth what it costs if the draft is dropped. A draft that is dropped takes what waits with
it (PipeSD, rules 1 and 2; the weighing is ours).
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from pipesd.policy.token_batches import Batching
from pipesd.policy.trigger import Trigger

FIRST_SURVIVAL = 0.3  # share of drafts that live, until verdicts tell
SURVIVAL_MEMORY = 0.1  # weight of the last verdict in it


class Step(Enum):
    """What is to be done now."""

    NOTHING = 0
    SEND = 1  # give the link what was drafted
    ASK = 2  # and ask for verification
    HOLD = 3  # something became due that the link does not get yet; said once


NOTHING, SEND, ASK, HOLD = Step  # looked up once: it is done per token, and an enum's member costs ten times a global


class Uplink:
    """How long the link is still busy with what it was given, by the measured gap and β (PipeSD, section 3)."""

    def __init__(self) -> None:
        self.gap_s = self.beta_s = 0.0
        self.free_s = 0.0  # when the link will have taken all that it was given

    def adopt(self, gap_s: float, beta_s: float) -> None:
        """What a message takes, and each of its tokens."""
        self.gap_s, self.beta_s = gap_s, beta_s

    def takes_s(self, tokens: int) -> float:
        """What a message of so many tokens takes of the link."""
        return self.gap_s + self.beta_s * tokens

    def sent(self, now_s: float, tokens: int) -> None:
        """A message was handed to the link."""
        self.free_s = max(self.free_s, now_s) + self.takes_s(tokens)

    def busy_s(self, now_s: float) -> float:
        """How long the link has still to do with what it was given."""
        return max(0.0, self.free_s - now_s)


class Sending:
    """Decides for each draft token; `next_step` says what of it is to be done now. Positions are absolute."""

    def __init__(self, batching: Batching, trigger: Trigger, uplink: Uplink) -> None:
        self.batching, self.trigger, self.uplink = batching, trigger, uplink
        self.gamma_s = 0.0  # what drafting a token takes
        self.answer_s = 0.0  # from the end of a message that asks to the verdict
        self.since_trigger = 0  # draft tokens since a trigger asked last
        self._due = False  # tokens are to go by the token batching
        self._asked_end = 0  # of the draft whose verification was asked for last
        self._asks: deque[int] = deque()  # ends of drafts whose verification is to be asked for, one after the other
        self._held = False
        self._survival = FIRST_SURVIVAL  # share of drafts that outlived the verdict on what was before them
        self._answers_s: deque[float] = deque()  # when the verdicts that are awaited should come

    def reset(self) -> None:
        """The draft was dropped, or a generation begins: nothing is due, the trigger and the period begin anew."""
        self.batching.reset()
        self.trigger.reset()
        self.since_trigger = 0
        self._due = self._held = False
        self._asks.clear()
        self._answers_s.clear()

    def drafted(self, confidence: float, entropy: float, end: int, now_s: float) -> str | None:
        """One more token was drafted, behind which the draft ends at `end`, with the confidence and the entropy (nats)
        that the trigger sees; returns the rule that asks for verification, if one does: then the draft up to here is to
        be verified and the period ends (PipeSD, rule 1)."""
        self.since_trigger += 1
        rule = self.trigger.observe(confidence, entropy)
        if self.batching.drafted(self.uplink.free_s <= now_s):
            self._due = True
        if rule is not None:
            self.ask(end)
        return rule

    def ask(self, end: int) -> int:
        """Verification of the draft up to `end` is wanted, by the trigger or as nothing else is left to do; a new draft
        begins. Returns how many tokens this one has."""
        tokens, self.since_trigger = self.since_trigger, 0
        self._asks.append(end)
        self._due = False
        self.batching.flush()
        self.trigger.asked()
        return tokens

    def next_step(self, now_s: float, sent: int, end: int, *, awaiting: bool) -> tuple[Step, int]:
        """What is to be done now, and up to which position. The draft was sent up to `sent` and ends at `end`;
        `awaiting`: the verdict on an earlier draft is outstanding."""
        if not awaiting:
            self._answers_s.clear()
        if not self._asks and not self._due and self.uplink.free_s <= now_s and self.batching.idle():
            self._due = True
        step, upto = (Step.ASK, self._asks[0]) if self._asks else (Step.SEND if self._due else Step.NOTHING, end)
        if step is Step.NOTHING:
            return step, sent
        if awaiting and not self._worth_sending(now_s, max(0, upto - sent), guess=sent <= self._asked_end):
            held, self._held = self._held, True
            return (Step.NOTHING if held else Step.HOLD), sent
        return step, upto

    def sent(self, now_s: float, tokens: int, *, everything: bool) -> None:
        """A message with so many tokens was handed to the link; `everything`: nothing of the draft is unsent now."""
        self.uplink.sent(now_s, tokens)
        if everything:
            self.batching.taken()
            self._due = self._held = False

    def asked(self, now_s: float, end: int) -> None:
        """Verification up to `end` was asked for. Where the link did not take it, the machine says it again."""
        while self._asks and self._asks[0] <= end:
            self._asks.popleft()
        self._held = False
        self._asked_end = end
        self._answers_s.append(now_s + self.uplink.busy_s(now_s) + self.answer_s)

    def decided(self, accepted: int, known: int, *, rejected: bool) -> None:
        """A verdict came: so many draft tokens were accepted, the next one not if `rejected`; now all is decided up to
        position `known`."""
        self.trigger.decided(accepted, rejected)
        while self._asks and self._asks[0] <= known:
            self._asks.popleft()
        if self._answers_s:
            self._answers_s.popleft()
        if rejected or self.since_trigger or self._asks:  # else nothing was behind that could have been dropped
            self._survival += SURVIVAL_MEMORY * ((not rejected) - self._survival)
        if rejected:
            self.reset()

    def wait_s(self, now_s: float) -> float | None:
        """How long until `next_step` should be asked again although nothing was drafted or heard; None: for ever, as
        what is held for its worth becomes worth no more by waiting."""
        busy_s = self.uplink.busy_s(now_s)
        if busy_s == 0.0 or not (self._asks or self._due or self.batching.waiting):
            return None
        if not self._held:
            return busy_s
        return busy_s - self.gamma_s if busy_s > self.gamma_s else None

    def _worth_sending(self, now_s: float, tokens: int, *, guess: bool) -> bool:
        """Whether to hand the link so many tokens of a draft that may yet be dropped; `guess`: the first of them stands
        where the verdict brings a token of the target's own.

        Not before it has taken the rest, to within the time of a draft token, as the next look comes after one. If the
        draft lives, they come sooner by what is left until the verdict, at least by a draft token; but the guess of the
        target's own token is sent for nothing, as it would have come with the verdict. If the draft is dropped, the
        next batch comes no sooner than the verdict and one draft token: only what the link is busy with beyond that is
        lost.
        """
        busy_s = self.uplink.busy_s(now_s)
        if busy_s > self.gamma_s:
            return False
        verdict_s = max(0.0, self._answers_s[0] - now_s) if self._answers_s else 0.0
        gained_s = max(verdict_s - busy_s, self.gamma_s) - (self.uplink.beta_s if guess else 0.0)
        lost_s = max(0.0, busy_s + self.uplink.takes_s(tokens) - verdict_s - self.gamma_s)
        return self._survival * gained_s >= (1.0 - self._survival) * lost_s
