"""Hugging Face folders as checkpoints: the same model as its GGUF file, whole in any number of files; wrong ones in one
line each."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import IM_END, write_tiny
from tiny_hf import write_folder

pytest.importorskip("torch")

import torch

from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.hf_folder import open_folder, open_folder_checkpoint
from pipesd.errors import UsageError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sharded") / "tiny", shards=3)


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "tiny"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def resave(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """The weights of `folder` once more, with the table of its tensors edited."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WHOLE)
    edit(tensors)
    (folder / WHOLE).unlink()
    save_file(tensors, folder / WHOLE)


# --- what a folder is ---


def test_a_folder_and_its_gguf_file_are_one_model(whole: Path, tmp_path: Path) -> None:
    ours, theirs = open_checkpoint(whole), open_checkpoint(write_tiny(tmp_path / "tiny.gguf"))
    assert ours.shape == replace(theirs.shape, norm_eps=1e-5)  # a GGUF file has it as float32
    assert ours.vocabulary == theirs.vocabulary
    assert set(ours.tensor_names) == set(theirs.tensor_names)
    for name in ours.tensor_names:
        assert torch.equal(ours.weight(name), theirs.weight(name)), name  # type: ignore[arg-type]
    assert (ours.name, ours.path, ours.file_dtype, ours.files) == ("tiny", whole, "float32", 1)
    assert ours.size_bytes == theirs.size_bytes and ours.end_ids == (IM_END,)
    assert ours.weight("no.such.tensor") is None and ours.tensor_bytes("output_norm.weight") == 256


def test_a_folder_in_parts_is_the_same(whole: Path, sharded: Path) -> None:
    one, parts = open_checkpoint(whole), open_checkpoint(sharded)
    assert parts.files >= 3 and open_folder(sharded).files[0].startswith("model-00001-of-")
    assert parts.size_bytes == one.size_bytes
    for name in one.tensor_names:
        assert torch.equal(one.weight(name), parts.weight(name)), name  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rotary_pairs_are_neighbours_in_biases_and_gains_too(tmp_path: Path, family: str) -> None:
    from safetensors.torch import load_file

    checkpoint = open_checkpoint(write_folder(tmp_path / "m", family))
    stored = load_file(tmp_path / "m" / WHOLE)
    part = "q_proj.bias" if family == "qwen2" else "k_norm.weight"
    values = stored[f"model.layers.1.self_attn.{part}"]
    ours = checkpoint.weight("blk.1.attn_q.bias" if family == "qwen2" else "blk.1.attn_k_norm.weight")
    assert torch.equal(ours, values.view(-1, 2, 8).transpose(1, 2).reshape(-1))  # type: ignore[arg-type]
    straight = checkpoint.weight("blk.1.attn_v.weight")
    assert torch.equal(straight, stored["model.layers.1.self_attn.v_proj.weight"])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precisions_are_read_exactly(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file

    checkpoint = open_checkpoint(write_folder(tmp_path / "m", dtype=dtype))
    assert checkpoint.file_dtype == dtype
    wanted = load_file(tmp_path / "m" / WHOLE)["model.layers.0.mlp.up_proj.weight"]
    assert wanted.dtype == getattr(torch, dtype)
    assert torch.equal(checkpoint.weight("blk.0.ffn_up.weight"), wanted.float())  # type: ignore[arg-type]


def test_tied_embeddings_need_no_output_layer_and_ignore_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", tie_word_embeddings=True)
    assert open_checkpoint(folder).shape.tied and "output.weight" not in open_checkpoint(folder).tensors
    resave(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 64)}))
    assert "output.weight" not in open_checkpoint(folder).tensors


def test_old_buffers_of_frequencies_are_passed_over(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    resave(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert len(open_checkpoint(folder).tensors) == len(open_checkpoint(whole).tensors)


def test_end_ids_are_those_of_generation_then_of_the_config_then_of_the_vocabulary(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    change(folder / "generation_config.json", eos_token_id=[258, 5, 258])
    assert open_checkpoint(folder).end_ids == (5, 258)
    change(folder / "generation_config.json", eos_token_id=None)
    change(folder / "config.json", eos_token_id=7)
    assert open_checkpoint(folder).end_ids == (7,)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).end_ids == (7,)
    change(folder / "config.json", eos_token_id=None)
    assert open_checkpoint(folder).end_ids == (256, 258)


def test_fewer_tokens_than_embeddings_are_padded(tmp_path: Path) -> None:
    vocabulary = open_checkpoint(write_folder(tmp_path / "m", n_real=470)).vocabulary
    assert (vocabulary.size, vocabulary.real_size) == (512, 470)


def test_a_hubs_cache_is_read_through_its_links(whole: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--maker--Tiny-1B"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(whole.iterdir())):
        shutil.copy(path, repository / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.name == "Tiny-1B"
    assert checkpoint.fingerprint("float32", "cpu") == open_checkpoint(whole).fingerprint("float32", "cpu")
    told = refused(repository)
    assert told == f"{repository}: a directory without a config.json; it is a hub's cache of a model: give the model " \
        f"in it, {snapshot}"  # fmt: skip


@pytest.mark.parametrize(
    "edit",
    [
        lambda folder: change(folder / "config.json", rope_theta=7.0),
        lambda folder: change(folder / "generation_config.json", eos_token_id=1),
        lambda folder: change(folder / "tokenizer_config.json", eos_token="<|endoftext|>"),
        lambda folder: resave(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.5)),
        lambda folder: resave(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][-1, -1].add_(1)),
    ],
)
def test_the_fingerprint_changes_with_texts_and_weights(
    whole: Path, tmp_path: Path, edit: Callable[[Path], object]
) -> None:
    folder = copy(whole, tmp_path)
    prints = {open_checkpoint(each).fingerprint("float32", "cpu") for each in (whole, folder)}
    assert len(prints) == 1 and len({open_folder(each).fingerprint("a", "cpu") for each in (whole, folder)}) == 1
    edit(folder)
    prints |= {open_checkpoint(folder).fingerprint(*of) for of in (("float32", "cpu"), ("bfloat16", "cpu"))}
    assert len(prints) == 3
    assert open_folder(folder).fingerprint("a", "cpu") != open_folder(whole).fingerprint("a", "cpu")


def test_a_folder_of_another_family_is_open_to_other_backends(whole: Path, tmp_path: Path) -> None:
    folder = copy(whole, tmp_path)
    change(folder / "config.json", model_type="gemma2", quantization_config={"quant_method": "fp8"})
    resave(folder, lambda tensors: tensors.update({"scale": torch.ones(3, dtype=torch.int8)}))
    found = open_folder(folder)
    assert (found.name, found.vocabulary.size) == ("tiny", 512)
    assert found.config["model_type"] == "gemma2" and "scale" in found.tensors
    assert "is quantised by fp8, which no backend reads" in refused(folder)


# --- what is no folder that can be served ---


def refused(path: Path | str) -> str:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(path)
    told = str(caught.value)
    assert told.startswith("/") and "; " in told and "\n" not in told
    return told


def only(folder: Path, name: str, content: bytes = b"") -> None:
    """Leaves `folder` without weights but with a file `name`."""
    (folder / WHOLE).unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda at: (at / "config.json").unlink(), "a directory without a config.json; give a GGUF file or"),
    "GGUF beside": (
        lambda at: ((at / "config.json").unlink(), (at / "q.gguf").touch()), "one of its GGUF files, such as q.gguf"
    ),
    "makers' format": (
        lambda at: ((at / "config.json").unlink(), (at / "params.json").touch()), "the format of the model's makers"
    ),
    "adapter": (lambda at: (at / "config.json").rename(at / "adapter_config.json"), "an adapter (LoRA), not a model"),
    "adapter with config": (lambda at: only(at, "adapter_config.json"), "an adapter (LoRA), not a model"),
    "no weights": (lambda at: (at / WHOLE).unlink(), f"has neither {WHOLE} nor {INDEX}"),
    "only GGUF weights": (lambda at: only(at, "q.gguf"), f"has no {WHOLE}, but GGUF files"),
    "pickled": (
        lambda at: only(at, "pytorch_model.bin", pickle.dumps(1)),
        "pytorch_model.bin: a pickled PyTorch checkpoint, never opened since it could run code; use a folder",
    ),
    "pickled shards": (lambda at: only(at, "pytorch_model-00001-of-00002.bin"), "a pickled PyTorch checkpoint"),
    "pickled by its makers": (lambda at: only(at, "consolidated.00.pth"), "a pickled PyTorch checkpoint"),
    "makers' weights": (lambda at: only(at, "consolidated.safetensors"), "has only consolidated.safetensors"),
    "incomplete": (lambda at: only(at, f"{WHOLE}.incomplete"), f"has no {WHOLE}, and a download is unfinished"),
    "incomplete, hub": (lambda at: only(at, ".cache/huggingface/download/x.incomplete"), "a download is unfinished"),
    "part": (lambda at: only(at, f"{WHOLE}.part"), "a download is unfinished"),
    "aria2": (lambda at: (at / f"{WHOLE}.aria2").touch(), f"its download is unfinished ({WHOLE}.aria2 lies beside it)"),
    "no index": (lambda at: only(at, "model-00001-of-00002.safetensors"), f"but no {INDEX}; download that too"),
    "cut": (lambda at: (at / WHOLE).write_bytes((at / WHOLE).read_bytes()[:-1]), "cut short"),
    "renamed GGUF": (lambda at: (at / WHOLE).write_bytes(b"GGUF" + bytes(60)), "a GGUF file, a safetensors file was"),
    "renamed pickle": (lambda at: (at / WHOLE).write_bytes(pickle.dumps(1)), "a pickled PyTorch checkpoint (never"),
    "missing tensor": (
        lambda at: resave(at, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
        "has no tensor model.layers.1.self_attn.k_proj.weight",
    ),
    "missing norm": (lambda at: resave(at, lambda t: t.pop("model.norm.weight")), "has no tensor model.norm.weight"),
    "missing output": (lambda at: resave(at, lambda t: t.pop("lm_head.weight")), "has no tensor lm_head.weight"),
    "strange tensor": (
        lambda at: resave(at, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)})),
        "does not use, model.layers.0.self_attn.o_proj.bias",
    ),
    "stranger tensor": (
        lambda at: resave(at, lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(64)})),
        "has a tensor that this decoder does not use, model.layers.0.mlp.gate.weight",
    ),
    "more layers": (
        lambda at: change(at / "config.json", num_hidden_layers=1), "has a tensor that this decoder does not use"
    ),
    "fewer embeddings": (
        lambda at: resave(at, lambda t: t.update({"model.embed_tokens.weight": torch.ones(500, 64)})),
        "tensor model.embed_tokens.weight is (500, 64), (512, 64) was wanted",
    ),
    "stored as int8": (
        lambda at: resave(at, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "tensor model.norm.weight is stored as I8, one of F32, F16, BF16, F64 was wanted",
    ),
    "stored as float8": (
        lambda at: resave(at, lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})),
        "tensor model.norm.weight is stored as F8_E4M3",
    ),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "a smaller vocabulary": (
        lambda at: change(at / "config.json", vocab_size=500), "has a token with id 511, the model only 500 ids"
    ),
    "ends that are none": (
        lambda at: change(at / "generation_config.json", eos_token_id=512),
        "generation_config.json: eos_token_id '512' is no id of the model (0 to 511)",
    ),
    "ends in the config that are none": (
        lambda at: ((at / "generation_config.json").write_text("{}"), change(at / "config.json", eos_token_id="x")),
        "config.json: eos_token_id 'x' is no id",
    ),
    "damaged generation": (lambda at: (at / "generation_config.json").write_text("{"), "generation_config.json: not"),
    "damaged config": (lambda at: (at / "config.json").write_text('{"model_type": "lla'), "config.json: not JSON, or"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder_is_one_line(whole: Path, tmp_path: Path, name: str) -> None:
    folder = copy(whole, tmp_path)
    spoil, told = SPOILED[name]
    spoil(folder)
    assert told in refused(folder)


def index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / INDEX).read_text())
    edit(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


FIRST, SECOND = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"
SPOILED_PARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda at: (at / SECOND).unlink(), f"{SECOND}: is missing (1 of the 4 files that {INDEX} names); down"
    ),
    "half downloaded": (
        lambda at: (at / SECOND).rename(at / f"{SECOND}.incomplete"), "names, and a download is unfinished); downl"
    ),
    "cut": (lambda at: (at / SECOND).write_bytes((at / SECOND).read_bytes()[:-9]), f"{SECOND}: cut short"),
    "empty": (lambda at: (at / SECOND).write_bytes(b""), f"{SECOND}: empty"),
    "zeros": (lambda at: (at / SECOND).write_bytes(bytes(4096)), f"{SECOND}: all zeros"),
    "outside": (lambda at: index(at, lambda of: of.update({"model.norm.weight": "../x.safetensors"})), "is outside"),
    "absolute": (lambda at: index(at, lambda of: of.update({"model.norm.weight": "/x.safetensors"})), "is outside"),
    "no file": (lambda at: index(at, lambda of: of.update({"model.norm.weight": 5})), "names '5', a safetensors file"),
    "no map": (lambda at: (at / INDEX).write_text("{}"), "has no table weight_map"),
    "not there": (
        lambda at: index(at, lambda of: of.update({"model.extra": FIRST})), f"{FIRST}: has no tensor model.extra, which"
    ),
    "elsewhere": (
        lambda at: index(at, lambda of: of.update({"model.norm.weight": FIRST})), f"{FIRST}: has no tensor"
    ),
    "twice": (lambda at: shutil.copy(at / FIRST, at / SECOND), "is also in"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED_PARTS)
def test_a_spoiled_part_is_one_line(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = copy(sharded, tmp_path)
    spoil, told = SPOILED_PARTS[name]
    spoil(folder)
    assert told in refused(folder)


def test_the_name_of_a_model_on_a_hub_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = refused("meta-llama/Llama-3.2-1B")
    assert told.startswith(f"{tmp_path}/meta-llama/Llama-3.2-1B: no such file, and nothing is downloaded here")
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir FOLDER`" in told
    assert "downloaded" not in refused("models/llama/1B") and "downloaded" not in refused(tmp_path / "none")


def test_a_file_is_no_folder(whole: Path) -> None:
    with pytest.raises(UsageError, match="a file, a Hugging Face folder was wanted"):
        open_folder_checkpoint(whole / WHOLE)
    assert refused(whole / WHOLE).endswith(f"is one file of a Hugging Face folder; give the folder, {whole}")


def test_home_is_expanded(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(whole.parent))
    assert open_folder("~/tiny").path == whole
