"""The wire between edge and cloud, version 1.0. This text is the specification, byte by byte.

A message is one ZeroMQ message part, and that part is one msgpack array with nothing behind it: kind, session,
opening, then the kind's own fields in the order below.

    u16, u32, u64  a msgpack integer of any width, from 0 to 2**16 - 1 and so on; never a boolean. The encoder takes
                   the shortest form (1 byte up to 127, 2 up to 255, 3 up to 65,535, 5 up to 2**32 - 1, else 9)
    ids            one bin, 4 bytes an id: u32 little-endian, each below 2**31
    float16s       one bin, 2 bytes a value: IEEE binary16 little-endian, each from 0 to 1, no NaN, no -0
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
                   sampling nil, seed u64, mode (0 NAV, 1 EAGER, 2 FREE), model_fingerprint hash, vocabulary_hash hash
     4 OPENED      limit u32, draft_ahead u32, run_ahead u32, pass_ms u32
     5 DRAFT       epoch u32, pos u32, ids (4096 ids), lag (pos - known, signed; known is a u32),
                   flags (bit 0 NAV, bit 1 again; no other), p_draft? float16s, as many as ids
     6 VERDICT     epoch u32, pos u32, ids (4096 ids), flags (bit 0 more, bit 1 rejected; no other),
                   passes? u32, verified? u32, stale? u32, busy_100us? u32 (these four together or none)
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

**Limits.** A public message has at most 1,052,672 bytes, an internal one 33,554,432, checked before decoding; at most
64 fields, no map with an entry, no extension type with data, checked by msgpack while decoding; all others behind it.

**Versions.** Kind numbers are fixed for ever. A minor version only adds fields behind the last one, which older
readers ignore, and feature bits. The array's first three fields everywhere, major at the fourth place of HELLO,
WELCOME and OPEN, and all of ERROR stay as they are in every major version, so that a peer of another one can always be
told both versions: when such a message does not fit and its major is another, the error names `major`.

**Refused**, each by a `WireError` that names kind and field: bytes that are no such array, unknown kinds, missing
fields, wrong types, values out of range. `decode` raises nothing else. `encode` refuses the same, and takes any integer
type (numpy's too). Beyond its ids a DRAFT or a VERDICT costs 19 to 28 bytes in usual ranges: array 1, kind 1,
session 9, opening 1-2, epoch 1-2, pos 3, bin header 2, lag 1 (DRAFT), flags 1; counters 4 to 8 while they are small.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

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
    quick = _QUICK_ENCODE.get(type(message))
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
        quick = _QUICK_DECODE.get(kind) if type(kind) is int else None
        if quick is not None:
            message = quick(fields)
            if message is not None:
                return message
    return message_of(fields, internal)


# ---- DRAFT and VERDICT, the messages of every round. The quick ways take what is right in every field and leave the
# rest (None) to the tables, which convert it or say what is wrong. `not (a | b) >> 32` holds if both are from 0 to
# 2**32 - 1: one above leaves a bit, one below 0 leaves -1.


class _Packers(threading.local):
    """A packer for each thread: one serves one thread only, and making one anew costs more than packing a DRAFT."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer().pack


_packers = _Packers()
_DRAFT, _VERDICT = int(Kind.DRAFT), int(Kind.VERDICT)
_MOST_QUICK_IDS = 256
_PACK_IDS = [struct.Struct(f"<{n}I").pack for n in range(_MOST_QUICK_IDS + 1)]
_UNPACK_IDS = [struct.Struct(f"<{n}I").unpack for n in range(_MOST_QUICK_IDS + 1)]
_new = tuple.__new__  # half the price of calling the class; the fields have been checked


def _are_counters(numbers: tuple[Any, ...]) -> bool:
    a, b, c, d = numbers
    return (
        type(a) is int and type(b) is int and type(c) is int and type(d) is int and not (a | b | c | d) >> 32
    )  # fmt: skip


def _encode_draft(message: Draft) -> bytes | None:
    session, opening, epoch, pos, ids, known, nav, again, p_draft, tried = message
    if not (
        type(session) is int and type(opening) is int and type(epoch) is int and type(pos) is int
        and type(known) is int and type(nav) is bool and type(again) is bool and p_draft is None and tried is None
        and type(ids) is tuple and len(ids) <= _MOST_QUICK_IDS
        and not session >> 64 and not (opening | epoch | pos | known) >> 32
    ):  # fmt: skip
        return None
    try:
        packed = _PACK_IDS[len(ids)](*ids)
    except (struct.error, TypeError):
        return None
    if not packed[3::4].isascii():  # the highest byte of an id below 2**31 is below 128
        return None
    return _packers.pack((_DRAFT, session, opening, epoch, pos, packed, pos - known, nav | again << 1))


def _encode_verdict(message: Verdict) -> bytes | None:
    session, opening, epoch, pos, ids, more, rejected, counters, refused, logprobs = message
    if not (
        type(session) is int and type(opening) is int and type(epoch) is int and type(pos) is int
        and type(more) is bool and rejected is False and refused is None and logprobs is None
        and type(ids) is tuple and len(ids) <= _MOST_QUICK_IDS
        and not session >> 64 and not (opening | epoch | pos) >> 32
    ):  # fmt: skip
        return None
    if counters is None:
        numbers: tuple[int, ...] = ()
    elif type(counters) is Counters and _are_counters(counters):
        numbers = counters
    else:
        return None
    try:
        packed = _PACK_IDS[len(ids)](*ids)
    except (struct.error, TypeError):
        return None
    if not packed[3::4].isascii():
        return None
    return _packers.pack((_VERDICT, session, opening, epoch, pos, packed, int(more), *numbers))


def _decode_draft(fields: tuple[Any, ...]) -> Draft | None:
    if len(fields) != 8:
        return None
    _, session, opening, epoch, pos, packed, lag, flags = fields
    if not (
        type(session) is int and type(opening) is int and type(epoch) is int and type(pos) is int
        and type(lag) is int and type(flags) is int and type(packed) is bytes
        and session >= 0 and not (opening | epoch | pos | (known := pos - lag)) >> 32 and not flags >> 2
        and not (size := len(packed)) & 3 and size <= 4 * _MOST_QUICK_IDS and packed[3::4].isascii()
    ):  # fmt: skip
        return None
    ids = _UNPACK_IDS[size >> 2](packed)
    return _new(Draft, (session, opening, epoch, pos, ids, known, flags & 1 == 1, flags >= 2, None, None))


def _decode_verdict(fields: tuple[Any, ...]) -> Verdict | None:
    counters = None
    if len(fields) == 11:
        numbers = fields[7:]
        if not _are_counters(numbers):
            return None
        counters = _new(Counters, numbers)
    elif len(fields) != 7:
        return None
    _, session, opening, epoch, pos, packed, flags, *_ = fields
    if not (
        type(session) is int and type(opening) is int and type(epoch) is int and type(pos) is int
        and type(flags) is int and type(packed) is bytes
        and session >= 0 and not (opening | epoch | pos) >> 32 and not flags >> 1
        and not (size := len(packed)) & 3 and size <= 4 * _MOST_QUICK_IDS and packed[3::4].isascii()
    ):  # fmt: skip
        return None
    ids = _UNPACK_IDS[size >> 2](packed)
    return _new(Verdict, (session, opening, epoch, pos, ids, flags == 1, False, counters, None, None))


_QUICK_ENCODE: dict[Any, Callable[[Any], bytes | None]] = {Draft: _encode_draft, Verdict: _encode_verdict}
_QUICK_DECODE: dict[int, Callable[[tuple[Any, ...]], Message | None]] = {
    _DRAFT: _decode_draft,
    _VERDICT: _decode_verdict,
}
