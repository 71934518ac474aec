"""The quick ways of DRAFT and VERDICT, the messages of every round.

They take what is right in every field and leave the rest (None) to the tables, which convert it or say what is wrong.
`not (a | b) >> 32` holds if both are from 0 to 2**32 - 1: one above leaves a bit, one below 0 leaves -1.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]

from pipesd.protocol.fields import FLOAT16_ONE
from pipesd.protocol.messages import Counters, Draft, Kind, Message, Verdict


class _Packers(threading.local):
    """A packer for each thread: one serves one thread only, and making one anew costs more than packing a DRAFT."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer().pack


_packers = _Packers()
_DRAFT, _VERDICT = int(Kind.DRAFT), int(Kind.VERDICT)
_MOST_QUICK_IDS = 256
_PACK_IDS = [struct.Struct(f"<{n}I").pack for n in range(_MOST_QUICK_IDS + 1)]
_UNPACK_IDS = [struct.Struct(f"<{n}I").unpack for n in range(_MOST_QUICK_IDS + 1)]
_PACK_HALVES = [struct.Struct(f"<{n}e").pack for n in range(_MOST_QUICK_IDS + 1)]
_UNPACK_HALVES = [struct.Struct(f"<{n}e").unpack for n in range(_MOST_QUICK_IDS + 1)]
_UNPACK_BITS = [struct.Struct(f"<{n}H").unpack for n in range(_MOST_QUICK_IDS + 1)]
_BELOW_ONE = bytes(range(FLOAT16_ONE >> 8))
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
        and type(known) is int and type(nav) is bool and type(again) is bool and tried is None
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
    if p_draft is None:
        return _packers.pack((_DRAFT, session, opening, epoch, pos, packed, pos - known, nav | again << 1))
    halves = _pack_halves(p_draft, len(ids))
    if halves is None:
        return None
    return _packers.pack((_DRAFT, session, opening, epoch, pos, packed, pos - known, nav | again << 1, halves))


def _are_probabilities(halves: bytes, count: int) -> bool:
    """Whether `count` float16s are from 0 to 1; most are below 1, as their high bytes tell."""
    return not halves[1::2].translate(None, _BELOW_ONE) or max(_UNPACK_BITS[count](halves)) <= FLOAT16_ONE


def _pack_halves(p_draft: Any, count: int) -> bytes | None:
    if type(p_draft) is not tuple or len(p_draft) != count:
        return None
    try:
        packed = _PACK_HALVES[count](*p_draft)
    except (struct.error, TypeError, OverflowError):
        return None
    return packed if _are_probabilities(packed, count) and _UNPACK_HALVES[count](packed) == p_draft else None


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
    halves = None
    if len(fields) == 9:
        halves = fields[8]
    elif len(fields) != 8:
        return None
    _, session, opening, epoch, pos, packed, lag, flags, *_ = fields
    if not (
        type(session) is int and type(opening) is int and type(epoch) is int and type(pos) is int
        and type(lag) is int and type(flags) is int and type(packed) is bytes
        and session >= 0 and not (opening | epoch | pos | (known := pos - lag)) >> 32 and not flags >> 2
        and not (size := len(packed)) & 3 and size <= 4 * _MOST_QUICK_IDS and packed[3::4].isascii()
    ):  # fmt: skip
        return None
    count = size >> 2
    p_draft = None
    if halves is not None:
        if type(halves) is not bytes or len(halves) != 2 * count:
            return None
        if not _are_probabilities(halves, count):
            return None
        p_draft = _UNPACK_HALVES[count](halves)
    ids = _UNPACK_IDS[count](packed)
    return _new(Draft, (session, opening, epoch, pos, ids, known, flags & 1 == 1, flags >= 2, p_draft, None))


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


ENCODE: dict[Any, Callable[[Any], bytes | None]] = {Draft: _encode_draft, Verdict: _encode_verdict}
DECODE: dict[int, Callable[[tuple[Any, ...]], Message | None]] = {
    _DRAFT: _decode_draft,
    _VERDICT: _decode_verdict,
}
