"""A GGUF file opened by llama.cpp, and what it says of text: vocabulary, tokeniser, end ids, chat template.

`Weights` is one load, whole or of the vocabulary alone (a tenth of a second); `Tokeniser` reads from it. The drafter
shares its own load with its tokeniser; an edge that never drafts opens the vocabulary only.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from pipesd.core import Vocabulary
from pipesd.edge.gguf_header import GgufHeader, read_header
from pipesd.edge.llama import log, native
from pipesd.edge.trial import try_model
from pipesd.errors import UsageError

_NO_VOCABULARY, _SENTENCEPIECE = 0, 1  # enum llama_vocab_type
_UNKNOWN, _CONTROL = 1, 8  # enum llama_token_attr


class Weights:
    """A model file loaded by llama.cpp. `handle` is llama.cpp's pointer, valid until `close`."""

    def __init__(self, path: str | os.PathLike[str], *, vocab_only: bool, gpu_layers: int = 0) -> None:
        """Raises `UsageError`, one line with the resolved path, for anything but a decoder that llama.cpp can load."""
        self.header: GgufHeader = read_header(path)
        self.path = self.header.path
        _check_kind(self.header)
        try_model(self.path, vocab_only=vocab_only)
        llama = native()
        parameters = llama.llama_model_default_params()
        parameters.vocab_only = vocab_only
        parameters.n_gpu_layers = gpu_layers
        if gpu_layers and not llama.llama_supports_gpu_offload():
            raise UsageError(
                f"--gpu-layers {gpu_layers}: this build of llama-cpp-python has no GPU support; leave the option out"
            )
        log.forget()
        self.handle: Any = llama.llama_model_load_from_file(os.fsencode(self.path), parameters)
        if not self.handle:
            raise UsageError(
                f"{self.path}: llama.cpp cannot load it ({log.complaint()}); "
                f"check that the file is whole and that its architecture ({self.header.architecture}) is supported"
            )
        # freed by hand, at garbage collection or at exit, whichever comes first, and once
        self._free = weakref.finalize(self, llama.llama_model_free, self.handle)
        if llama.llama_model_has_encoder(self.handle) or not llama.llama_model_has_decoder(self.handle):
            self._refuse("is an encoder or needs one")
        if llama.llama_model_is_diffusion(self.handle):
            self._refuse("is a diffusion model")

    def _refuse(self, what: str) -> None:
        self.close()
        raise UsageError(f"{self.path}: {self.header.name} {what}, wanted a plain decoder; give another draft model")

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        """Free the model; may be called again. Contexts made from it must be gone."""
        self._free()


def _check_kind(header: GgufHeader) -> None:
    """Files that are GGUF, but no language model that predicts the next id."""
    kind, architecture = header.values.get("general.type", "model"), header.architecture
    if kind != "model" or architecture == "clip":
        told = "a part for images or sound" if architecture == "clip" or kind == "mmproj" else f"of the kind {kind!r}"
        raise UsageError(f"{header.path}: is {told}, not a language model; give the model's own GGUF file")
    if not architecture:
        raise UsageError(f"{header.path}: does not say its architecture; give a GGUF language model")
    if header.values.get(f"{architecture}.attention.causal") is False:
        raise UsageError(f"{header.path}: {header.name} is an embedding model, wanted a decoder; give another")
    if not header.vocabulary_size:
        raise UsageError(f"{header.path}: has no tokeniser in it; convert the model again with its tokeniser")


class Tokeniser:
    """Text to ids and the facts around it, of one GGUF file.

    Attributes: `vocabulary` (the bytes of every id), `end_ids` (every id that ends a generation), `hidden_ids` (ids
    that show nothing in a text: control, unknown and end ids), `bos_id` (None: the model has none), `add_bos` (whether
    the model wants it in front of a prompt), `add_space_prefix` (a SentencePiece model that glues a space to a text's
    first word), `template` (the chat template, or None), `name`.
    """

    def __init__(self, weights: Weights) -> None:
        llama = native()
        self._weights = weights
        self._handle = handle = llama.llama_model_get_vocab(weights.handle)
        self.name = weights.header.name
        kind = llama.llama_vocab_type(handle)
        if kind == _NO_VOCABULARY:
            raise UsageError(f"{weights.path}: has no tokeniser in it; convert the model again with its tokeniser")
        width = llama.llama_vocab_n_tokens(handle)
        self.vocabulary = Vocabulary(tuple(_pieces(llama, handle, width)))
        if not self.vocabulary.real_size:
            raise UsageError(f"{weights.path}: no id of its vocabulary has a text; convert the model again")
        self.end_ids = frozenset(i for i in range(width) if llama.llama_vocab_is_eog(handle, i))
        self.hidden_ids = self.end_ids | {
            i for i in range(width) if llama.llama_vocab_get_attr(handle, i) & (_UNKNOWN | _CONTROL)
        }
        bos = llama.llama_vocab_bos(handle)
        # where a file names none, llama.cpp guesses; only for SentencePiece is the guess a start id
        named = weights.header.values.get("tokenizer.ggml.bos_token_id", bos if kind == _SENTENCEPIECE else None)
        self.bos_id: int | None = bos if bos == named and bos >= 0 else None
        self.add_bos = bool(llama.llama_vocab_get_add_bos(handle)) and self.bos_id is not None
        said = weights.header.values.get("tokenizer.ggml.add_space_prefix", True)
        self.add_space_prefix = kind == _SENTENCEPIECE and bool(said)
        template = llama.llama_model_chat_template(weights.handle, None)
        self.template: str | None = template.decode("utf-8", "replace") if template else None
        eos = weights.header.values.get("tokenizer.ggml.eos_token_id")
        self.bos_text = self._text(self.bos_id)
        self.eos_text = self._text(eos)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Tokeniser:
        """The tokeniser of the GGUF file at `path`, without its weights; `close` it."""
        return cls(Weights(path, vocab_only=True))

    def close(self) -> None:
        """Free the model behind it; may be called again. What was read stays, `encode` does not."""
        self._weights.close()

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, continued: bool = False
    ) -> list[int]:
        """The ids of `text`. `special`: texts of control ids become those ids; else they are plain text.

        `add_bos` (None: as the model wants) puts the start id in front. It is never there twice: the start id's own
        text at the beginning of `text` counts as it (`repeats_bos` tells, for a warning). `continued`: other text goes
        before it, so no space is glued to its first word. Raises `UsageError` for a text that is not Unicode.
        """
        if self._weights.closed:
            raise UsageError(f"the tokeniser of {self.name} is closed; open it again")
        with_bos = (self.add_bos if add_bos is None else add_bos) and self.bos_id is not None
        if with_bos:
            text = text.removeprefix(self.bos_text)
        if continued and self.add_space_prefix:
            # the space goes to a line break put in front, which such a vocabulary never merges with what follows
            ids = self._ids("\n" + text, special)[len(self._ids("\n", special)) :]
        else:
            ids = self._ids(text, special)
        return [self.bos_id, *ids] if with_bos and self.bos_id is not None else ids

    def _ids(self, text: str, special: bool) -> list[int]:
        llama, data = native(), _utf8(text)
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = llama.llama_tokenize(self._handle, data, len(data), ids, len(ids), False, special)
        if count < 0:  # more ids than bytes; it says how many
            ids = (ctypes.c_int32 * -count)()
            count = llama.llama_tokenize(self._handle, data, len(data), ids, len(ids), False, special)
        return ids[:count]

    def repeats_bos(self, text: str) -> bool:
        """Whether `text` begins with the text of a start id that the model wants added anyway."""
        return self.add_bos and text.startswith(self.bos_text)

    def _text(self, token_id: int | None) -> str:
        if token_id is None or not 0 <= token_id < self.vocabulary.size:
            return ""
        return self.vocabulary.pieces[token_id].decode("utf-8", "replace")


def _pieces(llama: Any, handle: Any, width: int) -> list[bytes]:
    """The bytes of each id, special ids as their text; b"" for one that llama.cpp gives no text."""
    pieces: list[bytes] = []
    buffer = ctypes.create_string_buffer(128)
    for token_id in range(width):
        length = llama.llama_token_to_piece(handle, token_id, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = llama.llama_token_to_piece(handle, token_id, buffer, len(buffer), 0, True)
        pieces.append(buffer.raw[:length])
    return pieces


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise UsageError(
            f"the text holds {text[at]!r} at character {at}, which is no Unicode character; give it in UTF-8"
        ) from error
