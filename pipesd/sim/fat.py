"""Finds draft tokens in a stream of ZeroMQ, so that an emulated link can treat each as if it came with further bytes.

Systems that verify by the draft model's distribution send that of the whole vocabulary with every draft token (PipeSD's
own does: 0.3 MB each); here such a link is had without such a payload. Frames are those of ZMTP 3 (RFC 23): a greeting
of 64 bytes, then frames of a byte of flags, a length of 1 or 8 bytes, and a body. What is encrypted shows no drafts.
"""

from __future__ import annotations

from enum import Enum

from pipesd.protocol.messages import ID_BYTES, MAX_IDS, Draft, Probe
from pipesd.protocol.wire import WireError, decode

_GREETING_BYTES = 64
_MARKS = {0: 0xFF, 9: 0x7F}  # bytes of every greeting
_LONG, _COMMAND = 2, 4  # flags
_ENDLESS = 1 << 62
_MOST_BYTES = 6 * MAX_IDS + 64  # no DRAFT is longer: ids of 4 bytes, probabilities of 2


class _Part(Enum):
    GREETING = "greeting"
    HEAD = "head"  # flags, and the length or its first byte
    LENGTH = "length"  # the rest of a long one
    BODY = "body"
    FOREIGN = "foreign"  # no ZMTP: nothing is looked for


class DraftTokens:
    """The reader of one direction of one connection, fed with its bytes in order, in chunks of any size."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._begin(_Part.GREETING, _GREETING_BYTES)

    def split(self, data: memoryview) -> list[tuple[memoryview, int]]:
        """The same bytes in order, cut behind the last byte of every DRAFT: each piece with the further bytes that its
        last byte brings along."""
        pieces: list[tuple[memoryview, int]] = []
        begin = at = 0
        while at < len(data):
            taken = min(self._left, len(data) - at)
            if self._kept:
                self._bytes += data[at : at + taken]
            self._left -= taken
            at += taken
            while self._left == 0:
                if tokens := self._next():
                    pieces.append((data[begin:at], tokens * self._bytes_per_token))
                    begin = at
        return [*pieces, (data[begin:], 0)] if begin < len(data) else pieces

    def _begin(self, part: _Part, length: int, *, kept: bool = True) -> None:
        self._part, self._left, self._kept = part, length, kept
        self._bytes = bytearray()

    def _next(self) -> int:
        """A part is whole: begin the one behind it. Returns the number of draft tokens in it."""
        part, data = self._part, bytes(self._bytes)
        tokens = 0
        if part is _Part.GREETING:
            if all(data[at] == mark for at, mark in _MARKS.items()):
                self._begin(_Part.HEAD, 2)
            else:
                self._begin(_Part.FOREIGN, _ENDLESS, kept=False)
        elif part is _Part.HEAD:
            self._flags = data[0]
            if self._flags & _LONG:
                self._begin(_Part.LENGTH, 7)
                self._bytes += data[1:]
            else:
                self._body(data[1])
        elif part is _Part.LENGTH:
            self._body(int.from_bytes(data, "big"))
        else:
            tokens = _draft_tokens(data) if self._kept else 0
            self._begin(_Part.HEAD, 2)
        return tokens

    def _body(self, length: int) -> None:
        self._begin(_Part.BODY, length, kept=not self._flags & _COMMAND and length <= _MOST_BYTES)


def _draft_tokens(payload: bytes) -> int:
    """How many draft tokens a message carries, or a probe stands for by the length of its payload."""
    try:
        message = decode(payload)
    except WireError:
        return 0
    if isinstance(message, Probe):
        return len(message.payload) // ID_BYTES
    return len(message.ids) if isinstance(message, Draft) else 0
