"""What to say of a path that is no Hugging Face folder, and of one that lacks what such a folder has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipesd.errors import UsageError
from pipesd.file_kinds import HEAD_BYTES, PICKLED, SAFETENSORS, kind_of
from pipesd.regular_file import locate, open_regular

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PARTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_EITHER = "give a GGUF file or a Hugging Face folder"


def folder_at(path: str | os.PathLike[str]) -> Path | None:
    """The Hugging Face folder at `path` (`~` is expanded), None for a file that may be GGUF. UsageError, one line, for
    anything else: nothing, a pipe, a folder without a config.json, a file of such a folder, a pickled checkpoint."""
    resolved, kind = locate(os.fspath(path))
    if kind == "nothing":
        raise nothing_there(os.fspath(path), resolved)
    if kind == "other":
        raise UsageError(f"{resolved}: not a regular file; {_EITHER}")
    if kind == "file":
        _check_file(resolved)
        return None
    if not os.path.lexists(resolved / "config.json"):
        raise no_config(resolved)
    return resolved


def nothing_there(given: str, resolved: Path) -> UsageError:
    """What to say of a path at which there is nothing: it may be the name of a model on a hub."""
    if not _HUB_ID.fullmatch(given):
        return UsageError(f"{resolved}: no such file or folder; {_EITHER}")
    return UsageError(
        f"{resolved}: no such file, and nothing is downloaded here; if {given} is a model on the Hugging Face hub, "
        f"run `hf download {given} --local-dir FOLDER` and give FOLDER"
    )


def no_config(folder: Path) -> UsageError:
    """What else a folder without a config.json seems to be."""
    if (folder / "adapter_config.json").exists():
        return adapter(folder)
    snapshots, ggufs = sorted(folder.glob("snapshots/*/config.json")), sorted(folder.glob("*.gguf"))
    todo = _EITHER
    if snapshots:
        todo = f"it is a hub's cache of a model: give the model in it, {snapshots[-1].parent}"
    elif ggufs:
        todo = f"give one of its GGUF files, such as {ggufs[0].name}"
    elif (folder / "params.json").exists():
        todo = "its params.json is the format of the model's makers: give the Hugging Face folder of the model"
    return UsageError(f"{folder}: a directory without a config.json; {todo}")


def adapter(folder: Path) -> UsageError:
    """What to say of a folder with a LoRA instead of a model."""
    return UsageError(
        f"{folder}: an adapter (LoRA), not a model; merge it into its base model with peft (merge_and_unload), "
        "save that and name its folder"
    )


def pickled(path: Path, what: str = "a pickled PyTorch checkpoint") -> UsageError:
    """What to say of weights that are not safetensors."""
    return UsageError(
        f"{path}: {what}, never opened since it could run code; use a folder with model.safetensors, or convert one "
        "that you trust: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
    )


def _check_file(path: Path) -> None:
    if (path.name.endswith(_WEIGHTS) or path.name in _PARTS) and (path.parent / "config.json").exists():
        raise UsageError(f"{path}: is one file of a Hugging Face folder; give the folder, {path.parent}")
    with open_regular(path) as file:
        try:
            head = file.read(HEAD_BYTES)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}); check the disk") from error
    kind = kind_of(head)
    if kind in PICKLED:
        raise pickled(path, kind)
    if kind == SAFETENSORS:
        raise UsageError(
            f"{path}: is not a GGUF file but safetensors, one file of a model; give the Hugging Face folder that it "
            "belongs to, with config.json and tokenizer.json"
        )
