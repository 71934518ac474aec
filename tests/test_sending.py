"""What goes up the link and when: due batches, what is held back while a verdict is awaited, rules 1 and 2."""

from __future__ import annotations

import pytest

from pipesd.policy.sending import Sending, Step, Uplink
from pipesd.policy.token_batches import make_batching, plan_of
from pipesd.policy.trigger import DualThreshold, FixedLength, Trigger

SURE = 0.99, 0.1  # confidence and entropy
PLAN = plan_of((1, 2, 3), 0.0, 0.0, 0.0)


def made(batching: str = "dp", trigger: Trigger | None = None, *, gap_s: float = 0.0, beta_s: float = 0.0) -> Sending:
    uplink = Uplink()
    uplink.adopt(gap_s, beta_s)
    sending = Sending(make_batching(batching, PLAN), trigger or FixedLength(100), uplink)
    sending.gamma_s = 0.01
    return sending


class Edge:
    """Drafts a token each 10 ms and sends at once what is to be sent; `steps` are (tokens drafted, step, up to)."""

    def __init__(self, sending: Sending, *, awaiting: bool = False) -> None:
        self.sending, self.awaiting = sending, awaiting
        self.end = self.sent = 0
        self.now_s = 0.0
        self.steps: list[tuple[int, Step, int]] = []

    def draft(self, tokens: int) -> Edge:
        for _ in range(tokens):
            self.now_s += 0.01
            self.end += 1
            self.sending.drafted(*SURE, self.end, self.now_s)
            self.look()
        return self

    def look(self) -> None:
        step, upto = Step.ASK, 0
        while step is Step.ASK:
            step, upto = self.sending.next_step(self.now_s, self.sent, self.end, awaiting=self.awaiting)
            if step is not Step.NOTHING:
                self.steps.append((self.end, step, upto))
            if step in (Step.SEND, Step.ASK):
                tokens, self.sent = upto - self.sent, upto
                self.sending.sent(self.now_s, tokens, everything=upto == self.end)
            if step is Step.ASK:
                self.sending.asked(self.now_s, upto)

    @property
    def sends(self) -> list[int]:
        """After how many tokens something was sent."""
        return [end for end, step, _ in self.steps if step is not Step.HOLD]


def test_batches_go_with_the_plan_which_repeats() -> None:
    assert Edge(made()).draft(12).sends == [1, 3, 6, 7, 9, 12]


def test_the_other_rules() -> None:
    assert Edge(made("immediate")).draft(4).sends == [1, 2, 3, 4]
    assert Edge(made("none")).draft(9).sends == []
    assert Edge(made("greedy")).draft(4).sends == [1, 2, 3, 4]
    # the link takes 25 ms for a message: at 10 the first goes, it is idle again at 35, seen at 40
    assert Edge(made("greedy", gap_s=0.025)).draft(8).sends == [1, 4, 7]


def test_at_the_trigger_everything_goes_and_the_plan_begins_anew() -> None:
    assert Edge(made(trigger=FixedLength(5))).draft(11).steps == [
        (1, Step.SEND, 1), (3, Step.SEND, 3), (5, Step.ASK, 5), (6, Step.SEND, 6), (8, Step.SEND, 8),
        (10, Step.ASK, 10), (11, Step.SEND, 11),
    ]  # fmt: skip


def test_ahead_of_a_verdict_batches_go_with_the_plan_while_the_link_is_free() -> None:
    assert Edge(made(gap_s=0.002), awaiting=True).draft(7).sends == [1, 3, 6, 7]


def test_what_the_link_cannot_take_waits_at_the_edge_and_goes_when_it_can() -> None:
    sending = made("immediate", gap_s=0.045)
    sending.answer_s = 100.0  # long before the verdict, sending ahead costs nothing
    sending.asked(0.0, 0)
    assert [step[:2] for step in Edge(sending, awaiting=True).draft(8).steps] == [
        (1, Step.SEND), (2, Step.HOLD), (5, Step.SEND), (6, Step.HOLD),
    ]  # fmt: skip


def test_nothing_is_held_back_that_no_verdict_can_drop() -> None:
    assert Edge(made("immediate", gap_s=0.045)).draft(3).sends == [1, 2, 3]


def test_what_is_held_goes_once_the_verdict_is_there() -> None:
    sending = made("immediate", gap_s=1.0)
    sending.sent(0.0, 1, everything=True)
    edge = Edge(sending, awaiting=True).draft(2)
    assert edge.steps == [(1, Step.HOLD, 0)], "said once"
    edge.awaiting = False
    edge.look()
    assert edge.steps[1:] == [(2, Step.SEND, 2)]


def test_drafts_that_are_held_are_asked_for_one_after_the_other() -> None:
    """What was drafted behind a trigger, while its draft could not go, is the next draft and not a part of it."""
    sending = made("none", FixedLength(3), gap_s=1.0)
    sending.sent(0.0, 1, everything=True)
    edge = Edge(sending, awaiting=True).draft(8)
    assert edge.steps == [(3, Step.HOLD, 0)]
    edge.awaiting = False
    edge.look()
    assert edge.steps[1:] == [(8, Step.ASK, 3), (8, Step.ASK, 6)], "nothing awaits a verdict here"
    assert edge.sent == 6


def test_a_repeat_of_what_was_sent_takes_nothing_of_what_is_held() -> None:
    sending = made("none", FixedLength(3), gap_s=1.0)
    sending.sent(0.0, 1, everything=True)
    edge = Edge(sending, awaiting=True).draft(3)
    sending.sent(edge.now_s, 2, everything=False)
    edge.awaiting = False
    edge.look()
    assert edge.steps[1:] == [(3, Step.ASK, 3)]


def test_a_rejection_cancels_what_waits() -> None:
    sending = made("immediate", gap_s=1.0)
    sending.sent(0.0, 1, everything=True)
    edge = Edge(sending, awaiting=True).draft(1)
    sending.decided(0, 1, rejected=True)
    edge.awaiting = False
    edge.look()
    assert [step for _, step, _ in edge.steps] == [Step.HOLD]
    assert sending.wait_s(5.0) is None
    assert sending.since_trigger == 0


def test_a_draft_that_is_decided_needs_no_asking() -> None:
    sending = made("none", FixedLength(3), gap_s=1.0)
    sending.sent(0.0, 1, everything=True)
    edge = Edge(sending, awaiting=True).draft(3)
    sending.decided(3, 3, rejected=False)
    edge.awaiting = False
    edge.look()
    assert edge.sends == []


def test_sending_ahead_is_weighed_by_what_it_takes_of_the_link() -> None:
    def sent_ahead(beta_s: float, survives: bool, remaining_s: float, *, tokens: int = 1, asked: int = 0) -> bool:
        sending = made("immediate", beta_s=beta_s)
        for _ in range(50):
            sending.since_trigger = 1  # a token behind the draft that the verdict is on
            sending.decided(1, 0, rejected=not survives)
        sending.answer_s = remaining_s
        sending.asked(0.0, asked)
        for end in range(1, tokens + 1):
            sending.drafted(*SURE, end, 0.0)
        return sending.next_step(0.0, 0, tokens, awaiting=True)[0] is Step.SEND

    assert sent_ahead(0.0, False, 0.0), "what takes nothing costs nothing"
    assert sent_ahead(0.009, False, 0.0), "the next batch comes no sooner than a draft token"
    assert not sent_ahead(0.2, False, 0.0), "the next round would wait for the link"
    assert not sent_ahead(0.2, True, 0.195), "the guess of the target's own token takes more than it brings"
    assert sent_ahead(0.2, False, 0.215), "the link is free again when the verdict comes"
    assert not sent_ahead(0.2, False, 0.215, tokens=2), "the second one is late if the draft is dropped"
    assert sent_ahead(0.2, True, 0.215, tokens=2), "drafts that live are worth it"
    assert sent_ahead(0.2, True, 0.0, asked=-1), "what is no guess of the target's own token comes sooner"


def test_of_several_verdicts_that_are_awaited_the_first_counts() -> None:
    sending = made("immediate", beta_s=0.2)
    for _ in range(50):
        sending.decided(1, 0, rejected=True)
    sending.answer_s = 0.1
    sending.asked(0.0, 0)
    sending.answer_s = 10.0
    sending.asked(0.0, 0)
    sending.drafted(*SURE, 1, 0.0)
    assert sending.next_step(0.0, 0, 1, awaiting=True)[0] is Step.HOLD


def test_the_link_is_busy_with_what_it_was_given_one_after_the_other() -> None:
    uplink = Uplink()
    uplink.adopt(0.1, 0.01)
    uplink.sent(1.0, 10)
    assert uplink.busy_s(1.0) == pytest.approx(0.2)
    uplink.sent(1.1, 0)
    assert uplink.busy_s(1.1) == pytest.approx(0.2)
    assert uplink.busy_s(1.3) == pytest.approx(0.0)
    assert uplink.busy_s(9.0) == 0.0


def test_when_to_look_again() -> None:
    sending = made("greedy", gap_s=0.5)
    assert sending.wait_s(0.0) is None
    sending.sent(0.0, 1, everything=True)
    assert sending.wait_s(0.1) is None, "nothing waits"
    sending.drafted(*SURE, 1, 0.1)
    assert sending.wait_s(0.1) == pytest.approx(0.4)
    assert sending.next_step(0.5, 0, 1, awaiting=False) == (Step.SEND, 1)


def test_the_rule_that_asks_is_named_and_a_draft_counts_from_the_last_time() -> None:
    sending = made(trigger=DualThreshold(0.0, 0.5))
    assert sending.drafted(*SURE, 1, 0.0) is None
    assert sending.since_trigger == 1
    assert sending.drafted(0.5, 1.0, 2, 0.0) == "token"
    assert sending.since_trigger == 0
    assert sending.ask(2) == 0, "nothing was drafted since"
