"""The safetensors files of a Hugging Face folder, by its index if it has one, and what their headers say. Whether all
of them are there is told, not demanded: a folder can be asked about before gigabytes are downloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipesd.errors import UsageError
from pipesd.json_file import read_object
from pipesd.regular_file import shown
from pipesd.safetensors_layout import SafetensorsPlace, read_places

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """The files that should be there, in order, and what the index says: tensor -> file name, empty without one."""

    paths: tuple[Path, ...]
    named: Mapping[str, str]

    @property
    def missing(self) -> tuple[Path, ...]:
        """Those that are not there, a link that leads nowhere included."""
        return tuple(path for path in self.paths if not path.exists())

    @property
    def unfinished(self) -> tuple[Path, ...]:
        """Those that a download has reserved the room for, but not filled."""
        return tuple(path for path in self.paths if control_file(path).exists())


def control_file(path: Path) -> Path:
    """What aria2 keeps beside a file at `path` until it is complete."""
    return path.with_name(f"{path.name}.aria2")


def weight_files(folder: Path) -> WeightFiles | None:
    """The files of the folder's weights; None where it has neither the whole file nor an index. UsageError for an
    index that is damaged, or names files outside the folder."""
    if os.path.lexists(folder / WHOLE):
        return WeightFiles((folder / WHOLE,), {})
    if not os.path.lexists(folder / INDEX):
        return None
    named = _index(folder / INDEX)
    return WeightFiles(tuple(folder / name for name in sorted(set(named.values()))), named)


def read_weights(files: WeightFiles) -> dict[str, SafetensorsPlace]:
    """Name -> place of every tensor in files that are all there, in their order. UsageError for a file that is
    damaged or cut short, and where files and index do not belong together."""
    found: dict[str, SafetensorsPlace] = {}
    for path in files.paths:
        for name, place in read_places(path).items():
            if name in found:
                raise UsageError(
                    f"{path}: tensor {shown(name)} is also in {found[name].path.name}; download the folder again"
                )
            found[name] = place
    for name, file in files.named.items():
        if name not in found or found[name].path.name != file:
            path = next(path for path in files.paths if path.name == file)
            what = f"has no tensor {shown(name)}, which {INDEX} says is there"
            raise UsageError(f"{path}: {what}; download both again")
    return found


def _index(path: Path) -> dict[str, str]:
    """Tensor -> file, as the index at `path` has it."""
    named = read_object(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise UsageError(f"{path}: has no table weight_map; download it again")
    for file in named.values():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise UsageError(f"{path}: names '{shown(file)}', a safetensors file was wanted; download it again")
        if file != os.path.basename(file) or "\\" in file:
            raise UsageError(f"{path}: names '{shown(file)}', which is outside the folder; use a folder that you trust")
    return named
