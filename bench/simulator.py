"""How fast the simulator is: committed tokens a second on one core, `python bench/simulator.py [--quick]`.

Each strategy over synthetic records of several acceptances, for one user, on a link of 20 ms there and back; thresholds
as they are without tuning. The time is this process's own processor time, so that what else the machine does shows
less; the best of some repetitions is given, as whatever disturbs only ever adds.

The last line is one JSON object, which is kept in `--results` too.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from stamp import RESULTS, begin, end_with, finish

from pipesd.sim.link_model import Link
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace

GOAL_TOKENS_PER_S = 100_000
STRATEGIES = ("cloud", "vanilla", "hsl", "edgellm", "pipesd")
ACCEPTANCES = (0.5, 0.7, 0.9)
RECORDS, TOKENS = 8, 256
REPETITIONS = 5


def measure(strategy: str, acceptance: float, records: int, repetitions: int) -> dict[str, float]:
    """Tokens a second, and a session's counts for each of them."""
    trace = synthetic_trace(records, TOKENS, acceptance=acceptance)
    link = Link.streamed(0.01, 0.0005, up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e7)
    best_s = float("inf")
    for _ in range(repetitions + 1):  # what is only done once is in the first
        begun_s = time.process_time()
        ran = simulate(trace.records, link=link, gamma_s=0.01, pass_s=0.04, token_s=0.003,
                       settings={"strategy": strategy, "tuning": "off"})  # fmt: skip
        best_s = min(best_s, time.process_time() - begun_s)
    tokens = ran.stats["tokens"]
    return {
        "tokens_per_s": tokens / best_s, "us_per_token": 1e6 * best_s / tokens,
        "drafted_per_token": ran.stats["drafted"] / tokens, "rounds_per_token": ran.stats["rounds"] / tokens,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Committed tokens that the simulator makes in a second on one core.")
    parser.add_argument("--quick", action="store_true", help="two records, two repetitions")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="where the JSON object is kept")
    options = parser.parse_args()
    records, repetitions = (2, 2) if options.quick else (RECORDS, REPETITIONS)
    stamp = begin()
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'strategy':10} {'acceptance':>10} {'tokens/s':>10} {'µs/token':>9} {'drafted':>8} {'rounds':>7}")
    for strategy in STRATEGIES:
        for acceptance in ACCEPTANCES if strategy != "cloud" else ACCEPTANCES[:1]:
            row = measure(strategy, acceptance, records, repetitions)
            rows[f"{strategy} {acceptance:g}"] = row
            print(f"{strategy:10} {acceptance:10g} {row['tokens_per_s']:10.0f} {row['us_per_token']:9.1f} "
                  f"{row['drafted_per_token']:8.2f} {row['rounds_per_token']:7.2f}", flush=True)  # fmt: skip
    slowest = min(row["tokens_per_s"] for row in rows.values())
    reached = sum(row["tokens_per_s"] >= GOAL_TOKENS_PER_S for row in rows.values())
    print(f"slowest {slowest:.0f} tokens a second; {reached} of {len(rows)} reach {GOAL_TOKENS_PER_S}")
    finish("simulator", stamp, options, {
        "goal_tokens_per_s": GOAL_TOKENS_PER_S, "reached": reached, "slowest": slowest, "rows": rows,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    end_with(main)
