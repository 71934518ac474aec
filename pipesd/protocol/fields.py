"""Checked translation of one field between its value in a message and its value in msgpack.

A codec's `pack` takes what a caller put into a message: integers of any kind that Python's `operator.index` accepts
(numpy's too) become int, everything else that is not of the field's type is refused. Its `unpack` takes what msgpack
decoded and is strict: an int is an int and no bool. Both raise `Unfit`, which says what was got and what was wanted.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from pipesd.protocol.vocabulary import pack_pieces, unpack_pieces

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
FLOAT16_ONE = 0x3C00  # bits of 1.0; non-negative float16 values are ordered as their bits are, NaN above all of them


class Unfit(Exception):
    """A value does not fit its field."""

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(got, wanted)
        self.got, self.wanted = got, wanted


def describe(value: object) -> str:
    """A short, printable word for a value that may come from anyone; never the content of texts or ids."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"bool {value}"
    if isinstance(value, float):
        return f"float {float(value)}"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else "a huge integer"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return f"an array of {len(value)}"
    return f"a value of type {type(value).__module__}.{type(value).__name__}".replace("builtins.", "")


class Codec(Protocol):
    def pack(self, value: Any) -> Any: ...
    def unpack(self, value: Any) -> Any: ...


class Int:
    """An integer from `least` to `most`."""

    def __init__(self, most: int, least: int = 0) -> None:
        self.least, self.most = least, most

    def pack(self, value: Any) -> int:
        if isinstance(value, bool):
            raise self._unfit(value)
        try:
            number = operator.index(value)
        except TypeError:
            raise self._unfit(value) from None
        return self._checked(number)

    def unpack(self, value: Any) -> int:
        if type(value) is not int:
            raise self._unfit(value)
        return self._checked(value)

    def _checked(self, value: int) -> int:
        if not self.least <= value <= self.most:
            raise self._unfit(value)
        return value

    def _unfit(self, value: object) -> Unfit:
        return Unfit(describe(value), f"an integer from {self.least} to {self.most}")


class Bool:
    """A flag of a message; on the wire flags travel together as bits of one integer."""

    def pack(self, value: Any) -> bool:
        if type(value) is not bool:
            raise Unfit(describe(value), "True or False")
        return value

    unpack = pack


class Choice:
    """One of the numbers of an enum."""

    def __init__(self, members: type[IntEnum]) -> None:
        self._members = {int(member): member for member in members}
        self._wanted = f"a number of {members.__name__}: {', '.join(str(int(m)) for m in members)}"

    def pack(self, value: Any) -> int:
        if isinstance(value, bool):
            raise Unfit(describe(value), self._wanted)
        try:
            return int(self._members[operator.index(value)])
        except (TypeError, KeyError):
            raise Unfit(describe(value), self._wanted) from None

    def unpack(self, value: Any) -> IntEnum:
        if type(value) is not int or value not in self._members:
            raise Unfit(describe(value), self._wanted)
        return self._members[value]


class Fixed:
    """Exactly `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def pack(self, value: Any) -> bytes:
        if type(value) is not bytes or len(value) != self._size:
            raise Unfit(describe(value), f"{self._size} bytes")
        return value

    unpack = pack


class Blob:
    """At most `most` bytes, a multiple of `step`."""

    def __init__(self, most: int, step: int = 1) -> None:
        self._most, self._step = most, step

    def pack(self, value: Any) -> bytes:
        if type(value) is not bytes or len(value) > self._most or len(value) % self._step:
            multiple = f", a multiple of {self._step}" if self._step > 1 else ""
            raise Unfit(describe(value), f"at most {self._most} bytes{multiple}")
        return value

    unpack = pack


class Text:
    """A text of at most `most` bytes in UTF-8. With `cut` the encoder shortens instead of refusing."""

    def __init__(self, most: int, cut: bool = False) -> None:
        self._most, self._cut = most, cut

    def pack(self, value: Any) -> str:
        if isinstance(value, str) and self._cut:
            return value.encode("utf-8", "replace")[: self._most].decode("utf-8", "ignore")
        return self.unpack(value)

    def unpack(self, value: Any) -> str:
        wanted = f"a text of at most {self._most} bytes in UTF-8"
        if type(value) is not str:
            raise Unfit(describe(value), wanted)
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise Unfit("a text with half a surrogate pair", wanted) from None
        if size > self._most:
            raise Unfit(f"{size} bytes", wanted)
        return value


class Ids:
    """At most `most` ids, each below 2**31, packed as u32 little-endian."""

    def __init__(self, most: int) -> None:
        self._most = most

    def pack(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | str):
            raise Unfit(describe(value), "a sequence of ids")
        try:
            ids = tuple(value)
        except TypeError:
            raise Unfit(describe(value), "a sequence of ids") from None
        self._check_count(len(ids))
        try:
            packed = struct.pack(f"<{len(ids)}I", *ids)
        except (struct.error, TypeError):  # the latter from a foreign type's own conversion
            packed = b"".join([struct.pack("<I", _ID.pack(token_id)) for token_id in ids])
        self._check_size_of_ids(packed)
        return packed

    def unpack(self, value: Any) -> tuple[int, ...]:
        if type(value) is not bytes or len(value) % 4:
            raise Unfit(describe(value), "packed ids of 4 bytes each")
        self._check_count(len(value) // 4)
        self._check_size_of_ids(value)
        return struct.unpack(f"<{len(value) // 4}I", value)

    def _check_count(self, count: int) -> None:
        if count > self._most:
            raise Unfit(f"{count} ids", f"at most {self._most} ids")

    @staticmethod
    def _check_size_of_ids(packed: bytes) -> None:
        if not packed[3::4].isascii():  # the highest byte of an id below 2**31 is below 128
            largest = max(struct.unpack(f"<{len(packed) // 4}I", packed))
            raise Unfit(f"id {largest}", "ids from 0 to 2147483647")


_ID = Int((1 << 31) - 1)


class Probabilities:
    """Probabilities from 0 to 1, packed as float16 little-endian; never NaN.

    Those of a message must be float16s as they are: who accepts by them must reckon with what was drawn by, and which
    way to round is for who draws to say.
    """

    _wanted = "probabilities from 0 to 1"

    def __init__(self, most: int) -> None:
        self._most = most

    def pack(self, value: Any) -> bytes:
        try:
            numbers = [float(p) for p in value if not isinstance(p, str | bytes)]
            count = len(value)
        except (TypeError, ValueError, OverflowError):
            raise Unfit(describe(value), self._wanted) from None
        if count > self._most:
            raise Unfit(f"{count} probabilities", f"at most {self._most}")
        if len(numbers) != count:
            raise Unfit("a text among them", self._wanted)
        for p in numbers:
            if not 0.0 <= p <= 1.0:
                raise Unfit(describe(p), self._wanted)
        packed = struct.pack(f"<{count}e", *(p + 0.0 for p in numbers))  # + 0.0 makes -0.0 positive
        for p, sent in zip(numbers, struct.unpack(f"<{count}e", packed), strict=True):
            if p != sent:
                raise Unfit(describe(p), "probabilities that are rounded to float16s")
        return packed

    def unpack(self, value: Any) -> tuple[float, ...]:
        if type(value) is not bytes or len(value) % 2:
            raise Unfit(describe(value), "packed probabilities of 2 bytes each")
        count = len(value) // 2
        if count > self._most:
            raise Unfit(f"{count} probabilities", f"at most {self._most}")
        numbers: tuple[float, ...] = struct.unpack(f"<{count}e", value)
        bits = struct.unpack(f"<{count}H", value)
        if max(bits, default=0) > FLOAT16_ONE:
            raise Unfit(describe(numbers[bits.index(max(bits))]), self._wanted)
        return numbers


class Pieces:
    """At most `most` pieces of a vocabulary, packed as in `vocabulary.pack_pieces` into at most `most_bytes`."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes

    def pack(self, value: Any) -> bytes:
        if not isinstance(value, tuple) or not all(type(piece) is bytes for piece in value):
            raise Unfit(describe(value), "a tuple of bytes")
        if len(value) > self._most:
            raise Unfit(f"{len(value)} pieces", f"at most {self._most} pieces")
        try:
            packed = pack_pieces(value)
        except ValueError as error:
            raise Unfit(str(error), "pieces that can be packed") from None
        if len(packed) > self._most_bytes:
            raise Unfit(f"{len(packed)} bytes", f"at most {self._most_bytes} bytes")
        return packed

    def unpack(self, value: Any) -> tuple[bytes, ...]:
        if type(value) is not bytes or len(value) > self._most_bytes:
            raise Unfit(describe(value), f"packed pieces of at most {self._most_bytes} bytes")
        try:
            return unpack_pieces(value, self._most)
        except ValueError as error:
            raise Unfit(str(error), "packed pieces") from None


class Optional:
    """A field that may be nil or left out at the end of a message."""

    def __init__(self, codec: Codec) -> None:
        self.pack: Callable[[Any], Any] = lambda value: None if value is None else codec.pack(value)
        self.unpack: Callable[[Any], Any] = lambda value: None if value is None else codec.unpack(value)
