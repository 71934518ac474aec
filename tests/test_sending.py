"""What goes up the link and when: due batches, what is held back while a verdict is awaited, rules 1 and 2."""

from __future__ import annotations

import pytest

from pipesd.core import Drawn
from pipesd.policy.sending import Sending, Step, Uplink
from pipesd.policy.token_batches import make_batching, plan_of
from pipesd.policy.trigger import DualThreshold, FixedLength, Trigger

SURE = Drawn(1, 0.99, 0.1)
PLAN = plan_of((1, 2, 3), 0.0, 0.0, 0.0)


def made(batching: str = "dp", trigger: Trigger | None = None, *, gap_s: float = 0.0, beta_s: float = 0.0) -> Sending:
    uplink = Uplink()
    uplink.adopt(gap_s, beta_s)
    sending = Sending(make_batching(batching, PLAN), trigger or FixedLength(100), uplink)
    sending.gamma_s = 0.01
    return sending


def run(sending: Sending, tokens: int, *, awaiting: bool = False, start_s: float = 0.0) -> list[tuple[int, Step]]:
    """Draft so many tokens, one each 10 ms, sending at once what is to be sent: (tokens drafted, step) of what was."""
    steps, unsent = [], 0
    for k in range(1, tokens + 1):
        now_s = start_s + 0.01 * k
        sending.drafted(SURE, now_s)
        unsent += 1
        step = sending.next_step(now_s, awaiting=awaiting)
        if step is not Step.NOTHING:
            steps.append((k, step))
        if step in (Step.SEND, Step.ASK):
            sending.sent(now_s, unsent)
            unsent = 0
        if step is Step.ASK:
            sending.asked(now_s)
    return steps


def test_batches_go_with_the_plan_which_repeats() -> None:
    assert [k for k, _ in run(made(), 12)] == [1, 3, 6, 7, 9, 12]


def test_the_other_rules() -> None:
    assert [k for k, _ in run(made("immediate"), 4)] == [1, 2, 3, 4]
    assert run(made("none"), 9) == []
    assert [k for k, _ in run(made("greedy"), 4)] == [1, 2, 3, 4]
    # the link takes 25 ms for a message: at 10 the first goes, it is idle again at 35, seen at 40
    assert [k for k, _ in run(made("greedy", gap_s=0.025), 8)] == [1, 4, 7]


def test_at_the_trigger_everything_goes_and_the_plan_begins_anew() -> None:
    sending = made(trigger=FixedLength(5))
    assert run(sending, 11) == [
        (1, Step.SEND), (3, Step.SEND), (5, Step.ASK), (6, Step.SEND), (8, Step.SEND), (10, Step.ASK), (11, Step.SEND),
    ]  # fmt: skip


def test_ahead_of_a_verdict_batches_go_with_the_plan_while_the_link_is_free() -> None:
    assert [k for k, _ in run(made(gap_s=0.002), 7, awaiting=True)] == [1, 3, 6, 7]


def test_what_the_link_cannot_take_waits_at_the_edge_and_goes_when_it_can() -> None:
    sending = made("immediate", gap_s=0.045)
    sending._answered_s = 100.0  # long before the verdict, sending ahead costs nothing
    assert run(sending, 8, awaiting=True) == [(1, Step.SEND), (2, Step.HOLD), (5, Step.SEND), (6, Step.HOLD)]


def test_nothing_is_held_back_that_no_verdict_can_drop() -> None:
    assert run(made("immediate", gap_s=0.045), 3) == [(1, Step.SEND), (2, Step.SEND), (3, Step.SEND)]


def test_what_is_held_goes_once_the_verdict_is_there() -> None:
    sending = made("immediate", gap_s=1.0)
    sending.sent(0.0, 1)
    sending.drafted(SURE, 0.01)
    assert sending.next_step(0.01, awaiting=True) is Step.HOLD
    assert sending.next_step(0.01, awaiting=True) is Step.NOTHING, "said once"
    assert sending.next_step(0.02, awaiting=False) is Step.SEND


def test_a_rejection_cancels_what_waits() -> None:
    sending = made("immediate", gap_s=1.0)
    sending.sent(0.0, 1)
    sending.drafted(SURE, 0.01)
    sending.next_step(0.01, awaiting=True)
    sending.decided(0, rejected=True)
    assert sending.next_step(5.0, awaiting=False) is Step.NOTHING
    assert sending.wait_s(5.0) is None
    assert sending.since_trigger == 0


def test_sending_ahead_is_weighed_by_what_it_takes_of_the_link() -> None:
    def sent_ahead(beta_s: float, survives: bool, remaining_s: float) -> bool:
        sending = made("immediate", beta_s=beta_s)
        for _ in range(50):
            sending.decided(1, rejected=not survives)
        sending.answer_s = remaining_s
        sending.asked(0.0)
        sending.drafted(SURE, 0.0)
        return sending.next_step(0.0, awaiting=True) is Step.SEND

    assert sent_ahead(0.0, False, 0.0), "what takes nothing costs nothing"
    assert sent_ahead(0.009, False, 0.0), "the next batch comes no sooner than a draft token"
    assert not sent_ahead(0.2, False, 0.0), "the next round would wait for the link"
    assert sent_ahead(0.2, False, 0.195), "the link is free again when the verdict comes"
    assert sent_ahead(0.2, True, 0.0), "drafts that live are worth it"


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
    sending.sent(0.0, 1)
    assert sending.wait_s(0.1) is None, "nothing waits"
    sending.drafted(SURE, 0.1)
    assert sending.wait_s(0.1) == pytest.approx(0.4)
    assert sending.next_step(0.5, awaiting=False) is Step.SEND


def test_the_rule_that_asks_is_named_and_a_draft_counts_from_the_last_time() -> None:
    sending = made(trigger=DualThreshold(0.0, 0.5))
    assert sending.drafted(SURE, 0.0) is None
    assert sending.drafted(Drawn(1, 0.5, 1.0), 0.0) == "token"
    assert sending.since_trigger == 2
    sending.asked(0.0)
    assert sending.since_trigger == 0
