"""What is drawn has the target's law, whatever the options, the draft, the way of sending and asking: counted.

Both machines and the policy run as they do in edge and cloud. Behind each two ids the next has a law that is known
exactly, so all counts together are compared by one chi-square; that of the whole text follows, as the chain rule says.
By default some thousand draws; slow tests take 100,000 for each combination of options.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sampled_machines import EAGER, IDS, LATE, PIPESD, PROMPT, VANILLA, Context, Machines, Seen, Way, law_of

from pipesd.policy import accept, noise, residual, sampler
from pipesd.policy.noise import warmup
from pipesd.policy.residual import rounded_up
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol import cloud_comparing
from pipesd.protocol.actions import Action
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.sim.distributions import Distribution, KeyedDistribution, TableDistribution, draft_of

MOST_Z = 4.0  # of a normal distribution: one run in 30,000 is beyond it by chance
KEYED = KeyedDistribution(1, tuple(range(IDS)), 1.5)
TABLE = TableDistribution((0.35, 0.3, 0.2, 0.1, 0.05))
DRAFTS = {
    "good": draft_of(KEYED, 0.85),
    "bad": KeyedDistribution(2, tuple(range(IDS)), 1.5),
    "one id missing": TableDistribution((0.4, 0.3, 0.2, 0.1, 0.0)),
    "itself": draft_of(KEYED, 1.0),
}
WAYS = {"vanilla": VANILLA, "pipesd": PIPESD, "late": LATE, "eager": EAGER}
OPTIONS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product((0.7, 1.3), (0, 3), (1.0, 0.8), (0.0, 0.1))
]
Law = npt.NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warmup()


def exact_law(row: Any, sampling: Sampling) -> Law:
    """The probabilities of ids that one row gives: temperature, top-k, top-p, min-p, each renormalised."""
    row = row.astype(np.float64) / sampling.temperature
    weights = np.exp(row - row.max())
    if sampling.top_k:
        weights[weights < np.sort(weights)[::-1][sampling.top_k - 1]] = 0.0
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p]] = 0.0
    weights[weights < sampling.min_p * weights.max()] = 0.0
    law: Law = weights / weights.sum()
    return law


def chi_square_z(counts: Counter[tuple[Context, int]], law: Callable[[Context], Law]) -> float:
    """Pearson's statistic over all contexts, as a deviate of a normal distribution (Wilson and Hilferty)."""
    statistic, freedom = 0.0, 0
    by_context: dict[Context, Law] = {}
    for (context, token), count in counts.items():
        by_context.setdefault(context, np.zeros(IDS))[token] += count
    for context, found in by_context.items():
        p = law(context)
        assert not found[p == 0].any(), f"behind {context} an id without probability: {found} by {p}"
        expected = p * found.sum()
        large = expected >= 5
        if large.sum() < 2:
            continue
        for got, wanted in [
            *zip(found[large], expected[large], strict=True),
            (found[~large].sum(), expected[~large].sum()),
        ]:
            statistic += (got - wanted) ** 2 / wanted if wanted else 0.0
        freedom += int(large.sum()) - 1 + bool(expected[~large].sum())
    assert freedom > 0, "nothing to compare"
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def draw(target: Distribution, draft: Distribution, sampling: Sampling, way: Way, draws: int, seed: int = 0) -> Seen:
    """Texts of 2000 ids, so many ids in all."""
    seen, machines = Seen(), Machines(target, draft, sampling, way)
    for number in range(math.ceil(draws / 2000)):
        machines.generate(seed + number, min(2000, draws), seen)
    return seen


def check(target: Distribution, draft: Distribution, sampling: Sampling, way: Way, draws: int, exact: float) -> None:
    """The law, and the acceptance to within `exact`, relative, beyond four standard deviations."""
    seen = draw(target, draft, sampling, way, draws)
    assert seen.draws >= draws
    assert chi_square_z(seen.followed, lambda context: exact_law(law_of(target, context), sampling)) < MOST_Z
    rates = {context: acceptance(target, draft, sampling, context) for context in seen.decided}
    decided = sum(seen.decided.values())
    expected = sum(count * rates[context] for context, count in seen.decided.items())
    variance = sum(count * rates[context] * (1 - rates[context]) for context, count in seen.decided.items())
    assert decided > draws / 3
    assert abs(seen.accepted - expected) < exact * expected + 4 * math.sqrt(max(variance, 0.0))


def acceptance(target: Distribution, draft: Distribution, sampling: Sampling, context: Context) -> float:
    """How probable it is that a draft token is accepted."""
    p, q = exact_law(law_of(target, context), sampling), exact_law(law_of(draft, context), sampling)
    if sampling.tests:
        return float(np.minimum(p, q).sum())
    total = 0.0
    for i in range(IDS):  # Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i)
        if p[i] > 0 and q[i] > 0:
            total += 1 / np.maximum(p / p[i], q / q[i]).sum()
    return total


@pytest.mark.parametrize("method", [Method.NOISE, Method.REJECTION])
@pytest.mark.parametrize("way", WAYS)
def test_the_law_is_the_targets(method: Method, way: str) -> None:
    number = [*WAYS].index(way)
    draft = DRAFTS["bad" if number % 2 else "good"]
    check(KEYED, draft, Sampling(**OPTIONS[5 * number], method=method), WAYS[way], 1500, 0.01)


@pytest.mark.parametrize("way", ["vanilla", "pipesd"])
def test_the_law_is_the_targets_where_it_is_not_told_whole(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As with laws of many ids: proposals come down, one at first, and more are asked for."""
    monkeypatch.setattr(accept, "MOST_WHOLE", 1)
    monkeypatch.setattr(accept, "FIRST_PROPOSALS", 1)
    check(KEYED, DRAFTS["bad"], Sampling(temperature=1.0, method=Method.REJECTION), WAYS[way], 1500, 0.01)


@pytest.mark.parametrize("draft", ["one id missing", "itself"])
def test_odd_drafts_of_a_table(draft: str) -> None:
    """Ids that the draft never says, and a draft that is the target: then all is accepted but for rounding."""
    target, guess = (TABLE, DRAFTS[draft]) if draft == "one id missing" else (KEYED, KEYED)
    for method in (Method.NOISE, Method.REJECTION):
        check(target, guess, Sampling(temperature=1.0, method=method), PIPESD, 1000, 0.01)


def residual_of_no_draft(p: float, q: float) -> float:
    return p


def half(q: float) -> float:
    return rounded_up(q / 2)


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (residual, "_residual", residual_of_no_draft),
        (residual, "rounded_up", half),  # the draft's probability is said too low
        (noise, "unit", lambda key, number: 0.5),  # every test draws the same number
    ],
)
def test_a_law_that_is_bent_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Callable[..., float]
) -> None:
    monkeypatch.setattr(place, name, broken)
    monkeypatch.setattr(sampler, name, broken, raising=False)
    sampling = Sampling(temperature=1.0, method=Method.REJECTION)
    seen = draw(KEYED, DRAFTS["bad"], sampling, PIPESD, 1500)
    assert chi_square_z(seen.followed, lambda context: exact_law(law_of(KEYED, context), sampling)) > MOST_Z


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_whose_context_ends_does_not_bend_the_law(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """What it is sure of asks for no test, and then its context is full. A cloud that drew in the place of what waits
    untested would take the unsure tokens only, and that shows."""
    target = TableDistribution((0.61, 0.005, 0.005, 0.09, 0.29))
    draft = TableDistribution((0.62, 0.37, 0.004, 0.003, 0.003))
    sampling = Sampling(temperature=1.0, method=Method.REJECTION)
    way = Way(ahead=ahead, sequence=0.0, token=0.5, context=len(PROMPT) + 2)

    def misfit() -> float:
        first = Counter((PROMPT, ids[0]) for ids in first_ids(target, sampling, way, 2000, draft).elements())
        return chi_square_z(first, lambda _: exact_law(law_of(target, PROMPT), sampling))

    assert misfit() < MOST_Z
    if not ahead:
        monkeypatch.setattr(EdgeMachine, "stop_drafting", drops_its_draft)
        assert misfit() > 1.5 * MOST_Z


def drops_its_draft(machine: EdgeMachine) -> list[Action]:
    machine._drafts = False
    return machine._go_alone()


@pytest.mark.slow
def test_an_own_token_bends_the_law_where_the_edge_drafts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sessions' passes make the cloud late, so the question about a draft token, which its probability brings
    about, arrives before or behind the pass: then the token is tested, or the target draws one of its own. Choosing by
    the value is no draw from the law. Without own tokens the ids do not even depend on the timing."""
    target = TableDistribution((0.61, 0.005, 0.005, 0.09, 0.29))
    draft = TableDistribution((0.62, 0.37, 0.004, 0.003, 0.003))
    sampling = Sampling(temperature=1.0, method=Method.REJECTION)
    way = replace(PIPESD, turn_s=4.0, sequence=0.39, token=0.0)
    found = {}
    for own_token, turn_s in ((True, 4.0), (False, 4.0), (False, 0.0)):
        if own_token:
            monkeypatch.setattr(cloud_comparing, "takes_own", lambda s, reached: True)
        seen = draw(target, draft, sampling, replace(way, turn_s=turn_s), 30_000)
        monkeypatch.undo()
        pooled: Counter[tuple[Context, int]] = Counter()
        for (_, token), count in seen.followed.items():
            pooled[PROMPT, token] += count
        found[own_token, turn_s] = pooled
    z = {
        key: chi_square_z(pooled, lambda _: exact_law(law_of(target, PROMPT), sampling))
        for key, pooled in found.items()
    }
    assert z[True, 4.0] > 2 * MOST_Z > MOST_Z > z[False, 4.0]
    assert found[False, 4.0] == found[False, 0.0]


def first_ids(
    target: Distribution, sampling: Sampling, way: Way, texts: int, draft: Distribution | None = None
) -> Counter[tuple[int, ...]]:
    """How often each beginning of three ids came, in texts of different seeds."""
    machines = Machines(target, draft or DRAFTS["bad"], sampling, way)
    return Counter(tuple(machines.generate(seed, 4)[:3]) for seed in range(texts))


def two_sample_z(found: Counter[tuple[int, ...]], direct: Counter[tuple[int, ...]]) -> float:
    """Of two samples of one size, whether they have one law; rare values are taken together."""
    pairs = [(found[key], direct[key]) for key in set(found) | set(direct)]
    rare = [pair for pair in pairs if sum(pair) < 10]
    pairs = [pair for pair in pairs if sum(pair) >= 10] + [(sum(a for a, _ in rare), sum(b for _, b in rare))]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = len(pairs) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def direct_ids(target: Distribution, sampling: Sampling, texts: int, seed: int) -> Counter[tuple[int, ...]]:
    """The same, drawn from the law itself by another generator."""
    chance = np.random.default_rng(seed)
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(texts):
        text = list(PROMPT)
        for _ in range(3):
            text.append(int(chance.choice(IDS, p=exact_law(law_of(target, text), sampling))))
        found[tuple(text[2:])] += 1
    return found


def check_beginnings(method: Method, way: str, texts: int) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, method=method)
    found = first_ids(KEYED, sampling, WAYS[way], texts)
    assert two_sample_z(found, direct_ids(KEYED, sampling, texts, 1)) < MOST_Z
    sharper = replace(sampling, temperature=0.6)
    assert two_sample_z(found, direct_ids(KEYED, sharper, texts, 2)) > MOST_Z, "another law would be seen"


@pytest.mark.parametrize("method", [Method.NOISE, Method.REJECTION])
def test_whole_texts_are_as_those_drawn_directly(method: Method) -> None:
    check_beginnings(method, "pipesd", 400)


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.NOISE, Method.REJECTION])
@pytest.mark.parametrize("way", WAYS)
def test_many_whole_texts_are_as_those_drawn_directly(method: Method, way: str) -> None:
    check_beginnings(method, way, 8000)


@pytest.mark.slow
@pytest.mark.parametrize("options", range(len(OPTIONS)))
def test_a_hundred_thousand_draws_have_the_law(options: int) -> None:
    """Every combination of options; method, draft and way of sending take turns, so that each meets each option. All
    products of options and drafts are tried where draws cost less, without machines."""
    method = [Method.NOISE, Method.REJECTION][options.bit_count() % 2]
    draft = DRAFTS[["good", "bad"][(options // 2).bit_count() % 2]]
    way = [*WAYS.values()][(options + options // 4) % len(WAYS)]
    check(KEYED, draft, Sampling(**OPTIONS[options], method=method), way, 100_000, 0.01)
