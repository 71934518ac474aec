"""A Hugging Face folder: its configuration, vocabulary, end ids and stored tensors, over all its safetensors files.

`open_folder` takes a folder of any family; `open_folder_checkpoint` makes a checkpoint of one that the plain decoder
knows. Only headers are read at first, tensors when asked for. Pickled weights are never opened.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipesd.cloud.checkpoint import Checkpoint, check_tensors
from pipesd.cloud.safetensors_file import READABLE, SafetensorsTensor
from pipesd.cloud.stored_tensor import file_dtype, fingerprint
from pipesd.core import Vocabulary
from pipesd.errors import UsageError
from pipesd.hf_config import read_shape
from pipesd.hf_paths import adapter, no_config, nothing_there, pickled
from pipesd.hf_vocabulary import model_name, read_hf_vocabulary, stated_end_ids
from pipesd.hf_weights import INDEX, WHOLE, control_file, read_weights, weight_files
from pipesd.json_file import read_object, read_small
from pipesd.regular_file import locate, shown

_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_PARTIAL = ("*.incomplete", "*.aria2", "*.part", "*.crdownload", "*.download")
_PICKLED = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")


@dataclass(frozen=True)
class Folder:
    """An open folder. `tensors`: the files' own names -> stored tensors, in the order of the files.

    `end_ids` are those of generation_config.json, else of config.json, else what llama.cpp would take from the
    vocabulary.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    vocabulary: Vocabulary
    end_ids: tuple[int, ...]
    tensors: Mapping[str, SafetensorsTensor]
    texts_digest: bytes  # of the JSON files that say what the tensors mean

    @property
    def size_bytes(self) -> int:
        """Bytes that all tensors have in the files."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files with the tensors."""
        return tuple(dict.fromkeys(tensor.path.name for tensor in self.tensors.values()))

    @property
    def file_dtype(self) -> str:
        """The precision that most bytes are stored in: "float32", "float16", or "bfloat16" for anything else."""
        return file_dtype(self.tensors)

    def fingerprint(self, dtype: str, device: str) -> bytes:
        """8 bytes that change with the JSON files, with samples of any tensor, with precision and kind of device."""
        return fingerprint(self.texts_digest, self.tensors, dtype, device)


def open_folder(path: str | Path) -> Folder:
    """Opens the folder at `path` (`~` is expanded), of any family. UsageError, one line, if it cannot be served."""
    resolved, kind = locate(path)
    if kind == "nothing":
        raise nothing_there(os.fspath(path), resolved)
    if kind != "folder":
        raise UsageError(f"{resolved}: a file, a Hugging Face folder was wanted; name the folder that it lies in")
    if not os.path.lexists(resolved / "config.json"):
        raise no_config(resolved)
    config = read_object(resolved / "config.json")
    tensors = _tensors(resolved)
    tokenizer = read_hf_vocabulary(resolved, config)
    vocabulary, guessed = tokenizer.pieces()
    return Folder(
        path=resolved,
        name=model_name(resolved),
        config=config,
        vocabulary=vocabulary,
        end_ids=stated_end_ids(resolved, config, vocabulary.size) or guessed,
        tensors=tensors,
        texts_digest=_texts_digest(resolved),
    )


def _tensors(folder: Path) -> dict[str, SafetensorsTensor]:
    """Every tensor of the folder by the file's name for it."""
    files = weight_files(folder)
    if files is None:
        raise _no_weights(folder)
    missing = files.missing
    if missing and files.named:
        part = ", and a download is unfinished" if _unfinished(folder) else ""
        raise UsageError(
            f"{missing[0]}: is missing ({len(missing)} of the {len(files.paths)} files that {INDEX} names{part}); "
            "download the folder again"
        )
    for path in files.unfinished:
        raise UsageError(f"{path}: its download is unfinished ({control_file(path).name} lies beside it); finish it")
    return {name: SafetensorsTensor(**vars(place)) for name, place in read_weights(files).items()}


def _unfinished(folder: Path) -> bool:
    return any(True for pattern in _PARTIAL for _ in _globs(folder, pattern))


def _globs(folder: Path, pattern: str) -> Iterator[Path]:
    yield from folder.glob(pattern)
    yield from folder.glob(f".cache/huggingface/download/{pattern}")


def _no_weights(folder: Path) -> UsageError:
    """Why there is neither model.safetensors nor its index."""
    if (folder / "adapter_config.json").exists():
        return adapter(folder)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        return UsageError(f"{folder}: has {shards[0].name} but no {INDEX}; download that too")
    if _unfinished(folder):
        return UsageError(f"{folder}: has no {WHOLE}, and a download is unfinished; download the folder again")
    found = next((path for pattern in _PICKLED for path in sorted(folder.glob(pattern))), None)
    if found is not None:
        return pickled(found)
    if any(folder.glob("consolidated*.safetensors")):
        return UsageError(
            f"{folder}: has only consolidated.safetensors, the format of the model's makers; "
            f"download {WHOLE} or its parts"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return UsageError(f"{folder}: has no {WHOLE}, but GGUF files; name one, as {ggufs[0]}")
    return UsageError(f"{folder}: has neither {WHOLE} nor {INDEX}; download the folder again with its weights")


def _texts_digest(folder: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXTS:
        path = folder / name
        raw = read_small(path) if os.path.lexists(path) else b""
        digest.update(f"{name} {len(raw)} ".encode() + raw)
    return digest.digest()


_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROTATED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")


def open_folder_checkpoint(path: str | Path) -> Checkpoint:
    """Opens the folder at `path` for the plain decoder. UsageError, one line, for what it cannot serve, by name."""
    folder = open_folder(path)
    shape = read_shape(folder.path / "config.json", folder.config)
    tensors: dict[str, SafetensorsTensor] = {}
    for name, tensor in folder.tensors.items():
        if name.endswith(".rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight"):
            continue  # computed anew; tied to the embeddings whatever the file says
        ours, rotated = _gguf_name(name)
        if ours is None:
            raise UsageError(
                f"{tensor.path}: has a tensor that this decoder does not use, {shown(name)}; use a plain model"
            )
        if tensor.kind not in READABLE:
            raise UsageError(
                f"{tensor.path}: tensor {shown(name)} is stored as {tensor.kind}, one of {', '.join(READABLE)} was "
                "wanted; use the folder of the model in bfloat16 or float16"
            )
        if rotated and tensor.shape and tensor.shape[0] % shape.head_size == 0:
            tensor = replace(tensor, head_size=shape.head_size)
        tensors[ours] = tensor
    if not shape.tied and "output.weight" not in tensors:
        raise UsageError(f"{folder.path}: has no tensor lm_head.weight; download the folder again")
    check_tensors(folder.path, shape, tensors, _folders_name)
    return Checkpoint(
        path=folder.path,
        name=folder.name,
        shape=shape,
        vocabulary=folder.vocabulary,
        end_ids=folder.end_ids,
        header=folder.texts_digest,
        tensors=tensors,
        files=len(folder.files),
    )


def _gguf_name(name: str) -> tuple[str | None, bool]:
    """What GGUF calls the tensor, None if nothing, and whether its rows are rotated."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], False
    found = _IN_LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER:
        return None, False
    ours = _LAYER[found[2]]
    return f"blk.{int(found[1])}.{ours}.{found[3]}", ours in _ROTATED


def _folders_name(name: str) -> str:
    """What a folder calls the tensor that GGUF calls `name`."""
    for theirs, ours in _OUTSIDE.items():
        if name == ours:
            return theirs
    _, layer, part, kind = name.split(".")
    theirs = next(theirs for theirs, ours in _LAYER.items() if ours == part)
    return f"model.layers.{layer}.{theirs}.{kind}"
