"""What a model file says of itself, as far as a pair of models has to agree: the draft's and the target's alike."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipesd.core import Vocabulary
from pipesd.edge.gguf_header import GgufHeader, read_header, resolve_model
from pipesd.errors import UsageError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # of a model in several files
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One side of a pair. `context` is 0 where the files do not say; `bos_id` None: there is no start token.

    `file_bytes`: of all its files, `weight_bytes`: of the weights in them. `read_parameters`: weights that computing
    one token reads, the table of embeddings left out unless it serves as output layer too. `gguf`: whether llama.cpp
    could load it. `missing`: a file of weights that is not there, by name; the counts of weights are then 0.
    """

    path: Path
    name: str
    architecture: str
    vocabulary: Vocabulary
    end_ids: frozenset[int]
    bos_id: int | None
    add_bos: bool
    template: str | None
    context: int
    parameters: int
    read_parameters: int
    file_bytes: int
    weight_bytes: int
    gguf: bool
    missing: str = ""

    @property
    def read_bytes(self) -> int:
        """About how many bytes of weights computing one token reads, in the precision of the files."""
        return self.weight_bytes * self.read_parameters // max(1, self.parameters)


def read_gguf(path: str | os.PathLike[str]) -> ModelFacts:
    """The facts of a GGUF file, or of the first of its parts. Raises `UsageError` unless llama.cpp takes its head and
    vocabulary, and all parts are there."""
    from pipesd.edge.tokeniser import Tokeniser

    headers = _headers(resolve_model(path))
    tokeniser = Tokeniser.open(path)
    tokeniser.close()
    entries: dict[str, int] = {}
    for header in headers:
        entries.update(header.tensors)
    parameters = sum(entries.values())
    return ModelFacts(
        path=headers[0].path,
        name=tokeniser.name,
        architecture=headers[0].architecture,
        vocabulary=tokeniser.vocabulary,
        end_ids=tokeniser.end_ids,
        bos_id=tokeniser.bos_id,
        add_bos=tokeniser.add_bos,
        template=tokeniser.template,
        context=headers[0].context,
        parameters=parameters,
        read_parameters=parameters - unread(entries, _EMBEDDINGS, _OUTPUT),
        file_bytes=sum(header.file_bytes for header in headers),
        weight_bytes=sum(header.weight_bytes for header in headers),
        gguf=True,
    )


def unread(entries: Mapping[str, int], embeddings: str, output: str) -> int:
    """How many weights of the table of embeddings a token does not read: all, where there is an output layer."""
    return entries.get(embeddings, 0) if output in entries else 0


def _headers(path: Path) -> list[GgufHeader]:
    found = _PART.search(path.name)
    if not found:
        return [read_header(path)]
    if int(found[1]) != 1:
        raise UsageError(f"{path}: is part {int(found[1])} of a model in {int(found[2])} files; give the first of them")
    parts = [path.with_name(_PART.sub(f"-{i:05}-of-{found[2]}.gguf", path.name)) for i in range(1, int(found[2]) + 1)]
    return [read_header(part) for part in parts]
