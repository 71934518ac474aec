"""What searches for settings have learnt, kept in a file from one run to the next.

The file is JSON: `{"pipesd_tuning": 1, "states": {key: state}}`. A key says what a state is good for, as the strategy
and the models; the last 32 that were saved are kept. A run never fails by this file: what is wrong is a warning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesd.edge.files import place_of, read_file, replace_file

log = logging.getLogger("pipesd.edge")

VERSION = 1
MOST_KEYS = 32
LARGEST_BYTES = 1 << 20  # of a file; 32 states of 64 trials take a quarter of it
_VERSION_NAME = "pipesd_tuning"

States = dict[str, dict[str, Any]]


def default_path() -> str:
    """The file for those who name none, in the user's folder for what programs keep (XDG base directories)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path("~/.local/state")
    return str(folder / "pipesd" / "tuning.json")


def load(path: str) -> States | None:
    """The states by key, the last saved last; None, with a warning, for a file that cannot be used, and without one
    where there is none."""
    try:
        return _read(_place(path))
    except _Unusable as error:
        log.warning("tuning file %s: %s: what earlier runs have learnt is not used", path, error)
        return None


def save(path: str, states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Put these states beside those in the file, at once or not at all; returns whether it was done.

    The file and its folder are made where they are missing. Of two processes that save at once one may be forgotten,
    but the file is whole. A file that is not such a one, and a folder that cannot be written, are left as they are,
    with a warning.
    """
    try:
        place = _place(path)
        kept = _read(place) or {}
        for key, state in states.items():
            kept.pop(key, None)
            kept[key] = dict(state)
        newest = dict(list(kept.items())[-MOST_KEYS:])
        _replace(place, json.dumps({_VERSION_NAME: VERSION, "states": newest}, allow_nan=False) + "\n")
    except _Unusable as error:
        log.warning("tuning file %s: %s: what this run has learnt is not kept", path, error)
        return False
    return True


class _Unusable(Exception):
    """Why a file cannot be read or written, in words."""


def _place(path: str) -> Path:
    try:
        return place_of(path)
    except ValueError as error:
        raise _Unusable(f"got a name that no file can have ({error}); name another") from error


def _read(place: Path) -> States | None:
    try:
        content = read_file(place, LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Unusable(f"cannot be read: {error.strerror or error}; name another") from error
    if len(content) > LARGEST_BYTES:
        raise _Unusable(f"got more than {LARGEST_BYTES} bytes, which none that was saved has; name another")
    if not content.strip(b"\0\n"):
        return None  # what a machine that lost its power may leave
    return _parsed(content)


def _parsed(content: bytes) -> States:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"damaged, or another kind of file ({error}); name another") from error
    version = found.get(_VERSION_NAME) if isinstance(found, dict) else None
    if type(version) is not int:
        raise _Unusable("got another kind of file; name another")
    if version != VERSION:
        raise _Unusable(f"got version {version}, wanted {VERSION}; name another")
    states = found.get("states")
    if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
        raise _Unusable("damaged: it has no states by key; name another")
    return states


def _replace(place: Path, text: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, text.encode())
    except OSError as error:
        raise _Unusable(f"cannot be written: {error.strerror or error}; name another") from error
