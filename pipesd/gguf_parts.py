"""The parts of a model that is split over several GGUF files. Standard library only.

Keys and names: llama.cpp's `gguf-split`.
"""

from __future__ import annotations

import re
from pathlib import Path

from pipesd.errors import UsageError
from pipesd.gguf_layout import GgufLayout, read_layout

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_parts(path: Path, *, keep: frozenset[str] = frozenset()) -> list[GgufLayout]:
    """The heads of all parts of the model that the file at `path` is one of, the first first; of a model in one file
    that alone. `keep`: as in `read_layout`.

    UsageError, one line, as from `read_layout`, and for parts that are missing, or do not belong together.
    """
    layout = read_layout(path, keep=keep)
    count, number = layout.values.get("split.count", 0), layout.values.get("split.no", 0)
    if not isinstance(count, int):
        raise UsageError(f"{path}: split.count is {str(count)[:40]!r}, a number was wanted; split the model anew")
    if count < 2:
        return [layout]
    # a link may be named otherwise than its file, or lie elsewhere than its mates
    named = [places for at in (path, path.resolve()) if (places := _places(at, count))]
    if not named:
        raise UsageError(
            f"{path}: is one part of {count}, but not named as one; give it back its name ending in "
            f"-{number + 1 if isinstance(number, int) else 1:05d}-of-{count:05d}.gguf, its mates beside it"
        )
    parts = []
    for number, beside in enumerate(next((places for places in named if _are_files(places)), named[0])):
        if not beside.is_file():
            raise UsageError(f"{beside}: is missing, part {number + 1} of {count} of a model; put it beside the others")
        part = layout if beside == path else read_layout(beside, keep=keep)
        told = part.values.get("split.no"), part.values.get("split.count")
        if told != (number, count):
            raise UsageError(
                f"{beside}: says that it is part {told[0]} (from 0) of {told[1]}, {number} of {count} was wanted; "
                "download it again"
            )
        parts.append(part)
    found, said = sum(len(part.tensors) for part in parts), parts[0].values.get("split.tensors.count")
    if said is not None and found != said:
        raise UsageError(f"{path}: its {count} parts have {found} tensors, not {said}; download them again")
    return parts


def _places(path: Path, count: int) -> list[Path]:
    """Where the `count` parts are if the file at `path` is named as one of them; else none."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        return []
    return [path.with_name(f"{name[1]}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]


def _are_files(places: list[Path]) -> bool:
    return all(place.is_file() for place in places)
