"""A file that holds one JSON object, read with one clear line for whatever else is found there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError
from pipesd.file_kinds import HEAD_BYTES, kind_of
from pipesd.regular_file import open_regular, shown

_MOST_BYTES = 512 << 20  # ten times the largest vocabulary there is
_AGAIN = "copy or download it again"


def read_small(path: Path) -> bytes:
    """The bytes of the file at `path`. UsageError if it cannot be read, or has more than any text of a model."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise UsageError(f"{path}: has {size} bytes, more than any text of a model; {_AGAIN}")
        try:
            return file.read()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}); check the disk") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file at `path`. UsageError if it cannot be read, is cut short, or is something else."""
    raw = read_small(path)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # cut short, no UTF-8, endless brackets, a number without end
        kind = kind_of(raw[:HEAD_BYTES])
        what = f"not JSON, or cut short ({shown(error)})" if kind in ("a JSON text", "something else") else kind
        raise UsageError(f"{path}: {what}, a JSON object was wanted; {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a JSON {type(value).__name__}, an object was wanted; {_AGAIN}")
    return value
