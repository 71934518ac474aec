"""Does the simulator tell what the runtime does? `python bench/fidelity.py [--quick] [--repetitions N]`.

The same records of bench/traces by the same settings twice: in the runtime as it is (its session, sockets, a front and
a worker process, an emulated link in a process of its own), where a recorded drafter really sleeps for each token and a
recorded target for each pass; and by `simulate`. Both are told the same times; what sockets, processes and late timers
take is the runtime's alone, and not corrected for. Beside it stands the same simulation with gamma, pass and round trip
as the real run measured them (`adjusted`): what is left then is no matter of the machine.

Ratios are real to simulated time per output token, with paired 95 % intervals over repetitions. The emulated link has
no part that messages occupy by their number, so that hockney's alpha is not among the settings.

The last line is one JSON object, which is kept in `--results` too. Exits 1 if an output or a count differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paired import paired_ratio
from replay import Replay, replaying
from runs import ESTIMATES, STALL_S, TRACES, Measured
from stamp import RESULTS, begin, end_with, finish, progress
from table import parsed

from pipesd.clock import SystemClock
from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule
from pipesd.sim.simulate import SUMMED, Simulated, simulate
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary
from pipesd.sim.trace import Record, Trace
from pipesd.sim.traced import TraceDrafter

TOKENS = 48
RECORDS = 4  # the first of each trace
GOAL = 0.05  # the most that the two may be apart
SAME = ("tokens", "rounds", "accepted")  # counts that hang on no time where a strategy waits for its verdicts
WAITS = ("cloud", "vanilla", "hsl")
UNTUNED: Mapping[str, Any] = {"tuning": "off"}


class Setting(NamedTuple):
    """One comparison: fields of `EdgeConfig`, the link as the proxy is told, times of the models."""

    settings: Mapping[str, Any]
    link: Link
    gamma_s: float
    pass_s: float = 0.04
    token_s: float = 0.003


def thin(rtt_ms: float, **further: Any) -> Link:
    """A link that is told nothing but ids."""
    return Link(latency_s=rtt_ms / 2e3, up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e7, **further)


def fat(rtt_ms: float, beta_ms: float) -> Link:
    """A link on which each draft token takes `beta_ms` more."""
    return replace(thin(rtt_ms), up_bytes_per_draft_token=beta_ms / 1e3 * 2.5e6)


SETTINGS = {
    "cloud, 50 ms": Setting({"strategy": "cloud"}, thin(50), 0.01),
    "vanilla, 20 ms": Setting({"strategy": "vanilla", "draft_length": 4}, thin(20), 0.01),
    "hsl, 50 ms, fat": Setting({"strategy": "hsl"}, fat(50, 8.0), 0.02),
    "edgellm, 100 ms": Setting({"strategy": "edgellm"}, thin(100), 0.01),
    "pipesd, 20 ms": Setting({"strategy": "pipesd", **UNTUNED}, thin(20), 0.015),
    "pipesd, 50 ms, fat": Setting({"strategy": "pipesd", **UNTUNED}, fat(50, 29.0), 0.036),
    "pipesd immediate, 100 ms": Setting({"strategy": "pipesd", "batching": "immediate", **UNTUNED}, thin(100), 0.02),
    "pipesd, fat, bandwidth redrawn each second": Setting(
        {"strategy": "pipesd", **UNTUNED},
        Link(latency_s=0.025, bandwidths=Schedule.redrawn(1, every_s=1.0), up_bytes_per_draft_token=50_000), 0.036,
    ),
    "pipesd, 50 ms, jitter": Setting({"strategy": "pipesd", **UNTUNED}, thin(50, jitter_s=0.01), 0.02),
    "vanilla, 50 ms, away for half a second": Setting(
        {"strategy": "vanilla", "draft_length": 4}, thin(50, cuts=((2.0, 0.5),)), 0.01
    ),
}  # fmt: skip


def proxy_of(link: Link) -> dict[str, Any]:
    """The same link as `LinkProxy` is told of it."""
    told: dict[str, Any] = {
        "delay_s": link.latency_s, "up_bytes_per_draft_token": round(link.up_bytes_per_draft_token),
        "up_jitter_s": link.jitter_s, "down_jitter_s": link.jitter_s, "cuts": link.cuts,
    }  # fmt: skip
    if link.bandwidths is not None:
        return {**told, "schedule": link.bandwidths}
    return {**told, "up_bytes_per_s": link.up_bytes_per_s, "down_bytes_per_s": link.down_bytes_per_s}


def real_run(address: str, setting: Setting, records: Sequence[Record], size: int) -> Measured:
    """One session of the runtime over the records, with a drafter that sleeps."""
    tokeniser = ByteTokeniser(byte_vocabulary(size))
    tokeniser.end_ids = frozenset()  # its own end id is any other token of the trace's models
    drafter = TraceDrafter(setting.gamma_s, SystemClock())
    each, wrong = [], []
    config = EdgeConfig(cloud=address, stall_s=STALL_S, **setting.settings)
    with EdgeSession(config, drafter=drafter, tokeniser=tokeniser) as session:
        for record in records:
            drafter.read(record)
            for _ in session.generate(record.prompt, max_tokens=TOKENS, seed=0):
                pass
            each.append(session.stats)
            if session.token_ids != record.output[:TOKENS]:
                wrong.append("other ids than were recorded")
    sums = {name: sum(stats[name] for stats in each) for name in SUMMED}
    elapsed_ms = sum(stats["tpt_ms"] * stats["tokens"] for stats in each)
    estimates = {name: each[-1][name] for name in ESTIMATES}
    return Measured(elapsed_ms / sums["tokens"], sums, estimates, {}, wrong, each)


def simulated(setting: Setting, records: Sequence[Record]) -> Simulated:
    return simulate(records, link=setting.link, gamma_s=setting.gamma_s, pass_s=setting.pass_s,
                    token_s=setting.token_s, max_tokens=TOKENS, settings=setting.settings)  # fmt: skip


def adjusted(setting: Setting, ran: Measured, told: Simulated) -> Setting:
    """The setting with the times that a real run itself measured: of a draft token, of a pass, of the round trip."""
    drafted, passes = ran.sums["drafted"], ran.sums["target_passes"]
    gamma_s = ran.sums["draft_s"] / drafted if drafted else setting.gamma_s
    late_s = ran.sums["cloud_s"] / passes - told.stats["cloud_s"] / told.stats["target_passes"]
    rtt_s = (ran.estimates["rtt_ms"] - told.each[-1]["rtt_ms"]) / 1e3
    return setting._replace(
        gamma_s=gamma_s, pass_s=setting.pass_s + max(0.0, late_s),
        link=replace(setting.link, latency_s=setting.link.latency_s + max(0.0, rtt_s) / 2),
    )  # fmt: skip


def compare(name: str, setting: Setting, trace: Trace, repetitions: int) -> dict[str, Any]:
    """One setting, in turn real and simulated with what that run measured."""
    records, told = trace.records, simulated(setting, trace.records)
    make = Replay(trace, byte_vocabulary(trace.vocabulary_size),
                  {"pass_s": setting.pass_s, "token_s": setting.token_s})  # fmt: skip
    real, again, wrong = [], [], []
    for number in range(repetitions):
        with replaying(make, proxy_of(setting.link)) as where:  # a schedule of bandwidths begins with its link
            ran = real_run(where.linked, setting, records, trace.vocabulary_size)
        real.append(ran.ms_per_token)
        again.append(simulated(adjusted(setting, ran, told), records).tpt_ms)
        wrong += ran.wrong
        if setting.settings["strategy"] in WAITS:
            wrong += [f"{key} {ran.sums[key]:g}, simulated {told.stats[key]:g}"
                      for key in SAME if ran.sums[key] != told.stats[key]]  # fmt: skip
        progress(f"{name}, {number + 1} of {repetitions}: {real[-1]:.2f} ms, simulated {told.tpt_ms:.2f}")
    ratio, near = paired_ratio(real, [told.tpt_ms] * repetitions), paired_ratio(real, again)
    return {
        "kind": "replayed", "strategy": setting.settings["strategy"], "real_ms": sum(real) / repetitions,
        "simulated_ms": told.tpt_ms, "adjusted_ms": sum(again) / repetitions, "ratio": ratio, "adjusted_ratio": near,
        "within": abs(ratio.mean - 1) <= GOAL, "adjusted_within": abs(near.mean - 1) <= GOAL, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="The simulator against the runtime, setting by setting.")
    parser.add_argument("--quick", action="store_true", help="one repetition of two records")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of the real runs (default 5)")
    parser.add_argument("--only", metavar="TEXT", default="", help="settings whose name has this in it")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="where the JSON object is kept")
    options = parsed(parser, repetitions=1)
    stamp = begin()
    traces = [Trace.load(path) for path in TRACES]
    count = 1 if options.quick else RECORDS
    records = tuple(record for trace in traces for record in trace.records if len(record.output) > TOKENS + 32)
    chosen = replace(traces[0], records=records[:count] + records[-count:])
    rows = {
        name: compare(name, setting, chosen, options.repetitions)
        for name, setting in SETTINGS.items() if options.only in name
    }  # fmt: skip
    print(f"{'setting':45} {'real':>8} {'simulated':>10}  ratio                  adjusted: ratio")
    for name, row in rows.items():
        ratios = (
            f"{each.mean:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in (row["ratio"], row["adjusted_ratio"])
        )
        print(f"{name:45} {row['real_ms']:8.2f} {row['simulated_ms']:10.2f}  {'   '.join(ratios)}")
    print("ms per output token; ratios are real to simulated, with 95 % intervals over repetitions")
    print("real: the runtime, with models that replay")
    near, adjusted_near = (sum(row[key] for row in rows.values()) for key in ("within", "adjusted_within"))
    print(f"{near} of {len(rows)} within {GOAL:.0%}, {adjusted_near} with the times that the real run measured")
    wrong = {name: row["wrong"] for name, row in rows.items() if row["wrong"]}
    for name, findings in wrong.items():
        print(f"wrong: {name}: {findings[0]}", file=sys.stderr)
    finish("fidelity", stamp, options, {
        "tokens": TOKENS, "records": len(chosen.records), "within": near, "adjusted_within": adjusted_near,
        "rows": rows,
    })  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    end_with(main)
