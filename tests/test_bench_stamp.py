"""How a bench ends: with its exit code, one line for what went wrong, and in silence where nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
BEGIN = f"""
import sys
sys.path.append({str(BENCH)!r})
from pipesd.errors import UsageError
from stamp import end_with, progress

def fail(error):
    raise error
"""


def ended(body: str, *, read: bool = True, unbuffered: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a bench whose `main` is `body`; without `read` nobody reads its stdout."""
    here, there = os.pipe()
    if not read:
        os.close(here)
    program = f"{BEGIN}\nend_with(lambda: {body})"
    try:
        done = subprocess.run(
            [sys.executable, *["-u"][: int(unbuffered)], "-c", program],
            stdout=there, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )  # fmt: skip
    finally:
        os.close(there)
    if not read:
        return done.returncode, "", done.stderr
    with open(here, encoding="utf-8") as stream:
        return done.returncode, stream.read(), done.stderr


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("print('table') or 0", 0, "table\n", ""),
        ("print('table') or 1", 1, "table\n", ""),
        ("fail(UsageError('give more'))", 2, "", "error: give more\n"),
        ("fail(KeyboardInterrupt())", 130, "", ""),
        ("progress('half') or 0", 0, "", "half\n"),
    ],
)
def test_it_ends_as_it_says(body: str, code: int, out: str, err: str) -> None:
    assert ended(body) == (code, out, err)


@pytest.mark.parametrize(("flushed", "unbuffered"), [(True, False), (False, False), (False, True)])
def test_it_ends_in_silence_where_nobody_reads_it(flushed: bool, unbuffered: bool) -> None:
    assert ended(f"print('table', flush={flushed}) or 0", read=False, unbuffered=unbuffered) == (130, "", "")


def test_another_pipe_that_breaks_is_a_failure() -> None:
    code, _, said = ended("fail(BrokenPipeError('a worker has gone'))")
    assert code == 1 and said.endswith("BrokenPipeError: a worker has gone\n")


def test_help_ends_in_silence_where_nobody_reads_it() -> None:
    assert ended("print('usage') or sys.exit(0)", read=False) == (130, "", "")


def test_every_bench_ends_so() -> None:
    """None by `sys.exit`, which shows a trace."""
    programs = [path for path in sorted(BENCH.glob("*.py")) if "__main__" in path.read_text() and path.stem[0] != "_"]
    assert len(programs) > 20
    assert [path.stem for path in programs if not path.read_text().endswith("\n    end_with(main)\n")] == []
