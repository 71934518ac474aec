"""A checkpoint as the decoder reads it, whatever its format: sizes, vocabulary, and weights as float32 on demand.

A path that cannot be used is refused with one line that names it, says why and what to do. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipesd.cloud.stored_tensor import StoredTensor, file_dtype, fingerprint
from pipesd.core import Vocabulary
from pipesd.errors import UsageError
from pipesd.hf_paths import folder_at
from pipesd.model_shape import ModelShape
from pipesd.regular_file import locate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """An open model. Tensors go by their GGUF names, whatever the format of the files."""

    path: Path
    name: str
    shape: ModelShape
    vocabulary: Vocabulary
    end_ids: tuple[int, ...]
    header: bytes  # a digest of all that the files say beside the tensors
    tensors: Mapping[str, StoredTensor]
    files: int = 1  # that the tensors are in

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """GGUF names in file order."""
        return tuple(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Bytes that all tensors have in the files."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def file_dtype(self) -> str:
        """The precision of most bytes: "float32", "float16" or "bfloat16"; quantised files count as bfloat16."""
        return file_dtype(self.tensors)

    def tensor_bytes(self, name: str) -> int:
        """Bytes of one tensor in its file, 0 if there is none of that name."""
        return self.tensors[name].n_bytes if name in self.tensors else 0

    def weight(self, name: str) -> Tensor | None:
        """The tensor as float32 on the CPU, (outputs, inputs) or (size,); None if there is none of that name.

        In rows of `attn_q` and `attn_k` the two halves of a rotary pair stand next to each other.
        """
        return self.tensors[name].read() if name in self.tensors else None

    def fingerprint(self, dtype: str, device: str) -> bytes:
        """8 bytes that change with the metadata, with samples of any tensor, with precision and kind of device."""
        return fingerprint(self.header, self.tensors, dtype, device)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens the GGUF file or Hugging Face folder at `path` (`~` is expanded).

    UsageError, one line, if it cannot serve as a target.
    """
    folder = folder_at(path)
    if folder is not None:
        from pipesd.cloud.hf_folder import open_folder_checkpoint

        return open_folder_checkpoint(folder)
    from pipesd.cloud.gguf_file import open_gguf

    return open_gguf(locate(path)[0])


def check_tensors(
    path: Path, shape: ModelShape, tensors: Mapping[str, StoredTensor], named: Callable[[str], str] = str
) -> None:
    """UsageError for a tensor that is missing, has another size than `shape` asks for, or would not be used.

    `named` says what the files call the tensor of a GGUF name.
    """
    if shape.layers > len(tensors):  # said before so many names are made
        raise UsageError(f"{path}: has {len(tensors)} tensors, too few for {shape.layers} layers; download it again")
    expected = _expected(shape)
    optional = {"output.weight": (shape.width, shape.hidden), "rope_freqs.weight": (shape.head_size // 2,)}
    for name, size in (expected | {name: size for name, size in optional.items() if name in tensors}).items():
        if name not in tensors:
            raise UsageError(f"{path}: has no tensor {named(name)}; use a complete {shape.family} model")
        if tensors[name].shape != size:
            found = str(tensors[name].shape)[:60]
            raise UsageError(f"{path}: tensor {named(name)} is {found}, {size} was wanted; convert the model anew")
    strange = next((name for name in tensors if name not in expected and name not in optional), None)
    if strange is not None:
        raise UsageError(f"{path}: has a tensor that this decoder does not use, {named(strange)}; use a plain model")


def _expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> (outputs, inputs) of every tensor that the decoder reads."""
    hidden, query, key = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrices = {
        "attn_q": (query, hidden), "attn_k": (key, hidden), "attn_v": (key, hidden), "attn_output": (hidden, query),
        "ffn_gate": (shape.feed_forward, hidden), "ffn_up": (shape.feed_forward, hidden),
        "ffn_down": (hidden, shape.feed_forward),
    }  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in matrices.items()}
    layer |= {f"{name}.bias": matrices[name][:1] for name in sorted(shape.biases)}
    layer |= {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    if shape.head_norms:
        layer |= {"attn_q_norm.weight": (shape.head_size,), "attn_k_norm.weight": (shape.head_size,)}
    layers = {f"blk.{i}.{name}": size for i in range(shape.layers) for name, size in layer.items()}
    return {"token_embd.weight": (shape.width, hidden), "output_norm.weight": (hidden,)} | layers
