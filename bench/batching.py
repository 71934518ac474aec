"""When draft tokens are sent, four rules compared: `python bench/batching.py [--cases N] [--quick]`.

PipeSD's appendix F: its plan by dynamic programming (`dp`), `greedy` (whenever the link is idle, all that has
accumulated goes), `immediate` (one token a message) and `none` (all at the trigger). The paper prints that its plan is
1.02 to 2.06 times ahead of the others.

First for a draft of known length, over a grid and drawn α, β, γ and lengths: the time to the arrival of the last token
by the plan's own recurrence, and by the runtime in virtual time, with a trigger that asks at that length and every
guess right. There the plan is never behind; if it is, beyond what a run counts as a tie, the exit code is 1. Then for
the lengths that a trigger decides, on traces, every rule with thresholds of its own: the row `pipesd` has the plan.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import printed
from measuring import Cell, Row, tuned
from plan_cases import POLICIES, Case, cases, simulated_s, total_s
from scenarios import gamma_s, scenario_link
from stamp import end_with, progress
from table import REFERENCE, SYNTHETIC, options_of, regimes_of, run, traces_of

from pipesd.errors import UsageError
from pipesd.policy.token_batches import RUN_GAIN

CASES, QUICK_CASES = 2000, 60
# By how much the plan may be behind: rounding; in a run also what counts as a tie, and how exactly a link is measured.
BEHIND = {"recurrence": 1e-9, "simulated": RUN_GAIN + 0.002}
OTHERS = tuple(policy for policy in POLICIES if policy != "dp")
REGIME = {True: "fat", False: "thin"}  # a gap that is all of α, or a part of it


def known_length(found: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """By regime: how many times the plan's time the other rules take, and where the plan is behind."""
    said: dict[str, dict[str, Any]] = {}
    for whole_gap, regime in REGIME.items():
        mine = [case for case in found if (case.gap_s == case.alpha_s) == whole_gap]
        said[regime] = {"cases": len(mine), "printed": list(printed.BATCHING)}
        for kind, measured in (("recurrence", total_s), ("simulated", simulated_s)):
            times = {policy: [measured(policy, case) for case in mine] for policy in POLICIES}
            said[regime][kind] = {policy: _ratios(times[policy], times["dp"], mine, BEHIND[kind]) for policy in OTHERS}
            progress(f"known length, {regime}, {kind}: {len(mine)} cases")
    return said


def _ratios(other: Sequence[float], plan: Sequence[float], found: Sequence[Case], behind: float) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(other, plan, strict=True)]
    return {
        "least": min(ratios),
        "median": statistics.median(ratios),
        "most": max(ratios),
        "plan_behind": [
            {**case._asdict(), "ratio": ratio}
            for case, ratio in zip(found, ratios, strict=True)
            if ratio < 1.0 - behind
        ],
    }


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=CASES, metavar="N",
                        help=f"links, drafting times and known lengths (default {CASES})")  # fmt: skip


def cells(options: argparse.Namespace, known: Mapping[str, Any]) -> list[Cell]:
    """Scenario 1 for each data set and payload, with what was found of known lengths."""
    return [
        Cell(
            f"{dataset}, {regime.name}", dataset, records, scenario_link(1, regime), gamma_s(1), options.pass_ms / 1e3,
            settings=regime.settings, facts={"regime": regime.name, "known_length": known[regime.name]},
        )
        for dataset, records in traces_of(options, (*printed.DATASETS, SYNTHETIC)).items()
        for regime in regimes_of(options)
    ]  # fmt: skip


def own_rows(_: Cell) -> dict[str, Row]:
    return {policy: tuned(strategy="pipesd", batching=policy) for policy in OTHERS}


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What known and random lengths come to, beside what is printed."""
    low, high = printed.BATCHING
    yield f"\ntimes the plan's time; printed {low} to {high}"
    for regime, known in {cell["regime"]: cell["known_length"] for cell in found}.items():
        for kind in BEHIND:
            for policy, said in known[kind].items():
                behind = f"; THE PLAN IS BEHIND in {len(said['plan_behind'])}" if said["plan_behind"] else ""
                yield (f"known length, {regime}, {known['cases']} cases, {kind:10} {policy:10} {said['least']:.3f} to "
                       f"{said['most']:.3f}, median {said['median']:.3f}{behind}")  # fmt: skip
    for cell in found:
        for policy in OTHERS:
            said = cell["rows"].get(policy, {})
            if "over_pipesd" not in said:
                continue
            ratio = said["over_pipesd"]
            said["printed"] = {**said["printed"], "over_pipesd": [low, high]}
            if ratio["low"] <= 1 <= ratio["high"]:
                word = "ties with"
            elif math.isnan(ratio["low"]):
                word = "was measured once against"
            else:
                word = "beats" if ratio["mean"] < 1 else "loses to"
            yield (f"random length, {cell['name']:20} {policy:10} {word} the plan: {ratio['mean']:.3f} "
                   f"[{ratio['low']:.3f}, {ratio['high']:.3f}]")  # fmt: skip


def main() -> int:
    options = options_of(__doc__, add, cases=QUICK_CASES)
    if options.cases < 2:
        raise UsageError(f"--cases: got {options.cases}, wanted at least 2")
    known = known_length(cases(options.cases, seed=0))
    run("batching", options, cells(options, known), own_rows, lines=lines)
    behind = [said for regime in known.values() for kind in BEHIND for said in regime[kind].values()]
    return 1 if any(said["plan_behind"] for said in behind) else 0


assert REFERENCE not in OTHERS


if __name__ == "__main__":
    end_with(main)
