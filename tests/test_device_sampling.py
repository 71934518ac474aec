"""What is drawn where the logits are is what is drawn from them on the CPU; on CUDA too, where there is one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipesd.policy.accept import Draw, choose
from pipesd.policy.noise import MASK, unit
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling

torch = pytest.importorskip("torch")

from pipesd.cloud.device_sampling import choose_rows, rows_of, units  # noqa: E402 — loads torch

OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 3, "top_p": 0.2},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.5, "top_p": 0.0},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.5, "logit_bias": ((7, 2.0), (300, -math.inf), (5000, 1.0))},
    {"temperature": 1e-8},
    {"temperature": 100.0, "logit_bias": ((3, -2.0),)},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def held(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def entries(rng: np.random.Generator, width: int) -> list[tuple[Any, Draw]]:
    """One session for each of the options, with a draft of 0 to 5 ids: rows of logits and what is to be drawn."""
    found = []
    for options in OPTIONS:
        drafted = rng.integers(0, width, rng.integers(0, 6)).tolist()
        rows = (rng.normal(size=(1 + len(drafted), width)) * 2).astype(np.float32)
        sampler = Sampler(Sampling(**options), int(rng.integers(0, 1 << 64, dtype=np.uint64)))
        found.append((rows, Draw(sampler, rng.integers(0, width + 5, 50).tolist(), drafted)))
    return found


def chosen(logits: Any, draws: list[Draw]) -> list[tuple[int, ...]]:
    """The ids of each draw, from the rows of all of them one after the other."""
    rows = [rows_of(draw) for draw in draws]
    ids = iter(choose_rows(logits, [row for each in rows for row in each]).tolist())
    return [tuple(next(ids) for _ in each) for each in rows]


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=4), st.lists(st.integers(0, (1 << 31) - 1), max_size=6))
@example([0, MASK, 1 << 63, (1 << 63) - 1], [0, (1 << 31) - 1])
def test_torch_has_the_same_noise(keys: list[int], numbers: list[int]) -> None:
    found = units(torch.tensor([held(key) for key in keys]), torch.tensor(numbers, dtype=torch.int64))
    assert found.tolist() == [[unit(key, number) for number in numbers] for key in keys]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [600, 20_000])
def test_rows_of_several_sessions_are_drawn_as_on_the_cpu(width: int, device: str) -> None:
    rng = np.random.default_rng(width)
    for _ in range(4 if width < 1000 else 1):
        batch = entries(rng, width)
        logits = torch.tensor(np.concatenate([rows for rows, _ in batch]), device=device)
        before = logits.clone()
        found = chosen(logits, [draw for _, draw in batch])
        assert found == [choose(rows, draw).ids for rows, draw in batch]
        assert torch.equal(logits, before)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite_spoil_no_other(device: str) -> None:
    batch = entries(np.random.default_rng(4), 600)
    good = [choose(rows, draw).ids for rows, draw in batch]
    for (rows, _), value in zip(batch, (math.nan, math.inf, math.nan, math.inf, *(math.nan,) * 7), strict=True):
        rows[0, 5] = value
        rows[-1] = -math.inf
    logits = torch.tensor(np.concatenate([rows for rows, _ in batch]), device=device)
    found = chosen(logits, [draw for _, draw in batch])
    assert found == [(-1, *ids[1:-1], -1)[-len(ids) :] for ids in good]


def test_half_precision_is_drawn_as_the_float32_that_it_is() -> None:
    batch = entries(np.random.default_rng(5), 600)
    logits = torch.tensor(np.concatenate([rows for rows, _ in batch])).bfloat16()
    draws = [draw for _, draw in batch]
    assert chosen(logits, draws) == chosen(logits.float(), draws)


def test_nothing_to_draw_and_what_is_not_drawn_here() -> None:
    assert choose_rows(torch.empty(0, 9), []).tolist() == []
    for options in ({"logprobs": 0}, {"temperature": 1.0, "method": Method.REJECTION}):
        with pytest.raises(AssertionError):
            rows_of(Draw(Sampler(Sampling(**options), 0), (), ()))
