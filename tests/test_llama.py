"""The door to llama.cpp: which releases of the binding are taken, and what happens where native code would die."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipesd.edge import llama, trial
from pipesd.errors import UsageError


def binding(**without: str) -> types.SimpleNamespace:
    """A stand-in for the low-level module with everything that the edge uses, but for what is named."""
    module = types.SimpleNamespace(**dict.fromkeys(llama.NAMES))
    for structure, fields in llama.FIELDS.items():
        names = [name for name in fields if name != without.get(structure)]
        setattr(module, structure, types.SimpleNamespace(_fields_=[(name, None) for name in names]))
    return module


def test_what_the_edge_needs_is_enough() -> None:
    for version in ("0.3.30", "0.3.36", "0.3.99+cu124", "0.3.40.post1"):
        llama.check_binding(binding(), version)


def test_a_missing_function_is_named_with_the_supported_range() -> None:
    module = binding()
    del module.llama_memory_seq_rm
    with pytest.raises(
        UsageError, match=r"0\.3\.36 lacks llama_memory_seq_rm; the edge needs 0\.3\.30 or newer"
    ) as told:
        llama.check_binding(module, "0.3.36")
    assert "\n" not in str(told.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UsageError, match=r"llama_context_params\.n_ubatch"):
        llama.check_binding(binding(llama_context_params="n_ubatch"), "0.3.36")


@pytest.mark.parametrize("version", ["0.2.90", "0.3.4", "0.3.29", "0.4.0", "1.0", "garbage"])
def test_versions_outside_the_range_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match=rf"{version} is installed, the edge needs 0\.3\.30 or newer, below 0\.4"):
        llama.check_binding(binding(), version)


def test_every_low_level_name_in_the_code_is_checked() -> None:
    folder = Path(llama.__file__).parent
    used = {
        name.rstrip("(),:").split("(")[0]
        for file in ("tokeniser.py", "drafter.py")
        for word in (folder / file).read_text().replace("(", "( ").split()
        if (name := word.partition("llama.")[2]).startswith("llama_")
    }
    used |= {
        name.split("(")[0].rstrip("),")
        for word in (folder / "drafter.py").read_text().split()
        if (name := word.partition("self._llama.")[2]).startswith("llama_")
    }
    assert len(used) > 20
    assert used <= set(llama.NAMES)


def test_complaints_are_kept_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    log = llama.NativeLog()
    log.take(2, b"loading\n")
    log.take(4, b"llama_model_load: error loading model: bad ")
    log.take(5, b"tensor\n")
    log.take(2, b"again\n")
    log.take(5, b"...\n")
    assert log.complaint() == "bad"
    log.forget()
    assert log.complaint() == "it does not say why"
    assert capsys.readouterr() == ("", "")
    log.shown = True
    log.take(2, b"loading\n")
    assert capsys.readouterr().err == "loading\n"


class Child:
    """Stands in for the child process: exits as told, counts its starts."""

    def __init__(self, code: int, told: str = "") -> None:
        self.code, self.told, self.started = code, told, 0

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.started += 1
        return self.code, self.told


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    return path


def test_an_illegal_instruction_becomes_one_line(model: Path, tmp_path: Path) -> None:
    child = Child(-signal.SIGILL)
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(UsageError, match="built for instructions that this processor") as told:
            trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)
        assert "--no-binary llama-cpp-python" in str(told.value) and "\n" not in str(told.value)
    assert child.started == 2


def test_a_crash_names_the_file_and_the_reason(model: Path, tmp_path: Path) -> None:
    child = Child(-signal.SIGABRT, "loading\n/build/llama.cpp/ggml.c:7: GGML_ASSERT(n_layer > 0) failed\n\n")
    with pytest.raises(UsageError, match=r"model\.gguf: kills llama\.cpp \(SIGABRT: ggml\.c:7: GGML_ASSERT"):
        trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)


def test_a_success_is_remembered_until_something_changes(model: Path, tmp_path: Path) -> None:
    child = Child(0)
    for expected in (1, 1):
        trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)
        assert child.started == expected
    trial.try_model(model, vocab_only=True, cache=tmp_path, run=child)
    assert child.started == 2
    model.write_bytes(b"GGUF and less")
    trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)
    assert child.started == 3


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, -signal.SIGTERM])
def test_other_ends_of_the_child_do_not_refuse_the_model(model: Path, tmp_path: Path, code: int) -> None:
    child = Child(code)
    trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)
    trial.try_model(model, vocab_only=False, cache=tmp_path, run=child)
    assert child.started == 2


def test_a_cache_that_cannot_be_written_only_costs_a_trial(model: Path, tmp_path: Path) -> None:
    child = Child(0)
    for _ in range(2):
        trial.try_model(model, vocab_only=False, cache=model / "no folder", run=child)
    assert child.started == 2


def test_a_real_child_that_dies() -> None:
    code, told = trial.run_child(
        [
            sys.executable,
            "-c",
            "import os, signal, sys; sys.stderr.write('dying'); sys.stderr.flush(); os.kill(os.getpid(), 4)",
        ]
    )
    assert (code, told) == (-signal.SIGILL, "dying")
    assert trial.run_child(["/no/such/program"]) == (0, "")


def test_importing_the_package_does_not_load_llama_cpp() -> None:
    script = (
        "import sys, pipesd, pipesd.edge.drafter, pipesd.edge.chat\n"
        "print([name for name in ('llama_cpp', 'jinja2', 'gguf', 'torch', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
