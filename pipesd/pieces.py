"""What llama.cpp makes of a GGUF vocabulary: the bytes of each id and the ids that end a generation.

The edge asks llama.cpp itself, the cloud has only the file, and both must come to the same answer: these are the rules
of llama.cpp's `llama_vocab::impl::load` and `token_to_piece(special = true)`, for byte-level BPE ("gpt2") and
SentencePiece ("llama") vocabularies. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # token types of the file; 1 is a normal token
KINDS = ("gpt2", "llama")
_RAW = frozenset({UNKNOWN, CONTROL, USER_DEFINED})  # their text is their piece

# Texts that llama.cpp takes for a special token where the file names none, the key under which a file names it, and
# whether the token ends a generation.
_SPECIAL: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("eot_token_id", True, (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>")),
    ("eom_token_id", True, ("<|eom_id|>",)),
    ("fim_pad_token_id", True, ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", True, ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", True, ("<|file_sep|>",)),
    ("fim_pre_token_id", False, (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>")),
    ("fim_suf_token_id", False, (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>")),
    ("fim_mid_token_id", False, (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>")),
)  # fmt: skip
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
_DEFAULT_EOS = {"gpt2": 11, "llama": 2}


def read_pieces(
    kind: str, texts: Sequence[str], types: Sequence[int], special_ids: Mapping[str, int]
) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Returns the bytes of each id and the sorted end ids.

    `kind` is one of KINDS, `types` the file's token types, `special_ids` its entries `tokenizer.ggml.*_token_id`
    without that prefix ("eos_token_id").
    """
    assert kind in KINDS and len(types) == len(texts)
    types = list(types)
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(texts)}
    special = {key: i for key, i in special_ids.items() if 0 <= i < len(texts)}
    ends = set()
    for key, ends_generation, candidates in _SPECIAL:
        found = special.get(key, min((ids[text] for text in candidates if text in ids), default=None))
        if found is not None and key not in special:
            types[found] = CONTROL
        if found is not None and ends_generation:
            ends.add(found)
    for text in _ENDS:
        if text in ids:
            types[ids[text]] = CONTROL
            ends.add(ids[text])
    eos = special.get("eos_token_id", _DEFAULT_EOS[kind])
    if eos < len(texts):
        ends.add(eos)
    _keep_speaking(ids, types, ends)
    decode = _decode_bpe if kind == "gpt2" else _decode_spm
    return tuple(_piece(text, type_, decode) for text, type_ in zip(texts, types, strict=True)), tuple(sorted(ends))


def _keep_speaking(ids: Mapping[str, int], types: list[int], ends: set[int]) -> None:
    """Two families have a token that ends elsewhere and does not end with them."""

    def ending(*texts: str) -> bool:
        return any(ids.get(text) in ends for text in texts)

    if ending("<|end|>") and ending("<|call|>", "<|calls|>") and ending("<|return|>", "<|flush|>"):
        ends.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = USER_DEFINED
    if ending("</s>") and ending("<|tool_response>", "<|plamo:eos|>"):
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = 1


def _piece(text: str, type_: int, decode: Callable[[str], bytes]) -> bytes:
    if type_ in _RAW:
        return text.encode()
    if type_ == 1:
        return decode(text)
    if type_ == BYTE:
        return bytes([int(text[3:5], 16)])  # "<0x0A>"
    return b""


def _decode_spm(text: str) -> bytes:
    return text.replace("▁", " ").encode()


def _decode_bpe(text: str) -> bytes:
    table = byte_of_symbol()
    return b"".join(
        bytes([table[c]]) if c in table else f"[UNK_BYTE_0x{c.encode().hex()}{text}]".encode() for c in text
    )


@cache
def byte_of_symbol() -> dict[str, int]:
    """The byte that each character of a byte-level BPE text stands for (GPT-2's table)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
