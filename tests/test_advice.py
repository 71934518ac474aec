"""What is advised where the answer is known: drafts that are always right or never, no round trip and long ones.

By hand: a round of vanilla takes its drafting, the round trip and a pass. The first takes less, since its tokens are
drafted and sent while the prompt is on its way and is read, which takes a pass too: from then on, when the time per
token begins, only what of drafting and reading is longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from pipesd.sim.advice import Adviser, Place, break_even_rtt_s, interval, pooled_s, split, tuned
from pipesd.sim.link_model import Link
from pipesd.sim.synthetic import synthetic_trace
from pipesd.sim.trace import Guess, Record

CLOUD, VANILLA = ({"strategy": name} for name in ("cloud", "vanilla"))
SHORT, FOUR = ({**VANILLA, "draft_length": count} for count in (1, 4))
PASS_S, GAMMA_S = 0.04, 0.006
TOKENS = 50


def place(rtt_s: float, **other: float) -> Place:
    return Place(**{"link": Link(latency_s=rtt_s / 2), "gamma_s": GAMMA_S, "pass_s": PASS_S, **other})  # type: ignore[arg-type]


def record(wrong: Sequence[int] = (), tokens: int = TOKENS) -> Record:
    """The letters in turn; the draft model is wrong at these places, and goes on with rubbish."""
    output = tuple(97 + i % 20 for i in range(tokens))
    guesses = tuple(Guess(120 if i in wrong else output[i], 0.9, 0.3, 121, 0.05) for i in range(tokens))
    rubbish = (Guess(122, 0.5, 1.0, 121, 0.1),) * 31
    return Record((80, 58), output, guesses, {**dict.fromkeys(wrong, rubbish), tokens - 1: rubbish})


def adviser(rtt_s: float, records: Sequence[Record], **rows: Any) -> Adviser:
    return Adviser(place(rtt_s), records, records, rows=rows or None, samples=2)


def test_drafts_that_are_always_right_go_as_long_as_they_may() -> None:
    """85 tokens are 5 rounds of 16 draft tokens and the target's own."""
    found = adviser(0.1, [record(tokens=85)], cloud=CLOUD, vanilla=VANILLA).expected()
    assert [each.strategy for each in found] == ["vanilla", "cloud"]
    assert found[0].settings["draft_length"] == 16 and found[0].acceptance == 1.0
    assert found[0].tpt_s == pytest.approx((16 * GAMMA_S + 4 * (16 * GAMMA_S + 0.1 + PASS_S)) / 85, rel=0.001)
    assert found[1].tpt_s == pytest.approx(PASS_S, rel=0.01)
    assert found[0].cloud_s_per_1000_tokens == pytest.approx(1000 * PASS_S / 17, rel=0.02)
    assert found[1].cloud_s_per_1000_tokens == pytest.approx(1000 * PASS_S, rel=0.02)


def test_drafts_that_are_never_right_lose_to_the_cloud_at_any_round_trip() -> None:
    never = adviser(0.02, [record(range(20), 20)], cloud=CLOUD, vanilla=SHORT, pipesd={"strategy": "pipesd"})
    for rtt_s in (None, 0.5):
        assert never.expected(rtt_s)[0].strategy == "cloud"
    assert never.change(above=True, most_s=0.1) is None and never.change(above=False) is None


def test_without_a_round_trip_drafts_win_where_they_are_cheap_and_at_a_long_one_the_cloud_does() -> None:
    good = [record(range(7, 64, 8), 64)]
    assert adviser(0.0, good).expected()[0].strategy != "cloud"
    assert adviser(5.0, good).expected()[0].strategy == "cloud"


def test_the_crossing_is_the_one_computed_by_hand() -> None:
    """Four right, one wrong, and so on: a round of 4 drafts brings 5 tokens, and no other length brings more. So 10
    rounds, 9 of them whole, stand against 50 passes."""
    right = [record(range(4, TOKENS, 5))]
    by_hand_s = (TOKENS * PASS_S - PASS_S) / 9 - 4 * GAMMA_S - PASS_S
    near, far = (adviser(rtt_s, right, cloud=CLOUD, vanilla=FOUR) for rtt_s in (0.02, 0.5))
    change, back = near.change(above=True, close=0.004), far.change(above=False, close=0.004)
    assert change is not None and change.strategy == "cloud"
    assert change.rtt_s == pytest.approx(by_hand_s, rel=0.005)
    assert adviser(0.02, right, vanilla=VANILLA).expected()[0].settings == FOUR
    assert back is not None and back.strategy == "vanilla" and back.rtt_s == pytest.approx(by_hand_s, rel=0.005)
    assert near.change(above=True, most_s=0.1) is None and near.change(above=False) is None
    later = near.change(above=True, margin=0.1, close=0.004)
    by_hand_s = (1.1 * TOKENS * PASS_S - PASS_S) / 9 - 4 * GAMMA_S - PASS_S
    assert later is not None and later.rtt_s == pytest.approx(by_hand_s, rel=0.005)


@pytest.mark.parametrize(("acceptance", "length"), [(0.6, 2), (0.8, 4), (0.9, 8)])
def test_vanilla_with_one_chance_everywhere_follows_the_closed_form(acceptance: float, length: int) -> None:
    records = synthetic_trace(2, 400, acceptance=acceptance, seed=3).records
    right = sum(one.right(i) for one in records for i in range(400)) / 800
    limit_s = break_even_rtt_s(right, length, PASS_S, GAMMA_S)
    rows = {"cloud": CLOUD, "vanilla": {**VANILLA, "draft_length": length}}
    by_name = {each.strategy: each.tpt_s for each in Adviser(place(limit_s), records, records, rows=rows).expected()}
    assert by_name["vanilla"] == pytest.approx(by_name["cloud"], rel=0.04)


def test_the_closed_form_at_its_ends() -> None:
    assert break_even_rtt_s(1.0, 4, 0.04, 0.006) == pytest.approx(4 * 0.034)
    assert break_even_rtt_s(0.0, 4, 0.04, 0.006) == pytest.approx(-4 * 0.006)
    assert break_even_rtt_s(0.999999, 4, 0.04, 0.006) == pytest.approx(4 * 0.034, rel=1e-4)
    assert break_even_rtt_s(0.5, 2, 0.04, 0.0) == pytest.approx(0.75 * 0.04)


def test_another_round_trip_changes_the_latency_and_nothing_else() -> None:
    here = Place(link=Link(latency_s=0.01, gap_s=0.002, up_bytes_per_s=1e6), gamma_s=0.006, pass_s=0.04, token_s=0.001)
    assert here.rtt_s == pytest.approx(0.024)
    further, none = here.at(0.1), here.at(0.001)
    assert (further.link.latency_s, further.link.gap_s) == (pytest.approx(0.048), 0.002)
    assert (none.link.latency_s, none.link.gap_s) == (0.0, pytest.approx(0.0005))
    assert (further.gamma_s, further.pass_s, further.token_s, further.link.up_bytes_per_s) == (0.006, 0.04, 0.001, 1e6)


def test_what_is_judged_was_not_tuned_on_where_the_sample_allows() -> None:
    records = [record(tokens=10 + i) for i in range(7)]
    for count in range(2, 8):
        tuning, judged = split(records[:count])
        assert [*tuning, *judged] == records[:count] and tuning and judged and len(tuning) <= len(judged) + 1
    assert split(records[:1]) == (records[:1], records[:1])


def test_the_best_of_all_draft_lengths_is_taken_and_thresholds_are_searched_for() -> None:
    tried: list[dict[str, Any]] = []

    def cost(settings: Any) -> float:
        tried.append(dict(settings))
        return float(abs(settings.get("draft_length", 0) - 5) + settings.get("token_threshold", 0.0))

    assert tuned(VANILLA, cost, 3)["draft_length"] == 5 and len(tried) == 16
    tried.clear()
    assert tuned({"strategy": "hsl"}, cost, 6) == min(tried, key=lambda each: each["token_threshold"])
    assert len(tried) == 6 and tried[0]["token_threshold"] == 0.5, "the setting in force comes first"
    assert tuned(CLOUD, cost, 6) == CLOUD and len(tried) == 6
    given = {**VANILLA, "draft_length": 3}
    assert tuned(given, cost, 6) == given and len(tried) == 6, "what is given stays"


def test_intervals_come_from_the_prompts() -> None:
    even = [(10, 0.5)] * 5
    assert pooled_s(even) == pytest.approx(0.05) and interval(even) == pytest.approx((0.05, 0.05))
    uneven = [(10, 0.4), (20, 1.2), (10, 0.6), (20, 0.8)]
    low, high = interval(uneven)
    assert low < pooled_s(uneven) < high
    slower = [(tokens, 1.3 * took_s) for tokens, took_s in uneven]
    assert interval(slower, uneven) == pytest.approx((1.3, 1.3)), "pairs know no difference between prompts"
    assert all(map(math.isnan, interval(even[:1])))


def test_the_same_sample_gives_the_same_advice() -> None:
    records = synthetic_trace(2, 40, acceptance=0.75, seed=1).records
    first, again = (Adviser(place(0.03), *split(records), samples=2).expected() for _ in range(2))
    assert first == again and {each.strategy for each in first} == {"cloud", "vanilla", "hsl", "edgellm", "pipesd"}
