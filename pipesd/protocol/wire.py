"""The wire between edge and cloud, version 1.1. This text is the specification, byte by byte.

A message is one ZeroMQ message part, and that part is one msgpack array with nothing behind it: kind, session,
opening, then the kind's own fields in the order below.

    u16, u32, u64  a msgpack integer of any width, from 0 to 2**16 - 1 and so on; never a boolean. The encoder takes
                   the shortest form (1 byte up to 127, 2 up to 255, 3 up to 65,535, 5 up to 2**32 - 1, else 9)
    ids            one bin, 4 bytes an id: u32 little-endian, each below 2**31
    float16s       one bin, 2 bytes a value: IEEE binary16 little-endian, each from 0 to 1, no NaN, no -0
    pairs          one bin, 8 bytes a pair: an id as u32, below 2**31, then an IEEE binary32, both little-endian
    pieces         one bin: for each piece its length as u16 little-endian, then its bytes
    hash           one bin of 8 bytes
    bin, text      msgpack bin; msgpack str in UTF-8. Limits are in bytes
    ?              may be nil, or left out with all that follow

    every message  kind, session u64, opening u32 (0 where there is none)
     1 HELLO       major u16, minor u16, features u32, vocabulary_size u32, vocabulary_hash hash, block? (0 to 4095)
     2 WELCOME     major u16, minor u16, features u32, model text (256), vocabulary_size u32, vocabulary_hash hash,
                   model_fingerprint hash, context u32, device text (256), dtype text (256),
                   block_hashes? bin (16,384; 4 bytes a block of 256 ids), pieces? (256 pieces, 262,144 bytes),
                   end_ids? ids (64 ids)
     3 OPEN        major u16, base u32, digest hash, ids (262,144 ids), limit u32, stop_ids ids (64 ids),
                   sampling (nil, or options as below), seed u64, mode (0 NAV, 1 EAGER, 2 FREE),
                   model_fingerprint hash, vocabulary_hash hash
     4 OPENED      limit u32, draft_ahead u32, run_ahead u32, pass_ms u32
     5 DRAFT       epoch u32, pos u32, ids (4096 ids), lag (pos - known, signed; known is a u32),
                   flags (bit 0 NAV, bit 1 again; no other), p_draft? float16s, as many as ids,
                   tried? (0 to 1,048,576)
     6 VERDICT     epoch u32, pos u32, ids (4096 ids), flags (bit 0 more, bit 1 rejected; no other),
                   passes? u32, verified? u32, stale? u32, busy_100us? u32 (these four together or none),
                   law? pairs (1 to 1024 pairs, each from 0 to 1, no -0, not all 0; with the flag rejected and only
                   then), first? (0 to 1,048,576; with law only), logprobs? bin (as below)
     7 RESEND      epoch u32, pos u32
     8 CANCEL      -
     9 CLOSE       -
    10 PROBE       token u64, payload bin (262,144), reply_bytes (0 to 262,144)
    11 PROBED      token u64, status (0 OK, 1 STARTING, 2 DOWN, 3 UNKNOWN_SESSION), busy_ms u32, payload bin (262,144)
    12 ERROR       code (1 to 11, see `ErrorCode`), text text (1024), retry_ms u32

Between worker and front only; refused when they come from outside:

    64 READY       name text (256), vocabulary_size u32, context u32, end_ids ids (64 ids), fingerprint hash,
                   device text (256), dtype text (256), pieces (1,048,576 pieces, 33,550,336 bytes)
    65 BEAT        sessions u32, pass_ms u32
    66 GONE        -

**Options** of a generation, one bin, little-endian, f64 being IEEE binary64. What they mean and what they can be is
said in `policy/sampling.py`; impossible ones are refused.

     byte 0  method u8: 0 NOISE, 1 REJECTION, 2 PICOSPEC
          1  temperature f64
          9  top_k u32
         13  top_p f64
         21  min_p f64
         29  repetition_penalty f64
         37  presence_penalty f64
         45  frequency_penalty f64
         53  top_mass u16
         55  logprobs u8, from 0 to 20; 255: none are wanted
         56  logit_bias: up to 1024 pairs, the binary32 being what is added to the logit of the id, -inf too

**logprobs** of a VERDICT: one byte N, from 0 to 20; then, for each id of the verdict, its own log-probability and N
pairs of ids and theirs. Each is a binary32 of at most 0, -inf too, no NaN.

**Limits.** A public message has at most 1,064,960 bytes, an internal one 33,554,432, checked before decoding; at most
64 fields, no map with an entry, no extension type with data, checked by msgpack while decoding; all others behind it.

**Versions.** Kind numbers are fixed for ever. A minor version only adds fields behind the last one, which older
readers ignore, and feature bits. The array's first three fields everywhere, major at the fourth place of HELLO,
WELCOME and OPEN, and all of ERROR stay as they are in every major version, so that a peer of another one can always be
told both versions: when such a message does not fit and its major is another, the error names `major`.

Minor 1 added bit 0 of features, SAMPLING, and with it options in OPEN.sampling, which was nil always, DRAFT.tried, and
law, first and logprobs of VERDICT. While sampling is nil all bytes are those of 1.0, but for what HELLO and WELCOME say
of the version. A cloud of 1.0 refuses options: an edge that wants them looks for the bit in WELCOME first.

**Refused**, each by a `WireError` that names kind and field: bytes that are no such array, unknown kinds, missing
fields, wrong types, values out of range. `decode` raises nothing else. `encode` refuses the same, and takes any integer
type (numpy's too). Beyond its ids a DRAFT or a VERDICT costs 19 to 28 bytes in usual ranges: array 1, kind 1,
session 9, opening 1-2, epoch 1-2, pos 3, bin header 2, lag 1 (DRAFT), flags 1; counters 4 to 8 while they are small;
p_draft 2 and 2 for each id; law 2 or 3, and 8 for each pair.
"""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]

from pipesd.protocol.layouts import fields_of, message_of
from pipesd.protocol.messages import (
    FEATURES,
    FROM_CLOUD,
    FROM_EDGE,
    MAJOR,
    MAX_FIELDS,
    MAX_IDS,
    MAX_IDS_OPEN,
    MAX_INTERNAL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PROBE_BYTES,
    MAX_STOP_IDS,
    MAX_TEXT_BYTES,
    MINOR,
    SAMPLING,
    Beat,
    Cancel,
    Close,
    Counters,
    Draft,
    Error,
    ErrorCode,
    FromCloud,
    FromEdge,
    Gone,
    Hello,
    Internal,
    Kind,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    ProbeStatus,
    Ready,
    Resend,
    Verdict,
    Welcome,
    WireError,
)
from pipesd.protocol.quick import DECODE, ENCODE

__all__ = [
    "FEATURES", "FROM_CLOUD", "FROM_EDGE", "MAJOR", "MAX_IDS", "MAX_IDS_OPEN", "MAX_INTERNAL_BYTES",
    "MAX_MESSAGE_BYTES", "MAX_PROBE_BYTES", "MAX_STOP_IDS", "MAX_TEXT_BYTES", "MINOR", "SAMPLING", "Beat", "Cancel",
    "Close", "Counters", "Draft", "Error", "ErrorCode", "FromCloud", "FromEdge", "Gone", "Hello", "Internal", "Kind",
    "Message", "Open", "Opened", "Probe", "ProbeStatus", "Probed", "Ready", "Resend", "Verdict", "Welcome",
    "WireError", "check_version", "decode", "encode",
]  # fmt: skip


def check_msgpack(version: tuple[int, ...], where: str) -> None:
    """ImportError if `msgpack` is the package of before 1.0, whose old name msgpack-python still installs over it."""
    if version < (1, 0):
        raise ImportError(
            f"msgpack {'.'.join(map(str, version))} at {where} is too old, PipeSD needs 1.0 or newer: "
            "pip uninstall msgpack-python msgpack, then pip install msgpack"
        )


check_msgpack(tuple(msgpack.version), str(msgpack.__file__))


def check_version(major: int, minor: int = 0, peer: str = "the other side") -> str | None:
    """None if this version can talk to `peer`, which speaks major.minor; else one line that names both versions."""
    if major == MAJOR:
        return None
    older = peer if major < MAJOR else "this side"
    return f"{peer} speaks protocol version {major}.{minor}, this side {MAJOR}.{MINOR}: update {older}"


def encode(message: Message) -> bytes:
    """The payload of one message. WireError: a value is not of its field's type or range."""
    quick = ENCODE.get(type(message))
    if quick is not None:
        payload = quick(message)
        if payload is not None:
            return payload
    packed: bytes = msgpack.packb(fields_of(message))
    return packed


def decode(payload: bytes, internal: bool = False) -> Message:
    """The message in a payload; with `internal` also the kinds between worker and front. Raises WireError only."""
    most = MAX_INTERNAL_BYTES if internal else MAX_MESSAGE_BYTES
    if len(payload) > most:
        raise WireError("message", "length", f"{len(payload)} bytes", f"at most {most} bytes")
    try:
        fields = msgpack.unpackb(
            payload, use_list=False, unicode_errors="surrogateescape",
            max_array_len=MAX_FIELDS, max_map_len=0, max_ext_len=0,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError("message", "bytes", str(error) or type(error).__name__, "one msgpack array") from None
    if type(fields) is tuple and fields:
        kind = fields[0]
        quick = DECODE.get(kind) if type(kind) is int else None
        if quick is not None:
            message = quick(fields)
            if message is not None:
                return message
    return message_of(fields, internal)
