"""Compiled functions: loaded when asked, never needed, safe among threads, forks, processes and upgrades."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipesd import _kernels
from pipesd._kernels.token_batches import PLAN, solve

ROOT = Path(__file__).parents[1]
SIGNATURE = "Tuple((int64, float64))(int64, float64, float64, float64, float64, float64, float64[::1], int64[::1])"
LINKS = [(0.025, 0.116, 0.036, 0.025), (0.025, 0.006, 0.036, 0.001), (0.0, 0.0, 0.0, 0.0), (1e6, 1e-6, 1.0, 0.5)]
PLANS = [solve(window, *link, 0.0, compiled=False) for window in (1, 6, 20) for link in LINKS]
KERNELS = 3
# Prints whether compiled code is used, and the plans.
PROGRAM = f"""
from pipesd import _kernels
from pipesd._kernels.confidence import OBSERVE
from pipesd._kernels.token_batches import solve
print(_kernels.warmup() and OBSERVE.at_hand() is not OBSERVE.plain)
print([solve(window, *link, 0.0, compiled=True) for window in (1, 6, 20) for link in {LINKS}])
"""


def start(cache: Path, *, root: Path = ROOT, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """A process that plans, with its compiled code in `cache`; `before` is Python to run first."""
    settings = {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM], cwd=root, env={**os.environ, **settings}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[bool, list[object], str]:
    """Whether it used compiled code, its plans, what it said on stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    used, plans = out.splitlines()
    return used == "True", eval(plans, {}), err


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    pytest.importorskip("numba")
    return tmp_path / "cache"


def indices(cache: Path) -> set[str]:
    """The names of the index files that numba keeps, one for each source, processor and version of numba."""
    return {path.name for path in cache.rglob("*.nbi")}


def test_plans_of_plain_lists_and_of_arrays_are_equal() -> None:
    pytest.importorskip("numba")
    assert _kernels.warmup() and PLAN.compiled() is not None
    assert [solve(window, *link, 0.0, compiled=True) for window in (1, 6, 20) for link in LINKS] == PLANS


def test_nothing_is_compiled_after_the_warm_up() -> None:
    pytest.importorskip("numba")
    from numba.core import event

    with event.install_recorder("numba:compile") as seen:
        fresh = _kernels.Kernel(PLAN.plain, SIGNATURE)
        assert fresh.compiled() is not None
        first = len(seen.buffer)
        assert solve(20, *LINKS[0], 0.0, compiled=True) == solve(20, *LINKS[0], 0.0, compiled=False)
        compiled = PLAN.compiled()
        assert compiled is not None
        with pytest.raises(TypeError):
            compiled("20")
    assert len(seen.buffer) == first


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.modules['numba'] = None",
        "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'",
    ],
    ids=["absent", "switched off"],
)
def test_without_numba_plans_are_the_same_and_nothing_is_said(before: str, tmp_path: Path) -> None:
    assert end(start(tmp_path / "cache", before=before)) == (False, PLANS, "")


BROKEN = {
    "numpy too new": "raise ImportError('Numba needs NumPy 2.3 or less. Got NumPy 2.9.')",
    "a missing part": "import llvmlite_that_is_missing",
    "no library": "raise OSError('Could not find/load shared object file')",
    "another Python": "raise RuntimeError('Cannot install on Python version 3.15')",
    "a renamed function": "raise AttributeError('module has no attribute')",
    "a compiler that fails": "class config: DISABLE_JIT = 0\ndef njit(*a, **k): raise ValueError('no such target')",
    "nothing in it": "",
}


@pytest.mark.parametrize("trouble", BROKEN)
def test_a_broken_numba_is_told_and_not_needed(trouble: str, tmp_path: Path) -> None:
    package = tmp_path / "broken" / "numba"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN[trouble])
    used, plans, err = end(start(tmp_path / "cache", PYTHONPATH=str(package.parent)))
    assert (used, plans) == (False, PLANS)
    assert re.fullmatch(r"numba cannot be used \(\w+: .+\): plain Python computes the same, slower\n", err), err


def test_planned_from_two_threads_and_in_a_forked_child() -> None:
    pytest.importorskip("numba")

    def plan_often(_: int) -> list[object]:
        return [solve(20, *link, 0.0, compiled=True) for _ in range(500) for link in LINKS]

    wanted = [solve(20, *link, 0.0, compiled=False) for _ in range(500) for link in LINKS]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(plan_often, range(2))) == [wanted, wanted]
        child = os.fork()
        if child == 0:
            os._exit(0 if plan_often(0) == wanted else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_first_used_by_two_threads_at_once() -> None:
    pytest.importorskip("numba")
    kernel = _kernels.Kernel(PLAN.plain, SIGNATURE)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: kernel.compiled(), range(2)))
    assert None not in found


def test_compiled_code_is_kept_and_used_again(cache: Path) -> None:
    assert end(start(cache)) == (True, PLANS, "")
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}
    assert len(files) == 2 * KERNELS
    assert end(start(cache)) == (True, PLANS, "")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")} == files


def test_what_is_waited_for_is_logged_while_nothing_is_kept_yet(cache: Path) -> None:
    before = "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    used, _, err = end(start(cache, before=before))
    lines = err.splitlines()
    assert used and len(lines) == KERNELS
    assert re.fullmatch(r"compiling race with numba, a second or more: only where it was never done", lines[-1])
    assert end(start(cache, before=before)) == (True, PLANS, "")


def damage_all(change: Callable[[bytes], bytes], cache: Path, kinds: str) -> None:
    for path in cache.rglob(kinds):
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["*.nbi", "*.nbc"])
def test_a_damaged_cache_is_passed_over(kinds: str, cache: Path) -> None:
    end(start(cache))
    for change in (lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * len(data)):
        damage_all(change, cache, kinds)
        assert end(start(cache)) == (True, PLANS, "")


@pytest.mark.slow
def test_where_nothing_can_be_kept_it_is_compiled_each_time(cache: Path, tmp_path: Path) -> None:
    """Neither the folder that is given nor that of the source nor the user's can be made, whoever runs this."""
    root, nowhere = copy_of_the_package(tmp_path / "copy"), tmp_path / "file"
    nowhere.write_text("")
    (root / "pipesd" / "_kernels" / "__pycache__").write_text("")
    found = end(start(nowhere / "x", root=root, HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere / "y")))
    assert found == (True, PLANS, "")


def copy_of_the_package(root: Path) -> Path:
    shutil.copytree(ROOT / "pipesd", root / "pipesd", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.slow
def test_eight_processes_fill_one_cache_at_once(cache: Path) -> None:
    processes = [start(cache) for _ in range(8)]
    assert [end(process) for process in processes] == [(True, PLANS, "")] * 8
    assert end(start(cache)) == (True, PLANS, "")
    assert not [path for path in cache.rglob("*") if ".tmp." in path.name]


# Makes numba take any source for the one that it knows, as its older versions do where size and time are equal.
SAME_STAMP = """
from numba.core import caching
caching._SourceFileBackedLocatorMixin.get_source_stamp = lambda self: 0
"""


@pytest.mark.slow
def test_an_upgrade_never_uses_old_code(cache: Path, tmp_path: Path) -> None:
    root = copy_of_the_package(tmp_path / "copy")
    assert end(start(cache, root=root, before=SAME_STAMP)) == (True, PLANS, "")
    source = root / "pipesd" / "_kernels" / "token_batches.py"
    stamp = source.stat()
    old = source.read_text()
    new = old.replace("TIE = 1e-9", "TIE = 9e-1")  # a constant: numba's key, made from the byte code, stays the same
    assert new != old and len(new) == len(old)
    source.write_text(new)
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    used, plans, _ = end(start(cache, root=root, before=SAME_STAMP))
    assert used and plans != PLANS
    assert plans == end(start(cache, root=root, before="import sys; sys.modules['numba'] = None"))[1]


@pytest.mark.slow
def test_each_processor_has_its_own_file(cache: Path) -> None:
    """Machines of different kinds may share a home folder; numba would keep the code of both behind one index."""
    end(start(cache))
    one = indices(cache)
    end(start(cache, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""))
    assert len(one) == KERNELS and len(indices(cache)) == 2 * KERNELS
