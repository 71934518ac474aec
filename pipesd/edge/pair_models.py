"""What a model file says of itself, as far as a pair of models has to agree: the draft's and the target's alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipesd.core import Vocabulary
from pipesd.edge.gguf_header import read_header

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
    """The facts of a GGUF file, or of all parts of the model that it is one of. Raises `UsageError` unless llama.cpp
    takes their head and vocabulary, and all parts are there."""
    from pipesd.edge.tokeniser import Tokeniser

    header = read_header(path)
    tokeniser = Tokeniser.open(header.path)
    tokeniser.close()
    parameters = sum(header.tensors.values())
    return ModelFacts(
        path=header.path,
        name=tokeniser.name,
        architecture=header.architecture,
        vocabulary=tokeniser.vocabulary,
        end_ids=tokeniser.end_ids,
        bos_id=tokeniser.bos_id,
        add_bos=tokeniser.add_bos,
        template=tokeniser.template,
        context=header.context,
        parameters=parameters,
        read_parameters=parameters - unread(header.tensors, _EMBEDDINGS, _OUTPUT),
        file_bytes=header.file_bytes,
        weight_bytes=header.weight_bytes,
        gguf=True,
    )


def unread(entries: Mapping[str, int], embeddings: str, output: str) -> int:
    """How many weights of the table of embeddings a token does not read: all, where there is an output layer."""
    return entries.get(embeddings, 0) if output in entries else 0
