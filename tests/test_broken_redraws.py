"""As in `test_broken_rules`, where draft tokens are tested: machines that break a rule of the hand-over are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipesd.policy.accept import Choices
from pipesd.protocol.actions import Action
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudSession, Work
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import Draft, Message, Open, Opened, Verdict
from tests import test_redraws as schedules
from tests.test_broken_rules import notice_by_chance, notice_in
from tests.test_redraws import bounds as bounds


class GoesOnInItsEpoch(EdgeMachine):
    """A refused branch is over even if the redrawn id equals the refused one."""

    def redrawn(self, token: int) -> list[Action]:
        alive = self._redraw.due and self.draft[:1] == [token]
        actions = super().redrawn(token)
        self.epoch -= alive
        return actions


class KeepsItsDraft(EdgeMachine):
    """Behind a redrawn id that equals the refused one."""

    def redrawn(self, token: int) -> list[Action]:
        kept, p_kept = (self.draft[1:], self.p_sent[1:]) if self.draft[:1] == [token] else ([], [])
        actions = super().redrawn(token)
        if self.running:
            self.draft, self.p_sent = kept, p_kept
        return actions


class NeverSaysWhatItDrew(EdgeMachine):
    def redrawn(self, token: int) -> list[Action]:
        actions = super().redrawn(token)
        self._redraw.unsaid = False
        return actions


class AnswersFromItsLength(EdgeMachine):
    """A RESEND, or a deadline, begins with the draft: a lost redrawn id is never repeated."""

    def _repeat(self, start: int, *, again: bool) -> Any:
        return super()._repeat(max(start, len(self.committed)), again=again)


class ForgetsWhatWasNotSent(EdgeMachine):
    def not_sent(self, message: Message) -> None:
        super().not_sent(message)
        self._redraw.unsaid = False


class ForgetsTheUnaskedQuestion(EdgeMachine):
    def not_sent(self, message: Message) -> None:
        super().not_sent(message)
        self._redraw.asked = True


class ClaimsTheRedrawn(EdgeMachine):
    """It asks the cloud to prove an id that only the edge has."""

    def _run(self) -> None:
        super()._run()
        self._base = len(self.committed)


class TakesAnyProposals(EdgeMachine):
    """Those that it has had before."""

    def _verdict(self, message: Verdict) -> list[Action]:
        if message.refused is not None and message.refused.first is not None:
            message = message._replace(refused=message.refused._replace(first=self._redraw.tried or 0))
        return super()._verdict(message)


class SendsWhileItDraws(EdgeMachine):
    def send(self) -> list[Action]:
        if self._redraw.pending and self.sent < self.end:
            return [self._draft(self.sent, self.end, nav=False)]
        return super().send()


class DraftsWhereItAskedForAToken(EdgeMachine):
    @property
    def _tests(self) -> bool:
        return False if self.nav is not None and not self.draft else super()._tests


class KeepsTheRefusal(EdgeMachine):
    """When it opens again."""

    def _open(self, base: int) -> list[Action]:
        redraw = self._redraw
        actions = super()._open(base)
        self._redraw = redraw
        return actions


class WantsNoTokenOfTheClouds(EdgeMachine):
    """Not even when it stopped drafting."""

    @property
    def drafts(self) -> bool:
        return True


class StopsAtOnce(EdgeMachine):
    """What was drawn is dropped, and the cloud draws in its place."""

    def stop_drafting(self) -> list[Action]:
        actions = super().stop_drafting()
        return self._go_alone() if self._stopping else actions


class CountsNoRefusal(EdgeMachine):
    def redrawn(self, token: int) -> list[Action]:
        before = [list(row) for row in self.tally.by_position]
        actions = super().redrawn(token)
        self.tally.by_position[:] = before
        return actions


class RefusesWhoIsAhead(CloudMachine):
    """Knows an edge that is one ahead only by the draft that says what was drawn."""

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        refusal, length = s.refusal, len(s.committed)
        if m.known > length and not m.pos <= length < m.pos + len(m.ids):
            s.refusal = None
        replies = super()._draft(s, m, now_s)
        if len(s.committed) == length:
            s.refusal = refusal
        return replies


class TakesTheRefusedForRedrawn(CloudMachine):
    """A late copy of the refused draft, which says nothing of an id that was drawn."""

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        length = len(s.committed)
        if s.refusal is not None and m.pos <= length < m.pos + len(m.ids):
            s.ends_with(m.ids[length - m.pos], now_s)
        return super()._draft(s, m, now_s)


class ForgetsItsRefusal(CloudMachine):
    """Says it once."""

    def receive(self, message: Message, now_s: float) -> list[Message]:
        replies = super().receive(message, now_s)
        return [r._replace(rejected=False, refused=None) if isinstance(r, Verdict) else r for r in replies]


class RepeatsFromTheFirst(CloudMachine):
    """Whatever the edge has tried."""

    def receive(self, message: Message, now_s: float) -> list[Message]:
        if isinstance(message, Draft) and message.tried is not None:
            message = message._replace(tried=0)
        return super().receive(message, now_s)


class GoesOnUnasked(CloudMachine):
    """Where the edge may have drawn something to be tested."""

    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        s = self._sessions[work.session]
        sampler, s.sampler = s.sampler, None
        replies = super().done(work, choices, elapsed_s, now_s)
        s.sampler = sampler
        return replies


class AnswersBeforeItKnowsTheDraft(CloudMachine):
    """Part of it, and a token of its own behind."""

    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        s = self._sessions[work.session]
        s.want_end = min(s.want_end, len(s.committed))
        return super().done(work, choices, elapsed_s, now_s)


class RunsFree(CloudMachine):
    """Where the edge may have drawn something to be tested."""

    def _open(self, m: Open, now_s: float) -> list[Message]:
        replies = super()._open(m, now_s)
        s = self._sessions.get(m.session)
        if s is not None and s.opening == m.opening:
            s.mode = m.mode
        return replies


class SaysTheRedrawn(CloudMachine):
    """Though the edge drew it."""

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        said, awaiting = s.said, s.refusal is not None
        replies = super()._draft(s, m, now_s)
        if awaiting and s.refusal is None:
            s.said = said
        return replies


class KnowsNoStopBehindARefusal(CloudMachine):
    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        awaiting = s.refusal is not None
        replies = super()._draft(s, m, now_s)
        s.ended = s.ended and not (awaiting and s.refusal is None and not s.draft and len(s.committed) < s.limit)
        return replies


class CountsEachRefusalAsARound(EdgeMachine):
    def redrawn(self, token: int) -> list[Action]:
        self._redraw.brought = False
        return super().redrawn(token)


class CountsTheRedrawn(CloudMachine):
    """As a draft token that was verified."""

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        awaiting = s.refusal is not None
        replies = super()._draft(s, m, now_s)
        s.verified += awaiting and s.refusal is None
        return replies


class OwesWhileItWaits(CloudMachine):
    """Never makes room of a session whose edge has a question about what follows."""

    def _evict(self, now_s: float) -> Message | None:
        for s in self._sessions.values():
            s.answered = s.answered and not (s.refusal is not None and len(s.committed) < s.want)
        return super()._evict(now_s)


class KeepsWhoOnlyRefused(CloudMachine):
    """A session whose first words were a refusal is kept for its first id."""

    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        s = self._sessions[work.session]
        answered = s.answered
        replies = super().done(work, choices, elapsed_s, now_s)
        s.answered = answered or any(isinstance(r, Verdict) and r.ids for r in replies)
        return replies


class GrantsWithEachProposal(CloudMachine):
    """Says what was granted whenever more proposals are asked for."""

    def _draft(self, s: CloudSession, m: Draft, now_s: float) -> list[Message]:
        replies = super()._draft(s, m, now_s)
        return replies if m.tried is None else [*replies, Opened(s.session, s.opening, s.limit, 16, 16, 1)]


class KeepsOldProbabilities(CloudMachine):
    """Keeps the probabilities of draft tokens that are gone."""

    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        s = self._sessions[work.session]
        kept = list(s.p_draft)
        replies = super().done(work, choices, elapsed_s, now_s)
        s.p_draft = kept
        return replies


CHANCE: list[tuple[type[EdgeMachine] | type[CloudMachine], dict[str, Any]]] = [
    (GoesOnInItsEpoch, {}),
    (KeepsItsDraft, {}),
    (NeverSaysWhatItDrew, {}),
    (DraftsWhereItAskedForAToken, {"ahead": True}),
    (KeepsTheRefusal, {}),
    (CountsNoRefusal, {}),
    (TakesTheRefusedForRedrawn, {}),
    (ForgetsItsRefusal, {}),
    (RepeatsFromTheFirst, {}),
    (GoesOnUnasked, {}),
    (RunsFree, {}),
    (SaysTheRedrawn, {}),
    (KeepsOldProbabilities, {}),
]


@pytest.mark.parametrize(("broken", "fixed"), CHANCE, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_chance_finds_the_broken_rule(broken: type, fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    notice_by_chance(broken, monkeypatch, tests=True, **fixed)


SCHEDULES: list[tuple[type[EdgeMachine] | type[CloudMachine], Callable[[], None]]] = [
    (AnswersFromItsLength, schedules.test_the_redrawn_id_is_lost_and_the_edge_drafts_on),
    (AnswersFromItsLength, schedules.test_the_redrawn_id_is_lost_and_the_edge_waits),
    (RefusesWhoIsAhead, schedules.test_the_redrawn_id_is_lost_and_the_edge_drafts_on),
    (ForgetsWhatWasNotSent, schedules.test_the_link_takes_nothing_for_a_while),
    (ForgetsTheUnaskedQuestion, schedules.test_the_link_takes_nothing_for_a_while),
    (ClaimsTheRedrawn, schedules.test_drafting_stops_before_the_cloud_has_shown_to_have_what_was_drawn),
    (TakesAnyProposals, schedules.test_proposals_that_come_twice_are_tried_once),
    (SendsWhileItDraws, schedules.test_a_refused_token_is_drawn_again_and_the_draft_that_follows_says_so),
    (WantsNoTokenOfTheClouds, schedules.test_drafting_stops_behind_the_last_test),
    (StopsAtOnce, schedules.test_drafting_stops_behind_the_last_test),
    (CountsEachRefusalAsARound, schedules.test_the_redrawn_id_counts_as_a_refused_draft_token_of_its_verdicts_round),
    (CountsTheRedrawn, schedules.test_the_redrawn_id_counts_as_a_refused_draft_token_of_its_verdicts_round),
    (OwesWhileItWaits, schedules.test_a_session_that_awaits_a_draw_makes_room),
    (KeepsWhoOnlyRefused, schedules.test_the_first_words_of_a_session_may_be_a_refusal),
    (GrantsWithEachProposal, schedules.test_more_proposals_are_asked_for_until_one_is_taken),
    (GoesOnInItsEpoch, schedules.test_the_redrawn_id_may_equal_the_refused_one),
    (GoesOnUnasked, schedules.test_the_cloud_puts_no_token_of_its_own_where_the_edge_may_have_drawn),
    (AnswersBeforeItKnowsTheDraft, schedules.test_a_question_overtakes_the_draft_that_it_is_about),
    (DraftsWhereItAskedForAToken, schedules.test_the_edge_draws_nothing_where_it_asked_for_a_token),
    (KnowsNoStopBehindARefusal, schedules.test_a_redrawn_stop_id_ends_both_sides),
]


@pytest.mark.parametrize(("broken", "schedule"), SCHEDULES, ids=lambda x: x.__name__)
def test_the_schedule_shows_the_broken_rule(
    broken: type, schedule: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    notice_in(schedule, broken, monkeypatch)
