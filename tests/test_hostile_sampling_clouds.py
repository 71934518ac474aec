"""What a cloud may say of sampling, as far as the wire takes it, and cannot do harm to an edge by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clouds import PROMPT as TEXT
from clouds import FakeCloud, edge, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.core import Logprobs, Mode
from pipesd.errors import PipeSDError, ProtocolError
from pipesd.policy.accept import ToldLaw
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol import actions as act
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import MAX_PAIRS, MAX_TRIED
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.protocol.wire import (
    SAMPLING,
    Draft,
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

WIDTH = 300


class Edge:
    """A machine that drafts `DRAFTED`, tested, and what a loop does for it."""

    DRAFTED = (65, 66, 67, 68)

    def __init__(self, seed: int = 0, ahead: bool = False, logprobs: int | None = None) -> None:
        sampling = Sampling(temperature=1.0, method=Method.REJECTION, logprobs=logprobs)
        self.machine = EdgeMachine(5, draft_ahead=8)
        self.proposals = Proposals(Sampler(sampling, seed))
        self.sent: list[Message] = []
        self.over: list[Any] = []
        request = act.Request(60, frozenset({2}), Mode.NAV, seed, bytes(8), bytes(8), 1, sampling)
        self.perform(self.machine.generate(0, (1, 2, 3), request, drafts=True, ahead=ahead))
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
                    token = self.proposals.redraw(pos, refused)
                    more = self.machine.ask_more(refused.end) if token is None else None
                    self.perform(self.machine.redrawn(token) if more is None else more)  # type: ignore[arg-type]
                case act.Committed(_, ids):
                    assert all(0 <= token < 2**31 for token in ids)
                case act.Fail() | act.Done():
                    self.over.append(action)


tiny = st.sampled_from([0.0, 2.0**-149, 2.0**-126, 2.0**-60, 0.25, 1.0])
pair = st.tuples(st.sampled_from([0, 2, *Edge.DRAFTED, WIDTH, 2**31 - 1]), tiny)
some_pairs = st.lists(pair, min_size=1, max_size=6).filter(lambda pairs: any(p for _, p in pairs)).map(tuple)
hostile_refused = st.builds(ToldLaw, some_pairs, st.none() | st.sampled_from([0, 1, 6, 1 << 14, MAX_TRIED]))
lie = st.tuples(st.integers(-1, 2), hostile_refused, st.booleans())


@settings(max_examples=100)
@given(st.integers(0, 9), st.booleans(), st.lists(lie, max_size=8))
def test_whatever_a_cloud_refuses_with_the_edge_commits_ids_and_sends_what_can_be_sent(
    seed: int, ahead: bool, lies: list[tuple[int, ToldLaw, bool]]
) -> None:
    edge = Edge(seed, ahead)
    for shift, refused, late in lies:
        machine = edge.machine
        if not machine.running:
            break
        ids = tuple(machine.draft[: max(shift, 0)])
        pos = len(machine.committed) - (shift < 0)
        if shift < 0:
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
    edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, ToldLaw(((drafted, 2.0**-149),))))
    assert edge.machine.committed[3:] == [drafted]


def test_proposals_that_nobody_can_take_come_to_an_end() -> None:
    edge = Edge()
    drafted, rounds = edge.machine.draft[0], 0
    lie = tuple((drafted, 2.0**-60) for _ in range(1024))
    while len(edge.machine.committed) == 3:
        asked = edge.sent[-1]
        assert isinstance(asked, Draft) and rounds < 50
        edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, ToldLaw(lie, asked.tried or 0)))
        rounds += 1
    assert edge.machine.committed[3:] == [drafted]


def test_proposals_far_ahead_of_those_that_were_tried_are_no_answer() -> None:
    edge = Edge()
    edge.hear(Verdict(5, 1, 0, 3, (), False, True, None, ToldLaw(((9, 1.0),), MAX_TRIED)))
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
        refused = ToldLaw(((token, 0.5),) * MAX_PAIRS)
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
        return Verdict(m.session, m.opening, m.epoch, m.known, (), False, True, None, ToldLaw(((70, 1.0),)))

    with lying(verdict) as cloud, edge(cloud.address, proposal=KeyedDistribution(3), strategy="vanilla") as session:
        with pytest.raises(ProtocolError, match="refused a draft token"):
            ids_of(session, TEXT, **options)
