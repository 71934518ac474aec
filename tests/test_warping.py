"""What options make of a row of logits: checked values, transformers' arithmetic, thresholds that keep ties."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import dense

from pipesd.config import GenerateConfig
from pipesd.errors import UsageError
from pipesd.policy.penalties import Counts
from pipesd.policy.sampling import Law, Method, Sampling, adjusted, make_sampling, threshold, warped

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
REFUSED: list[dict[str, Any]] = [
    *({name: value} for name in NUMBERS for value in (math.nan, math.inf, -math.inf, True, "1", None, 1e9)),
    *({name: -0.001} for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    {"temperature": 100.5},
    {"top_p": 1.001},
    {"min_p": 1.001},
    {"repetition_penalty": 0},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.5},
    *({"top_k": value} for value in (-1, 1.0, True, 1 << 31, None)),
    *({"logprobs": value} for value in (-1, 21, True, 1.0)),
    *({"top_mass": value} for value in (1, -1, True, 0.0)),
    *({"method": Method.PICOSPEC, "top_mass": value} for value in (0, 1025, True, 3.0)),
    *({"method": value} for value in (0, 1, "NOISE", None)),
    *({"logit_bias": ((token, 1.0),)} for token in (-1, 1 << 31, True, 1.0)),
    *({"logit_bias": ((3, value),)} for value in (math.nan, math.inf, True, None)),
    {"logit_bias": ((3, 1.0), (3, 2.0))},
    {"logit_bias": tuple((token, 1.0) for token in range(1025))},
    {"logit_bias": ((3,),)},
    {"logit_bias": None},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_impossible_values_are_refused_by_name(options: dict[str, Any]) -> None:
    name = {"method": "sampling method"}.get(list(options)[-1], list(options)[-1].replace("_", "-"))
    with pytest.raises(UsageError, match=f"^{name}: got ") as error:
        Sampling(**options)
    assert "wanted" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-8},
        {"temperature": 5e-324},
        {"temperature": 100},
        {"top_p": 0},
        {"min_p": 1, "top_k": 1, "top_p": 1},
        {"top_k": (1 << 31) - 1},
        {"method": Method.PICOSPEC, "top_mass": 1024},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": tuple((token, -math.inf) for token in range(1024))},
    ],
    ids=str,
)
def test_extreme_values_are_taken(options: dict[str, Any]) -> None:
    sampling = Sampling(**options)
    assert all(getattr(sampling, name) == value for name, value in options.items())


def test_what_options_amount_to() -> None:
    assert Sampling().plain and Sampling().greedy and not Sampling().tests
    assert Sampling(top_k=3, top_p=0.5, min_p=0.5).plain
    assert not Sampling(logit_bias=((1, 1.0),)).plain
    assert not Sampling(logprobs=0).plain
    assert not Sampling(repetition_penalty=1.1).plain
    assert not Sampling(method=Method.REJECTION).tests
    assert Sampling(temperature=1, method=Method.REJECTION).tests
    assert not Sampling(temperature=1).tests
    assert not Sampling(temperature=1).truncates


def test_the_options_of_a_generation_are_taken_over_one_by_one() -> None:
    options: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.75, "frequency_penalty": -0.5, "logit_bias": ((3, 1.0),), "logprobs": 2,
    }  # fmt: skip
    assert make_sampling(GenerateConfig(**options)) == Sampling(**options)
    sampling = make_sampling(GenerateConfig(**options, sampling="picospec", top_mass=7))
    assert sampling == Sampling(**options, method=Method.PICOSPEC, top_mass=7)
    assert sampling.tests and sampling.untested == Sampling(**options), "the same law where nothing is drafted"


def logits(rng: np.random.Generator, width: int, spread: float = 2.0) -> Any:
    return (rng.normal(size=width) * spread).astype(np.float32)


# Small rows take one way through the search for what surely is out, large ones the others.
WIDTHS = [1, 2, 40, 3000, 40_000]
COMBINATIONS = list(product([0.3, 1.0, 2.0], [0, 1, 7, 500], [0.0, 0.3, 0.8, 0.999, 1.0], [0.0, 0.02, 0.5, 1.0]))


def naive(row: Any, sampling: Sampling) -> dict[int, float]:
    """The law by its definition: one option after the other, over ids sorted by their logits."""
    scaled = row.astype(float) / sampling.temperature
    weights = np.exp(scaled - scaled.max()).tolist()
    kept = sorted(range(len(row)), key=lambda i: -weights[i])
    if sampling.top_k:
        kept = [i for i in kept if weights[i] >= weights[kept[min(sampling.top_k, len(kept)) - 1]]]
    mass = math.fsum(weights[i] for i in kept)
    before, count = 0.0, 0
    while count < len(kept) and (count == 0 or sampling.top_p == 1 or before < sampling.top_p * mass):
        before += weights[kept[count]]
        count += 1
    kept = [i for i in kept if weights[i] >= weights[kept[count - 1]] and weights[i] >= sampling.min_p]
    mass = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in kept if weights[i] > 1e-37}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_law_is_that_of_the_definition(width: int) -> None:
    rng = np.random.default_rng(width)
    combinations = COMBINATIONS[:: {3000: 7, 40_000: 59}.get(width, 1)]
    for temperature, top_k, top_p, min_p in combinations:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        row = logits(rng, width)
        law, wanted = dense(warped(row, sampling), width), naive(row, sampling)
        assert set(np.flatnonzero(law)) == set(wanted), sampling
        assert law == pytest.approx(np.array([wanted.get(i, 0.0) for i in range(width)]), rel=1e-4, abs=1e-7)


def test_flat_rows_have_the_law_of_the_definition() -> None:
    rng = np.random.default_rng(5)
    for top_p in (0.05, 0.5, 0.9):
        row = logits(rng, 30_000, 0.1)
        sampling = Sampling(temperature=1, top_p=top_p)
        assert np.array_equal(warped(row, sampling).ids, sorted(naive(row, sampling)))


@pytest.mark.parametrize("combination", COMBINATIONS[::3], ids=str)
def test_the_law_is_that_of_transformers(combination: tuple[float, int, float, float]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    temperature, top_k, top_p, min_p = combination
    rng = np.random.default_rng(7)
    for width, repetition in ((50, 1.0), (50, 1.3), (2000, 0.7)):
        row, prefix = logits(rng, width), rng.integers(0, width, 30).tolist()
        chain = transformers.LogitsProcessorList()
        bias = ((3, 2.5), (7, -1.5), (11, -math.inf))
        chain.append(transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias]))
        if repetition != 1:
            chain.append(transformers.RepetitionPenaltyLogitsProcessor(repetition))
        chain.append(transformers.TemperatureLogitsWarper(temperature))
        if top_k:
            chain.append(transformers.TopKLogitsWarper(top_k))
        if top_p < 1:
            chain.append(transformers.TopPLogitsWarper(top_p))
        if min_p > 0:
            chain.append(transformers.MinPLogitsWarper(min_p))
        wanted = torch.softmax(chain(torch.tensor([prefix]), torch.tensor(row[None])).double(), -1)[0].numpy()
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition,
            logit_bias=bias,
        )  # fmt: skip
        law = dense(warped(adjusted(row, sampling, prefix), sampling), width)
        assert np.array_equal(law > 0, wanted > 0)
        assert law == pytest.approx(wanted, rel=1e-4, abs=1e-9)


rows = st.lists(st.sampled_from([-math.inf, -50.0, -1.0, 0.0, 1.0, 1.0, 2.0, 300.0]), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)
options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([5e-324, 1e-8, 0.1, 1.0, 100.0]),
        "top_k": st.integers(0, 45),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([0.0, 5e-324, 0.8, 1.0])),
        "min_p": st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])),
    }
)


@given(rows, options)
def test_something_is_always_kept_and_what_ties_stays_together(values: list[float], some: dict[str, Any]) -> None:
    row = np.array(values, np.float32)
    before = row.copy()
    law = dense(warped(row, Sampling(**some)), len(row))
    assert np.array_equal(row, before)
    assert np.isfinite(law).all() and law.sum() == pytest.approx(1.0, abs=1e-5)
    assert law[row.argmax()] > 0
    assert (law[row == -math.inf] == 0).all()
    for one, other in product(range(len(row)), repeat=2):
        if row[one] == row[other]:
            assert law[one] == law[other]
        if row[one] >= row[other]:
            assert law[one] >= law[other]


@given(rows, options)
def test_numpy_and_torch_find_the_same_threshold(values: list[float], some: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    weights = np.sort(np.exp(np.clip(np.array(values, np.float32) - max(values), -50, 0)))[::-1].copy()
    chosen = (max(1, some["top_k"]), some["top_p"], np.float32(some["min_p"]))
    one = threshold(weights, float(weights.sum(dtype=float)), *chosen, np)
    dtypes = torch.int64, torch.float64, torch.float32
    columns = [torch.tensor([[v], [v]], dtype=dtype) for v, dtype in zip(chosen, dtypes, strict=True)]
    tensor = torch.tensor(np.stack([weights, weights]))
    totals = torch.full((2, 1), float(weights.sum(dtype=float)), dtype=torch.float64)
    other = threshold(tensor, totals, *columns, torch)
    assert other.tolist() == [[float(one[0])]] * 2


def test_a_share_that_is_just_reached_ends_top_p_and_the_whole_share_leaves_out_nothing() -> None:
    values = np.array([1.0, 0.5, 0.25, 0.25], np.float32)
    assert threshold(values, 2.0, 9, 0.5, 0.0, np) == [1.0]
    assert threshold(values, 2.0, 9, 0.75, 0.0, np) == [0.5]
    assert threshold(values, 1.5, 9, 1.0, 0.0, np) == [0.25]  # a total that was rounded


def test_top_k_one_with_top_p_keeps_the_most_probable() -> None:
    row = np.array([1.0, 3.0, 2.0], np.float32)
    for sampling in (Sampling(temperature=1, top_k=1, top_p=0.8), Sampling(temperature=1, top_p=0.0)):
        assert warped(row, sampling).ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 5e-324])
def test_a_tiny_temperature_leaves_the_highest(temperature: float) -> None:
    row = np.array([1.0, 2.0, -math.inf, 1.999, -3e38], np.float32)
    law = warped(row, Sampling(temperature=temperature))
    assert law.weights.tolist() == [0, 1, 0, 0, 0]


def test_a_law_knows_the_probability_of_each_id() -> None:
    weights = np.array([1.0, 0.5, 0.25], np.float32)
    for law in (Law(np.array([2, 5, 9]), weights, 1.75), Law(None, weights, 1.75)):
        ids = law.ids.tolist() if law.ids is not None else [0, 1, 2]
        for token in range(12):
            p = law.probability(token)
            assert p == pytest.approx(weights[ids.index(token)] / 1.75 if token in ids else 0.0)
            assert struct.unpack("f", struct.pack("f", p))[0] == p  # so that it crosses the wire as it is


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 6), max_size=8)), max_size=12))
def test_counts_follow_a_text_that_grows_and_is_cut(changes: list[tuple[int, list[int]]]) -> None:
    counts, text = Counts(), [3] * 70 + [*range(100), 0, 1]
    for cut, more in changes:
        text = [*text[: max(0, len(text) - cut)], *more]
        ids, times = counts.of(text)
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(text)


def test_one_more_id_or_a_few_fewer_cost_no_pass_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text, counts, steps = [n % 1000 for n in range(8192)], Counts(), []
    counts.of(text)
    add, remove = Counts._add, Counts._remove
    monkeypatch.setattr(Counts, "_add", lambda self, token: (steps.append(1), add(self, token)))
    monkeypatch.setattr(Counts, "_remove", lambda self, token: (steps.append(-1), remove(self, token)))
    counts.of([*text, 5])
    assert steps == [1]
    counts.of([*text[:-3], 7, 8])
    assert sorted(steps[1:]) == [-1] * 4 + [1] * 2


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "presence_penalty": 0.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.25},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    ],
    ids=str,
)
def test_penalties_count_the_whole_prefix(penalties: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    row, prefix = logits(rng, 30), rng.integers(0, 20, 200).tolist()
    row[4] = -math.inf
    sampling = Sampling(**penalties, logit_bias=((2, 3.0), (19, -2.0), (25, -math.inf)))  # type: ignore[arg-type]
    wanted = row.astype(float)
    for token, value in sampling.logit_bias:
        wanted[token] += value
    for token, times in Counter(prefix).items():
        x = wanted[token]
        x = x * sampling.repetition_penalty if x < 0 else x / sampling.repetition_penalty
        wanted[token] = x - sampling.presence_penalty - times * sampling.frequency_penalty
    before = row.copy()
    found = adjusted(row, sampling, prefix)
    assert np.array_equal(row, before)
    assert found.dtype == np.float32
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    shared = Counts()
    for cut in (200, 150, 170, 0):
        again = adjusted(row, sampling, prefix[:cut], shared)
        assert np.array_equal(again, adjusted(row, sampling, tuple(prefix[:cut])))


def test_ids_beyond_the_row_do_not_matter() -> None:
    row = np.zeros(5, np.float32)
    sampling = Sampling(presence_penalty=1.0, logit_bias=((1, 2.0), (9, 2.0)))
    prefix: Sequence[int] = [2, 7, 900]
    assert adjusted(row, sampling, prefix).tolist() == [0, 2, -1, 0, 0]
    assert adjusted(row, Sampling(), prefix) is row
