"""When plans change: at a round's end, for another window, other drafting, another link; and what is told to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipesd.config import EdgeConfig
from pipesd.policy.estimate import Estimate
from pipesd.policy.sending import Sending, Uplink
from pipesd.policy.strategy import make_strategy, make_trigger
from pipesd.policy.token_batches import make_batching, plan_for_run
from pipesd.policy.updater import Updater, first_plan

KNOWN = Estimate(alpha_s=0.025, beta_s=0.02, gamma_s=0.036, gap_s=0.01, rtt_s=0.06, tpt_s=0.05, pass_s=0.03)


def made(**options: str) -> tuple[Updater, Sending]:
    strategy = make_strategy(EdgeConfig(tuning="off", **options))  # type: ignore[arg-type]
    sending = Sending(make_batching(strategy.batching, first_plan()), make_trigger(strategy), Uplink())
    return Updater(strategy, options.get("link_model", "streamed"), sending), sending


def whys(updater: Updater, estimate: Estimate, tokens: int = 5) -> list[str]:
    return [change.why for change in updater.round_end(estimate, tokens, 0.1)]


def test_one_token_each_until_something_is_known() -> None:
    updater, _ = made()
    (change,) = updater.begin(Estimate())
    assert change.what == "plan" and set(change.values["sizes"]) == {1} and change.values["window"] == 20
    assert whys(updater, Estimate(alpha_s=0.01)) == [], "drafting is not known"


def test_the_first_figures_make_a_plan_and_the_same_ones_none() -> None:
    updater, _ = made()
    updater.begin(Estimate())
    assert whys(updater, KNOWN) == ["first figures"]
    assert updater.plan == plan_for_run(20, 0.025, 0.02, 0.036, 0.01, one_each=False)
    assert whys(updater, KNOWN) == []


@pytest.mark.parametrize("name, value", [("gamma_s", 0.05), ("alpha_s", 0.035), ("beta_s", 0.03), ("gap_s", 0.02)])
def test_another_figure_makes_another_plan_beyond_a_fifth_only(name: str, value: float) -> None:
    updater, _ = made()
    updater.begin(KNOWN)
    assert whys(updater, replace(KNOWN, **{name: 1.15 * getattr(KNOWN, name)})) == []
    assert whys(updater, replace(KNOWN, **{name: value})) == [f"another {name.removesuffix('_s')}"]


def test_small_steps_add_up_against_what_was_planned_for() -> None:
    updater, _ = made()
    updater.begin(KNOWN)
    assert [whys(updater, replace(KNOWN, gamma_s=0.036 * (1 + k / 10))) for k in (1, 2, 3)] == [
        [], [], ["another gamma"],
    ]  # fmt: skip


def test_another_window_makes_another_plan() -> None:
    updater, _ = made()
    updater.begin(KNOWN)
    updater.asked(6)
    assert updater.plan.window == 20, "not between two rounds"
    assert whys(updater, KNOWN) == ["another window"] and updater.plan.window == 6
    updater.asked(0)
    assert updater.window.tokens == 6, "an empty draft has no length"


def test_a_plan_holds_to_the_end_of_its_period() -> None:
    updater, sending = made()
    updater.begin(KNOWN)
    size = updater.plan.sizes[0]
    for _ in range(size - 1):
        sending.drafted(0.99, 0.1, 1, 0.0)
    updater.asked(2)
    whys(updater, KNOWN)
    waiting = sending.batching.waiting
    sending.drafted(0.99, 0.1, 1, 0.0)
    assert waiting == size - 1 and sending.batching.waiting == 0, "the batch that had begun is sent as planned"


def test_hockney_counts_all_of_alpha_for_a_message() -> None:
    updater, sending = made(link_model="hockney")
    updater.begin(KNOWN)
    assert updater.plan == plan_for_run(20, 0.025, 0.02, 0.036, 0.025, one_each=False)
    assert sending.uplink.gap_s == 0.01, "what the link really takes is another matter"


@pytest.mark.parametrize("batching", ["greedy", "immediate", "none"])
def test_without_a_plan_nothing_is_planned(batching: str) -> None:
    updater, sending = made(batching=batching)
    assert updater.begin(KNOWN) == [] and whys(updater, KNOWN) == []
    assert (sending.gamma_s, sending.uplink.beta_s) == (0.036, 0.02)
    assert sending.answer_s == pytest.approx(0.08)
