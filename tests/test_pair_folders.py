"""`pipesd-edge pair` with a Hugging Face folder as the target: read as the cloud reads it, whole or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.edge.pair_folder import read_folder
from pipesd.edge.pair_served import GGUF_DECODER
from tests.pairs import Make, maker, pair, report
from tests.programs import edge
from tests.tiny_hf import write_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory.mktemp("tiny"))


def write_folder(folder: Path, *, files: int = 1, n_real: int | None = None, **config: Any) -> Path:
    """A Hugging Face folder with the vocabulary of the tiny models, and some weights."""
    write_tokenizer(folder, 512, n_real)
    settings = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": [256, 258]}
    (folder / "config.json").write_text(json.dumps(settings | SIZES | config))
    names = ["model.safetensors"] if files == 1 else [f"model-{i}.safetensors" for i in range(files)]
    where = {}
    for i, tensor in enumerate(["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]):
        where[tensor] = names[i % files]
    for name in names:
        tensors = [tensor for tensor in where if where[tensor] == name]
        table = {
            tensor: {"dtype": "BF16", "shape": [512, 64], "data_offsets": [i * 65536, (i + 1) * 65536]}
            for i, tensor in enumerate(tensors)
        }
        header = json.dumps({"__metadata__": {}, **table}).encode()
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(65536 * len(tensors)))
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_as_the_target(make: Make, tmp_path: Path, files: int) -> None:
    folder = write_folder(tmp_path / "Tiny-1B", files=files)
    ran = pair(make(), folder)
    assert ran.code == 0 and "target         Tiny-1B: llama, 98304 parameters" in ran.out
    assert "not measured: start pipesd-cloud with the target and give --cloud ADDRESS" in ran.out
    found = report(pair(make(), folder, "--json", "--quiet"))
    assert (found["same_template"], found["same_start_token"], found["same_end_ids"]) == (True, True, True)
    assert (found["target"]["parameters"], found["target"]["bytes"]) == (98304, 3 * 65536)
    assert found["not_measured"] and found["error"] is None and found["cost_ratio_16_bits"] > 1
    assert pair(make(swap=(300, 301)), folder).code == 4


def test_an_edge_reads_folders_without_the_clouds_libraries(make: Make, tmp_path: Path) -> None:
    loaded = "print({'torch', 'gguf', 'transformers', 'safetensors'} & set(sys.modules), file=sys.stderr)"
    before = f"import atexit, sys; atexit.register(lambda: {loaded})\n"
    ran = edge("pair", "--draft", make(), "--target", write_folder(tmp_path / "f"), before=before)
    assert (ran.code, ran.err) == (0, "set()\n")


@pytest.mark.slow
def test_a_cloud_that_serves_the_folder_accepts_what_its_gguf_file_says(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from pipesd import CloudConfig, CloudServer
    from tests.tiny_hf import write_folder as write_model

    folder = write_model(tmp_path / "tiny")
    with CloudServer(CloudConfig(model=str(folder), bind="tcp://127.0.0.1:0")) as served:
        found = report(pair(make(), folder, "--cloud", served.address, "--json", "--quiet", "--tokens", "24"))
    measured = found["acceptance"]
    assert (found["fits"], measured["where"], measured["tokens"]) == (True, "cloud", 72)
    assert measured["greedy"] > 0.9, "but for near ties: llama.cpp keeps its cache in float16"


def test_a_folder_whose_weights_are_still_to_come(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "half", files=3)
    (folder / "model-1.safetensors").unlink()
    found = report(pair(make(), folder, "--json", "--quiet"))
    assert found["fits"] is True and found["cost_ratio_float32"] is None and found["target"]["bytes"] is None
    assert any("are missing: model-1.safetensors (1 of 3 files)" in remark for remark in found["remarks"])
    assert "the target's are missing" in pair(make(), folder).out


def test_a_folder_that_is_being_downloaded(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "half")
    (folder / "model.safetensors").write_bytes(bytes(1 << 16))
    (folder / "model.safetensors.aria2").touch()
    ran = pair(make(), folder)
    assert ran.code == 0 and "are missing: model.safetensors (1 of 1 files)" in ran.out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_among_the_weights_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "piped")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    ran = pair(make(), folder)
    assert ran.code == 2 and f"{folder / 'model.safetensors'}: not a regular file" in ran.complaint


def test_an_index_that_leads_out_of_the_folder(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", files=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    ran = pair(make(), folder)
    assert ran.code == 2 and "names '../x.safetensors', which is outside the folder" in ran.complaint


def test_a_folder_of_pickled_weights(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model-00001-of-00001.bin")
    ran = pair(make(), folder)
    assert ran.code == 0 and "model.safetensors (the pickled ones in the folder are never opened)" in ran.out


def test_a_folder_as_the_draft_model_is_answered_with_how_to_convert_it(make: Make, tmp_path: Path) -> None:
    ran = pair(write_folder(tmp_path / "draft"), make())
    assert ran.code == 2 and "is a folder; give a GGUF file made of it, with llama.cpp's" in ran.complaint


def test_a_file_of_a_folder_and_nothing_at_all(make: Make, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f")
    for name in ("model.safetensors", "config.json"):
        ran = pair(make(), folder / name)
        assert ran.code == 2 and f"is one file of a Hugging Face folder; give the folder, {folder}" in ran.complaint
    ran = pair(make(), tmp_path / "nothing")
    assert ran.code == 2 and "no such file or folder; give a GGUF file or a Hugging Face folder" in ran.complaint


def test_what_is_no_folder_is_answered_as_the_cloud_does(make: Make, tmp_path: Path) -> None:
    adapter, makers, pickled = tmp_path / "lora", tmp_path / "makers", tmp_path / "m.pth"
    for folder, file in ((adapter, "adapter_config.json"), (makers, "params.json"), (tmp_path / "empty", "")):
        folder.mkdir()
        if file:
            (folder / file).write_text("{}")
    pickled.write_bytes(b"PK\x03\x04" + bytes(64))
    alone = write_folder(tmp_path / "f") / "model.safetensors"
    alone.rename(tmp_path / "alone.safetensors")
    for given, told in (
        (tmp_path / "empty", "a directory without a config.json; give a GGUF file or a Hugging Face folder"),
        (adapter, "an adapter (LoRA), not a model; merge it"),
        (makers, "params.json is the format of the model's makers"),
        (pickled, "never opened since it could run code; use a folder with model.safetensors, or convert one"),
        (tmp_path / "alone.safetensors", "give the Hugging Face folder that it belongs to"),
        (Path("meta-llama/Llama-3.2-1B"), "run `hf download meta-llama/Llama-3.2-1B --local-dir FOLDER`"),
    ):
        ran = pair(make(), given)
        assert ran.code == 2 and told in ran.complaint, given


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mamba"}, "is a mamba model, which keeps a state"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised by awq, which no backend reads"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings is '"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is '1000000'"),
        ({"vision_config": {"hidden_size": 8}}, "is not served"),
    ],
)
def test_a_folder_that_no_cloud_serves(make: Make, tmp_path: Path, config: dict[str, Any], told: str) -> None:
    ran = pair(make(), write_folder(tmp_path / "f", **config), "--json", "--quiet")
    found = report(ran)
    assert ran.code == 4 and found["fits"] is False and found["first_difference"] is None
    assert found["verdict"].startswith("cannot be served: ") and told in found["verdict"]


@pytest.mark.parametrize("config", [{"model_type": "olmo2"}, {"rope_scaling": {"type": "longrope", "factor": 4.0}}])
def test_a_folder_that_another_backend_may_serve(make: Make, tmp_path: Path, config: dict[str, Any]) -> None:
    ran = pair(make(), write_folder(tmp_path / "f", **config), "--json", "--quiet")
    found = report(ran)
    assert ran.code == 0 and found["fits"] is True
    assert any("--backend transformers may serve it if it is a plain" in remark for remark in found["remarks"])


def test_a_folder_padded_to_another_width(make: Make, tmp_path: Path) -> None:
    assert pair(make(n_vocab=544, n_real=500), write_folder(tmp_path / "wide", n_real=500)).code == 0


def test_a_folder_is_read_as_the_cloud_reads_it(tmp_path: Path) -> None:
    """Name, vocabulary, end ids and context, for each place where they may stand."""
    pytest.importorskip("torch")
    from pipesd.cloud.hf_folder import open_folder
    from pipesd.hf_config import read_shape

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    places: list[dict[str, Any]] = [
        {}, {"eos_token_id": None}, {"rope_scaling": yarn}, {"rope_parameters": yarn},
        {"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 256},
        {"rope_scaling": yarn, "original_max_position_embeddings": 64}, {"max_position_embeddings": 512.0},
        {"rope_parameters": {"full_attention": yarn}}, {"rope_scaling": {**yarn, "factor": None}},
        {"rope_parameters": yarn, "max_position_embeddings": 4096}, {"rope_scaling": {**yarn, "factor": 2.5}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, {"model_type": "qwen2"},
    ]  # fmt: skip
    for i, config in enumerate(places):
        folder = write_folder(tmp_path / f"models--a--Some-{i}B" / "snapshots" / "abc", **config)
        if i == 0:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
        facts, opened = read_folder(folder), open_folder(folder)
        shape = read_shape(folder / "config.json", opened.config)
        assert (facts.name, facts.vocabulary, facts.end_ids, facts.context, facts.architecture) == (
            opened.name, opened.vocabulary, frozenset(opened.end_ids), shape.context, shape.family
        )  # fmt: skip
        assert facts.name == f"Some-{i}B"
    assert read_folder(write_folder(tmp_path / "yarn", rope_scaling=yarn)).context == 2048


@pytest.mark.parametrize(("options", "added"), [({}, True), ({"add_bos_token": False}, False)])
def test_a_sentencepiece_model_wants_its_start_token_unless_told(
    tmp_path: Path, options: dict[str, Any], added: bool
) -> None:
    """That is llama.cpp's rule where a file does not say."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    tokenizer = {"model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": ids, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **options}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 4, "eos_token_id": 2}))
    facts = read_folder(tmp_path)
    assert (facts.bos_id, facts.add_bos, facts.context) == (1, added, 0)


def test_the_clouds_own_decoder_is_known_here() -> None:
    pytest.importorskip("torch")
    from pipesd.cloud import gguf_file

    assert GGUF_DECODER == gguf_file.ARCHITECTURES


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "config.json: not JSON, or cut short"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"\0" * 64, "all zeros"),
        ("model.safetensors", b"<!DOCTYPE html>", "a web page (the download failed), a safetensors file was wanted"),
        ("model.safetensors", b"\x80\x02}q\x00.", "a pickled PyTorch checkpoint (never opened"),
        ("model.safetensors", b"\x20" + bytes(7) + b'{"a": 1}', "cut short (16 bytes, its header alone has 32)"),
        ("model.safetensors", b"\x08" + bytes(7) + b'{"a": 1}', "tensor a has no shape and place in its header"),
        ("model.safetensors", 70000, "cut short"),
    ],
)
def test_folders_that_are_damaged_are_one_line(
    make: Make, tmp_path: Path, file: str, content: bytes | int | None, said: str
) -> None:
    folder = write_folder(tmp_path / "bad")
    if content is None:
        (folder / file).unlink()
    else:
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[:content] if isinstance(content, int) else content)
    ran = pair(make(), folder, "--json", "--quiet")
    assert ran.code == 2 and said in ran.complaint and str(folder) in ran.complaint
    assert report(ran)["error"]
