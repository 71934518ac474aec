"""Measuring a link: on virtual ones, whose figures are set, it finds these figures, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.clock import VirtualClock
from pipesd.edge.link import LinkConfig, plan_values
from pipesd.edge.link_figures import LinkFigures, Rate, figures_of, median_interval, quantile, to_ms
from pipesd.edge.link_measuring import SIZES, Effort, measure
from pipesd.edge.link_probe import Prober, frame_bytes
from pipesd.edge.link_report import NARROWEST, describe
from pipesd.errors import ProtocolError, Refused, Unreachable, UsageError
from pipesd.policy.estimate import fit_line
from pipesd.protocol.messages import Draft, Error, ErrorCode, Probe, Probed, ProbeStatus
from pipesd.protocol.wire import encode
from tests.links import SEND_S, VirtualLink, answered

EFFORT = Effort(repeats=10, token_bytes=0, seconds=8.0, seed=0)
EMPTY_BYTES = frame_bytes(0, 0)


def measured(link: VirtualLink, **effort: int | float) -> LinkFigures:
    return measure(link, link.clock, dataclasses.replace(EFFORT, **effort), connect_s=5.0)  # type: ignore[arg-type]


def usual(**settings: object) -> VirtualLink:
    """20 ms one way, 20 Mbit/s up and 40 down."""
    given = {"delay_s": 0.02, "up_bytes_per_s": 2.5e6, "down_bytes_per_s": 5e6, **settings}
    return VirtualLink(VirtualClock(), **given)  # type: ignore[arg-type]


# ---- what is measured


@pytest.mark.parametrize("delay_s", [0.0001, 0.01, 0.05, 0.3])
@pytest.mark.parametrize(("up_mbps", "down_mbps"), [(1, 10), (20, 200), (100, 40)])
def test_what_was_set_is_found(delay_s: float, up_mbps: float, down_mbps: float) -> None:
    up, down = up_mbps * 1e6 / 8, down_mbps * 1e6 / 8
    figures = measured(usual(delay_s=delay_s, up_bytes_per_s=up, down_bytes_per_s=down))
    answer_bytes = len(encode(answered(Probe(0, 0, 1 << 16))))
    alpha_s = delay_s + (EMPTY_BYTES / up + answer_bytes / down + SEND_S) / 2
    assert figures.alpha_s == pytest.approx(alpha_s, rel=0.01)
    assert figures.latency_s == pytest.approx(alpha_s, rel=0.01)
    assert figures.beta_s is not None and figures.up is not None and figures.down is not None
    if figures.beta_known:
        assert figures.beta_s == pytest.approx(4 / up, rel=0.1)  # 4 bytes, and the header's own steps
    assert figures.up.bits_per_s == pytest.approx(up * 8, rel=0.05)
    assert figures.down.bits_per_s == pytest.approx(down * 8, rel=0.05)
    low, high = figures.alpha_interval
    assert low <= figures.alpha_s <= high
    assert figures.lost == 0 and figures.jitter_s < 1e-4


@pytest.mark.parametrize("token_bytes", [1000, 20_000, 1 << 16])
def test_fat_tokens_have_their_own_beta(token_bytes: int) -> None:
    link = usual()
    figures = measured(link, token_bytes=token_bytes)
    assert figures.beta_s == pytest.approx((token_bytes + 4) / 2.5e6, rel=0.01)
    assert figures.alpha_s == pytest.approx(0.02, rel=0.01)
    assert figures.line.r2 > 0.999 and figures.token_bytes == token_bytes + 4


def test_frames_have_the_bytes_of_real_drafts() -> None:
    link = usual(delay_s=0.002)
    measured(link)
    wanted = {frame_bytes(size, 0) for size in SIZES}
    counts = Counter(link.frame_bytes)
    assert all(counts[length] >= EFFORT.repeats for length in wanted)
    assert counts[EMPTY_BYTES] >= 2 * EFFORT.repeats
    assert frame_bytes(20, 0) == len(encode(Draft(1 << 63, 1, 3, 600, tuple(range(20)), 590)))
    assert frame_bytes(20, 100) == frame_bytes(20, 0) + 2000
    assert 1 not in counts and min(counts) > 10, "no probe is smaller than a frame"


@settings(max_examples=60)
@given(st.integers(0, 1 << 18))
def test_a_probe_has_the_bytes_asked_for(length: int) -> None:
    link = usual()
    Prober(link, link.clock, 5.0).round_trip(length)
    assert abs(link.frame_bytes[0] - max(length, len(encode(Probe(0, 0, 1 << 16))))) <= 2


def test_the_payload_cannot_be_compressed() -> None:
    link = usual()
    Prober(link, link.clock, 5.0).round_trip(5000)
    assert len(set(link.probes[0].payload)) > 200


def test_the_gap_is_what_a_message_occupies_and_never_above_alpha() -> None:
    figures = measured(usual(message_s=0.002))
    assert figures.gap_s == pytest.approx(0.002 + EMPTY_BYTES / 2.5e6, rel=0.01)
    slow = measured(usual(delay_s=0.0, message_s=0.004))
    assert slow.gap_s == pytest.approx(slow.alpha_s), "of alpha, 2 ms one way, it is a part"


def test_sizes_come_in_random_order_so_that_drift_is_no_slope() -> None:
    def drifting(number: int, probe: Probe) -> float:
        return number * 1e-5

    figures = measured(usual(up_bytes_per_s=2e7, fate=drifting), repeats=30)
    assert figures.beta_s is not None and figures.beta_s < 2e-5
    orders = [[len(p.payload) for p in link.probes] for link in (usual(), usual(), usual()) for _ in [measured(link)]]
    assert orders[0] == orders[1], "the seed decides"
    other = usual()
    measured(other, seed=1)
    assert [len(p.payload) for p in other.probes] != orders[0]


def test_slow_first_probes_are_thrown_away() -> None:
    """50 times as slow at first, as connections and processors that wake up are."""
    slow = measured(usual(fate=lambda number, probe: 2.0 if number < 3 else 0.0))
    assert slow.alpha_s == pytest.approx(measured(usual()).alpha_s, rel=0.001)
    assert slow.rtt_s[2] < 0.045 and slow.jitter_s < 1e-3


def test_the_warm_up_lasts_until_round_trips_are_alike() -> None:
    link = usual(fate=lambda number, probe: 0.05 if number < 10 and number % 3 else 0.0)
    measured(link, seconds=60)
    assert next(k for k, length in enumerate(link.frame_bytes) if length >= 1000) == 12, (
        "10, 11 and one before were alike"
    )


def test_jitter_is_found_and_harms_alpha_little() -> None:
    chance = random.Random(3)
    figures = measured(usual(fate=lambda number, probe: chance.expovariate(1000)), repeats=30)
    assert figures.alpha_s == pytest.approx(0.0204, rel=0.02)
    assert figures.jitter_s == pytest.approx(0.0023, rel=0.4)  # ln 20 - ln 2 of the mean
    least_s, middle_s, most_s = figures.rtt_s
    assert least_s < middle_s < most_s


def test_a_lossy_link_does_not_move_alpha() -> None:
    chance = random.Random(4)
    late = usual(fate=lambda number, probe: 0.14 if chance.random() < 0.05 else 0.0)
    assert measured(late, repeats=30).alpha_s == pytest.approx(0.02, rel=0.02)


# ---- time and bounds


@pytest.mark.parametrize("token_bytes", [0, 30_000])
@pytest.mark.parametrize("delay_s", [0.00005, 0.02, 0.3])
@pytest.mark.parametrize(("bits_per_s", "times"), [(64e3, 6.0), (1e6, 1.5), (2e8, 1.2)])
def test_it_takes_about_as_long_as_was_said(bits_per_s: float, times: float, delay_s: float, token_bytes: int) -> None:
    """Or, where the little that is needed takes longer, a few times as long."""
    link = usual(delay_s=delay_s, up_bytes_per_s=bits_per_s / 8, down_bytes_per_s=bits_per_s / 8)
    figures = measured(link, token_bytes=token_bytes)
    assert figures.took_s <= link.clock.now() <= EFFORT.seconds * (times if delay_s < 0.1 else max(times, 3.0))
    if delay_s < 0.001 and bits_per_s > 1e8 and not token_bytes:
        assert figures.took_s < 5
    assert link.most_under_way <= 48


def test_it_says_how_far_it_is() -> None:
    told: list[tuple[str, float]] = []
    link = usual()
    measure(link, link.clock, EFFORT, 5.0, lambda phase, share: told.append((phase, share)))
    assert list(dict.fromkeys(phase for phase, _ in told)) == [
        "connecting",
        "warm-up",
        "up",
        "probes",
        "trains",
        "down",
    ]
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] <= 1


# ---- what goes wrong


def test_nobody_answers() -> None:
    link = usual(fate=lambda number, probe: None)
    with pytest.raises(Unreachable, match=r"cannot reach tcp://virtual:1 \(waited 5 s\)"):
        measured(link)
    assert link.clock.now() == pytest.approx(5.0, abs=0.1)
    link = usual()
    link.away = True
    with pytest.raises(Unreachable, match="waited 5 s"):
        measured(link)
    assert link.clock.now() == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize("number", [2, 10, 80, 300])
@pytest.mark.parametrize("away", [True, False])
def test_a_link_that_is_lost_for_good(number: int, away: bool) -> None:
    link = usual()

    def end(now: int, probe: Probe) -> float | None:
        link.away = away and now >= number
        return None if now >= number else 0.0

    link.fate = end
    with pytest.raises(Unreachable, match="the link was lost while it was measured: cannot reach"):
        measured(link)
    assert link.clock.now() < 60


def test_lost_probes_are_counted_and_are_no_times() -> None:
    chance = random.Random(5)
    figures = measured(usual(fate=lambda number, probe: None if number > 9 and chance.random() < 0.02 else 0.0))
    assert figures.lost > 0 and figures.sent > 10 * figures.lost
    assert figures.alpha_s == pytest.approx(0.02, rel=0.01)
    assert max(took_s for _, took_s in figures.points) < 0.05


def test_late_answers_are_not_taken_for_others() -> None:
    """An answer that comes after its deadline, into the next probe's wait, is neither a time nor an error."""
    figures = measured(usual(fate=lambda number, probe: 1.01 if number in (9, 200, 250) else 0.0))
    assert figures.lost > 0
    assert max(took_s for _, took_s in figures.points) < 1.2
    assert figures.alpha_s == pytest.approx(0.02, rel=0.02)


def test_a_late_answer_is_not_the_next_probes() -> None:
    link = usual(fate=lambda number, probe: 1.5 if number == 1 else 0.0)
    prober = Prober(link, link.clock, 5.0)
    prober.connect()
    assert prober.round_trip(100) is None
    assert prober.train(30, 100, 60_000) is not None, "behind which it comes"
    assert prober.round_trip(100) == pytest.approx(0.04, rel=0.01)
    assert (prober.sent, prober.lost) == (33, 1)
    link.fate = lambda number, probe: 1.06 if number == 33 else 0.0
    assert prober.round_trip(100) is None
    assert prober.round_trip(100) == pytest.approx(0.04, rel=0.01)


def test_what_the_other_side_says() -> None:
    refused = Error(0, 0, ErrorCode.FULL, "no room")
    with pytest.raises(Refused, match="the cloud refuses: no room"):
        measured(usual(answer=lambda probe: refused))
    with pytest.raises(ProtocolError, match="refuses what this edge sent"):
        measured(usual(answer=lambda probe: Error(0, 0, ErrorCode.MALFORMED, "what?")))
    starting = measured(usual(answer=lambda probe: answered(probe)._replace(status=ProbeStatus.STARTING)))
    assert starting.status is ProbeStatus.STARTING
    assert "no worker of it is ready" in describe(starting, "tcp://x:1", 10, 80, ascii_only=True)


def test_answers_that_nobody_asked_for() -> None:
    link = usual(answer=lambda probe: Probed(0, 0, 1, ProbeStatus.OK, 0))
    with pytest.raises(Unreachable):
        measured(link)


# ---- figures


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_lie_within(values: list[float], share: float) -> None:
    assert min(values) <= quantile(values, share) <= max(values)
    assert quantile(values, 0.5) == pytest.approx(median(values))
    low, high = median_interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)


def test_the_interval_of_a_median_holds_95_percent() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = median_interval([chance.expovariate(1) for _ in range(15)])
        held += low <= 0.6931 <= high
    assert 0.94 <= held / 2000 <= 0.999


def test_a_rate_is_a_slope_that_is_known() -> None:
    line = fit_line([1e5, 2e5, 3e5] * 3, [0.1, 0.2, 0.3, 0.101, 0.199, 0.3, 0.1, 0.2, 0.301])
    rate = Rate.of(line)
    assert rate is not None and rate.bits_per_s == pytest.approx(8e6, rel=0.01)
    assert rate.interval[0] < rate.bits_per_s < rate.interval[1]
    assert Rate.of(fit_line([1, 2, 3] * 3, [0.1] * 9)) is None
    assert Rate.of(fit_line([], [])) is None
    vague = Rate.of(line._replace(slope_known=False, slope_low_s=0.0))
    assert vague is not None and vague.interval[1] == float("inf")


def test_a_slope_that_cannot_be_told_from_0_is_beta_0() -> None:
    chance = random.Random(2)
    points = [(size, 0.04 + size * 1.2e-5 + chance.gauss(0, 0.001)) for size in SIZES * 10]
    figures = figures_of(points, [1e-5], None, None, token_bytes=4, codec_s=0.0, sent=1, lost=0,
                         status=ProbeStatus.OK, took_s=1.0)  # fmt: skip
    assert figures.line.slope_s > 0 and not figures.line.slope_known
    assert figures.beta_s == 0.0 and not figures.beta_known and figures.beta_interval[1] > 0


@pytest.mark.parametrize("seed", range(6))
def test_beta_at_most_is_never_below_what_the_bytes_take(seed: int) -> None:
    """Also where the noise of the round trips falls with the size, as if more bytes took less."""
    chance = random.Random(seed)
    points = [(size, 0.04 - size * 1e-5 + chance.gauss(0, 3e-4)) for size in SIZES * 10]
    rest = {"token_bytes": 4, "codec_s": 0.0, "sent": 1, "lost": 0, "status": ProbeStatus.OK, "took_s": 1.0}
    slow = Rate(1e4, (0.8e4, 1.2e4))
    bound_s = {up: figures_of(points, [1e-5], up, None, **rest).beta_interval[1] for up in (None, slow)}
    assert bound_s[None] > 1e-6, "the round trips alone do not show that a token takes nothing"
    assert bound_s[slow] == pytest.approx(8 * 4 / 0.8e4)
    told = shown(figures_of(points, [1e-5], slow, None, **rest))
    assert "at most 4.000" in told and "(its 4 bytes take 3.200 ms by the bandwidth)" in told


def test_units() -> None:
    assert to_ms(0.0123456789) == 12.3457 and to_ms(None) is None and to_ms(float("inf")) is None


# ---- report

FIGURES = measured(usual())


def changed(**values: object) -> LinkFigures:
    return dataclasses.replace(FIGURES, **values)  # type: ignore[arg-type]


def shown(figures: LinkFigures, columns: int = 80, ascii_only: bool = True) -> str:
    return describe(figures, "tcp://cloud:7421", 10.0, columns, ascii_only=ascii_only)


def test_the_report_has_every_figure_in_a_line_of_its_own() -> None:
    lines = shown(FIGURES).splitlines()
    assert lines[0].startswith("link to tcp://cloud:7421: ") and "none lost" in lines[0]
    names = "alpha beta gap latency jitter round up down codec".split()
    assert [line.split()[0] for line in lines[2:12] if line.strip() and line[0] != " "] == names
    assert all(len(line) < 80 for line in lines), "a usual terminal holds it"
    assert lines[-1].startswith("plan: at 10 ms a draft token, 20 of them go in ")
    assert "3 lost" in shown(changed(lost=3))


def test_what_cannot_be_told_is_said() -> None:
    unknown = shown(changed(beta_s=0.0))
    assert "cannot be told from 0, at most" in unknown and "(its 4 bytes take 0.0016 ms by the bandwidth)" in unknown
    spreadless = shown(changed(beta_s=None))
    assert "not enough spread" in spreadless
    dark = shown(changed(beta_s=0.0, up=None, down=None, gap_s=None))
    assert dark.count("cannot be told in this time") == 2 and "by the bandwidth" not in dark
    assert changed(beta_s=0.001).beta_known and not changed(beta_s=None).beta_known


@pytest.mark.parametrize("columns", [1, NARROWEST, NARROWEST + 1, 60, 80, 200])
@pytest.mark.parametrize("beta_s", [0.0, 0.001])
def test_the_plot_fits_the_terminal_or_is_left_out(columns: int, beta_s: float) -> None:
    lines = shown(changed(beta_s=beta_s), columns).splitlines()
    plot = [line for line in lines if "|" in line or line.strip().startswith("+")]
    assert len(plot) == (11 if columns > NARROWEST else 0)
    assert all(len(line) < columns for line in plot)


def test_the_plot_shows_each_size_on_its_line() -> None:
    fat = measured(usual(), token_bytes=20_000)
    rows = [line.partition("|")[2] for line in shown(fat).splitlines() if "|" in line]
    dots = sorted((row.index("o"), -k) for k, row in enumerate(rows) if "o" in row)
    assert len({column for column, _ in dots}) >= 3
    assert [height for _, height in dots] == sorted(height for _, height in dots), "rising"


def test_signs_by_the_encoding() -> None:
    assert shown(FIGURES, ascii_only=True).isascii()
    assert "●" in shown(FIGURES, ascii_only=False)


def test_a_plan_takes_what_is_saved() -> None:
    assert plan_values(changed(beta_s=None, gap_s=None)) == {
        "alpha-ms": to_ms(FIGURES.alpha_s), "beta-ms": 0.0, "gap-ms": None
    }  # fmt: skip
    values = plan_values(changed(alpha_s=1.00004e-3, gap_s=1.00006e-3))
    assert values["gap-ms"] == values["alpha-ms"], "a rounded gap above a rounded alpha would be refused"


def test_json_names_and_values_that_are_not_known() -> None:
    figures = changed(beta_s=None, gap_s=None, up=None, down=Rate(1e6, (9e5, float("inf"))))
    shown = figures.as_json()
    assert shown["beta_ms"] is None and shown["up_mbps"] is None and shown["beta_known"] is False
    assert shown["intervals"]["down_mbps"] == [0.9, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeats", 2), ("repeats", True), ("repeats", 1.5), ("token_bytes", -1), ("token_bytes", 65537),
        ("seconds", 0.5), ("seconds", float("nan")), ("seconds", float("inf")), ("gamma_ms", -1.0), ("seed", -1),
        ("connect_s", 0.0), ("cloud", 7),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        LinkConfig(**{name: value})
