"""The settings that PipeSD (arXiv 2605.13319) was measured in, as links, drafting times and pass times, and its
baselines' own settings.

Two payloads. `fat`: with each draft token the draft model's distribution over the whole vocabulary goes up, 32,256
entries of 9 bytes, which takes 116 ms at 20 Mbit/s; each message is a request of its own, so the start-up is what it
occupies of the link (`Link.hockney`). `thin`: what this product sends, ids, over one connection on which messages
overlap (`Link.streamed`). One-way start-up, bandwidth and drafting time are the same in both.

The papers do not tell what a pass of the target takes. PASS_S is what a model of about seven billion parameters in 16
bits takes on one large GPU under a common framework, launches included; `--pass-ms` exchanges it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule

ALPHA_S = 0.025  # one way
GAMMA_S = 0.036  # a draft token on the laptop
SLOWER = {1: 1.0, 2: 2.04, 3: 4.25, 4: 1.0}  # scenario: a 5.1 GHz laptop, a 2.5 GHz phone, a 1.2 GHz board, the laptop
EDGES = {1: "laptop", 2: "phone", 3: "IoT board", 4: "laptop, bandwidth redrawn"}
FAT_BYTES = 32_256 * 9  # of one draft token
UP_MBPS, DOWN_MBPS = 20.0, 200.0
GAP_S = 0.000_05  # that a message occupies of one stream beyond its bytes
JITTER_S = 0.002  # at most so much later, each message anew: part of what differs between seeds
PASS_S = 0.030
SCENARIO_4 = Path(__file__).parent / "scenario4.json"  # uplink 10-80, downlink 150-280 Mbit/s, redrawn every 20 s

VANILLA_TOKENS = {"humaneval": 6, "gsm8k": 4}
HSL_THRESHOLD = {"humaneval": 0.99, "gsm8k": 0.7}
EDGELLM_START = {"humaneval": 0.92, "gsm8k": 0.5}
TOKEN_ABLATION = 0.99  # the token threshold of table 6's row with that rule alone


class Regime(NamedTuple):
    """A payload with its link, and the options of the edge that go with it."""

    name: str
    settings: Mapping[str, Any]

    def link(self, up_mbps: float = UP_MBPS, down_mbps: float = DOWN_MBPS, **further: Any) -> Link:
        """The link at that bandwidth; `further`: fields of Link."""
        return self._link(up_bytes_per_s=up_mbps * 1e6 / 8, down_bytes_per_s=down_mbps * 1e6 / 8, **further)

    def changing(self, bandwidths: Schedule, **further: Any) -> Link:
        """The link at bandwidths that change."""
        return self._link(bandwidths=bandwidths, **further)

    def _link(self, **fields: Any) -> Link:
        if self.name == "fat":
            return Link.hockney(ALPHA_S, up_bytes_per_draft_token=FAT_BYTES, **{"jitter_s": JITTER_S, **fields})
        return Link.streamed(ALPHA_S, GAP_S, **{"jitter_s": JITTER_S, **fields})


FAT = Regime("fat", {"link_model": "hockney"})
THIN = Regime("thin", {"link_model": "streamed"})
REGIMES = {regime.name: regime for regime in (FAT, THIN)}


def scenario_link(scenario: int, regime: Regime) -> Link:
    """The link of the paper's scenario 1, 2, 3 or 4."""
    return regime.changing(Schedule.load(SCENARIO_4)) if scenario == 4 else regime.link()


def gamma_s(scenario: int) -> float:
    """What a draft token takes in that scenario, s."""
    return GAMMA_S * SLOWER[scenario]


def paper_settings(dataset: str) -> dict[str, dict[str, Any]]:
    """The baselines as the paper set them, which it did not tune; for a data set that it has not, those for code."""
    code = {name: settings.get(dataset, settings["humaneval"]) for name, settings in _SETTINGS.items()}
    return {
        "vanilla-paper": {"strategy": "vanilla", "draft_length": code["vanilla"]},
        "hsl-paper": {"strategy": "hsl", "token_threshold": code["hsl"]},
        "edgellm-paper": {"strategy": "edgellm", "sequence_threshold": code["edgellm"]},
    }


_SETTINGS: dict[str, dict[str, Any]] = {
    "vanilla": VANILLA_TOKENS, "hsl": HSL_THRESHOLD, "edgellm": EDGELLM_START
}  # fmt: skip
