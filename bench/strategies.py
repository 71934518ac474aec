"""Which strategy is faster? `python bench/strategies.py --draft FILE|--scripted [--traces FILE...]`.

Every strategy, and `pipesd` with parts left out or exchanged, on a target that replays: its ids were recorded once from
the real one (see bench/record.py), a pass takes --pass-ms and --token-ms an id, and nothing is computed. So the draft
model, which is real, has the processor for itself, as on a machine of its own. The link is emulated; with --fat each
draft token takes as long on it as in the paper, whose verifiers are sent the draft model's whole distribution with each
token.

Each row that has parameters is tuned with the same budget (--samples, each over all tuning prompts) before anything is
measured, and gets the best setting that was tried; other prompts measure. Repetitions are interleaved in random order,
each on prompts of its own. A ratio is `row / pipesd` in ms per token, paired by repetition, with a 95 % interval; where
that contains 1 it reads "no difference". All ids are compared with the trace: a difference makes the exit code 1.
Only `edge only`, the draft model alone, gives others. `co-located` is vanilla without the link. With --scripted
draft model and text are scripted too. A policy's file (--policy) has its row beside all others.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import plots
from measuring import Row, tuned
from paired import paired_ratio
from runs import Measured, add_options, edge_of
from stamp import RESULTS, begin, end_with, finish, progress
from table import REFERENCE, chosen, joined, parsed, standing_rows

from pipesd.config import EdgeConfig
from pipesd.errors import Unreachable, UsageError
from pipesd.policy.search_space import Setting
from pipesd.sim.search import fastest
from pipesd.sim.simulate import SUMMED
from pipesd.sim.trace import Record, Trace

WARM_UP = 8  # tokens
BUSY = 0.5  # a load above it makes times worth little


def pipesd(**settings: Any) -> Row:
    return tuned(strategy="pipesd", **settings)


OWN_ROWS = {
    # what the paper's table 6 leaves out or exchanges
    "no-pipeline": pipesd(batching="none", waiting="idle"),
    "fixed": pipesd(trigger="fixed"),
    "token": pipesd(trigger="token"),
    "sequence": pipesd(trigger="sequence"),
    # the batching policies of its appendix F
    "greedy": pipesd(batching="greedy"),
    "immediate": pipesd(batching="immediate"),
    "none": pipesd(batching="none"),
    # beyond the paper
    "gain": pipesd(trigger="gain"),
    "entropy": pipesd(trigger="entropy"),
    "online": Row({"strategy": "pipesd"}),  # begins with the defaults and tunes while it runs
}


class Runs(Protocol):
    """What rows run on: `runs.Edge`."""

    @property
    def trace(self) -> Trace:
        """What the target says."""

    def run(
        self, settings: Mapping[str, Any], records: Sequence[Record], tokens: int, *, linked: bool = True
    ) -> Measured:
        """One session over these prompts."""


class Chosen(NamedTuple):
    """The best setting tried, and its ms per token on the tuning prompts; nothing for a row that has no parameters."""

    values: dict[str, Any]
    ms_per_token: float | None


def tune(edge: Runs, row: Row, records: Sequence[Record], options: argparse.Namespace) -> Chosen:
    """Try `--samples` settings of a row."""
    if row.search is None or not options.samples:
        return Chosen({}, None)
    from pipesd.policy.strategy import make_strategy
    from pipesd.policy.tuning import point_of, settings_of, space_of, values_of

    strategy = make_strategy(EdgeConfig(**row.settings))
    space = space_of(strategy)
    if not space:
        return Chosen({}, None)

    def cost(point: Setting) -> float:
        settings = {"tuning": "off", **row.settings, **settings_of(strategy, point)}
        try:
            return edge.run(settings, records, options.tune_tokens, linked=row.linked).ms_per_token / 1e3
        except Unreachable as error:
            progress(f"failed: {show(values_of(strategy, point))}: {error}")
            return math.inf

    best = fastest(space, point_of(strategy), options.samples, options.seed, cost)
    return Chosen(settings_of(strategy, best.setting), 1e3 * best.tpt_s)


def measure(
    edge: Runs, rows: Mapping[str, Row], options: argparse.Namespace
) -> tuple[dict[str, Chosen], dict[str, list[Measured]]]:
    """Tune every row, then measure them in turn; for each its settings and its repetitions."""
    tuning, rest = edge.trace.records[: options.tune_prompts], edge.trace.records[options.tune_prompts :]
    rows = {name: row._replace(settings={"tuning": "off", **row.settings}) for name, row in rows.items()}
    for row in rows.values():  # all is loaded and compiled then, and a wrong setting is told at once
        edge.run(row.settings, tuning[:1], min(options.tokens, WARM_UP), linked=row.linked)
    chosen = {}
    for name, row in rows.items():
        chosen[name] = tune(edge, row, tuning, options)
        if chosen[name].values:
            progress(f"tuned {name}: {show(chosen[name].values)}; {chosen[name].ms_per_token:.1f} ms per token")
    shuffled = random.Random(options.seed)
    runs: dict[str, list[Measured]] = {name: [] for name in rows}
    for repetition in range(options.repetitions):
        records = rest[repetition * options.prompts_each :][: options.prompts_each]
        for name in shuffled.sample(list(rows), len(rows)):
            row = rows[name]
            run = edge.run({**row.settings, **chosen[name].values}, records, options.tokens, linked=row.linked)
            runs[name].append(run)
            progress(f"{repetition + 1}/{options.repetitions} {name}: {run.ms_per_token:.1f} ms per token")
    return chosen, runs


def energy_j(runs: Sequence[Measured]) -> float | None:
    """What the edge's processors took, as the sessions say; None if one of them cannot."""
    each = [stats["energy_j"] for run in runs for stats in run.each]
    return sum(each) if each and None not in each else None


def report(
    row: Row, chosen: Chosen, runs: Sequence[Measured], reference: Sequence[Measured], kind: str
) -> dict[str, Any]:
    """What is said of a row."""
    sums = {name: sum(run.sums[name] for run in runs) for name in SUMMED}
    tokens = max(1, sums["tokens"])
    said: dict[str, Any] = {
        "kind": kind,
        "settings": {**row.settings, **chosen.values},
        "tuning_ms_per_token": chosen.ms_per_token,
        "ms_per_token": sum(run.ms_per_token * run.sums["tokens"] for run in runs) / tokens,
        "passes_per_token": sums["target_passes"] / tokens,
        "bytes_per_token": (sums["bytes_up"] + sums["bytes_down"]) / tokens,
        "acceptance_rate": sums["accepted"] / sums["verified"] if sums["verified"] else None,
        "navs_per_token": sums["navs"] / tokens,
        "draft_length": sums["verified"] / sums["navs"] if sums["navs"] else None,
        "triggers": dict(sum((Counter(run.triggers) for run in runs), Counter())),
        "cloud_s_per_1000_tokens": sums["cloud_s"] / tokens * 1000,
        "gamma_ms": 1e3 * sums["draft_s"] / sums["drafted"] if sums["drafted"] else None,
        "energy_j": energy_j(runs),
        **sums,
        "estimates": runs[-1].estimates,
        "wrong_outputs": sum(len(run.wrong) for run in runs),
        "each_ms_per_token": [run.ms_per_token for run in runs],
        "printed": {},
    }
    if reference and runs is not reference:
        ratio = paired_ratio([run.ms_per_token for run in runs], [run.ms_per_token for run in reference])
        said["over_pipesd"] = {**ratio._asdict(), "verdict": ratio.verdict}
    return said


def table(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield (f"{'':16}{'kind':10}{'ms/token':>9}{'passes':>8}{'bytes':>8}{'accepted':>9}{'drafted':>9}{'promoted':>9}"
           f"{'discarded':>10}{'cloud s/1000':>13}{'draft ms':>9}  over pipesd")  # fmt: skip
    for name, said in reports.items():
        tokens, over = max(1, said["tokens"]), said.get("over_pipesd")
        rate, gamma = ("" if said[key] is None else said[key] for key in ("acceptance_rate", "gamma_ms"))
        ratio = f"{over['mean']:.3f} [{over['low']:.3f}, {over['high']:.3f}] {over['verdict']}" if over else ""
        yield (f"{name:16}{said['kind']:10}{said['ms_per_token']:9.1f}{said['passes_per_token']:8.3f}"
               f"{said['bytes_per_token']:8.1f}{rate and f'{rate:.3f}':>9}"
               f"{said['drafted'] / tokens:9.2f}{said['promoted'] / tokens:9.2f}{said['discarded'] / tokens:10.2f}"
               f"{said['cloud_s_per_1000_tokens']:13.1f}{gamma and f'{gamma:.1f}':>9}  {ratio}")  # fmt: skip
    yield "passes, bytes, drafted, promoted, discarded: for each output token; accepted: of the tokens verified"
    yield "draft ms: of a draft token; where rows differ in it, the machine was busy with something else"


def kind_of(row: Row, options: argparse.Namespace) -> str:
    """What the row's figures are of: `replayed` is the runtime with a target that replays, `real` one whose models all
    compute."""
    return "real" if row.settings.get("strategy") == "local" and not options.scripted else "replayed"


def show(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_row_options(parser)
    for name, default, text in (
        ("samples", 16, "tries of each row's parameters; 0: their defaults"), ("tune-prompts", 3, "prompts of a try"),
        ("tune-tokens", 32, "tokens behind each"), ("repetitions", 9, "interleaved repetitions"),
        ("prompts-each", 2, "prompts of each"), ("tokens", 64, "tokens behind each"),
        ("seed", 0, "of the tuners and of the order"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    options = parsed(parser, samples=3, tune_prompts=1, tune_tokens=12, repetitions=2, prompts_each=1, tokens=24)
    for name, least in (
        ("samples", 0), ("tune-prompts", 1), ("tune-tokens", 1), ("repetitions", 1), ("prompts-each", 1), ("tokens", 1)
    ):  # fmt: skip
        if (value := getattr(options, name.replace("-", "_"))) < least:
            raise UsageError(f"--{name}: got {value}, wanted at least {least}")
    if options.plot:
        plots.check(options.plot)
    return options


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """Which rows there are, and where they go."""
    parser.add_argument("--quick", action="store_true", help="very little of everything: only to see that it works")
    parser.add_argument("--policy", nargs="+", action="extend", default=[], metavar="FILE", help="a policy of your own")
    parser.add_argument("--only", metavar="ROW,...", help="these rows alone")
    parser.add_argument("--plot", metavar="FILE", help="draw it too, as the file's ending says (needs matplotlib)")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="where results are kept")


def main() -> int:
    options = arguments()
    rows = chosen(joined(standing_rows(options.policy), OWN_ROWS), options.only)
    stamp = begin()
    load = os.getloadavg()[0]
    if load > BUSY:
        progress(f"the machine is busy (load {load:.1f}): times will be of little worth")
    count = options.tune_prompts + options.repetitions * options.prompts_each
    longest = max(options.tokens, options.tune_tokens)
    with tempfile.TemporaryDirectory() as folder, edge_of(options, count, longest) as edge:
        if "online" in rows:
            fresh = {"tuning": str(Path(folder, "tuning.json"))}
            rows["online"] = rows["online"]._replace(settings={**rows["online"].settings, **fresh})
        settings, runs = measure(edge, rows, options)
    reports = {
        name: report(row, settings[name], runs[name], runs.get(REFERENCE, []), kind_of(row, options))
        for name, row in rows.items()
    }
    wrong = [line for row in runs.values() for run in row for line in run.wrong]
    for line in (*table(reports), *wrong):
        print(line)
    if options.plot:
        plots.bars([{"name": f"target: {edge.trace.target}", "rows": reports}], options.plot)
    finish("strategies", stamp, options, {"target": edge.trace.target, "wrong_outputs": len(wrong), "rows": reports})
    return 1 if wrong else 0


if __name__ == "__main__":
    end_with(main)
