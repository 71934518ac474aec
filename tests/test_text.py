"""Streaming text: whatever way ids are handed over, the text is that of all bytes at once, cut at the first stop."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.core import Vocabulary
from pipesd.edge.text import TextStream, decode

CONTROL, PADDING = 256, 257
PIECES = [bytes([i]) for i in range(256)] + [b"<|end|>", b""]
PIECES += [
    "é".encode(),
    "😊".encode(),
    b"\xf0\x9f",
    b"\x98\x8a",
    b"ab",
    b"abc",
    b" the",
    b"\xe2\x82",
    b"\xac",
    b" ",
    b"  x",
]
VOCABULARY = Vocabulary(tuple(PIECES))
HIDDEN = frozenset({CONTROL})
IDS = {piece: i for i, piece in enumerate(PIECES) if piece}

# mostly pieces that can make characters and stop texts together
some_id = st.one_of(
    st.sampled_from(range(CONTROL, len(PIECES))), st.sampled_from(list(b"abcXY \n")), st.integers(0, 255)
)
some_ids = st.lists(some_id, max_size=24)
many = settings(max_examples=500, deadline=None)
STOPS = ["ab", "abc", "bX", "X", "Y\n", "é", "😊", "the a", "cab", "€", " ", "ca", "abcX", "XX"]
some_stops = st.lists(st.sampled_from(STOPS), max_size=4)


def all_bytes(ids: list[int]) -> bytes:
    return b"".join(b"" if i in HIDDEN else PIECES[i] for i in ids)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop text begins that is complete first, the longest of several: tried character by character."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending))
    return None


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@many
@given(some_ids, some_stops, st.lists(st.integers(0, 24), max_size=8))
def test_any_chunking_gives_the_text_up_to_the_first_stop(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(VOCABULARY, stops, hidden=HIDDEN)
    parts = [stream.push(chunk) for chunk in chunks(ids, cuts)]
    text = "".join(parts) + stream.finish()
    whole = all_bytes(ids).decode("utf-8", "replace")
    stop_at = first_stop(whole, stops)
    assert text == whole[:stop_at]
    assert stream.stopped == (stop_at is not None)
    assert stream.finish() == "" and (not stream.stopped or stream.push([IDS[b"abc"]]) == "")


@many
@given(some_ids, some_stops, st.lists(st.integers(0, 24), max_size=8))
def test_kept_ids_are_those_wholly_before_the_stop(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(VOCABULARY, stops, hidden=HIDDEN)
    for chunk in chunks(ids, cuts):
        stream.push(chunk)
    stream.finish()
    if not stream.stopped:
        assert stream.kept_ids == len(ids)
        return
    text = all_bytes(ids).decode("utf-8", "replace")[: first_stop(all_bytes(ids).decode("utf-8", "replace"), stops)]
    kept = decode(VOCABULARY, ids[: stream.kept_ids], hidden=HIDDEN)
    assert text.startswith(kept)
    # one id more would reach into the stop text, so its text is no beginning of what was given out
    more = decode(VOCABULARY, ids[: stream.kept_ids + 1], hidden=HIDDEN)
    assert len(more) > len(text) or not text.startswith(more)


@many
@given(some_ids, some_stops)
def test_nothing_shown_is_taken_back(ids: list[int], stops: list[str]) -> None:
    stream = TextStream(VOCABULARY, stops, hidden=HIDDEN)
    shown = ""
    for i, token_id in enumerate(ids):
        shown += stream.push([token_id])
        later = TextStream(VOCABULARY, stops, hidden=HIDDEN)
        assert (later.push(ids[: i + 1]) + later.finish()).startswith(shown)


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])), some_stops)
def test_no_character_is_ever_shown_broken(text: str, stops: list[str]) -> None:
    stream = TextStream(VOCABULARY, stops, hidden=HIDDEN)
    for byte in text.encode():
        assert "\ufffd" not in stream.push([byte])
    assert "\ufffd" not in stream.finish()


def test_an_emoji_over_two_rounds_appears_whole() -> None:
    stream = TextStream(VOCABULARY)
    assert stream.push([IDS[b"a"], IDS[b"\xf0\x9f"]]) == "a"
    assert stream.push([IDS[b"\x98\x8a"], IDS[b"b"]]) == "😊b"


def test_incomplete_bytes_at_the_end_are_flushed_once() -> None:
    stream = TextStream(VOCABULARY)
    assert stream.push([IDS[b"\xf0\x9f"]]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_can_no_longer_become_a_character_are_shown_at_once() -> None:
    stream = TextStream(VOCABULARY)
    assert stream.push([0xE2]) == ""
    assert stream.push([IDS[b"a"]]) == "\ufffda"


def test_control_padding_and_unknown_ids_show_nothing_and_do_not_break_a_character() -> None:
    stream = TextStream(VOCABULARY, hidden=HIDDEN)
    ids = [IDS[b"\xf0\x9f"], CONTROL, PADDING, len(PIECES) + 5, IDS[b"\x98\x8a"]]
    assert "".join(stream.push([i]) for i in ids) == "😊"
    assert stream.kept_ids == len(ids)


def test_what_may_become_a_stop_text_is_held_back_and_let_go() -> None:
    stream = TextStream(VOCABULARY, ["abcX"])
    assert stream.push([IDS[b"Y"], IDS[b"ab"]]) == "Y"
    assert stream.push([IDS[b"c"]]) == ""
    assert stream.push([IDS[b"ab"]]) == "abc"  # "ab" may begin another one
    assert stream.finish() == "ab"
    assert not stream.stopped and stream.kept_ids == 4


def test_a_stop_text_across_ids_cuts_within_an_id() -> None:
    stream = TextStream(VOCABULARY, ["bcX"])
    assert stream.push([IDS[b"Y"], IDS[b"abc"], IDS[b"X"], IDS[b"Y"]]) == "Ya"
    assert stream.stopped
    assert stream.kept_ids == 1  # "abc" reaches into the stop text


def test_of_several_stop_texts_the_first_complete_one_counts() -> None:
    stream = TextStream(VOCABULARY, ["X", "abc", "bc"])
    assert stream.push([IDS[b"Y"], IDS[b"abc"], IDS[b"X"]]) == "Y"
    assert stream.kept_ids == 1


def test_of_several_complete_at_the_same_character_the_longest_counts() -> None:
    stream = TextStream(VOCABULARY, ["X", "abcX", "cX"])
    assert stream.push([IDS[b"Y"], IDS[b"abc"], IDS[b"X"]]) == "Y"


def test_a_stop_text_that_is_complete_later_does_not_count() -> None:
    for chunk in (1, 9):
        stream = TextStream(VOCABULARY, ["abcX", "bc"])
        ids = [IDS[b"ab"], ord("c"), ord("X")]
        assert "".join(stream.push(ids[i : i + chunk]) for i in range(0, 3, chunk)) == "a"


def test_ids_that_share_a_character_are_kept_or_dropped_together() -> None:
    for stop, kept in (("😊", 1), ("X", 3)):
        stream = TextStream(VOCABULARY, [stop])
        for token_id in (IDS[b"a"], IDS[b"\xf0\x9f"], IDS[b"\x98\x8a"], ord("X")):
            stream.push([token_id])
        assert stream.kept_ids == kept


def test_kept_ids_count_over_many_pushes() -> None:
    stream = TextStream(VOCABULARY, ["X"])
    assert "".join(stream.push([i]) for i in b"abcabcXY") == "abcabc"
    assert stream.kept_ids == 6


def test_an_end_id_in_front_of_the_stop_text_is_kept() -> None:
    stream = TextStream(VOCABULARY, ["X"], hidden=HIDDEN)
    assert stream.push([IDS[b"a"], CONTROL, IDS[b"X"], CONTROL]) == "a"
    assert stream.kept_ids == 2


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"", b" the"], "the"),
        ([b" ", b" the"], " the"),
        ([b" the", b" "], "the "),
        ([b"a", b" the"], "a the"),
        ([b"  x"], " x"),
        ([b"<|end|>", b" the"], "the"),
    ],
)
def test_one_glued_space_is_dropped_at_the_beginning_only(pieces: list[bytes], text: str) -> None:
    stream = TextStream(VOCABULARY, hidden=HIDDEN, strip_space=True)
    assert stream.push([PIECES.index(piece) for piece in pieces]) + stream.finish() == text
    assert stream.kept_ids == len(pieces)
