"""How many positions a model is served for: what YaRN adds, and what a config.json of any family says."""

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
    """Positions that the model is served for, those that YaRN adds included; 0 where `config` does not say. A part for
    text (`text_config`) speaks where the whole does not. What is out of range counts as not said.

    LongRoPE ends at the original context: beyond it all angles change, those in cached keys do not.
    """
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        trained = int(next((found for key in _KEYS if (found := _number(table.get(key))) and found > 1), 0))
        if trained:
            return _scaled(table, trained)
    return 0


def _scaled(config: Mapping[str, Any], trained: int) -> int:
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return trained
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]  # or one for each kind of layer
    by_kind = {str(table.get("rope_type", table.get("type"))): table for table in tables}
    if table := by_kind.get("longrope") or by_kind.get("su"):
        return int(min(trained, _original(config, table) or trained))
    if table := by_kind.get("yarn"):
        original = _original(config, table) or trained
        context = stretched(trained, original, _number(table.get("factor")) or trained / original)
        return context if context <= _GREATEST else trained
    return trained


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    return _number(config.get(_ORIGINAL)) or _number(rope.get(_ORIGINAL))


def _number(value: Any) -> float:
    """The number, if it is one from above 0 to the greatest context there is; else 0."""
    return value if type(value) in (int, float) and 0 < value <= _GREATEST else 0
