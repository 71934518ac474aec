"""Recorded passes over pages serve every family and variant that plain passes serve; and so do the kernels."""

from __future__ import annotations

import importlib
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from test_families import VARIANTS, Models

pytest.importorskip("torch")

import torch

from pipesd.cloud.paged_attention import PagedRead, plain_read
from pipesd.cloud.paged_cache import PagedCache
from pipesd.cloud.steps import PlainSteps, Steps
from pipesd.cloud.target import TorchTarget

PREFIX = 140  # beyond every window, and two edges of pages
SHORT_PREFIX = 66  # beyond the windows of the following, and one edge
QUICK = ("llama", "qwen3 with windows")
WITH_KERNELS = ("llama", "qwen2 with windows from a layer on", "qwen3 with wide heads and biases")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def check(plain: TorchTarget, read: PagedRead, steps: Steps, prefix: int) -> None:
    """Two sessions: their texts, drafts behind them in passes of several sizes, one of them partly taken back."""
    decoder = copy(plain._decoder)
    decoder.steps = steps
    cache = PagedCache(
        plain._decoder.shape.cache(plain.info.context), 2, device=torch.device("cpu"), dtype=torch.float32, read=read
    )
    info = replace(plain.info, device="cuda:0")
    paged = TorchTarget(decoder, cache, info, plain.vocabulary, threads=1, exact=False)
    draw = np.random.default_rng(0)
    long, short = (draw.integers(512, size=size).tolist() for size in (min(prefix, plain.info.context - 12), 5))
    for batch in (
        [(0, long, 1), (1, short, 5)],
        [(1, short[:1], 1), (0, long[:4], 4)],
        [(0, long[5:6], 1)],
        [(0, long[7:9], 2), (1, short[2:], 3)],
    ):
        for got, wanted in zip(paged.forward(batch), plain.forward(batch), strict=True):
            np.testing.assert_allclose(got, wanted, atol=5e-4)
        for target in (paged, plain):
            target.truncate(0, target.length(0) - 1)
    for slot in (0, 1):
        plain.truncate(slot, 0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_recorded_passes_give_the_logits_of_plain_ones(models: Models, name: str) -> None:
    check(models.target(name), plain_read, PlainSteps(), PREFIX)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_the_kernels_give_them_too(models: Models, name: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here; the CUDA tests of targets run them")
    read = importlib.import_module("pipesd.cloud.paged_kernels").triton_read
    steps = importlib.import_module("pipesd.cloud.step_kernels").TritonSteps()
    check(models.target(name), read, steps, SHORT_PREFIX)
