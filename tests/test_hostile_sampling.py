"""What a peer may say of sampling, as far as the wire takes it, and cannot do harm by: an edge to the cloud and to its
other sessions, a cloud to the edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clouds import PROMPT as TEXT
from clouds import FakeCloud, Watched, edge, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker import PROMPT, asks, opening, working

from pipesd.core import Logprobs, Mode
from pipesd.errors import PipeSDError, ProtocolError
from pipesd.policy import accept
from pipesd.policy.accept import Choices, Draw, Refused
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol import actions as act
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import MAX_PAIRS, MAX_TRIED
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.protocol.wire import (
    SAMPLING,
    Draft,
    Error,
    ErrorCode,
    Hello,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    ProbeStatus,
    Verdict,
    Welcome,
    decode,
    encode,
)
from pipesd.sim.distributions import KeyedDistribution
from pipesd.sim.tokeniser import byte_vocabulary
from tests.wire_samples import samplings

WIDTH = 300
TOP = 2**32 - 1
TESTED = Sampling(temperature=1.0, method=Method.REJECTION)


# ---- an edge that means harm


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
    Sampling(temperature=5e-324, top_k=1, top_p=0.0, min_p=1.0, method=Method.REJECTION, own_token=False),
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


# ---- a cloud that means harm


class Edge:
    """A machine that drafts `DRAFTED`, tested, and what a loop does for it."""

    DRAFTED = (65, 66, 67, 68)

    def __init__(self, seed: int = 0, own_token: bool = True, logprobs: int | None = None) -> None:
        sampling = Sampling(temperature=1.0, method=Method.REJECTION, own_token=own_token, logprobs=logprobs)
        self.machine = EdgeMachine(5, draft_ahead=8)
        self.proposals = Proposals(Sampler(sampling, seed))
        self.sent: list[Message] = []
        self.over: list[Any] = []
        request = act.Request(60, frozenset({2}), Mode.NAV, seed, bytes(8), bytes(8), 1, sampling)
        self.perform(self.machine.generate(0, (1, 2, 3), request, drafts=True, ahead=not own_token))
        self.hear(Opened(5, 1, 60, 8, 8, 1))
        self.draft()

    def draft(self) -> None:
        """Draft and ask, as long as that is of use."""
        row = np.full(WIDTH, -3.0, np.float32)
        row[list(self.DRAFTED)] = 2.0
        while self.machine.may_draft:
            text = [*self.machine.committed, *self.machine.draft]
            choice = self.proposals.choose(row, len(text), text)
            assert choice is not None
            self.machine.drafted(choice.id, self.proposals.p_sent(len(text), choice.id))
        self.perform(self.machine.ask())
        self.perform(self.machine.settle())

    def hear(self, message: Message) -> None:
        self.perform(self.machine.receive(decode(encode(message))))

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Send(message):
                    assert decode(encode(message)) == message
                    self.sent.append(message)
                case act.Rollback(pos):
                    self.proposals.forget(pos)
                case act.Redraw(pos, refused):
                    token = self.proposals.redraw(pos, refused, refused.first or 0)
                    more = self.machine.ask_more(refused.end) if token is None else None
                    self.perform(self.machine.redrawn(token) if more is None else more)  # type: ignore[arg-type]
                case act.Committed(_, ids):
                    assert all(0 <= token < 2**31 for token in ids)
                case act.Fail() | act.Done():
                    self.over.append(action)


tiny = st.sampled_from([0.0, 2.0**-149, 2.0**-126, 2.0**-60, 0.25, 1.0])
pair = st.tuples(st.sampled_from([0, 2, *Edge.DRAFTED, WIDTH, 2**31 - 1]), tiny)
some_pairs = st.lists(pair, min_size=1, max_size=6).filter(lambda pairs: any(p for _, p in pairs)).map(tuple)
hostile_refused = st.builds(Refused, some_pairs, st.none() | st.sampled_from([0, 1, 6, 1 << 14, MAX_TRIED]))
lie = st.tuples(st.integers(-1, 2), hostile_refused, st.booleans())


@settings(max_examples=100)
@given(st.integers(0, 9), st.booleans(), st.lists(lie, max_size=8))
def test_whatever_a_cloud_refuses_with_the_edge_commits_ids_and_sends_what_can_be_sent(
    seed: int, own_token: bool, lies: list[tuple[int, Refused, bool]]
) -> None:
    edge = Edge(seed, own_token)
    for ahead, refused, late in lies:
        machine = edge.machine
        if not machine.running:
            break
        ids = tuple(machine.draft[: max(ahead, 0)])
        pos = len(machine.committed) - (ahead < 0)
        if ahead < 0:
            ids = (machine.committed[-1],)
        epoch = machine.epoch + late
        try:
            edge.hear(Verdict(5, 1, epoch, pos, ids, False, True, None, refused))
        except PipeSDError as error:
            assert "\n" not in str(error)
            return
        if not machine.redrawing:
            edge.draft()
        if machine.running:
            edge.perform(machine.deadline())


def test_the_least_probabilities_that_there_are_give_an_id() -> None:
    """Of a residual too small for a float32 the largest part is still there."""
    edge = Edge()
    drafted = edge.machine.draft[0]
    edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, Refused(((drafted, 2.0**-149),))))
    assert edge.machine.committed[3:] == [drafted]


def test_proposals_that_nobody_can_take_come_to_an_end() -> None:
    edge = Edge()
    drafted, rounds = edge.machine.draft[0], 0
    lie = tuple((drafted, 2.0**-60) for _ in range(1024))
    while len(edge.machine.committed) == 3:
        asked = edge.sent[-1]
        assert isinstance(asked, Draft) and rounds < 50
        edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, Refused(lie, asked.tried or 0)))
        rounds += 1
    assert edge.machine.committed[3:] == [drafted]


def test_proposals_far_ahead_of_those_that_were_tried_are_no_answer() -> None:
    edge = Edge()
    edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, Refused(((9, 1.0),), MAX_TRIED)))
    assert edge.machine.committed == [1, 2, 3] and edge.machine.running
    edge.perform(edge.machine.deadline())
    assert isinstance(edge.sent[-1], Draft) and edge.sent[-1].again


def lying(verdict: Callable[[Draft], Verdict]) -> FakeCloud:
    """A cloud that samples, for all it says, and answers each NAV with `verdict`."""

    def answer(message: Message) -> list[Message]:
        vocabulary = byte_vocabulary()
        match message:
            case Hello():
                about = ("fake", vocabulary.real_size, vocabulary_hash(vocabulary), bytes(8), 2048, "cpu", "float32")
                return [Welcome(message.session, 0, 1, 1, SAMPLING, *about)]
            case Probe():
                return [Probed(message.session, 0, message.token, ProbeStatus.OK, 0)]
            case Open():
                return [Opened(message.session, message.opening, message.limit, 32, 64, 1)]
            case Draft() if message.nav or message.again:
                return [verdict(message)]
        return []

    return FakeCloud(answer)


@pytest.mark.parametrize("token", [512, 5000, 2**31 - 1])
@pytest.mark.parametrize("method", ["rejection", "picospec"])
def test_a_cloud_that_leaves_only_ids_beyond_the_vocabulary(token: int, method: str) -> None:
    """What the edge draws then shows nothing, as ids beyond the vocabulary do in a plain verdict."""

    def verdict(m: Draft) -> Verdict:
        if m.pos + len(m.ids) == m.known:
            return Verdict(m.session, m.opening, m.epoch, m.known, (token,))
        refused = Refused(((token, 0.5),) * MAX_PAIRS)
        return Verdict(m.session, m.opening, m.epoch, m.known, (), False, True, None, refused)

    options: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.2, "sampling": method, "max_tokens": 5}
    options |= {"top_mass": 8} if method == "picospec" else {}
    with lying(verdict) as cloud, edge(cloud.address, proposal=KeyedDistribution(3), strategy="vanilla") as session:
        assert ids_of(session, TEXT, **options) == [token] * 5
        assert session.text == "" and session.finish_reason == "length"


def test_a_cloud_whose_log_probabilities_are_of_ids_that_there_are_not() -> None:
    strange = Logprobs(-math.inf, ((2**31 - 1, 0.0),) * 20)

    def verdict(m: Draft) -> Verdict:
        return Verdict(m.session, m.opening, m.epoch, m.known, (70,), logprobs=(strange,))

    with lying(verdict) as cloud, edge(cloud.address, proposal=KeyedDistribution(3), strategy="vanilla") as session:
        pieces = list(session.generate(TEXT, logprobs=1, max_tokens=3))
        assert [told for piece in pieces for told in piece.logprobs] == [strange] * 3


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_a_cloud_that_refuses_where_nothing_is_tested(options: dict[str, Any]) -> None:
    def verdict(m: Draft) -> Verdict:
        return Verdict(m.session, m.opening, m.epoch, m.known, (), False, True, None, Refused(((70, 1.0),)))

    with lying(verdict) as cloud, edge(cloud.address, proposal=KeyedDistribution(3), strategy="vanilla") as session:
        with pytest.raises(ProtocolError, match="refused a draft token"):
            ids_of(session, TEXT, **options)
