"""The edge's greeting: whom it meets, what it says of whom it does not like, and for how long it waits."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clouds import LAW, NOWHERE, PATIENT_S, FakeCloud, serving

from pipesd.clock import SystemClock
from pipesd.config import EdgeConfig
from pipesd.core import Vocabulary
from pipesd.edge.connection import Connection, refusal
from pipesd.errors import Cancelled, PipeSDError, ProtocolError, Refused, Unreachable, UsageError, VocabularyMismatch
from pipesd.metrics import EventLog
from pipesd.protocol.messages import Close, Error, ErrorCode, Hello, Message, Probe, Probed, ProbeStatus, Welcome
from pipesd.protocol.vocabulary import block_hashes, block_pieces, vocabulary_hash
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.texts import KeyedText, law_digest
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary

SESSION = 0xFEDC_BA98_7654_3210


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesd.edge.connection.HELLO_AGAIN_S", 0.1)


@contextmanager
def connected(
    address: str,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    events: str = "",
    **config: Any,
) -> Iterator[Connection]:
    log = EventLog(events, SystemClock())
    settings: dict[str, Any] = {"cloud": address, "connect_s": PATIENT_S, **config}
    connection = Connection(EdgeConfig(**settings), SystemClock(), log, cancelled)
    try:
        yield connection
    finally:
        connection.close()
        log.close()


def welcome(hello: Hello, vocabulary: Vocabulary, **changed: Any) -> Welcome:
    same = vocabulary_hash(vocabulary) == hello.vocabulary_hash
    return Welcome(
        hello.session, 0, 1, 0, 0, "target", vocabulary.real_size, vocabulary_hash(vocabulary), bytes(8), 2048, "cpu",
        "float32", None if same else block_hashes(vocabulary),
        None if hello.block is None else block_pieces(vocabulary, hello.block),
    )._replace(**changed)  # fmt: skip


def polite(vocabulary: Vocabulary, **changed: Any) -> Callable[[Message], Sequence[Message]]:
    """What a cloud with that vocabulary answers."""

    def answer(message: Message) -> Sequence[Message]:
        if isinstance(message, Hello):
            return [welcome(message, vocabulary, **changed)]
        if isinstance(message, Probe):
            return [Probed(message.session, 0, message.token, ProbeStatus.OK, 0)]
        return []

    return answer


def greeted(address: str, vocabulary: Vocabulary | None = None, **settings: Any) -> Welcome:
    with connected(address, **settings) as connection:
        return connection.greet(SESSION, ByteTokeniser(vocabulary))


# -- a cloud that is one


def test_the_welcome_of_a_cloud() -> None:
    with serving(target={"context": 100, "name": "its name"}) as cloud:
        met = greeted(cloud.address)
    assert (met.session, met.model, met.context, met.device) == (SESSION, "its name", 100, "cpu")
    assert met.model_fingerprint == law_digest(LAW) and met.pieces is None


def test_the_round_trip_is_measured() -> None:
    with serving() as cloud, LinkProxy(cloud.address, delay_s=0.03) as link, connected(link.address) as connection:
        connection.greet(SESSION, ByteTokeniser())
        assert 0.06 <= connection.rtt_s < 0.5


def test_bytes_are_counted_greeting_and_opening_apart(tmp_path: Path) -> None:
    log = tmp_path / "events"
    with FakeCloud(polite(byte_vocabulary())) as cloud, connected(cloud.address, events=str(log)) as connection:
        connection.greet(SESSION, ByteTokeniser())
        probed = connection.bytes_up
        assert 10 < probed < 40 and connection.bytes_down > 50
        assert connection.send(Close(SESSION, 3)) and connection.bytes_up == probed + 12, "1 + 1 + 9 + 1"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    events = [event for event in events if event["bytes"]]  # 0: not sent, as it was not connected yet
    assert [(e["event"], e["kind"]) for e in events] == [
        ("sent", "Hello"),
        ("received", "Welcome"),
        ("sent", "Probe"),
        ("received", "Probed"),
        ("sent", "Close"),
    ]
    assert sum(e["bytes"] for e in events if e["event"] == "received") == connection.bytes_down


def test_nothing_is_sent_to_nobody() -> None:
    with connected(NOWHERE) as connection:
        assert not connection.send(Close(SESSION, 1)) and connection.bytes_up == 0
        assert connection.receive(0.01) is None


def test_a_lost_greeting_is_said_again() -> None:
    answer = polite(byte_vocabulary())
    heard = 0

    def deaf(message: Message) -> Sequence[Message]:
        nonlocal heard
        heard += 1
        return [] if heard in (1, 3) else answer(message)

    with FakeCloud(deaf) as cloud:
        begun_s = time.monotonic()
        greeted(cloud.address)
        assert cloud.kinds()[:4] == ["Hello", "Hello", "Probe", "Probe"]
        assert 0.18 < time.monotonic() - begun_s < PATIENT_S


# -- nobody, or something else


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def unreachable(address: str, connect_s: float = 0.25) -> str:
    begun_s = time.monotonic()
    with pytest.raises(Unreachable) as error:
        greeted(address, connect_s=connect_s)
    assert connect_s <= time.monotonic() - begun_s < connect_s + 2.0, "the time it was given"
    assert error.value.exit_code == 3 and f"waited {connect_s:g} s" in str(error.value)
    return str(error.value)


def test_nobody_at_the_address() -> None:
    assert "cannot reach tcp://127.0.0.1:1: nothing listens there; start pipesd-cloud" in unreachable(NOWHERE)


def test_something_that_accepts_and_says_nothing() -> None:
    with listener() as server:
        assert "no PipeSD cloud" in unreachable(address_of(server))


def test_something_that_speaks_another_protocol() -> None:
    with listener() as server:

        def web_server() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
                    time.sleep(0.05)

        threading.Thread(target=web_server, daemon=True).start()
        assert "no PipeSD cloud" in unreachable(address_of(server))
        server.shutdown(socket.SHUT_RDWR)


def test_a_cloud_that_connects_and_never_answers() -> None:
    with FakeCloud(lambda message: []) as cloud:
        assert f"{cloud.address} is connected, but the cloud does not answer" in unreachable(cloud.address)
        assert 2 <= cloud.kinds().count("Hello") <= 5


def test_a_bad_address_is_a_matter_of_use() -> None:
    for address in ("http://127.0.0.1:7421", "127.0.0.1", "", "tcp://127.0.0.1:99999"):
        with pytest.raises(UsageError, match="tcp://"):
            greeted(address)


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"HTTP/1.1 400 Bad Request\r\n", b"\x93\x02\x01", b"\x80", b"\x94\x0c\x01\x00\x63" * 9]
)
def test_garbage_from_the_cloud_is_a_protocol_error(garbage: bytes) -> None:
    with FakeCloud(lambda message: [garbage]) as cloud, pytest.raises(ProtocolError):
        greeted(cloud.address)


# -- a cloud that refuses, or does not serve yet


def test_versions_are_both_named_whoever_finds_out() -> None:
    text = "the edge speaks protocol version 1.0, this side 2.0: update the edge"
    with FakeCloud(lambda m: [Error(m.session, 0, ErrorCode.VERSION, text)]) as cloud:
        with pytest.raises(Refused, match=r"1\.0.*2\.0") as refused:
            greeted(cloud.address)
        assert refused.value.code == ErrorCode.VERSION
    with FakeCloud(polite(byte_vocabulary(), major=2, minor=3)) as cloud:
        with pytest.raises(Refused, match=r"the cloud speaks protocol version 2\.3, this side 1\.1") as refused:
            greeted(cloud.address)
        assert refused.value.exit_code == 4


def test_a_later_minor_version_is_welcome() -> None:
    with FakeCloud(polite(byte_vocabulary(), minor=9, features=1 << 31)) as cloud:
        assert greeted(cloud.address).minor == 9


@pytest.mark.parametrize("code", [ErrorCode.STARTING, ErrorCode.DRAINING])
def test_a_cloud_that_starts_is_waited_for(code: ErrorCode) -> None:
    answer = polite(byte_vocabulary())
    ready_s = time.monotonic() + 0.5

    def starting(message: Message) -> Sequence[Message]:
        if time.monotonic() < ready_s:
            return [Error(message.session, 0, code, "the cloud is loading its model", 250)]
        return answer(message)

    with FakeCloud(starting) as cloud:
        greeted(cloud.address, connect_s=0.2, patience_s=PATIENT_S)
        assert time.monotonic() >= ready_s


def test_a_cloud_that_starts_for_ever_is_given_up_in_its_own_words() -> None:
    with FakeCloud(lambda m: [Error(m.session, 0, ErrorCode.STARTING, "the cloud is loading its model")]) as cloud:
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match="does not serve yet: the cloud is loading its model"):
            greeted(cloud.address, connect_s=0.1, patience_s=0.5)
        assert 0.5 <= time.monotonic() - begun_s < 3.0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.UNKNOWN, Unreachable),
        (ErrorCode.FULL, Refused),
        (ErrorCode.LIMIT, Refused),
        (ErrorCode.VERSION, Refused),
        (ErrorCode.MALFORMED, ProtocolError),
        (ErrorCode.VOCABULARY, Refused),
        (ErrorCode.MODEL, Refused),
        (ErrorCode.STARTING, Unreachable),
        (ErrorCode.DRAINING, Unreachable),
        (ErrorCode.INTERNAL, Unreachable),
        (ErrorCode.FEATURE, Refused),
    ],
)
def test_what_each_error_of_a_cloud_stands_for(code: ErrorCode, kind: type[PipeSDError]) -> None:
    error = refusal(code, "its own words")
    assert type(error) is kind and "its own words" in str(error)
    if isinstance(error, Refused):
        assert error.code == code


@pytest.mark.parametrize("wake", [True, False])
def test_waiting_can_be_cancelled(wake: bool) -> None:
    cancelled = threading.Event()
    for address in (NOWHERE, "silent"):
        with FakeCloud(lambda message: []) as cloud:
            cancelled.clear()
            address = cloud.address if address == "silent" else address
            with connected(address, cancelled=cancelled.is_set, connect_s=300) as connection:

                def cancel(connection: Connection = connection) -> None:
                    cancelled.set()
                    if wake:
                        connection.wake()

                threading.Timer(0.1, cancel).start()
                begun_s = time.monotonic()
                with pytest.raises(Cancelled):
                    connection.greet(SESSION, ByteTokeniser())
                assert time.monotonic() - begun_s < 2.0


# -- vocabularies


def swapped(vocabulary: Vocabulary, a: int, b: int) -> Vocabulary:
    pieces = list(vocabulary.pieces)
    pieces[a], pieces[b] = pieces[b], pieces[a]
    return Vocabulary(tuple(pieces))


@pytest.mark.parametrize(("a", "b", "texts"), [(100, 101, ("'d'", "'e'")), (470, 511, None), (255, 300, None)])
def test_two_swapped_ids_are_named_with_both_texts(a: int, b: int, texts: tuple[str, str] | None) -> None:
    own = byte_vocabulary()
    with serving(target={"vocabulary": swapped(own, a, b), "name": "the target"}) as cloud:
        with pytest.raises(VocabularyMismatch, match=rf"id {a} is .* to the draft model and .* to the target") as error:
            greeted(cloud.address)
    assert "bytes (512 ids)" in str(error.value) and "the target (512 ids)" in str(error.value)
    assert error.value.code == ErrorCode.VOCABULARY and error.value.exit_code == 4
    if texts is not None:
        assert f"id {a} is {texts[0]} to the draft model and {texts[1]} to the target" in str(error.value)


@pytest.mark.parametrize(("own", "other"), [(512, 400), (400, 512), (512, 300), (257, 1000)])
def test_vocabularies_of_other_sizes_are_refused_with_both_sizes(own: int, other: int) -> None:
    with serving(target={"vocabulary": byte_vocabulary(other)}) as cloud:
        with pytest.raises(VocabularyMismatch, match=rf"\({own} ids\).*\({other} ids\).*id {min(own, other)} is"):
            greeted(cloud.address, byte_vocabulary(own))


def test_padding_is_no_difference() -> None:
    for own, other in ((512, 480), (480, 512), (470, 600)):
        with serving(target={"vocabulary": byte_vocabulary(other, 470)}) as cloud:
            assert greeted(cloud.address, byte_vocabulary(own, 470)).vocabulary_size == 470


def test_a_cloud_that_contradicts_itself() -> None:
    own = byte_vocabulary()
    with FakeCloud(polite(own, vocabulary_hash=bytes(8), block_hashes=block_hashes(own))) as cloud:
        with pytest.raises(VocabularyMismatch, match=r"\(512 ids\).*\(512 ids\)"):
            greeted(cloud.address)  # no block differs: nothing more can be said
    for hashes in (None, bytes(8)):
        with FakeCloud(polite(own, vocabulary_hash=bytes(8), block_hashes=hashes)) as cloud:
            with pytest.raises(ProtocolError, match="block 0 of its vocabulary differs, but it does not"):
                greeted(cloud.address)


def test_a_late_welcome_is_not_taken_for_the_answer_about_a_block() -> None:
    other = swapped(byte_vocabulary(), 300, 301)

    def answer(message: Message) -> Sequence[Message]:
        late = [welcome(message._replace(block=None), other)] if isinstance(message, Hello) and message.block else []
        return [*late, *polite(other)(message)]

    with FakeCloud(answer) as cloud, pytest.raises(VocabularyMismatch, match="id 300 is"):
        greeted(cloud.address)


def test_a_target_of_the_same_vocabulary_and_another_law_is_told_apart() -> None:
    with serving(KeyedText(1)) as one, serving(KeyedText(2)) as other:
        assert greeted(one.address).model_fingerprint != greeted(other.address).model_fingerprint
