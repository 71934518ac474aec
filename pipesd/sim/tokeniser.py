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
    """Splits a text into pairs of letters where the vocabulary has them, else into bytes; has the attributes of the
    real tokeniser.

    Several id sequences give the same text, as with real tokenisers: what was generated is not always what its text
    encodes to. With `begin` the model has a token that starts every text.
    """

    name = "bytes"
    add_space_prefix = False

    def __init__(
        self, vocabulary: Vocabulary | None = None, *, begin: bool = True, template: str | None = CHAT_TEMPLATE
    ) -> None:
        self.vocabulary = byte_vocabulary() if vocabulary is None else vocabulary
        assert self.vocabulary.real_size >= 256, "every byte needs an id"
        specials = [i for i in (BEGIN_ID, END_ID) if i < self.vocabulary.real_size]
        self.bos_id = BEGIN_ID if begin and BEGIN_ID in specials else None
        self.add_bos = self.bos_id is not None
        self.bos_text = self._text(self.bos_id)
        self.eos_text = self._text(END_ID if END_ID in specials else None)
        self.end_ids = frozenset(specials[1:])
        self.hidden_ids = frozenset(specials)
        self.template = template

    @cached_property
    def _pairs(self) -> dict[bytes, int]:
        return {piece: i for i, piece in enumerate(self.vocabulary.pieces) if len(piece) == 2}

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, continued: bool = False
    ) -> list[int]:
        """The ids of `text`; with `special` the texts of special tokens become these. `add_bos` (None: if the model has
        a start token) puts it in front, once. `continued` changes nothing here: no space is glued to a first word."""
        with_bos = self.bos_id is not None and add_bos is not False
        ids = [self.bos_id] if with_bos and self.bos_id is not None else []
        data = text.removeprefix(self.bos_text if with_bos else "").encode()
        specials = sorted(self.hidden_ids) if special else []
        at = 0
        while at < len(data):
            token_id = next((i for i in specials if data.startswith(self.vocabulary.pieces[i], at)), None)
            if token_id is None:
                token_id = self._pairs.get(data[at : at + 2], data[at])
            ids.append(token_id)
            at += len(self.vocabulary.pieces[token_id])
        return ids

    def repeats_bos(self, text: str) -> bool:
        """Whether `text` begins with the text of the start token that is added anyway."""
        return self.add_bos and text.startswith(self.bos_text)

    def close(self) -> None:
        """Nothing is held."""

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.vocabulary.pieces[token_id].decode()
