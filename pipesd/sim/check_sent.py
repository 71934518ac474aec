"""What the checker of event logs says of messages that were sent: what each DRAFT had to carry, and why it was sent."""

from __future__ import annotations

from collections.abc import Iterator

from pipesd.sim.check_refusals import Refusals
from pipesd.sim.check_rules import Event
from pipesd.sim.check_state import LEAST_AHEAD, Generation


def sent(g: Generation, event: Event) -> Iterator[str]:
    """Findings of a message that was given to the link."""
    if event["kind"] not in ("Open", "Hello"):
        g.counts["bytes_up"] += event["bytes"]
    if event["kind"] == "Open":
        g.openings += 1  # a NAV stays outstanding: said again, it is the same one
        g.sums = [a + b for a, b in zip(g.sums, g.told_counters, strict=True)]
        g.told_counters = [0, 0, 0, 0]
        g.state, g.nav_said, g.more = "opening", False, False
        g.ahead = g.run_ahead = LEAST_AHEAD
        g.sent = g.told = g.known
        g.refusals = Refusals()
        g.tried = True  # one more token may be drafted before there is another look at what is due
    if event["kind"] == "Probe" and event["tokens"] and event["bytes"]:
        g.link.sent(g.now_s, event["tokens"])
    if event["kind"] != "Draft":
        return
    if g.refusals.redrawn is not None:
        yield from _said_at_once(g, event)
        return
    if event.get("tried") is not None:
        yield from g.refusals.asks_more(event, g.known)
        g.told = g.known if event["bytes"] else 0
        g.tried = g.tried or not event["bytes"]
        return
    if g.refusals.pending:
        yield "sends although what stands in the place of a refused token is still to be drawn"
    if event["known"] != g.known:
        yield f"says that {event['known']} ids are known, {g.known} are"
    end = event["pos"] + len(event["ids"])
    if event["ids"] != g.content(event["pos"], end):
        yield f"carries {event['ids']} from {event['pos']}, the draft is {g.draft} from {g.known}"
    p_draft = event.get("p_draft") or []
    if len(p_draft) != (len(event["ids"]) if g.tested else 0) or not all(0.0 <= p <= 1.0 for p in p_draft):
        yield f"says the probabilities {p_draft} of {event['ids']}"
    g.asked = False
    yield from _reason(g, event)
    g.sent, g.told, g.nav_said = max(g.sent, end), g.known, g.nav_said or event["nav"]
    if event["bytes"]:
        g.rule.sent(everything=g.sent >= g.end)
        g.link.sent(g.now_s, len(event["ids"]))
        g.late = 0
        g.refusals.unsaid = False
    else:
        g.refusals.unsaid = g.refusals.unheard and event["pos"] < g.known
        g.sent, g.told, g.tried = max(g.known, event["pos"]), 0, True
        g.nav_said = g.nav_said and not event["nav"]
    if g.asked:
        g.link.asked(g.now_s, first=g.first)


def _said_at_once(g: Generation, event: Event) -> Iterator[str]:
    """What was drawn anew goes by itself where no draft will follow, before the log says that it is committed."""
    token, pos = g.refusals.redrawn, g.known
    said = (event["pos"], event["ids"], event["known"], event["nav"], event["again"])
    if said != (pos, [token], pos + 1, False, False):
        yield f"says {event['ids']} from {event['pos']}, drawn was {token} for {pos}"
    if not (g.more or token in g.start["stop_ids"] or pos + 1 >= g.limit):
        yield f"says id {token} at once, though a draft follows"
    if event["bytes"]:
        g.link.sent(g.now_s, 1)
    g.refusals.said_at_once = bool(event["bytes"])


def _reason(g: Generation, event: Event) -> Iterator[str]:
    """Why a DRAFT may be sent now, whether it asks as it should, and whether it takes what it should."""
    answers = g.before.get("kind") if g.before["event"] == "received" else None
    end, wanted = event["pos"] + len(event["ids"]), g.end
    fresh = event["ids"][max(0, g.known - event["pos"]) :]
    if event["again"] or answers == "Resend":
        wanted = max(event["pos"], g.sent, g.nav[0] if g.nav else 0)
    if event["again"]:
        if answers != "Verdict" and g.before["event"] != "deadline":
            yield "asks for a repetition although no deadline passed and nothing is missing"
    elif answers != "Resend":
        begin = g.known - 1 if g.refusals.unsaid else max(g.sent, g.known)
        if event["pos"] != begin:
            yield f"begins at {event['pos']}, what was not sent yet begins at {begin}"
        restated = g.nav is not None and not g.nav_said
        chosen = g.nav is not None and not restated and fresh
        if chosen and g.worth_sending() is False:
            yield f"sends {g.amount} tokens ahead of a verdict that are not worth it, or too much for the link"
        if g.rule.asks and not (restated and g.nav is not None and end == g.nav[0]):
            g.ask()
        elif event["nav"] and not restated:
            if g.start["trigger"] is not None or g.state != "run" or g.nav is not None or g.more:
                yield "asks for verification although nothing triggered it"
            g.ask()
        elif not event["nav"] and fresh and not g.sends_due():
            yield f"sends {len(event['ids'])} tokens that were not due"
        elif not event["nav"] and not event["ids"] and 2 * (g.known - g.told) < g.run_ahead:
            yield "sends an empty message that says nothing new"
        elif not event["nav"] and event["ids"] and not fresh and not g.more and g.may_draft:
            yield "says what was drawn anew, though a draft follows"
        if event["nav"] and g.nav is not None and not (restated and g.sends_due() and end == g.end):
            wanted = g.nav[0]
        elif not fresh:
            wanted = end
    if end != wanted:
        yield f"ends at {end}, wanted was {wanted}"
    if event["nav"] != (g.nav is not None) and (
        event["nav"] or event["again"] or answers == "Resend" or not g.nav_said
    ):
        yield f"asks for verification: {event['nav']}, outstanding is {g.nav}"
