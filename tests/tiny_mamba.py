"""A tiny random recurrent model (Mamba) as a GGUF file: a draft model whose state cannot be cut back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.tiny import CHAT_TEMPLATE, IM_END, IM_START, vocabulary_texts

HIDDEN, INNER, STATE, KERNEL, STEP_RANK, LAYERS = 32, 64, 8, 4, 2, 2


def write_tiny_mamba(path: str | Path, *, n_vocab: int = 512, name: str = "tiny-mamba") -> Path:
    """Writes the model, always the same, to `path` and returns it."""
    path = Path(path)
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name(name)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(STEP_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    texts, types, merges = vocabulary_texts(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_chat_template(CHAT_TEMPLATE)

    def add(tensor: str, *shape: int, scale: float = 1.0, offset: float = 0.0) -> None:
        value = offset + scale * rng.standard_normal(shape)
        writer.add_tensor(tensor, value.astype(np.float32))

    add("token_embd.weight", n_vocab, HIDDEN, scale=4.0)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN, scale=0.1, offset=1.0)
        add(f"blk.{i}.ssm_in.weight", 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
        add(f"blk.{i}.ssm_conv1d.weight", INNER, KERNEL, scale=0.5)
        add(f"blk.{i}.ssm_conv1d.bias", INNER, scale=0.1)
        add(f"blk.{i}.ssm_x.weight", STEP_RANK + 2 * STATE, INNER, scale=INNER**-0.5)
        add(f"blk.{i}.ssm_dt.weight", INNER, STEP_RANK)
        add(f"blk.{i}.ssm_dt.bias", INNER, scale=0.1)
        writer.add_tensor(f"blk.{i}.ssm_a", -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1)))
        add(f"blk.{i}.ssm_d", INNER, scale=0.1, offset=1.0)
        add(f"blk.{i}.ssm_out.weight", HIDDEN, INNER, scale=2 * INNER**-0.5)
    add("output_norm.weight", HIDDEN, scale=0.1, offset=1.0)
    add("output.weight", n_vocab, HIDDEN, scale=4 * HIDDEN**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
