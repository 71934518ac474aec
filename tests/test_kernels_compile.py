"""Triton's kernels are compiled for CUDA devices that are not here, down to machine code that fits into them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pipesd.cloud import paged_kernels, step_kernels

def compiled(kernel, types, constants, target, **options):
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)

SHARED = {80: 99 << 10, 90: 227 << 10}  # bytes of a block; of the first some devices have more
for target, dtype, keys, groups, head in (
    (90, "bf16", 64, 4, 128), (90, "fp32", 16, 1, 64), (80, "bf16", 64, 7, 256), (80, "fp32", 16, 7, 256),
):
    pointers = dict.fromkeys(("query", "kv", "out", "x", "addend", "heads", "gate_up"), "*" + dtype)
    pointers |= dict.fromkeys(("table", "positions", "slots", "spans", "tiles"), "*i64")
    pointers |= dict.fromkeys(("sums", "marks", "gains", "rotation", "floor"), "*fp32")
    types = pointers | {"window": "i64", "scale": "fp32"}
    types |= dict.fromkeys(("query_stride", "kv_stride", "table_stride", "stride"), "i32")
    sizes = dict(KV_HEADS=2, GROUPS=groups, HEAD=head, BLOCK_HEAD=head, BLOCK_ROWS=16, BLOCK_KEYS=keys)
    constants = sizes | dict(PAGE_SIZE=64, SPLITS=32, PRECISION="ieee")
    made = compiled(paged_kernels._read_split, types, constants, target, num_warps=4, num_stages=2)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED[target], (dtype, head, made.metadata.shared)
    for kernel, constants in (
        (paged_kernels._combine, dict(HEADS=32, HEAD=head, BLOCK_HEAD=head, SPLITS=32)),
        (step_kernels._unit, dict(ADDS=True, SIZE=4096, BLOCK=4096)),
        (step_kernels._turn, dict(NORMS=True, SIZE=128, BLOCK=64)),
        (step_kernels._gate, dict(SIZE=11008, BLOCK=1024)),
    ):
        assert compiled(kernel, types, constants, target).asm["cubin"]
"""


@pytest.mark.slow
def test_kernels_compile_for_devices_that_are_not_here(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
