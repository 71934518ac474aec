"""Where a target runs and in which precision: what the options say, checked against what there is."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from pipesd.errors import UsageError
from pipesd.model_shape import CacheShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BFLOAT16_FROM = (8, 0)  # compute capability; devices before it have no arithmetic for it
KERNELS_FROM = (7, 0)  # Triton compiles for no device before these
_SMALLEST = CacheShape(layers=1, kv_heads=1, groups=1, head_size=16, context=2)
_log = logging.getLogger("pipesd.cloud")


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


def chosen_dtype(text: str, file_dtype: str, device: torch.device, say: Callable[[str], None] = _log.warning) -> str:
    """The name in DTYPES that `text` stands for: auto is float32 on the CPU, `file_dtype` on CUDA, and float16 for
    bfloat16 where the device has none, which `say` is told. UsageError for what there is not."""
    lacks = in_16_bits(device) != "bfloat16"
    if text == "auto" and lacks and file_dtype == "bfloat16":
        say(f"{device} has no bfloat16 arithmetic: the model runs in float16; --dtype float32 is more exact")
        return "float16"
    if text == "auto":
        return "float32" if device.type == "cpu" else file_dtype
    if text not in DTYPES:
        raise UsageError(f"dtype {text!r}: auto, {', '.join(DTYPES)} was wanted")
    if text == "float16" and device.type == "cpu":
        raise UsageError("dtype float16 is for CUDA; use float32 or bfloat16 on the CPU")
    if text == "bfloat16" and lacks:
        raise UsageError(f"dtype bfloat16: {device} has no arithmetic for it; use float16 or float32")
    return text


def in_16_bits(device: torch.device) -> str:
    """The name in DTYPES of the precision of 16 bits that the device computes in: bfloat16 where there is any."""
    lacks = device.type == "cuda" and torch.cuda.get_device_capability(device) < BFLOAT16_FROM
    return "float16" if lacks else "bfloat16"


def why_no_kernels(
    device: torch.device, dtype: torch.dtype = torch.float32, shape: CacheShape = _SMALLEST
) -> str | None:
    """None if Triton's kernels run on this CUDA device, in this precision and over caches of this shape, else why they
    do not, in one line. Each kind is asked once: a kernel of each module is compiled, for which Triton wants a C
    compiler, and run."""
    return _tried(device, dtype, replace(shape, layers=1, windows=()))


@cache
def _tried(device: torch.device, dtype: torch.dtype, shape: CacheShape) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < KERNELS_FROM:  # there the compiler may end the process
        wanted, found = (".".join(map(str, each)) for each in (KERNELS_FROM, capability))
        return f"triton's kernels want compute capability {wanted}, {device} has {found}"
    try:
        from pipesd.cloud import paged_kernels, step_kernels
    except ImportError as error:
        return f"triton is not installed ({error}; install it and a C compiler)"
    try:
        with torch.cuda.device(device):
            paged_kernels.try_out(device, dtype, shape)
            step_kernels.try_out(device, dtype)
            torch.cuda.synchronize(device)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError, step_kernels.TritonError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"triton's kernels do not run here ({reason}; they want a C compiler)"
    return None


def checked_number(name: str, value: int, least: int, most: int | None) -> int:
    """`value`, if it is within its bounds, both included; `most` None: any number. UsageError that names it."""
    if value < least or (most is not None and value > most):
        raise UsageError(f"{name} {value}: {least} to {most or 'any number'} was wanted")
    return value
