"""The sizes and kinds that make one decoder out of the family, whatever file they were read from. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """How positions become angles. What a kind does not use stays at its default."""

    base: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # positions that the model was trained for before scaling (dynamic, llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: its bounds are rounded to whole pairs
    attention_factor: float = 1.0  # queries and keys are multiplied by it


@dataclass(frozen=True)
class CacheShape:
    """Sizes that do not change while a cache of keys and values lives. `context` is the most positions of one slot."""

    layers: int
    kv_heads: int
    groups: int  # query heads per kv head
    head_size: int
    context: int
    windows: tuple[int, ...] = ()  # as in ModelShape

    def window(self, layer: int) -> int:
        """How many positions a row sees in `layer`, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True)
class ModelShape:
    """Hyperparameters of a checkpoint."""

    family: str  # "llama", "mistral", "qwen2" or "qwen3"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    width: int  # of the output layer
    context: int  # positions that the model was trained for
    norm_eps: float
    rope: Rope = field(default_factory=Rope)
    tied: bool = False  # the embeddings serve as output layer
    biases: frozenset[str] = frozenset()  # matrices of a layer that have a bias, as "attn_q"
    head_norms: bool = False  # queries and keys are normalised head by head (attn_q_norm, attn_k_norm)
    windows: tuple[int, ...] = ()  # per layer: how many positions a row sees, itself included; 0: all. Empty: all

    @property
    def groups(self) -> int:
        """Query heads per key and value head."""
        return self.heads // self.kv_heads

    def cache(self, context: int) -> CacheShape:
        """Sizes of the cache for this model."""
        return CacheShape(self.layers, self.kv_heads, self.groups, self.head_size, context, self.windows)
