"""Every family and variant gives transformers' logits, and rows that keep their bits whatever shares the pass.

The checkpoints are tiny and random, with small original contexts and windows, so that each of their oddities matters;
that each does is itself tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_target import DTYPES, alone, constant, drawn, in_pieces, some_ids, wander
from tiny_hf import write_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from pipesd.cloud import loading
from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.kv_cache import BUCKET, TILE, KVCache
from pipesd.cloud.loading import load_target, rows_agree
from pipesd.cloud.model import Decoder, PackedLinear
from pipesd.cloud.target import MOST_ROWS, TorchTarget

LENGTH = 300  # more than one internal cut, several buckets of keys
TOLERANCE = 5e-4
assert LENGTH > MOST_ROWS > 2 * BUCKET


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Variant:
    """One kind of checkpoint: `config` overrides what `write_folder` has for the family."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    context: int | None = None  # what is asked for; None: the checkpoint's


VARIANTS = {
    "llama": Variant("llama"),
    "llama with one kv head": Variant("llama", {"num_key_value_heads": 1}),
    "llama with all kv heads, tied": Variant("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama with wide heads": Variant("llama", {"head_dim": 20}),
    "llama with biases of attention": Variant("llama", {"attention_bias": True}),
    "llama with biases of both": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama, linear": Variant("llama", rope("linear", factor=4.0)),
    "llama, dynamic within": Variant("llama", rope("dynamic", factor=2.0)),
    "llama, dynamic beyond": Variant("llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 30}, 100),
    "llama, llama3": Variant("llama", rope("llama3", factor=8.0, original_max_position_embeddings=64, **LLAMA3)),
    "llama, yarn": Variant("llama", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral": Variant("mistral", {"head_dim": 24}),
    "mistral with a window": Variant("mistral", {"sliding_window": 37}),
    "mistral with a window of one": Variant("mistral", {"sliding_window": 1, "num_key_value_heads": 1}),
    "mistral with a window of buckets": Variant("mistral", {"sliding_window": 128, "num_key_value_heads": 4}),
    "mistral with a window beyond the context": Variant("mistral", {"sliding_window": 4096}),
    "qwen2": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows from a layer on": Variant(
        "qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen2 with layer_types": Variant(
        "qwen2",
        {
            "use_sliding_window": True, "sliding_window": 21, "num_hidden_layers": 3, "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2, yarn": Variant("qwen2", rope("yarn", factor=3.0, original_max_position_embeddings=100, truncate=False)),
    "qwen3": Variant("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with wide heads and biases": Variant("qwen3", {"head_dim": 48, "attention_bias": True}),
    "qwen3 with windows": Variant(
        "qwen3", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 0, "num_key_value_heads": 1}
    ),
}  # fmt: skip
QUICK = ("llama with biases of both", "llama, yarn", "mistral with a window", "qwen2 with layer_types", "qwen3")
RICH = ("llama with biases of both", "qwen2 with windows from a layer on", "qwen3 with wide heads and biases")


def quick(names: Iterable[str], *few: str) -> list[Any]:
    """Those names, all but `few` of them for the slow tests."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Models:
    """The folders and targets of the variants, each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._targets: dict[tuple[str, str], TorchTarget] = {}

    def folder(self, name: str) -> Path:
        path, variant = self._directory / name, VARIANTS[name]
        return path if path.exists() else write_folder(path, variant.family, **variant.config)

    def target(self, name: str, dtype: str = "float32") -> TorchTarget:
        """One that several tests share: they leave its slots empty."""
        if (name, dtype) not in self._targets:
            self._targets[name, dtype] = self.new_target(name, dtype)
        return self._targets[name, dtype]

    def new_target(self, name: str, dtype: str = "float32") -> TorchTarget:
        return load_target(self.folder(name), device="cpu", dtype=dtype, context=VARIANTS[name].context)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def cache_of(target: TorchTarget) -> KVCache:
    assert isinstance(target._cache, KVCache)
    return target._cache


def theirs(folder: Path, ids: Sequence[int], *, one_by_one: bool) -> np.ndarray:
    """Logits behind every id by transformers, in float32 and with its plainest attention."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        if not one_by_one:
            logits: np.ndarray = reference(torch.tensor([ids])).logits[0].numpy()
            return logits
        rows, cache = [], None
        for i in ids:
            output = reference(torch.tensor([[i]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0])
        return torch.cat(rows).numpy()


# --- transformers' logits ---


@pytest.mark.parametrize("name", quick(VARIANTS, *QUICK))
def test_logits_are_those_of_transformers(models: Models, name: str) -> None:
    target = models.target(name)
    ids = some_ids(target, min(LENGTH, target.info.context))
    wanted = theirs(models.folder(name), ids, one_by_one=name.endswith("dynamic beyond"))
    np.testing.assert_allclose(in_pieces(target, ids, drawn(1, 90, 1)), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", quick([*RICH, "llama, llama3", "llama, yarn", "mistral with a window"], "llama, yarn"))
def test_the_bench_gives_transformers_the_same_model(models: Models, name: str) -> None:
    from bench.target import transformers_model

    ids = some_ids(models.target(name), LENGTH)
    with torch.inference_mode():
        made = transformers_model(open_checkpoint(models.folder(name)))(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(made, theirs(models.folder(name), ids, one_by_one=False), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", quick(RICH, RICH[0]))
def test_every_tensor_has_its_part_in_the_logits(models: Models, name: str) -> None:
    """A row of any tensor a tenth off, and the logits leave the tolerance: none is ignored."""
    target = models.new_target(name)
    ids = [7, *some_ids(target, 40)]
    checkpoint = open_checkpoint(models.folder(name))
    read = {tensor: checkpoint.weight(tensor) for tensor in checkpoint.tensor_names}
    draw = np.random.default_rng(0)

    def logits(changed: str | None) -> np.ndarray:
        def weight(tensor: str) -> torch.Tensor:
            values = read[tensor]
            assert values is not None
            values = values.clone()
            if tensor == changed:
                row = 7 if tensor.startswith("token_embd") else int(draw.integers(len(values)))
                values[row] += 0.1
            return values

        cpu = torch.device("cpu")
        target._decoder = Decoder(checkpoint.shape, weight, PackedLinear, device=cpu, dtype=torch.float32)
        return alone(target, ids)

    with torch.inference_mode():
        whole = logits(None)
        for tensor in read:
            if tensor.startswith("blk.0"):  # as those of the others
                continue
            assert np.abs(logits(tensor) - whole).max() > TOLERANCE, tensor


@pytest.mark.parametrize(
    "name",
    quick(
        ["mistral with a window", "mistral with a window of buckets", "qwen2 with layer_types", "qwen3 with windows"],
        "qwen2 with layer_types",
    ),
)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_wrong_by_one_is_noticed(models: Models, name: str, change: int) -> None:
    target = models.new_target(name)
    ids = some_ids(target, LENGTH)
    wanted = theirs(models.folder(name), ids, one_by_one=False)
    cache = cache_of(target)
    cache._windows = tuple(window + change if window else 0 for window in cache._windows)
    assert np.abs(alone(target, ids) - wanted).max() > 10 * TOLERANCE


def test_windows_do_not_read_what_no_row_sees(models: Models) -> None:
    name = "qwen2 with layer_types"
    target = models.target(name)
    target.forward([(0, some_ids(target, 290), 0)])
    sizes = [[keys.shape[2] for keys in group.keys] for group in cache_of(target).extend([(0, 1)]).groups]
    assert sizes == [[128, 320, 128]]  # the bucket of position 290 and that of 256 - 20
    target.truncate(0, 0)
    assert {cache_of(target)._begin(first, 320, 21) for first in range(256, 320, TILE)} == {192}, "whatever the pass"


def test_a_window_as_wide_as_the_context_costs_nothing(models: Models) -> None:
    assert cache_of(models.target("mistral with a window beyond the context"))._windows == (0, 0)


# --- the bits of a row ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", quick(VARIANTS, "llama", "qwen2", "qwen3 with windows"))
def test_rows_keep_their_bits(models: Models, name: str, dtype: str) -> None:
    target = models.target(name, dtype)
    assert target.invariant
    ids = some_ids(target, LENGTH if any(cache_of(target)._windows) else 3 * BUCKET // 2)
    whole = alone(target, ids)
    for sizes in (drawn(1, 6, 1), drawn(1, 50, 2)):
        assert np.array_equal(in_pieces(target, ids, sizes), whole)


@pytest.mark.parametrize("name", quick([*RICH, "mistral with a window", "qwen2 with layer_types"], RICH[1]))
def test_single_rows_keep_their_bits(models: Models, name: str) -> None:
    target = models.target(name)
    ids = some_ids(target, LENGTH)
    assert np.array_equal(in_pieces(target, ids, constant(1)), alone(target, ids))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", quick([*RICH, "mistral with a window"], RICH[2]))
def test_sessions_that_share_passes_have_the_bits_of_each_alone(models: Models, name: str, dtype: str) -> None:
    wander(models.target(name, dtype), np.random.default_rng(5), rounds=4, start=50, most=12)


@pytest.mark.parametrize("name", [*RICH, "mistral with a window"])
def test_the_check_of_rows_has_a_window_where_there_is_one(
    models: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = models.target(name)._decoder
    begins: list[int] = []

    class Watched(KVCache):
        def _begin(self, first: int, keys: int, window: int) -> int:
            begins.append(super()._begin(first, keys, window))
            return begins[-1]

    monkeypatch.setattr(loading, "KVCache", Watched)
    assert rows_agree(decoder)
    assert any(begins) == any(decoder.shape.windows)


@pytest.mark.parametrize("name", quick(RICH[1:], RICH[2]))
def test_what_is_not_exact_is_close(models: Models, name: str) -> None:
    target = load_target(models.folder(name), device="cpu", exact=False)
    ids = some_ids(target, 200)
    whole = alone(models.target(name), ids)
    for sizes in (constant(1), drawn(1, 90, 1)):
        np.testing.assert_allclose(in_pieces(target, ids, sizes), whole, atol=1e-3)
