"""Clouds that do not keep to the protocol: garbage, lies, silence. What an edge says of them, and what it ignores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from clouds import (
    HEALED_S,
    PROMPT,
    FakeCloud,
    edge,
    ids_of,
)

from pipesd.errors import ProtocolError, Refused, Unreachable
from pipesd.protocol.messages import (
    Cancel,
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
    Resend,
    Verdict,
    Welcome,
)
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.tokeniser import byte_vocabulary


class Pretender:
    """Answers as a cloud would until OPEN; what comes then is the test's."""

    def __init__(self, after: Callable[[Message], Sequence[Message | bytes]]) -> None:
        self._after = after

    def __call__(self, message: Message) -> Sequence[Message | bytes]:
        vocabulary = byte_vocabulary()
        if isinstance(message, Hello):
            about = ("fake", vocabulary.real_size, vocabulary_hash(vocabulary), bytes(8), 2048, "cpu", "float32")
            return [Welcome(message.session, 0, 1, 0, 0, *about)]
        if isinstance(message, Probe):
            return [Probed(message.session, 0, message.token, ProbeStatus.OK, 0)]
        return self._after(message)


def opened(message: Open) -> Opened:
    return Opened(message.session, message.opening, message.limit, 32, 64, 1)


def test_garbage_in_mid_generation() -> None:
    for garbage in (b"", b"\xc1", b"\x93\x06\x01\x01", b"x" * 2000):
        with FakeCloud(Pretender(lambda m, g=garbage: [g] if isinstance(m, Open) else [])) as cloud:  # type: ignore[misc]
            with edge(cloud.address) as session, pytest.raises(ProtocolError):
                ids_of(session, PROMPT)


def test_messages_that_only_an_edge_may_send() -> None:
    with FakeCloud(Pretender(lambda m: [Cancel(m.session, m.opening)])) as cloud:
        with edge(cloud.address) as session, pytest.raises(ProtocolError, match="Cancel"):
            ids_of(session, PROMPT)


def test_a_cloud_that_takes_back_what_it_said() -> None:
    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            first, second = ((70,), (71,))
            pos = len(message.ids)
            return [
                opened(message),
                Verdict(message.session, message.opening, 0, pos, first, more=True),
                Verdict(message.session, message.opening, 0, pos, second, more=True),
            ]
        return []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address, strategy="cloud") as session:
        pieces = session.generate(PROMPT)
        assert next(pieces).token_ids == (70,)
        with pytest.raises(ProtocolError, match=r"71 at position .* 70"):
            list(pieces)
        assert session.token_ids == (70,) and session.finish_reason == "error"


def test_what_belongs_to_somebody_else_is_dropped() -> None:
    """Verdicts of another session, of an earlier and of a later opening, and errors of them."""

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            pos = len(message.ids)
            addresses = [(message.session ^ 1, message.opening), (message.session, message.opening - 1)]
            addresses += [(message.session, message.opening + 1), (message.session, 1 << 20)]
            lies: list[Message] = []
            for session, opening in addresses:
                lies += [
                    Verdict(session, opening, 0, pos, (66,)),
                    Error(session, opening, ErrorCode.LIMIT, "not yours"),
                    Error(session, opening, ErrorCode.UNKNOWN, "not yours"),
                    Opened(session, opening, 3, 1, 1, 1),
                    Resend(session, opening, 0, 0),
                ]
            return [*lies, opened(message), *lies]
        if isinstance(message, Draft):
            return [Verdict(message.session, message.opening, message.epoch, message.known, (70,))]
        return []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address, agreement=0.0) as session:
        assert ids_of(session, PROMPT, max_tokens=5) == [70] * 5
        assert session.stats["openings"] == 1


def test_a_version_that_is_refused_at_the_opening() -> None:
    text = "the edge speaks protocol version 1.0, this side 2.0"
    with FakeCloud(Pretender(lambda m: [Error(m.session, m.opening, ErrorCode.VERSION, text)])) as cloud:
        with edge(cloud.address) as session, pytest.raises(Refused, match=r"1\.0.*2\.0") as refused:
            ids_of(session, PROMPT)
        assert refused.value.code == ErrorCode.VERSION


def test_a_cloud_that_answers_probes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesd.edge.patience.GIVE_UP_FACTOR", 3)
    pretend = Pretender(lambda m: [])

    def answer(message: Message) -> Sequence[Message | bytes]:
        if isinstance(message, Probe):
            return [Probed(message.session, 0, message.token, ProbeStatus.STARTING, 0)]
        return pretend(message)

    with FakeCloud(answer) as cloud, edge(cloud.address, patience_s=0.5) as session:
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match="has had no worker for this session"):
            ids_of(session, PROMPT)
        assert 1.5 <= time.monotonic() - begun_s < HEALED_S
        assert 3 <= cloud.kinds().count("Open") < 30


def test_a_cloud_that_forgets_is_told_everything_again() -> None:
    """Its front answers a probe that it knows no such session, and nothing more: the edge opens again by that."""
    forgotten = threading.Event()
    opens: list[Open] = []

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            opens.append(message)
            return [opened(message)] if len(opens) == 1 or forgotten.is_set() else []
        if isinstance(message, Draft) and forgotten.is_set():
            return [Verdict(message.session, message.opening, message.epoch, message.known, (70,))]
        return []

    def with_probes(message: Message) -> Sequence[Message | bytes]:
        if isinstance(message, Probe) and opens and not forgotten.is_set():
            forgotten.set()
            return [Probed(message.session, 0, message.token, ProbeStatus.UNKNOWN_SESSION, 0)] * 3
        return Pretender(answer)(message)

    with FakeCloud(with_probes) as cloud, edge(cloud.address, agreement=0.0) as session:
        assert ids_of(session, PROMPT, max_tokens=5) == [70] * 5
        assert session.stats["openings"] == len(opens) == 2, "three times the same news is one"
        assert opens[1].base == 0 and opens[1].ids[: len(opens[0].ids)] == opens[0].ids


def test_a_cloud_that_asks_for_what_it_was_given() -> None:
    """RESEND(0) to an OPEN that has the whole prompt would be answered by the same OPEN for ever."""

    def answer(message: Message) -> Sequence[Message]:
        return [Resend(message.session, message.opening, 0, 0)] if isinstance(message, Open) else []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address) as session:
        with pytest.raises(ProtocolError, match="whole prompt"):
            ids_of(session, PROMPT)
        assert cloud.kinds().count("Open") == 1


@pytest.mark.parametrize("when", [Open, Draft])
def test_a_cloud_that_forgets_at_once_is_asked_at_a_walk(when: type) -> None:
    """One that forgets the session before anything was committed, again and again, is not run against."""

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, when):
            return [Error(message.session, message.opening, ErrorCode.UNKNOWN, "who are you?")]
        return [opened(message)] if isinstance(message, Open) else []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address) as session:
        timer = threading.Timer(1.0, session.cancel)
        timer.start()
        assert ids_of(session, PROMPT) == []
        assert session.finish_reason == "cancelled" and 3 <= cloud.kinds().count("Open") <= 6


def test_a_cloud_that_puts_off_for_weeks() -> None:
    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Open):
            return [Error(message.session, message.opening, ErrorCode.FULL, "next month", (1 << 32) - 1)]
        return []

    with FakeCloud(Pretender(answer)) as cloud, edge(cloud.address, patience_s=0.5) as session:
        begun_s = time.monotonic()
        with pytest.raises(Refused, match="next month"):
            ids_of(session, PROMPT)
        assert time.monotonic() - begun_s < HEALED_S
