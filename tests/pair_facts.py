"""One side of a pair, with no file behind it."""

from __future__ import annotations

from pathlib import Path

from pipesd.core import Vocabulary
from pipesd.edge.pair_models import ModelFacts

FACTS = ModelFacts(
    path=Path("m.gguf"), name="m", architecture="llama", vocabulary=Vocabulary((b"a",)), end_ids=frozenset(),
    bos_id=None, add_bos=False, template=None, context=8, parameters=10**9, read_parameters=10**9, file_bytes=10**9,
    weight_bytes=10**9, gguf=True,
)  # fmt: skip
