"""Who may come in: what the cloud answers to HELLO, and why it refuses an OPEN from what that says alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipesd.core import ModelInfo, Vocabulary
from pipesd.protocol import wire
from pipesd.protocol.vocabulary import block_hashes, block_pieces, vocabulary_hash
from pipesd.protocol.wire import ErrorCode, Message

DRAINING_RETRY_MS = 1000


@dataclass(frozen=True)
class Identity:
    """What the cloud says of its model, computed once from a worker's READY."""

    info: ModelInfo
    vocabulary: Vocabulary
    hash: bytes = field(init=False)
    block_hashes: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", vocabulary_hash(self.vocabulary))
        object.__setattr__(self, "block_hashes", block_hashes(self.vocabulary))

    def welcome(self, hello: wire.Hello) -> wire.Welcome:
        info, same = self.info, hello.vocabulary_hash == self.hash
        pieces = None if hello.block is None else block_pieces(self.vocabulary, hello.block)
        return wire.Welcome(
            hello.session, hello.opening, wire.MAJOR, wire.MINOR, wire.FEATURES, info.name, self.vocabulary.real_size,
            self.hash, info.fingerprint, info.context, info.device, info.dtype,
            None if same else self.block_hashes, pieces, info.end_ids,
        )  # fmt: skip


def hello_reply(hello: wire.Hello, identity: Identity | None, retry_ms: int) -> wire.Welcome | wire.Error:
    """WELCOME, or why not: another major version, or no worker was ever ready (`identity` is None)."""
    version = wire.check_version(hello.major, hello.minor, "the edge")
    if version:
        return error_to(hello, ErrorCode.VERSION, version)
    if identity is None:
        return starting(hello, identity, retry_ms)
    return identity.welcome(hello)


def open_refusal(m: wire.Open, identity: Identity | None, *, draining: bool, retry_ms: int) -> wire.Error | None:
    """Why no worker may have this OPEN, or None."""
    version = wire.check_version(m.major, 0, "the edge")
    if version:
        return error_to(m, ErrorCode.VERSION, version)
    if m.session == 0:  # stands for "no session", and for the worker itself between front and worker
        return error_to(m, ErrorCode.MALFORMED, "OPEN.session: got 0, wanted 64 random bits other than 0")
    if draining:
        return error_to(m, ErrorCode.DRAINING, "the cloud is shutting down; try again later", DRAINING_RETRY_MS)
    if identity is None:
        return starting(m, identity, retry_ms)
    info = identity.info
    if m.vocabulary_hash != identity.hash:
        text = f"the draft model's vocabulary is not that of {info.name}; take a draft model of the target's own family"
        return error_to(m, ErrorCode.VOCABULARY, text)
    if m.model_fingerprint != info.fingerprint:
        text = f"the target is now {info.name} in {info.dtype} on {info.device}, not what this session began with"
        return error_to(m, ErrorCode.MODEL, f"{text}; begin a new session")
    return None


def starting(m: Message, identity: Identity | None, retry_ms: int) -> wire.Error:
    """No worker is ready now."""
    text = "the cloud is loading its model" if identity is None else "the cloud is starting its worker again"
    return error_to(m, ErrorCode.STARTING, text, retry_ms)


def error_to(m: Message, code: ErrorCode, text: str, retry_ms: int = 0) -> wire.Error:
    return wire.Error(m.session, m.opening, code, text, retry_ms)
