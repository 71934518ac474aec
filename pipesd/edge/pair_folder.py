"""What a Hugging Face folder says of itself, as far as a draft model has to agree with it. The weights are not read,
and may still be missing: whether a pair fits is worth knowing before gigabytes are downloaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesd.edge.pair_models import ModelFacts, unread
from pipesd.errors import UsageError
from pipesd.file_kinds import HEAD_BYTES, kind_of
from pipesd.hf_vocabulary import model_name, read_hf_vocabulary, stated_end_ids
from pipesd.json_file import read_object

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_MOST_HEADER = 100_000_000  # bytes; the format's own limit
_AGAIN = "copy or download it again"


def read_folder(folder: Path) -> ModelFacts:
    """The facts of a folder with a config.json. Raises `UsageError` for a tokenizer that no GGUF file could have, and
    for files that are damaged."""
    config = read_object(folder / "config.json")
    tokenizer = read_hf_vocabulary(folder, config)
    vocabulary, guessed = tokenizer.pieces()
    files, missing = _weight_files(folder)
    entries: dict[str, int] = {}
    weight_bytes = 0
    for path in files:
        of_file, n_bytes = _tensors(path)
        entries.update(of_file)
        weight_bytes += n_bytes
    known = not missing
    parameters = sum(entries.values()) if known else 0
    return ModelFacts(
        path=folder,
        name=model_name(folder),
        architecture=str(config.get("model_type") or "unnamed"),
        vocabulary=vocabulary,
        end_ids=frozenset(stated_end_ids(folder, config, vocabulary.size) or guessed),
        bos_id=tokenizer.special_ids.get("bos_token_id"),
        add_bos=tokenizer.kind == "llama" if tokenizer.add_bos is None else tokenizer.add_bos,
        template=tokenizer.template,
        context=_context(config),
        parameters=parameters,
        read_parameters=parameters - unread(entries, _EMBEDDINGS, _OUTPUT) if known else 0,
        file_bytes=weight_bytes if known else 0,
        weight_bytes=weight_bytes if known else 0,
        gguf=False,
        missing=missing,
    )


def _weight_files(folder: Path) -> tuple[list[Path], str]:
    """The files with the weights, and which of them is missing."""
    if (folder / _WHOLE).exists() or not (folder / _INDEX).exists():
        named = [_WHOLE]
    else:
        table = read_object(folder / _INDEX).get("weight_map")
        named = sorted(set(map(str, table.values()))) if isinstance(table, dict) else [_WHOLE]
    paths = [folder / Path(name).name for name in named]
    there = [path for path in paths if path.exists()]
    absent = [path.name for path in paths if not path.exists()]
    if not absent:
        return there, ""
    if not there and any(folder.glob("pytorch_model*.bin")):
        return there, f"{absent[0]} (the pickled ones in the folder are never opened)"
    return there, f"{absent[0]} ({len(absent)} of {len(paths)} files)"


def _tensors(path: Path) -> tuple[dict[str, int], int]:
    """Number of entries of each tensor in a safetensors file, and the bytes of all."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if head[8:9] != b"{" or (length := int.from_bytes(head[:8], "little")) > _MOST_HEADER:
            raise UsageError(f"{path}: is {kind_of(head)}, a safetensors file was wanted; {_AGAIN}")
        file.seek(8)
        text = file.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        entries = {name: math.prod(entry["shape"]) for name, entry in header.items()}
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UsageError(f"{path}: its header is damaged or cut short; {_AGAIN}") from error
    if path.stat().st_size < 8 + length + end:
        raise UsageError(f"{path}: cut short ({path.stat().st_size} bytes, {8 + length + end} were wanted); {_AGAIN}")
    return entries, end


def _context(config: Mapping[str, Any]) -> int:
    """Positions that the model is made for, stretched ones (YaRN) included; 0 where config.json does not say."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        context = next((table[key] for key in _CONTEXT if type(table.get(key)) is int), 0)
        if context > 1:
            return max(context, _stretched(table, context))
    return 0


def _stretched(config: Mapping[str, Any], context: int) -> int:
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    original, factor = rope.get("original_max_position_embeddings", context), rope.get("factor", 1.0)
    return int(original * factor) if isinstance(original, int) and isinstance(factor, int | float) else 0
