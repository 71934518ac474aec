"""The Python environment of tools/demo and tools/test: one in the cache for each Python and set of dependencies.

What setup.cfg lists is installed, in the versions of tested_versions.txt where it names one. pip's own settings (its
variables and files) hold as they are. An environment that a stopped run left half made is filled up, one that does not
start is made anew.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import ROOT, Failure, clean_environment, run

TESTED = ROOT / "tools" / "tested_versions.txt"
LLAMA = "llama-cpp-python"
TORCH = "torch"
CUDA_BUILD_MB = 2500
# Roughly what pip fetches for a requirement and for what it alone brings along; others are below a megabyte or two.
DOWNLOAD_MB = {
    TORCH: 200, "numpy": 18, "transformers": 25, "scikit-learn": 50, "mypy": 14, "ruff": 12, "fastapi": 4, "gguf": 3,
    "numba": 64,
}  # fmt: skip
# What pip's warnings say where a network, a name server or a proxy is missing.
_UNREACHED = (
    "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError",
    "Temporary failure in name resolution", "Network is unreachable",
)  # fmt: skip
# Run in the environment: the arguments that are not installed, without those whose condition does not hold there.
_MISSING = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
have = {canonicalize_name(d.metadata["Name"]) for d in importlib.metadata.distributions()
        if d.metadata["Name"] and d.read_text("RECORD")}
needed = [(text, Requirement(text)) for text in sys.argv[1:]]
print(json.dumps([text for text, each in needed
                  if canonicalize_name(each.name) not in have and (each.marker is None or each.marker.evaluate())]))
"""
_CHECKOUT = "pipesd-checkout.json"


@dataclass(frozen=True)
class Environment:
    """A virtual environment at `folder`; it may be incomplete until `install` has run."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def pip(self, *words: str | Path) -> list[str | Path]:
        return [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]

    def starts(self) -> bool:
        """Whether its Python runs and has pip."""
        try:
            return self._ask("import pip") is not None
        except OSError:
            return False

    def missing(self, requirements: Iterable[str]) -> list[str]:
        """Those of the requirements that hold for this machine and are not installed here, whatever their version."""
        wanted = list(requirements)
        answer = self._ask(_MISSING, *wanted)
        return wanted if answer is None else list(json.loads(answer))

    def _ask(self, code: str, *arguments: str) -> str | None:
        """What a line of Python prints in this environment, None if it fails."""
        done = subprocess.run(
            [self.python, "-I", "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout if done.returncode == 0 else None


def name_of(requirement: str) -> str:
    """`Torch_x >=2` -> `torch-x`: the name as pip compares it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(*extras: str) -> list[str]:
    """The requirements of the package itself and of some of its extras, as setup.cfg lists them."""
    found = settings()
    lists = [found["options"]["install_requires"], *(found["options.extras_require"][extra] for extra in extras)]
    return sorted({line.strip() for text in lists for line in text.splitlines() if line.strip()})


def build_requirements() -> list[str]:
    """What building the package itself takes, as pyproject.toml lists it."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return found


def settings() -> configparser.ConfigParser:
    """What setup.cfg says."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


def tested_version(name: str) -> str:
    return _tested()[name]


def pinned(requirement: str) -> str:
    """The requirement, narrowed to the tested version if there is one; its condition stays."""
    name, (_, semicolon, condition) = name_of(requirement), requirement.partition(";")
    return f"{name}=={_tested()[name]}{semicolon}{condition}" if name in _tested() else requirement


def _tested() -> dict[str, str]:
    lines = [line for line in TESTED.read_text().splitlines() if line and not line.startswith("#")]
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def locate(cache: Path) -> Environment:
    """Where the environment for this Python and these dependencies is or will be."""
    found = settings()
    parts = [found["options"]["install_requires"], json.dumps(dict(found["options.extras_require"]))]
    key = hashlib.sha256("\n".join([*parts, TESTED.read_text()]).encode()).hexdigest()[:10]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Environment(cache / "environments" / f"python{version}-{sysconfig.get_platform()}-{key}")


def create(environment: Environment, log: Path) -> None:
    """Makes the environment if it is absent or does not start; nothing is fetched for this."""
    if environment.starts():
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-Es", "-m", "venv", environment.folder], log, "an empty environment")


def torch_build(environment: Environment) -> tuple[str, int]:
    """Which build of torch pip would take, in words, and about how many MB it fetches for it."""
    alone = ("--dry-run", "--quiet", "--ignore-installed", "--no-deps")
    command = environment.pip("install", *alone, "--report", "-", pinned(TORCH))
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=600, check=False)
    if done.returncode != 0:
        raise Failure(f"pip finds no torch to install: {pip_reason(done.stderr)}")
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    with_cuda = any(re.match("nvidia|cuda", need) for need in metadata.get("requires_dist", []))
    if with_cuda and sys.platform == "linux":
        return f"{metadata['version']} with the CUDA libraries", CUDA_BUILD_MB
    return f"{metadata['version']}, a build for the CPU", DOWNLOAD_MB[TORCH]


def install(environment: Environment, wanted: Sequence[str | Path], log: Path, label: str) -> None:
    """Installs requirements or wheels, with their own requirements, in the tested versions where there are such."""
    command = environment.pip("install", *(pinned(each) if isinstance(each, str) else each for each in wanted))
    run(command, log, label, status=pip_status, reason=pip_reason)


def install_checkout(environment: Environment, log: Path) -> None:
    """Makes this checkout's programs those of the environment, unless they are already."""
    state = json.dumps({"root": str(ROOT), "setup": hashlib.sha256((ROOT / "setup.cfg").read_bytes()).hexdigest()})
    record = environment.folder / _CHECKOUT
    if record.is_file() and record.read_text() == state and not environment.missing(["pipesd"]):
        return
    command = environment.pip("install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    run(command, log, "this checkout's programs", status=pip_status, reason=pip_reason)
    record.write_text(state)


def pip_status(line: str) -> str | None:
    """What a line of pip's output says about how far it is."""
    line = line.strip()
    if line.startswith(("Collecting ", "Downloading ", "Installing collected packages")):
        return line.partition(":")[0] if line.startswith("Installing") else line
    return None


def pip_reason(output: str) -> str:
    """The line of pip's output that says what was wrong."""
    if unreached := re.search(f"({'|'.join(_UNREACHED)})", output):
        return f"the package index cannot be reached: {unreached[0]}"
    errors = [line.strip() for line in output.splitlines() if line.strip().startswith("ERROR:")]
    for error in errors:
        if "No matching distribution" in error or "Could not install" in error or "No space" in error:
            return error.removeprefix("ERROR:").strip()
    return errors[-1].removeprefix("ERROR:").strip() if errors else output.strip().rpartition("\n")[2]
