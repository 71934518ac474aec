"""Reads a GGUF file, or the parts of a split one, as a checkpoint: llama, qwen2 and qwen3.

What this decoder would silently get wrong is refused by name. Keys: ggml's docs/gguf.md and llama.cpp's `llama-arch`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesd.cloud.checkpoint import Checkpoint, check_tensors
from pipesd.contexts import stretched
from pipesd.core import Vocabulary
from pipesd.errors import UsageError
from pipesd.gguf_layout import GgufLayout
from pipesd.gguf_parts import read_parts
from pipesd.model_shape import ModelShape, Rope
from pipesd.pieces import KINDS, read_pieces

if TYPE_CHECKING:
    from pipesd.cloud.gguf_tensor import GgufTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HALVES_APART = ("qwen2", "qwen3")  # rotary pairs are half a head apart in files of these
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk](_norm)?\.(weight|bias)")
_BIAS = re.compile(r"blk\.0\.(attn_q|attn_k|attn_v|attn_output|ffn_gate|ffn_up|ffn_down)\.bias")
_VOCABULARY_ARRAYS = frozenset({"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"})
_PLAIN = "use a plain llama, qwen2 or qwen3 model"


def open_gguf(path: Path) -> Checkpoint:
    """Opens the GGUF file at `path`, any part of a split one. UsageError, one line, if it cannot serve as a target."""
    from pipesd.cloud.gguf_tensor import stored_tensor

    parts = read_parts(path, keep=_VOCABULARY_ARRAYS)
    fields = _Fields(parts[0])
    _check_kind(fields, sum(len(part.tensors) for part in parts))
    _check_supported(fields)
    head_size = int(fields.head_size) if fields.architecture in _HALVES_APART else 0
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, place in part.tensors.items():
            rotated = head_size if _ROTATED.fullmatch(name) else 0
            if rotated and place.shape[0] % rotated:
                raise fields.refuse(f"tensor {name} of shape {place.shape} is not made of whole heads of {rotated}")
            if name in tensors:
                raise UsageError(f"{part.path}: has tensor {name} of an earlier part again; download the parts again")
            tensors[name] = stored_tensor(part.path, part.file_bytes, name, place, rotated)
    texts, types = fields.tokens()
    shape = _shape(fields, tensors, len(texts))
    check_tensors(fields.path, shape, tensors)
    kind = fields.text("tokenizer.ggml.model", "")
    if kind not in KINDS:
        raise fields.refuse(f"has a {kind or 'missing'} vocabulary", "use a model with a gpt2 (BPE) or llama (SPM) one")
    try:
        pieces, end_ids = read_pieces(kind, texts, types, dict(fields.special_ids()))
    except ValueError as error:
        raise fields.refuse(f"has a vocabulary that cannot be read ({error})") from error
    return Checkpoint(
        path=path,
        name=fields.text("general.name", parts[0].path.stem),
        shape=shape,
        vocabulary=Vocabulary(pieces + (b"",) * (shape.width - len(pieces))),
        end_ids=end_ids,
        header=hashlib.blake2b(b"".join(part.digest for part in parts)).digest(),
        tensors=tensors,
        files=len(parts),
    )


class _Fields:
    """Typed access to the metadata of one file."""

    def __init__(self, layout: GgufLayout) -> None:
        self.path = layout.path
        self.values = layout.values
        self.architecture = self.text("general.architecture", "")

    def refuse(self, what: str, todo: str = "convert the model anew") -> UsageError:
        return UsageError(f"{self.path}: {what}; {todo}")

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else default

    def value(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or not 0 <= value < inf:
            found = "is missing" if value is None else f"is {str(value)[:40]!r}"
            raise self.refuse(f"{self.architecture}.{key} {found}, one number was wanted")
        return value

    @property
    def head_size(self) -> float:
        per_head = self.number("embedding_length") // max(self.number("attention.head_count"), 1)
        size = self.number("attention.key_length", per_head)
        if size < 2 or size % 2:
            raise self.refuse(f"has attention heads of size {size:g}, an even one was wanted")
        return size

    def tokens(self) -> tuple[list[str], list[int]]:
        texts = self.values.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.refuse("has no vocabulary (tokenizer.ggml.tokens)", "use a complete model")
        types = self.values.get("tokenizer.ggml.token_type") or [1] * len(texts)
        if not isinstance(types, list) or len(types) < len(texts):
            raise self.refuse(f"has {len(types) if isinstance(types, list) else 0} token types for {len(texts)} tokens")
        return texts, types[: len(texts)]

    def special_ids(self) -> Iterator[tuple[str, int]]:
        prefix = "tokenizer.ggml."
        for key, value in self.values.items():
            if key.startswith(prefix) and key.endswith("_token_id") and isinstance(value, int):
                yield key[len(prefix) :], value


def _check_kind(fields: _Fields, tensors: int) -> None:
    """Refuses GGUF files that are no language model."""
    kind = fields.text("general.type", "model")
    if kind == "adapter" or any(key.startswith("adapter.") for key in fields.values):
        raise fields.refuse("is an adapter (LoRA), not a model", "merge it with its model and give that")
    if kind == "mmproj" or fields.architecture == "clip":
        raise fields.refuse("is a projector of images or sound (mmproj), not a model", "give the model beside it")
    if kind == "imatrix" or any(key.startswith("imatrix.") for key in fields.values):
        raise fields.refuse("is an importance matrix for quantising, not a model", "give the model")
    if not tensors:
        raise fields.refuse("is a vocabulary alone, without weights", "give a complete model")
    if fields.architecture not in ARCHITECTURES:
        raise fields.refuse(
            f"is a {fields.architecture or 'nameless'} model", f"this decoder runs {', '.join(ARCHITECTURES)}"
        )


def _check_supported(fields: _Fields) -> None:
    """Refuses by name what this decoder would silently get wrong."""
    for key, what in (
        ("expert_count", "a mixture of experts"),
        ("attention.scale", "an attention scale of its own"),
        ("attention.clamp_kqv", "clamped queries, keys and values"),
        ("rope.scaling.yarn_log_multiplier", "a YaRN multiplier of its own"),
        ("pooling_type", "one result for a whole text, as models for embedding and reranking have"),
    ):
        if fields.number(key, 0):
            raise fields.refuse(f"has {what} ({fields.architecture}.{key})", _PLAIN)
    if fields.value("attention.causal") is False:
        raise fields.refuse(f"looks ahead ({fields.architecture}.attention.causal is false)", _PLAIN)
    if fields.value("rope.dimension_sections") is not None:
        raise fields.refuse(f"has several positions a token ({fields.architecture}.rope.dimension_sections)", _PLAIN)


def _shape(fields: _Fields, tensors: Mapping[str, GgufTensor], tokens: int) -> ModelShape:
    hidden, heads = int(fields.number("embedding_length")), int(fields.number("attention.head_count"))
    if "token_embd.weight" not in tensors:
        raise fields.refuse("has no tensor token_embd.weight", "use a complete model")
    biases = (_BIAS.fullmatch(name) for name in tensors)
    context, layers = int(fields.number("context_length")), int(fields.number("block_count"))
    rope = _rope(fields, context)
    if rope.kind == "yarn":
        context = stretched(context, rope.original_context, rope.factor)
    shape = ModelShape(
        family=fields.architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(fields.number("attention.head_count_kv", heads)),
        head_size=int(fields.head_size),
        feed_forward=int(fields.number("feed_forward_length")),
        width=tensors["token_embd.weight"].shape[0],
        context=context,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied="output.weight" not in tensors,
        biases=frozenset(found[1] for found in biases if found),
        head_norms="blk.0.attn_q_norm.weight" in tensors,
        windows=_windows(fields, layers, context),
    )
    sizes = {name: value for name, value in vars(shape).items() if type(value) in (int, float)}
    wrong = next((name for name, value in sizes.items() if not 0 < value < inf), None)
    wrong = wrong or ("context" if shape.context < 2 else None)  # a prompt and a token behind it
    if wrong or shape.heads % shape.kv_heads:
        raise fields.refuse(f"has sizes that do not fit each other ({wrong or 'heads'})")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.number(key, shape.head_size) != shape.head_size:
            raise fields.refuse(f"{fields.architecture}.{key} is not the head size {shape.head_size}", _PLAIN)
    if tokens > shape.width:
        raise fields.refuse(f"has {tokens} tokens and {shape.width} rows of embeddings")
    return shape


def _windows(fields: _Fields, layers: int, context: int) -> tuple[int, ...]:
    """The window of each layer. A llama file with one has it in all of them, as Mistral's models do."""
    window = int(fields.number("attention.sliding_window", 0))
    if not window or window >= context:  # a window as wide as the context hides nothing
        return ()
    key = f"{fields.architecture}.attention.sliding_window"
    if fields.architecture != "llama" or fields.value("attention.sliding_window_pattern") is not None:
        raise fields.refuse(f"does not say clearly which layers have its sliding window ({key} {window})", _PLAIN)
    return (window,) * layers


def _rope(fields: _Fields, context: int) -> Rope:
    """llama.cpp's reading of the keys: a factor alone is linear scaling, and `attn_factor` multiplies YaRN's own."""
    base = fields.number("rope.freq_base", 10000.0)
    kind = fields.text(f"{fields.architecture}.rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    if base <= 1:
        raise fields.refuse("has sizes that do not fit each other (rope.freq_base)")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return Rope(base=base, attention_factor=attention)
    if kind == "linear":
        return Rope(base=base, kind="linear", factor=factor, attention_factor=attention)
    if kind != "yarn":
        raise fields.refuse(f"has {kind} rope scaling", "use a model with linear or YaRN scaling, rope factors or none")
    if fields.value("rope.scaling.yarn_ext_factor") not in (None, -1.0, 1.0):
        raise fields.refuse(f"mixes YaRN otherwise ({fields.architecture}.rope.scaling.yarn_ext_factor)", _PLAIN)
    original = int(fields.number("rope.scaling.original_context_length", context))
    if not original:
        raise fields.refuse("has sizes that do not fit each other (rope.scaling.original_context_length)")
    return Rope(
        base=base,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * (0.1 * log(factor) + 1.0 if factor > 1.0 else 1.0),
    )
