"""What a bench leaves behind: one JSON object as its last line, and the same in a file with what it was measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy

import pipesd
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.streams import OutputClosed, show, tell

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"  # git ignores it
DIGITS = 6  # behind the point


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends the program as `main` says, or with one line for what the world did to it; with none where nobody reads
    stdout any more."""
    try:
        sys.exit(_all_written(main))
    except OutputClosed as error:
        sys.exit(error.exit_code)
    except PipeSDError as error:
        tell(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Cancelled.exit_code)


def _all_written(main: Callable[[], int]) -> str | int | None:
    """The exit code that `main` gives. Raises OutputClosed if stdout did not take all that was printed."""
    code: str | int | None
    try:
        code = main()
    except BrokenPipeError:
        show("\n")  # an empty text would be taken by a stream without a buffer
        raise
    except SystemExit as done:  # after --help
        code = done.code
    show("")
    return code


def progress(line: str) -> None:
    """One line on stderr, at once."""
    tell(line)


def machine() -> dict[str, Any]:
    """The machine and the versions that figures are of; `load` is the mean of the last minute."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "pipesd": pipesd.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> dict[str, Any]:
    """The commit of the code, and whether files differ from it; None for both where git does not say."""
    said = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": said, "dirty": None if changed is None else bool(changed)}


def begin() -> dict[str, Any]:
    """Called when a bench begins: the stamp of its results."""
    return {"begun": _now(), "machine": machine(), **commit(), "_begun_s": time.monotonic()}


def finish(bench: str, stamp: Mapping[str, Any], options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write `<bench>-<UTC time>.json` into the folder of `--results`, and print the same object as the last line."""
    said = {name: value for name, value in stamp.items() if not name.startswith("_")}
    result = rounded({
        "bench": bench,
        **said,
        "seconds": time.monotonic() - stamp["_begun_s"],
        "options": {name: value for name, value in vars(options).items() if value is not None},
        **found,
    })  # fmt: skip
    line = json.dumps(result)
    folder = Path(options.results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _unused(folder, f"{bench}-{_now()}")
        path.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--results {folder}: {error.strerror}; give a folder that can be written") from None
    progress(f"results in {path}")
    print(line, flush=True)


def rounded(value: Any) -> Any:
    """For JSON: few digits behind the point, and null for what is not finite."""
    if isinstance(value, float):
        return round(value, DIGITS) if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def _unused(folder: Path, name: str) -> Path:
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
