"""How many positions a model is made for: what YaRN adds, and what a config.json of any family says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_ORIGINAL = "original_max_position_embeddings"
_GREATEST = 1 << 28  # no model's context reaches it
_ENDLESS = 1 << 62  # whatever damaged files multiply, a context stays a whole number


def stretched(trained: int, original: float, factor: float) -> int:
    """The context that YaRN makes of `original` positions; never less than `trained`, what the config itself says."""
    return max(trained, int(min(original * factor, _ENDLESS)))


def stated_context(config: Mapping[str, Any]) -> int:
    """Positions that the model is made for, those that YaRN adds included; 0 where `config` does not say. A part for
    text (`text_config`) speaks where the whole does not. What is out of range counts as not said."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        trained = int(next((found for key in _KEYS if (found := _number(table.get(key))) and found > 1), 0))
        if trained:
            return _with_yarn(table, trained)
    return 0


def _with_yarn(config: Mapping[str, Any], trained: int) -> int:
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return trained
    rope = next((table for table in rope.values() if isinstance(table, dict)), rope)  # one for each kind of layer
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return trained
    original = _number(config.get(_ORIGINAL)) or _number(rope.get(_ORIGINAL)) or trained
    context = stretched(trained, original, _number(rope.get("factor")) or trained / original)
    return context if context <= _GREATEST else trained


def _number(value: Any) -> float:
    """The number, if it is one from above 0 to the greatest context there is; else 0."""
    return value if type(value) in (int, float) and 0 < value <= _GREATEST else 0
