"""Files that are no draft model: one line with the resolved path, the reason and what to do, never a crash."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.edge.gguf_header import read_header, resolve_model
from pipesd.errors import UsageError
from pipesd.gguf_layout import read_layout
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("headers") / "tiny.gguf")


def refusal(path: str | Path) -> str:
    with pytest.raises(UsageError) as told:
        read_header(path)
    text = str(told.value)
    assert "\n" not in text
    return text


def test_what_the_header_says(tiny: Path) -> None:
    header = read_header(tiny)
    assert (header.architecture, header.name, header.context, header.vocabulary_size) == ("llama", "tiny", 512, 512)
    assert header.file_bytes == tiny.stat().st_size
    assert header.values["tokenizer.ggml.eos_token_id"] == 258
    assert header.lengths["tokenizer.ggml.tokens"] == 512
    assert header.cache_bytes(512) == header.cache_bytes(300) == 2 * 2 * (16 + 16) * 512 * 2


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert refusal("~/x.gguf").startswith(f"{tmp_path}/x.gguf: no such file")
    assert refusal("x.gguf").startswith(f"{tmp_path}/x.gguf: no such file")
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; give a GGUF file"
    (tmp_path / "b.gguf").touch()
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; give one of the files in it, such as b.gguf"
    assert refusal("b.gguf") == f"{tmp_path}/b.gguf: is empty; download the model again"
    assert "not a regular file" in refusal(os.devnull)
    assert "null byte" in refusal("x\0.gguf")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refusal("loop")
    assert "give the path of a GGUF model file" in refusal("~nobody-of-this-name/x.gguf")
    assert resolve_model("~/b.gguf") == tmp_path / "b.gguf"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_put_there_in_the_meantime_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="not a regular file"):
        read_layout(tmp_path / "m.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny.read_bytes())
    path.chmod(0)
    assert "cannot be read (Permission denied)" in refusal(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"G", "something else"),
        (b"hello, world", "something else"),
        (struct.pack("<Q", 60) + b'{"__metadata__":{}}', "safetensors"),
        (b"PK\x03\x04" + b"x" * 99, "a zip or PyTorch archive"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-lfs pointer"),
        (b"tjgg\1\0\0\0" + b"x" * 99, "an old ggml format"),
        (b"\0" * 4096, "all zeros"),
        (b"GGUF\0\0\0\3" + b"\0" * 99, "big-endian GGUF"),
        (b"GGUF\1\0\0\0" + b"\0" * 99, "GGUF version 1"),
        (b"GGUF\3\0\0\0", "cut off after 8 bytes"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "damaged"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    told = refusal(path)
    assert told.startswith(f"{path}: ") and reason in told


def test_a_file_cut_anywhere_is_called_cut_off(tiny: Path, tmp_path: Path) -> None:
    data, path = tiny.read_bytes(), tmp_path / "cut.gguf"
    for length in (5, 24, 100, 1024, 8192, 12_000, 40_000, len(data) // 2):
        path.write_bytes(data[:length])
        assert "is cut off" in refusal(path)


def test_random_damage_is_refused_or_read_but_never_an_exception_of_another_kind(tiny: Path, tmp_path: Path) -> None:
    data, path, rng = tiny.read_bytes(), tmp_path / "damaged.gguf", random.Random(3)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            at, how = rng.randrange(4, 12_000), rng.random()
            if how < 0.5:
                damaged[at] = rng.randrange(256)
            elif how < 0.7:
                del damaged[at : at + rng.randrange(1, 20)]
            else:
                damaged[at : at + 8] = b"\xff" * 8
        path.write_bytes(damaged)
        try:
            read_header(path)
            outcomes.add("read")
        except UsageError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
