"""Writes a tiny Hugging Face folder as the GGUF file that llama.cpp's convert_hf_to_gguf.py makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tiny import CHAT_TEMPLATE, IM_END, IM_START, vocabulary_texts

_IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def write_gguf_of(folder: Path, path: Path, *, dtype: str = "float32") -> Path:
    """Writes the model in `folder`, as `tiny_hf.write_folder` makes them, to `path` and returns it.

    `dtype` is that of the matrices: float32 or q8_0. A mistral model becomes one of llama, and its window is lost.
    """
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    family = "llama" if config["model_type"] == "mistral" else config["model_type"]
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(path.stem)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    texts, types, merges = vocabulary_texts(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in load_file(folder / "model.safetensors").items():
        ours = _gguf_name(name)
        if family == "llama" and (".attn_q." in ours or ".attn_k." in ours):  # rotary pairs become neighbours
            halves = values.reshape(-1, 2, head_size // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = _TYPES[dtype] if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    name, _, kind = name.rpartition(".")
    if name in _OUTSIDE:
        return f"{_OUTSIDE[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"
