"""Model folders that no cloud can serve: what people give by mistake, and what somebody means to break it with."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from tests.spoiling import (
    CONFIG,
    ESCAPE,
    GENERATION,
    INDEX,
    OPTIONS,
    TOKENS,
    WEIGHTS,
    Raw,
    Spoil,
    added,
    beside,
    both,
    cut,
    edit,
    endless,
    first,
    first_matrix,
    folder,
    given,
    header,
    holds,
    in_shard,
    lacks,
    leads,
    length,
    offsets,
    pipe,
    renamed,
    sets,
    shards,
    special,
    vocabulary,
)


def _longer(at: Path) -> None:
    with (at / WEIGHTS).open("ab") as file:
        file.write(b"behind the end")


def _zeros(at: Path) -> None:
    size = (at / WEIGHTS).stat().st_size
    (at / WEIGHTS).write_bytes(bytes(size))


def _empty(at: Path) -> None:
    for path in at.iterdir():
        path.unlink()


def _unreadable(at: Path) -> None:
    at.chmod(0)


DEEP = b"[" * 200_000
DEEP_TABLE = b'{"a":' * 200_000
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 4437780000\n"
PAGE = b"<!DOCTYPE html><title>404</title>"
BIG = Raw("1" + "0" * 4000)
BIGGER = Raw("1" + "0" * 10_000)  # more digits than Python reads
BEYOND = Raw("1e999")
NAN = Raw("NaN")

# Config values that nobody can mean. The message names the key.
CONFIG_VALUES: dict[str, list[Any]] = {
    "vocab_size": [..., 0, -5, 10**12, 1.5, "512", True, [], NAN, BEYOND, BIG, BIGGER],
    "num_hidden_layers": [..., 0, 10**9, 2**31 - 1, 10**12, NAN, "2", {}],
    "hidden_size": [..., 0, 2**31 - 1, 10**15, NAN, BEYOND],
    "num_attention_heads": [..., 0, 3, 10**9, NAN, "four"],
    "num_key_value_heads": [0, 3, 10**9, "two"],
    "intermediate_size": [..., 0, 10**12, NAN],
    "head_dim": [0, 7, 10**9, "x", NAN],
    "max_position_embeddings": [..., 0, 1, 2**31 - 1, 10**12, NAN, "long"],
    "rms_norm_eps": [0, -1, NAN, BEYOND, "small"],
    "rope_theta": [0, -1, NAN, BEYOND, "x"],
    "rope_scaling": [
        "yarn", 5, [], [1], {"type": "longrope"}, {"type": "su", "factor": 2}, {"rope_type": ESCAPE, "factor": 2},
        {"type": 5}, {"type": "linear"}, {"type": "linear", "factor": NAN}, {"type": "linear", "factor": "2"},
        {"type": "yarn", "factor": BEYOND}, {"type": "yarn", "factor": 10**300}, {"type": "yarn", "factor": 1e29},
        {"type": "linear", "factor": 1.7e308}, {"type": "dynamic", "factor": -1},
        {"rope_type": "llama3", "factor": 8}, {"type": "mrope", "mrope_section": [1, 2]},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
         "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
    ],
    "model_type": [..., "", "gpt_neox", "LLAMA", 5, [], {}, ESCAPE, "x" * 100_000, "\ud800"],
    "architectures": ["x", 5, [5], ["LlamaForSequenceClassification"], [["LlamaForCausalLM"]], [ESCAPE]],
    "hidden_act": ["gelu", 5, ESCAPE],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {"quant_method": ESCAPE}, "x"],
    "attention_bias": ["yes"],
    "mlp_bias": ["yes"],
    "tie_word_embeddings": ["yes", 2],
    "partial_rotary_factor": [0.5, NAN],
    "vision_config": [{"hidden_size": 4}],
    "num_local_experts": [8],
}  # fmt: skip


def _configs() -> dict[str, Spoil]:
    made: dict[str, Spoil] = {}
    for key, values in CONFIG_VALUES.items():
        for i, value in enumerate(values):
            made[f"config {key} {i}"] = sets(CONFIG, **{key: value})
    for i, value in enumerate(["x", -5, 10**12, [[1]], {}, 1.5, NAN, BIG, True, [258, None]]):
        made[f"end ids {i}"] = sets(GENERATION, eos_token_id=value)
    return made


def _json_files() -> dict[str, Spoil]:
    """What no JSON file of the folder may be."""
    made: dict[str, Spoil] = {}
    texts = {
        "empty": b"", "null": b"null", "list": b"[]", "number": b"5", "text": b'"x"', "cut": b'{"a": ', "deep": DEEP,
        "deep table": DEEP_TABLE, "not UTF-8": b'{"a": "\xff\xfe"}', "zeros": bytes(4096), "page": PAGE, "lfs": LFS,
        "pickle": pickle.dumps({"a": 1}), "UTF-16": '{"a": 1}'.encode("utf-16"),
        "twice": b'{"vocab_size": 512, "vocab_size": 2}',
    }  # fmt: skip
    for name in (CONFIG, TOKENS, GENERATION, OPTIONS, INDEX):
        extra = [] if name != INDEX else [lacks(WEIGHTS)]
        for kind, content in texts.items():
            if name in (GENERATION, OPTIONS) and kind in ("twice", "UTF-16"):
                continue  # nothing in them is needed
            made[f"{name} {kind}"] = both(*extra, holds(name, content))
        made[f"{name} endless"] = both(*extra, endless(name))
        made[f"{name} pipe"] = both(*extra, pipe(name))
        made[f"{name} /dev/zero"] = both(*extra, leads(name, "/dev/zero"))
        made[f"{name} folder"] = both(*extra, folder(name))
        made[f"{name} link to nothing"] = both(*extra, leads(name, "nothing"))
        made[f"{name} link to itself"] = both(*extra, leads(name, name))
    return made


SPOILED: dict[str, Spoil] = {
    **_configs(),
    **_json_files(),
    # sizes of heads
    "heads of nothing": sets(CONFIG, model_type="qwen3", architectures=..., head_dim=None, num_attention_heads=128),
    "heads of one number": sets(CONFIG, model_type="qwen3", architectures=..., head_dim=None, num_attention_heads=64),
    "heads too small to stretch": sets(CONFIG, head_dim=2, rope_scaling={"type": "dynamic", "factor": 2.0}),
    # what is given
    "nothing there": lambda at: at / "nothing",
    "nothing in it": _empty,
    "config alone": lacks(WEIGHTS, TOKENS),
    "no config": lacks(CONFIG),
    "no tokenizer": lacks(TOKENS),
    "tokenizer.model alone": both(lacks(TOKENS), holds("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")),
    "no weights": lacks(WEIGHTS),
    "unreadable": _unreadable,
    "a pipe": given("pipe", pipe("pipe")),
    "/dev/zero": lambda at: Path("/dev/zero"),
    "/dev/null": lambda at: Path("/dev/null"),
    "/dev/stdin": lambda at: Path("/dev/stdin"),
    "/proc": lambda at: Path("/proc"),
    "link to itself": given("loop", leads("loop", "loop")),
    "a name too long": lambda at: at / ("x" * 300),
    "a name that steers": lambda at: at / ESCAPE,
    "a name of many parts": lambda at: at / "/".join(["x"] * 3000),
    "the config itself": lambda at: at / CONFIG,
    "the tokenizer itself": lambda at: at / TOKENS,
    "template pipe": both(sets(OPTIONS, chat_template=...), pipe("chat_template.jinja")),
    "template not UTF-8": both(sets(OPTIONS, chat_template=...), holds("chat_template.jinja", b"\xff")),
    "template folder": both(sets(OPTIONS, chat_template=...), folder("chat_template.jinja")),
    # weights
    "pickles alone": both(lacks(WEIGHTS), holds("pytorch_model.bin", pickle.dumps([1]))),
    "half downloaded": lambda at: (at / WEIGHTS).rename(at / (WEIGHTS + ".incomplete")) and None,
    "weights empty": holds(WEIGHTS, b""),
    "weights of seven bytes": holds(WEIGHTS, b"1234567"),
    "weights pickled": holds(WEIGHTS, pickle.dumps({"weights": [1.0]})),
    "weights zipped": holds(WEIGHTS, b"PK\x03\x04" + bytes(400)),
    "weights lfs": holds(WEIGHTS, LFS),
    "weights page": holds(WEIGHTS, PAGE),
    "weights GGUF": holds(WEIGHTS, b"GGUF\x03\0\0\0" + bytes(400)),
    "weights zeros": _zeros,
    "weights pipe": pipe(WEIGHTS),
    "weights /dev/zero": leads(WEIGHTS, "/dev/zero"),
    "weights folder": folder(WEIGHTS),
    "weights link to nothing": leads(WEIGHTS, "../blobs/gone"),
    "weights as GGUF": renamed(WEIGHTS, "model.gguf"),
    "weights longer": _longer,
    "weights cut by one": cut(WEIGHTS, lambda size: size - 1),
    "weights cut in half": cut(WEIGHTS, lambda size: size // 2),
    "weights cut in the header": cut(WEIGHTS, lambda size: 100),
    "weights cut behind the length": cut(WEIGHTS, lambda size: 8),
    **{
        f"header of {value:#x} bytes": length(value) for value in (0, 1, 2, 1 << 20, 10**8, 1 << 40, 1 << 63, 2**64 - 1)
    },
    "header not JSON": header(lambda table: b"{" + b"x" * 100),
    "header deep": header(lambda table: b"{" + DEEP_TABLE),
    "header list": header(lambda table: b"[]"),
    "header empty": header(lambda table: b"{}"),
    "header not UTF-8": header(lambda table: b'{"\xff": 1}'),
    "header without the tensors": header(lambda table: {"__metadata__": table}),
    "header with a strange tensor": header(lambda table: table.update({ESCAPE: table.pop(first_matrix(table))})),
    "header with a surrogate": header(lambda table: table.update({"\ud800": table.pop(first_matrix(table))})),
    "header twice": header(
        lambda table: json.dumps(table)[:-1].encode() + b", " + json.dumps({first_matrix(table): 1})[1:].encode()
    ),
    "tensor not a table": header(lambda table: table.update({first_matrix(table): 5})),
    "tensor without a type": first(dtype=None),
    "tensor of a strange type": first(dtype=ESCAPE),
    "tensor of a list as type": first(dtype=[]),
    "tensor I8": first(dtype="I8"),
    "tensor F8": first(dtype="F8_E4M3"),
    "tensor shape text": first(shape="512"),
    "tensor shape negative": first(shape=[-512, -64]),
    "tensor shape bool": first(shape=[True, 64]),
    "tensor shape float": first(shape=[512.0, 64]),
    "tensor shape huge": first(shape=[1 << 61, 1 << 61]),
    "tensor shape overflow": first(shape=[1 << 32, 1 << 32]),
    "tensor shape zero": first(shape=[0, 64]),
    "tensor shape none": first(shape=[]),
    "tensor shape long": first(shape=[1] * 100_000),
    "tensor shape other": first(shape=[64, 512]),
    "offsets negative": offsets(lambda start, end: [start - end, 0]),
    "offsets bool": offsets(lambda start, end: [False, end]),
    "offsets float": offsets(lambda start, end: [float(start), float(end)]),
    "offsets reversed": offsets(lambda start, end: [end, start]),
    "offsets beyond": offsets(lambda start, end: [start + (1 << 40), end + (1 << 40)]),
    "offsets huge": offsets(lambda start, end: [start + (1 << 63), end + (1 << 63)]),
    "offsets overlap": offsets(lambda start, end: [start + 4, end + 4]),
    "offsets one": offsets(lambda start, end: [start]),
    "offsets three": offsets(lambda start, end: [start, end, end]),
    # shards
    "index ../": both(beside("other.safetensors"), in_shard("../other.safetensors")),
    "index absolute": in_shard("/etc/passwd"),
    "index /dev/zero": in_shard("/dev/zero"),
    "index missing shard": in_shard("model-00002-of-00002.safetensors"),
    "index steering": in_shard(ESCAPE),
    "index surrogate": in_shard("\ud800.safetensors"),
    "index nul": in_shard("a\0b.safetensors"),
    "index empty name": in_shard(""),
    "index itself": in_shard(INDEX),
    "index dot": in_shard("."),
    "index number": in_shard(5),
    "index null": in_shard(None),
    "index list": in_shard(["model-00001-of-00001.safetensors"]),
    "index long name": in_shard("x" * 5000),
    "index without a map": shards(lambda index: {"metadata": {}}),
    "index with an empty map": shards(lambda index: {"weight_map": {}}),
    "index with a list": shards(lambda index: {"weight_map": []}),
    "index of a tensor that is not there": shards(
        lambda index: index["weight_map"].update({"model.layers.9.x": next(iter(index["weight_map"].values()))})
    ),
    # vocabulary
    "vocabulary list": edit(TOKENS, lambda values: values["model"].update(vocab=["a", "b"])),
    "vocabulary missing": edit(TOKENS, lambda values: values["model"].pop("vocab")),
    "vocabulary of words": edit(TOKENS, lambda values: values["model"].update(type="WordPiece")),
    "vocabulary of a strange type": edit(TOKENS, lambda values: values["model"].update(type=ESCAPE)),
    "vocabulary of no model": edit(TOKENS, lambda values: values.update(model=None)),
    "vocabulary with steps of no name": edit(
        TOKENS, lambda values: values.update(decoder={"type": []}, pre_tokenizer={"type": {}}, normalizer={"type": 5})
    ),
    "vocabulary id negative": vocabulary(lambda ids: ids.update({"zz1": -1})),
    "vocabulary id huge": vocabulary(lambda ids: ids.update({"zz1": 10**12})),
    "vocabulary id big": vocabulary(lambda ids: ids.update({"zz1": BIG})),
    "vocabulary id float": vocabulary(lambda ids: ids.update({"zz1": 1.5})),
    "vocabulary id bool": vocabulary(lambda ids: ids.update({"zz1": True})),
    "vocabulary id text": vocabulary(lambda ids: ids.update({"zz1": "7"})),
    "vocabulary id none": vocabulary(lambda ids: ids.update({"zz1": None})),
    "vocabulary id nan": vocabulary(lambda ids: ids.update({"zz1": NAN})),
    "vocabulary id beyond": vocabulary(lambda ids: ids.update({"zz1": 5000})),
    "vocabulary with half a character": vocabulary(lambda ids: ids.update({"\ud800": ids.pop(next(iter(ids)))})),
    "added half a character": added(special(511, "\ud800")),
    "added a million": added(*({"id": 1000 + i, "content": f"<{i}>", "special": True} for i in range(1_000_000))),
    "added id huge": added(special(10**12)),
    "added id negative": added(special(-1)),
    "added id float": added(special(1.5)),
    "added id text": added(special("5")),
    "added id none": added(special(None)),
    "added id list": added(special([])),
    "added text number": added(special(511, 5)),
    "added text none": added(special(511, None)),
    "added not a table": added(5),
    "added not a list": edit(TOKENS, lambda values: values.update(added_tokens={"a": 1})),
}
