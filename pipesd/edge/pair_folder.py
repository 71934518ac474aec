"""What a Hugging Face folder says of itself, as far as a draft model has to agree with it, its weights there or not."""

from __future__ import annotations

import math
from pathlib import Path

from pipesd.contexts import stated_context
from pipesd.edge.pair_models import ModelFacts, unread
from pipesd.hf_vocabulary import model_name, read_hf_vocabulary, stated_end_ids
from pipesd.hf_weights import WHOLE, WeightFiles, read_weights, weight_files
from pipesd.json_file import read_object

_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def read_folder(folder: Path) -> ModelFacts:
    """The facts of a folder with a config.json. Raises `UsageError` for a tokenizer that no GGUF file could have, and
    for files that are damaged."""
    config = read_object(folder / "config.json")
    tokenizer = read_hf_vocabulary(folder, config)
    vocabulary, guessed = tokenizer.pieces()
    files = weight_files(folder)
    missing = _missing(folder, files)
    places = read_weights(files) if files is not None and not missing else {}
    entries = {name: math.prod(place.shape) for name, place in places.items()}
    parameters, weight_bytes = sum(entries.values()), sum(place.n_bytes for place in places.values())
    return ModelFacts(
        path=folder,
        name=model_name(folder),
        architecture=str(config.get("model_type") or "unnamed"),
        vocabulary=vocabulary,
        end_ids=frozenset(stated_end_ids(folder, config, vocabulary.size) or guessed),
        bos_id=tokenizer.special_ids.get("bos_token_id"),
        add_bos=tokenizer.kind == "llama" if tokenizer.add_bos is None else tokenizer.add_bos,
        template=tokenizer.template,
        context=stated_context(config),
        parameters=parameters,
        read_parameters=parameters - unread(entries, _EMBEDDINGS, _OUTPUT),
        file_bytes=weight_bytes,
        weight_bytes=weight_bytes,
        gguf=False,
        missing=missing,
    )


def _missing(folder: Path, files: WeightFiles | None) -> str:
    """Which of the files is not there or not complete yet; "" if all are."""
    if files is None and any(folder.glob("pytorch_model*.bin")):
        return f"{WHOLE} (the pickled ones in the folder are never opened)"
    paths = (folder / WHOLE,) if files is None else files.paths
    absent = paths if files is None else sorted({*files.missing, *files.unfinished})
    return f"{absent[0].name} ({len(absent)} of {len(paths)} files)" if absent else ""
