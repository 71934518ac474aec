"""docs/models.md is held to what the code says: its table of memory, its formula, and what `pair` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipesd.cloud.memory import Need, need_of
from pipesd.model_shape import ModelShape

TEXT = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
# layers, hidden, heads, kv_heads, head_size, feed_forward, vocabulary, tied: from the models' own config.json
MODELS = {
    "SmolLM2 135M": (30, 576, 9, 3, 64, 1536, 49152, True),
    "TinyLlama 1.1B": (22, 2048, 32, 4, 64, 5632, 32000, False),
    "Llama 3.2 1B": (16, 2048, 32, 8, 64, 8192, 128256, True),
    "DeepSeek-Coder 1.3B": (24, 2048, 16, 16, 128, 5504, 32256, False),
    "Llama 3.2 3B": (28, 3072, 24, 8, 128, 8192, 128256, True),
    "Llama 2 7B, DeepSeek-Coder 6.7B": (32, 4096, 32, 32, 128, 11008, 32000, False),
    "Mistral 7B": (32, 4096, 32, 8, 128, 14336, 32000, False),
    "Qwen2.5 7B": (28, 3584, 28, 4, 128, 18944, 152064, False),
    "Llama 3.1 8B": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "Llama 2 13B": (40, 5120, 40, 40, 128, 13824, 32000, False),
    "DeepSeek-Coder 33B": (62, 7168, 56, 8, 128, 19200, 32256, False),
}
ROWS = re.findall(r"^\| ([^|]+?) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", TEXT, re.MULTILINE)


def need(model: str, item_bytes: int, *, packed: bool) -> Need:
    layers, hidden, heads, kv_heads, head_size, feed_forward, width, tied = MODELS[model]
    shape = ModelShape(
        family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_size=head_size,
        feed_forward=feed_forward, width=width, context=1000, norm_eps=1e-5, tied=tied,
    )  # fmt: skip
    return need_of(shape, item_bytes, 1, packed=packed)


def test_the_table_has_every_model_once() -> None:
    assert [row[0] for row in ROWS] == list(MODELS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_memory_is_what_loading_asks_for(row: tuple[str, ...]) -> None:
    model, *numbers = row
    wanted = [
        need(model, 4, packed=True).weights,
        need(model, 2, packed=True).weights,
        need(model, 2, packed=False).weights,
        need(model, 2, packed=True).cache,
    ]
    for number, n_bytes in zip(numbers, wanted, strict=True):
        least = 10.0 ** -len(number.partition(".")[2])
        assert float(number) == pytest.approx(n_bytes / 1e9, abs=0.51 * least)


def test_the_formula_is_that_of_the_code() -> None:
    layers, hidden, heads, kv_heads, head_size, feed_forward, vocabulary, _ = MODELS["Mistral 7B"]
    names = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": head_size,
        "feed_forward": feed_forward, "vocabulary": vocabulary, "tables": 2, "b": 2,
    }  # fmt: skip
    for name, formula in re.findall(r"^    (layer|weights|cache) +=\s+(.+?)(?:   .*)?$", TEXT, re.MULTILINE):
        names[name] = eval(formula.replace("·", "*"), {}, names)
    found = need("Mistral 7B", 2, packed=True)
    assert (names["weights"], 1000 * names["cache"]) == (found.weights, found.cache)


def test_every_line_of_a_report_is_explained() -> None:
    source = (Path(__file__).parents[1] / "pipesd" / "edge" / "pair_report.py").read_text(encoding="utf-8")
    lines = set(re.findall(r'\("([a-z ]+)", (?:_\w+\(report|remark|report\.verdict)', source))
    table = TEXT.partition("| line | what it means |")[2].partition("\n\n")[0]
    explained = {name for row in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for name in row.split(", ")}
    assert len(lines) >= 7 and lines - {"draft", "target"} == explained


def test_every_name_of_the_json_object_is_explained() -> None:
    from pipesd.edge.pair_report import NAMES, _facts
    from pipesd.edge.pair_sample import Sample
    from tests.pair_facts import FACTS

    told = TEXT.partition("`--json` prints one object")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z_0-9]+)`", told)) - {"null"} == {
        *NAMES,
        *_facts(FACTS),
        "id",
        *Sample.__annotations__,
    }
