"""Where a target runs and in which precision: what the options say, checked against what there is."""

from __future__ import annotations

import torch

from pipesd.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def chosen_device(text: str) -> torch.device:
    """The device that `text` names: auto (CUDA if there is any), cpu, cuda or cuda:N. UsageError for others."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"device {text!r}: auto, cpu, cuda or cuda:N was wanted") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {text!r}: auto, cpu, cuda or cuda:N was wanted")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {text!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def chosen_dtype(text: str, file_dtype: str, device: torch.device) -> str:
    """The name in DTYPES that `text` stands for: auto is float32 on the CPU, `file_dtype` on CUDA. UsageError."""
    if text == "auto":
        return "float32" if device.type == "cpu" else file_dtype
    if text not in DTYPES:
        raise UsageError(f"dtype {text!r}: auto, {', '.join(DTYPES)} was wanted")
    if text == "float16" and device.type == "cpu":
        raise UsageError("dtype float16 is for CUDA; use float32 or bfloat16 on the CPU")
    return text


def checked_number(name: str, value: int, least: int, most: int | None) -> int:
    """`value`, if it is within its bounds, both included; `most` None: any number. UsageError that names it."""
    if value < least or (most is not None and value > most):
        raise UsageError(f"{name} {value}: {least} to {most or 'any number'} was wanted")
    return value
