"""Folders that no cloud can serve, given by mistake or to break it: one line each, soon, in little memory."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bad_folders import SPOILED

from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.loading import load_target
from pipesd.cloud.transformers_target import load_transformers_target
from pipesd.errors import UsageError
from tests.programs import cloud
from tests.tiny_hf import write_folder

SOON_S = 10.0  # on a machine that is busy; nothing here takes a second of work
MEMORY_BYTES = 1 << 30  # beyond what the process has already
LONG = 1000  # characters; a path in the message counts apart
AS_PROGRAM = [
    "config model_type 7",
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("nothing in it", "config.json pipe", "weights cut by one", "header with a strange tensor")
    ),
]


def _is_slow(name: str) -> bool:
    """Whether it takes long, or is like two others: each key of a config is tried with two of its values."""
    key, _, i = name.rpartition(" ")
    return name == "added a million" or (key.startswith("config ") and i.isdecimal() and int(i) >= 2)


ALL = [pytest.param(name, marks=pytest.mark.slow) if _is_slow(name) else name for name in SPOILED]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("good") / "model", "llama")
    load_target(folder, device="cpu")  # what loading takes for itself is not what a bad one takes
    return folder


@contextmanager
def within_bounds() -> Iterator[None]:
    """Fails the body when it takes long or much memory, instead of the machine."""

    def late(*_: Any) -> None:
        raise AssertionError(f"not refused within {SOON_S:g} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def spoiled(good: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """What is given to the cloud."""
    if request.param == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything")
    at = shutil.copytree(good, tmp_path / "model")
    yield SPOILED[request.param](at) or at
    if at.exists():
        at.chmod(0o755)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("spoiled", ALL, indirect=True)
def test_a_bad_folder_is_refused(spoiled: Path) -> None:
    with within_bounds(), pytest.raises(UsageError) as refused:
        load_target(spoiled, device="cpu")
    told = str(refused.value)
    assert "; " in told, "it does not say what to do"
    assert len(told.replace(str(spoiled), "").replace(repr(str(spoiled))[1:-1], "")) < LONG
    assert not any(each in told for each in ("Traceback", "object at 0x"))


@pytest.mark.parametrize("spoiled", AS_PROGRAM, indirect=True)
def test_the_program_says_it_in_one_line(spoiled: Path) -> None:
    ran = cloud("serve", "--model", spoiled, "--bind", "tcp://127.0.0.1:0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaint.isprintable() and ran.complaint.startswith("pipesd-cloud: ")


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [each for each in SPOILED if each.startswith("config ")], indirect=True)
def test_a_config_is_refused_or_served_by_the_transformers_backend(spoiled: Path) -> None:
    """Some values mean nothing to it, and what transformers raises for the others is its own affair."""
    with within_bounds(), suppress(UsageError):
        load_transformers_target(spoiled, device="cpu")


def test_the_good_folder_is_good(good: Path) -> None:
    """Else the others prove nothing."""
    assert open_checkpoint(good).shape.layers == 2
