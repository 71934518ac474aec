"""The compiled form of the cumulative confidence gives the bits of the plain one."""

from __future__ import annotations

import struct
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipesd import _kernels
from pipesd._kernels import Kernel
from pipesd._kernels import confidence as kernel
from pipesd._kernels.confidence import OBSERVE, SEQUENCE, TOKEN
from pipesd.policy.trigger import DualThreshold

pytest.importorskip("numba")

SIGNATURE = "Tuple((float64, int64))(float64, float64, float64, float64)"
shares = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 5e-324, 1e-308, 0.1, 0.5, 1.0]))


def bits(answer: tuple[float, int]) -> tuple[bytes, int]:
    return struct.pack("d", answer[0]), answer[1]


@given(shares, shares, shares, shares)
@example(5e-324, 0.5, 0.0, 0.0)
@example(1e-200, 1e-200, 0.0, 0.0)
def test_compiled_and_plain_give_the_same_bits(p: float, confidence: float, sequence: float, token: float) -> None:
    compiled = OBSERVE.compiled()
    assert compiled is not None
    assert bits(compiled(p, confidence, sequence, token)) == bits(OBSERVE.plain(p, confidence, sequence, token))


def test_ten_thousand_tokens_in_a_row_give_the_same_bits() -> None:
    rng = Random(1)
    compiled = OBSERVE.compiled()
    assert compiled is not None
    one = other = (1.0, 0)
    rules = set()
    for _ in range(10_000):
        p = rng.random() ** 0.2
        one, other = compiled(p, one[0], 0.05, 0.3), OBSERVE.plain(p, other[0], 0.05, 0.3)
        assert bits(one) == bits(other)
        rules.add(one[1])
    assert rules == {0, SEQUENCE, TOKEN}


def test_what_is_at_hand_is_the_compiled_form_once_it_was_loaded() -> None:
    fresh = Kernel(OBSERVE.plain, SIGNATURE)
    assert fresh.at_hand() is OBSERVE.plain
    assert fresh.compiled() is not None
    assert fresh.at_hand() is fresh.compiled()


def test_the_warm_up_loads_it() -> None:
    assert _kernels.warmup()
    assert OBSERVE.at_hand() is OBSERVE.compiled() is not None


def test_a_trigger_takes_up_the_compiled_form_when_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Kernel(OBSERVE.plain, SIGNATURE)
    monkeypatch.setattr(kernel, "OBSERVE", fresh)
    trigger = DualThreshold(0.5, 0.5)
    assert trigger._observe is fresh.plain
    compiled = fresh.compiled()
    trigger.reset()
    assert trigger._observe is compiled
