"""The checker's rules: logs of all kinds of strategies hold; lies about triggers, sends, plans and sums are seen."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual import EXACT_S, Scene, Trouble, VirtualWorld

from pipesd.policy.token_batches import plan_token_batches
from pipesd.sim.check import check_events
from pipesd.sim.check_rules import DueRule, LinkRule, TriggerRule, plan_findings

Event = dict[str, Any]
Lie = Callable[[list[Event]], Any]

THIN: dict[str, Any] = {"gamma_s": 0.006, "delay_s": 0.01, "pass_s": 0.03}
FAT = {**THIN, "up_bytes_per_s": 2e4, "down_bytes_per_s": 1e6, "up_bytes_per_draft_token": 150}
SLOW = {**THIN, "up_bytes_per_s": 1500.0}
SCENES: dict[str, Scene] = {
    "pipesd": Scene(agreement=0.9, edge={"strategy": "pipesd"}, **THIN),
    "pipesd, slow": Scene(agreement=0.8, edge={"strategy": "pipesd", "tuning": "off"}, **SLOW),
    "pipesd, fat": Scene(agreement=0.8, edge={"strategy": "pipesd", "tuning": "off"}, **FAT),
    "hockney": Scene(agreement=0.9, edge={"strategy": "pipesd", "link_model": "hockney", "tuning": "off"}, **THIN),
    "greedy": Scene(agreement=0.9, edge={"strategy": "pipesd", "batching": "greedy", "tuning": "off"}, **SLOW),
    "immediate": Scene(edge={"strategy": "vanilla", "batching": "immediate", "draft_length": 6}, **THIN),
    "edgellm": Scene(agreement=0.9, edge={"strategy": "edgellm"}, **THIN),
    "entropy": Scene(edge={"strategy": "vanilla", "trigger": "entropy", "entropy_threshold": 1.5}, **THIN),
    "gain": Scene(edge={"strategy": "vanilla", "trigger": "gain"}, **THIN),
    "hsl": Scene(edge={"strategy": "hsl"}, **THIN),
    "right": Scene(agreement=1.0, edge={"strategy": "edgellm", "sequence_threshold": 0.0}, **THIN),
    "cut": Scene(edge={"strategy": "pipesd"}, troubles=(Trouble(0.4, "cut"), Trouble(0.7, "lose_down")), **THIN),
}  # fmt: skip


@cache
def recorded(scene: str) -> str:
    """The log of two generations in that scene."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "events")
        edge = {"tuning": str(Path(folder, "tuning")), **SCENES[scene].edge, "events": str(path)}
        with VirtualWorld(Scene(**{**vars(SCENES[scene]), "edge": edge})).session as session:
            for turn in range(2):
                for _ in session.generate([*b"Once upon a time", turn], max_tokens=70):
                    pass
        return path.read_text()


def log_of(scene: str) -> list[Event]:
    return [json.loads(line) for line in recorded(scene).splitlines()]


def each(events: list[Event], name: str, **fields: Any) -> Iterator[Event]:
    """The events of that name with these values."""
    return (e for e in events if e["event"] == name and all(e.get(key) == value for key, value in fields.items()))


def first(events: list[Event], name: str, **fields: Any) -> Event:
    return next(each(events, name, **fields))


def behind(events: list[Event], event: Event, name: str) -> Event:
    """The next event of that name behind `event`."""
    return first(events[place(events, event) + 1 :], name)


def place(events: list[Event], event: Event) -> int:
    return next(i for i, e in enumerate(events) if e is event)


def drop(events: list[Event], event: Event) -> None:
    del events[place(events, event)]


def move(events: list[Event], event: Event, to: Event, *, at_s: float) -> None:
    """Put `event` behind `to`."""
    drop(events, event)
    events.insert(place(events, to) + 1, {**event, "t": at_s})


def real_plan(events: list[Event]) -> Event:
    """The first plan that was made for measured figures."""
    return next(e for e in each(events, "plan") if e["why"] != "begin")


def split_badly(events: list[Event]) -> None:
    """The plan's token batches are the worst ones, with the total that they have."""
    plan = real_plan(events)
    sizes = max(([1] * plan["window"], [plan["window"]]), key=lambda sizes: total_of(sizes, plan))
    plan.update(sizes=sizes, total_s=total_of(sizes, plan))


def total_of(sizes: list[int], plan: Event) -> float:
    end_s, drafted = 0.0, 0
    for size in sizes:
        drafted += size
        end_s = max(end_s, drafted * plan["gamma_s"]) + plan["gap_s"] + plan["beta_s"] * size
    return float(end_s + plan["alpha_s"] - plan["gap_s"])


def longer(events: list[Event]) -> None:
    """A plan for one token more than the drafts give, right otherwise."""
    plan = real_plan(events)
    sizes = [*plan["sizes"], 1]
    made = plan_token_batches(len(sizes) and sum(sizes), *(plan[f"{n}_s"] for n in ("alpha", "beta", "gamma", "gap")))
    plan.update(window=sum(sizes), sizes=list(made.sizes), total_s=made.total_s)


def send_late(events: list[Event], **fields: Any) -> None:
    """A token batch goes only behind the next token, whole."""
    sent = next(e for e in each(events, "sent", kind="Draft", **fields) if e["ids"])
    drawn = behind(events, sent, "drafted")
    sent["ids"] = [*sent["ids"], drawn["id"]]
    move(events, sent, drawn, at_s=drawn["t"])


def send_early(events: list[Event]) -> None:
    """The first token behind a round goes although nothing made it due."""
    for committed in each(events, "committed"):
        pos, drawn = committed["pos"] + len(committed["ids"]), behind(events, committed, "drafted")
        at = place(events, drawn)
        if drawn["pos"] == pos and events[at + 1]["event"] == "drafted":
            break
    sent = {**first(events, "sent", kind="Draft"), "pos": pos, "known": pos, "ids": [drawn["id"]], "nav": False}
    events.insert(at + 1, {**sent, "t": drawn["t"]})


def stats(name: str) -> Lie:
    return lambda e: first(e, "end")["stats"].update({name: 12345})


LIES: dict[str, tuple[str, Lie]] = {
    "the other threshold asked": ("pipesd", lambda e: swap_rule(e)),
    "a surer token asked": ("hsl", lambda e: before(e, first(e, "trigger", rule="token")).update(p_draft=0.999)),
    "an unsure token did not ask": ("hsl", lambda e: unasked(e).update(p_draft=0.001)),
    "a clear token asked": ("entropy", lambda e: before(e, first(e, "trigger", rule="entropy")).update(entropy=0.001)),
    "an unclear token did not ask": ("entropy", lambda e: unasked(e).update(entropy=50.0)),
    "an entropy below 0": ("gain", lambda e: first(e, "drafted").update(entropy=-1.0)),
    "a product that was too high": ("pipesd", lambda e: before(
        e, first(e, "trigger", rule="sequence")).update(p_draft=0.999)),
    "a threshold that adapted otherwise": ("edgellm", lambda e: first(e, "start").update(sequence_threshold=0.1)),
    "other thresholds than those in force": ("pipesd", lambda e: first(e, "thresholds", why="next trial").update(
        sequence_threshold=0.99, token_threshold=0.99)),
    "thresholds that change within a round": ("pipesd", lambda e: move(
        e, x := first(e, "thresholds", why="next trial"), y := behind(e, x, "drafted"), at_s=y["t"])),
    "a trigger that names another end": ("gain", lambda e: first(e, "trigger").update(end=1)),
    "gain that asks out of nowhere": ("gain", lambda e: e.insert(
        place(e, x := first(e, "committed")) + 1, {**first(e, "trigger"), "t": x["t"]})),
    "must, though it can draft on": ("gain", lambda e: first(e, "trigger", rule="gain").update(rule="must")),
    "a plan that is far from the best": ("pipesd, slow", split_badly),
    "a plan's total that is wrong": ("pipesd", lambda e: real_plan(e).update(total_s=real_plan(e)["total_s"] * 1.001)),
    "a plan for another window": ("pipesd", longer),
    "a plan that does not fill its window": ("pipesd", lambda e: real_plan(e).update(window=3)),
    "a plan with a token batch of none": ("pipesd", lambda e: real_plan(e)["sizes"].insert(0, 0)),
    "a plan by the other link model": ("pipesd, fat", lambda e: started(e, link_model="hockney")),
    "a gap above alpha": ("pipesd", lambda e: real_plan(e).update(gap_s=real_plan(e)["alpha_s"] * 2)),
    "a plan for other figures": ("pipesd", lambda e: rescaled(e)),
    "no plan for another window": ("pipesd", lambda e: [drop(e, x) for x in [*each(e, "plan")] if x["why"] != "begin"]),
    "a plan within a round": ("pipesd", lambda e: move(
        e, x := real_plan(e), y := behind(e, x, "drafted"), at_s=y["t"])),
    "figures within a round": ("pipesd", lambda e: move(
        e, x := [*each(e, "estimate")][1], y := behind(e, x, "drafted"), at_s=y["t"])),
    "a plan for a strategy that needs none": ("gain", lambda e: e.insert(
        place(e, x := first(e, "committed")) + 1, {**first(log_of("pipesd"), "plan"), "t": x["t"]})),
    "sent later than planned": ("pipesd", lambda e: send_late(e, nav=False)),
    "a token that did not go by itself": ("immediate", lambda e: send_late(e, nav=False)),
    "greed that waits": ("greedy", lambda e: idle_link(e)),
    "greed on a link that is busy": ("greedy", lambda e: busy_link(e)),
    "sent although nothing was due": ("hsl", send_early),
    "asked later than triggered": ("edgellm", lambda e: send_late(e, nav=True)),
    "sent twice": ("pipesd", lambda e: e.insert(
        place(e, x := first(e, "sent", kind="Draft", nav=False)) + 1, copy.deepcopy(x))),
    "a repetition without need": ("pipesd", lambda e: first(e, "sent", kind="Draft", nav=False).update(again=True)),
    "an empty message": ("pipesd", lambda e: e.insert(place(e, x := first(e, "sent", kind="Draft", nav=True)) + 1, {
        **x, "pos": x["pos"] + len(x["ids"]), "ids": [], "nav": False})),
    "sent ahead although not worth it": ("pipesd, slow", lambda e: [
        x.update(rtt_s=0.0, pass_s=0.0, gap_s=9.0) for x in each(e, "estimate")]),
    "held although worth it": ("pipesd, slow", lambda e: [
        x.update(gap_s=0.0, beta_s=0.0, rtt_s=9.0, gamma_s=9.0) for x in each(e, "estimate")]),
    "held without a word": ("pipesd, slow", lambda e: drop(e, first(e, "held"))),
    "held twice": ("pipesd, slow", lambda e: e.insert(place(e, x := first(e, "held")), dict(x))),
    "held although no verdict is awaited": ("hsl", lambda e: e.insert(
        place(e, x := first(e, "drafted")) + 1, {"t": x["t"], "event": "held", "end": x["pos"] + 1})),
    "drafted while it should idle": ("edgellm", lambda e: started(e, waiting="idle")),
    "drafted beyond its bound": ("right", lambda e: started(e, draft_ahead=5)),
    "the same NAV asked twice": ("hsl", lambda e: e.insert(
        place(e, x := first(e, "sent", kind="Draft", nav=True)) + 1,
        {**x, "pos": x["pos"] + len(x["ids"]), "ids": []})),
    "a NAV left out": ("cut", lambda e: first(e, "sent", kind="Draft", nav=True).update(nav=False)),
    "an event that is none": ("hsl", lambda e: first(e, "drafted").update(event="draughted")),
    "a wrong sum of proactive": ("edgellm", stats("proactive")),
    "a wrong sum of promoted": ("edgellm", stats("promoted")),
    "a wrong sum of triggers": ("edgellm", stats("triggers")),
}  # fmt: skip


def before(events: list[Event], event: Event) -> Event:
    """The draw that `event` is about."""
    return [*each(events[: place(events, event)], "drafted")][-1]


def unasked(events: list[Event]) -> Event:
    """A draw behind which nothing asked."""
    return next(e for e, after in pairwise(events) if e["event"] == "drafted" and after["event"] != "trigger")


def started(events: list[Event], **fields: Any) -> None:
    """Every generation says to have begun with these settings."""
    for event in each(events, "start"):
        event.update(fields)


def rescaled(events: list[Event]) -> None:
    """A plan that is right for twice the times."""
    plan = real_plan(events)
    plan.update((name, 2 * plan[name]) for name in ("total_s", "alpha_s", "beta_s", "gamma_s", "gap_s"))


def swap_rule(events: list[Event]) -> None:
    trigger = first(events, "trigger")
    trigger["rule"] = "token" if trigger["rule"] == "sequence" else "sequence"


def idle_link(events: list[Event]) -> None:
    """By the figures the link took everything at once, so nothing should have waited for it."""
    for estimate in each(events, "estimate"):
        estimate.update(gap_s=0.0, beta_s=0.0)


def busy_link(events: list[Event]) -> None:
    """By the figures every message took ten seconds."""
    for estimate in each(events, "estimate"):
        estimate.update(gap_s=10.0)


@pytest.mark.parametrize("scene", SCENES)
def test_honest_logs_have_no_findings(scene: str) -> None:
    assert check_events(log_of(scene), slack_s=EXACT_S) == []


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie: str) -> None:
    scene, tell = LIES[lie]
    events = log_of(scene)
    tell(events)
    assert check_events(events, slack_s=EXACT_S) != []


def test_the_logs_hold_what_the_lies_are_about() -> None:
    names = {(scene, e["event"]) for scene in SCENES for e in log_of(scene)}
    assert {("pipesd", "plan"), ("pipesd", "thresholds"), ("pipesd, slow", "held"), ("greedy", "estimate")} <= names


# -- the rules by themselves


def start(**fields: Any) -> Event:
    plain = {"trigger": "dual", "sequence_threshold": 0.2, "token_threshold": 0.4, "entropy_threshold": 1.0}
    return {**plain, "draft_length": 3, **fields}


def test_the_threshold_of_edgellm_step_by_step() -> None:
    rule = TriggerRule(start(trigger="adaptive", sequence_threshold=0.5))
    assert [rule.observe(p, 0.0) for p in (0.8, 0.5, 0.9)] == [None, "sequence", None]
    rule.decided(2, rejected=False)  # all of the first draft
    assert rule.settings["sequence_threshold"] == 0.25
    assert rule.observe(0.2, 0.0) == "sequence"  # 0.18
    rule.decided(1, rejected=True)  # one of two
    assert rule.settings["sequence_threshold"] == 0.25 / math.pow(0.9 * 0.2, 0.5)
    assert rule.observe(1.0, 0.0) is None


def test_what_was_not_verified_teaches_nothing() -> None:
    rule = TriggerRule(start(trigger="adaptive", sequence_threshold=0.5))
    assert [rule.observe(p, 0.0) for p in (0.4, 0.9)] == ["sequence", None]
    rule.decided(1, rejected=True)  # the draft was right, the guess behind it was not
    assert rule.settings["sequence_threshold"] == 0.25


def test_the_window_is_the_mean_of_the_last_hundred_drafts() -> None:
    rule = DueRule("dp")
    assert rule.window == 20
    for length in (3, 4):
        for _ in range(length):
            rule.drafted(None)
        rule.ask(0)
    assert rule.window == 4  # 3.5
    for _ in range(100):
        rule.drafted(None)
        rule.ask(0)
    assert rule.window == 1


def test_a_plan_goes_round_and_a_new_one_waits_for_its_period() -> None:
    rule, due = DueRule("dp"), []
    rule.adopt([2, 1])
    for step in range(8):
        rule.drafted(None)
        due.append(rule.due)
        if rule.due:
            rule.sent(everything=True)
        if step == 3:
            rule.adopt([4])
    assert due == [False, True, True, False, True, True, False, False]


def test_a_link_is_judged_between_two_times() -> None:
    link = LinkRule(EXACT_S)
    assert link.idle((0.0, 1.0)) is None
    link.adopt({"alpha_s": None, "gap_s": 0.5, "beta_s": 0.25, "gamma_s": None, "rtt_s": None, "pass_s": None})
    link.sent(1.0, 2)  # busy until 2
    assert [link.idle(when) for when in ((1.5, 1.9), (1.9, 2.1), (2.1, 2.2))] == [False, None, True]


@given(
    st.integers(1, 7),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
    st.floats(0.0, 1.0),
    st.randoms(use_true_random=False),
)
def test_a_plan_is_right_if_no_split_beats_it(
    window: int, alpha_s: float, beta_s: float, gamma_s: float, share: float, chance: Any
) -> None:
    plan: Event = {"window": window, "alpha_s": alpha_s, "beta_s": beta_s, "gamma_s": gamma_s, "gap_s": alpha_s * share}
    splits = []
    for cuts in product((False, True), repeat=window - 1):
        sizes = [1]
        for cut in cuts:
            sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
        splits.append(sizes)
    best_s = min(total_of(sizes, plan) for sizes in splits)
    sizes = chance.choice(splits)
    total_s = total_of(sizes, plan)
    findings = list(plan_findings({**plan, "sizes": sizes, "total_s": total_s}, "streamed", window, None))
    if total_s <= best_s * 1.0099:
        assert findings == []
    if total_s > best_s * 1.0101 + 1e-8:
        assert len(findings) == 1 and "best" in findings[0]
