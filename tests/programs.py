"""The two programs as their users meet them: processes with their streams, signals and exit codes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

import pytest

from tests.clouds import PATIENT_S, wait_until

ROOT = Path(__file__).parents[1]
MAIN = "import sys; from pipesd.{}.cli import main; sys.exit(main())"
ENDS_S = 2.0  # an interrupted program is gone by then


@dataclass(frozen=True)
class Ran:
    """What became of a program."""

    code: int
    out: str
    err: str
    took_s: float
    raw: bytes = b""  # stdout as it came

    @property
    def complaint(self) -> str:
        """The one line that it said on stderr."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), f"not one line: {self.err}"
        return self.err.rstrip("\n")


class Program:
    """A program that runs. Its streams are collected; `end` waits for it and looks for what nobody should see."""

    def __init__(
        self,
        side: str,
        *arguments: object,
        python: Sequence[str] = (),
        before: str = "",
        shell: str = "",
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        **environment: str,
    ) -> None:
        """`before` is Python to run first, `shell` what a shell puts behind the command (`2>&-`, `| head -1`)."""
        program = [*self.command(side, python=python, before=before), *map(str, arguments)]
        command = ["/bin/bash", "-c", f'"$@" {shell}', "bash", *program] if shell else program
        self._begun_s = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(**environment),
            start_new_session=True,
        )  # fmt: skip
        self.out, self.err = b"", b""
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def command(side: str, *, python: Sequence[str] = (), before: str = "") -> list[str]:
        return [sys.executable, *python, "-c", before + MAIN.format(side)]

    @staticmethod
    def environment(**changes: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": cache_home(), **changes}

    def _read(self, name: str) -> None:
        stream: Any = getattr(self.process, f"std{name}")
        while data := os.read(stream.fileno(), 1 << 16):
            setattr(self, name, getattr(self, name) + data)

    def says(self, text: str | bytes, *, on: str = "out", within_s: float = PATIENT_S) -> Self:
        """Wait until it has said that."""
        wanted = text.encode() if isinstance(text, str) else text

        def said() -> bool:
            found = wanted in getattr(self, on)
            assert found or self.process.poll() is None or wanted in getattr(self, on), (
                f"ended: {self.out!r} {self.err!r}"
            )
            return found

        wait_until(said, f"{text!r} on std{on}", within_s)
        return self

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def send(self, number: signal.Signals, *, group: bool = False) -> float:
        """Send a signal to the process alone, or as a terminal does to all that it has started too; the time."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        return time.monotonic()

    def end(self, within_s: float = 3 * PATIENT_S, *, since_s: float | None = None, debug: bool = False) -> Ran:
        """Wait for its end. Nothing of it is left running, and without `debug` nobody sees a stack trace."""
        begun_s = time.monotonic() if since_s is None else since_s
        try:
            code = self.process.wait(within_s + PATIENT_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        took_s = time.monotonic() - begun_s
        assert took_s <= within_s, f"ended after {took_s:.2f} s, wanted {within_s:g} s: {self.err!r}"
        wait_until(self._all_gone, "the end of what it started")
        for reader in self._readers:
            reader.join(PATIENT_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        out, err = (said.decode(errors="backslashreplace") for said in (self.out, self.err))
        if not debug:
            assert "Traceback" not in err, err
        assert "Exception ignored" not in err and "Warning:" not in err, err
        return Ran(code, out, err, time.monotonic() - self._begun_s, self.out)

    def _all_gone(self) -> bool:
        """Whether nothing of its process group runs; what has ended and waits for init to take note does not count."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # macOS says so of what has ended and was not taken note of
        states = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it has ended just now
            if int(group) == self.process.pid:
                states.append(state)
        return bool(states) and set(states) == {"Z"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENT_S)


def run(
    side: str, *arguments: object, stdin: str | bytes = b"", debug: bool = False, within_s: float = 3 * PATIENT_S,
    **settings: Any,
) -> Ran:  # fmt: skip
    """A program from its start to its end, with `stdin` piped in."""
    with tempfile.TemporaryFile() as file:
        file.write(stdin.encode() if isinstance(stdin, str) else stdin)
        file.seek(0)
        with Program(side, *arguments, stdin=file, **settings) as program:
            return program.end(within_s, debug=debug)


def edge(*arguments: object, **settings: Any) -> Ran:
    return run("edge", *arguments, **settings)


def cloud(*arguments: object, **settings: Any) -> Ran:
    return run("cloud", *arguments, **settings)


@cache
def cache_home() -> str:
    """A cache folder of our own, so that what the user's remembers is neither used nor changed."""
    folder = tempfile.TemporaryDirectory(prefix="pipesd-test-")
    _kept.append(folder)
    return folder.name


_kept: list[Any] = []


@dataclass(frozen=True)
class Models:
    """Files of a tiny pair, of one without a chat template, and the draft model's vocabulary."""

    draft: Path
    target: Path
    untalkative: Path
    vocabulary: Any

    @property
    def options(self) -> list[str]:
        return ["--draft", str(self.draft)]


def make_models(folder: Path) -> Models:
    """Skips where llama.cpp is missing."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from pipesd.edge.tokeniser import Tokeniser
    from tests.tiny import write_tiny

    draft, target = write_tiny(folder / "draft.gguf", noise=0.03), write_tiny(folder / "target.gguf")
    untalkative = folder / "untalkative.gguf"
    untalkative.write_bytes(draft.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templat_"))
    tokeniser = Tokeniser.open(draft)
    tokeniser.close()
    return Models(draft, target, untalkative, tokeniser.vocabulary)


def bad_files(folder: Path, good: bytes) -> Mapping[str, tuple[str, str]]:
    """Files that are no model: by kind the path as a user gives it, and the path that the message must name."""
    made = {
        "missing": None,
        "empty": b"",
        "cut": good[:1000],
        "half": good[: len(good) // 2],
        "safetensors": b"\x40\0\0\0\0\0\0\0"
        + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(0x40)
        + bytes(4),
        "pickle": pickle.dumps({"weights": [1.0]}),
        "page": b"<!DOCTYPE html><title>404</title>",
    }
    for kind, content in made.items():
        if content is not None:
            (folder / f"{kind}.gguf").write_bytes(content)
    (folder / "folder.gguf").mkdir()
    files = {
        kind: (str(folder / f"{kind}.gguf"), str((folder / f"{kind}.gguf").resolve())) for kind in [*made, "folder"]
    }
    files["home"] = ("~/nothing.gguf", str(Path("~/nothing.gguf").expanduser().resolve()))
    return files
