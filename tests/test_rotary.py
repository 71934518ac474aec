"""The table of rotations is the one that transformers turns queries and keys by, for every kind of scaling."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from pipesd.cloud.rotary import rotation_table
from pipesd.model_shape import Rope

HEAD_SIZE, CONTEXT = 32, 700
ROPES = {
    "default": Rope(),
    "another base": Rope(base=1e6),
    "linear": Rope(kind="linear", factor=3.0),
    "dynamic": Rope(kind="dynamic", factor=4.0, original_context=100),
    "dynamic, long enough": Rope(kind="dynamic", factor=4.0, original_context=CONTEXT),
    "llama3": Rope(base=5e5, kind="llama3", factor=8.0, original_context=128),
    "llama3, other bounds": Rope(kind="llama3", factor=2.0, original_context=64, low_freq_factor=2, high_freq_factor=9),
    "yarn": Rope(kind="yarn", factor=4.0, original_context=128, attention_factor=1.3),
    "yarn, not truncated": Rope(kind="yarn", factor=4.0, original_context=128, truncate=False),
    "yarn, other bounds": Rope(kind="yarn", factor=4.0, original_context=128, beta_fast=8.0, beta_slow=2.0),
    "yarn, a step": Rope(kind="yarn", factor=4.0, original_context=128, beta_fast=4.0, beta_slow=4.0, truncate=False),
}


def table_of_transformers(rope: Rope) -> torch.Tensor:
    """(context, head_size / 2), from positions that come one by one."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from bench.target import rope_parameters

    config = LlamaConfig(
        hidden_size=HEAD_SIZE,
        num_attention_heads=1,
        max_position_embeddings=rope.original_context if rope.kind == "dynamic" else CONTEXT,
        rope_parameters=rope_parameters(rope),
    )
    module, x = LlamaRotaryEmbedding(config), torch.zeros(())
    rows = [module(x, torch.tensor([[position]])) for position in range(CONTEXT)]
    return torch.cat([torch.complex(cos, sin)[0, :, : HEAD_SIZE // 2] for cos, sin in rows])


@pytest.mark.parametrize("name", ROPES)
def test_every_kind_turns_as_in_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    rope = ROPES[name]
    table = rotation_table(rope, HEAD_SIZE, CONTEXT)
    assert table.shape == (CONTEXT, 1, HEAD_SIZE // 2) and table.dtype == torch.complex64
    rounding = 1e-4  # of an angle of several hundred, in float32
    torch.testing.assert_close(table[:, 0], table_of_transformers(rope), atol=rounding, rtol=0)


def test_all_kinds_differ() -> None:
    tables = {name: rotation_table(rope, HEAD_SIZE, CONTEXT) for name, rope in ROPES.items()}
    tables.pop("dynamic, long enough")  # the default within the original context
    names = list(tables)
    for i, first in enumerate(names):
        for second in names[:i]:
            assert (tables[first] - tables[second]).abs().max() > 0.1, (first, second)


@pytest.mark.parametrize("name", ROPES)
def test_divisors_divide_the_frequency_of_each_pair(name: str) -> None:
    divisors = torch.linspace(1, 4, HEAD_SIZE // 2)
    whole, divided = (rotation_table(ROPES[name], HEAD_SIZE, 40, d).angle()[:, 0] for d in (None, divisors))
    near = slice(0, 3)  # positions whose angles are less than π
    torch.testing.assert_close(divided[near] * divisors, whole[near], atol=1e-5, rtol=1e-5)


def test_a_shorter_table_is_the_start_of_a_longer_one() -> None:
    for rope in ROPES.values():
        assert torch.equal(rotation_table(rope, HEAD_SIZE, 90), rotation_table(rope, HEAD_SIZE, CONTEXT)[:90])
