"""Each rule is needed: machines that break one are noticed, by chance in the model world or by a schedule of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipesd.core import Mode
from pipesd.errors import ProtocolError
from pipesd.policy.accept import Choices
from pipesd.protocol.actions import Action, Rollback
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import Work
from pipesd.protocol.edge_machine import EdgeMachine, State
from pipesd.protocol.messages import Cancel, Draft, Message, Open, Opened, Resend
from pipesd.protocol.vocabulary import digest
from tests import explore
from tests import test_schedules as schedules
from tests.wander import LEAST, MOST_DEADLINES, complete, random_world, undisturbed
from tests.wander import small_bounds as small_bounds

MOST_SEEDS = 500
NOTICED = (AssertionError, KeyError, ProtocolError)


class TakesAnyOpening(EdgeMachine):
    def receive(self, message: Message) -> list[Action]:
        return super().receive(message._replace(opening=self.opening))


class RepeatsItsOpening(EdgeMachine):
    def reopen(self) -> list[Action]:
        if self.state is State.OPENING:
            self.opening -= 1
        return super().reopen()


class NeverAcknowledges(EdgeMachine):
    def settle(self) -> list[Action]:
        return [] if self.more and self.nav is None and not self.draft else super().settle()


class WaitsInSilence(EdgeMachine):
    def settle(self) -> list[Action]:
        return super().settle() if self.more else []


class KeepsItsEpoch(EdgeMachine):
    def _lose_branch(self) -> list[Action]:
        actions = super()._lose_branch()
        self.epoch -= 1
        return actions


class ForgetsToRollBack(EdgeMachine):
    def _lose_branch(self) -> list[Action]:
        return [action for action in super()._lose_branch() if not isinstance(action, Rollback)]


class ForgetsTheNav(EdgeMachine):
    """When it opens again."""

    def _open(self, base: int) -> list[Action]:
        self.nav = None
        return super()._open(base)


class IgnoresHoles(EdgeMachine):
    """Takes a verdict that starts beyond its committed ids as the next one."""

    def _verdict(self, message: Any) -> list[Action]:
        return super()._verdict(message._replace(pos=min(message.pos, len(self.committed))))


class HearsWhileRefused(EdgeMachine):
    """An ERROR(unknown) behind an ERROR(full) makes it open again at once."""

    @property
    def _talks(self) -> bool:
        return self.running


class KeepsALongDraft(EdgeMachine):
    """Whatever the cloud grants."""

    def _shorten(self, length: int) -> list[Action]:
        return super()._shorten(length) if length == 0 else []


class OwnTokensCountAsSeen(CloudMachine):
    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        messages = super().done(work, choices, elapsed_s, now_s)
        s = self._sessions[work.session]
        s.end = max(s.end, len(s.committed))
        return messages


class CloudTakesAnyOpening(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        s = self._sessions.get(message.session)
        if s is not None and isinstance(message, Draft | Cancel):
            message = message._replace(opening=s.opening)
        return super().receive(message, now_s)


class TakesAnOlderOpening(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        s = self._sessions.get(message.session)
        if s is not None and isinstance(message, Open):
            s.opening = message.opening - 1
        return super().receive(message, now_s)


class NeverRepeats(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        return super().receive(message._replace(again=False) if isinstance(message, Draft) else message, now_s)


class GrantsOnce(CloudMachine):
    """`again` repeats the verdict, not what was granted."""

    def receive(self, message: Message, now_s: float) -> list[Message]:
        replies = super().receive(message, now_s)
        return [r for r in replies if not (isinstance(message, Draft) and isinstance(r, Opened))]


class BelievesTheBase(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        s = self._sessions.get(message.session)
        if s is not None and isinstance(message, Open) and message.base <= len(s.committed):
            message = message._replace(digest=digest(s.committed[: message.base]))
        return super().receive(message, now_s)


class KnowsNoStopIds(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        return super().receive(message._replace(stop_ids=()) if isinstance(message, Open) else message, now_s)


class KnowsNoLimit(CloudMachine):
    def receive(self, message: Message, now_s: float) -> list[Message]:
        return super().receive(message._replace(limit=1 << 20) if isinstance(message, Open) else message, now_s)


class LeavesFreeRunInSilence(CloudMachine):
    def set_mode(self, session: int, mode: Mode) -> list[Message]:
        self._sessions[session].mode = mode
        return []


class EvictsAnyone(CloudMachine):
    def _evict(self, now_s: float) -> Message | None:
        return self._forget(next(iter(self._sessions.values())))


class EvictsTheBusy(CloudMachine):
    """Those that run free, if their edges only listen."""

    def _evict(self, now_s: float) -> Message | None:
        quiet = [s for s in self._sessions.values() if s.answered and not s.owed and now_s - s.heard_s > 1.0]
        return self._forget(quiet[0]) if quiet else super()._evict(now_s)


class NeverAsksForAHole(CloudMachine):
    """Takes a draft behind a hole as if it followed."""

    def _take(self, s: Any, m: Draft, now_s: float) -> list[Message]:
        replies = super()._take(s, m, now_s)
        if not any(isinstance(reply, Resend) for reply in replies):
            return replies
        s.end = m.pos
        return super()._take(s, m, now_s)


class RevivesTheDead(CloudMachine):
    """Goes on with a branch that lost its first token."""

    def _take(self, s: Any, m: Draft, now_s: float) -> list[Message]:
        s.dead = False
        return super()._take(s, m, now_s)


class TrustsItsCache(CloudMachine):
    """Takes what the target computed for an earlier text as that of this one."""

    def _open(self, m: Open, now_s: float) -> list[Message]:
        before = self._sessions.get(m.session)
        cached = before.cached if before else 0
        replies = super()._open(m, now_s)
        after = self._sessions.get(m.session)
        if after is not None and after is not before:
            after.cached = min(cached, len(after.committed) - 1)
        return replies


class PrefillsWhenIdle(CloudMachine):
    """Prompts wait until no session wants a pass."""

    def work(self) -> list[Work]:
        self._prefill_next = False
        return super().work()


class PrefillsFirst(CloudMachine):
    def work(self) -> list[Work]:
        self._prefill_next = True
        return super().work()


CHANCE: list[tuple[type[EdgeMachine] | type[CloudMachine], dict[str, Any]]] = [
    (TakesAnyOpening, {}),
    (RepeatsItsOpening, {"reproducible": False}),
    (NeverAcknowledges, {}),
    (WaitsInSilence, {}),
    (KeepsItsEpoch, {}),
    (ForgetsToRollBack, {}),
    (ForgetsTheNav, {}),
    (IgnoresHoles, {}),
    (HearsWhileRefused, {"edges": 3, "max_sessions": 1}),
    (KeepsALongDraft, {"draft_ahead": 20, "cloud_ahead": (20, LEAST)}),
    (CloudTakesAnyOpening, {}),
    (NeverRepeats, {}),
    (GrantsOnce, {"context": (12,), "prompt": 2, "tokens": 24}),
    (KnowsNoStopIds, {"stops_at": frozenset({7, 8})}),
    (KnowsNoLimit, {}),
    (LeavesFreeRunInSilence, {}),
    (EvictsAnyone, {"edges": 3}),
    (NeverAsksForAHole, {}),
    (RevivesTheDead, {"ahead": True}),
    (TrustsItsCache, {}),
]


@pytest.mark.parametrize(("broken", "fixed"), CHANCE, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_chance_finds_the_broken_rule(broken: type, fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    notice_by_chance(broken, monkeypatch, **fixed)


SCHEDULES: list[tuple[type[EdgeMachine] | type[CloudMachine], Callable[[], None]]] = [
    (OwnTokensCountAsSeen, schedules.test_a_draft_is_lost_and_the_clouds_own_token_takes_its_place),
    (NeverRepeats, schedules.test_the_verdict_that_ended_a_branch_is_lost),
    (TakesAnOlderOpening, schedules.test_a_late_opening_behind_a_newer_one),
    (BelievesTheBase, schedules.test_a_worker_holds_another_text_of_the_same_session),
    (HearsWhileRefused, schedules.test_a_full_cloud_is_left_in_peace_until_the_time_it_named),
    (EvictsTheBusy, schedules.test_a_session_that_the_cloud_works_for_is_not_evicted),
    (PrefillsWhenIdle, schedules.test_a_long_stream_does_not_hold_up_the_prompt_of_another),
    (PrefillsFirst, schedules.test_a_long_stream_does_not_hold_up_the_prompt_of_another),
    (TakesAnyOpening, schedules.test_the_verdict_of_a_cancelled_generation_arrives_in_the_next),
    (CloudTakesAnyOpening, schedules.test_a_late_cancel_of_the_generation_before),
    (GrantsOnce, schedules.test_the_grant_is_lost_and_the_context_ends_before_the_edges_own_limit),
    (KnowsNoStopIds, schedules.test_nothing_is_committed_behind_a_stop_id),
    (KnowsNoLimit, schedules.test_nothing_is_committed_behind_the_limit),
    (LeavesFreeRunInSilence, schedules.test_the_cloud_stops_running_free_under_an_edge_that_only_listens),
    (NeverAcknowledges, schedules.test_an_edge_that_only_listens_acknowledges),
    (WaitsInSilence, schedules.test_the_last_token_cannot_be_drafted),
    (RepeatsItsOpening, schedules.test_an_opening_is_repeated_and_the_worker_restarts_in_between),
]


@pytest.mark.parametrize(("broken", "schedule"), SCHEDULES, ids=lambda x: x.__name__)
def test_the_schedule_shows_the_broken_rule(
    broken: type, schedule: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    notice_in(schedule, broken, monkeypatch)


def notice_by_chance(broken: type, monkeypatch: pytest.MonkeyPatch, **fixed: Any) -> None:
    """Some random world with these features must show the broken rule."""
    install(broken, monkeypatch)
    for seed in range(MOST_SEEDS):
        try:
            complete(random_world(seed, faults=True, **fixed), MOST_DEADLINES)
            undisturbed(random_world(seed, faults=False, **fixed))
        except NOTICED:
            return
    pytest.fail(f"{broken.__name__} was not noticed in {MOST_SEEDS} worlds")


def notice_in(schedule: Callable[[], None], broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule must show the broken rule, and nothing where the rule holds."""
    schedule()
    install(broken, monkeypatch)
    with pytest.raises(NOTICED):
        schedule()


def install(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "EdgeMachine" if issubclass(broken, EdgeMachine) else "CloudMachine", broken)
