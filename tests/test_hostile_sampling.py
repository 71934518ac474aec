"""What an edge may say of sampling, as far as the wire takes it, and cannot do harm by to the cloud or its other
sessions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clouds import Watched
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker import PROMPT, asks, opening, working

from pipesd.core import Mode
from pipesd.policy import accept
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.messages import MAX_TRIED
from pipesd.protocol.wire import (
    Draft,
    Error,
    ErrorCode,
    Message,
    Opened,
    Verdict,
    decode,
    encode,
)
from pipesd.sim.distributions import KeyedDistribution
from tests.wire_samples import samplings

WIDTH = 300
TOP = 2**32 - 1
TESTED = Sampling(temperature=1.0, method=Method.REJECTION)


def rows(count: int, seed: int) -> Any:
    """Logits of a target of more ids than are told whole."""
    return np.random.default_rng(seed).normal(0.0, 2.0, (count, WIDTH)).astype(np.float32)


class Cloud:
    """A machine and a target of noise. What the machine says must be of those messages that can be sent."""

    def __init__(self, sampling: Sampling | None, seed: int, mode: Mode = Mode.NAV) -> None:
        self.machine = CloudMachine(CloudLimits(context=200, vocabulary_size=WIDTH))
        self.said: list[Message] = []
        self._seed = seed
        self.hear(opening(5, ids=(1, 2, 3), sampling=sampling, seed=seed, mode=mode))

    def hear(self, message: Message) -> None:
        self._say(self.machine.receive(decode(encode(message)), 0.0))
        for _ in range(3):
            for work in self.machine.work():
                self._seed += 1
                found = Choices((), 0)
                if work.rows:
                    found = accept.choose(rows(work.rows, self._seed), work.draw or plain(work))
                self._say(self.machine.done(work, found, 0.001, 0.0))

    def _say(self, messages: list[Message]) -> None:
        assert all(decode(encode(message), internal=True) for message in messages)
        self.said += messages


def plain(work: Any) -> Draw:
    return Draw(Sampler(Sampling(), 0), work.ids[:1], work.ids[1:])


near = st.integers(0, 12)
number = st.one_of(near, st.sampled_from([TOP, TOP - 1, 2**31, WIDTH]))


@st.composite
def any_draft(draw: st.DrawFn) -> Draft:
    ids = tuple(draw(st.lists(st.sampled_from([0, 1, 2, WIDTH - 1, WIDTH, 2**31 - 1]), max_size=5)))
    p_draft = tuple(draw(st.sampled_from([0.0, 2.0**-24, 0.5, 1.0])) for _ in ids) if draw(st.booleans()) else None
    known = draw(number)
    pos = draw(st.one_of(st.just(known), number))
    flags = draw(st.tuples(st.booleans(), st.booleans()))
    return Draft(
        5,
        1,
        draw(number),
        pos,
        ids,
        known,
        *flags,
        p_draft,
        draw(st.none() | near | st.sampled_from([1 << 14, MAX_TRIED])),
    )


@settings(max_examples=100)
@given(samplings(), st.integers(0, TOP), st.sampled_from(Mode), st.lists(any_draft(), max_size=9))
def test_whatever_an_edge_sends_the_answer_can_be_sent(
    sampling: Sampling, seed: int, mode: Mode, drafts: list[Draft]
) -> None:
    bias = {token % WIDTH: value for token, value in sampling.logit_bias}
    cloud = Cloud(replace(sampling, logit_bias=tuple(bias.items())), seed, mode)
    assert isinstance(cloud.said[0], Opened)
    for draft in drafts:
        cloud.hear(draft)


def refusing_cloud(sampling: Sampling = TESTED, refused_at: int = 3) -> Cloud:
    """One that awaits the edge's draw at position `refused_at`."""
    for seed in range(1000):
        cloud = Cloud(sampling, seed)
        cloud.hear(Draft(5, 1, 0, 3, (7, 7, 7, 7), 3, nav=True, p_draft=(1.0,) * 4))
        verdict = cloud.said[-1]
        if isinstance(verdict, Verdict) and verdict.rejected and verdict.pos + len(verdict.ids) == refused_at:
            return cloud
    raise AssertionError("nothing is ever refused")


def test_a_distribution_of_many_ids_comes_as_proposals_and_as_many_more_as_are_asked_for() -> None:
    cloud = refusing_cloud()
    first = cloud.said[-1]
    assert isinstance(first, Verdict) and first.refused is not None and first.refused.first == 0
    cloud.hear(Draft(5, 1, 0, 3, (), 3, again=True, tried=first.refused.end))
    more = cloud.said[-1]
    assert isinstance(more, Verdict) and more.refused is not None and more.refused.first == first.refused.end


@pytest.mark.parametrize("tried", [1 << 14, (1 << 14) + 1, MAX_TRIED])
def test_an_edge_that_asks_for_the_last_proposals_of_all_gets_an_answer_that_can_be_sent(tried: int) -> None:
    cloud = refusing_cloud()
    before = len(cloud.said)
    cloud.hear(Draft(5, 1, 0, 3, (), 3, again=True, tried=tried))
    assert len(cloud.said) > before
    assert isinstance(cloud.said[-1], Verdict | Error)


@pytest.mark.parametrize(("epoch", "known"), [(0, 5), (1, 5), (1, TOP), (TOP, 5)])
def test_an_edge_that_claims_more_than_the_draw_that_is_awaited_is_unknown(epoch: int, known: int) -> None:
    cloud = refusing_cloud()
    cloud.hear(Draft(5, 1, epoch, 3, (9,), known, p_draft=(1.0,)))
    error = cloud.said[-1]
    assert isinstance(error, Error) and error.code == ErrorCode.UNKNOWN
    assert cloud.machine.committed(5) == (1, 2, 3)


def test_a_draw_beyond_the_vocabulary_is_not_committed() -> None:
    cloud = refusing_cloud()
    cloud.hear(Draft(5, 1, 1, 3, (WIDTH,), 4, p_draft=(1.0,)))
    assert isinstance(cloud.said[-1], Error) and "outside" in cloud.said[-1].text
    assert cloud.machine.committed(5) == (1, 2, 3)


HARSH = [
    Sampling(temperature=5e-324), Sampling(temperature=100.0), Sampling(temperature=1.0, top_k=1 << 20),
    Sampling(temperature=1.0, top_p=0.0), Sampling(temperature=1.0, min_p=1.0), Sampling(temperature=1.0, top_p=5e-324),
    Sampling(temperature=1.0, repetition_penalty=10.0, presence_penalty=-2.0, frequency_penalty=-2.0),
    Sampling(temperature=1.0, logit_bias=tuple((i, -math.inf) for i in range(512))),
    Sampling(logit_bias=tuple((i, -math.inf) for i in range(512)), logprobs=20),
    Sampling(temperature=1.0, logprobs=20, method=Method.PICOSPEC, top_mass=1024),
    Sampling(temperature=5e-324, top_k=1, top_p=0.0, min_p=1.0, method=Method.REJECTION),
]  # fmt: skip


def keyed() -> Watched:
    return Watched(KeyedDistribution(3, alphabet=range(65, 91)))


@pytest.mark.parametrize("sampling", HARSH, ids=lambda s: str(HARSH.index(s)))
@pytest.mark.parametrize("p", [0.0, 2.0**-24, 1.0])
def test_harsh_options_and_probabilities_leave_the_worker_and_its_other_sessions_alone(
    sampling: Sampling, p: float
) -> None:
    with working(keyed) as (front, _, worker):
        front.say(opening(9), opening(5, sampling=sampling))
        front.hear(Opened, 9), front.hear(Opened, 5)
        told = p if sampling.tests else None
        ids = () if sampling.logprobs is not None and sampling.tests else (70, 70)
        draft = asks(5, ids)._replace(p_draft=None if told is None or not ids else (told, told))
        front.say(draft, asks(9, ()))
        answer = front.hear(Verdict, 9)
        assert len(answer.ids) == 1
        told_harsh = front.hear(Verdict, 5) if math.inf not in [-b for _, b in sampling.logit_bias] else None
        if told_harsh is None:
            error = front.hear(Error, 5)
            assert error.code == ErrorCode.INTERNAL and "not finite" in error.text
        front.say(Draft(9, 1, 0, len(PROMPT) + 1, (), len(PROMPT) + 1, nav=True))
        assert front.hear(Verdict, 9).ids and not worker.over


def test_all_proposals_that_there_can_be_leave_the_worker_alone() -> None:
    wide = KeyedDistribution(3, alphabet=range(1, 400), sharpness=0.1)
    with working(lambda: Watched(wide)) as (front, _, worker):
        front.say(opening(5, sampling=TESTED, seed=4))
        front.hear(Opened, 5)
        front.say(asks(5, (7,) * 20)._replace(p_draft=(1.0,) * 20))
        assert front.hear(Verdict, 5).rejected
        front.say(Draft(5, 1, 0, len(PROMPT), (), len(PROMPT), again=True, tried=MAX_TRIED))
        front.say(opening(9))
        assert front.hear(Opened, 9) and not worker.over
