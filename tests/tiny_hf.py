"""Writes tiny random Hugging Face folders of each family, with the vocabulary of `tests/tiny.py`.

A tiny GGUF file of `tests/tiny.py` with as many ids is therefore a draft model of the same vocabulary. The weights come
from a fixed seed and are scaled so that greedy text varies; `noise` disturbs them as it does there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import CHAT_TEMPLATE, CONTROL_TEXTS, IM_END, IM_START, vocabulary_texts

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": IM_START, "eos_token_id": IM_END,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}


def write_folder(
    path: str | Path, family: str = "llama", *, dtype: str = "float32", shards: int = 1, seed: int = 0,
    noise: float = 0.0, n_real: int | None = None, tokenizer: bool = True, **config: Any,
) -> Path:  # fmt: skip
    """Writes a folder of any family that transformers knows to `path` and returns it.

    `config` overrides values of config.json; `shards`: at least as many files, if there are tensors enough; `n_real`:
    ids with a text, as in `TinySpec`. The same seed gives the same weights for every dtype.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    values = SIZES | DEFAULTS.get(family, {}) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
        _randomise(model, noise)
    model = model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = size + 1 if shards == 1 else max(1, size // shards)
    model.save_pretrained(path, max_shard_size=limit)
    if tokenizer:
        write_tokenizer(path, values["vocab_size"], n_real)
    return path


def _randomise(model: Any, noise: float) -> None:
    """Draws every parameter anew, wide enough that arg-maxes vary, and disturbs it by `noise` of its spread."""
    import torch

    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim < 2:
            norm = "norm" in name and name.endswith("weight")
            drawn = float(norm) + 0.1 * torch.randn(parameter.shape)
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
            drawn = torch.randn(parameter.shape)
            other = torch.randn(parameter.shape)
            drawn = (drawn + noise * other) * (gain / parameter.shape[-1] ** 0.5)
        parameter.data.copy_(drawn)


_GAINS = {
    "embed_tokens": 8.0, "q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 2.0, "lm_head": 4.0,
}  # fmt: skip


def write_tokenizer(path: Path, n_vocab: int = 512, n_real: int | None = None) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level vocabulary that `tests/tiny.py` writes as GGUF."""
    texts, _, merges = vocabulary_texts(n_vocab, n_real)
    texts = texts[: n_vocab if n_real is None else n_real]
    controls = [
        {"id": i, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for i, text in CONTROL_TEXTS.items()
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "byte_fallback": False,
        "end_of_word_suffix": None, "fuse_unk": False, "vocab": {text: i for i, text in enumerate(texts)},
        "merges": merges,
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": controls, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": CONTROL_TEXTS[IM_START],
        "eos_token": CONTROL_TEXTS[IM_END], "add_bos_token": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
