"""Schedules in which a protocol like this one can go wrong, each by hand; `explore` explains the events.

`complete(world)` brings a world to its end without any deadline, `complete(world, 1)` with one at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipesd.cloud.admission import Identity, open_refusal
from pipesd.core import Mode, ModelInfo, Vocabulary
from pipesd.protocol.actions import Action, Done, Fail, Request, Send
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import MAJOR, Counters, Draft, Error, ErrorCode, Open, Opened, Resend, Verdict
from pipesd.protocol.vocabulary import vocabulary_hash
from tests.explore import Setup, World
from tests.model_target import STOPS
from tests.wander import complete
from tests.wander import small_bounds as small_bounds

# A prompt of one id needs no prefill: OPENED comes at once.
PLAIN = Setup(prompt=1, tokens=4, draft_ahead=3, ids=5, ahead=True)
LISTENER = replace(PLAIN, mode=Mode.FREE, drafts=False, run_ahead=4, tokens=12)


def session(world: World, worker: int = 0, number: int = 100) -> Any:
    """The worker's own record of a session."""
    return world.workers[worker].machine._sessions[number]


# -- something is lost ------------------------------------------------------------------------------------------------


def test_the_verdict_that_ended_a_branch_is_lost() -> None:
    """The edge goes on about a branch that the cloud knows to be over; its NAV must still bring the lost verdict."""
    world = World(PLAIN).play("up; down; draw wrong; ask; up; pass; cut")
    assert session(world).dead
    complete(world, 1)


def test_the_verdict_on_a_guess_that_was_never_sent_is_lost() -> None:
    world = World(replace(PLAIN, mode=Mode.FREE)).play("draw wrong; up; pass; cut")
    complete(world, 1)


def test_an_opening_is_repeated_and_the_worker_restarts_in_between() -> None:
    """The first opening's id may be on its way still, while a target that is not reproducible commits another one."""
    world = World(replace(LISTENER, reproducible=False, ids=50))
    world.play("deadline; up; pass; crash; restart; up; pass; down; down; down")
    assert sorted(number for _, number in world.witness.truth) == [1, 2]
    first, second = (world.witness.truth[100, number] for number in (1, 2))
    assert first[1] != second[1]
    complete(world)
    assert world.edges[0].shown[:2] == second[:2]


def test_a_draft_is_lost_and_the_clouds_own_token_takes_its_place() -> None:
    """What follows the hole begins just where the cloud's ids end, but belongs to a branch that the edge will leave."""
    world = World(PLAIN).play("up; down; draw right; ask; up; draw wrong; send; cut; pass; draw right; send; up")
    assert len(session(world).committed) == 3
    assert world.counts["Resend"] == 1
    assert not session(world).draft
    complete(world, 1)


def test_an_edge_is_asked_for_what_it_has_committed_since() -> None:
    """Under greedy decoding the edge is never ahead of the cloud; the nearest is a RESEND from below what it has."""
    world = World(PLAIN).play("up; down; draw right; ask; up; pass; down")
    m = world.edges[0].machine
    assert len(m.committed) == 3
    (action,) = m.receive(Resend(100, m.opening, m.epoch, 1))
    assert isinstance(action, Send) and isinstance(action.message, Draft)
    assert (action.message.pos, action.message.known) == (3, 3)
    complete(world)


def test_a_verdict_is_lost_and_the_next_one_arrives() -> None:
    """No deadline: the verdict with a gap before it says what is missing, once."""
    world = World(LISTENER).play("up; down; pass; cut; settle; up; pass; down")
    assert [message.again for message in world.edges[0].link.up if isinstance(message, Draft)] == [True]
    complete(world)


def test_what_is_verified_again_elsewhere_counts_once() -> None:
    """A verdict is lost, the counters of the next one include it, then the worker is gone."""
    edge = EdgeMachine(1, 8)
    edge.generate(0, [1, 2, 3], Request(20, frozenset(), Mode.NAV, 0, b"", b"", MAJOR), drafts=True)
    edge.receive(Opened(1, 1, 20, 32, 64, 1))
    for token in (5, 6):
        edge.drafted(token)
    edge.ask()
    edge.receive(Verdict(1, 1, 0, 6, (9,), counters=Counters(2, 2, 0, 0)))
    edge.receive(Error(1, 1, ErrorCode.UNKNOWN, ""))
    edge.receive(Verdict(1, 2, 0, 3, (5, 6, 7), counters=Counters(1, 2, 0, 0)))
    edge.cancel()
    assert edge.tally.drafted == edge.tally.verified == edge.tally.accepted == 2


def test_an_edge_that_only_listens_gets_a_new_connection() -> None:
    """Nobody knows its new address before it speaks: its deadline makes it speak."""
    world = World(LISTENER).play("up; down; settle; up; pass; down; pass; cut; pass")
    assert not world.edges[0].link.down
    complete(world, 1)


def test_a_draft_on_a_new_connection_is_placed_by_its_session() -> None:
    complete(World(PLAIN).play("up; down; cut; draw right; ask; up; pass; down"))


def test_the_grant_is_lost_and_the_context_ends_before_the_edges_own_limit() -> None:
    """Only OPENED says where the cloud will stop."""
    world = World(replace(LISTENER, context=(4,))).play("up; cut; settle; ask; up")
    complete(world, 1)
    assert world.edges[0].ended == "length" and len(world.edges[0].shown) == 4


def test_a_crash_with_many_drafts_on_their_way() -> None:
    """Each is answered "unknown session", but they name an opening that is over by then."""
    world = World(replace(PLAIN, draft_ahead=6, tokens=9)).play("up; down" + "; draw right; send" * 5)
    world.play("crash; restart; up; down" + "; up" * 4)
    complete(world)
    assert world.counts["Error UNKNOWN"] == 6
    assert world.counts["Open"] == 2


def test_the_link_takes_nothing_for_a_while() -> None:
    """What was not sent is still to be said: draft, question and acknowledgement; no deadline is needed."""
    complete(World(PLAIN).play("up; down; draw right; block; ask; settle"))
    complete(World(PLAIN).play("up; down; block; draw right; send; draw wrong; send"))
    complete(World(LISTENER).play("up; down; settle; up; pass; pass; down; down; block; settle"))


# -- nothing is lost, and yet nobody moves ----------------------------------------------------------------------------


def test_an_edge_that_only_listens_acknowledges() -> None:
    world = complete(World(LISTENER))
    assert world.counts["Draft"] <= 1 + 12 / (LISTENER.run_ahead / 2)


def test_the_cloud_begins_to_run_free_by_itself() -> None:
    """The edge asked for another mode, and acknowledges all the same."""
    complete(World(replace(LISTENER, mode=Mode.NAV)).play("up; down; mode 0 100 2"))


def test_the_last_token_cannot_be_drafted() -> None:
    """Nothing may be drafted one short of the limit: an empty draft asks."""
    for mode in (Mode.NAV, Mode.EAGER):
        complete(World(replace(PLAIN, mode=mode, tokens=1)))
        complete(World(replace(PLAIN, mode=mode)).play("up; down; draw right; draw right; draw right; send"))


def test_the_cloud_stops_running_free_under_an_edge_that_only_listens() -> None:
    world = World(replace(LISTENER, run_ahead=20)).play("up; down; settle; up; pass; down; pass; down; mode 0 100 0")
    assert not world.edges[0].machine.settle(), "it waits, as it was told that more will come"
    complete(world)


def test_a_draft_that_nobody_asked_about_waits_at_a_cloud_that_runs_free() -> None:
    world = World(replace(PLAIN, mode=Mode.FREE)).play("up; down; draw right; send; up; pass; down")
    assert len(world.edges[0].shown) == 3
    complete(world)


# -- two openings, two connections ------------------------------------------------------------------------------------


def test_the_verdict_of_a_cancelled_generation_arrives_in_the_next() -> None:
    world = World(PLAIN).play("up; down; draw right; ask; up; pass; cancel; next; down")
    assert len(world.edges[0].shown) == 3
    complete(world)


def test_a_late_cancel_of_the_generation_before() -> None:
    world = World(PLAIN).play("up; down; cancel; cut late; next; up; late_up")
    assert not session(world).ended
    complete(world, 1)  # the late message also took the answers back to the old connection


def test_a_draft_behind_a_lost_opening() -> None:
    world = World(PLAIN).play("up; down; cancel; up; next; cut; draw right; ask; up")
    assert session(world).draft == []
    assert world.counts["Error UNKNOWN"] == 1
    complete(world)


def test_a_late_opening_behind_a_newer_one() -> None:
    world = World(PLAIN).play("cut late; deadline; up; late_up")
    assert session(world).opening == 2
    complete(world, 1)


def test_drafts_arrive_in_the_wrong_order_over_two_connections() -> None:
    world = World(PLAIN).play("up; down; draw right; send; cut late; draw right; ask; up; late_up")
    assert world.counts["Resend"] == 1
    complete(world, 1)


def test_the_cloud_is_ahead_of_what_the_edge_keeps() -> None:
    """After a stop text, say: committed ids only grow within one generation."""
    world = World(LISTENER).play("up; down; settle; up; pass; pass; pass; down; down; cancel; next 1; up; up")
    assert "Resend" not in world.counts
    assert session(world).committed == world.edges[0].shown and len(world.edges[0].shown) == 4
    complete(world)


def test_a_worker_holds_another_text_of_the_same_session() -> None:
    """The front forgot where the session was, so two workers continued it, each in its own way."""
    world = World(replace(LISTENER, workers=2, reproducible=False, ids=50, tokens=3))
    world.play("up; pass; pass; pass; cut; forget; deadline")
    complete(world)
    assert session(world, 0).committed[1:] != world.edges[0].shown[1:] == session(world, 1).committed[1:]
    world.play("forget; next; up; down")
    assert world.counts["Resend"] == 1
    complete(world)
    assert session(world, 0).committed == world.edges[0].shown


def test_a_restarted_cloud_serves_another_model() -> None:
    """It refuses to continue the text, and the edge ends with what it has."""
    vocabulary = Vocabulary((b"a", b"b"))
    served = Identity(ModelInfo("new", 2, 64, (1,), b"new one.", "cpu", "float32"), vocabulary)
    edge = EdgeMachine(7, 4)
    request = Request(20, frozenset({1}), Mode.NAV, 0, b"old one.", vocabulary_hash(vocabulary), MAJOR)
    opening = opening_of(edge.generate(0, [0, 0], request, drafts=True))
    refusal = open_refusal(opening, served, draining=False, retry_ms=1)
    assert refusal is not None and refusal.code is ErrorCode.MODEL
    done, fail = edge.receive(refusal)
    assert done == Done("error") and isinstance(fail, Fail) and fail.code is ErrorCode.MODEL
    assert edge.committed == [0, 0]
    begun_anew = replace(request, model_fingerprint=b"new one.")
    opening = opening_of(edge.generate(2, [0], begun_anew, drafts=True))
    assert open_refusal(opening, served, draining=False, retry_ms=1) is None


def opening_of(actions: list[Action]) -> Open:
    (send,) = actions
    assert isinstance(send, Send) and isinstance(send.message, Open)
    return send.message


# -- ends, room, and what it costs ------------------------------------------------------------------------------------


def test_nothing_is_committed_behind_the_limit() -> None:
    """Not by free run, not by full acceptance, not for drafts that were on their way before the limit was granted."""
    for mode in Mode:
        world = complete(World(replace(PLAIN, mode=mode)))
        assert session(world).committed == world.edges[0].shown and len(world.edges[0].shown) == 5
    world = World(replace(PLAIN, context=(3,), tokens=8)).play("draw right; draw right; send; up; up; down; settle")
    assert len(world.edges[0].machine.draft) == 1
    complete(world)
    assert session(world).committed == world.edges[0].shown and len(world.edges[0].shown) == 3


def test_nothing_is_committed_behind_a_stop_id() -> None:
    """Neither where the edge guessed it, nor in the middle of a block, nor where the edge wrongly guessed one."""
    stopping = replace(PLAIN, tokens=9, draft_ahead=6, stops_at=frozenset({3}))
    guessed = World(stopping).play("up; down; draw right; draw right; draw right")
    assert not guessed.edges[0].machine.may_draft, "nothing is drafted behind a stop id"
    inside = World(stopping).play("up; down; draw right; draw right; draw wrong; draw wrong; ask; up; pass")
    free = World(replace(stopping, mode=Mode.FREE, drafts=False))
    for world in (guessed, inside, free):
        edge = complete(world).edges[0]
        assert edge.ended == "stop" and edge.shown[3:] == [STOPS[1]]
        assert session(world).committed == edge.shown
    wrong = complete(World(stopping).play("up; down; draw right; draw stop; ask"))
    assert wrong.edges[0].shown[3:] == [STOPS[1]]


def test_two_sessions_and_room_for_one() -> None:
    world = complete(World(replace(LISTENER, edges=2, max_sessions=1)))
    assert world.counts["Opened"] == 2
    assert world.counts["Gone"] == 1


def test_a_full_cloud_is_left_in_peace_until_the_time_it_named() -> None:
    """The drafts behind the refused opening are refused too: that is no reason to open again at once."""
    world = World(replace(PLAIN, edges=2, max_sessions=1)).play("up; draw right 1; ask 1; up 1; up 1; down 1; down 1")
    assert [world.counts[error] for error in ("Error FULL", "Error UNKNOWN")] == [1, 1]
    assert world.counts["Open"] == 2
    complete(world)


def test_a_question_while_the_cloud_is_full_is_put_when_it_opens() -> None:
    world = World(replace(PLAIN, edges=2, max_sessions=1)).play("up; up 1; down 1; draw right 1; ask 1")
    assert world.edges[1].machine.nav == (2, 1)
    assert "Draft" not in world.counts
    complete(world)


def test_a_session_that_the_cloud_works_for_is_not_evicted() -> None:
    """An edge that only listens is unheard of for long, and yet not gone."""
    world = World(replace(LISTENER, edges=2, max_sessions=1)).play("up; pass; wait; up 1; down 1")
    assert "Gone" not in world.counts
    world.play("pass; pass; pass; wait; retry 1; up 1")  # by now it should have acknowledged something
    assert world.counts["Gone"] == 1
    complete(world, 1)


def test_a_long_stream_does_not_hold_up_the_prompt_of_another() -> None:
    world = World(replace(LISTENER, edges=3, max_sessions=3, prompt=9, prefill_piece=4, run_ahead=100, tokens=50))
    world.play("up; pass; pass; pass; up 1; up 2" + "; pass" * 4)
    assert world.witness.said[100, 1] == 9 + 1 + 2, "nor does the prompt hold up the stream"
    world.play("pass; pass; pass; pass")
    assert world.counts["Opened"] == 3
    complete(world)


def test_what_was_said_is_not_said_again_though_every_acknowledgement_lags() -> None:
    for mode in Mode:
        world = complete(World(replace(PLAIN, mode=mode, ahead=True, tokens=40, draft_ahead=6, run_ahead=5)))
        assert not world.witness.said_again


def test_an_own_token_that_equals_the_guess_lets_the_branch_live() -> None:
    """Full acceptance, and the draft goes on behind what was asked for: it is verified under the same epoch."""
    world = World(replace(PLAIN, ahead=True, draft_ahead=4, tokens=9))
    world.play("up; down; draw right; ask; draw right; draw right; send; up; up; pass; down")
    m = world.edges[0].machine
    assert (len(m.committed), len(m.draft), m.epoch) == (3, 1, 0)
    assert (m.tally.proactive, m.tally.promoted, m.tally.dropped) == (2, 2, 0)
    assert session(world).draft == m.draft
    complete(world)


def test_a_draft_of_another_clouds_length_is_cut_before_it_is_sent_again() -> None:
    """The worker that takes over may grant less than the one that crashed."""
    world = World(replace(PLAIN, draft_ahead=6, cloud_ahead=(6, 2), tokens=9))
    world.play("up; down" + "; draw right" * 6 + "; ask; crash; restart; down")
    m = world.edges[0].machine
    assert len(m.draft) == 2 and m.nav == (3, 1)
    complete(world)
