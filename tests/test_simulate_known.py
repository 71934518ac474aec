"""The simulator against what can be reckoned by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from pipesd import simulate
from pipesd.errors import UsageError
from pipesd.sim import link_model
from pipesd.sim.link_model import SEGMENT_BYTES, Line, Link
from pipesd.sim.schedule import Schedule
from pipesd.sim.trace import Guess, Record, Trace

GAMMA_S, PASS_S, TOKEN_S = 0.007, 0.05, 0.003


def record_with(right: Sequence[bool]) -> Record:
    """A text whose guesses are right where it is said, with one id for a prompt, which needs no prefill."""
    output = tuple(range(100, 100 + len(right)))
    guesses = tuple(
        Guess(said if is_right else 7, 0.9, 0.1, 8, 0.05) for said, is_right in zip(output, right, strict=True)
    )
    wrong = Guess(9, 0.9, 0.1, 8, 0.05)
    behind = {i: (wrong,) * 31 for i, is_right in enumerate(right) if not is_right or i == len(right) - 1}
    return Record((1,), output, guesses, behind)


def pattern(tokens: int, seed: int = 0, share: float = 0.75) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < share for _ in range(tokens)]


def rounds_of(right: Sequence[bool], length: int) -> list[tuple[int, int]]:
    """(drafted, committed) of each round of a strategy that drafts so many tokens and waits for the verdict."""
    rounds, pos = [], 0
    while pos < len(right):
        drafted = min(length, len(right) - 1 - pos)
        accepted = next((i for i in range(drafted) if not right[pos + i]), drafted)
        rounds.append((drafted, accepted + 1))
        pos += accepted + 1
    return rounds


@pytest.mark.parametrize("link", [Link(), Link(latency_s=0.03), Link.hockney(0.02), Link.streamed(0.05, 0.01)], ids=str)
def test_the_cloud_alone_takes_a_pass_for_each_token(link: Link) -> None:
    ran = simulate([record_with(pattern(70))], link=link, gamma_s=GAMMA_S, pass_s=PASS_S, token_s=TOKEN_S,
                   settings={"strategy": "cloud"})  # fmt: skip
    delayed_ms = 1e3 * link.gap_s / 70  # the first verdict may have to wait behind OPENED
    assert ran.tpt_ms == pytest.approx(1e3 * (PASS_S + TOKEN_S), abs=delayed_ms + 1e-3)
    assert ran.stats["cloud_s_per_1000_tokens"] == pytest.approx(1e3 * (PASS_S + TOKEN_S))


def test_the_edge_alone_takes_gamma_for_each_token() -> None:
    ran = simulate([record_with(pattern(40))], gamma_s=GAMMA_S, pass_s=PASS_S, settings={"strategy": "local"})
    assert ran.tpt_ms == pytest.approx(1e3 * GAMMA_S, abs=1e-3)
    assert ran.stats["cloud_s_per_1000_tokens"] == 0.0


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("fat_bytes", [0, 5000])
@pytest.mark.parametrize("hockney", [False, True])
def test_vanilla_takes_drafting_round_trip_and_pass_for_each_round(length: int, fat_bytes: int, hockney: bool) -> None:
    right, alpha_s, rate = pattern(80, seed=length), 0.011, 1e6
    make = Link.hockney if hockney else lambda alpha_s, **rest: Link.streamed(alpha_s, 0.0, **rest)
    link = make(alpha_s, up_bytes_per_draft_token=fat_bytes, **({"up_bytes_per_s": rate} if fat_bytes else {}))
    ran = simulate([record_with(right)], link=link, gamma_s=GAMMA_S, pass_s=PASS_S, token_s=TOKEN_S,
                   settings={"strategy": "vanilla", "draft_length": length})  # fmt: skip
    rounds = rounds_of(right, length)
    expected_s = sum(
        drafted * (GAMMA_S + fat_bytes / rate) + 2 * alpha_s + PASS_S + (drafted + 1) * TOKEN_S for drafted, _ in rounds
    )
    # Time counts from OPENED, which is looked for between two draft tokens; in line, a DRAFT waits for the OPEN.
    opened_s = 2 * alpha_s
    if length * GAMMA_S > opened_s:
        opened_s = math.ceil(opened_s / GAMMA_S) * GAMMA_S
    expected_s += (max(0.0, alpha_s - length * GAMMA_S) if hockney else 0.0) - opened_s
    payload_s = 60 * len(rounds) / rate if fat_bytes else 0.0
    assert ran.stats["rounds"] == len(rounds) and ran.stats["drafted"] == sum(drafted for drafted, _ in rounds)
    assert ran.stats["tpt_ms"] * 80 / 1e3 == pytest.approx(expected_s, abs=1e-4 + payload_s)


def test_messages_of_hockney_stand_in_line_and_streamed_ones_overlap() -> None:
    """Eight tokens, each sent at once: with hockney the last has waited behind all others."""
    right, alpha_s = [True] * 9 * 6, 0.02
    elapsed_s = {}
    for link in (Link.hockney(alpha_s), Link.streamed(alpha_s, 0.001)):
        ran = simulate([record_with(right)], link=link, gamma_s=GAMMA_S, pass_s=PASS_S,
                       settings={"strategy": "vanilla", "draft_length": 8, "batching": "immediate"})  # fmt: skip
        elapsed_s[link] = ran.tpt_ms * len(right) / 1e3
    queued_s, overlapped_s = elapsed_s.values()
    rounds = 6
    later_s = (GAMMA_S + 8 * alpha_s) - (8 * GAMMA_S + alpha_s)  # how much later the eighth is there, a round
    # the first round ends later by what its OPEN and OPENED take; its last two tokens are never drafted alike
    assert queued_s - overlapped_s == pytest.approx(rounds * later_s, abs=2 * alpha_s)


def test_two_users_share_passes() -> None:
    """The first one's pass has begun when the second one's prompt is there; from then on each pass serves both."""
    tokens, each_s = 30, PASS_S + TOKEN_S
    records = [record_with(pattern(tokens, seed)) for seed in (1, 2)]
    ran = simulate(records, link=Link(latency_s=0.01), gamma_s=GAMMA_S, pass_s=PASS_S, token_s=TOKEN_S, users=2,
                   settings={"strategy": "cloud"})  # fmt: skip
    shared_s = PASS_S + 2 * TOKEN_S
    busy_s = 2 * each_s + (tokens - 1) * shared_s
    assert ran.stats["cloud_s_per_1000_tokens"] == pytest.approx(1e3 * busy_s / (2 * tokens))
    assert [stats["user"] for stats in ran.each] == [0, 1]
    first_s, second_s = (stats["tpt_ms"] * tokens / 1e3 for stats in ran.each)
    assert first_s == pytest.approx(each_s + (tokens - 1) * shared_s, abs=1e-4)
    assert second_s == pytest.approx(each_s + (tokens - 1) * shared_s, abs=1e-4)


def test_records_are_dealt_out_to_users() -> None:
    records = [record_with(pattern(20, seed)) for seed in range(5)]
    ran = simulate(records, gamma_s=GAMMA_S, pass_s=PASS_S, users=2, max_tokens=12, settings={"strategy": "hsl"})
    assert [(stats["record"], stats["user"]) for stats in ran.each] == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert list(ran.ids) == [record.output[:12] for record in records]


def test_a_text_that_ends_by_itself() -> None:
    right = pattern(20, 3)
    cut, ended = (Record(r.prompt, r.output, r.guesses, r.behind, finish=finish)
                  for r in [record_with(right)] for finish in ("length", "stop"))  # fmt: skip
    ran = simulate([ended], gamma_s=GAMMA_S, pass_s=PASS_S, settings={"strategy": "vanilla"})
    assert ran.ids == (cut.output,)


def test_a_draft_ends_at_what_would_end_the_text() -> None:
    """Drafts of up to 8; every wrong guess is id 7, or only another id than those that end a text."""
    right = pattern(60, 2)
    record = record_with(right)
    trace = Trace("draft", "target", "", 512, (7,), (record,))
    rounds = rounds_of(right, 8)
    place, ending = 0, 0
    for drafted, committed in rounds:
        wrong = next((i + 1 for i in range(drafted) if not right[place + i]), drafted)
        ending, place = ending + wrong, place + committed
    run = {"gamma_s": GAMMA_S, "pass_s": PASS_S, "settings": {"strategy": "vanilla", "draft_length": 8}}
    without = simulate([record], **run)
    drafted = simulate(trace.records, **run).stats["drafted"]
    assert (drafted, without.stats["drafted"]) == (ending, sum(drafted for drafted, _ in rounds))
    assert ending < without.stats["drafted"] and simulate(trace.records, **run).ids == without.ids


# -- lines ------------------------------------------------------------------------------------------------------------


def line(link: Link, seed: str = "") -> Line:
    made = Line(link, "up", seed)
    made.begin(0.0)
    return made


def test_a_line_serialises_and_then_delays() -> None:
    made = line(Link.streamed(0.05, 0.01, up_bytes_per_s=1000.0, message_bytes=0, up_bytes_per_draft_token=100))
    assert made.arrival_s(1.0, 10) == pytest.approx(1.0 + 0.01 + 0.01 + 0.04)
    assert made.arrival_s(1.0, 10, 2) == pytest.approx(1.02 + 0.01 + 0.21 + 0.04)


def test_bandwidths_change_while_a_message_is_under_way() -> None:
    schedule = Schedule(1.0, (0.008, 0.016), (1.0, 1.0))  # 1000 and 2000 bytes/s up
    made = line(Link(bandwidths=schedule, message_bytes=0))
    assert made.arrival_s(0.5, 1500) == pytest.approx(1.5)
    assert made.arrival_s(0.5, 1500) == pytest.approx(2.0 + 0.5)


def test_jitter_keeps_the_order() -> None:
    made = line(Link(latency_s=0.01, jitter_s=0.05), "1")
    arrivals = [made.arrival_s(0.001 * i, 20) for i in range(200)]
    assert arrivals == sorted(arrivals)  # type: ignore[type-var]
    late = [arrived - 0.001 * i - 0.01 for i, arrived in enumerate(arrivals) if arrived is not None]
    assert min(late) >= 0.0 and 0.03 < max(late) <= 0.051


def test_a_lost_segment_comes_later_and_holds_up_what_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = line(Link(latency_s=0.03, loss=0.1))
    drawn = iter([0.05, 0.01, 0.9, 0.9])  # lost, its repetition lost, then it comes; the next is not lost
    monkeypatch.setattr(made._chance, "random", lambda: next(drawn))
    rto_s = 2 * 0.03 + 0.2
    assert made.arrival_s(0.0, 100) == pytest.approx(0.03 + rto_s + 2 * rto_s)
    assert made.arrival_s(0.1, 100) == pytest.approx(0.03 + 3 * rto_s)


def test_a_segment_lost_before_others_is_missed_a_round_trip_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = line(Link(latency_s=0.03, loss=0.1))
    drawn = iter([0.9, 0.99])  # the last one is not lost, one of the five before it is
    monkeypatch.setattr(made._chance, "random", lambda: next(drawn))
    assert made.arrival_s(0.0, 6 * SEGMENT_BYTES - 2) == pytest.approx(0.03 + 0.06)


def test_a_cut_loses_what_is_under_way() -> None:
    link = Link(latency_s=0.1, cuts=[(1.0, 0.5)])
    made = line(link)
    assert made.arrival_s(0.85, 10) == pytest.approx(0.95)
    assert made.arrival_s(0.95, 10) is None
    assert not made.away(0.99) and made.away(1.0) and made.number(0.99) == 0 and made.number(1.0) == 1
    back_s = 1.0 + link.away_s(0.5)
    assert made.away(back_s - 1e-6) and not made.away(back_s + 1e-6)
    assert made.arrival_s(back_s + 0.01, 10) == pytest.approx(back_s + 0.11)


def test_after_a_cut_the_edge_tries_again_at_growing_intervals() -> None:
    """At 50, 150, 350, 750 ms, then 0.8 s and at most 1 s later; then come the handshakes."""
    tries = [0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55]
    for lasts_s in (0.01, 0.1, 0.3, 0.5, 1.0, 2.0, 3.5):
        assert Link().away_s(lasts_s) == pytest.approx(next(at_s for at_s in tries if at_s >= lasts_s))
    assert Link(latency_s=0.1).away_s(0.01) == pytest.approx(0.05 + link_model.HANDSHAKE_RTTS * 0.2)


@pytest.mark.parametrize(
    "given",
    [
        {"latency_s": -0.1}, {"gap_s": float("inf")}, {"up_bytes_per_s": 0.0}, {"down_bytes_per_s": float("nan")},
        {"loss": 1.0}, {"jitter_s": float("nan")}, {"cuts": [(0.0, 0.0)]}, {"cuts": [1, 2]}, {"cuts": [(1, 2, 3)]},
        {"latency_s": "1"}, {"gap_s": None}, {"up_bytes_per_s": "1"}, {"loss": "0"}, {"loss": True},
        {"bandwidths": 1e6},
        {"bandwidths": Schedule(1.0, (1.0,), (1.0,)), "up_bytes_per_s": 1e6},
    ],
    ids=str,
)  # fmt: skip
def test_links_out_of_bounds_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="link: "):
        Link(**given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gap"):
        Link.streamed(0.01, 0.02)
    with pytest.raises(UsageError, match="link: gap_s beside alpha"):
        Link.hockney(0.1, gap_s=0.2)
    with pytest.raises(UsageError, match=r"a gap of 0\.01 s; give one from 0 to alpha, 'x' s"):
        Link.streamed("x", 0.01)  # type: ignore[arg-type]
