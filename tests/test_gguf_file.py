"""GGUF files of each architecture against llama.cpp, files in parts, and GGUF files that are no such model."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import TinySpec, tensors, write_tiny

pytest.importorskip("torch")

from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.loading import load_target
from pipesd.errors import UsageError
from pipesd.model_shape import Rope

ALL_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def scaling(architecture: str, **values: float | str) -> dict[str, Any]:
    return {"extra": tuple((f"{architecture}.rope.scaling.{key}", value) for key, value in values.items())}


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"head_size": 32, "tied": True}),
    ("llama", {"biases": ALL_BIASES}),
    ("llama", {"rope_divisors": (1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0)}),
    ("llama", scaling("llama", type="linear", factor=3.0)),
    ("llama", scaling("llama", attn_factor=1.3, **YARN)),
    ("qwen2", {}),
    ("qwen2", {"tied": True} | scaling("qwen2", **YARN)),
    ("qwen3", {"head_size": 32, "tied": True}),
    ("qwen3", {"biases": ALL_BIASES[:3]}),
]


def of_llama_cpp(path: Path, ids: list[int]) -> np.ndarray:
    """Logits with keys and values in float32, as they are kept here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), logits_all=True, n_ctx=256, type_k=0, type_v=0, verbose=False)
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)])
    model.close()
    return logits


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture, **changes)
    ids = np.random.default_rng(0).integers(0, 256, 150).tolist()
    target = load_target(path, "cpu", slots=1)
    ours, theirs = target.forward([(0, ids, len(ids))])[0], of_llama_cpp(path, ids)
    np.testing.assert_allclose(ours, theirs, atol=5e-4, rtol=0)
    assert target.invariant


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_quantised_files_have_nearly_the_logits_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture, dtype="q8_0")
    ids = np.random.default_rng(0).integers(0, 256, 150).tolist()
    ours, theirs = load_target(path, "cpu", slots=1).forward([(0, ids, len(ids))])[0], of_llama_cpp(path, ids)
    # ggml rounds what it multiplies a quantised matrix with to 8 bits a number
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.03 * theirs.std()
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() > 0.9


def test_each_oddity_of_a_variant_matters(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 150).tolist()
    found: dict[str, list[np.ndarray]] = {}
    for i, (architecture, changes) in enumerate(VARIANTS):
        path = write_tiny(tmp_path / f"{i}.gguf", architecture=architecture, **changes)
        logits = load_target(path, "cpu", slots=1).forward([(0, ids, 1)])[0]
        assert all(np.abs(logits - other).max() > 0.1 for other in found.get(architecture, []))
        found.setdefault(architecture, []).append(logits)


def test_what_the_keys_say(tmp_path: Path) -> None:
    shape = open_checkpoint(write_tiny(tmp_path / "m.gguf", architecture="qwen3", head_size=32)).shape
    assert (shape.family, shape.head_size, shape.head_norms, shape.biases) == ("qwen3", 32, True, frozenset())
    shape = open_checkpoint(write_tiny(tmp_path / "m.gguf", architecture="qwen2", **scaling("qwen2", **YARN))).shape
    assert (shape.family, shape.head_norms, shape.biases) == ("qwen2", False, {"attn_q", "attn_k", "attn_v"})
    assert shape.rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    assert (shape.rope.kind, shape.rope.factor, shape.rope.original_context, shape.context) == ("yarn", 4.0, 64, 512)
    betas = {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "original_context_length": 256}
    shape = open_checkpoint(write_tiny(tmp_path / "m.gguf", **scaling("llama", **(YARN | betas)))).shape
    assert (shape.rope.beta_fast, shape.rope.beta_slow, shape.context) == (16.0, 2.0, 1024)
    extra: tuple[tuple[str, float], ...] = (("llama.rope.scale_linear", 2.0),)
    assert open_checkpoint(write_tiny(tmp_path / "m.gguf", extra=extra)).shape.rope == Rope(kind="linear", factor=2.0)
    shape = open_checkpoint(write_tiny(tmp_path / "m.gguf", **scaling("llama", factor=3.0))).shape
    assert shape.rope == Rope(kind="linear", factor=3.0), "a factor alone"
    shape = open_checkpoint(write_tiny(tmp_path / "m.gguf", **scaling("llama", type="none", factor=3.0))).shape
    assert shape.rope == Rope()


def test_a_window_of_a_llama_file_is_that_of_every_layer(tmp_path: Path) -> None:
    def windows(size: int) -> tuple[int, ...]:
        extra = (("llama.attention.sliding_window", size),)
        return open_checkpoint(write_tiny(tmp_path / "m.gguf", layers=3, extra=extra)).shape.windows

    assert windows(100) == (100, 100, 100)
    assert windows(0) == windows(512) == windows(4096) == (), "as wide as the context: nothing is hidden"


@pytest.mark.parametrize(
    ("architecture", "key", "value", "said"),
    [
        ("qwen2", "attention.sliding_window", 100, "does not say clearly which layers have its sliding window"),
        ("qwen3", "expert_count", 8, "a mixture of experts"),
        ("qwen3", "rope.scaling.yarn_log_multiplier", 0.5, "a YaRN multiplier of its own"),
        ("llama", "attention.clamp_kqv", 8.0, "clamped queries, keys and values"),
        ("qwen3", "pooling_type", 3, "one result for a whole text.* .qwen3.pooling_type"),
        ("llama", "rope.freq_base", 0.5, "do not fit each other .rope.freq_base"),
        ("llama", "attention.key_length", 15, "has attention heads of size 15"),
        (
            "qwen2",
            "attention.key_length",
            24,
            "tensor blk.0.attn_q.weight of shape .64, 64. is not made of whole heads",
        ),
    ],
)
def test_what_would_come_out_wrong_is_refused_by_name(
    tmp_path: Path, architecture: str, key: str, value: float, said: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture, extra=((f"{architecture}.{key}", value),))
    with pytest.raises(UsageError, match=f"^{path}: .*{said}") as told:
        open_checkpoint(path)
    assert "\n" not in str(told.value) and "; " in str(told.value)


# --- files in parts ---


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "split").mkdir()
    first = write_tiny(tmp_path / "split" / "m.gguf", split=9)
    found = sorted(first.parent.iterdir())
    assert len(found) == 3 and found[0] == first
    return found


def test_a_file_in_parts_is_read_as_one(tmp_path: Path, parts: list[Path]) -> None:
    whole = open_checkpoint(write_tiny(tmp_path / "m.gguf"))
    checkpoints = [open_checkpoint(part) for part in parts]
    for checkpoint in checkpoints:
        assert checkpoint.files == 3 and checkpoint.size_bytes == whole.size_bytes and checkpoint.name == "tiny"
        assert set(checkpoint.tensor_names) == set(whole.tensor_names) and checkpoint.shape == whole.shape
        for name, wanted in tensors(TinySpec()).items():
            found = checkpoint.weight(name)
            assert found is not None
            np.testing.assert_array_equal(found.numpy(), wanted)
    assert len({checkpoint.fingerprint("float32", "cpu") for checkpoint in checkpoints}) == 1
    ids = list(range(40))
    of_parts, of_whole = (load_target(path, "cpu").greedy([(0, ids, 40)]) for path in (parts[1], whole.path))
    assert of_parts == of_whole


def test_parts_that_are_links_go_by_the_names_of_the_links(tmp_path: Path, parts: list[Path]) -> None:
    """As in a hub's cache, where the files themselves are named after their contents."""
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for number, part in enumerate(parts):
        blob = part.rename(part.with_name(f"blob{number}"))
        (folder / part.name).symlink_to(blob)
    assert open_checkpoint(folder / parts[1].name).files == 3


def test_a_link_to_a_part_will_do_whatever_its_name(tmp_path: Path, parts: list[Path]) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for name in ("target.gguf", parts[1].name):  # none of the mates is beside them
        (links / name).symlink_to(parts[1])
        assert open_checkpoint(links / name).files == 3
    parts[2].unlink()
    with pytest.raises(UsageError, match=f"^{parts[2]}: is missing, part 3 of 3"):
        open_checkpoint(links / "target.gguf")


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    for part in parts[:2]:
        with pytest.raises(UsageError, match=f"^{parts[2]}: is missing, part 3 of 3"):
            open_checkpoint(part)


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path, parts: list[Path]) -> None:
    good = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(UsageError, match=f"^{parts[1]}: says that it is part 2 .from 0. of 3, 1 of 3 was wanted"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(good[: len(good) // 2])
    with pytest.raises(UsageError, match=f"^{parts[1]}: is cut off"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(good)
    first = bytearray(parts[0].read_bytes())
    struct.pack_into("<i", first, first.index(b"split.tensors.count") + len(b"split.tensors.count") + 4, 99)
    parts[0].write_bytes(first)
    with pytest.raises(UsageError, match=f"^{parts[2]}: its 3 parts have 21 tensors, not 99"):
        open_checkpoint(parts[2])
    alone = tmp_path / "alone.gguf"
    shutil.copy(parts[1], alone)
    with pytest.raises(UsageError, match=f"^{alone}: is one part of 3, but not named as one; .*-00002-of-00003.gguf"):
        open_checkpoint(alone)


# --- files that are something else ---


def write_bare(path: Path, architecture: str, general_type: str | None, **tensors_of: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    if general_type is not None:
        writer.add_type(general_type)
    for name, values in tensors_of.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SOME = {"blk.0.attn_q.weight.lora_a": np.zeros((4, 64), np.float32)}


@pytest.mark.parametrize(
    ("architecture", "general_type", "values", "said"),
    [
        ("llama", "adapter", SOME, "is an adapter (LoRA), not a model; merge it"),
        ("clip", "mmproj", SOME, "is a projector of images or sound (mmproj), not a model"),
        ("clip", None, SOME, "is a projector of images or sound (mmproj), not a model"),
        ("llama", "imatrix", SOME, "is an importance matrix for quantising, not a model"),
        ("llama", None, {}, "is a vocabulary alone, without weights"),
        ("bert", None, SOME, "is a bert model; this decoder runs llama, qwen2, qwen3"),
        ("qwen3moe", None, SOME, "is a qwen3moe model; this decoder runs"),
        ("llama", "model", SOME, "has no vocabulary"),
    ],
)
def test_gguf_files_of_another_kind(
    tmp_path: Path, architecture: str, general_type: str | None, values: dict[str, np.ndarray], said: str
) -> None:
    path = tmp_path / "m.gguf"
    write_bare(path, architecture, general_type, **values)
    with pytest.raises(UsageError) as told:
        open_checkpoint(path)
    assert str(told.value).startswith(f"{path}: ") and said in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGUF\0\0\0\3" + bytes(99), "is big-endian GGUF, wanted little-endian"),
        (b"GGUF\1\0\0\0" + bytes(99), "is GGUF version 1, wanted"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a git-lfs pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n <html>", "a web page"),
        (bytes(4096), "all zeros"),
        (b'{"architectures": []}', "a JSON text"),
        (struct.pack("<Q", 123) + b'{"__metadata__":{}}' + bytes(200), "safetensors"),
        (struct.pack("<Q", 90_000) + b'{"__metadata__":{}}' + bytes(200), "safetensors"),
        (b"PK\x03\x04" + bytes(99), "a zip or PyTorch archive"),
        (b"\x80\x02}q\0", "a pickled PyTorch checkpoint"),
        (b"tjgg" + bytes(99), "an old ggml format"),
        (b"GGUX" + bytes(99), "something else"),
    ],
)
def test_files_of_another_format(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(data)
    with pytest.raises(UsageError) as told:
        open_checkpoint(path)
    assert str(told.value).startswith(f"{path}: ") and said in str(told.value) and "\n" not in str(told.value)


def test_a_file_of_any_name_is_read(tmp_path: Path) -> None:
    assert open_checkpoint(write_tiny(tmp_path / "pytorch_model.bin")).name == "tiny"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_file_of_a_folder_is_answered_with_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        UsageError, match=f"^{tmp_path / name}: is one file of a Hugging Face folder; give .* {tmp_path}$"
    ):
        open_checkpoint(tmp_path / name)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{tmp_path}: a directory without a config.json; give a GGUF file or a Hug"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UsageError, match=r"a directory without a config.json; give one of its GGUF files, such as b"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    path.chmod(0)
    with pytest.raises(UsageError, match=f"^{path}: cannot be read .Permission denied"):
        open_checkpoint(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    data = path.read_bytes()
    for length in (5, 24, 100, 1024, 8192, 12_000, 40_000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UsageError, match=f"^{path}: is cut off"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((("split.count", "three"),), "split.count is 'three'"),
        ((("split.count", 3), ("split.no", "one")), "is one part of 3"),
        ((("general.alignment", "x"),), "header is damaged"),
    ],
)
def test_keys_of_the_wrong_type(tmp_path: Path, changes: tuple[tuple[str, int | str], ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_checkpoint(write_tiny(tmp_path / "m.gguf", extra=changes))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id", "'tokenizer.ggml.eos_token_id' twice"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "a tensor twice"),
    ],
)
def test_what_stands_twice_is_refused(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UsageError, match=f"^{path}: its GGUF header is damaged .{said}"):
        open_checkpoint(path)


def test_a_byte_without_a_number_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    types = struct.pack("<512i", *[1] * 256, *[3] * 3, *[1] * 253)
    data = path.read_bytes()
    assert types in data
    path.write_bytes(data.replace(types, struct.pack("<i", 6) + types[4:]))
    with pytest.raises(UsageError, match=f"^{path}: has a vocabulary that cannot be read"):
        open_checkpoint(path)


def test_random_damage_is_refused_or_read_but_never_an_exception_of_another_kind(tmp_path: Path) -> None:
    path, rng = write_tiny(tmp_path / "m.gguf", n_vocab=260), np.random.default_rng(3)
    data, outcomes = path.read_bytes(), set()
    head = 9_000
    for _ in range(150):
        damaged = bytearray(data)
        for at in rng.integers(4, head, rng.choice([1, 1, 3])):
            damaged[at : at + 8] = bytes([rng.integers(256)]) + damaged[at + 1 : at + 8]
            if rng.random() < 0.2:
                damaged[at : at + 8] = b"\xff" * 8
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
            outcomes.add("read")
        except UsageError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
