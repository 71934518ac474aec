"""A file that holds one JSON object, read with one clear line for whatever else is found there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError

_AGAIN = "copy or download it again"


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file at `path`. UsageError if it cannot be read, is cut short, or is something else."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); check that it is there and readable") from error
    if not raw.strip(b"\0 \r\n\t"):
        raise UsageError(f"{path}: {'nothing but zeros' if raw else 'empty'}, a JSON object was wanted; {_AGAIN}")
    if raw.startswith(b"version https://git-lfs"):
        raise UsageError(f"{path}: a git-lfs pointer, not the file itself; fetch it with git lfs pull")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # a cut file, bytes that are no UTF-8, too many brackets
        raise UsageError(f"{path}: not JSON, or cut short ({str(error)[:80]}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a JSON {type(value).__name__}, an object was wanted; {_AGAIN}")
    return value
