"""`pipesd-edge pair` in this process, and the tiny models that it is given."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipesd.edge.cli import main
from pipesd.edge.pair_report import NAMES
from tests.programs import Ran

Make = Callable[..., Path]


def maker(folder: Path) -> Make:
    """Writes a tiny GGUF model into `folder`, once for each set of changes."""
    from tests.tiny import write_tiny

    made: dict[str, Path] = {}

    def write(**changes: Any) -> Path:
        key = repr(sorted(changes.items()))
        if key not in made:
            made[key] = write_tiny(folder / f"{len(made)}.gguf", **changes)
        return made[key]

    return write


def pair(draft: Path, target: Path, *more: object) -> Ran:
    """The command in this process, which saves its start."""
    said = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    log = logging.getLogger("pipesd")
    before = log.handlers, log.level
    try:
        with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
            code = main(["pair", "--draft", str(draft), "--target", str(target), *map(str, more)])
    finally:
        log.handlers, log.level = before
    out, err = (stream.buffer.getvalue().decode() for stream in said)  # type: ignore[attr-defined]
    return Ran(code, out, err, 0.0)


def report(ran: Ran) -> dict[str, Any]:
    """The only thing on stdout."""
    assert ran.out.count("\n") == 1 and ran.out.endswith("\n")
    found: dict[str, Any] = json.loads(ran.out)
    assert list(found) == NAMES
    return found
