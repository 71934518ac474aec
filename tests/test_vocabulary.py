"""The rule by which two vocabularies are compared, and the digests and names that travel with a session."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesd.core import Vocabulary
from pipesd.protocol.vocabulary import (
    BLOCK,
    block_hashes,
    block_pieces,
    difference_text,
    digest,
    first_difference,
    first_differing_block,
    new_session,
    pack_pieces,
    unpack_pieces,
    vocabulary_hash,
)

WORDS = Vocabulary(tuple(b"word %d" % i for i in range(1000)))
pieces = st.lists(st.binary(max_size=4), max_size=20).map(tuple)


def changed(vocabulary: Vocabulary, token_id: int, piece: bytes) -> Vocabulary:
    return Vocabulary((*vocabulary.pieces[:token_id], piece, *vocabulary.pieces[token_id + 1 :]))


def test_hashes_are_these_bytes() -> None:
    packed = bytes.fromhex("0100 6100000200 c3a4")
    vocabulary = Vocabulary((b"a", b"", "ä".encode(), b"", b""))
    assert pack_pieces(vocabulary.pieces[:3]) == packed
    assert vocabulary_hash(vocabulary) == hashlib.blake2b(packed, digest_size=8).digest()
    assert block_hashes(vocabulary) == hashlib.blake2b(packed, digest_size=4).digest()
    assert vocabulary_hash(vocabulary).hex() == "0491c26fecbd3628"
    assert block_hashes(vocabulary).hex() == "28354961"


def test_there_are_four_bytes_a_block_of_256_ids() -> None:
    for size, blocks in [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (1000, 4)]:
        assert len(block_hashes(Vocabulary(WORDS.pieces[:size]))) == 4 * blocks
    assert [len(block_pieces(WORDS, block)) for block in range(5)] == [256, 256, 256, 232, 0]
    assert block_pieces(WORDS, 3)[0] == b"word 768"


@given(st.integers(0, 999), st.binary(max_size=9))
def test_any_changed_piece_shows_in_both_hashes_and_is_named(token_id: int, piece: bytes) -> None:
    other = changed(WORDS, token_id, piece)
    block = first_differing_block(block_hashes(WORDS), block_hashes(other))
    if piece == WORDS.pieces[token_id]:
        assert (block, vocabulary_hash(other)) == (None, vocabulary_hash(WORDS))
        return
    assert vocabulary_hash(other) != vocabulary_hash(WORDS)
    assert block == token_id // BLOCK
    found = first_difference(block_pieces(WORDS, block), block_pieces(other, block), block)
    assert found == (token_id, WORDS.pieces[token_id], piece)


def test_the_first_of_several_differences_is_named() -> None:
    other = changed(changed(WORDS, 700, b"x"), 600, b"y")
    assert first_differing_block(block_hashes(WORDS), block_hashes(other)) == 2
    assert first_difference(block_pieces(WORDS, 2), block_pieces(other, 2), 2) == (600, b"word 600", b"y")
    assert first_difference(block_pieces(WORDS, 0), block_pieces(other, 0)) is None


@pytest.mark.parametrize("padding", [0, 1, 24, 500])
def test_padding_behind_the_last_piece_does_not_count(padding: int) -> None:
    padded = Vocabulary(WORDS.pieces + (b"",) * padding)
    assert block_hashes(padded) == block_hashes(WORDS)
    assert vocabulary_hash(padded) == vocabulary_hash(WORDS)


@pytest.mark.parametrize("more", [1, 24, 25, 300])
def test_a_vocabulary_that_goes_on_differs_at_its_first_new_id(more: int) -> None:
    longer = Vocabulary(WORDS.pieces + (b"new",) * more)
    for own, other, found in [(WORDS, longer, (1000, b"", b"new")), (longer, WORDS, (1000, b"new", b""))]:
        block = first_differing_block(block_hashes(own), block_hashes(other))
        assert block == 3
        assert first_difference(block_pieces(own, block), block_pieces(other, block), block) == found
    far = Vocabulary((*WORDS.pieces[:768], b"new"))
    assert first_differing_block(block_hashes(far), block_hashes(Vocabulary(WORDS.pieces[:768]))) == 3


def test_a_gap_within_the_vocabulary_counts_as_an_empty_piece() -> None:
    gap = changed(WORDS, 5, b"")
    assert first_difference(gap.pieces[:256], WORDS.pieces[:256]) == (5, b"", b"word 5")
    assert first_difference(gap.pieces[:256], gap.pieces[:256]) is None


@given(pieces, pieces)
def test_no_two_lists_of_pieces_pack_to_the_same_bytes(some: tuple[bytes, ...], others: tuple[bytes, ...]) -> None:
    assert (pack_pieces(some) == pack_pieces(others)) == (some == others)
    assert unpack_pieces(pack_pieces(some), len(some)) == some


def test_pieces_that_cannot_be_packed_or_unpacked_are_refused() -> None:
    longest = (b"x" * 65535,)
    assert unpack_pieces(pack_pieces(longest), 1) == longest
    with pytest.raises(ValueError, match="a piece of 65536 bytes, at most 65535"):
        pack_pieces([b"x" * 65536])
    for packed, says in [
        (b"\x01", "length of a piece"),
        (b"\x02\x00a", "within a piece"),
        (b"\0\0" * 3, "more than 2"),
    ]:
        with pytest.raises(ValueError, match=says):
            unpack_pieces(packed, 2)


def test_a_difference_is_told_with_both_texts() -> None:
    assert difference_text(7, b" the", b" The") == (
        "id 7 is ' the' to the draft model and ' The' to the target: their vocabularies differ"
    )
    assert r"b'\xff' to the draft model and b'\xfe' to the target" in difference_text(7, b"\xff", b"\xfe")
    assert r"'a\nb'" in difference_text(7, b"a\nb", b"c")


def test_a_digest_stands_for_the_ids_and_their_order() -> None:
    assert digest(()) == hashlib.blake2b(b"", digest_size=8).digest()
    assert digest((1, 2**31 - 1)) == hashlib.blake2b(bytes.fromhex("01000000 ffffff7f"), digest_size=8).digest()
    assert len({digest(ids) for ids in [(), (0,), (0, 0), (1, 2), (2, 1), (1,)]}) == 6
    assert digest([1, 2]) == digest((1, 2))


def test_a_session_has_64_random_bits_and_is_never_0() -> None:
    assert len({new_session() for _ in range(1000)}) == 1000
    assert max(new_session() for _ in range(100)) > 2**56
    answers = iter([bytes(8), b"\x01" + bytes(7)])
    assert new_session(lambda n: next(answers)[:n]) == 1
