"""Writing into a configuration file: a few keys of one table, all else, comments too, left as it is."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesd.edge.files import place_of, read_file, replace_file
from pipesd.errors import UsageError

LARGEST_BYTES = 1 << 20

_BOM = "\ufeff"
_HEADER = re.compile(r"\s*\[")
_KEY = re.compile(r"""\s*(?:"(?P<double>[\w-]+)"|'(?P<single>[\w-]+)'|(?P<bare>[\w-]+))\s*=""")
_COMMENT = re.compile(r"""[^#"']*?(?P<comment>\s*#.*)?$""")


def check_file(path: str, table: str) -> None:
    """Raises UsageError unless `update_file` could write into the file as it is now; a missing one it will make."""
    _updated(_read(place_of(path)), table, {}, path)
    if not os.access(place_of(path).parent, os.W_OK | os.X_OK):
        raise UsageError(f"configuration file {path}: its folder cannot be written; save it elsewhere")


def update_file(path: str, table: str, values: Mapping[str, float | str | list[str] | None]) -> None:
    """Set keys of a table of a TOML file, at once or not at all; a value of None takes the key out.

    The file and the table are made where they are missing. `-` and `_` in keys are one. Everything else in the file
    stays byte for byte, and so do its permissions; a link is followed. Raises UsageError, the file untouched, if it is
    not TOML, cannot be read or written, or holds the table in a form other than lines below `[table]`.
    """
    place = place_of(path)
    text = _updated(_read(place), table, values, path)
    try:
        mode = place.stat().st_mode & 0o7777 if place.exists() else 0o666 & ~_umask()
        replace_file(place, text.encode(), mode=mode)
    except OSError as error:
        raise UsageError(f"configuration file {path}: {error.strerror or error}; save it elsewhere") from error


def _read(place: Path) -> str:
    try:
        content = read_file(place, LARGEST_BYTES + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"configuration file {place}: {error.strerror or error}; save it elsewhere") from error
    if len(content) > LARGEST_BYTES:
        raise UsageError(f"configuration file {place}: got more than {LARGEST_BYTES} bytes; save it elsewhere")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"configuration file {place}: not TOML: no UTF-8 at byte {error.start}") from error


def _umask() -> int:
    """Python tells it only while setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix(_BOM))
    except RecursionError as error:
        raise UsageError(f"configuration file {path}: brackets are nested too deep") from error
    except ValueError as error:
        raise UsageError(f"configuration file {path}: not TOML: {error}; it was left as it is") from error


def _updated(text: str, table: str, values: Mapping[str, float | str | list[str] | None], path: str) -> str:
    """The text with those keys set. Parsed again, it must be the old one with the values, or it is refused."""
    before = _parsed(text, path)
    new = _edited(text, table, values)
    wanted = copy.deepcopy(before)
    if isinstance(wanted.setdefault(table, {}), dict):
        names = {name.replace("-", "_") for name in values}
        wanted[table] = {key: value for key, value in wanted[table].items() if key.replace("-", "_") not in names}
        wanted[table].update({name: value for name, value in values.items() if value is not None})
    try:
        after = tomllib.loads(new.removeprefix(_BOM))
    except ValueError:
        after = {}
    if after != wanted:
        raise UsageError(
            f"configuration file {path}: its table {table!r} is written in a form that cannot be changed here; "
            f"write it as lines below [{table}]"
        )
    return new


def _edited(text: str, table: str, values: Mapping[str, float | str | list[str] | None]) -> str:
    """The text with lines of the table's keys changed in place, and the missing ones put behind its last key."""
    end = "\r\n" if "\r\n" in text else "\n"
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end
    header = re.compile(rf"{_BOM}?\s*\[\s*(?:{table}|\"{table}\"|'{table}')\s*\]\s*(?:#.*)?$")
    start = next((k for k, line in enumerate(lines) if header.match(line.rstrip("\r\n"))), None)
    if start is None:
        lines += [end] * bool(text.removeprefix(_BOM).strip()) + [f"[{table}]{end}"]
        start = len(lines) - 1
    stop = next((k for k in range(start + 1, len(lines)) if _HEADER.match(lines[k])), len(lines))
    left = {name.replace("-", "_"): name for name, value in values.items() if value is not None}
    gone = {name.replace("-", "_") for name, value in values.items() if value is None}
    body = []
    for line in lines[start + 1 : stop]:
        found = _KEY.match(line)
        key = "" if found is None else (found["double"] or found["single"] or found["bare"]).replace("-", "_")
        if key in left:
            comment = _COMMENT.match(line.rstrip("\r\n"), found.end() if found else 0)
            name = left.pop(key)
            body.append(f"{name} = {values[name]!r}{(comment and comment['comment']) or ''}{end}")
            gone.add(key)  # if it stands there in its other writing too
        elif key not in gone:
            body.append(line)
    if left:
        filled = next((k for k in range(len(body), 0, -1) if body[k - 1].split("#")[0].strip()), 0)
        body[filled:filled] = [f"{name} = {values[name]!r}{end}" for name in left.values()]
    return "".join([*lines[: start + 1], *body, *lines[stop:]])
