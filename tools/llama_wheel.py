"""Builds llama-cpp-python once for each version, set of flags and machine, and keeps the wheel in the cache.

Left out of the build: multimodal models and llama.cpp's shared code for its command line programs, which the binding
never calls; that is more than half of the compiling. Without GGML_NATIVE the wheel also runs on other machines of the
same architecture (on x86 it still wants AVX2).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

from environment import LLAMA, Environment, tested_version
from workshop import ROOT, Failure, clean_environment, run

SOURCE_MB = 77
BUILD_TOOLS_MB = 35
STEPS = 83  # of compiling and linking, on x86
CORE_S_PER_STEP = 2.3
_PROJECT_INCLUDE = ROOT / "tools" / "llama_without_common.cmake"
_FLAGS = ("-DLLAVA_BUILD=OFF", "-DGGML_NATIVE=OFF")


def locate(cache: Path) -> Path:
    """The folder that holds the wheel or will hold it."""
    flags = " ".join([*_FLAGS, _PROJECT_INCLUDE.read_text(), os.environ.get("CMAKE_ARGS", "")])
    key = hashlib.sha256(flags.encode()).hexdigest()[:10]
    return cache / "wheels" / f"{LLAMA}-{tested_version(LLAMA)}-{sysconfig.get_platform()}-{key}"


def find(folder: Path) -> Path | None:
    """The wheel in such a folder, None if it is not built yet."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


def build_time_s() -> float:
    """About how long the build takes with the cores that this process may use."""
    return 20 + STEPS * CORE_S_PER_STEP / usable_cores()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_compiler() -> None:
    """Raises Failure where there is no C++ compiler; cmake and ninja come with pip."""
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        chosen = os.environ.get(variable)
        if not any(shutil.which(name) for name in ((chosen.split()[0],) if chosen else names)):
            raise Failure(
                f"llama-cpp-python has to be compiled and no {'C' if variable == 'CC' else 'C++'} compiler was found "
                f"({variable}={chosen or ', '.join(names)}); install one (Debian, Ubuntu: apt install g++; Fedora: "
                "dnf install gcc-c++; Alpine: apk add g++; macOS: xcode-select --install)"
            )


def build(environment: Environment, folder: Path, log: Path) -> Path:
    """Builds the wheel into `folder`, where it appears complete or not at all."""
    check_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    # CMake splits its arguments at spaces, and the checkout's path may have some.
    with tempfile.TemporaryDirectory(prefix="pipesd-build-") as scratch:
        include = Path(scratch) / _PROJECT_INCLUDE.name
        shutil.copyfile(_PROJECT_INCLUDE, include)
        flags = [*_FLAGS, f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={include}", os.environ.get("CMAKE_ARGS", "")]
        variables = clean_environment(
            CMAKE_ARGS=" ".join(flags).strip(),
            CMAKE_BUILD_PARALLEL_LEVEL=os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(usable_cores()),
        )
        # pip's own store of wheels does not know about the flags, so it must not be asked.
        source = f"{LLAMA}=={tested_version(LLAMA)}"
        command = environment.pip(
            "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-binary", LLAMA, "--wheel-dir", scratch, source
        )
        run(command, log, f"build {source}", environment=variables, status=build_status, reason=build_reason)
        wheel = find(Path(scratch))
        if wheel is None:
            raise Failure(f"pip built no wheel of {source}; all of its output: {log}")
        part = folder / f".{wheel.name}.part"
        shutil.copyfile(wheel, part)
        os.replace(part, folder / wheel.name)
    return folder / wheel.name


def build_status(line: str) -> str | None:
    """What a line of the build's output says about how far it is."""
    if step := re.search(r"\[(\d+)/(\d+)\]", line):
        return f"compiling, step {step[1]} of {step[2]}"
    line = line.strip()
    if line.startswith(("Collecting ", "Downloading ")):
        return line
    return "preparing" if "Preparing metadata" in line or "Configuring CMake" in line else None


def build_reason(output: str) -> str:
    """The line of the build's output that says what was wrong: the compiler's, else CMake's, else pip's."""
    for pattern in (r"No space left on device", r"Killed|out of memory", r"\berror: .+", r"CMake Error.*", "ERROR: .+"):
        if found := re.search(pattern, output):
            return found[0].strip()
    return output.strip().rpartition("\n")[2]
