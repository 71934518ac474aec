"""What may be in no file of the repository: leftovers, unfinished work, and what is true on one machine only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("pipesd", "bench", "tests", "tools", "docs", ".ci")
SKIPPED_FOLDERS = {"__pycache__", "build", "dist"}

RULES = {
    "unfinished work": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "a conflict of versions": re.compile(r"^(?:<{7}|={7}|>{7})(?: |$)", re.MULTILINE),
    "a home folder": re.compile(r"(?<![\w.])/(?:home|root|Users)/\w"),
    "the place of this checkout": re.compile(
        rf"(?<![\w.]){re.escape(str(ROOT))}\b" if len(ROOT.parts) > 2 else r"(?!)"
    ),
    "a package index": re.compile(r"(?:--(?:extra-)?index-url|--trusted-host|PIP_INDEX_URL)[ =]\S*//"),
    "white space at the end of a line": re.compile(r"[ \t]+$", re.MULTILINE),
    "a carriage return": re.compile(r"\r"),
    "a debugger": re.compile(r"\b(?:breakpoint\(\)|import pdb|pdb\.set_trace)"),
}


def text_files() -> Iterator[tuple[Path, str]]:
    """(path, content) of every text file of the repository; folders that tools make are left out."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for place in PLACES:
        files += [path for path in (ROOT / place).rglob("*") if path.is_file()]
    for path in sorted(files):
        folders = path.relative_to(ROOT).parts[:-1]
        if SKIPPED_FOLDERS.intersection(folders) or any(folder.endswith(".egg-info") for folder in folders):
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a model or a picture


@pytest.mark.parametrize("rule", RULES)
def test_no_file_holds(rule: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for path, text in text_files()
        if path != Path(__file__)  # it names them
        for match in RULES[rule].finditer(text)
    ]
    assert not found


def test_every_text_file_ends_its_last_line() -> None:
    assert not [str(path.relative_to(ROOT)) for path, text in text_files() if text and not text.endswith("\n")]


def test_package_is_two_levels_of_named_ideas() -> None:
    modules = [path.relative_to(ROOT / "pipesd") for path in (ROOT / "pipesd").rglob("*.py")]
    assert modules
    assert not [str(path) for path in modules if len(path.parts) > 2]
    assert not [str(path) for path in modules if path.stem in {"utils", "util", "helpers", "common", "misc"}]
