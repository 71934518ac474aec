"""Schedules in which a draft token is tested and refused, each by hand: the edge draws what stands there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipesd.core import Mode
from pipesd.protocol.messages import Draft, Error, ErrorCode, Open, Resend
from tests.explore import Setup, World
from tests.model_target import STOPS
from tests.test_schedules import session
from tests.wander import bounded, complete, undisturbed

AHEAD = 3  # no more is drafted ahead where draft tokens are tested
TESTED = Setup(prompt=1, tokens=8, draft_ahead=AHEAD, ids=5, ahead=True, tests=True, proposes=False)
PROPOSED = replace(TESTED, proposes=True)
REFUSED = "up; down; draw right; draw refused; draw right; ask; up; pass; down"


@pytest.fixture(scope="module", autouse=True)
def bounds() -> Iterator[None]:
    with bounded(AHEAD):
        yield


def asking(events: str = REFUSED) -> World:
    """A world whose edge took none of the first proposals."""
    for prompt in range(1, 20):
        world = World(replace(PROPOSED, prompt=prompt, prefill_piece=100))
        world.play("up; pass" + events[2:] if prompt > 1 else events).play("redraw")
        if world.edges[0].machine._redraw.tried:
            return world
    raise AssertionError("every edge takes one of the first")


# -- what stands there, and what it costs -----------------------------------------------------------------------------


def test_a_refused_token_is_drawn_again_and_the_draft_that_follows_says_so() -> None:
    world = World(TESTED).play("up; down; draw right; draw refused; ask; draw right; up; pass; down")
    edge, m = world.edges[0], world.edges[0].machine
    assert (len(m.committed), len(m.draft), m.sent, m.epoch) == (2, 2, 3, 0)
    assert not m.may_draft and not m.settle() and not m.send() and not m.ask() and not m.deadline()
    assert not m.receive(Resend(100, 1, 0, 1))
    world.play("redraw")
    assert (len(m.committed), m.draft, m.epoch, m.nav) == (3, [], 1, None)
    assert not edge.link.up, "nothing would come of it by itself"
    world.play("draw right; ask")
    (draft,) = edge.link.up
    assert isinstance(draft, Draft) and (draft.epoch, draft.pos, draft.known, draft.nav) == (1, 2, 3, True)
    assert draft.ids == (m.committed[2], *m.draft) and draft.p_draft == (1.0, 0.5)
    world.play("up")
    assert session(world).committed == m.committed and session(world).draft == m.draft
    assert session(world).cached == 2, "what the refusing pass went over need not be read again"
    undisturbed(world)


def test_the_redrawn_id_counts_as_a_refused_draft_token_of_its_verdicts_round() -> None:
    world = World(TESTED).play(REFUSED).play("redraw")
    t = world.edges[0].machine.tally
    assert (t.drafted, t.verified, t.accepted, t.rejections, t.rounds) == (3, 0, 1, 1, 1)
    assert t.by_position == [[1, 1], [0, 1]]
    world.play("draw refused; ask; up; pass; down; redraw")
    assert (t.drafted, t.accepted, t.rejections, t.rounds) == (4, 1, 2, 2)
    assert t.by_position == [[1, 2], [0, 1]]
    world.play("cancel")
    assert t.verified == 4, "the redrawn ones are no draft tokens"
    assert t.stale == 0


def test_the_redrawn_id_may_equal_the_refused_one() -> None:
    """The branch is over all the same: what stands behind it was drawn for another test."""
    for prompt in range(2, 40):
        world = World(replace(TESTED, prompt=prompt, prefill_piece=100))
        world.play("up; pass; down; draw refused; draw right; ask; up; pass; down")
        m = world.edges[0].machine
        refused = m.draft[0]
        world.play("redraw")
        if m.committed[-1] == refused:
            break
    assert m.committed[-1] == refused
    assert (m.draft, m.epoch, m.tally.accepted, m.tally.rejections) == ([], 1, 0, 1)
    complete(world)


def test_a_redrawn_stop_id_ends_both_sides() -> None:
    world = World(replace(TESTED, stops_at=frozenset({2}))).play("up; down; draw right; draw refused; ask; up; pass")
    world.play("down; redraw")
    assert world.edges[0].ended == "stop" and world.edges[0].shown[2:] == [STOPS[0]]
    world.play("up")
    assert session(world).ended and session(world).committed == world.edges[0].shown
    assert not world.pass_()


def test_the_cloud_puts_no_token_of_its_own_where_the_edge_may_have_drawn() -> None:
    """Behind a draft that was accepted whole, whether it drafts on or waits idly."""
    for mode in Mode:
        for ahead in (True, False):
            world = World(replace(TESTED, mode=mode, ahead=ahead))
            world.play("up; down; draw right; draw right; ask; up; pass")
            assert len(session(world).committed) == 3
            assert not world.pass_()
            complete(world)


def test_the_edge_draws_nothing_where_it_asked_for_a_token() -> None:
    world = World(TESTED).play("up; down; ask")
    (draft,) = world.edges[0].link.up
    assert isinstance(draft, Draft) and (draft.nav, draft.ids, draft.p_draft) == (True, (), None)
    assert not world.edges[0].machine.may_draft
    world.play("up; pass; down")
    assert len(world.edges[0].shown) == 2 and world.edges[0].machine.may_draft
    complete(world)


def test_what_was_drawn_is_asked_about() -> None:
    """However little of it the strategy would have: an empty question brings a token of the cloud's own."""
    world = World(TESTED).play("up; down; draw right; draw right")
    world.edges[0].machine.ask(1)
    assert world.edges[0].machine.nav == (2, 1)


def test_a_refusal_that_comes_twice_is_answered_once() -> None:
    world = World(replace(TESTED, mode=Mode.EAGER)).play("up; down; draw refused; send; up; pass; again_down")
    m = world.edges[0].machine
    assert not m.must_ask and not m.receive(world.edges[0].link.down[0])
    complete(world.play("down; redraw"))


def test_what_the_cloud_has_shown_to_have_is_not_said_again() -> None:
    """Not even where the link did not take a repetition."""
    for repeated in ("", "; block; deadline"):
        world = World(TESTED).play(REFUSED).play("redraw; draw right; ask; up; pass" + repeated + "; down")
        m = world.edges[0].machine
        assert (len(m.committed), m._base) == (4, 4)
        world.play("deadline")
        *_, draft = world.edges[0].link.up
        assert isinstance(draft, Draft) and draft.pos == 4
        complete(world)


def test_a_draw_is_progress() -> None:
    """A cloud that forgets the session once more is asked again at once."""
    forgets = "crash; restart; down"
    world = World(TESTED).play(f"up; down; {forgets}; up; down; draw refused; ask; up; pass; down; redraw; {forgets}")
    assert world.edges[0].retry_s is None
    complete(world)


# -- proposals --------------------------------------------------------------------------------------------------------


def test_more_proposals_are_asked_for_until_one_is_taken() -> None:
    world = asking()
    m = world.edges[0].machine
    (draft,) = world.edges[0].link.up
    assert isinstance(draft, Draft) and (draft.epoch, draft.pos, draft.ids, draft.tried) == (0, len(m.committed), (), 2)
    opened = world.counts["Opened"]
    for _ in range(3):
        if m._redraw.pending:
            world.play("up; down; redraw")
    assert m.epoch == 1 and m.tally.rounds == 1, "all of it is one round"
    undisturbed(world)
    assert world.counts["Opened"] == opened, "only the proposals are told"


def test_the_question_for_more_or_its_answer_is_lost() -> None:
    for lost in ("cut", "up; cut"):
        world = asking().play(lost)
        assert world.edges[0].machine.awaits
        complete(world.play("deadline"))


def test_proposals_that_come_twice_are_tried_once() -> None:
    world = asking(REFUSED.removesuffix("down") + "again_down").play("down")
    assert world.edges[0].redraw is None
    complete(world)


# -- something is lost ------------------------------------------------------------------------------------------------


def test_the_refusal_is_lost() -> None:
    complete(World(TESTED).play(REFUSED.removesuffix("down") + "cut"), 1)


def test_the_redrawn_id_is_lost_and_the_edge_drafts_on() -> None:
    """The cloud asks for what is no draft token any more: it is answered from the committed ids."""
    world = World(TESTED).play(REFUSED).play("redraw; draw right; send; cut; draw right; ask; up")
    assert world.counts["Resend"] == 1
    world.play("down")
    (draft,) = world.edges[0].link.up
    assert isinstance(draft, Draft) and (draft.pos, len(draft.ids), draft.known, draft.nav) == (2, 3, 3, True)
    complete(world)


def test_the_redrawn_id_is_lost_and_the_edge_waits() -> None:
    """A deadline repeats it with the draft."""
    world = World(TESTED).play(REFUSED).play("redraw; draw right; ask; cut; deadline; up")
    assert "Resend" not in world.counts
    assert session(world).committed == world.edges[0].shown
    complete(world)


def test_the_redrawn_id_comes_twice_and_late() -> None:
    world = World(TESTED).play(REFUSED).play("redraw; draw right; ask; again_up; cut late; pass; late_up")
    assert session(world).committed[:3] == world.edges[0].shown
    complete(world, 1)


def test_the_link_takes_nothing_for_a_while() -> None:
    """Neither what was drawn nor the question for more is forgotten: no deadline, and nothing to be asked for again."""
    for world in (
        World(TESTED).play(REFUSED).play("redraw; draw right; block; send; draw right; ask"),
        asking("block; ".join(REFUSED.rsplit("down", 1)) + "down; block").play("settle"),
    ):
        assert world.counts["not sent"] == 1 and world.edges[0].link.up
        complete(world)
        assert "Resend" not in world.counts


def test_a_question_overtakes_the_draft_that_it_is_about() -> None:
    """Part of the draft arrives behind it: no token of the target's own stands where the rest was drawn."""
    world = World(replace(TESTED, mode=Mode.EAGER)).play("up; down; draw right; send; cut late; draw right; ask; up")
    assert world.counts["Resend"] == 1
    world.play("late_up; pass")
    assert len(session(world).committed) == 2
    complete(world, 1)


# -- another opening --------------------------------------------------------------------------------------------------


def test_drafting_stops_behind_the_last_test() -> None:
    """While a draw is due, and while a draft is not decided: then nothing is tested any more."""
    for events in (
        REFUSED,
        "up; down; draw right; draw right; send",
        "up; down; draw right; ask; up; pass; draw right",
    ):
        world = World(TESTED).play(events).play("stop_drafting")
        machine = world.edges[0].machine
        assert machine.stopping and machine.drafts and not machine.may_draft and machine.opening == 1
        complete(world)
        assert not machine.stopping and not machine.drafts and machine.opening == 2
        assert session(world).mode is Mode.FREE and not session(world).tests
        assert machine.tally.verified + machine.tally.stale >= machine.tally.drafted


def test_an_opening_cuts_nothing_off_that_is_to_be_tested() -> None:
    """Else the cloud would draw, once drafting stops, where the edge had drawn."""
    for tests, most in ((True, AHEAD), (False, AHEAD + 2)):
        world = World(replace(TESTED, tests=tests, draft_ahead=AHEAD + 2)).play("up; down" + "; draw right" * most)
        machine = world.edges[0].machine
        assert not machine.may_draft
        if tests:
            world.play("stop_drafting")
        machine.receive(Error(machine.session, machine.opening, ErrorCode.UNKNOWN, "forgotten", 0))
        assert (machine.opening, len(machine.draft), machine.stopping) == (2, AHEAD, tests)


def test_a_draft_that_is_not_tested_goes_when_drafting_stops() -> None:
    world = World(replace(TESTED, tests=False)).play("up; down; draw right; draw right; send; stop_drafting")
    assert world.edges[0].machine.opening == 2 and not world.edges[0].machine.draft
    complete(world)


def test_drafting_stops_before_the_cloud_has_shown_to_have_what_was_drawn() -> None:
    """Only what it has shown to have is it asked to prove."""
    twice = REFUSED.removesuffix("down") + "again_down"
    world = complete(World(TESTED).play(twice).play("redraw; down; stop_drafting"))
    assert "Resend" not in world.counts


def test_drafting_begins_again() -> None:
    world = World(TESTED).play(REFUSED).play("stop_drafting; redraw; settle; up; pass; down; resume_drafting")
    *_, opening = world.edges[0].link.up
    assert isinstance(opening, Open) and opening.sampling is not None and opening.sampling.tests
    complete(world)
    world = World(TESTED).play(REFUSED).play("stop_drafting; resume_drafting; redraw")
    assert world.edges[0].machine.may_draft and world.edges[0].machine.opening == 1, "it had not stopped yet"
    complete(world)


def test_the_draw_comes_when_all_is_over() -> None:
    """The driver may answer what a cancelled generation, or an opening before, had asked."""
    for end in ("cancel", "cancel; next", "crash; restart; down"):
        world = World(TESTED).play(REFUSED).play(end)
        edge = world.edges[0]
        before = list(edge.shown)
        assert edge.machine.redrawn(1) == [] and edge.machine.ask_more(2) == []
        assert edge.shown == before
        complete(world)


def test_a_session_that_awaits_a_draw_makes_room() -> None:
    """It owes nothing, whatever was asked of the branch behind: its edge may never come back."""
    world = World(replace(TESTED, edges=2, max_sessions=1)).play(REFUSED).play("redraw; draw right; send; cut")
    world.play("draw right; ask; up; cut; wait; up 1")
    assert world.counts["Gone"] == 1
    complete(world, 1)


def test_the_first_words_of_a_session_may_be_a_refusal() -> None:
    """Its edge has that much: it need not be kept for its first id."""
    world = World(replace(TESTED, edges=2, max_sessions=1)).play("up; down; draw refused; ask; up; pass; wait; up 1")
    assert world.counts["Gone"] == 1
    complete(world)
