"""A checker outside the loop: reads the event log of a run and recomputes what the edge should have done and counted.

From the draws, the probabilities and the verdicts alone it derives the committed ids and what was accepted, every
trigger, which tokens were due when by the token batching in force, what each DRAFT had to carry and why it was sent,
every promotion, what a plan is worth, and the sums of the statistics; whatever differs from the log is a finding. It
shares no code with the state machine, the triggers and the planner that it checks; their rules are in `check_rules`.
The calibration behind the trigger `gain` is not logged, hence not checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipesd.sim.check_rules import FORCED, DueRule, Event, LinkRule, TriggerRule, plan_findings
from pipesd.sim.check_sent import sent
from pipesd.sim.check_state import Generation

_AT_ROUND_END = {"start", "committed", "estimate", "plan", "thresholds"}
COUNTERS = ("target_passes", "verified", "stale", "busy")


def check_events(events: Iterable[Event], *, slack_s: float = 0.05) -> list[str]:
    """Findings of a log of one or more generations, each one line; none means that all was as it should be.

    What depends on the time is only judged where `slack_s` would not change it: events are logged after what they tell,
    on a busy machine by many milliseconds.
    """
    return list(_findings(events, slack_s))


def check_file(path: str | Path) -> list[str]:
    """Findings of an event file. OSError and ValueError as reading and parsing raise them."""
    with open(path, encoding="utf-8") as lines:
        return check_events(json.loads(line) for line in lines)


def _findings(events: Iterable[Event], slack_s: float) -> Iterator[str]:
    g: Generation | None = None
    rules: tuple[TriggerRule, DueRule, LinkRule] | None = None
    last_s = 0.0
    for number, event in enumerate(events, 1):
        where = f"event {number} ({event['event']})"
        if event["t"] < last_s:
            yield f"{where}: time goes back from {last_s} to {event['t']}"
        last_s = event["t"]
        if event["event"] == "start":
            if rules is None:
                rules = TriggerRule(event), DueRule(event["batching"]), LinkRule(slack_s)
            g = Generation(event, *rules, event["prompt_tokens"], event["limit"], drafts=event["trigger"] is not None)
            g.forget()
        elif g is not None:
            g.now_s = last_s
            for finding in _step(g, event):
                yield f"{where}: {finding}"
            if event["event"] == "end":
                g = None
            else:
                g.before = event
    if g is not None:
        yield "the log ends within a generation"


def _step(g: Generation, event: Event) -> Iterator[str]:
    name = event["event"]
    if g.rollback is not None and name != "committed" and g.refusals.redrawn is None:
        g.cut(g.rollback)
        g.rollback = None
    if g.expected and name != "trigger":
        yield f"the trigger {g.expected!r} was due"
        g.expected = None
    if name in ("drafted", "trigger", "received", "deadline") and g.refusals.missed(g.known):
        yield f"nothing was drawn in the place of the token refused at {g.known}"
    if name not in _STEPS:
        yield "no event of a generation"
    else:
        yield from _STEPS[name](g, event)


def _drafted(g: Generation, event: Event) -> Iterator[str]:
    if (g.rule.due or g.rule.asks) and g.state != "waiting" and not g.tried:
        g.late += g.rule.held and g.nav is None
        if not g.rule.held or g.late > 1:
            yield f"drafted on although tokens up to {g.end} were due to go, verification of {g.rule.asks}"
    g.tried = False
    if g.lacks_plan():
        yield f"the plan in force is for {g.rule.planned} tokens, the last round made the window {g.rule.window}"
    if not g.may_draft:
        yield f"drafted beyond its bounds: {len(g.draft)} tokens behind {g.known}, a verdict is awaited: {g.nav}"
    if event["pos"] != g.end:
        yield f"drafted position {event['pos']}, the next one is {g.end}"
    if not 0.0 <= event["p_draft"] <= 1.0 or not event["entropy"] >= 0.0:
        yield f"probability {event['p_draft']}, entropy {event['entropy']}"
    if not 0.0 <= event.get("margin", 0.0) <= 1.0:
        yield f"margin {event['margin']}"
    g.draft.append(event["id"])
    g.counts["drafted"] += 1
    if g.nav is not None:
        g.counts["proactive"] += 1
        g.proactive += 1
    g.rule.drafted(g.link.idle(g.when_s))
    g.expected = g.trigger.observe(g.confidence(event), event["entropy"])


def _trigger(g: Generation, event: Event) -> Iterator[str]:
    rule, wanted = event["rule"], g.expected
    g.expected = None
    g.triggers[rule] += 1
    if event["end"] != g.end:
        yield f"the trigger names the end {event['end']}, the draft's is {g.end}"
    if rule == FORCED:
        idle = g.state == "run" and g.nav is None and not (g.may_draft or g.rule.asks or g.refusals.pending)
        if not idle or (not g.draft and g.more):
            yield "asks as if nothing else could be done"
    elif rule != wanted and not (g.trigger.may_ask(rule) and g.before["event"] == "drafted"):
        yield f"trigger {rule!r}, due was {wanted!r}"
    g.trigger.asked()
    g.rule.ask(event["end"])


def _held(g: Generation, event: Event) -> Iterator[str]:
    if g.nav is None or g.rule.held or not (g.rule.due or g.rule.asks or g.rule.batching == "greedy"):
        yield "holds tokens back that were not due, or while no verdict is awaited"
    elif g.worth_sending():
        yield f"holds {g.amount} tokens back that were worth sending"
    g.rule.held, g.late = True, 0
    g.rule.due = g.rule.due or not g.rule.asks


def _received(g: Generation, event: Event) -> Iterator[str]:
    g.counts["bytes_down"] += event["bytes"]
    own = event["opening"] == g.openings + g.start["opening"] and g.state != "waiting"
    if own and event["kind"] in ("Opened", "Verdict"):
        g.state = "run"
    if own and event["kind"] == "Opened":
        g.limit, g.ahead, g.run_ahead = min(g.start["limit"], event["limit"]), event["draft_ahead"], event["run_ahead"]
    if own and event["kind"] == "Verdict":
        g.link.heard()
        g.more = event["more"]
        g.refusals.verdict(event, g.known)
        if event["counters"] and event["pos"] <= g.known:
            g.told_counters = [max(a, b) for a, b in zip(g.told_counters, event["counters"], strict=True)]
    yield from ()


def _turn(g: Generation, event: Event) -> Iterator[str]:
    """What only changes what comes next."""
    if event["event"] == "rollback":
        g.rollback = event["pos"]
    elif event["event"] == "retry":
        g.state = "waiting"
    elif event["event"] in ("without_drafts", "with_drafts"):
        g.drafts = event["event"] == "with_drafts"
        g.stopping = not g.drafts and g.tested and bool(g.draft)
    yield from ()


def _committed(g: Generation, event: Event) -> Iterator[str]:
    if event["pos"] != g.known:
        yield f"commits from {event['pos']}, {g.known} ids are committed"
    refusals = g.refusals
    refused = refusals.redrawn is not None  # the branch is over, also if the same id was drawn
    g.counts["rounds"] += not (refused and refusals.brought)
    refusals.fresh = True
    if refused:
        yield from refusals.committed(event)
    accepted, rejected = 0, False
    for token, said in zip(event["ids"], event["accepted"], strict=True):
        equal = bool(g.draft) and g.draft[0] == token and not refused
        if equal != said:
            yield f"id {token} at {g.known}: accepted is {said}, the draft was {g.draft}"
        if equal:
            if len(g.draft) == g.proactive:
                g.promote(1)
            del g.draft[0]
            accepted += 1
        elif g.draft:
            if g.rollback != g.known:
                yield f"the draft ended at {g.known}, the drafter was rolled back to {g.rollback}"
            g.draft, g.nav, g.proactive, rejected = [], None, 0, True
        g.known += 1
        g.ids.append(token)
    if (g.rollback is not None) != rejected:
        yield f"the drafter was rolled back to {g.rollback} in a round that rejected: {rejected}"
    g.rollback = None
    g.sent = g.known if rejected else max(g.sent, g.known)
    g.counts["accepted"] += accepted
    g.counts["rejections"] += rejected
    g.part += accepted
    goes_on = bool(g.draft) and refusals.missed(g.known)
    if not goes_on:
        g.window = g.rule.window
    if (g.drafts or g.stopping) and not goes_on:
        g.trigger.decided(g.part, rejected)
        g.rule.asked(g.known)
        g.link.decided(rejected, behind=bool(g.rule.since or g.rule.asks))
    g.part = g.part if goes_on else 0
    g.stopping = g.stopping and bool(g.draft)
    if rejected:
        g.forget()
    if g.nav is not None and g.known >= max(g.nav[0], g.nav[1] + 1):
        g.nav = None
        g.promote(g.proactive)
    if g.known > g.limit:
        yield f"{g.known} ids are committed, the limit is {g.limit}"
    if any(token in g.start["stop_ids"] for token in g.ids[:-1]):
        yield "ids were committed behind an end id"


def _plan(g: Generation, event: Event) -> Iterator[str]:
    yield from _at_round_end(g)
    if g.rule.batching not in ("dp", "policy"):
        yield "a plan that nothing goes by"
    first = event["why"] == "begin"  # repeats what is in force
    window, figures = (None, None) if first else (g.rule.window, g.link.plan_figures)
    yield from plan_findings(event, g.start["link_model"], window, figures)
    g.rule.adopt(event["sizes"])


def _thresholds(g: Generation, event: Event) -> Iterator[str]:
    yield from _at_round_end(g)
    g.trigger.adopt(event)


def _estimate(g: Generation, event: Event) -> Iterator[str]:
    yield from _at_round_end(g)
    g.link.adopt(event)


def _at_round_end(g: Generation) -> Iterator[str]:
    """Parameters change at a generation's beginning and at the end of rounds only."""
    last = g.before or g.start
    if last["event"] not in _AT_ROUND_END and last.get("kind") != "Cancel":
        yield f"changes behind {last['event']!r}, where no round ends"


def _end(g: Generation, event: Event) -> Iterator[str]:
    stats, counts = event["stats"], g.counts
    sums = [a + b for a, b in zip(g.sums, g.told_counters, strict=True)]
    accepted, decided = counts["accepted"], counts["accepted"] + counts["rejections"]
    sums[1] = verified = max(sums[1], decided)
    expected: dict[str, Any] = {
        "tokens": len(g.ids),
        "openings": g.openings,
        "triggers": dict(g.triggers),
        **{name: count for name, count in counts.items() if name != "rejections"},
        **dict(zip(COUNTERS[:3], sums, strict=False)),
        "discarded": max(0, counts["drafted"] - verified),
        "acceptance_rate": accepted / verified if verified else None,
        "acceptance_per_token": accepted / decided if decided else None,
    }
    for name, value in expected.items():
        got = stats[name]
        close = isinstance(value, float) and isinstance(got, float) and abs(got - value) < 1e-5
        if got != value and not close:
            yield f"{name} is {got}, recomputed {value}"


def _refused(g: Generation, event: Event) -> Iterator[str]:
    yield from g.refusals.refused(event, g.known, len(g.draft))
    g.counts["refusals"] += event["first"] in (None, 0)
    g.counts["proposals"] += event["told"] if event["first"] is not None else 0


def _redrawn(g: Generation, event: Event) -> Iterator[str]:
    yield from g.refusals.drew(event, g.known)


_STEPS: dict[str, Callable[[Generation, Event], Iterator[str]]] = {
    "drafted": _drafted,
    "trigger": _trigger,
    "held": _held,
    "sent": sent,
    "received": _received,
    "rollback": _turn,
    "retry": _turn,
    "committed": _committed,
    "refused": _refused,
    "redrawn": _redrawn,
    "plan": _plan,
    "thresholds": _thresholds,
    "estimate": _estimate,
    "without_drafts": _turn,
    "deadline": _turn,
    "with_drafts": _turn,
    "end": _end,
}


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m pipesd.sim.check FILE`: findings to stdout; exit code 1 if there are any, 2 for an unreadable file."""
    parser = argparse.ArgumentParser(
        prog="python -m pipesd.sim.check", description="Check an event log of pipesd-edge."
    )
    parser.add_argument("file", help="written by pipesd-edge generate --events FILE")
    path = parser.parse_args(argv).file
    try:
        findings = check_file(path)
    except (OSError, ValueError) as error:
        print(f"{path}: no event log that can be read ({error}); make one with --events", file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    if not findings:
        print("no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
