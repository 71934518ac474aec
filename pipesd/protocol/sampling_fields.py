"""The fields of sampling: its options in OPEN, the target's distribution and log-probabilities in VERDICT.

Codecs as those of `fields`; `wire` says how each looks byte by byte.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

from pipesd.config import MOST_LOGPROBS
from pipesd.core import Logprobs
from pipesd.errors import UsageError
from pipesd.logit_bias import MOST_BIASED
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.fields import Unfit, describe

_OPTIONS = struct.Struct("<BdIdddddHB")
_NO_LOGPROBS = 255
_PAIR_BYTES = 8
_FLOAT32_ONE = 0x3F800000  # bits of 1.0; non-negative float32 values are ordered as their bits are, NaN above them
_MOST_ID = (1 << 31) - 1


class Options:
    """A `Sampling`."""

    def pack(self, value: Any) -> bytes:
        if type(value) is not Sampling:
            raise Unfit(describe(value), "Sampling or None")
        s = value
        try:
            head = _OPTIONS.pack(
                s.method, s.temperature, s.top_k, s.top_p, s.min_p,
                s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.top_mass,
                _NO_LOGPROBS if s.logprobs is None else s.logprobs,
            )  # fmt: skip
            return head + _pack_pairs(s.logit_bias)
        except struct.error as error:
            raise Unfit(f"an option out of range: {error}", "options within the ranges of the protocol") from None

    def unpack(self, value: Any) -> Sampling:
        wanted = f"{_OPTIONS.size} bytes and {_PAIR_BYTES} for each of at most {MOST_BIASED} biases"
        most = _OPTIONS.size + MOST_BIASED * _PAIR_BYTES
        if type(value) is not bytes or not _OPTIONS.size <= len(value) <= most:
            raise Unfit(describe(value), wanted)
        if (len(value) - _OPTIONS.size) % _PAIR_BYTES:
            raise Unfit(describe(value), wanted)
        method, temperature, top_k, top_p, min_p, *penalties, top_mass, logprobs = _OPTIONS.unpack_from(value)
        if method not in _METHODS:
            raise Unfit(f"method {method}", f"a method: {', '.join(map(str, _METHODS))}")
        try:
            return Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=penalties[0],
                presence_penalty=penalties[1],
                frequency_penalty=penalties[2],
                logit_bias=_unpack_pairs(value[_OPTIONS.size :]),
                method=Method(method),
                top_mass=top_mass,
                logprobs=None if logprobs == _NO_LOGPROBS else logprobs,
            )
        except UsageError as error:
            raise Unfit(f"impossible options: {error}", "options that can be used") from None


_METHODS = tuple(int(method) for method in Method)


class LawPairs:
    """1 to `most` pairs (id, probability), with one above 0 among them."""

    def __init__(self, most: int) -> None:
        self._most = most

    def pack(self, value: Any) -> bytes:
        packed = _pack_pairs(_checked_pairs(value))
        self._check(packed)
        return packed

    def unpack(self, value: Any) -> tuple[tuple[int, float], ...]:
        if type(value) is not bytes or len(value) % _PAIR_BYTES:
            raise Unfit(describe(value), f"packed pairs of {_PAIR_BYTES} bytes each")
        self._check(value)
        return _unpack_pairs(value)

    def _check(self, packed: bytes) -> None:
        count = len(packed) // _PAIR_BYTES
        if not 1 <= count <= self._most:
            raise Unfit(f"{count} pairs", f"1 to {self._most} pairs")
        bits = struct.unpack(f"<{2 * count}I", packed)[1::2]
        highest = max(bits)
        if highest > _FLOAT32_ONE:
            raise Unfit(describe(_unpack_pairs(packed)[bits.index(highest)][1]), "probabilities from 0 to 1")
        if not highest:
            raise Unfit("probabilities that are all 0", "one above 0")


class LogprobsOfIds:
    """A `Logprobs` for each of at most `most` ids, all with as many of the most probable ids."""

    _wanted = "log-probabilities of at most 0, as many for each id"

    def __init__(self, most: int) -> None:
        self._most = most

    def pack(self, value: Any) -> bytes:
        if not isinstance(value, tuple | list) or not all(isinstance(entry, Logprobs) for entry in value):
            raise Unfit(describe(value), "a sequence of Logprobs")
        self._check_count(len(value))
        rows = [_checked_pairs([(0, own), *_checked_pairs(top)]) for own, top in value]
        beside = len(rows[0]) - 1 if rows else 0
        self._check_beside(beside)
        parts = [bytes([beside])]
        for row in rows:
            if len(row) - 1 != beside:
                raise Unfit(f"{len(row) - 1} ids beside one and {beside} beside another", self._wanted)
            for _, number in row:
                if not number <= 0.0:
                    raise Unfit(describe(number), self._wanted)
            parts.append(_pack_pairs(row)[4:])  # all but the id of the first
        return b"".join(parts)

    def unpack(self, value: Any) -> tuple[Logprobs, ...]:
        if type(value) is not bytes or not value:
            raise Unfit(describe(value), "a count byte and log-probabilities")
        beside = value[0]
        self._check_beside(beside)
        each = 4 + beside * _PAIR_BYTES
        count, rest = divmod(len(value) - 1, each)
        if rest:
            raise Unfit(describe(value), f"1 byte and {each} for each id")
        self._check_count(count)
        entry = struct.Struct("<f" + "If" * beside)
        found = []
        for own, *flat in entry.iter_unpack(value[1:]):
            top = tuple(zip(flat[::2], flat[1::2], strict=True))
            for number in (own, *flat[1::2]):
                if not number <= 0.0:
                    raise Unfit(describe(number), self._wanted)
            if flat:
                _check_ids(max(flat[::2]))
            found.append(Logprobs(own, top))
        return tuple(found)

    def _check_count(self, count: int) -> None:
        if count > self._most:
            raise Unfit(f"log-probabilities of {count} ids", f"of at most {self._most}")

    @staticmethod
    def _check_beside(beside: int) -> None:
        if beside > MOST_LOGPROBS:
            raise Unfit(f"{beside} ids beside each", f"at most {MOST_LOGPROBS}")


def count_of(packed: bytes) -> int:
    """Of how many ids packed log-probabilities are."""
    return (len(packed) - 1) // (4 + packed[0] * _PAIR_BYTES)


def _checked_pairs(value: Any) -> Sequence[tuple[int, float]]:
    """`value` as pairs of an int that may be an id and a float."""
    if type(value) is tuple and set(map(type, value)) == {tuple} and set(map(len, value)) == {2}:
        ids, numbers = zip(*value, strict=True)
        if set(map(type, ids)) == {int} and set(map(type, numbers)) == {float}:
            _check_ids(min(ids), max(ids))
            return value
    pairs = []
    try:
        for token, number in value:
            if isinstance(number, str | bytes) or isinstance(token, bool):
                raise TypeError
            pairs.append((operator.index(token), float(number)))
    except (TypeError, ValueError, OverflowError):
        raise Unfit(describe(value), "pairs of an id and a number") from None
    _check_ids(*(token for token, _ in pairs))
    return pairs


def _check_ids(*ids: int) -> None:
    for token in ids:
        if not 0 <= token <= _MOST_ID:
            raise Unfit(f"id {token}", f"ids from 0 to {_MOST_ID}")


def _pack_pairs(pairs: Sequence[tuple[int, float]]) -> bytes:
    """Of each an id as u32 and a float32, little-endian."""
    try:
        return struct.pack("<" + "If" * len(pairs), *chain.from_iterable(pairs))
    except OverflowError:
        raise Unfit("a number that no float32 can hold", "less") from None


def _unpack_pairs(packed: bytes) -> tuple[tuple[int, float], ...]:
    """Pairs of ids below 2**31."""
    pairs = tuple(struct.iter_unpack("<If", packed))
    if not packed[3::_PAIR_BYTES].isascii():  # the highest byte of an id below 2**31 is below 128
        _check_ids(*(token for token, _ in pairs))
    return pairs
