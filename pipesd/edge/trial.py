"""Tries a model file in a child process before this one touches it.

Native code answers a processor that lacks an instruction, and some damaged files, by killing the process. So the first
time that a model file meets a build of llama-cpp-python on a processor, a child loads it and decodes two ids; a child
that dies of a signal becomes one line here. What went well is remembered as an empty file in the user's cache folder,
so that later starts cost nothing; where no child can be started or nothing remembered, the model is loaded anyway.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipesd.edge.llama import INSTALL, log, native
from pipesd.errors import UsageError

_HEAD_BYTES = 1 << 20
LONGEST_S = 300.0  # for the child; a large model on a slow disk takes minutes
CRASH_SIGNALS = {"SIGILL", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGTRAP"}

Run = Callable[[Sequence[str]], tuple[int, str]]


def run_child(command: Sequence[str]) -> tuple[int, str]:
    """Exit code (negative: the signal) and stderr of `command`; code 0 where it cannot be run or takes too long.

    Whatever ends the wait, the child does not outlive it.
    """
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(entry or os.curdir for entry in sys.path),
        GGML_NO_BACKTRACE="1",  # else llama.cpp calls a debugger when it aborts
    )
    child = None
    try:
        with _signals_put_off():  # one that came while the child starts would find nobody there to end it
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        _, told = child.communicate(timeout=LONGEST_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0, ""
    finally:
        if child is not None:
            child.kill()  # if it still runs
            child.wait()
            if child.stderr is not None:
                child.stderr.close()
    return child.returncode, told.decode("utf-8", "replace")


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """SIGINT and SIGTERM have their effect behind this. (To block them would not do: another thread would get them.)"""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are none of this thread's business
        return
    came: list[signal.Signals] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(signal.Signals(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not None  # installed by something else than Python, and not to be restored
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            handler = before[number]
            if callable(handler):
                handler(number, None)  # the signal itself came once, and is not to be counted twice
            else:
                signal.raise_signal(number)


def try_model(path: Path, *, vocab_only: bool, cache: Path | None = None, run: Run = run_child) -> None:
    """Raises `UsageError` if loading the file at `path` kills a process; at once if it went well before.

    `cache` is the folder of remembered successes (None: the user's), `run` starts the child.
    """
    remembered = (user_cache() if cache is None else cache) / "tried" / _key(path, vocab_only)
    if not sys.executable or remembered.exists():
        return
    code, told = run([sys.executable, "-m", __spec__.name, str(path), "vocabulary" if vocab_only else "model"])
    died_of = _signal_name(code)
    if died_of == "SIGILL":
        raise UsageError(
            f"llama-cpp-python was built for instructions that this processor ({processor()}) lacks; "
            f"build it on this machine: pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
            f"llama-cpp-python, or with CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX2=OFF -DGGML_FMA=OFF' for an old one"
        )
    if died_of in CRASH_SIGNALS:
        last = next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "no reason given")
        reason = re.sub(r"^\S*/", "", last)[:200]  # without the folder that it was built in
        raise UsageError(f"{path}: kills llama.cpp ({died_of}: {reason}); give another file, or {INSTALL}")
    if code == 0:
        try:
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.touch()
        except OSError:
            pass  # a cache folder that cannot be written to costs the next start a trial


def user_cache() -> Path:
    """Where this user's programs keep what can be made again."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pipesd"
    home = Path(os.path.expanduser("~"))
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "pipesd"


def processor() -> str:
    """The processor's name, as far as it is told."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _signal_name(code: int) -> str:
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _key(path: Path, vocab_only: bool) -> str:
    """One name for (build of llama.cpp, processor, file): a change of any of them asks for another trial.

    Of the file its length and beginning count, where all is said that llama.cpp could stumble over.
    """
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD_BYTES))
    parts = [path.stat().st_size, vocab_only, processor(), _cpuinfo("flags"), *_build()]
    digest.update("\n".join(map(str, parts)).encode())
    return digest.hexdigest()[:32]


def _build() -> list[object]:
    """Version of llama-cpp-python, and size and age of its libraries, without importing it."""
    try:
        version = importlib.metadata.version("llama_cpp_python")
        spec = importlib.util.find_spec("llama_cpp")
    except importlib.metadata.PackageNotFoundError:
        return []
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else Path()
    libraries = sorted(entry for entry in folder.glob("*") if ".so" in entry.name or ".dylib" in entry.name)
    return [version, *((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in libraries)]


def _cpuinfo(field: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


def main(path: str, what: str) -> None:
    """The child's part: load, and decode two ids; a failure that is an exception is left for the parent to meet."""
    llama = native()
    log.shown = True
    parameters = llama.llama_model_default_params()
    parameters.vocab_only, parameters.n_gpu_layers = what == "vocabulary", 0
    model = llama.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model or what == "vocabulary":
        return
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 64, 8, 8
    context = llama.llama_init_from_model(model, options)
    if not context:
        return
    ids = (llama.llama_token * 2)(0, 0)
    llama.llama_decode(context, llama.llama_batch_get_one(ids, 2))


if __name__ == "__main__":
    main(*sys.argv[1:])
