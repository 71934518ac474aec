"""Ways to spoil a good model folder, whose weights are one file.

Each function returns one that changes the folder at a path. That returns the path which is then given to a cloud, or
None for the folder itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], Path | None]
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENS, OPTIONS = "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ESCAPE = "\x1b[2J\x1b]0;owned\x07\nnext line\r\u2028\u202e"
HUGE = 1 << 36  # bytes of a file with a hole; no machine of ours has that much memory


class Raw(str):
    """JSON that Python would not write, to stand where a value does."""


def edit(name: str, change: Callable[[Any], Any]) -> Spoil:
    """The JSON file `name` with what `change` makes of it, in place or by returning another value."""

    def spoil(at: Path) -> None:
        values = json.loads((at / name).read_text("utf-8"))
        changed = change(values)
        _write(at / name, values if changed is None else changed)

    return spoil


def sets(name: str, **changes: Any) -> Spoil:
    """The table in the JSON file `name` with other values; `...` takes one out."""

    def change(values: dict[str, Any]) -> None:
        for key, value in changes.items():
            values.pop(key, None)
            if value is not ...:
                values[key] = value

    return edit(name, change)


def _write(path: Path, values: Any) -> None:
    raw: list[str] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(plain(values))
    for i, value in enumerate(raw):
        text = text.replace(f'"@raw{i}@"', value)
    path.write_text(text, "utf-8")


def holds(name: str, content: bytes) -> Spoil:
    """A file `name` that holds `content`."""

    def spoil(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        (at / name).write_bytes(content)

    return spoil


def lacks(*names: str) -> Spoil:
    """The folder without these files."""

    def spoil(at: Path) -> None:
        for name in names:
            (at / name).unlink()

    return spoil


def cut(name: str, keep: Callable[[int], int]) -> Spoil:
    """The file `name` with so many of its bytes."""
    return lambda at: os.truncate(at / name, keep((at / name).stat().st_size))


def endless(name: str) -> Spoil:
    """A file `name` that begins as JSON and has a hole behind it."""

    def spoil(at: Path) -> None:
        holds(name, b"{")(at)
        os.truncate(at / name, HUGE)

    return spoil


def pipe(name: str) -> Spoil:
    """A named pipe that nobody writes into."""

    def spoil(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        os.mkfifo(at / name)

    return spoil


def leads(name: str, to: str) -> Spoil:
    """A link `name` to somewhere else."""

    def spoil(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        (at / name).symlink_to(to)

    return spoil


def folder(name: str) -> Spoil:
    """A folder in the place of the file `name`."""

    def spoil(at: Path) -> None:
        (at / name).unlink(missing_ok=True)
        (at / name).mkdir()

    return spoil


def renamed(old: str, new: str) -> Spoil:
    """The file `old` under the name `new`, which is what is given."""
    return lambda at: (at / old).rename(at / new)


def given(name: str, spoil: Spoil) -> Spoil:
    """`spoil`, and the file `name` in the folder as what is given."""

    def both(at: Path) -> Path:
        spoil(at)
        return at / name

    return both


def both(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(at: Path) -> None:
        for each in spoils:
            each(at)

    return spoil


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The weights with another header, of the table of tensors or of bytes."""

    def spoil(at: Path) -> None:
        data = (at / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:end])
        changed = change(table)
        made = table if changed is None else changed
        text = made if isinstance(made, bytes) else json.dumps(made).encode()
        (at / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return spoil


def first(**changes: Any) -> Spoil:
    """The first matrix of the header with other values."""

    def change(table: dict[str, Any]) -> None:
        table[first_matrix(table)].update(changes)

    return header(change)


def first_matrix(table: dict[str, Any]) -> str:
    return next(name for name, entry in table.items() if len(entry.get("shape", ())) == 2)


def offsets(change: Callable[[int, int], list[Any]]) -> Spoil:
    """Another place of the first matrix."""

    def moved(table: dict[str, Any]) -> None:
        entry = table[first_matrix(table)]
        entry["data_offsets"] = change(*entry["data_offsets"])

    return header(moved)


def length(value: int) -> Spoil:
    """The weights with another length of their header in front."""

    def spoil(at: Path) -> None:
        data = (at / WEIGHTS).read_bytes()
        (at / WEIGHTS).write_bytes(value.to_bytes(8, "little") + data[8:])

    return spoil


def shards(change: Callable[[dict[str, Any]], Any], *, name: str = "model-00001-of-00001.safetensors") -> Spoil:
    """The weights as one shard with an index, which `change` changes."""

    def spoil(at: Path) -> None:
        data = (at / WEIGHTS).read_bytes()
        table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        (at / WEIGHTS).rename(at / name)
        index = {
            "metadata": {"total_size": len(data)},
            "weight_map": {tensor: name for tensor in table if tensor != "__metadata__"},
        }
        changed = change(index)
        _write(at / INDEX, index if changed is None else changed)

    return spoil


def in_shard(value: Any) -> Spoil:
    """An index that says of one tensor that it is in `value`."""
    return shards(lambda index: index["weight_map"].update({next(iter(index["weight_map"])): value}))


def beside(name: str) -> Spoil:
    """A file next to the folder, a copy of its weights: an index that reaches it is refused all the same."""
    return lambda at: shutil.copy(at / WEIGHTS, at.parent / name) and None


def vocabulary(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """tokenizer.json with another table of texts and ids."""
    return edit(TOKENS, lambda values: change(values["model"]["vocab"]))


def added(*tokens: Any) -> Spoil:
    """tokenizer.json with these tokens behind those it adds."""
    return edit(TOKENS, lambda values: values["added_tokens"].extend(tokens))


def special(number: Any, text: Any = "<x>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}
