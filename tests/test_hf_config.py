"""config.json -> the decoder's shape: the sizes that transformers finds there, and one line for what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import DEFAULTS, SIZES

from pipesd.errors import UsageError
from pipesd.hf_config import read_shape
from pipesd.model_shape import ModelShape, Rope

PATH = Path("/models/m/config.json")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return SIZES | DEFAULTS[family] | {"model_type": family} | changes


def shape(family: str = "llama", **changes: Any) -> ModelShape:
    return read_shape(PATH, config(family, **changes))


def test_sizes_of_a_llama() -> None:
    assert shape() == ModelShape(
        family="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, feed_forward=128, width=512,
        context=512, norm_eps=1e-5,
    )  # fmt: skip


def test_what_is_left_out_has_transformers_defaults() -> None:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    for family, make in classes.items():
        theirs = make()
        least = {key: getattr(theirs, key) for key in (*sizes, "num_attention_heads")}
        ours = read_shape(PATH, {"model_type": family} | least)
        head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ours.kv_heads == theirs.num_key_value_heads and ours.head_size == head
        assert ours.norm_eps == theirs.rms_norm_eps and ours.tied == theirs.tie_word_embeddings
        assert ours.rope == Rope(base=theirs.rope_parameters["rope_theta"])
        windows = (theirs.sliding_window,) * ours.layers if family == "mistral" else ()
        assert ours.windows == windows


@pytest.mark.parametrize(
    ("old", "rope"),
    [
        ({}, Rope()),
        ({"rope_theta": 5e5}, Rope(base=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(kind="linear", factor=2.0)),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            Rope(kind="dynamic", factor=2.0, original_context=512),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            Rope(5e5, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_both_spellings_of_rotary_settings(old: dict[str, Any], rope: Rope) -> None:
    assert shape(**old).rope == rope
    scaling = dict(old.get("rope_scaling", {"rope_type": "default"}))
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
    new = {"rope_theta": old.get("rope_theta", 10000.0)} | scaling
    assert shape(rope_parameters=new).rope == rope
    assert shape(rope_parameters=new, rope_theta=7.0).rope == rope  # the table is nearer
    assert shape(rope_parameters={"full_attention": new}).rope == rope
    assert shape(rope_scaling=None, rope_parameters=new).rope == rope


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 4.0, "original_max_position_embeddings": 128},
        {"factor": 4.0, "attention_factor": 0.9},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64},
        {"factor": 0.5},
        {"factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    ],
)
def test_yarn_is_as_transformers_reads_it(changes: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = config(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0} | changes)
    theirs = LlamaConfig(**json.loads(json.dumps(values)))
    rope = read_shape(PATH, values).rope
    assert rope.attention_factor == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](theirs, None)[1], rel=1e-12)
    assert rope.original_context == theirs.rope_parameters["original_max_position_embeddings"]
    assert (rope.beta_fast, rope.beta_slow) == (changes.get("beta_fast", 32), changes.get("beta_slow", 1))
    assert rope.truncate == changes.get("truncate", True)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 512),
        ({"type": "yarn", "original_max_position_embeddings": 128}, 512),
        ({"type": "dynamic", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0}, 512),
    ],
)
def test_contexts(scaling: dict[str, Any], context: int) -> None:
    assert shape(rope_scaling=scaling).context == context


def test_the_older_place_of_the_original_context() -> None:
    found = shape(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=256)
    assert (found.rope.original_context, found.context) == (256, 1024)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, ()),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("qwen2", {"sliding_window": 8}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, ()),  # 28 layers see all
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (0, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            (8, 0),
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, ()),
    ],
)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert shape(family, **changes).windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "biases"),
    [
        ("llama", {}, ""),
        ("llama", {"attention_bias": True}, "attn_q attn_k attn_v attn_output"),
        ("llama", {"mlp_bias": True}, "ffn_gate ffn_up ffn_down"),
        ("mistral", {"attention_bias": True}, ""),
        ("qwen2", {}, "attn_q attn_k attn_v"),
        ("qwen3", {}, ""),
        ("qwen3", {"attention_bias": True}, "attn_q attn_k attn_v attn_output"),
    ],
)
def test_biases(family: str, changes: dict[str, Any], biases: str) -> None:
    found = shape(family, **changes)
    assert found.biases == frozenset(biases.split()) and found.head_norms == (family == "qwen3")


def test_heads_may_be_of_any_size() -> None:
    assert shape(head_dim=32).head_size == 32 and shape("mistral", head_dim=8).head_size == 8
    assert shape(head_dim=None).head_size == 16 and shape(num_key_value_heads=None).kv_heads == 4
    unsaid = {key: value for key, value in config("qwen3").items() if key != "head_dim"}
    assert read_shape(PATH, unsaid).head_size == 128  # whatever its other sizes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gemma2"}, "is a gemma2 model, one of llama, mistral, qwen2, qwen3 was wanted; --backend tran"),
        ({"model_type": "mixtral"}, "is a mixtral model"),
        ({"model_type": "olmo2"}, "is an olmo2 model"),
        ({"model_type": None}, "does not say its model_type"),
        ({"model_type": 5}, "model_type is '5', a text was wanted"),
        ({"model_type": "phi3"}, "; --backend transformers may serve it if it is a plain causal decoder"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "if transformers itself knows it: code in a"),
        (
            {"model_type": "mamba"},
            "is a mamba model, which keeps a state that cannot take a refused draft back, and is",
        ),
        ({"model_type": "qwen3_next"}, "is a qwen3_next model, which keeps a state"),
        ({"model_type": "llava", "text_config": {"a": 1}}, "is a llava model with a part for images or sound, or a wr"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, "; --backend transformers may serve it, its text alone"),
        ({"vision_config": {"a": 1}}, "and is not served; use a model of text alone"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is a t5 model with an encoder and is not served"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "a list was wanted"),
        ({"num_local_experts": 8}, "is a mixture of experts; --backend transformers"),
        ({"hidden_act": "gelu"}, "has the activation gelu, silu was wanted"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised by gptq"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "is quantised by awq, which no backend reads; use the folder",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "is quantised by an unnamed method"),
        ({"partial_rotary_factor": 0.5}, "rotates 0.5 of each head"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "rotates 0.25 of each head"),
        ({"rope_scaling": {"type": "longrope"}}, "has longrope rotary scaling; --backend transformers"),
        ({"rope_scaling": {"type": "su"}}, "has su rotary scaling"),
        ({"rope_scaling": {"type": "mrope"}}, "has mrope rotary scaling"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing, a number above 0 was wanted"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor is 'nan'"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "not below high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "makes a context of"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', a table was wanted"),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "linear"}}}, "from layer to layer"),
        ({"rope_theta": 0}, "rope_theta is '0', a number above 0 was wanted"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is 'inf'"),
        ({"hidden_size": "64"}, "hidden_size is '64', a whole number from 1"),
        ({"hidden_size": True}, "hidden_size is 'True'"),
        ({"hidden_size": -64}, "hidden_size is '-64'"),
        ({"hidden_size": 66}, "hidden_size 66 cannot be shared by 4 heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers is 'None'"),
        ({"num_hidden_layers": 10**9}, "a whole number from 1 to 10000 was wanted"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key and value heads"),
        ({"head_dim": 7}, "has heads of 7 numbers, an even number was wanted"),
        ({"head_dim": None, "num_attention_heads": 64}, "has heads of 1 numbers"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "heads of 2 numbers, which dynamic"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is '1'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', true or false was wanted"),
    ],
)
def test_what_is_not_served_is_one_line(changes: dict[str, Any], told: str) -> None:
    refused(config() | changes, told)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is '0', a whole number from 1"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "two kinds of layers"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types does not name its 2 layers"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "has layers of linear_attention"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "without a sliding_window"),
        ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    ],
)
def test_windows_that_are_not_served_are_one_line(family: str, changes: dict[str, Any], told: str) -> None:
    refused(config(family, **changes), told)


@pytest.mark.parametrize("heads", [3, 65, 128])
def test_heads_that_qwen3_leaves_open_share_the_hidden_state(heads: int) -> None:
    changes = {"head_dim": None, "num_attention_heads": heads, "num_key_value_heads": heads}
    refused(config("qwen3", **changes), f"hidden_size 64 cannot be shared by {heads} heads")
    assert shape("qwen3", head_dim=None).head_size == 16


def refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_shape(PATH, values)
    line = str(caught.value)
    assert line.startswith(f"{PATH}: ") and told in line and "; " in line and "\n" not in line
