"""Reading a GGUF file for the target: weights, vocabulary as in llama.cpp, one line for each file that is none."""

from __future__ import annotations

import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import TinySpec, tensors, vocabulary_texts, write_tiny

pytest.importorskip("torch")

from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.loading import load_target
from pipesd.errors import UsageError
from pipesd.pieces import CONTROL, USER_DEFINED, read_pieces

NORMAL, UNUSED, UNKNOWN, BYTE = 1, 5, 2, 6


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_hyperparameters_and_name(tiny_file: Path) -> None:
    checkpoint = open_checkpoint(tiny_file)
    shape = checkpoint.shape
    assert checkpoint.name == "tiny"
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_size) == (2, 64, 4, 2, 16)
    assert (shape.feed_forward, shape.width, shape.context, shape.tied) == (128, 512, 512, False)
    assert shape.norm_eps == pytest.approx(1e-5) and shape.rope.base == 10000.0
    assert checkpoint.file_dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 0), ("float16", 2e-3), ("bfloat16", 1e-2), ("q8_0", 2e-2)]
)
def test_weights_are_those_that_were_written(tmp_path: Path, dtype: str, tolerance: float) -> None:
    spec = TinySpec(dtype=dtype)
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", spec))
    for name, wanted in tensors(spec).items():
        got = checkpoint.weight(name)
        assert got is not None and got.shape == wanted.shape
        np.testing.assert_allclose(got.numpy(), wanted, atol=tolerance * np.abs(wanted).max())
    assert checkpoint.weight("no.such.tensor") is None


def test_progress_covers_the_whole_file(tiny_file: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_target(tiny_file, device="cpu", progress=lambda done, of: seen.append((done, of)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == open_checkpoint(tiny_file).size_bytes


def test_padding_ids_have_no_text(tmp_path: Path) -> None:
    vocabulary = open_checkpoint(write_tiny(tmp_path / "m.gguf", n_vocab=512, n_real=470)).vocabulary
    assert (vocabulary.size, vocabulary.real_size) == (512, 470)
    assert set(vocabulary.pieces[470:]) == {b""} and b"" not in vocabulary.pieces[:470]


def test_tokens_fewer_than_embeddings_are_filled_up(tiny_file: Path, tmp_path: Path) -> None:
    spec = TinySpec()
    texts, types, merges = vocabulary_texts(480)
    path = tmp_path / "m.gguf"
    writer = _writer(path, spec)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for name, weights in tensors(spec).items():
        writer.add_tensor(name, weights)
    _finish(writer)
    vocabulary = open_checkpoint(path).vocabulary
    assert (vocabulary.size, vocabulary.real_size) == (512, 480)


def _writer(path: Path, spec: TinySpec) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.feed_forward)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    return writer


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- the vocabulary as llama.cpp has it ---

ODD_BPE = [
    ("Ġthe", NORMAL), ("Ċ", NORMAL), ("é", NORMAL), ("Ã©", NORMAL), ("▁x", NORMAL), ("", NORMAL), ("a", UNUSED),
    ("<|end|>", CONTROL), ("<|call|>", CONTROL), ("<|return|>", NORMAL), ("<reponame>", NORMAL), ("Ġe", USER_DEFINED),
    ("<｜fim▁begin｜>", NORMAL), ("<unk>", UNKNOWN), ("<0x41>", BYTE), ("<|im_end|>", UNUSED), ("<unused7>", CONTROL),
    ("你", NORMAL), ("</s>", NORMAL), ("<|tool_response>", CONTROL), ("<|fim_pad|>", CONTROL), ("b", 0), ("c", 9),
]  # fmt: skip
ODD_SPM = [
    ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    ("▁the", NORMAL), ("▁▁", USER_DEFINED), ("é", NORMAL), ("▁", NORMAL), ("<end_of_turn>", NORMAL), ("", NORMAL),
    ("pad", UNUSED), ("[EOT]", CONTROL), ("<0x0Ax", NORMAL), ("▁<PRE>", NORMAL),
]  # fmt: skip


def test_bytes_and_ends_of_byte_level_vocabularies() -> None:
    texts = ["<|endoftext|>", "Ġa", "Ã©", "Ċ", "<x>", "[PAD5]", "â", "Ĥ"]
    types = [CONTROL, NORMAL, NORMAL, NORMAL, USER_DEFINED, UNUSED, NORMAL, NORMAL]
    pieces, ends = read_pieces("gpt2", texts, types, {"eos_token_id": 4})
    assert pieces == (b"<|endoftext|>", b" a", "é".encode(), b"\n", b"<x>", b"", b"\xe2", b"\x82")
    assert ends == (0, 4)


def test_bytes_and_ends_of_sentencepiece_vocabularies() -> None:
    texts, types = zip(*ODD_SPM, strict=True)
    pieces, ends = read_pieces("llama", texts, types, {})
    assert pieces[:4] == (b"<unk>", b"<s>", b"</s>", b"\x00") and pieces[3 + 0x41] == b"A"
    assert pieces[259:263] == (b" the", "▁▁".encode(), "é".encode(), b" ")
    assert ends == (2, 263, 266)


@pytest.mark.parametrize(("kind", "tokens"), [("gpt2", ODD_BPE), ("llama", ODD_SPM)])
@pytest.mark.parametrize("special", [{}, {"eos_token_id": 1, "eot_token_id": 3}, {"eos_token_id": 10_000}])
def test_odd_tokens_are_as_in_llama_cpp(
    tmp_path: Path, kind: str, tokens: list[tuple[str, int]], special: dict[str, int]
) -> None:
    texts, types = [text for text, _ in tokens], [type_ for _, type_ in tokens]
    path = tmp_path / "vocabulary.gguf"
    writer = _writer(path, TinySpec())
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2" if kind == "gpt2" else "default")
    writer.add_token_list(texts)
    writer.add_token_scores([-float(i) for i in range(len(texts))])
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    for key, value in special.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    _finish(writer)
    assert read_pieces(kind, texts, types, special) == _of_llama_cpp(path)


@pytest.mark.parametrize("changes", [{}, {"n_vocab": 480, "n_real": 470}, {"swap": (260, 261)}])
def test_tiny_vocabularies_are_as_in_llama_cpp(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_tiny(tmp_path / "m.gguf", **changes)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.vocabulary.pieces, checkpoint.end_ids) == _of_llama_cpp(path)


@pytest.mark.model
def test_demo_vocabulary_is_as_in_llama_cpp(demo_pair: tuple[Path, Path]) -> None:
    checkpoint = open_checkpoint(demo_pair[1])
    assert (checkpoint.vocabulary.pieces, checkpoint.end_ids) == _of_llama_cpp(demo_pair[1])


def _of_llama_cpp(path: Path) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    buffer = llama_cpp.ctypes.create_string_buffer(4096)

    def piece(token: int) -> bytes:
        size = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, len(buffer), 0, True)
        assert size >= 0
        return buffer.raw[:size]

    ids = range(llama_cpp.llama_vocab_n_tokens(vocabulary))
    ends = tuple(token for token in ids if llama_cpp.llama_vocab_is_eog(vocabulary, token))
    pieces = tuple(piece(token) for token in ids)
    model.close()
    return pieces, ends


# --- the fingerprint ---


def test_fingerprint_tells_models_precisions_and_devices_apart(tiny_file: Path, tmp_path: Path) -> None:
    def of(path: Path, dtype: str = "float32", device: str = "cpu") -> bytes:
        return open_checkpoint(path).fingerprint(dtype, device)

    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_file, copy)
    assert of(copy) == of(tiny_file) and len(of(tiny_file)) == 8
    damaged = bytearray(tiny_file.read_bytes())
    damaged[-100] ^= 1  # a weight of the last tensor
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    others = [
        of(tiny_file, "bfloat16"),
        of(tiny_file, device="cuda"),
        of(write_tiny(tmp_path / "seed.gguf", seed=1)),
        of(write_tiny(tmp_path / "name.gguf", name="other")),
        of(tmp_path / "damaged.gguf"),
    ]
    assert len({of(tiny_file), *others}) == 6


def test_fingerprint_samples_every_large_tensor(tmp_path: Path) -> None:
    spec = TinySpec(n_vocab=512, hidden=256, heads=4, kv_heads=4, feed_forward=256)
    path = write_tiny(tmp_path / "m.gguf", spec)
    before = open_checkpoint(path).fingerprint("float32", "cpu")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "output.weight")
    data = bytearray(path.read_bytes())
    data[int(tensor.data_offset)] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(path).fingerprint("float32", "cpu") != before


# --- files that cannot be used ---


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("exploded"),))


def _bad_file(kind: str, path: Path, good: Path) -> None:
    data = good.read_bytes()
    header = int(gguf.GGUFReader(good).data_offset)
    if kind == "missing":
        return
    if kind == "directory":
        path.mkdir()
        return
    contents = {
        "empty": b"",
        "first kB": data[:1024],
        "four bytes": data[:4],
        "no data": data[:header],
        "one byte short": data[:-1],
        "cut in the vocabulary": data[: header // 2],
        "safetensors": struct.pack("<Q", 64) + b'{"__metadata__":{}}' + bytes(64),
        "pickle": pickle.dumps(_Bomb()),
        "zipped pickle": b"PK\x03\x04" + bytes(100),
        "text": b"# a model card, not a model\n",
        "future version": data[:4] + struct.pack("<I", 99) + data[8:],
    }
    path.write_bytes(contents[kind])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "no such file or folder; give a GGUF file"),
        ("directory", "a directory without a config.json"),
        ("empty", "empty"),
        ("first kB", "is cut off after 1024 bytes, within its header"),
        ("four bytes", "is cut off after 4 bytes, within its header"),
        ("no data", "is cut off: "),
        ("one byte short", "is cut off: "),
        ("cut in the vocabulary", "within its header"),
        ("safetensors", "is not a GGUF file but safetensors, one file of a model; give the Hugging Face folder"),
        ("pickle", "a pickled PyTorch checkpoint, never opened since it could run code; use a folder with"),
        ("zipped pickle", "a zip or PyTorch archive, never opened since it could run code; use a folder with"),
        ("text", "is not a GGUF file but something else"),
        ("future version", "is GGUF version 99, wanted"),
    ],
)
def test_bad_file_gives_one_line(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.gguf"
    _bad_file(kind, path, tiny_file)
    with pytest.raises(UsageError) as caught:
        load_target("model.gguf", device="cpu")
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and said in line and "\n" not in line and ";" in line
    assert not (tmp_path / "exploded").exists()


def test_home_is_expanded(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"^{tmp_path}/models/none.gguf: no such file"):
        open_checkpoint("~/models/none.gguf")
    shutil.copy(tiny_file, tmp_path / "here.gguf")
    assert open_checkpoint("~/here.gguf").path == tmp_path / "here.gguf"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "gemma2"}, "is a gemma2 model"),
        ({"extra": (("llama.expert_count", 8),)}, "mixture of experts"),
        ({"extra": (("llama.attention.sliding_window", 8), ("llama.attention.sliding_window_pattern", 2))}, "clearly"),
        ({"extra": (("llama.attention.scale", 0.5),)}, "attention scale"),
        ({"extra": (("llama.rope.scaling.type", "longrope"),)}, "longrope rope scaling"),
        ({"extra": (("split.count", 3),)}, "one part of 3, but not named"),
        ({"extra": (("llama.attention.value_length", 32),)}, "attention.value_length is not the head size 16"),
        ({"extra": (("llama.attention.key_length", 32),)}, "rope.dimension_count is not the head size 32"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", **changes)
    with pytest.raises(UsageError, match=f"^{path}: .*{said}.*;"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", "has no tensor blk.1.ffn_up.weight"),
        (b"output.weight", b"strange.weigh", "does not use, strange.weigh"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.madel", "missing vocabulary"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens", "no vocabulary"),
        (b"llama.block_count", b"llama.black_count", "llama.block_count is missing"),
    ],
)
def test_incomplete_models_are_refused_by_name(
    tiny_file: Path, tmp_path: Path, old: bytes, new: bytes, said: str
) -> None:
    data = tiny_file.read_bytes()
    start = data.rfind(b"output.weight") if old == b"output.weight" else data.find(old)
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:start] + new + data[start + len(old) :])
    with pytest.raises(UsageError, match=f"^{path}: .*{said}"):
        open_checkpoint(path)


def test_a_wrong_tensor_size_is_refused_by_name(tmp_path: Path) -> None:
    spec = TinySpec()
    path = tmp_path / "m.gguf"
    writer = _writer(path, spec)
    texts, types, _ = vocabulary_texts(512)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    for name, weights in tensors(replace(spec, feed_forward=96)).items():
        writer.add_tensor(name, weights)
    _finish(writer)
    with pytest.raises(UsageError, match=r"tensor blk.0.ffn_gate.weight is \(96, 64\), \(128, 64\) was wanted"):
        open_checkpoint(path)


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    extra = (("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0))
    assert open_checkpoint(write_tiny(tmp_path / "m.gguf", extra=extra)).shape.rope.factor == 4.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 513}, "context 513: 2 to 512 was wanted"),
        ({"context": 0}, "context 0"),
        ({"slots": 0}, "slots 0"),
        ({"threads": 0}, "threads 0"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "meta"}, "device 'meta'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"dtype": "float16"}, "float16 is for CUDA"),
    ],
)
def test_bad_options_are_refused_by_name(tiny_file: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_target(tiny_file, **({"device": "cpu"} | options))  # type: ignore[arg-type]
