"""Writes tiny random Hugging Face folders of each family, with the vocabulary of `tests/tiny.py`.

A tiny GGUF file of `tests/tiny.py` with as many ids is therefore a draft model of the same vocabulary. The matrices are
those of that file too where a family has them, so a plain llama folder is the same model as the file of the same seed,
and its undisturbed or slightly noisy file a draft that often agrees with the other families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import CHAT_TEMPLATE, CONTROL_TEXTS, IM_END, IM_START, TinySpec, tensors, vocabulary_texts

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": IM_START, "eos_token_id": IM_END,
    "pad_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
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
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(path)
    values = SIZES | DEFAULTS.get(family, {}) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
        _fill(model, values, seed, noise)
    model = model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = size + 1 if shards == 1 else max(1, size // shards)
    model.save_pretrained(path, max_shard_size=limit)
    if tokenizer:
        write_tokenizer(path, values["vocab_size"], n_real)
    return path


def _fill(model: Any, values: dict[str, Any], seed: int, noise: float) -> None:
    """Gives every parameter its values: those of `tests/tiny.py` where that model has such a matrix, else random."""
    import torch

    for name, parameter in sorted(model.named_parameters()):
        norm = float("norm" in name and name.endswith("weight"))
        parameter.data.copy_(norm + 0.1 * torch.randn(parameter.shape) / max(1, parameter.ndim - 1))
    spec = TinySpec(
        seed=seed, noise=noise, n_vocab=values["vocab_size"], layers=values["num_hidden_layers"],
        hidden=values["hidden_size"], heads=values["num_attention_heads"], kv_heads=values["num_key_value_heads"],
        feed_forward=values["intermediate_size"], tied=values["tie_word_embeddings"],
    )  # fmt: skip
    shared, named = tensors(spec), dict(model.named_parameters())
    for name, parameter in named.items():
        ours = _gguf_name(name)
        if ours in shared and shared[ours].shape == tuple(parameter.shape):
            matrix = torch.from_numpy(shared[ours])
            if ours.endswith(("attn_q.weight", "attn_k.weight")):  # a folder has a pair's halves half a head apart
                head = matrix.shape[0] // (spec.heads if "attn_q" in ours else spec.kv_heads)
                matrix = matrix.view(-1, head // 2, 2, spec.hidden).transpose(1, 2).reshape(matrix.shape)
            parameter.data.copy_(matrix)


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
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
