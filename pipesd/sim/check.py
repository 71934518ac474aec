"""A checker outside the loop: reads the event log of a run and recomputes what the edge should have done and counted.

From the draws, the probabilities and the verdicts alone it derives the committed ids and what was accepted, every
trigger, what each DRAFT had to carry, every promotion, and the sums of the statistics; whatever differs from the log is
a finding. It shares no code with the state machine and the triggers that it checks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
COUNTERS = ("target_passes", "verified", "stale", "busy")


@dataclass
class _Generation:
    """What one generation's log says so far."""

    start: Event
    known: int  # committed length
    limit: int
    draft: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # committed behind the prompt
    since_trigger: int = 0
    due: str | None = None  # a trigger that must come next
    nav: tuple[int, int] | None = None
    proactive: int = 0  # tokens at the draft's end that were drafted while a NAV was outstanding
    rolled_back: int | None = None
    openings: int = 0
    told: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("drafted", "accepted", "rejections", "navs", "rounds", "promoted", "bytes_up", "bytes_down"), 0
        )
    )

    def promote(self, number: int) -> None:
        self.counts["promoted"] += number
        self.proactive -= number


def check_events(events: Iterable[Event]) -> list[str]:
    """Findings of a log of one or more generations, each one line; none means that all was as it should be."""
    return list(_findings(events))


def check_file(path: str | Path) -> list[str]:
    """Findings of an event file. OSError and ValueError as reading and parsing raise them."""
    with open(path, encoding="utf-8") as lines:
        return check_events(json.loads(line) for line in lines)


def _findings(events: Iterable[Event]) -> Iterator[str]:
    g: _Generation | None = None
    last_s = 0.0
    for number, event in enumerate(events, 1):
        where = f"event {number} ({event['event']})"
        if event["t"] < last_s:
            yield f"{where}: time goes back from {last_s} to {event['t']}"
        last_s = event["t"]
        if event["event"] == "start":
            g = _Generation(event, event["prompt_tokens"], event["limit"])
        elif g is not None:
            for finding in _STEPS[event["event"]](g, event):
                yield f"{where}: {finding}"
            if event["event"] == "end":
                g = None
    if g is not None:
        yield "the log ends within a generation"


def _drafted(g: _Generation, event: Event) -> Iterator[str]:
    if g.due:
        yield f"drafted on although the trigger {g.due!r} was due"
    if event["pos"] != g.known + len(g.draft):
        yield f"drafted position {event['pos']}, the next one is {g.known + len(g.draft)}"
    if not 0.0 <= event["p_draft"] <= 1.0:
        yield f"probability {event['p_draft']}"
    g.draft.append(event["id"])
    g.counts["drafted"] += 1
    g.proactive += g.nav is not None
    g.since_trigger += 1
    if g.start["strategy"] == "vanilla" and g.since_trigger == g.start["draft_length"]:
        g.due = "length"


def _trigger(g: _Generation, event: Event) -> Iterator[str]:
    if event["rule"] != g.due:
        yield f"trigger {event['rule']!r}, due was {g.due!r}"
    g.due, g.since_trigger = None, 0


def _sent(g: _Generation, event: Event) -> Iterator[str]:
    if event["kind"] not in ("Open", "Hello"):
        g.counts["bytes_up"] += event["bytes"]
    if event["kind"] == "Open":
        g.openings += 1  # a NAV stays outstanding: said again, it is the same one
        g.sums = [a + b for a, b in zip(g.sums, g.told, strict=True)]
        g.told = [0, 0, 0, 0]
    if event["kind"] != "Draft":
        return
    end = g.known + len(g.draft)
    if event["known"] != g.known:
        yield f"says that {event['known']} ids are known, {g.known} are"
    if event["pos"] + len(event["ids"]) != end or event["ids"] != g.draft[event["pos"] - g.known :]:
        yield f"carries {event['ids']} from {event['pos']}, the draft is {g.draft} from {g.known}"
    if event["nav"] and not event["again"] and (g.nav is None or end > g.nav[0]):
        g.nav = (end, g.known)
        g.counts["navs"] += 1
    if event["ids"] and not event["nav"] and not event["again"] and g.start["strategy"] == "vanilla":
        yield "vanilla sent draft tokens without asking for their verification"


def _received(g: _Generation, event: Event) -> Iterator[str]:
    g.counts["bytes_down"] += event["bytes"]
    if event["kind"] == "Opened":
        g.limit = min(g.limit, event["limit"])
    own = event["kind"] == "Verdict" and event["opening"] == g.openings + g.start["opening"]
    if own and event["counters"] and event["pos"] <= g.known:
        g.told = [max(a, b) for a, b in zip(g.told, event["counters"], strict=True)]
    yield from ()


def _rollback(g: _Generation, event: Event) -> Iterator[str]:
    g.rolled_back = event["pos"]
    if event["pos"] == g.limit - 1:  # the cloud granted less than was drafted
        del g.draft[max(0, event["pos"] - g.known) :]
    yield from ()


def _without_drafts(g: _Generation, event: Event) -> Iterator[str]:
    g.draft, g.nav, g.proactive, g.due = [], None, 0, None
    yield from ()


def _committed(g: _Generation, event: Event) -> Iterator[str]:
    if event["pos"] != g.known:
        yield f"commits from {event['pos']}, {g.known} ids are committed"
    g.counts["rounds"] += 1
    for token, accepted in zip(event["ids"], event["accepted"], strict=True):
        equal = bool(g.draft) and g.draft[0] == token
        if equal != accepted:
            yield f"id {token} at {g.known}: accepted is {accepted}, the draft was {g.draft}"
        if equal:
            if len(g.draft) == g.proactive:
                g.promote(1)
            del g.draft[0]
            g.counts["accepted"] += 1
        elif g.draft:
            if g.rolled_back != g.known:
                yield f"the draft ended at {g.known}, the drafter was rolled back to {g.rolled_back}"
            g.draft, g.nav, g.proactive, g.since_trigger, g.due = [], None, 0, 0, None
            g.counts["rejections"] += 1
        g.known += 1
        g.ids.append(token)
    if g.nav is not None and g.known >= max(g.nav[0], g.nav[1] + 1):
        g.nav = None
        g.promote(g.proactive)
    if not g.draft:
        g.since_trigger = 0
    if g.ids[-1] in g.start["stop_ids"] or g.known >= g.limit:
        g.due = None
    if g.known > g.limit:
        yield f"{g.known} ids are committed, the limit is {g.limit}"
    if any(token in g.start["stop_ids"] for token in g.ids[:-1]):
        yield "ids were committed behind an end id"


def _end(g: _Generation, event: Event) -> Iterator[str]:
    stats, counts = event["stats"], g.counts
    sums = [a + b for a, b in zip(g.sums, g.told, strict=True)]
    accepted, verified = counts["accepted"], sums[1]
    expected: dict[str, Any] = {
        "tokens": len(g.ids),
        "openings": g.openings,
        **{
            name: counts[name]
            for name in ("drafted", "accepted", "navs", "rounds", "promoted", "bytes_up", "bytes_down")
        },
        **dict(zip(COUNTERS[:3], sums, strict=False)),
        "discarded": max(0, counts["drafted"] - verified),
        "acceptance_rate": accepted / verified if verified else None,
        "acceptance_per_token": accepted / (accepted + counts["rejections"])
        if accepted + counts["rejections"]
        else None,
    }
    for name, value in expected.items():
        got = stats[name]
        if got != value and not (isinstance(value, float) and isinstance(got, float) and abs(got - value) < 1e-5):
            yield f"{name} is {got}, recomputed {value}"


def _nothing(g: _Generation, event: Event) -> Iterator[str]:
    yield from ()


_STEPS = {
    "drafted": _drafted,
    "trigger": _trigger,
    "sent": _sent,
    "received": _received,
    "rollback": _rollback,
    "committed": _committed,
    "without_drafts": _without_drafts,
    "retry": _nothing,
    "deadline": _nothing,
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
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
