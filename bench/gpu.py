"""What a pass costs on a CUDA device beside the way of its weights through memory: `python bench/gpu.py [--quick]`.

Random bfloat16 models of the shapes of Llama 2 7B and Llama 3 8B are made on the device, without a file. Of each are
measured, as medians, passes of 1 to 8 tokens of one session and of 8 sessions with 5 tokens each, behind texts of 512
and 2048 ids: from the call to the ids on the host, and the host's part of it. The yardstick is the weights' bytes over
the bandwidth of a copy on the same device (read and written bytes counted). Forms: recorded passes, the same without
graphs, and row-invariant ones. Besides: the attention's kernels against the plain form, 64 greedy ids of a small model
in float32 against the CPU's, by drafts that are judged in one pass; whether rows keep their bits in row-invariant
passes in bfloat16; and whether the host waits for the device within a pass, where it should not.

A table, and one JSON object in the last line. Exit code 1 if a figure is not reached, 77 without a CUDA device. About
three minutes. `--device cpu --quick` runs everything with tiny shapes on the CPU, to see that it works: figures of
speed are not judged then.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from stamp import end_with
from torch import Tensor

from pipesd.cloud.graphs import EXACT_SIZE, RecordedPasses
from pipesd.cloud.kv_cache import KVCache
from pipesd.cloud.loading import rows_agree
from pipesd.cloud.model import Decoder, PlainLinear
from pipesd.cloud.paged_attention import PagedRead, plain_read
from pipesd.cloud.paged_cache import PagedCache
from pipesd.cloud.placing import why_no_kernels
from pipesd.cloud.steps import steps_for
from pipesd.cloud.target import TorchTarget, new_cache
from pipesd.core import ModelInfo, Vocabulary
from pipesd.model_shape import CacheShape, ModelShape, Rope

PASS_FIGURE = 1.3  # most times the weights' way through memory, passes of 1 to 8 tokens of one session
BATCH_FIGURE = 1.5  # most times the same session's pass alone, 8 sessions of 5 tokens
NOT_HERE = 77  # exit code where there is no such device, as for a test that is skipped
SESSIONS, DRAFT = 8, 5
TOKENS = (1, 2, 4, 5, 8)
CONTEXT = 2304
SHAPES = {
    "7B": ModelShape("llama", 32, 4096, 32, 32, 128, 11008, 32000, CONTEXT, 1e-5),
    "8B, grouped queries": ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, CONTEXT, 1e-5, Rope(500000.0)),
}
SMALL = ModelShape("llama", 4, 256, 8, 2, 32, 640, 1000, 300, 1e-5)
HEADS = ((2, 1, 80), (2, 4, 64), (1, 7, 96), (2, 8, 128), (1, 2, 256))  # kv heads, groups, head size
ERRORS = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_decoder(shape: ModelShape, device: torch.device, dtype: torch.dtype, *, made_on: torch.device) -> Decoder:
    """A decoder with weights from a seed, drawn on `made_on`, of a spread that keeps activations near one."""
    draw = torch.Generator(made_on).manual_seed(0)
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "token_embd": (shape.width, shape.hidden), "output": (shape.width, shape.hidden),
        "attn_q": (query, shape.hidden), "attn_k": (key, shape.hidden), "attn_v": (key, shape.hidden),
        "attn_output": (shape.hidden, query), "ffn_gate": (shape.feed_forward, shape.hidden),
        "ffn_up": (shape.feed_forward, shape.hidden), "ffn_down": (shape.hidden, shape.feed_forward),
    }  # fmt: skip

    def weight(name: str) -> Tensor:
        size = sizes.get(name.split(".")[-2])
        if size is None:  # a norm
            return torch.ones(shape.hidden, device=made_on)
        values = torch.randn(size, generator=draw, device=made_on)
        return values if name.startswith("token_embd") else values.mul_(2 * size[1] ** -0.5)

    with torch.inference_mode():
        return Decoder(shape, weight, PlainLinear, device=device, dtype=dtype, steps=steps_for(device))


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `run`, the device's work included."""
    times = []
    for turn in range(repeats + 2):
        _settle(device)
        began = time.perf_counter()
        run()
        _settle(device)
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return float(np.median(times))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidths(device: torch.device, n_bytes: int) -> dict[str, float]:
    """Bytes per second of a copy, read and written bytes counted, and of a sum, which only reads."""
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return {
        "copy": 2 * source.nbytes / seconds(lambda: target.copy_(source), device, 10),
        "read": source.nbytes / seconds(source.sum, device, 10),
    }


class Passes:
    """Sessions with a text each, and passes over them in one form."""

    def __init__(self, decoder: Decoder, cache: PagedCache, run: RecordedPasses) -> None:
        self.cache = cache
        self.run = run
        self.draw = np.random.default_rng(0)
        self.width = decoder.shape.width

    def ids(self, count: int) -> list[int]:
        found: list[int] = self.draw.integers(self.width, size=count).tolist()
        return found

    def fill(self, length: int) -> None:
        """Every session holds a text of so many ids."""
        for slot in range(self.cache.slots):
            self.cache.truncate(slot, min(length, self.cache.length(slot)))
            while (missing := length - self.cache.length(slot)) > 0:
                self.run([(slot, self.ids(min(missing, EXACT_SIZE)), 0)])

    def measure(self, sessions: int, tokens: int, repeats: int) -> dict[str, float]:
        """Median ms of a pass up to the ids on the host, and of the host's part before it waits."""
        starts = [self.cache.length(slot) for slot in range(sessions)]
        whole, host = [], []
        for turn in range(repeats + 3):
            batch = [(slot, self.ids(tokens), tokens) for slot in range(sessions)]
            _settle(self.cache.pool.device)
            began = time.perf_counter()
            results = self.run(batch)
            assert results is not None
            left = time.perf_counter()
            results[1].tolist()
            if turn >= 3:
                whole.append(time.perf_counter() - began)
                host.append(left - began)
            for slot, start in enumerate(starts):
                self.cache.truncate(slot, start)
        return {"ms": 1e3 * float(np.median(whole)), "host_ms": 1e3 * float(np.median(host))}


def measure_model(
    shape: ModelShape, device: torch.device, bandwidth: float, lengths: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    """Every form's passes of a random model of this shape."""
    decoder = random_decoder(shape, device, torch.bfloat16, made_on=device)
    with torch.inference_mode():
        cache = _paged(shape.cache(shape.context), SESSIONS, device, torch.bfloat16)
        forms = {
            "recorded": RecordedPasses(decoder, cache),
            "no graphs": RecordedPasses(decoder, cache, record=lambda run: run),
            "row-invariant": RecordedPasses(decoder, cache, exact=True),
        }
        began = time.perf_counter()
        forms["recorded"].prepare()
        prepared_s = time.perf_counter() - began
        weight_bytes = sum(matrix.memory[1] for matrix in decoder.matrices())
        ideal_ms = 1e3 * weight_bytes / bandwidth
        rows = []
        for length in lengths:
            for form, run in forms.items():
                passes = Passes(decoder, cache, run)
                passes.fill(length)
                for sessions, tokens in [*((1, count) for count in TOKENS), (SESSIONS, DRAFT)]:
                    taken = passes.measure(sessions, tokens, repeats)
                    row = {"form": form, "text": length, "sessions": sessions, "tokens": tokens} | taken
                    rows.append(row | {"ratio": taken["ms"] / ideal_ms})
        on_cuda = device.type == "cuda"
        agree = rows_agree(decoder) if on_cuda else None
        waits = waits_hidden(lambda: forms["recorded"]([(0, [1] * DRAFT, DRAFT), (1, [2], 1)])) if on_cuda else None
    return {
        "weight_bytes": weight_bytes, "ideal_ms": ideal_ms, "prepare_s": prepared_s, "rows_agree": agree,
        "waits": waits,
        "rows": rows,
    }  # fmt: skip


def kernel_errors(device: torch.device, read: PagedRead) -> Iterator[tuple[str, float, bool]]:
    """(what, largest difference from the plain form, whether that is little) for head sizes, windows and precisions."""
    draw = torch.Generator(device).manual_seed(0)
    for dtype, most in ERRORS.items():
        for kv_heads, groups, head_size in HEADS:
            longest = 4090 if device.type == "cuda" else 150  # splits get longer at 4096
            shape = CacheShape(1, kv_heads, groups, head_size, longest + 20)
            cache = PagedCache(shape, 4, device=device, dtype=dtype, read=plain_read)
            cache.pool.normal_(generator=draw)
            for slot, length in enumerate((longest, longest // 7, 63, 0)):
                if length:
                    cache.extend([(slot, length)])
            attention = cache.extend([(2, 3), (0, 12), (3, 1), (1, 7)], 32)
            query = torch.randn(32, groups * kv_heads * head_size, generator=draw, device=device).to(dtype)
            table = cache._table[:-1].view(4, -1)
            for window in (0, longest // 8):
                got, wanted = (
                    form(query, cache.pool[0], table, attention.rows, shape, window) for form in (read, plain_read)
                )
                error = (got - wanted).abs().max().item()
                name = f"{str(dtype).removeprefix('torch.')} {kv_heads}x{groups}x{head_size} window {window}"
                yield name, error, error <= most


def greedy_ids(target: TorchTarget, count: int) -> list[int]:
    """What the target says behind a fixed prompt, by drafts of 4 ids that are judged in one pass, beside another
    session: each draft is right up to a place that changes, and what was judged wrong is taken back."""
    prompt = list(range(3, 40))
    told = prompt + _one_by_one(target, prompt, count + 4)
    text = list(prompt)
    target.greedy([(0, text[:-1], 0)])
    turn = 0
    while len(text) < len(prompt) + count:
        draft = told[len(text) :][:4]
        if (right := turn % 5) < 4:  # all are right in the last turn of five
            draft[right] = (draft[right] + 1) % target.info.vocabulary_size
        judged = target.greedy([(0, [text[-1], *draft], 5), (1, text[-3:], 1)])[0]
        kept = next((i for i, (a, b) in enumerate(zip(draft, judged, strict=False)) if a != b), len(draft))
        text += judged[: kept + 1]
        target.truncate(0, len(text) - 1)
        target.truncate(1, 0)
        turn += 1
    target.truncate(0, 0)
    return text[len(prompt) :][:count]


def _one_by_one(target: TorchTarget, prompt: list[int], count: int) -> list[int]:
    """The ids that the target says behind the prompt, each in a pass of its own."""
    ids = list(target.greedy([(0, prompt, 1)])[0])
    while len(ids) < count:
        ids += target.greedy([(0, ids[-1:], 1)])[0]
    target.truncate(0, 0)
    return ids


def waits_hidden(run: Callable[[], object]) -> bool:
    """Whether the host waits for the CUDA device anywhere in `run`, as torch sees it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def same_ids(device: torch.device, count: int) -> int:
    """How many of `count` greedy ids of a small float32 model are the CPU's before the first that is not."""
    targets: list[TorchTarget] = []
    for place in (torch.device("cpu"), device):
        decoder = random_decoder(SMALL, place, torch.float32, made_on=torch.device("cpu"))
        cache: KVCache | PagedCache
        shape = SMALL.cache(SMALL.context)
        if targets:
            cache = _paged(shape, 2, place, torch.float32)
        else:
            cache = KVCache(shape, 2, device=place, dtype=torch.float32, exact=False)
        info = ModelInfo("", SMALL.width, SMALL.context, (), b"", str(place), "float32")
        targets.append(TorchTarget(decoder, cache, info, Vocabulary(()), threads=1, exact=False))
    ours, theirs = (greedy_ids(target, count) for target in targets)
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), count)


def _paged(shape: CacheShape, slots: int, device: torch.device, dtype: torch.dtype) -> PagedCache:
    if device.type == "cpu":
        return PagedCache(shape, slots, device=device, dtype=dtype, read=plain_read)
    cache = new_cache(shape, slots, device=device, dtype=dtype, exact=False, room=None, say=print)
    assert isinstance(cache, PagedCache)
    return cache


def _print_table(name: str, found: dict[str, Any]) -> None:
    print(
        f"\n{name}: {found['weight_bytes'] / 1e9:.2f} GB of weights, {found['ideal_ms']:.2f} ms by the copy's bandwidth"
    )
    print(f"{'form':>14}{'text':>7}{'sessions':>10}{'tokens':>8}{'ms':>9}{'host ms':>9}{'ratio':>7}")
    for row in found["rows"]:
        print(
            f"{row['form']:>14}{row['text']:7}{row['sessions']:10}{row['tokens']:8}{row['ms']:9.3f}"
            f"{row['host_ms']:9.3f}{row['ratio']:7.2f}"
        )


def _figures(models: dict[str, Any]) -> dict[str, bool]:
    reached = {}
    for name, found in models.items():
        rows = [row for row in found["rows"] if row["form"] == "recorded"]
        alone = [row for row in rows if row["sessions"] == 1]
        reached[f"{name}: passes"] = all(row["ratio"] <= PASS_FIGURE for row in alone)
        reached[f"{name}: sessions"] = all(
            row["ms"] <= BATCH_FIGURE * other["ms"]
            for row in rows
            for other in alone
            if row["sessions"] == SESSIONS and other["tokens"] == DRAFT and other["text"] == row["text"]
        )
        reached[f"{name}: rows agree"] = found["rows_agree"] is True
        reached[f"{name}: no hidden waits"] = found["waits"] is False
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to see that it works (default cuda)")
    parser.add_argument("--repeats", type=int, default=50, help="passes of each kind (default 50)")
    parser.add_argument("--quick", action="store_true", help="five passes of each kind, the first shape, short texts")
    options = parser.parse_args()
    device = torch.device(options.device)
    read: PagedRead = plain_read
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(f"bench/gpu.py: torch {torch.__version__} sees no CUDA device; run it where there is one")
            return NOT_HERE
        if (why := why_no_kernels(device)) is not None:
            print(f"bench/gpu.py: {why}")
            return NOT_HERE
        from pipesd.cloud.paged_kernels import triton_read as read

        torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    shapes, n_bytes = SHAPES, 4 << 30
    lengths: tuple[int, ...] = (512, 2048)
    if options.quick:
        shapes, lengths = dict(list(SHAPES.items())[:1]), (512,)
    if device.type == "cpu":
        shapes, n_bytes, lengths = {"tiny": replace(SMALL, layers=1)}, 1 << 20, (70,)
    repeats = 5 if options.quick else options.repeats

    checks = {}
    with torch.inference_mode():
        for name, error, good in kernel_errors(device, read):
            checks[f"kernels, {name}"] = good
            if not good:
                print(f"kernels, {name}: off by {error:.1e}")
    equal = same_ids(device, 64)
    checks["float32 ids"] = equal == 64
    print(f"kernels {sum(checks.values())} of {len(checks)} checks; {equal} of 64 float32 ids are the CPU's")
    bandwidth = bandwidths(device, n_bytes)
    print("bandwidth: " + ", ".join(f"{name} {value / 1e9:.0f} GB/s" for name, value in bandwidth.items()))
    models = {}
    for name, shape in shapes.items():
        models[name] = measure_model(shape, device, bandwidth["copy"], lengths, repeats)
        _print_table(name, models[name])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    reached = checks | (_figures(models) if device.type == "cuda" else {})
    summary = {
        "bench": "gpu",
        "kind": "real",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "repeats": repeats,
        "bandwidth_bytes_per_s": bandwidth,
        "float32_ids_equal": equal,
        "models": models,
        "figures_reached": reached,
    }
    print(json.dumps(summary))
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    end_with(main)
