"""Reads the head of a GGUF file: what is wrong with the file, and how much memory its model will take.

llama.cpp answers many bad files with an abort or a bare "failed to load model"; looking first turns them into one line.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError
from pipesd.gguf_parts import read_parts
from pipesd.regular_file import locate

_CACHE_CELLS = 256  # llama.cpp rounds a context up to a multiple of it
_HALF_BYTES = 2  # the cache is kept in float16


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a model: scalars, strings and short arrays by key, and the length of every array.

    `path`, `values` and `lengths` are those of the first part. `tensors`: the number of entries of each tensor by its
    name. `file_bytes`: of all parts; `weight_bytes`: of those, behind the headers.
    """

    path: Path
    file_bytes: int
    weight_bytes: int
    values: dict[str, Any]
    lengths: dict[str, int]
    tensors: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """The model's own name, else the file's."""
        return str(self.values.get("general.name") or self.path.stem)

    @property
    def vocabulary_size(self) -> int:
        """0 for a file without a tokeniser."""
        return self.lengths.get("tokenizer.ggml.tokens", 0)

    @property
    def context(self) -> int:
        """Positions that the model was trained for; 0 if the file does not say."""
        return self._whole("context_length")

    def _whole(self, key: str, default: int = 0) -> int:
        value = self._wholes(key, default)
        return value if isinstance(value, int) else default

    def _wholes(self, key: str, default: Any) -> Any:
        """A whole number or one a layer; `default` for anything else: llama.cpp says what it does not take."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        every = value if isinstance(value, list) else [value]
        return value if all(isinstance(each, int) for each in every) else default

    def cache_bytes(self, context: int) -> int:
        """Memory for keys and values of `context` positions, in bytes; 0 for a model without attention."""
        layers, heads = self._whole("block_count"), self._wholes("attention.head_count", 0)
        heads_kv = self._wholes("attention.head_count_kv", heads)
        first_heads = max(heads, default=0) if isinstance(heads, list) else heads
        if not layers or not first_heads:
            return 0
        per_head = self._whole("embedding_length") // first_heads
        width = self._whole("attention.key_length", per_head) + self._whole("attention.value_length", per_head)
        rows = sum(heads_kv[:layers]) if isinstance(heads_kv, list) else layers * heads_kv
        cells = -(-context // _CACHE_CELLS) * _CACHE_CELLS
        return int(rows * width * cells * _HALF_BYTES)


def resolve_model(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a model file, `~` expanded; raises `UsageError` unless it is a readable, regular file.

    A file that is a link keeps the link's name, as in `locate`.
    """
    try:
        resolved = Path(path).expanduser().resolve()
        if resolved.is_dir():
            inside = sorted(entry.name for entry in resolved.glob("*.gguf"))[:3]
            advice = "give a GGUF file"
            if inside:
                advice = f"give one of the files in it, such as {', '.join(inside)}"
            elif (resolved / "config.json").exists():
                advice += " made of it, with llama.cpp's convert_hf_to_gguf.py (see docs/models.md)"
            raise UsageError(f"{resolved}: is a folder; {advice}")
        if not resolved.exists():
            raise UsageError(f"{resolved}: no such file; give the path of a GGUF model file")
        if not resolved.is_file():
            raise UsageError(f"{resolved}: not a regular file; give the path of a GGUF model file")
        return locate(path)[0]
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home folder, a NUL in the name
        raise UsageError(f"{os.fspath(path)!r}: {error}; give the path of a GGUF model file") from error


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The header of the model file at `path`, or of all parts of the model that it is one of; raises `UsageError` with
    the reason if one is not a whole GGUF header, or missing."""
    parts = read_parts(resolve_model(path))
    return GgufHeader(
        path=parts[0].path,
        file_bytes=sum(part.file_bytes for part in parts),
        weight_bytes=sum(max(0, part.file_bytes - part.begin) for part in parts),
        values=parts[0].values,
        lengths=parts[0].lengths,
        tensors={name: math.prod(place.shape) for part in parts for name, place in part.tensors.items()},
    )
