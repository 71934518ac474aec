"""What counts as a round trip: of drafts on links that are idle, busy, never idle, or faster than they are known.

A small link is simulated by hand: messages occupy it one after the other, verdicts come back as the cloud is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipesd.edge.round_trips import RoundTrips
from pipesd.policy.monitor import Monitor
from pipesd.policy.sending import Uplink
from pipesd.protocol.messages import Counters, Draft, Verdict
from pipesd.sim.link_model import Link
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace

PASS_S = 0.03
LATENCY_S = 0.02  # one way


class Told(Monitor):
    """A monitor that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.trips: list[tuple[int, float]] = []

    def round_trip(self, tokens: int, took_s: float, cloud_s: float, lag_s: float = 0.0) -> None:
        self.trips.append((tokens, round(took_s - cloud_s, 9)))


class Run:
    """An edge on a link that takes `gap_s` and `beta_s`, known as `known`; the cloud is one machine."""

    def __init__(self, gap_s: float, beta_s: float, known: tuple[float, float] | None = None) -> None:
        self.told, self.uplink = Told(), Uplink()
        self.uplink.adopt(*(known or (gap_s, beta_s)))
        self.trips = RoundTrips(self.told, self.uplink)
        self.trips.restart(1)
        self.gap_s, self.beta_s = gap_s, beta_s
        self.free_s = self.cloud_s = 0.0
        self.pos = self.epoch = self.passes = 0
        self.hear(self.send(0.0, 1, nav=True), 1)  # behind the prompt, of which nothing is known
        assert self.told.trips == []

    def send(self, now_s: float, tokens: int, *, nav: bool = False, again: bool = False) -> float:
        """Returns when the verdict comes, if one is asked for."""
        draft = Draft(1, 1, self.epoch, self.pos, (7,) * tokens, self.pos, nav, again)
        self.trips.sent(draft, now_s)
        self.uplink.sent(now_s, tokens)
        self.pos += tokens
        self.free_s = max(now_s, self.free_s) + self.gap_s + self.beta_s * tokens
        if nav:
            self.cloud_s = max(self.cloud_s, self.free_s + LATENCY_S) + PASS_S
        return self.cloud_s + LATENCY_S

    def hear(self, now_s: float, known: int, *, counted: bool = True) -> None:
        """The verdict on a draft comes that commits the positions before `known`."""
        self.passes += 1
        counters = Counters(self.passes, known, 0, round(self.passes * PASS_S * 1e4)) if counted else None
        self.trips.received(Verdict(1, 1, self.epoch, known - 1, (7,), counters=counters), now_s, 0.0)


def line_s(run: Run, tokens: int) -> float:
    return pytest.approx(2 * LATENCY_S + run.gap_s + run.beta_s * tokens)  # type: ignore[return-value]


def test_a_draft_on_an_idle_link_is_a_round_trip() -> None:
    run = Run(0.01, 0.005)
    run.hear(run.send(1.0, 4, nav=True), 5)
    assert run.told.trips == [(4, line_s(run, 4))]


def test_what_follows_on_the_busy_link_is_part_of_it() -> None:
    run = Run(0.01, 0.1)
    run.send(1.0, 2)
    run.hear(run.send(1.1, 3, nav=True), 6)
    assert run.told.trips == [(5, line_s(run, 5))]


def test_what_went_before_on_a_link_that_was_idle_since_is_not() -> None:
    run = Run(0.01, 0.1)
    run.send(1.0, 2)
    run.hear(run.send(1.3, 3, nav=True), 6)
    assert run.told.trips == [(3, line_s(run, 3))]


def test_many_messages_in_a_row_tell_nothing() -> None:
    """Each takes a gap off, and what is wrong with it would be laid to β."""
    run = Run(0.01, 0.1)
    for _ in range(2):
        run.send(1.0, 1)
    run.hear(run.send(1.0, 3, nav=True), 6)
    assert run.told.trips == []
    run.hear(run.send(3.0, 1, nav=True), 7)
    assert run.told.trips == [(1, line_s(run, 1))]


def test_a_verdict_ends_the_round_trip_of_its_own_draft() -> None:
    run = Run(0.001, 0.05)
    first_s = run.send(1.0, 1, nav=True)
    second_s = run.send(1.08, 1, nav=True)
    assert first_s > 1.08 and second_s > first_s + PASS_S
    run.hear(first_s, 2)
    third_s = run.send(first_s + 0.01, 1, nav=True)
    run.hear(second_s, 3)
    run.hear(third_s, 4)
    assert run.told.trips == [(1, line_s(run, 1))] * 3


def test_what_waited_at_the_cloud_is_no_round_trip() -> None:
    run = Run(0.001, 0.0)
    first_s, second_s = run.send(1.0, 1, nav=True), run.send(1.01, 1, nav=True)
    run.hear(first_s, 2)
    run.hear(second_s, 3)
    assert run.told.trips == [(1, line_s(run, 1))]


def test_what_an_earlier_verdict_decided_is_not_waited_for() -> None:
    """The target's own token was the next draft's: its verdict never comes."""
    run = Run(0.001, 0.05)
    first_s = run.send(1.0, 1, nav=True)
    run.send(1.08, 1, nav=True)
    run.hear(first_s, 3)
    run.cloud_s = 0.0
    run.hear(run.send(2.0, 1, nav=True), 4)
    assert run.told.trips == [(1, line_s(run, 1))] * 2


def test_a_draft_of_another_branch_ends_no_round_trip_of_a_dead_one() -> None:
    run = Run(0.001, 0.05)
    run.send(1.0, 3, nav=True)
    run.epoch, run.pos, run.cloud_s = 1, 2, 0.0
    run.hear(run.send(2.0, 1, nav=True), 3)
    assert run.told.trips == [(1, line_s(run, 1))]


def test_a_repeat_and_what_is_sent_behind_it_are_no_round_trips() -> None:
    run = Run(0.001, 0.05)
    run.send(1.0, 1, nav=True)
    run.pos = 1
    run.hear(run.send(1.2, 1, nav=True, again=True), 2)
    run.hear(run.send(1.25, 1, nav=True), 3)
    run.hear(run.send(3.0, 1, nav=True), 4)
    assert len(run.told.trips) == 1


def test_a_verdict_without_the_time_of_the_cloud_ends_the_wait_but_tells_nothing() -> None:
    run = Run(0.001, 0.05)
    run.hear(run.send(1.0, 1, nav=True), 2, counted=False)
    assert run.told.trips == []


def test_a_link_that_is_thought_to_be_slow_does_not_hide_that_it_is_idle() -> None:
    """At the pace that is known the link would never be idle; that a verdict is there shows that it was."""
    run = Run(0.01, 0.02, known=(0.01, 0.2))
    run.uplink.free_s = 0.0
    verdict_s = run.send(1.0, 1, nav=True)
    busy = []
    for known in range(2, 9):
        run.hear(verdict_s, known)
        busy.append(run.uplink.busy_s(verdict_s))
        verdict_s = run.send(verdict_s + 0.01, 1, nav=True)
    assert run.told.trips == [(1, line_s(run, 1))] * 7
    assert max(busy) == 0.0


REGIMES = {
    "fat": Link.hockney(0.025, up_bytes_per_s=2.5e6, down_bytes_per_s=25e6, up_bytes_per_draft_token=290_304),
    "faster": Link.hockney(0.025, up_bytes_per_s=10e6, down_bytes_per_s=25e6, up_bytes_per_draft_token=290_304),
    "thin": Link.streamed(0.025, 0.000_05, up_bytes_per_s=2.5e6, down_bytes_per_s=25e6),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "rare": {"sequence_threshold": 0.1, "token_threshold": 0.45},
    "often": {"sequence_threshold": 0.8, "token_threshold": 0.9},
    "one": {"trigger": "fixed", "draft_length": 1, "waiting": "draft"},
}


@pytest.mark.parametrize("rule", SETTINGS)
@pytest.mark.parametrize("name", REGIMES)
def test_a_link_is_known_although_it_is_drafted_ahead(name: str, rule: str) -> None:
    link = replace(REGIMES[name], jitter_s=0.002)
    records = synthetic_trace(3, 100, acceptance=0.5, seed=4).records
    settings = {"strategy": "pipesd", "tuning": "off", "link_model": "streamed" if name == "thin" else "hockney"}
    run = simulate(records, link=link, gamma_s=0.036, pass_s=PASS_S, settings={**settings, **SETTINGS[rule]})
    told = run.each[-1]
    assert told["alpha_ms"] == pytest.approx(26.0, rel=0.08)  # half of the jitter is in it
    beta_ms = 1e3 * link.up_bytes_per_draft_token / link.up_bytes_per_s
    assert (told["beta_ms"] or 0.0) == pytest.approx(beta_ms, rel=0.05, abs=0.1)


@pytest.mark.parametrize("strategy", ["pipesd", "vanilla"])
def test_a_draft_that_is_still_going_into_the_link_is_no_silence(strategy: str, tmp_path: Path) -> None:
    """Eleven tokens take 1.3 s and more of it; nothing is asked meanwhile that would come in the way of the verdict."""
    records = synthetic_trace(1, 40, acceptance=0.8, seed=4).records
    trigger = {"trigger": "fixed", "tuning": "off"} if strategy == "pipesd" else {}
    events = tmp_path / "events.jsonl"
    settings = {"strategy": strategy, "draft_length": 11, "link_model": "hockney", "events": str(events), **trigger}
    simulate(records, link=REGIMES["fat"], gamma_s=0.036, pass_s=PASS_S, settings=settings)
    said = events.read_text()
    assert '"nav":true' in said and '"deadline"' not in said and '"again":true' not in said


def test_a_late_verdict_of_an_earlier_opening_tells_nothing() -> None:
    """Its sums are those of another opening."""
    run = Run(0.001, 0.01)
    passes: list[float] = []
    run.told.passed = lambda spent_s, verified: passes.append(spent_s)  # type: ignore[method-assign]
    run.trips.restart(2)
    run.trips.sent(Draft(1, 2, 0, 0, (7,), 0, True, False), 10.0)
    run.trips.received(Verdict(1, 1, 0, 0, (7,), counters=Counters(9, 400, 0, 50_000)), 10.1, 0.0)
    assert passes == []
    run.trips.received(Verdict(1, 2, 0, 0, (7,), counters=Counters(1, 1, 0, 300)), 10.2, 0.0)
    assert passes == [pytest.approx(0.03)]
