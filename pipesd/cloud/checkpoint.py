"""Reads a GGUF file of the llama family: hyperparameters, vocabulary, and weights as float32 tensors, one at a time.

A file that cannot be used is refused with one line that names it, says why and what to do. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pipesd.pieces import KINDS, read_pieces
from pipesd.cloud.shape import ModelShape, Rope
from pipesd.core import Vocabulary
from pipesd.errors import UsageError

_SAMPLES = 64  # stretches of each tensor that go into the fingerprint,
_SAMPLE_BYTES = 1024  # of this size each; a tensor no larger than their sum goes in whole


@dataclass(frozen=True)
class Checkpoint:
    """An open file. Tensors are read (memory-mapped) and dequantised on demand."""

    path: Path
    name: str
    shape: ModelShape
    vocabulary: Vocabulary
    end_ids: tuple[int, ...]
    file_dtype: str  # "float32", "float16" or "bfloat16"; quantised files count as bfloat16
    _header: bytes
    _tensors: dict[str, gguf.ReaderTensor]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """GGUF names in file order."""
        return tuple(self._tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes that all tensors have in the file."""
        return sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def tensor_bytes(self, name: str) -> int:
        """Bytes of one tensor in the file, 0 if it has none of that name."""
        return int(self._tensors[name].n_bytes) if name in self._tensors else 0

    def weight(self, name: str) -> Tensor | None:
        """The tensor as float32 on the CPU, (outputs, inputs) or (size,); None if the file has none of that name.

        The rows of `attn_q` and `attn_k` are as this family of files has them: the two halves of a rotary pair next to
        each other.
        """
        if name not in self._tensors:
            return None
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UsageError(
                f"{self.path}: tensor {name} is stored as {tensor.tensor_type.name}, which cannot be read here; "
                "quantise the model to Q4_0 … Q8_0, a K-quant, F16, BF16 or F32"
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def fingerprint(self, dtype: str, device: str) -> bytes:
        """8 bytes that change with the metadata, with samples of any tensor, with precision and kind of device."""
        digest = hashlib.blake2b(self._header, digest_size=8)
        digest.update(f"{dtype} {device}".encode())
        for tensor in self._tensors.values():
            digest.update(_sample(tensor.data.reshape(-1).view(np.uint8)))
        return digest.digest()


def _sample(data: np.ndarray) -> bytes:
    if data.nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return data.tobytes()
    starts = np.linspace(0, data.nbytes - _SAMPLE_BYTES, _SAMPLES, dtype=np.int64)
    return b"".join(data[start : start + _SAMPLE_BYTES].tobytes() for start in starts)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens the GGUF file at `path` (`~` is expanded). UsageError, one line, if it cannot serve as a target."""
    try:
        resolved = Path(path).expanduser().resolve()
        _check_kind(resolved)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a loop of links, no home folder, a NUL
        raise UsageError(f"{os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}; check the path") from error
    try:
        reader = gguf.GGUFReader(resolved)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UsageError(
            f"{resolved}: cut short or damaged ({resolved.stat().st_size} bytes); copy or download it again"
        ) from error
    fields = _Fields(resolved, reader)
    _check_supported(fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    texts, types = fields.tokens()
    shape = _shape(fields, tensors, len(texts))
    _check_tensors(resolved, shape, tensors)
    kind = fields.text("tokenizer.ggml.model", "")
    if kind not in KINDS:
        raise fields.refuse(f"has a {kind or 'missing'} vocabulary", "use a model with a gpt2 (BPE) or llama (SPM) one")
    pieces, end_ids = read_pieces(kind, texts, types, dict(fields.special_ids()))
    return Checkpoint(
        path=resolved,
        name=fields.text("general.name", resolved.stem),
        shape=shape,
        vocabulary=Vocabulary(pieces + (b"",) * (shape.width - len(pieces))),
        end_ids=end_ids,
        file_dtype=_file_dtype(tensors),
        _header=bytes(reader.data[: reader.data_offset]),
        _tensors=tensors,
    )


_WANTED = "a GGUF file was wanted"


def _check_kind(path: Path) -> None:
    """Refuses what is not a GGUF file at all, by its first bytes."""
    if not path.exists():
        raise UsageError(f"{path}: no such file; check the path")
    if path.is_dir():
        if (path / "config.json").exists():
            raise UsageError(f"{path}: Hugging Face folders are not read yet; convert it with convert_hf_to_gguf.py")
        raise UsageError(f"{path}: a directory, {_WANTED}; name the file in it")
    if not path.is_file():
        raise UsageError(f"{path}: not a regular file, {_WANTED}")
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not start:
        raise UsageError(f"{path}: empty, {_WANTED}; copy or download it again")
    if start[:4] == b"GGUF":
        return
    if start[8:9] == b"{":
        found = "a safetensors file"
    elif start[:2] == b"PK" or start[:1] == b"\x80":
        found = "a pickled PyTorch checkpoint (never opened: it could run code)"
    elif start[:4] in (b"ggml", b"lmgg", b"ggjt", b"tjgg", b"fmgg"):
        found = "a GGML file from before GGUF"
    else:
        found = "not a GGUF file"
    raise UsageError(f"{path}: {found}, {_WANTED}; convert the model with llama.cpp's convert_hf_to_gguf.py")


class _Fields:
    """Typed access to the metadata of one file."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields
        self.architecture = self.text("general.architecture", "")

    def refuse(self, what: str, todo: str) -> UsageError:
        return UsageError(f"{self.path}: {what}; {todo}")

    def _value(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def text(self, key: str, default: str) -> str:
        value = self._value(key)
        return value if isinstance(value, str) else default

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(f"{self.architecture}.{key}")
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or value < 0:
            found = "is missing" if value is None else f"is {str(value)[:40]!r}"
            raise self.refuse(f"{self.architecture}.{key} {found}, one number was wanted", "convert the model anew")
        return value

    def tokens(self) -> tuple[list[str], list[int]]:
        field = self._fields.get("tokenizer.ggml.tokens")
        if field is None:
            raise self.refuse("has no vocabulary (tokenizer.ggml.tokens)", "use a complete model")
        # GGUFReader.contents() would refuse a text that is not UTF-8; llama.cpp does not
        texts = [bytes(field.parts[i]).decode("utf-8", "replace") for i in field.data]
        types = self._value("tokenizer.ggml.token_type") or [1] * len(texts)
        if len(types) < len(texts):
            raise self.refuse(f"has {len(types)} token types for {len(texts)} tokens", "convert the model anew")
        return texts, types[: len(texts)]

    def special_ids(self) -> Iterator[tuple[str, int]]:
        prefix = "tokenizer.ggml."
        for key in self._fields:
            if key.startswith(prefix) and key.endswith("_token_id"):
                yield key[len(prefix) :], int(self._value(key))


def _check_supported(fields: _Fields) -> None:
    """Refuses by name what this decoder would silently get wrong."""
    if fields.architecture != "llama":
        raise fields.refuse(f"is a {fields.architecture or 'nameless'} model", "use one of the llama architecture")
    if fields._value("split.count") not in (None, 0, 1):
        raise fields.refuse("is one part of several", "join them with llama-gguf-split --merge")
    for key, what in (
        ("expert_count", "a mixture of experts"),
        ("attention.sliding_window", "sliding-window attention"),
        ("attention.scale", "an attention scale of its own"),
    ):
        if fields.number(key, 0):
            raise fields.refuse(f"has {what} (llama.{key})", "use a dense llama model")
    scaling = fields.text("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise fields.refuse(f"has {scaling} rope scaling", "use a model with linear scaling, factors or none")


def _shape(fields: _Fields, tensors: dict[str, gguf.ReaderTensor], tokens: int) -> ModelShape:
    hidden, heads = int(fields.number("embedding_length")), int(fields.number("attention.head_count"))
    if "token_embd.weight" not in tensors:
        raise fields.refuse("has no tensor token_embd.weight", "use a complete model, not a vocabulary alone")
    rope = Rope(base=fields.number("rope.freq_base", 10000.0))
    if fields.text("llama.rope.scaling.type", "none") == "linear":
        rope = replace(rope, kind="linear", factor=fields.number("rope.scaling.factor", 1.0))
    shape = ModelShape(
        family="llama",
        layers=int(fields.number("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(fields.number("attention.head_count_kv", heads)),
        head_size=int(fields.number("attention.key_length", hidden // max(heads, 1))),
        feed_forward=int(fields.number("feed_forward_length")),
        width=int(tensors["token_embd.weight"].shape[1]),
        context=int(fields.number("context_length")),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied="output.weight" not in tensors,
    )
    sizes = {name: value for name, value in vars(shape).items() if type(value) in (int, float)}
    sizes |= {"rope_base": rope.base, "rope_factor": rope.factor}
    wrong = next((name for name, value in sizes.items() if not 0 < value < inf), None)
    wrong = wrong or ("context" if shape.context < 2 else None)  # a prompt and a token behind it
    if wrong or shape.heads % shape.kv_heads or shape.head_size % 2:
        raise fields.refuse(f"has sizes that do not fit each other ({wrong or 'heads'})", "convert the model anew")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.number(key, shape.head_size) != shape.head_size:
            raise fields.refuse(f"llama.{key} is not the head size {shape.head_size}", "use another llama model")
    if tokens > shape.width:
        raise fields.refuse(f"has {tokens} tokens and {shape.width} rows of embeddings", "convert the model anew")
    return shape


def _expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> (outputs, inputs) of every tensor that the decoder reads."""
    hidden, query, key = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    layer = {
        "attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (key, hidden), "attn_v": (key, hidden),
        "attn_output": (hidden, query), "ffn_norm": (hidden,), "ffn_gate": (shape.feed_forward, hidden),
        "ffn_up": (shape.feed_forward, hidden), "ffn_down": (hidden, shape.feed_forward),
    }  # fmt: skip
    layers = {f"blk.{i}.{name}.weight": size for i in range(shape.layers) for name, size in layer.items()}
    return {"token_embd.weight": (shape.width, hidden), "output_norm.weight": (hidden,)} | layers


def _check_tensors(path: Path, shape: ModelShape, tensors: dict[str, gguf.ReaderTensor]) -> None:
    expected = _expected(shape)
    optional = {"output.weight": (shape.width, shape.hidden), "rope_freqs.weight": (shape.head_size // 2,)}
    for name, size in (expected | {name: size for name, size in optional.items() if name in tensors}).items():
        if name not in tensors:
            raise UsageError(f"{path}: has no tensor {name}; use a complete llama model")
        found = tuple(reversed(tensors[name].shape.tolist()))
        if found != size:
            raise UsageError(f"{path}: tensor {name} is {found}, {size} was wanted; convert the model anew")
    strange = next((name for name in tensors if name not in expected and name not in optional), None)
    if strange is not None:
        raise UsageError(f"{path}: has a tensor that this decoder does not use, {strange}; use a plain llama model")


def _file_dtype(tensors: dict[str, gguf.ReaderTensor]) -> str:
    kind = tensors["blk.0.attn_q.weight"].tensor_type
    return {gguf.GGMLQuantizationType.F32: "float32", gguf.GGMLQuantizationType.F16: "float16"}.get(kind, "bfloat16")
