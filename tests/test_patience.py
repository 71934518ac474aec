"""When the edge asks again and when it gives up, by an exact clock: all times are multiples of 1/16 s."""

from __future__ import annotations

import pytest

from pipesd.edge.patience import GIVE_UP_FACTOR, LEAST_DEADLINE_S, MOST_DEADLINE_S, RTTS, Patience
from pipesd.errors import Refused, Unreachable

FULL = Refused("the cloud refuses: no room", 2)


def asked(patience: Patience, start_s: float, end_s: float, step_s: float = 1 / 16) -> list[float]:
    """When it is time to ask again, looked at every `step_s`."""
    looks = int((end_s - start_s) / step_s)
    return [start_s + i * step_s for i in range(looks + 1) if patience.due(start_s + i * step_s)]


@pytest.mark.parametrize(
    ("rtt_s", "pass_s", "first_s"),
    [
        (0.0, 0.0, LEAST_DEADLINE_S),
        (0.0625, 0.0, LEAST_DEADLINE_S),
        (0.25, 0.0, RTTS * 0.25),
        (0.25, 2.0, 4.0),
        (0.0, 100.0, MOST_DEADLINE_S),
        (100.0, 0.0, MOST_DEADLINE_S),
    ],
)
def test_the_first_deadline_covers_five_round_trips_and_the_longest_pass_twice(
    rtt_s: float, pass_s: float, first_s: float
) -> None:
    patience = Patience(1000.0)
    patience.start(10.0, rtt_s, pass_s)
    assert patience.wait_s(10.0) == first_s
    assert asked(patience, 10.0, 10.0 + first_s) == [10.0 + first_s]


def test_deadlines_double_up_to_a_bound() -> None:
    patience = Patience(1000.0)
    patience.start(0.0, 0.0)
    times = asked(patience, 0.0, 61.0)
    assert times == [0.5, 1.5, 3.5, 7.5, 15.5, 30.5, 45.5, 60.5]
    assert patience.wait_s(61.0) == 14.5 and patience.wait_s(100.0) == 0.0


@pytest.mark.parametrize(("rtt_s", "pass_s"), [(0.0, 0.0), (0.0, 100.0), (0.0625, 0.0)])
def test_it_asks_three_times_however_little_patience_there_is(rtt_s: float, pass_s: float) -> None:
    """A cloud that is busy for longer than that, but answers, is not given up."""
    for patience_s in (0.5, 3.0, 12.0):
        patience = Patience(patience_s)
        patience.start(0.0, rtt_s, pass_s)
        times: list[float] = []
        with pytest.raises(Unreachable):
            for look in range(10_000):
                if patience.due(look / 64):
                    times.append(look / 64)
        assert len(times) >= 3
        patience.start(0.0, rtt_s, pass_s)
        for look in range(round(64 * GIVE_UP_FACTOR * patience_s)):
            if patience.due(look / 64):
                patience.heard(look / 64 + rtt_s, own=False)


def test_a_message_of_the_opening_starts_anew_and_no_other() -> None:
    patience = Patience(1000.0)
    patience.start(0.0, 0.0)
    assert asked(patience, 0.0, 3.5) == [0.5, 1.5, 3.5]
    patience.heard(4.0, own=False)
    assert asked(patience, 4.0, 7.5) == [7.5]
    patience.heard(8.0, own=True)
    assert asked(patience, 8.0, 9.5) == [8.5, 9.5]


def test_silence_ends_it_after_the_patience_and_not_before() -> None:
    patience = Patience(12.0)
    patience.start(0.0, 0.0)
    with pytest.raises(Unreachable, match="nothing heard from the cloud for 12 s"):
        asked(patience, 0.0, 100.0)
    patience.start(0.0, 0.0)
    assert asked(patience, 0.0, 12.0) == [0.5, 1.5, 3.5, 7.5, 11.5]
    patience.heard(12.0, own=False)
    assert asked(patience, 12.0, 24.0) == [15.5, 19.5, 23.5]


def test_a_cloud_that_only_answers_probes_is_given_up_too() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    looks = iter(range(1, 100_000))
    with pytest.raises(Unreachable, match="no worker for this session for 100 s"):
        while True:
            now_s = next(looks) / 16
            patience.heard(now_s, own=now_s == 60.0)
            patience.due(now_s)
    assert GIVE_UP_FACTOR * 10.0 < now_s - 60.0 <= GIVE_UP_FACTOR * 10.0 + MOST_DEADLINE_S + 1 / 16


def test_time_in_which_the_edge_did_not_listen_is_no_silence() -> None:
    patience = Patience(12.0)
    patience.start(0.0, 0.0)
    assert patience.due(1000.0), "it asks first"
    assert asked(patience, 1000.0, 1007.0) == [1001.0, 1003.0, 1007.0]
    with pytest.raises(Unreachable):
        asked(patience, 1007.0, 1100.0)


def test_a_cloud_without_room_is_tried_when_it_says() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    patience.retry(1.0, 2.0, FULL)
    assert patience.wait_s(1.5) == 1.5
    assert not patience.retry_due(2.75) and asked(patience, 1.0, 3.0) == []
    assert patience.retry_due(3.0) and not patience.retry_due(3.0)
    # the try is a question like any other
    assert asked(patience, 3.0, 3.5) == [3.5]
    patience.retry(4.0, 0.0, FULL)
    assert 0 < patience.wait_s(4.0) <= 0.1, "however eager the cloud is"


def test_a_cloud_that_never_has_room_is_given_up_with_its_own_words() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    now_s = 0.0
    with pytest.raises(Refused) as refused:
        while now_s < 100.0:
            patience.retry(now_s, 0.5, FULL)
            now_s += 0.5
            assert patience.retry_due(now_s)
    assert refused.value is FULL and 10.0 < now_s < 12.0


def test_a_try_that_comes_late_is_still_made() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    patience.retry(1.0, 0.5, FULL)
    assert patience.retry_due(1000.0)


def test_a_cloud_that_took_us_in_meanwhile_has_our_patience_again() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    for begin_s in (0.0, 8.0, 16.0):
        patience.retry(begin_s, 0.5, FULL)
        assert patience.retry_due(begin_s + 0.5)
        patience.heard(begin_s + 1.0, own=True)
    assert asked(patience, 17.0, 17.5) == [17.5]


def test_the_next_generation_knows_nothing_of_the_last() -> None:
    patience = Patience(10.0)
    patience.start(0.0, 0.0)
    patience.retry(1.0, 5.0, FULL)
    patience.start(50.0, 0.0)
    assert patience.wait_s(50.0) == 0.5 and not patience.retry_due(60.0)
    assert asked(patience, 50.0, 50.5) == [50.5]


def test_what_has_crossed_is_answered_soon_or_asked_again() -> None:
    """A deadline that has doubled while a message crossed a thin link does not outlast the crossing."""
    patience = Patience(30.0)
    patience.start(0.0, 0.01)
    base_s = patience.wait_s(0.0)
    now_s = 0.0
    for _ in range(3):
        now_s += patience.wait_s(now_s)
        assert patience.due(now_s)
    assert patience.wait_s(now_s) > 2 * base_s
    patience.crossed(now_s)
    assert patience.wait_s(now_s) == pytest.approx(base_s)
    patience.crossed(now_s + 0.1)
    assert patience.wait_s(now_s + 0.1) == pytest.approx(base_s - 0.1), "once more puts nothing off"


def test_a_deadline_counts_from_when_the_link_has_taken_what_was_said() -> None:
    patience = Patience(1000.0)
    patience.start(0.0, 0.0)
    patience.taken(2.0)
    assert asked(patience, 0.0, 6.0) == [2.5, 3.5, 5.5]
    patience.heard(6.0, own=True)
    patience.taken(2.0)  # long ago
    assert asked(patience, 6.0, 7.5) == [6.5, 7.5]


def test_a_link_that_is_thought_to_be_busy_for_ever_hides_no_loss() -> None:
    patience = Patience(12.0)
    patience.start(0.0, 0.0)
    times = []
    for look in range(16 * 11):
        patience.taken(look / 16 + 100.0)
        times += [look / 16] * patience.due(look / 16)
    assert times == [12.0 / 3 + 0.5, 12.0 / 3 + 0.5 + 1.0, 12.0 / 3 + 0.5 + 1.0 + 2.0]
