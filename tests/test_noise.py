"""Noise is the same in every form, the race is an exact draw, and the noise of one thing says nothing of another's."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import misfit

from pipesd import _kernels
from pipesd._kernels import Kernel
from pipesd._kernels.race import RACE
from pipesd.policy import noise
from pipesd.policy.noise import FIRST_FACTOR, GOLDEN, MASK, SECOND_FACTOR, Stream, exponential, mix, race, stream_key
from pipesd.policy.noise import unit as unit_of

Result = tuple[int, float, float]
SIGNATURE = "Tuple((int64, float64, float64))(float32[::1], uint64, uint64[::1], int64[::1])"
keys = st.one_of(st.integers(0, MASK), st.sampled_from([0, 1, MASK, 1 << 63, MASK - GOLDEN + 1]))
ids = st.one_of(st.integers(0, (1 << 31) - 1), st.sampled_from([0, 1023, 1024, (1 << 31) - 1]))
weights = st.one_of(
    st.floats(0, 1, width=32),
    st.sampled_from([0.0, 1.0, 2.0**-149, 2.0**-126, 1e30]).map(lambda x: float(np.float32(x))),
)


def undone(number: int) -> int:
    """What `mix` makes `number` of."""
    z = number ^ (number >> 31) ^ (number >> 62)
    z = z * pow(SECOND_FACTOR, -1, 1 << 64) & MASK
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(FIRST_FACTOR, -1, 1 << 64) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


HIGHEST = undone(MASK) - GOLDEN & MASK  # keys under which the hash of id 0 has all bits set, and none
LOWEST = undone(0) - GOLDEN & MASK


def plain(weights: Any, key: int, ids: Any = None) -> Result:
    numbers = [] if ids is None else [int(i) for i in ids]
    place, first, second = RACE.plain([float(w) for w in weights], key, numbers, [0] * 7)
    return (place if ids is None or place < 0 else numbers[place]), first, second


def of_arrays(weights: Any, key: int, ids: Any = None) -> Result:
    numbers = None if ids is None else np.asarray(ids, np.uint64)
    place, first, second = noise._race_of_arrays(np.asarray(weights, np.float32), key, numbers)
    return (place if ids is None or place < 0 else int(numbers[place])), first, second


def compiled(weights: Any, key: int, ids: Any = None) -> Result:
    pytest.importorskip("numba")
    assert RACE.compiled() is not None
    return race(np.asarray(weights, np.float32), key, ids)


FORMS: list[Callable[..., Result]] = [plain, of_arrays, compiled]


def bits(result: Result) -> tuple[int, bytes]:
    assert type(result[0]) is int
    return result[0], struct.pack("dd", *result[1:])


def test_the_hash_is_that_of_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(1234567 + n * GOLDEN) for n in range(1, 6)] == known


@given(keys, ids)
@example(HIGHEST, 0)
@example(LOWEST, 0)
def test_every_form_gives_an_id_the_same_time(key: int, token: int) -> None:
    wanted = bits((token, exponential(key, token), math.inf))
    for form in FORMS:
        assert bits(form([1.0], key, [token])) == wanted


@given(keys, ids)
@example(HIGHEST, 0)
@example(LOWEST, 0)
def test_numbers_lie_within_the_open_unit_interval_and_times_are_no_earlier(key: int, token: int) -> None:
    v, time = unit_of(key, token), exponential(key, token)
    assert 0.0 < v < 1.0
    assert v <= time < math.inf


@given(st.lists(weights, max_size=30), keys, st.data())
@example([0.0, 0.0], 1, None)
@example([1.0, 0.0], HIGHEST, None)
@example([0.5, 0.5, 0.5], LOWEST, None)
def test_every_form_finds_the_same_winner_at_the_same_time(values: list[float], key: int, data: Any) -> None:
    some = None
    if data is not None and data.draw(st.booleans()):
        some = sorted(data.draw(st.lists(ids, min_size=len(values), max_size=len(values), unique=True)))
    times = [
        exponential(key, n) / w if w else math.inf for n, w in zip(some or range(len(values)), values, strict=True)
    ]
    order = sorted((time, i) for i, time in enumerate(times) if time < math.inf)
    wanted = -1 if not order else order[0][1] if some is None else some[order[0][1]]
    first, second = ([time for time, _ in order] + [math.inf, math.inf])[:2]
    for form in FORMS:
        assert bits(form(np.array(values, np.float32), key, some)) == bits((wanted, first, second))


@pytest.mark.parametrize("width", [1, 1023, 1024, 1025, 151_936])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
def test_wide_rows_race_alike_compiled_or_not(width: int, spread: float) -> None:
    rng = np.random.default_rng(width)
    for key in rng.integers(0, 1 << 64, 3, np.uint64).tolist():
        row = np.exp(np.minimum(rng.normal(size=width) * spread, 80)).astype(np.float32)
        assert bits(of_arrays(row, key)) == bits(compiled(row, key))
        some = np.flatnonzero(rng.random(width) < 0.3)
        assert bits(of_arrays(row[some], key, some)) == bits(compiled(row[some], key, some))


def test_ids_that_are_left_out_change_nothing_but_their_absence() -> None:
    row = np.array([0.1, 0.0, 0.5, 0.4, 0.0], np.float32)
    kept = np.flatnonzero(row)
    for key in range(200):
        assert bits(race(row, key)) == bits(race(row[kept], key, kept))


def test_a_race_of_nobody_has_no_winner() -> None:
    for form in FORMS:
        assert form([], 3) == form([0.0, 0.0], 3) == (-1, math.inf, math.inf)


def test_no_plain_loop_runs_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a loop over every id")

    monkeypatch.setattr(noise, "RACE", Kernel(never, SIGNATURE))
    row = np.array([0.2, 0.7, 0.1], np.float32)
    assert bits(race(row, 5)) == bits(plain(row, 5))


def test_the_warm_up_loads_the_race() -> None:
    pytest.importorskip("numba")
    assert _kernels.warmup()
    assert RACE.at_hand() is not RACE.plain


P = np.array([0.35, 0.2, 0.15, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01])
Q = np.array([0.2, 0.3, 0.05, 0.15, 0.08, 0.02, 0.1, 0.1, 0.0])


def test_the_race_is_a_draw_and_two_races_agree_as_often_as_they_should() -> None:
    draws = 100_000
    p, q = P.astype(np.float32), Q.astype(np.float32)
    both = np.zeros((len(P), len(P)))
    for position in range(draws):
        key = stream_key(11, position, Stream.CHOICE)
        both[race(p, key)[0], race(q, key)[0]] += 1
    assert misfit(both.sum(1), P) > 0.001
    assert misfit(both.sum(0), Q) > 0.001
    agree = sum(
        1 / sum(max(P[j] / P[i], Q[j] / Q[i]) for j in range(len(P))) for i in range(len(P)) if P[i] > 0 and Q[i] > 0
    )
    assert np.trace(both) / draws == pytest.approx(agree, rel=0.01)


def units(which: Callable[[int], float]) -> Any:
    return np.array([which(n) for n in range(10_000)])


NEIGHBOURS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "positions": (
        lambda n: unit_of(stream_key(5, n, Stream.CHOICE), 0),
        lambda n: unit_of(stream_key(5, n + 1, Stream.CHOICE), 0),
    ),
    "seeds": (
        lambda n: unit_of(stream_key(n, 7, Stream.CHOICE), 0),
        lambda n: unit_of(stream_key(n + 1, 7, Stream.CHOICE), 0),
    ),
    "a seed's and a position's step": (
        lambda n: unit_of(stream_key(n, n + 1, Stream.CHOICE), 0),
        lambda n: unit_of(stream_key(n + 1, n, Stream.CHOICE), 0),
    ),
    "ids": (
        lambda n: unit_of(stream_key(5, 7, Stream.CHOICE), n),
        lambda n: unit_of(stream_key(5, 7, Stream.CHOICE), n + 1),
    ),
    "an id's and a position's step": (
        lambda n: unit_of(stream_key(5, n, Stream.CHOICE), 1),
        lambda n: unit_of(stream_key(5, n + 1, Stream.CHOICE), 0),
    ),
} | {
    f"streams {one.name} and {other.name}": (
        lambda n, one=one: unit_of(stream_key(5, n, one), 0),  # type: ignore[misc]
        lambda n, other=other: unit_of(stream_key(5, n, other), 0),  # type: ignore[misc]
    )
    for one in Stream
    for other in Stream
    if one < other
}  # fmt: skip


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_is_even_and_independent(name: str) -> None:
    one, other = (units(which) for which in NEIGHBOURS[name])
    squares = np.histogram2d(one, other, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
    assert misfit(squares, np.full(64, 1 / 64)) > 1e-4
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(len(one))


def test_streams_of_one_position_do_not_share_numbers() -> None:
    seen = {
        unit_of(stream_key(5, position, stream), n) for position in range(20) for stream in Stream for n in range(100)
    }
    assert len(seen) == 20 * len(Stream) * 100
