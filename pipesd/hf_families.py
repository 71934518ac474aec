"""Which models no backend serves, by what config.json or a GGUF file calls them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipesd.regular_file import shown

# Their layers keep a state that is a mixture of all that was read, so a refused draft cannot be taken back.
_RECURRENT = frozenset(
    """arwkv7 bailinghybrid bamba falconh1 falconmamba granitehybrid granitemoehybrid jamba kimilinear lfm2 lfm2moe
    lfm3 mamba mamba2 minimax nemotronh nemotronhmoe olmohybrid plamo2 qwen35 qwen35moe qwen35moetext qwen35text
    qwen3next recurrentgemma rwkv rwkv5 rwkv6 rwkv6qwen2 rwkv7 xlstm zamba zamba2 zaya""".split()
)
_MIXED = ("granitemoehybrid",)  # families with models that have layers of attention alone
_ATTENTION = ("attention", "full_attention", "sliding_attention")  # names of such layers
_PARTS = ("vision_config", "audio_config", "text_config")  # a model that wraps another
_WRITES_TEXT = (
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "llama4",
)  # that transformers also runs as a decoder of text alone
MAY = "--backend transformers may serve it"


def named(name: object) -> str:
    """A name from a file with its article."""
    text = shown(name)
    return f"{'an' if text[:1].lower() in 'aeiou' else 'a'} {text}"


def is_recurrent(family: str) -> bool:
    """Whether models of that name keep a state; `family` is a model_type, or a GGUF architecture."""
    return family.lower().replace("-", "").replace("_", "").replace(".", "") in _RECURRENT


def attends_alone(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json has layers of attention alone, though its family has others too."""
    layers = config.get("layer_types")
    return (
        config.get("model_type") in _MIXED
        and isinstance(layers, list)
        and len(layers) > 0
        and all(layer in _ATTENTION for layer in layers)
    )


def never_served(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why no backend serves the model of a config.json, and what to do; None where one may."""
    kind = config.get("model_type")
    family = kind if isinstance(kind, str) else ""
    if is_recurrent(family) and not attends_alone(config):
        return (
            f"is {named(family)} model, which keeps a state that cannot take a refused draft back, and is not served",
            "use a model that caches keys and values alone",
        )
    if any(config.get(part) for part in _PARTS) and family not in _WRITES_TEXT:
        what = "a part for images or sound, or a wrapper of a model,"
        return (f"is {named(family or 'nameless')} model with {what} and is not served", "use a model of text alone")
    if config.get("is_encoder_decoder") is True:
        return (f"is {named(family or 'nameless')} model with an encoder and is not served", "use a causal decoder")
    if config.get("quantization_config"):
        table = config["quantization_config"]
        method = shown((table.get("quant_method") if isinstance(table, dict) else None) or "an unnamed method")
        return (
            f"is quantised by {method}, which no backend reads",
            "use the folder that it was made from, or a GGUF file",
        )
    return None


def other_backend(config: Mapping[str, Any]) -> str:
    """What to say of the other backend where the plain decoder does not know the family."""
    if config.get("model_type") in _WRITES_TEXT:
        return f"{MAY}, its text alone"
    if config.get("auto_map"):
        return f"{MAY} if transformers itself knows it: code in a folder is never run"
    return f"{MAY} if it is a plain causal decoder"
