"""What the cloud's machine keeps and says where tokens are drawn: distributions, log-probabilities, refusals of bad
drafts. Messages go in and results of passes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pipesd.core import Logprobs, Mode
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits, Work
from pipesd.protocol.messages import Cancel, Draft, Error, ErrorCode, Message, Open, Opened, Verdict
from tests.model_target import ModelRefusal

HASH = b"eight by"
NOISE = Sampling(temperature=0.7)
TESTED = Sampling(temperature=0.7, method=Method.REJECTION)
REFUSAL: Any = ModelRefusal(0, (), 9, frozenset(), True)


class Cloud:
    """One session behind the prompt 1, 2 with stop id 9."""

    def __init__(self, sampling: Sampling | None, mode: Mode = Mode.NAV, limit: int = 10) -> None:
        self.machine = CloudMachine(CloudLimits(context=2 * limit, vocabulary_size=10))
        assert not self.tell(Open(7, 1, 0, HASH, (1, 2), limit, (9,), sampling, 5, mode, HASH, HASH))
        (opened,) = self.result(Choices((), 0))
        assert isinstance(opened, Opened)

    def tell(self, message: Message) -> list[Message]:
        return self.machine.receive(message, 0.0)

    def draft(self, pos: int, *ids: int, known: int | None = None, epoch: int = 0, **more: Any) -> list[Message]:
        p_draft = more.pop("p_draft", (0.5,) * len(ids))
        return self.tell(
            Draft(7, 1, epoch, pos, ids, pos if known is None else known, p_draft=p_draft, **{"nav": True, **more})
        )

    @property
    def work(self) -> Work:
        (work,) = self.machine.work()
        return work

    def result(self, choices: Choices) -> list[Message]:
        return self.machine.done(self.work, choices, 0.0, 0.0)

    @property
    def committed(self) -> tuple[int, ...]:
        return self.machine.committed(7)


def test_a_pass_says_how_each_session_draws() -> None:
    cloud = Cloud(NOISE)
    cloud.draft(2, 3, 4)
    draw = cloud.work.draw
    assert isinstance(draw, Draw) and (draw.sampler.sampling, draw.sampler.seed) == (NOISE, 5)
    assert (list(draw.prefix), draw.drafted, draw.p_draft) == ([1, 2], (3, 4), ())
    cloud.result(Choices((3, 5, 6), 1))
    assert cloud.committed == (1, 2, 3, 5), "under noise, equal ids are accepted"
    tested = Cloud(TESTED)
    tested.draft(2, 3, 4, p_draft=(0.25, 1.0))
    draw = tested.work.draw
    assert draw is not None and draw.p_draft == (0.25, 1.0)
    greedy = Cloud(None)
    greedy.draft(2, 3)
    assert greedy.work.draw is None


def test_probabilities_stay_beside_their_draft_tokens() -> None:
    """Through a pass over part of the draft, a branch that ends, an epoch."""
    cloud = Cloud(Sampling(temperature=1.0, method=Method.REJECTION))
    cloud.draft(2, 3, p_draft=(0.125,))
    cloud.draft(3, 4, 5, known=2, nav=False, p_draft=(0.25, 0.5))
    assert cloud.work.draw is not None and cloud.work.draw.p_draft == (0.125,)
    cloud.result(Choices((0, 4), 1))
    cloud.draft(5, known=2)
    draw = cloud.work.draw
    assert draw is not None and (draw.drafted, draw.p_draft) == ((4, 5), (0.25, 0.5))
    cloud.draft(3, 6, 7, epoch=1, p_draft=(0.75, 1.0))
    draw = cloud.work.draw
    assert draw is not None and (draw.drafted, draw.p_draft) == ((6, 7), (0.75, 1.0))


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (TESTED, "draft tokens that are tested need p_draft"),
        (
            Sampling(temperature=1.0, method=Method.REJECTION, logprobs=2),
            "draft tokens that are tested need no log-probabilities, which go with none",
        ),
    ],
)
def test_a_draft_that_cannot_be_tested_ends_its_session(sampling: Sampling, text: str) -> None:
    cloud = Cloud(sampling)
    p_draft = None if sampling is TESTED else (0.5,)
    (error,) = cloud.draft(2, 3, p_draft=p_draft)
    assert error == Error(7, 1, ErrorCode.MALFORMED, text)
    assert not cloud.machine.work()
    assert not Cloud(sampling).draft(2, p_draft=None), "where nothing is drafted nothing is tested"
    assert not Cloud(NOISE).draft(2, 3, p_draft=None)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    machine = CloudMachine(CloudLimits(context=20, vocabulary_size=10))
    biased = Sampling(temperature=1.0, logit_bias=((3, 1.0), (10, 1.0)))
    (error,) = machine.receive(Open(7, 1, 0, HASH, (1, 2), 10, (9,), biased, 5, Mode.NAV, HASH, HASH), 0.0)
    assert error == Error(7, 1, ErrorCode.MALFORMED, "id 10 is outside the target's vocabulary of 10")
    assert machine.sessions == 0


def told(number: int) -> Logprobs:
    return Logprobs(-number / 8, ((number, -number / 8),))


def test_log_probabilities_come_with_each_id_as_often_as_it_is_said() -> None:
    cloud = Cloud(Sampling(temperature=1.0, logprobs=1))
    cloud.draft(2, 3, 4)
    (verdict,) = cloud.result(Choices((3, 5, 6), 1, logprobs=(told(3), told(5))))
    assert isinstance(verdict, Verdict) and verdict.logprobs == (told(3), told(5))
    _, verdict = cloud.draft(3, epoch=1, known=3, nav=False, again=True)
    assert isinstance(verdict, Verdict) and (verdict.pos, verdict.ids, verdict.logprobs) == (3, (5,), (told(5),))
    cloud.draft(4, epoch=1)
    (verdict,) = cloud.result(Choices((6,), 0, logprobs=(told(6),)))
    assert isinstance(verdict, Verdict) and verdict.logprobs == (told(6),)
    _, verdict = cloud.draft(5, epoch=1, nav=False, again=True)
    assert isinstance(verdict, Verdict) and verdict.ids == () and verdict.logprobs is None


def test_log_probabilities_are_kept_no_longer_than_they_may_be_repeated() -> None:
    cloud = Cloud(Sampling(temperature=1.0, logprobs=1), Mode.FREE, limit=1000)
    (session,) = cloud.machine._sessions.values()
    most = known = 0
    while cloud.machine.work():
        (verdict,) = cloud.result(Choices((3,), 0, logprobs=(told(len(cloud.committed)),)))
        most = max(most, len(session.logprobs))
        length = len(cloud.committed)
        if length - known > 40 and not session.ended:
            known = length - 10
            for pos in (known, known - 20):  # the second is late and acknowledges less
                _, verdict = cloud.draft(pos, nav=False, again=True)
                assert isinstance(verdict, Verdict) and verdict.logprobs is not None
                assert [one.own for one in verdict.logprobs] == [told(at).own for at in range(known, length)]
    limits = cloud.machine.limits
    assert len(cloud.committed) == 1000 and most <= limits.run_ahead + limits.draft_ahead


def test_log_probabilities_end_with_the_ids() -> None:
    """At a stop id, at the limit, at logits that are not finite."""
    cloud = Cloud(Sampling(temperature=1.0, logprobs=1))
    cloud.draft(2, 3, 9, 4)
    (verdict,) = cloud.result(Choices((3, 9, 4, 6), 3, logprobs=tuple(map(told, (3, 9, 4, 6)))))
    assert isinstance(verdict, Verdict) and (verdict.ids, verdict.logprobs) == ((3, 9), (told(3), told(9)))
    broken = Cloud(Sampling(temperature=1.0, logprobs=1))
    broken.draft(2, 3, 4)
    verdict, error = broken.result(Choices((3, -1, 6), 1, logprobs=(told(3), told(0))))
    assert isinstance(verdict, Verdict) and (verdict.ids, verdict.logprobs) == ((3,), (told(3),))
    assert isinstance(error, Error) and error.code is ErrorCode.INTERNAL


def test_logits_that_are_not_finite_end_their_session() -> None:
    """Only where something is drawn from them."""
    cloud = Cloud(TESTED)
    cloud.draft(2, 3, 4)
    verdict, error = cloud.result(Choices((0, -1, 0), 1))
    assert isinstance(verdict, Verdict) and verdict.ids == (3,) and not verdict.rejected
    assert isinstance(error, Error) and error.code is ErrorCode.INTERNAL
    behind = Cloud(TESTED)
    behind.draft(2, 3, 4)
    (verdict,) = behind.result(Choices((0, 0, -1), 2))
    assert isinstance(verdict, Verdict) and verdict.ids == (3, 4)
    behind.draft(4)
    (error,) = behind.result(Choices((-1,), 0))[-1:]
    assert isinstance(error, Error) and behind.committed == (1, 2, 3, 4)


def test_a_refusal_stands_until_the_edge_has_drawn() -> None:
    """It is repeated when asked for, without what was tried; nothing is computed, whatever is drafted behind."""
    cloud = Cloud(TESTED, Mode.EAGER)
    cloud.draft(2, 3, 4, 5)
    (verdict,) = cloud.result(Choices((0, 0, 0, 0), 1, REFUSAL))
    assert isinstance(verdict, Verdict) and verdict.rejected
    assert (verdict.pos, verdict.ids, verdict.refused) == (2, (3,), REFUSAL.told(0))
    opened, verdict = cloud.draft(3, again=True)
    assert isinstance(opened, Opened) and isinstance(verdict, Verdict) and verdict.refused == REFUSAL.told(0)
    (verdict,) = cloud.draft(3, again=True, tried=2)
    assert isinstance(verdict, Verdict)
    assert (verdict.pos, verdict.ids, verdict.rejected, verdict.refused) == (3, (), True, REFUSAL.told(2))
    assert verdict.refused is not None and verdict.refused.first == 2
    (resend,) = cloud.draft(5, 6, known=4, epoch=1)
    assert resend.pos == 3
    assert not cloud.machine.work()
    assert not cloud.draft(3, 4, 6, known=4, epoch=1)
    assert cloud.committed == (1, 2, 3, 4)
    assert cloud.work.ids == (4, 6)
    opened, verdict = cloud.draft(4, 6, known=4, epoch=1, again=True)
    assert isinstance(verdict, Verdict) and not verdict.rejected and verdict.refused is None and verdict.ids == ()


def test_only_the_awaited_position_lets_an_edge_be_ahead() -> None:
    def cloud() -> Cloud:
        cloud = Cloud(TESTED)
        cloud.draft(2, 3, 4)
        cloud.result(Choices((0, 0, 0), 1, REFUSAL))
        return cloud

    (error,) = cloud().draft(4, 6, known=5, epoch=1)
    assert isinstance(error, Error) and error.code is ErrorCode.UNKNOWN
    (error,) = cloud().draft(3, 10, known=4, epoch=1)
    assert isinstance(error, Error) and error.code is ErrorCode.MALFORMED
    resolved = cloud()
    resolved.draft(3, 6, known=4, epoch=1, nav=False)
    (error,) = resolved.draft(4, 6, known=5, epoch=1)
    assert isinstance(error, Error) and error.code is ErrorCode.UNKNOWN
    (error,) = Cloud(TESTED).draft(2, 3, known=3)
    assert isinstance(error, Error) and error.code is ErrorCode.UNKNOWN


def test_the_time_in_which_the_edge_draws_is_not_the_clouds() -> None:
    """Not even that behind a question which came before the draw."""
    cloud = Cloud(TESTED)
    cloud.draft(2, 3, 4)
    cloud.result(Choices((0, 0, 0), 1, REFUSAL))
    draft = Draft(7, 1, 1, 5, (6,), 4, nav=True, p_draft=(0.5,))
    assert cloud.machine.receive(draft, 1.0)
    cloud.machine.receive(draft._replace(pos=3, ids=(4, 5, 6), p_draft=(1.0, 0.5, 0.5)), 3.0)
    (verdict,) = cloud.machine.done(cloud.work, Choices((0, 0, 0), 2), 0.5, 3.5)
    assert isinstance(verdict, Verdict) and verdict.counters is not None and verdict.counters.busy_100us == 5000


def test_what_is_drawn_behind_the_end_is_not_taken() -> None:
    """A late draft of a generation that was cancelled, and one of a session whose edge broke a rule."""
    for end in (Cancel(7, 1), Draft(7, 1, 0, 3, (10,), 3, p_draft=(0.5,))):
        cloud = Cloud(TESTED)
        cloud.draft(2, 3, 4)
        cloud.result(Choices((0, 0, 0), 1, REFUSAL))
        cloud.tell(end)
        assert cloud.draft(3, 6, known=4, epoch=1) == []
        assert cloud.committed == (1, 2, 3) and not cloud.machine.work()


def test_a_refusal_behind_the_end_is_none() -> None:
    cloud = Cloud(TESTED)
    cloud.draft(2, 3, 9, 4)
    (verdict,) = cloud.result(Choices((0, 0, 0, 0), 2, REFUSAL))
    assert isinstance(verdict, Verdict) and verdict.ids == (3, 9) and not verdict.rejected


def test_an_edge_whose_drafts_are_tested_meets_no_free_run() -> None:
    """Nor is it told that there will be more."""
    cloud = Cloud(TESTED, Mode.FREE)
    assert not cloud.machine.work()
    cloud.draft(2)
    (verdict,) = cloud.result(Choices((3,), 0))
    assert isinstance(verdict, Verdict) and not verdict.more
    cloud.machine.set_mode(7, Mode.FREE)
    assert not cloud.machine.work()
    listens = Cloud(TESTED.untested, Mode.FREE)
    (verdict,) = listens.result(Choices((3,), 0))
    assert isinstance(verdict, Verdict) and verdict.more
