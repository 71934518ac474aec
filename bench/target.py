"""What a pass of the torch target costs beside transformers: `python bench/target.py --model target.gguf [--quick]`.

One thread, one session with a prefix in its cache, passes of 1 to 16 tokens with logits for each. All forms take turns
within one run: float32 and bfloat16, row-invariant (what the cloud uses) and not, and transformers' two attention forms
on the same dequantised weights in float32. Each is loaded as it is by default: the target puts its weights into huge
pages where the system can, which transformers gets from the variable GLIBC_TUNABLES=glibc.malloc.hugetlb=1 alone.
Prints medians in ms and ratios, medians of the paired ratios with a 95 % bootstrap interval; the last line is one JSON
object. Exit code 1 if a figure is not reached.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stamp import end_with

from pipesd.cloud.checkpoint import Checkpoint, open_checkpoint
from pipesd.cloud.loading import load_target
from pipesd.cloud.target import TorchTarget
from pipesd.core import Vocabulary
from pipesd.model_shape import ModelShape, Rope

ROWS = (1, 2, 4, 8, 16)
FLOAT32_FIGURE = 1.5  # times as fast as the faster of transformers' forms, at every number of rows
BFLOAT16_FIGURE = 1.25  # times as fast as float32, up to 8 rows
LOGIT_FIGURE = 5e-4  # largest difference of logits from transformers
FORMS = {  # name: (dtype, exact)
    "float32": ("float32", True),
    "float32 not invariant": ("float32", False),
    "bfloat16": ("bfloat16", True),
    "bfloat16 not invariant": ("bfloat16", False),
}
ATTENTIONS = ("eager", "sdpa")


TEXT = '''\
def fibonacci(n):
    """Returns the first n numbers of the sequence."""
    a, b, found = 0, 1, []
    for _ in range(n):
        found.append(a)
        a, b = b, a + b
    return found

Natalia sold 48 clips in April and half as many in May, so 48 + 48 / 2 = 72 altogether. The history of mathematics is
the story of how people came to count, to measure and to prove. Вчера шёл дождь, но сегодня светит солнце. 你好，世界！
'''


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    """Ids of `text` by the longest piece that fits: not what a tokeniser gives, but natural enough to measure with."""
    ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary.pieces))) if piece}
    longest = max(map(len, ids))
    data = text.encode()
    found = []
    while data:
        piece = next(data[:size] for size in range(min(longest, len(data)), 0, -1) if data[:size] in ids)
        found.append(ids[piece])
        data = data[len(piece) :]
    return found


NAMES = {  # of the tensors of a layer, transformers' and GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def transformers_model(checkpoint: Checkpoint, attention: str = "eager") -> Any:
    """transformers' model of the checkpoint's family in float32 with its weights; `attention`: eager or sdpa."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = checkpoint.shape
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.width,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters=rope_parameters(shape.rope),
        tie_word_embeddings=shape.tied,
        attention_bias="attn_q" in shape.biases,
        mlp_bias="ffn_up" in shape.biases,
        attn_implementation=attention,
        **_windows(shape),
    )

    def weight(name: str) -> torch.Tensor:
        values = checkpoint.weight(name)
        assert values is not None, name
        if ".attn_q" in name or ".attn_k" in name:  # rotary pairs: neighbours in a checkpoint, half a head apart there
            values = values.unflatten(0, (-1, shape.head_size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return values

    state = {
        "model.embed_tokens.weight": weight("token_embd.weight"),
        "model.norm.weight": weight("output_norm.weight"),
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if shape.tied else weight("output.weight")
    for i in range(shape.layers):
        for theirs, ours in NAMES.items():
            for part in ("weight", "bias"):
                if f"blk.{i}.{ours}.{part}" in checkpoint.tensor_names:
                    state[f"model.layers.{i}.{theirs}.{part}"] = weight(f"blk.{i}.{ours}.{part}")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(state)
    divisors = checkpoint.weight("rope_freqs.weight")
    if divisors is not None:
        model.model.rotary_emb.inv_freq /= divisors
    return model


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """`rope` as transformers' configurations have it."""
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.base}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        values["attention_factor"] = rope.attention_factor
    return values


def _windows(shape: ModelShape) -> dict[str, Any]:
    """The configuration's values for the windows of the layers, of which transformers has one size."""
    window = max(shape.windows, default=0) or None
    if shape.family == "mistral":
        return {"sliding_window": window}
    if window is None or shape.family == "llama":
        return {}
    kinds = ["sliding_attention" if size else "full_attention" for size in shape.windows]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _ours(target: TorchTarget, prefix: list[int]) -> Callable[[list[int]], tuple[float, np.ndarray]]:
    target.forward([(0, prefix, 0)])

    def run(ids: list[int]) -> tuple[float, np.ndarray]:
        began = time.perf_counter()
        logits = target.forward([(0, ids, len(ids))])[0]
        taken_s = time.perf_counter() - began
        target.truncate(0, len(prefix))
        return taken_s, logits

    return run


def _theirs(model: Any, prefix: list[int]) -> Callable[[list[int]], tuple[float, np.ndarray]]:
    from transformers import DynamicCache

    filled = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([prefix]), past_key_values=filled)

    def run(ids: list[int]) -> tuple[float, np.ndarray]:
        cache = copy.deepcopy(filled)
        with torch.inference_mode():
            began = time.perf_counter()
            logits = model(torch.tensor([ids]), past_key_values=cache).logits
            return time.perf_counter() - began, logits[0].numpy()

    return run


def _ratio(slow_s: list[float], fast_s: list[float], draw: np.random.Generator) -> tuple[float, float, float]:
    """Median of the paired ratios and its 95 % bootstrap interval."""
    ratios = np.array(slow_s) / np.array(fast_s)
    again = np.median(draw.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(again, [2.5, 97.5])
    return round(float(np.median(ratios)), 2), round(float(low), 2), round(float(high), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, type=Path, metavar="PATH", help="a GGUF file or a Hugging Face folder"
    )
    parser.add_argument("--prefix", type=int, default=128, help="tokens in the cache before each pass (default 128)")
    parser.add_argument("--repeats", type=int, default=21, help="turns of each form (default 21)")
    parser.add_argument("--seed", type=int, default=1, help="for the bootstrap (default 1)")
    parser.add_argument("--quick", action="store_true", help="three turns: only to see that it works")
    options = parser.parse_args()
    repeats = 3 if options.quick else options.repeats
    torch.set_num_threads(1)

    checkpoint = open_checkpoint(options.model)
    draw = np.random.default_rng(options.seed)
    text = encode(checkpoint.vocabulary, TEXT)
    ids = (text * (1 + (options.prefix + max(ROWS)) // len(text)))[: options.prefix + max(ROWS)]
    prefix, new = ids[: options.prefix], ids[options.prefix :]
    runs = {}
    for name, (dtype, exact) in FORMS.items():
        target = load_target(options.model, device="cpu", dtype=dtype, slots=1, exact=exact)
        assert target.invariant == exact
        runs[name] = _ours(target, prefix)
    for attention in ATTENTIONS:
        runs[attention] = _theirs(transformers_model(checkpoint, attention), prefix)

    difference = float(np.abs(runs["float32"](new)[1] - runs["eager"](new)[1]).max())
    table: dict[int, dict[str, Any]] = {}
    print(f"{'rows':>4}" + "".join(f"{name:>24}" for name in runs) + "   (ms)")
    for rows in ROWS:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 2):
            for name, run in runs.items():
                taken_s, _ = run(new[:rows])
                if turn >= 2:
                    times[name].append(taken_s)
        median = {name: float(np.median(values)) * 1e3 for name, values in times.items()}
        print(f"{rows:4}" + "".join(f"{value:24.1f}" for value in median.values()))
        best = min(ATTENTIONS, key=lambda name: median[name])
        table[rows] = {
            "ms": {name: round(value, 2) for name, value in median.items()},
            "transformers / float32": _ratio(times[best], times["float32"], draw),
            "transformers / float32 not invariant": _ratio(times[best], times["float32 not invariant"], draw),
            "float32 / bfloat16": _ratio(times["float32"], times["bfloat16"], draw),
        }
    for rows, row in table.items():
        shown = (f"{name} {r[0]:.2f} [{r[1]:.2f}, {r[2]:.2f}]" for name, r in row.items() if name != "ms")
        print(f"{rows:4}  " + ";  ".join(shown))
    print(f"largest difference of logits from transformers {difference:.1e}")
    reached = {
        "float32": all(row["transformers / float32"][0] >= FLOAT32_FIGURE for row in table.values()),
        "bfloat16": all(row["float32 / bfloat16"][0] >= BFLOAT16_FIGURE for rows, row in table.items() if rows <= 8),
        "logits": difference <= LOGIT_FIGURE,
    }
    print(
        json.dumps(
            {
                "bench": "target",
                "kind": "real",
                "model": checkpoint.name,
                "prefix": options.prefix,
                "repeats": repeats,
                "seed": options.seed,
                "torch": torch.__version__,
                "rows": table,
                "logits_difference": difference,
                "figures_reached": reached,
            }
        )
    )
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    end_with(main)
