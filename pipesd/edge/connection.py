"""The edge's line to a cloud: messages in and out, counted; the greeting; the comparison of vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pipesd.clock import Clock
from pipesd.config import EdgeConfig
from pipesd.edge.models import Tokeniser
from pipesd.edge.round_trips import PROBED_SIZES, RoundTrips
from pipesd.errors import Cancelled, PipeSDError, ProtocolError, Refused, Unreachable, VocabularyMismatch
from pipesd.metrics import EventLog
from pipesd.protocol.messages import (
    FEATURES,
    ID_BYTES,
    MAJOR,
    MINOR,
    Draft,
    Error,
    ErrorCode,
    Hello,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Verdict,
    Welcome,
)
from pipesd.protocol.vocabulary import (
    block_hashes,
    block_pieces,
    difference_text,
    first_difference,
    first_differing_block,
    vocabulary_hash,
)
from pipesd.protocol.wire import check_version, decode, encode
from pipesd.transport import Context, edge_socket

HELLO_AGAIN_S = 0.5
TRAIN_RTTS = 3  # how long the next answer to a train of probes is waited for
MOST_TRAIN_S = 10.0  # and all of them
AT_ONCE_S = 1e-4  # a message that takes longer to come was not there before
LEAST_RTT_S = 1e-9  # by a clock that has not moved
APART = (Hello, Open)  # not counted in a generation's bytes


class Link(Protocol):
    """What carries bytes to a cloud and back: `EdgeSocket`, or what stands in for it in a test."""

    address: str

    def adopt(self) -> None: ...

    def send(self, payload: bytes) -> bool: ...

    def receive(self, timeout_s: float = 0.0) -> bytes | None: ...

    def wake(self) -> None: ...

    def explain(self) -> str: ...

    def close(self) -> None: ...


class Connection:
    """A link to one cloud. It belongs to one thread at a time: see `adopt`."""

    def __init__(
        self,
        config: EdgeConfig,
        clock: Clock,
        events: EventLog,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        link: Link | None = None,
        round_trips: RoundTrips | None = None,
    ) -> None:
        """`link` stands in for a socket; `round_trips` is told of every message."""
        self._context = Context()
        try:
            self._socket = edge_socket(self._context, config.cloud) if link is None else link
        except PipeSDError:
            self._context.term()
            raise
        self._connect_s, self._patience_s = config.connect_s, config.patience_s
        self._clock = clock
        self._events = events
        self._cancelled = cancelled
        self._round_trips = round_trips
        self._looked_s = clock.now()  # nothing was there to read
        self._number = 1  # of the next probe
        self._probed_s: dict[int, float] = {}
        self.address = self._socket.address
        self.rtt_s = 0.0  # the shortest of a probe so far
        self.crossed = False  # a probe sent behind the last OPEN or DRAFT was answered: if that came, it is there
        self._behind = 0  # the number of the first such probe
        self.bytes_up = 0
        self.bytes_down = 0

    def adopt(self) -> None:
        """Make the calling thread the owner."""
        self._socket.adopt()

    def wake(self) -> None:
        """End the owner's wait; any thread may call it."""
        self._socket.wake()

    def close(self) -> None:
        """Close; what was sent has the linger time of the socket to leave."""
        self._socket.close()
        self._context.term()

    def send(self, message: Message) -> bool:
        """Give a message to the link; False: the cloud is away, nothing was sent."""
        payload = encode(message)
        now_s = self._clock.now()
        sent = self._socket.send(payload)
        opens = isinstance(message, Open)
        if opens or isinstance(message, Draft):
            self.crossed, self._behind = False, self._number
        if opens:
            if self._round_trips is not None:
                self._round_trips.restart(message.opening)
        elif sent and self._round_trips is not None:
            self._round_trips.sent(message, now_s)
        if sent and not isinstance(message, APART):
            self.bytes_up += len(payload)
        if self._events.wanted:
            self._events.record("sent", **_shown(message), bytes=len(payload) * sent)
        return sent

    def receive(self, wait_s: float) -> Message | None:
        """The next message, or None if none came within `wait_s` or `wake` was called."""
        called_s = self._clock.now()
        payload = self._socket.receive(wait_s)
        now_s = self._clock.now()
        if payload is None:
            self._looked_s = now_s
            return None
        self.bytes_down += len(payload)
        message = decode(payload)
        if self._events.wanted:
            self._events.record("received", **_shown(message), bytes=len(payload))
        if self._round_trips is not None:
            # what was there at once had come since the last look, at any time
            lag_s = called_s - self._looked_s if now_s - called_s < AT_ONCE_S else 0.0
            self._round_trips.received(message, now_s, lag_s)
        if isinstance(message, Probed) and message.token in self._probed_s:
            took_s = max(LEAST_RTT_S, now_s - self._probed_s.pop(message.token))
            self.rtt_s = min(self.rtt_s or took_s, took_s)
            self.crossed = self.crossed or message.token >= self._behind
        return message

    def probe(self, session: int, tokens: int = 0) -> None:
        """Ask whether the front, and the session's worker, live; the answer also tells the round trip of a message as
        large as a DRAFT of so many tokens."""
        now_s, number = self._clock.now(), self._send_probe(session, tokens)
        if tokens and self._round_trips is not None:
            self._round_trips.probe_sent(number, tokens, now_s)

    def _send_probe(self, session: int, tokens: int) -> int:
        number = self._number
        self._number += 1
        self._probed_s[number] = self._clock.now()
        self.send(Probe(session, 0, number, bytes(tokens * ID_BYTES)))
        return number

    def explain(self) -> str:
        """One line on why there is no answer."""
        return self._socket.explain()

    def greet(self, session: int, tokeniser: Tokeniser) -> Welcome:
        """Exchange HELLO and WELCOME, compare the vocabularies, measure the round trip.

        Raises Unreachable if no cloud answers within the configuration's `connect_s` (`patience_s` if it answers that
        its worker is starting), Refused for another version, VocabularyMismatch if the ids mean different texts,
        Cancelled soon after `cancelled()`, or at once with a `wake`.
        """
        own_hash = vocabulary_hash(tokeniser.vocabulary)
        hello = Hello(session, 0, MAJOR, MINOR, FEATURES, tokeniser.vocabulary.real_size, own_hash)
        welcome = self._ask(hello)
        if version := check_version(welcome.major, welcome.minor, "the cloud"):
            raise Refused(version, ErrorCode.VERSION)
        if welcome.vocabulary_hash != own_hash:
            raise self._mismatch(hello, welcome, tokeniser)
        deadline_s = self._clock.now() + self._connect_s
        while not self.rtt_s and self._clock.now() < deadline_s and not self._cancelled():
            self.probe(session)
            self.receive(HELLO_AGAIN_S)
        if self._round_trips is not None and self.rtt_s:
            self._measure(session, self._round_trips)
        return welcome

    def _measure(self, session: int, round_trips: RoundTrips) -> None:
        """Send a train of probes, as large as token batches of 1 to 8 (PipeSD, section 4), and take their answers: one
        round trip for all, and what they take of the link. What is late by several round trips is left out."""
        sent_s = self._clock.now()
        sizes = {self._send_probe(session, size): size for size in PROBED_SIZES}
        replies: list[tuple[int, float]] = []
        silence_s = TRAIN_RTTS * self.rtt_s + HELLO_AGAIN_S
        deadline_s = sent_s + silence_s
        while len(replies) < len(sizes) and (now_s := self._clock.now()) < deadline_s and not self._cancelled():
            message = self.receive(deadline_s - now_s)
            if isinstance(message, Probed) and message.token in sizes:
                took_s = self._clock.now() - sent_s
                replies.append((sizes[message.token], took_s))
                deadline_s = sent_s + min(2.0 * took_s + silence_s, MOST_TRAIN_S)
        round_trips.probed(replies)

    def _ask(self, hello: Hello) -> Welcome:
        started_s = self._clock.now()
        again_s = give_up_s = 0.0
        starting = ""
        while True:
            if self._cancelled():
                raise Cancelled(f"interrupted while waiting for the cloud at {self.address}")
            now_s = self._clock.now()
            give_up_s = started_s + (self._patience_s if starting else self._connect_s)
            if now_s >= give_up_s:
                raise Unreachable(starting or f"{self.explain()} (waited {self._connect_s:g} s)")
            if now_s >= again_s:
                again_s = now_s + (HELLO_AGAIN_S if self.send(hello) else 0.02)
            message = self.receive(min(again_s, give_up_s) - now_s)
            if isinstance(message, Welcome) and (message.pieces is None) == (hello.block is None):
                return message
            if isinstance(message, Error):
                if message.code in (ErrorCode.STARTING, ErrorCode.DRAINING):
                    starting = f"the cloud at {self.address} does not serve yet: {message.text}"
                else:
                    raise refusal(message.code, message.text)

    def _mismatch(self, hello: Hello, welcome: Welcome, tokeniser: Tokeniser) -> VocabularyMismatch:
        """Name the first id whose text differs, after asking for the block that holds it."""
        vocabulary = tokeniser.vocabulary
        text = (
            f"draft model {tokeniser.name} ({vocabulary.real_size} ids) does not fit the cloud's {welcome.model} "
            f"({welcome.vocabulary_size} ids)"
        )
        block = first_differing_block(block_hashes(vocabulary), welcome.block_hashes or b"")
        if block is not None:
            answer = self._ask(hello._replace(block=block))
            found = first_difference(block_pieces(vocabulary, block), answer.pieces or (), block)
            if found is None:
                raise ProtocolError(f"the cloud says that block {block} of its vocabulary differs, but it does not")
            text += f": {difference_text(*found)}"
        told = f"{text}; take a draft model of the target's own family"
        return VocabularyMismatch(told, ErrorCode.VOCABULARY, welcome.model)


def refusal(code: int, text: str) -> Refused | Unreachable | ProtocolError:
    """The error that an ERROR of the cloud stands for."""
    if code == ErrorCode.MALFORMED:
        return ProtocolError(f"the cloud refuses what this edge sent: {text}")
    if code in (ErrorCode.INTERNAL, ErrorCode.STARTING, ErrorCode.DRAINING, ErrorCode.UNKNOWN):
        return Unreachable(f"the cloud gave up: {text}")
    return Refused(f"the cloud refuses: {text}", code)


def _shown(message: Message) -> dict[str, Any]:
    """What an event log shows of a message: nothing of the prompt."""
    shown: dict[str, Any] = {"kind": type(message).__name__, "opening": message.opening}
    if isinstance(message, Draft | Verdict | Opened):
        shown.update((name, value) for name, value in message._asdict().items() if name != "session")
    if isinstance(message, Probe):
        shown["tokens"] = len(message.payload) // ID_BYTES  # that it stands for
    return shown
