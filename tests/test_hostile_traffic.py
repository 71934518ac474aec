"""Well-formed messages with any content: neither machine may fail, and nobody else may notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.core import Mode
from pipesd.errors import ProtocolError
from pipesd.policy.accept import ToldLaw
from pipesd.policy.batch_choices import greedy_choices
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.actions import Action, Committed, Extend, Request, Rollback
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import (
    Cancel,
    Close,
    Counters,
    Draft,
    Error,
    ErrorCode,
    Gone,
    Message,
    Open,
    Opened,
    Resend,
    Verdict,
)
from pipesd.protocol.vocabulary import digest
from pipesd.protocol.wire import decode, encode
from tests.model_target import ModelRefusal

HASH = b"eight by"
HONEST, HOSTILE = 1, (2, 3, 4)
U32 = (1 << 32) - 1
LIMITS = CloudLimits(context=64, vocabulary_size=10, max_sessions=4, prefill_piece=3)

positions = st.integers(0, 20) | st.sampled_from([63, 64, 65, U32])
openings = st.integers(0, 3) | st.just(U32)
ids = st.lists(st.integers(0, 10) | st.just((1 << 31) - 1), max_size=40).map(tuple)
few_ids = st.lists(st.integers(0, 9), max_size=6).map(tuple)
flags = st.booleans()
small = st.integers(0, 9)
sessions = st.sampled_from(HOSTILE)
counters = st.none() | st.builds(Counters, *[st.integers(0, U32)] * 4)
bases = positions.flatmap(lambda base: st.tuples(st.just(base), st.sampled_from([HASH, digest(()), digest((1,) * 3)])))

TESTED = Sampling(temperature=1.0, method=Method.REJECTION)
samplings = st.sampled_from(
    [
        None,
        TESTED,
        Sampling(temperature=1.0, method=Method.REJECTION),
        Sampling(temperature=1.0, logit_bias=((9, 1.0),)),
        Sampling(temperature=1.0, method=Method.REJECTION, logit_bias=((10, 1.0),)),
    ]
)
numbers = st.none() | st.sampled_from([0, 1, 2, 5, U32])
refusals = st.none() | st.builds(ToldLaw, st.just(((4, 0.5), (5, 0.5))), numbers)


def draft(
    session: int, opening: int, epoch: int, pos: int, given: tuple[int, ...], *rest: Any, p: bool, **more: Any
) -> Draft:
    return Draft(session, opening, epoch, pos, given, *rest, p_draft=(0.5,) * len(given) if p else None, **more)


to_cloud = st.one_of(
    st.builds(draft, sessions, openings, positions, positions, ids | few_ids, positions, flags, flags, p=flags),
    st.builds(draft, sessions, openings, small, small, few_ids, small, flags, flags, p=flags, tried=numbers),
    st.builds(
        lambda session, opening, base, given, limit, stop_ids, sampling, mode: Open(
            session, opening, base[0], base[1], given, limit, stop_ids, sampling, 0, mode, HASH, HASH
        ),
        sessions, openings, bases, ids | few_ids, positions, few_ids, samplings, st.sampled_from(Mode),
    ),
    st.builds(Cancel, sessions, openings),
    st.builds(Close, sessions, openings),
)  # fmt: skip
to_edge = st.one_of(
    st.builds(Verdict, st.just(HONEST), openings, positions, positions, ids | few_ids, flags, flags, counters),
    st.builds(
        lambda opening, epoch, pos, given, refused: Verdict(
            HONEST, opening, epoch, pos, given, False, refused is not None, None, refused
        ),
        st.integers(1, 2),
        small,
        st.integers(2, 6),
        few_ids.map(lambda given: given[:2]),
        refusals,
    ),
    st.builds(Opened, st.just(HONEST), openings, positions, positions, positions, positions),
    st.builds(Resend, st.just(HONEST), openings, positions, positions),
    st.builds(Error, st.just(HONEST), openings, st.sampled_from(ErrorCode), st.just("why"), st.integers(0, U32)),
)


EVENTS = ["draw", "ask", "send", "settle", "deadline", "reopen", "stop_drafting", "redrawn", "ask_more"]


class Bench:
    """A cloud machine with a target of one cache a slot that counts up from the last id."""

    def __init__(self) -> None:
        self.machine = CloudMachine(LIMITS)
        self.caches: dict[int, list[int]] = {}
        self.now_s = 0.0

    def tell(self, message: Message) -> list[Message]:
        return self._checked(self.machine.receive(message, self.now_s))

    def step(self) -> list[Message]:
        """One pass; the messages it brings."""
        messages: list[Message] = []
        self.now_s += 0.001
        for work in self.machine.work():
            cache = self.caches.setdefault(work.slot, [])
            assert work.keep <= len(cache)
            cache[work.keep :] = work.ids
            assert len(cache) <= LIMITS.context and all(token < LIMITS.vocabulary_size for token in cache)
            ids = [(token + 1) % LIMITS.vocabulary_size for token in cache[len(cache) - work.rows :]]
            (choices,) = greedy_choices([(work.slot, work.ids, work.rows)], [ids])
            if choices.accepted < work.rows - 1 and work.draw is not None and work.draw.sampler.sampling.tests:
                assert len(work.draw.p_draft) == work.rows - 1
                choices = choices._replace(refusal=ModelRefusal(0, (), 10, frozenset(), True))
            messages += self._checked(self.machine.done(work, choices, 0.001, self.now_s))
        return messages

    def _checked(self, messages: list[Message]) -> list[Message]:
        assert all(decode(encode(message), internal=True) == message for message in messages)
        return messages


@settings(max_examples=200, deadline=None)
@given(st.lists(to_cloud | st.none(), max_size=40))
def test_no_edge_can_break_the_cloud_or_touch_another_session(traffic: list[Message | None]) -> None:
    """None stands for a pass. The honest session's record and words are the same with and without the others."""
    crowded, alone = Bench(), Bench()
    opening = Open(HONEST, 1, 0, HASH, (1, 2, 3, 4, 5), 60, (), None, 0, Mode.NAV, HASH, HASH)
    asks = Draft(HONEST, 1, 0, 5, (6, 9), 5, nav=True)
    for bench in (crowded, alone):
        bench.tell(opening)
        while not bench.machine._sessions[HONEST].opened:
            bench.step()
    before = copy.deepcopy(crowded.machine._sessions[HONEST])
    for message in traffic:
        answers = crowded.step() if message is None else crowded.tell(message)
        assert all(answer.session in HOSTILE for answer in answers)
        for s in crowded.machine._sessions.values():
            assert len(s.draft) <= LIMITS.draft_ahead and len(s.committed) <= LIMITS.context
    assert crowded.machine._sessions[HONEST] == before
    said = {}
    for bench in (crowded, alone):
        words = bench.tell(asks)
        for _ in range(8):  # prefills of the others may come first, one piece each time
            words += bench.step()
        said[bench] = [word for word in words if word.session == HONEST]
    (verdict,), (verdict_alone,) = said.values()
    assert isinstance(verdict, Verdict) and isinstance(verdict_alone, Verdict)
    assert verdict.ids == verdict_alone.ids == (6, 7)
    assert crowded.machine.committed(HONEST) == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("draft", "code"),
    [
        (Draft(2, 1, 0, 3, (4,), 4), ErrorCode.UNKNOWN),  # more known than committed
        (Draft(2, 2, 0, 3, (4,), 3), ErrorCode.UNKNOWN),  # an opening that never came
        (Draft(3, 1, 0, 3, (4,), 3), ErrorCode.UNKNOWN),  # a session that never came
        (Draft(2, 1, 0, 3, (10,), 3), ErrorCode.MALFORMED),  # an id outside the vocabulary
        (Draft(2, 1, 0, 4, (9,), 3), ErrorCode.MALFORMED),  # two ids for one position
        (Draft(2, 1, 0, 5, (0,) * 31, 3), ErrorCode.LIMIT),  # more ahead than granted
    ],
)
def test_what_no_honest_edge_sends_is_refused_by_name(draft: Draft, code: ErrorCode) -> None:
    bench = Bench()
    bench.tell(Open(2, 1, 0, HASH, (1, 2, 3), 60, (), None, 0, Mode.NAV, HASH, HASH))
    bench.tell(Draft(2, 1, 0, 3, (5, 6), 3))
    (error,) = bench.tell(draft)
    assert isinstance(error, Error) and error.code is code
    assert (error.session, error.opening) == (draft.session, draft.opening)


def test_a_hole_is_asked_for_once_and_a_huge_position_costs_nothing() -> None:
    bench = Bench()
    bench.tell(Open(2, 1, 0, HASH, (1,), 60, (), None, 0, Mode.NAV, HASH, HASH))
    far = Draft(2, 1, 0, U32 - 9, (1, 2), 1, nav=False)
    assert bench.tell(far) == [Resend(2, 1, 0, 1)]
    assert bench.tell(far) == []
    assert bench.tell(far._replace(nav=True)) == [Resend(2, 1, 0, 1)]
    assert bench.step() == []
    assert bench.tell(Draft(2, 1, 0, 1, (2,) * 29, 1)) == []


def test_counters_that_an_edge_drives_up_stay_such_as_the_wire_can_carry() -> None:
    bench = Bench()
    bench.tell(Open(2, 1, 0, HASH, (1,), 60, (), None, 0, Mode.NAV, HASH, HASH))
    bench.tell(Draft(2, 1, 3, 1, (2,), 1))
    bench.machine._sessions[2].stale = U32 - 1  # which takes a million messages
    bench.tell(Draft(2, 1, 0, 1, (2, 3, 4), 1))
    (_, verdict) = bench.tell(Draft(2, 1, 3, 1, (2,), 1, again=True))
    assert isinstance(verdict, Verdict) and verdict.counters is not None and verdict.counters.stale == U32


def test_junk_cannot_hold_a_place_for_longer_than_the_idle_limit() -> None:
    """An edge that asks about what it never sends is owed a verdict, and yet goes when it is silent for long."""
    bench = Bench()
    for session in (2, 3, 4, 5):
        bench.tell(Open(session, 1, 0, HASH, (1,), 60, (), None, 0, Mode.NAV, HASH, HASH))
        bench.tell(Draft(session, 1, 0, 30, (1,), 1, nav=True))
    late = Open(HONEST, 1, 0, HASH, (1,), 60, (), None, 0, Mode.NAV, HASH, HASH)
    bench.now_s = LIMITS.quiet_s + 1
    (full,) = bench.tell(late)
    assert isinstance(full, Error) and full.code is ErrorCode.FULL and full.retry_ms == LIMITS.full_retry_ms
    bench.now_s = LIMITS.idle_s + 1
    gone, opened = bench.tell(late._replace(opening=2))
    assert isinstance(gone, Gone) and isinstance(opened, Opened)
    assert len(bench.machine.tick(bench.now_s)) == 3


def test_a_prompt_that_takes_longer_than_the_idle_limit_is_not_idle() -> None:
    bench = Bench()
    prompt = (1,) * (LIMITS.context - 2)
    bench.tell(Open(HONEST, 1, 0, HASH, prompt, LIMITS.context, (), None, 0, Mode.FREE, HASH, HASH))
    for _ in range(3):
        bench.now_s += LIMITS.idle_s
        bench.step()
        assert bench.machine.tick(bench.now_s) == [] and bench.machine.sessions == 1
    bench.now_s += LIMITS.idle_s + 1
    assert len(bench.machine.tick(bench.now_s)) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(to_edge | st.sampled_from(EVENTS), max_size=40), flags, flags)
def test_no_cloud_can_break_the_edge_or_take_back_an_id(events: list[Any], ahead: bool, tested: bool) -> None:
    """A cloud may commit and refuse what it likes, but what was given to the user stays; at worst the edge says what is
    wrong."""
    edge = EdgeMachine(HONEST, 20)
    mirror, shown = [1, 2], [1, 2]

    def perform(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Rollback):
                del mirror[action.pos :]
            elif isinstance(action, Extend):
                mirror.extend(action.ids)
            elif isinstance(action, Committed):
                assert action.pos == len(shown)
                shown.extend(action.ids)
        assert edge.committed == shown and mirror == shown + edge.draft
        assert len(edge.draft) <= 20 and len(shown) <= 30

    request = Request(30, frozenset({9}), Mode.NAV, 0, HASH, HASH, 1, TESTED if tested else None)
    perform(edge.generate(0, [1, 2], request, drafts=True, ahead=ahead))
    for event in events:
        if event == "draw":
            if edge.may_draft:
                edge.drafted(len(mirror) % 9, 0.5)
                mirror.append(len(mirror) % 9)
        elif event == "redrawn":
            perform(edge.redrawn(len(mirror) % 7))
        elif event == "ask_more":
            perform(edge.ask_more(2))
        elif isinstance(event, str):
            perform(getattr(edge, event)())
        else:
            try:
                perform(edge.receive(event))
            except ProtocolError:
                break  # it contradicted itself: the generation is over
    assert mirror[: len(shown)] == shown
    perform(edge.cancel())
