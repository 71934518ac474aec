"""Reading safetensors files: values, rotary pairs, memory, and one line for a file that is none or not whole."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from pipesd.cloud import safetensors_file
from pipesd.cloud.safetensors_file import SafetensorsTensor
from pipesd.errors import UsageError
from pipesd.safetensors_layout import read_places

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(kind: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    return {name: SafetensorsTensor(**vars(place)) for name, place in read_places(path).items()}


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", DTYPES)
def test_values_are_those_that_the_safetensors_package_wrote(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import save_file

    written = {"odd": drawn(3, 7), "one": drawn(5), "scalar": drawn(), "none": drawn(0, 4), "cube": drawn(2, 3, 4)}
    written = {name: values.to(DTYPES[kind]) for name, values in written.items()}
    save_file(written, tmp_path / "m.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert set(tensors) == set(written)
    for name, wanted in written.items():
        got = tensors[name].read()
        assert got.dtype == torch.float32 and got.shape == wanted.shape == tensors[name].shape
        assert torch.equal(got, wanted.float())
        assert (tensors[name].kind, tensors[name].n_bytes) == (kind, wanted.nbytes)


def test_every_bfloat16_is_read_right(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    path = write(tmp_path / "m.safetensors", {"x": entry("BF16", [256, 256], 0, bits.nbytes)}, bits.tobytes())
    got = read_safetensors(path)["x"].read()
    wanted = torch.from_numpy(bits.view(np.int16).reshape(256, 256).copy()).view(torch.bfloat16).float()
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("shape", "head_size"), [((24, 5), 0), ((24, 5), 6), ((24,), 8), ((6,), 6)])
def test_pieces_and_heads_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...], head_size: int
) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 40)
    values = drawn(*shape).to(DTYPES[kind])
    save_file({"x": values}, tmp_path / "m.safetensors")
    stored = read_safetensors(tmp_path / "m.safetensors")["x"]
    got = SafetensorsTensor(stored.path, "x", kind, shape, stored.offset, stored.n_bytes, head_size).read()
    wanted = values.float()
    if head_size:  # row r of a head's first half, then row r of its second
        order = [h + half * head_size // 2 + r for h in range(0, shape[0], head_size)
                 for r in range(head_size // 2) for half in (0, 1)]  # fmt: skip
        wanted = wanted[order]
    assert torch.equal(got, wanted)


def test_a_tensor_needs_itself_and_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 1 << 16)
    n = 1024
    path = write(tmp_path / "m.safetensors", {"x": entry("BF16", [n, n], 0, 2 * n * n)}, bytes(2 * n * n))
    stored = read_safetensors(path)["x"]
    stored = SafetensorsTensor(path, "x", "BF16", (n, n), stored.offset, stored.n_bytes, 64)
    stored.read()
    tracemalloc.start()  # sees numpy's memory; torch's is the tensor itself
    stored.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * (1 << 16)


def test_a_sample_changes_with_the_bytes(tmp_path: Path) -> None:
    size = 1 << 17
    path = write(tmp_path / "m.safetensors", {"x": entry("U8", [size], 0, size)}, bytes(size))
    stored = read_safetensors(path)["x"]
    before = stored.sample()
    assert len(before) == 64 * 1024
    for place in (stored.offset, stored.offset + size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        after = stored.sample()
        assert after != before
        before = after


def test_a_file_that_changed_since_it_was_opened_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": entry("F32", [4], 0, 16)}, bytes(16))
    stored = read_safetensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match="tensor x is cut short"):
        stored.read()
    with pytest.raises(UsageError, match="tensor x is cut short"):
        stored.sample()
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        stored.read()


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_safetensors(path)
    told = str(caught.value)
    assert told.startswith(f"{path}: ") and "; " in told and "\n" not in told
    return told


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)}, "tensor y overlaps another"),
        ({"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 0, 8)}, "tensor y overlaps another"),
        ({"x": entry("F32", [3], 0, 12)}, "cut short"),
        ({"x": entry("F32", [1], 0, 4)}, "longer than its tensors"),
        ({}, "longer than its tensors"),
        ({"x": entry("F32", [3], 0, 8)}, "tensor x has 8 bytes for F32 of shape (3,)"),
        ({"x": entry("F32", [2], 8, 0)}, "tensor x has no shape and place"),
        ({"x": entry("F32", [-2], 0, 8)}, "tensor x has no shape and place"),
        ({"x": entry("F32", [2.0], 0, 8)}, "tensor x has no shape and place"),
        ({"x": entry("F32", 2, 0, 8)}, "tensor x has no shape and place"),
        ({"x": entry("F32", [1 << 70], 0, 8)}, "tensor x has no shape and place"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, "tensor x has no shape and place"),
        ({"x": 7}, "tensor x has no shape and place"),
        ({"x": entry("Q4", [2], 0, 8)}, "tensor x is stored as Q4, an unknown type"),
        ({"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "an unknown type"),
        (b'{"x": {"dtype"', "its header is damaged"),
        (b"{\xff\xfe}", "its header is damaged"),
        (b'{"a":' * 100_000, "its header is damaged"),
        (b'{"x": 1, "y": 2, "x": 3}', "x stands in it twice"),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path: Path, header: Any, told: str) -> None:
    assert told in refused(write(tmp_path / "m.safetensors", header, bytes(8)))


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "empty (an unfinished download), a safetensors file was wanted"),
        (bytes(1000), "all zeros (an unfinished download)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        (b"GGUF" + bytes(100), "a GGUF file"),
        (pickle.dumps({"a": 1}), "a pickled PyTorch checkpoint (never opened: it could run code)"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"hello", "not a safetensors file"),
        (b"\1\0\0\0\0\0\0\0", "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{" + bytes(50), f"its header would have {1 << 60} bytes"),
        (struct.pack("<Q", 500) + b"{" + bytes(50), "cut short (59 bytes, its header alone has 500)"),
    ],
)
def test_what_is_no_safetensors_file_is_one_line(tmp_path: Path, raw: bytes, told: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    assert told in refused(path)


def test_a_zip_is_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1))
    assert "a zip or PyTorch archive (never opened: it could run code)" in refused(tmp_path / "m.safetensors")


def test_a_missing_or_unreadable_file_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "m.safetensors")
    assert "not a regular file" in refused(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_what_would_be_read_for_ever_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        assert "not a regular file" in refused(tmp_path / name)


def test_a_header_as_long_as_a_pickles_first_byte_is_no_pickle(tmp_path: Path) -> None:
    header = json.dumps({"x": entry("F32", [2], 0, 8)}).encode().ljust(0x80)
    assert set(read_safetensors(write(tmp_path / "m.safetensors", header, bytes(8)))) == {"x"}


def test_cuts_anywhere_are_one_line(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": drawn(4, 4), "y": drawn(3)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for size in range(0, len(whole), 5):
        (tmp_path / "m.safetensors").write_bytes(whole[:size])
        refused(tmp_path / "m.safetensors")


def test_other_types_are_listed_but_not_read(tmp_path: Path) -> None:
    header = {"a": entry("F8_E4M3", [8], 0, 8), "b": entry("I64", [1], 8, 16), "c": entry("F4", [4], 16, 18)}
    tensors = read_safetensors(write(tmp_path / "m.safetensors", header, bytes(18)))
    assert [tensor.kind for tensor in tensors.values()] == ["F8_E4M3", "I64", "F4"]
