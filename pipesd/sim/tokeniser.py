"""A vocabulary of bytes and its tokeniser, so that text goes in and out without a model file."""

from __future__ import annotations

from functools import cached_property

from pipesd.core import Vocabulary

BEGIN_ID, END_ID = 256, 257
_LETTERS = b"etaoinshrdlcumwfgypbvkjxqz"

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_vocabulary(size: int = 512, real: int | None = None) -> Vocabulary:
    """`size` ids, of which those at or above `real` (default: all are real) are padding without a text.

    0..255 are the single bytes, 256 is "<s>", 257 is "</s>", then come pairs of letters. A vocabulary of fewer real
    ids is the beginning of that list.
    """
    real = size if real is None else real
    assert 0 < real <= size, f"{real} real ids of {size}"
    pieces = [bytes([i]) for i in range(256)] + [b"<s>", b"</s>"]
    pieces += [bytes([a, b]) for a in _LETTERS for b in _LETTERS]
    pieces += [b"#%d" % i for i in range(len(pieces), real)]
    return Vocabulary(tuple(pieces[:real]) + (b"",) * (size - real))


class ByteTokeniser:
    """Splits a text into pairs of letters where the vocabulary has them, else into bytes.

    Several id sequences give the same text, as with real tokenisers: what was generated is not always what its text
    encodes to. With `begin` the model has a token that starts every text.
    """

    def __init__(
        self, vocabulary: Vocabulary | None = None, *, begin: bool = True, chat_template: str | None = CHAT_TEMPLATE
    ) -> None:
        self.vocabulary = byte_vocabulary() if vocabulary is None else vocabulary
        assert self.vocabulary.real_size >= 256, "every byte needs an id"
        self.begin_id = BEGIN_ID if begin and self.vocabulary.real_size > BEGIN_ID else None
        self.add_bos = self.begin_id is not None
        self.chat_template = chat_template

    @cached_property
    def _pairs(self) -> dict[bytes, int]:
        return {piece: i for i, piece in enumerate(self.vocabulary.pieces) if len(piece) == 2}

    def encode(self, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
        """The ids of `text`; with `special` the texts of special tokens become these, with `add_bos` one begins it."""
        ids = [self.begin_id] if add_bos and self.begin_id is not None else []
        data = text.encode()
        specials = [i for i in (BEGIN_ID, END_ID) if special and i < self.vocabulary.real_size]
        at = 0
        while at < len(data):
            token_id = next((i for i in specials if data.startswith(self.vocabulary.pieces[i], at)), None)
            if token_id is None:
                token_id = self._pairs.get(data[at : at + 2], data[at])
            ids.append(token_id)
            at += len(self.vocabulary.pieces[token_id])
        return ids
