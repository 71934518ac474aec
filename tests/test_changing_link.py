"""A session on a link whose bandwidth changes, in virtual time: what it knows of the link follows, so that texts come
about as fast as if the bandwidth had stayed at its mean."""

from __future__ import annotations

from statistics import harmonic_mean

import pytest

from pipesd import simulate
from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule
from pipesd.sim.synthetic import synthetic_trace

EVERY_S, STEPS = 20.0, 6  # scenario 4 of PipeSD, section 5
RECORDS = synthetic_trace(8, 128, acceptance=0.85, seed=1).records


def tpt_ms(schedule: Schedule, seed: int) -> float:
    """On a link with the paper's start-up, drafting and payload: a token takes 29 ms at 80 Mbit/s, 232 ms at 10."""
    link = Link.hockney(0.025, up_bytes_per_draft_token=290_000, bandwidths=schedule)
    settings = {"strategy": "pipesd", "tuning": "off", "link_model": "hockney"}
    return simulate(RECORDS, link=link, gamma_s=0.036, pass_s=0.03, seed=seed, settings=settings).tpt_ms


@pytest.mark.parametrize("seed", [0, 2, 25, 27, 55])
def test_texts_take_as_long_as_on_a_steady_link_of_the_same_mean(seed: int) -> None:
    """After some of these changes few round trips tell of the new bandwidth, and nothing surely."""
    changing = Schedule.redrawn(seed, steps=STEPS, every_s=EVERY_S)
    steady = Schedule(EVERY_S, (harmonic_mean(changing.up_mbps),), (harmonic_mean(changing.down_mbps),))
    assert tpt_ms(changing, seed) < 1.15 * tpt_ms(steady, seed)
