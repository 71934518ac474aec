"""The small steps of a layer as kernels give what torch's own operators give.

Without a CUDA device the kernels run under Triton's interpreter; they are left out where triton is not installed.
"""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("torch")

import torch

from pipesd.cloud import steps as steps_module
from pipesd.cloud.steps import PlainSteps, Steps, steps_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERRORS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of values of about one


@pytest.fixture(scope="module")
def kernels() -> Steps:
    pytest.importorskip("triton")
    steps: Steps = importlib.import_module("pipesd.cloud.step_kernels").TritonSteps()
    return steps


@pytest.fixture(params=ERRORS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def random(dtype: torch.dtype, *size: int) -> torch.Tensor:
    draw = torch.Generator(DEVICE).manual_seed(len(size) + size[-1])
    return torch.randn(size, generator=draw, device=DEVICE).to(dtype)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and one.shape == other.shape
    error = ERRORS[one.dtype] * max(1.0, other.float().abs().max().item())
    torch.testing.assert_close(one, other, atol=error, rtol=error)


@pytest.mark.parametrize("hidden", [64, 1000])
def test_a_row_becomes_a_unit_behind_what_is_added(kernels: Steps, dtype: torch.dtype, hidden: int) -> None:
    floor = torch.tensor(0.3, device=DEVICE)
    addend = random(dtype, 2, 3, hidden)[0]
    for added in (None, addend):
        x, y = random(dtype, 3, hidden), random(dtype, 3, hidden)
        x[0] = y[0] = 0
        close(kernels.unit(x, added, floor), PlainSteps().unit(y, added, floor))
        if dtype == torch.bfloat16 and DEVICE.type == "cpu":
            close(x, y)  # the interpreter cuts bfloat16 off
        else:
            assert torch.equal(x, y), "the sum is rounded alike"


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_turned_in_place(kernels: Steps, dtype: torch.dtype, size: int, norms: bool) -> None:
    angles = random(torch.float32, 3, 1, size // 2)
    rotation = torch.polar(torch.full_like(angles, 1.3), angles)
    gains = random(torch.float32, 4, size) if norms else None
    floor = torch.tensor(0.1, device=DEVICE)
    found = []
    for steps in (kernels, PlainSteps()):
        heads = random(dtype, 3, 6 * size)
        steps.turn(heads.unflatten(-1, (-1, size))[:, :4], gains, rotation, floor)
        assert torch.equal(heads[:, 4 * size :], random(dtype, 3, 6 * size)[:, 4 * size :]), "values stay as they are"
        found.append(heads)
    close(*found)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_open(kernels: Steps, dtype: torch.dtype) -> None:
    gate_up = 3 * random(dtype, 2, 2 * 1100)
    gate_up[0, 0] = -60000.0 if dtype == torch.float16 else -1e20
    close(kernels.gate(gate_up.clone()), PlainSteps().gate(gate_up.clone()))


def test_the_cpu_has_torchs_own_and_so_has_cuda_where_no_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(steps_for(torch.device("cpu")), PlainSteps)
    monkeypatch.setattr(steps_module, "why_no_kernels", lambda device: "no C compiler")
    assert isinstance(steps_for(torch.device("cuda")), PlainSteps)


def test_cuda_has_the_kernels_where_they_run(kernels: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "why_no_kernels", lambda device: None)
    assert type(steps_for(torch.device("cuda"))) is type(kernels)


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    """A length whose hypotenuse with a floor is rounded in two ways, many at a time and one by one."""
    x = torch.zeros(80, 1, 24)
    x[:, :, 3] = 7.680696964263916
    floor, gains = torch.tensor(0.38013434410095215), torch.ones(1, 24)
    rotation = torch.ones(80, 1, 12, dtype=torch.complex64)
    whole, turned = PlainSteps().unit(x[:, 0], None, floor * floor), x.clone()
    PlainSteps().turn(turned, gains, rotation, floor * floor)
    for rows in (1, 3, 17, 79):
        assert torch.equal(PlainSteps().unit(x[:rows, 0], None, floor * floor), whole[:rows])
        part = x[:rows].clone()
        PlainSteps().turn(part, gains, rotation[:rows], floor * floor)
        assert torch.equal(part, turned[:rows])
