"""What a file that is no GGUF model file seems to be, by its first bytes. Standard library only."""

from __future__ import annotations

HEAD_BYTES = 512  # that are looked at
SAFETENSORS = "safetensors (convert it with llama.cpp's convert_hf_to_gguf.py)"
PICKLED = ("a zip or PyTorch archive", "a pickled PyTorch checkpoint")


def kind_of(head: bytes) -> str:
    """What a file seems to be whose first bytes are `head` (HEAD_BYTES, or all it has): "a zip or PyTorch archive".

    GGUF itself is "a GGUF file", whatever is wrong with it behind its first four bytes.
    """
    if not head:
        return "empty (an unfinished download)"
    if head[:4] == b"GGUF":
        return "a GGUF file"
    if head[8:9] == b"{" and head[6:8] == b"\0\0":  # behind the length of a header
        return SAFETENSORS
    if head[:4] == b"PK\x03\x04":
        return PICKLED[0]
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLED[1]
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer (run `git lfs pull`)"
    if head[:4] in (b"ggml", b"lmgg", b"ggjt", b"tjgg", b"fmgg", b"algg"):
        return "an old ggml format"
    if head.lstrip()[:1] == b"<":
        return "a web page (the download failed)"
    if head.lstrip()[:1] == b"{":
        return "a JSON text"
    if not head.strip(b"\0"):
        return "all zeros (an unfinished download)"
    return "something else"
