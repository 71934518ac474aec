"""The benches of the simulator itself: that they compare like with like, and end in one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipesd.sim.proxy import LinkProxy

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))
import fidelity  # noqa: E402


def test_there_are_six_settings_or_more_of_several_strategies_and_links() -> None:
    settings = fidelity.SETTINGS.values()
    assert len(settings) >= 6
    assert {each.settings["strategy"] for each in settings} >= {"cloud", "vanilla", "hsl", "edgellm", "pipesd"}
    assert len({each.link for each in settings}) >= 5 and len({each.gamma_s for each in settings}) >= 3
    links = [each.link for each in settings]
    assert any(link.jitter_s for link in links) and any(link.cuts for link in links), "what hinders is compared too"


@pytest.mark.parametrize("name", fidelity.SETTINGS)
def test_the_proxy_is_told_all_that_the_simulated_link_has(name: str) -> None:
    link = fidelity.SETTINGS[name].link
    assert (link.gap_s, link.loss) == (0.0, 0.0), "what the proxy cannot be told"
    told = fidelity.proxy_of(link)
    assert told["delay_s"] == link.latency_s and told["up_bytes_per_draft_token"] == link.up_bytes_per_draft_token
    assert (told["up_jitter_s"], told["down_jitter_s"], told["cuts"]) == (link.jitter_s, link.jitter_s, link.cuts)
    if link.bandwidths is None:
        assert (told["up_bytes_per_s"], told["down_bytes_per_s"]) == (link.up_bytes_per_s, link.down_bytes_per_s)
    else:
        assert told["schedule"] == link.bandwidths
    with LinkProxy("tcp://127.0.0.1:9", **told) as proxy:
        assert proxy.address


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "key"),
    [("simulator.py", (), "slowest"), ("fidelity.py", ("--only", "vanilla"), "rows")],
)  # fmt: skip
def test_a_bench_runs_and_ends_in_one_object(name: str, words: tuple[str, ...], key: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / name, "--quick", "--results", str(tmp_path), *words],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[key] and found["machine"]["cores"]
