"""Whether a cloud could serve a target, by the rule that the cloud itself goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipesd.errors import UsageError
from pipesd.hf_config import AnotherBackend, read_shape
from pipesd.hf_families import is_recurrent, named
from pipesd.json_file import read_object

GGUF_DECODER = ("llama", "qwen2", "qwen3")  # architectures of GGUF files that the cloud computes by itself


@dataclass(frozen=True)
class Refusal:
    """Why the cloud's own decoder does not serve a target, in one line. `final`: nor does another backend."""

    why: str
    final: bool


def refused_folder(folder: Path) -> Refusal | None:
    """What the cloud would refuse in config.json; None if it serves the model. UsageError if it cannot be read."""
    try:
        read_shape(folder / "config.json", read_object(folder / "config.json"))
    except AnotherBackend as error:
        return Refusal(str(error), final=False)
    except UsageError as error:
        return Refusal(str(error), final=True)
    return None


def refused_gguf(architecture: str) -> Refusal | None:
    """What the cloud would say of a GGUF file of this architecture; None if it may serve it."""
    if is_recurrent(architecture):
        why = f"{named(architecture)} model keeps a state that cannot take a refused draft back"
        return Refusal(f"{why}; use a model that caches keys and values alone", final=True)
    if architecture in GGUF_DECODER:
        return None
    why = f"the cloud does not compute {architecture} by itself"
    return Refusal(f"{why}; --backend transformers may serve its Hugging Face folder", final=False)
