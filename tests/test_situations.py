"""docs/situations.md names the tests that hold what it promises; here it is held to that. Nothing is imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "situations.md").read_text(encoding="utf-8")
OWED = "Not in this version"
NAMED = re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)
# ("##" or "###", title, what stands below it) of each heading
SECTIONS = re.findall(r"^(##+) (.+)\n((?:(?!##).*\n)*)", TEXT, re.MULTILINE)


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the tests that pytest would collect from a file."""
    path = ROOT / file
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    assert functions(file), f"{file} is not there, or has no tests"
    assert not [name for named_in, name in NAMED if named_in == file and name not in functions(file)]


def test_names_are_names_of_tests_and_nothing_that_looks_like_one_is_overlooked() -> None:
    assert len(NAMED) == TEXT.count("::") and all(name.startswith("test_") for _, name in NAMED)


def test_every_situation_names_a_test_except_what_is_owed() -> None:
    chapters: dict[str, dict[str, str]] = {}
    for level, title, below in SECTIONS:
        if level == "##":
            chapter = chapters.setdefault(title, {})
            assert "::" not in below, f"{title}: tests stand below a situation"
        else:
            chapter[title] = below
    assert len(chapters) >= 6 and list(chapters)[-1] == OWED
    held = {title: below for name, chapter in chapters.items() if name != OWED for title, below in chapter.items()}
    assert len(held) > 40
    assert not [title for title, below in held.items() if not re.search(r"^`tests/\w+\.py::test_\w+`$", below, re.M)]


def test_the_table_of_contents_is_the_chapters() -> None:
    titles = [title for level, title, _ in SECTIONS if level == "##"]
    links = re.findall(r"^- \[(.+)\]\(#(.+)\)$", TEXT, re.MULTILINE)
    assert links == [(title, re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")) for title in titles]


def test_every_option_that_is_named_exists() -> None:
    """Defaults and flags are made from the fields of the configuration, or added by the programs by name."""
    fields = re.findall(r"^    (\w+): .* = option\(", (ROOT / "pipesd" / "config.py").read_text(), re.MULTILINE)
    known = {"--help", "--version"} | {"--" + name.replace("_", "-") for name in fields}
    for file in ("pipesd/program.py", "pipesd/edge/cli.py", "pipesd/cloud/cli.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / file).read_text()))
    above, _, owed = TEXT.partition(f"\n## {OWED}")
    assert not set(re.findall(r"`(--[a-z][a-z-]+)", above)) - known
    assert owed
