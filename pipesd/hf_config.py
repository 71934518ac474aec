"""config.json of a Hugging Face folder -> the decoder's shape, or one line that says by name what it cannot do.

The rules and defaults are transformers' own (`LlamaConfig`, `MistralConfig`, `Qwen2Config`, `Qwen3Config` and
`modeling_rope_utils`, version 5), with both spellings of the rotary settings: `rope_parameters`, or `rope_theta` and
`rope_scaling`. What the decoder would silently get wrong is refused. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipesd.contexts import stretched
from pipesd.errors import UsageError
from pipesd.hf_families import named, never_served, other_backend
from pipesd.model_shape import ModelShape, Rope
from pipesd.regular_file import shown

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_FAMILIES = {  # model_type -> what its class is called
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_KNOWN = ", ".join(_FAMILIES)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST = (1 << 31) - 1  # no size of a model reaches it
_MOST_LAYERS = 10_000
_MOST_CONTEXT = 1 << 28
_GREATEST = 1e30  # nor any of its other numbers


class AnotherBackend(UsageError):
    """The plain decoder does not serve the model; another backend may."""


class Settings:
    """The values of one config.json, or of a table in it, each checked for its type and range when it is read."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def refuse(self, what: str, todo: str) -> UsageError:
        return UsageError(f"{self.path}: {what}; {todo}")

    def elsewhere(self, what: str) -> AnotherBackend:
        return AnotherBackend(f"{self.path}: {what}; {other_backend(self.values)}")

    def _wrong(self, key: str, wanted: str) -> UsageError:
        found = f"is '{shown(self.values[key])}'" if key in self.values else "is missing"
        return self.refuse(f"{self._prefix}{key} {found}, {wanted} was wanted", "correct it or download the file again")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """A whole number; `default`, if there is one, where the key is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"a whole number from {least} to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default`, if there is one, where the key is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _GREATEST:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def table(self, key: str) -> Settings | None:
        """The table under `key`; None where it is missing, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return Settings(self.path, value, f"{self._prefix}{key}.")


def read_shape(path: Path, values: Mapping[str, Any]) -> ModelShape:
    """The shape of the model whose config.json at `path` holds `values`. UsageError for what cannot be served here."""
    config = Settings(path, values)
    family = _family(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", {"mistral": 8}.get(family, heads))
    if values.get("num_key_value_heads", 0) is None:
        kv_heads = heads
    head_size = _head_size(config, family, hidden, heads)
    if heads % kv_heads:
        raise config.refuse(f"{heads} heads cannot share {kv_heads} key and value heads", "download the file again")
    layers = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    trained = config.integer("max_position_embeddings", least=2, most=_MOST_CONTEXT)
    rope = _rope(config, trained)
    if rope.kind == "dynamic" and head_size == 2:
        raise config.refuse("has heads of 2 numbers, which dynamic rotary scaling cannot stretch", "use another model")
    context = stretched(trained, rope.original_context, rope.factor) if rope.kind == "yarn" else trained
    if context > _MOST_CONTEXT:
        raise config.refuse(f"rope_scaling makes a context of {context} positions", "correct its factor")
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        feed_forward=config.integer("intermediate_size"),
        width=config.integer("vocab_size"),
        context=context,
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=rope,
        tied=config.flag("tie_word_embeddings", False),
        biases=_biases(config, family),
        head_norms=family == "qwen3",
        windows=_windows(config, family, layers),
    )


def _head_size(config: Settings, family: str, hidden: int, heads: int) -> int:
    """Numbers of a head: as told, or a share of the hidden state; Qwen 3 has a default of its own."""
    if config.values.get("head_dim") is not None:
        size = config.integer("head_dim")
    elif family == "qwen3" and "head_dim" not in config.values:
        size = 128
    elif hidden % heads:
        raise config.refuse(f"hidden_size {hidden} cannot be shared by {heads} heads", "download the file again")
    else:
        size = hidden // heads
    if size % 2:
        raise config.refuse(f"has heads of {size} numbers, an even number was wanted", "correct head_dim")
    return size


def _family(config: Settings) -> str:
    """The model's family, refusing by name what is none of ours or has parts that the decoder does not know."""
    family = config.text("model_type", "")
    if never := never_served(config.values):
        raise config.refuse(*never)
    if not family:
        raise config.refuse(f"does not say its model_type, one of {_KNOWN} was wanted", "use a complete folder")
    if family not in _FAMILIES:
        raise config.elsewhere(f"is {named(family)} model, one of {_KNOWN} was wanted")
    classes = config.values.get("architectures")
    if classes is not None and not isinstance(classes, list):
        raise config.refuse(f"architectures is '{shown(classes)}', a list was wanted", "download the file again")
    if classes and _FAMILIES[family] not in classes:
        wanted = f"{_FAMILIES[family]} was wanted"
        raise config.refuse(f"is {named(classes[0])}, {wanted}", "use a folder of a model that writes text")
    if any(config.values.get(key) for key in _EXPERTS):
        raise config.elsewhere("is a mixture of experts")
    if (activation := config.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise config.elsewhere(f"has the activation {shown(activation)}, silu was wanted")
    return family


def _biases(config: Settings, family: str) -> frozenset[str]:
    attention = config.flag("attention_bias", False) and family in ("llama", "qwen3")
    names = _ATTENTION if attention else _ATTENTION[:3] if family == "qwen2" else ()
    if family == "llama" and config.flag("mlp_bias", False):
        names = (*names, "ffn_gate", "ffn_up", "ffn_down")
    return frozenset(names)


def _windows(config: Settings, family: str, layers: int) -> tuple[int, ...]:
    """How many positions each layer sees, 0 for all; () if all layers see all."""
    if family == "llama":
        return ()
    named = config.values.get("layer_types")
    if named is not None and (not isinstance(named, list) or len(named) != layers):
        raise config.refuse(f"layer_types does not name its {layers} layers", "download the file again")
    kinds = [shown(kind) for kind in named or ()]
    strange = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if strange:
        raise config.elsewhere(f"has layers of {strange}")
    if family == "mistral":
        if len(set(kinds)) > 1:
            raise config.elsewhere("is a mistral model with two kinds of layers (layer_types)")
        if config.values.get("sliding_window", 0) is None:
            return ()
        return (config.integer("sliding_window", 4096),) * layers
    if not config.flag("use_sliding_window", False) or config.values.get("sliding_window", 0) is None:
        if "sliding_attention" in kinds:
            raise config.refuse("has layers of sliding_attention without a sliding_window", "correct layer_types")
        return ()
    window, first = config.integer("sliding_window", 4096), config.integer("max_window_layers", 28, least=0)
    slides = [kind == "sliding_attention" for kind in kinds] or [i >= first for i in range(layers)]
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def _rope(config: Settings, trained: int) -> Rope:
    settings = config.table("rope_scaling") or config.table("rope_parameters") or Settings(config.path, {}, "rope.")
    if any(isinstance(value, dict) for value in settings.values.values()):  # one table for each kind of layer
        tables = [value for value in settings.values.values() if value is not None]
        if any(table != tables[0] for table in tables):
            raise config.elsewhere("has rotary settings that differ from layer to layer")
        settings = Settings(config.path, tables[0], "rope_parameters.")
    if any(key.endswith("_factor") and key.startswith("partial") for key in settings.values):
        partial = settings.positive("partial_rotary_factor", 1.0)
    else:
        partial = config.positive("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise config.elsewhere(f"rotates {partial:g} of each head (partial_rotary_factor)")
    kind = settings.text("rope_type", settings.text("type", "default"))
    rope = Rope(base=settings.positive("rope_theta", config.positive("rope_theta", 10000.0)))
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=settings.positive("factor"))
    if kind == "dynamic":
        return replace(rope, kind="dynamic", factor=settings.positive("factor"), original_context=trained)
    if kind not in ("llama3", "yarn"):
        raise config.elsewhere(f"has {shown(kind)} rotary scaling")
    key = "original_max_position_embeddings"
    original = config.integer(key, settings.integer(key, trained))
    if kind == "llama3":
        low, high = settings.positive("low_freq_factor"), settings.positive("high_freq_factor")
        if low >= high:
            raise config.refuse(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}", "correct it")
        scaling = settings.positive("factor")
        return replace(
            rope, kind="llama3", factor=scaling, original_context=original, low_freq_factor=low, high_freq_factor=high
        )
    factor = settings.positive("factor", trained / original)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=settings.positive("beta_fast", 32.0),
        beta_slow=settings.positive("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
        attention_factor=_attention_factor(settings, factor),
    )


def _attention_factor(settings: Settings, factor: float) -> float:
    """What YaRN multiplies queries and keys by: as told, by the two mscales, or 0.1 ln(factor) + 1."""
    if settings.values.get("attention_factor") is not None:
        return settings.positive("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dims = (settings.values.get(key) for key in ("mscale", "mscale_all_dim"))
    if mscale and all_dims:
        return magnitude(settings.positive("mscale")) / magnitude(settings.positive("mscale_all_dim"))
    return magnitude(1.0)
