"""Do draft and target give the same text to the same ids? The rule that both sides compute, and digests of ids.

A vocabulary is compared by the bytes that llama.cpp gives for each id, special tokens as their text. Ids are taken in
blocks of 256. A block is packed as each id's length in two little-endian bytes followed by its bytes, up to
`Vocabulary.real_size`; what lies behind (padding of the output layer) does not count, an id without text before it
counts as empty. Hashes are BLAKE2b: four bytes a block, eight for all. The edge shows the hash of all; on a mismatch
the cloud shows its block hashes, the edge asks for the pieces of the first block that differs and names the id.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

from pipesd.core import Vocabulary

BLOCK = 256  # ids a block
BLOCK_HASH_BYTES = 4
HASH_BYTES = 8
MAX_PIECE_BYTES = 0xFFFF  # what a length of two bytes can say

_LENGTH = struct.Struct("<H")


def pack_pieces(pieces: Sequence[bytes]) -> bytes:
    """One byte string of all pieces, each behind its length as u16 little-endian. ValueError: a piece is too long."""
    for piece in pieces:
        if len(piece) > MAX_PIECE_BYTES:
            raise ValueError(f"a piece of {len(piece)} bytes, at most {MAX_PIECE_BYTES} can be packed")
    length = _LENGTH.pack
    return b"".join([part for piece in pieces for part in (length(len(piece)), piece)])


def unpack_pieces(packed: bytes, most: int) -> tuple[bytes, ...]:
    """The pieces that `pack_pieces` packed. ValueError: more than `most`, or the bytes end within a piece."""
    pieces: list[bytes] = []
    at, size, length = 0, len(packed), _LENGTH.unpack_from
    while at < size:
        if len(pieces) == most:
            raise ValueError(f"more than {most} pieces")
        if at + 2 > size:
            raise ValueError("the bytes end within the length of a piece")
        end = at + 2 + length(packed, at)[0]
        if end > size:
            raise ValueError("the bytes end within a piece")
        pieces.append(packed[at + 2 : end])
        at = end
    return tuple(pieces)


def block_pieces(vocabulary: Vocabulary, block: int) -> tuple[bytes, ...]:
    """The pieces of ids 256·block … 256·block + 255, cut at `real_size`: none for a block behind the end."""
    first = block * BLOCK
    return vocabulary.pieces[first : min(first + BLOCK, vocabulary.real_size)]


def block_hashes(vocabulary: Vocabulary) -> bytes:
    """Four bytes for each block of 256 ids, in order; the last block may be shorter than 256 ids."""
    blocks = range((vocabulary.real_size + BLOCK - 1) // BLOCK)
    return b"".join(
        [blake2b(pack_pieces(block_pieces(vocabulary, b)), digest_size=BLOCK_HASH_BYTES).digest() for b in blocks]
    )


def vocabulary_hash(vocabulary: Vocabulary) -> bytes:
    """Eight bytes over all pieces up to `real_size`: equal on both sides means that ids mean the same text."""
    real = vocabulary.pieces[: vocabulary.real_size]
    return blake2b(pack_pieces(real), digest_size=HASH_BYTES).digest()


def first_differing_block(own: bytes, other: bytes) -> int | None:
    """Number of the first block whose hashes differ, or that only one side has; None if all are equal."""
    for at in range(0, max(len(own), len(other)), BLOCK_HASH_BYTES):
        if own[at : at + BLOCK_HASH_BYTES] != other[at : at + BLOCK_HASH_BYTES]:
            return at // BLOCK_HASH_BYTES
    return None


def first_difference(own: Sequence[bytes], other: Sequence[bytes], block: int = 0) -> tuple[int, bytes, bytes] | None:
    """(id, own piece, other piece) of the first id that differs between both sides' pieces of `block`, else None.

    An id behind the end of one side's pieces has the empty piece there: padding on both sides is no difference.
    """
    for i in range(max(len(own), len(other))):
        mine = own[i] if i < len(own) else b""
        theirs = other[i] if i < len(other) else b""
        if mine != theirs:
            return block * BLOCK + i, mine, theirs
    return None


def difference_text(token_id: int, draft: bytes, target: bytes) -> str:
    """One line that names an id whose pieces differ, with both: as texts if they differ as such, else as bytes."""
    texts = repr(draft.decode("utf-8", "replace")), repr(target.decode("utf-8", "replace"))
    shown = texts if texts[0] != texts[1] else (repr(draft), repr(target))
    return f"id {token_id} is {shown[0]} to the draft model and {shown[1]} to the target: their vocabularies differ"


def digest(ids: Sequence[int]) -> bytes:
    """Eight bytes that stand for these ids (BLAKE2b over u32 little-endian): proof that both sides hold the same."""
    return blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=HASH_BYTES).digest()


def new_session(rng: Callable[[int], bytes] = os.urandom) -> int:
    """A session's name, 64 random bits, never 0 (0 stands for "no session"). `rng(n)` gives n random bytes."""
    while True:
        session = int.from_bytes(rng(8), "little")
        if session:
            return session
