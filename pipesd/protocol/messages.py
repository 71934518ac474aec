"""The messages as values, their numbers and their limits. `wire` says how they look as bytes.

Every message names its session (64 bits, made by the edge) and its opening; those without an opening send 0. Ids are
tuples of int below 2**31, positions are absolute. Fields with a default may be left out on the wire.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipesd.core import Logprobs, Mode, ModelInfo, Vocabulary
from pipesd.errors import ProtocolError
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Sampling

MAJOR = 1  # a peer of another major version is refused
MINOR = 1  # raised when optional fields are added
SAMPLING = 1  # feature bit: OPEN.sampling, and what it needs in DRAFT and VERDICT
FEATURES = SAMPLING  # feature bits of this version

MAX_IDS_OPEN = 1 << 18  # prompt and committed ids of one OPEN
ID_BYTES = 4  # of an id in a message
MAX_IDS = 4096  # ids of one DRAFT or VERDICT
MAX_PAIRS = 1024  # ids of a VERDICT's distribution
MAX_TRIED = 1 << 20  # number of a proposal in the place of one refused id
MAX_STOP_IDS = 64
MAX_NAME_BYTES = 256  # model, device and dtype, each in UTF-8
MAX_TEXT_BYTES = 1024  # text of an ERROR, in UTF-8
MAX_PROBE_BYTES = 1 << 18  # payload of PROBE and PROBED
MAX_VOCABULARY = 1 << 20  # ids of a vocabulary
MAX_BLOCK_PIECES_BYTES = 1 << 18  # packed pieces of one block in a WELCOME
MAX_MESSAGE_BYTES = (1 << 20) + (1 << 14)  # any public message: the longest OPEN and its other fields
MAX_INTERNAL_BYTES = 1 << 25  # any message between worker and front: the longest READY
MAX_FIELDS = 64  # fields of one message, those of later minor versions included


class Kind(IntEnum):
    """Number of each message, its first field, fixed for ever. From 64 on: between worker and front only."""

    HELLO = 1
    WELCOME = 2
    OPEN = 3
    OPENED = 4
    DRAFT = 5
    VERDICT = 6
    RESEND = 7
    CANCEL = 8
    CLOSE = 9
    PROBE = 10
    PROBED = 11
    ERROR = 12
    READY = 64
    BEAT = 65
    GONE = 66


FIRST_INTERNAL_KIND = 64


class ErrorCode(IntEnum):
    """Why the cloud refuses."""

    UNKNOWN = 1  # no such session or opening here: open again
    FULL = 2  # no room; try again after retry_ms
    LIMIT = 3  # over a limit
    VERSION = 4  # another major version
    MALFORMED = 5  # the bytes are no legal message
    VOCABULARY = 6  # ids mean other texts here
    MODEL = 7  # another target model than the one the session began with
    STARTING = 8  # no worker is ready yet; try again after retry_ms
    DRAINING = 9  # shutting down, takes nothing new
    INTERNAL = 10  # the cloud failed
    FEATURE = 11  # asked for something that this version does not have


class ProbeStatus(IntEnum):
    """What a PROBED says of the worker."""

    OK = 0  # alive, idle or busy
    STARTING = 1
    DOWN = 2
    UNKNOWN_SESSION = 3


class WireError(ProtocolError):
    """Bytes or values that are no legal message.

    `kind` and `field` name the place, `got` and `wanted` say what is wrong; `session` and `opening` are those of the
    refused bytes as far as they could be read (`address`), else 0; `code` is what an answer should carry.
    """

    def __init__(
        self,
        kind: str,
        field: str,
        got: str,
        wanted: str,
        address: tuple[int, int] = (0, 0),
        code: ErrorCode = ErrorCode.MALFORMED,
    ) -> None:
        super().__init__(f"{kind}.{field}: got {got}, wanted {wanted}")
        self.kind, self.field, self.got, self.wanted = kind, field, got, wanted
        self.session, self.opening = address
        self.code = code


class Hello(NamedTuple):
    """Edge: which version and vocabulary I have. `block` asks for the target's pieces of that block of 256 ids."""

    session: int
    opening: int
    major: int
    minor: int
    features: int
    vocabulary_size: int
    vocabulary_hash: bytes
    block: int | None = None


class Welcome(NamedTuple):
    """Cloud, to HELLO. `block_hashes` come when the vocabularies differ, `pieces` when a block was asked for;
    `end_ids` are those that the target's own file names."""

    session: int
    opening: int
    major: int
    minor: int
    features: int
    model: str
    vocabulary_size: int
    vocabulary_hash: bytes
    model_fingerprint: bytes
    context: int
    device: str
    dtype: str
    block_hashes: bytes | None = None
    pieces: tuple[bytes, ...] | None = None
    end_ids: tuple[int, ...] | None = None


class Open(NamedTuple):
    """Edge: a generation begins behind `base` ids that the cloud should hold (proved by `digest`) and `ids`.

    `limit` is the committed length at which to stop. `sampling` None: the highest logit and nothing else.
    """

    session: int
    opening: int
    base: int
    digest: bytes
    ids: tuple[int, ...]
    limit: int
    stop_ids: tuple[int, ...]
    sampling: Sampling | None
    seed: int
    mode: Mode
    model_fingerprint: bytes
    vocabulary_hash: bytes
    major: int = MAJOR


class Opened(NamedTuple):
    """Cloud, to OPEN: the limit granted, most tokens drafted ahead (L), most committed unacknowledged (W)."""

    session: int
    opening: int
    limit: int
    draft_ahead: int
    run_ahead: int
    pass_ms: int


class Draft(NamedTuple):
    """Edge: draft tokens from absolute position `pos` on; `known` ids are committed here.

    `p_draft`, for a method that tests: each id's probability in the distribution that it was drawn from, rounded up to
    a float16. `tried`: so many of what the target proposed in the place of a refused id were refused too, send more.
    """

    session: int
    opening: int
    epoch: int
    pos: int
    ids: tuple[int, ...]
    known: int
    nav: bool = False
    again: bool = False
    p_draft: tuple[float, ...] | None = None
    tried: int | None = None


class Counters(NamedTuple):
    """Cumulative since OPEN: target passes, draft tokens verified, stale ones, 0.1 ms of the worker's own time."""

    passes: int
    verified: int
    stale: int
    busy_100us: int


class Verdict(NamedTuple):
    """Cloud: the ids committed from `pos` on. `more`: it goes on unasked.

    `rejected`: the draft token behind `ids` was refused by a method that tests, and the edge draws what stands there,
    from `refused`; both or neither. `logprobs`: one for each of `ids`, where OPEN asked for them.
    """

    session: int
    opening: int
    epoch: int
    pos: int
    ids: tuple[int, ...]
    more: bool = False
    rejected: bool = False
    counters: Counters | None = None
    refused: ToldLaw | None = None
    logprobs: tuple[Logprobs, ...] | None = None


class Resend(NamedTuple):
    """Cloud: send this epoch's draft again from `pos` on."""

    session: int
    opening: int
    epoch: int
    pos: int


class Cancel(NamedTuple):
    """Edge: stop this opening; its ids may stay for the next."""

    session: int
    opening: int


class Close(NamedTuple):
    """Edge: forget this session."""

    session: int
    opening: int


class Probe(NamedTuple):
    """Edge: are you there? Also measures the link: a payload up, `reply_bytes` of payload down."""

    session: int
    opening: int
    token: int
    payload: bytes = b""
    reply_bytes: int = 0


class Probed(NamedTuple):
    """Cloud, to PROBE: the same token, the worker's state, how long it has been busy."""

    session: int
    opening: int
    token: int
    status: ProbeStatus
    busy_ms: int
    payload: bytes = b""


class Error(NamedTuple):
    """Cloud: refused. `text` is one line for the user; what exceeds MAX_TEXT_BYTES is cut when encoding."""

    session: int
    opening: int
    code: ErrorCode
    text: str
    retry_ms: int = 0


class Ready(NamedTuple):
    """Worker's first word to the front: its `ModelInfo` and its vocabulary's pieces."""

    session: int
    opening: int
    name: str
    vocabulary_size: int
    context: int
    end_ids: tuple[int, ...]
    fingerprint: bytes
    device: str
    dtype: str
    pieces: tuple[bytes, ...]

    @classmethod
    def of(cls, info: ModelInfo, vocabulary: Vocabulary) -> Ready:
        size, ends = info.vocabulary_size, info.end_ids
        of_model = (info.name, size, info.context, ends, info.fingerprint, info.device, info.dtype)
        return cls(0, 0, *of_model, vocabulary.pieces)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            self.name, self.vocabulary_size, self.context, self.end_ids, self.fingerprint, self.device, self.dtype
        )

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.pieces)


class Beat(NamedTuple):
    """Worker to front: alive; how many sessions it holds, its longest pass."""

    session: int
    opening: int
    sessions: int
    pass_ms: int


class Gone(NamedTuple):
    """Worker to front: this session was forgotten (evicted or closed)."""

    session: int
    opening: int


FromEdge = Hello | Open | Draft | Cancel | Close | Probe
FromCloud = Welcome | Opened | Verdict | Resend | Probed | Error
Internal = Ready | Beat | Gone
Message = FromEdge | FromCloud | Internal
FROM_EDGE = (Hello, Open, Draft, Cancel, Close, Probe)
FROM_CLOUD = (Welcome, Opened, Verdict, Resend, Probed, Error)
