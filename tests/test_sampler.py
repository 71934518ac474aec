"""What is drawn: the highest logit at temperature 0, else a draw that hangs on the seed and the position alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from laws import TableSampler, dense, misfit

from pipesd._kernels import warmup
from pipesd.policy.noise import Stream, exponential, stream_key
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling

RNG = np.random.default_rng(1)
ROW = (RNG.normal(size=12) * 1.5).astype(np.float32)
EVERYTHING: dict[str, Any] = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "method": Method.REJECTION}


def chosen(row: Any, options: dict[str, Any], seed: int = 0, position: int = 0, prefix: Any = ()) -> int:
    choice = Sampler(Sampling(**options), seed).choose(np.asarray(row, np.float32), position, prefix)
    assert choice is not None and type(choice.id) is int
    return choice.id


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-8, 5e-324])
def test_without_temperature_the_highest_is_taken_whatever_the_seed(temperature: float) -> None:
    for seed, some in product(range(20), ({}, EVERYTHING)):
        assert chosen(ROW, {"temperature": temperature, **some}, seed, seed) == ROW.argmax()


def test_without_temperature_bias_and_penalties_count() -> None:
    row = [1.0, 3.0, 2.0, -1.0]
    assert chosen(row, {"logit_bias": ((1, -1.5),)}) == 2
    assert chosen(row, {"logit_bias": ((1, -math.inf), (2, -math.inf)), **EVERYTHING}) == 0
    assert chosen(row, {"repetition_penalty": 2.0}, prefix=[1]) == 2
    assert chosen(row, {"presence_penalty": 1.5}, prefix=[1, 1]) == 2
    assert chosen(row, {"frequency_penalty": 0.6}, prefix=[1]) == 1
    assert chosen(row, {"frequency_penalty": 0.6}, prefix=[1, 1]) == 2


def test_on_a_tie_the_lowest_id_is_taken() -> None:
    assert chosen([1.0, 2.0, 2.0, 2.0], {}) == 1


def test_the_margin_of_the_highest_is_told_where_it_is_wanted() -> None:
    row = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    without, told = Sampler(Sampling(), 0).choose(row, 0, ()), Sampler(Sampling(), 0, margins=True).choose(row, 0, ())
    assert without is not None and without == (1, 0.0, None)
    assert told is not None and told.id == 1 and told.margin == pytest.approx(0.5)
    for order in ([1, 0, 2], [0, 2, 1]):
        told = Sampler(Sampling(), 0, margins=True).choose(row[order], 0, ())
        assert told is not None and told.margin == pytest.approx(0.5)
    for lone in ([2.0], [2.0, -math.inf]):
        told = Sampler(Sampling(), 0, margins=True).choose(np.array(lone, np.float32), 0, ())
        assert told == (0, 1.0, None)
    assert Sampler(Sampling(), 0, margins=True).choose(np.zeros(3, np.float32), 0, ()) == (0, 0.0, None)


def test_the_margin_of_a_draw_is_that_of_its_race() -> None:
    sampler = Sampler(Sampling(temperature=0.8, top_k=4), 3)
    for position in range(50):
        choice = sampler.choose(ROW, position, ())
        assert choice is not None and choice.law is not None
        key = stream_key(3, position, Stream.CHOICE)
        times = sorted(
            (exponential(key, token) / weight, token)
            for token, weight in zip(choice.law.ids.tolist(), choice.law.weights.tolist(), strict=True)
        )
        assert choice.id == times[0][1]
        assert choice.margin == pytest.approx(1 - times[0][0] / times[1][0])
    one = Sampler(Sampling(temperature=1, top_k=1), 3).choose(ROW, 0, ())
    assert one is not None and one.margin == 1.0


BAD = [[math.nan, 1, 2], [1, math.inf, 2], [-math.inf] * 3, [math.nan] * 3, [math.inf, -math.inf, math.nan]]


@pytest.mark.parametrize("row", BAD, ids=str)
@pytest.mark.parametrize("some", [{}, {"temperature": 1.0}, {"temperature": 1.0, **EVERYTHING}], ids=["0", "1", "all"])
def test_a_row_that_is_not_finite_gives_nothing(row: list[float], some: dict[str, Any]) -> None:
    for margins in (False, True):
        sampler = Sampler(Sampling(**some), 0, margins=margins)
        assert sampler.choose(np.array(row, np.float32), 0, ()) is None


def test_forbidding_every_id_gives_nothing() -> None:
    for temperature in (0, 1):
        sampler = Sampler(Sampling(temperature=temperature, logit_bias=((0, -math.inf), (1, -math.inf))), 0)
        assert sampler.choose(np.zeros(2, np.float32), 0, ()) is None


def test_one_id_alone_and_ids_that_cannot_be() -> None:
    assert chosen([0.0], {"temperature": 1.0}) == 0
    for seed in range(50):
        assert chosen([-math.inf, 5.0, -math.inf], {"temperature": 100.0}, seed) == 1


def test_a_seed_gives_the_same_ids_and_another_seed_others() -> None:
    def text(seed: int) -> list[int]:
        return [chosen(ROW, {"temperature": 1.0}, seed, position) for position in range(40)]

    assert text(3) == text(3)
    assert len({tuple(text(seed)) for seed in (0, 1, 2, 1 << 63, (1 << 64) - 1)}) == 5


def test_ids_do_not_hang_on_what_was_asked_before() -> None:
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3, top_p=0.9)
    used, prefix = Sampler(sampling, 9), RNG.integers(0, 12, 60).tolist()
    for cut in (60, 10, 59, 58, 0, 30, 60):
        fresh = Sampler(sampling, 9).choose(ROW, cut, tuple(prefix[:cut]))
        again = used.choose(ROW, cut, prefix[:cut])
        assert fresh is not None and again is not None
        assert fresh[:2] == again[:2]


PROGRAM = """
import sys
import numpy as np
from pipesd._kernels import warmup
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling
print(warmup(), file=sys.stderr)
row = (np.random.default_rng(4).normal(size=5000) * 2).astype(np.float32)
sampler = Sampler(Sampling(temperature=0.9, top_p=0.95), 1 << 63)
for position in range(100):
    print(*sampler.choose(row, position, ())[:2])
"""


def test_processes_agree_to_the_bit_with_compiled_code_or_without() -> None:
    pytest.importorskip("numba")
    found = []
    for disabled in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled}
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and done.stderr.split()[-1] == str(disabled == "0"), done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]


DRAWS = 100_000
OPTIONS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in product([0.5, 1.0, 1.7], [0, 3], [0.8, 1.0], [0.0, 0.1])
]


def draws_fit(options: dict[str, Any]) -> float:
    warmup()
    sampler = TableSampler(Sampling(**options), 21)
    law = sampler.law(ROW, ())
    assert law is not None
    counts = np.zeros(len(ROW))
    for position in range(DRAWS):
        counts[sampler.drawn(law, position).id] += 1
    return misfit(counts, dense(law, len(ROW)))


def test_what_is_drawn_has_its_law() -> None:
    assert draws_fit({"temperature": 0.7, "top_k": 8, "top_p": 0.95}) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_drawn_has_its_law_with_every_option(options: dict[str, Any]) -> None:
    assert draws_fit(options) > 0.001
