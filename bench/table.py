"""What all tables of strategies share: their options, the rows that stand in each of them, tuning, measuring, ratios.

A table has cells: a data set's trace over a link with given speeds. In each cell every row with parameters is tuned by
the same budget on the trace's first records, and measured on the others. Simulated rows are the runtime's own code in
virtual time, `pipesd.sim.simulate`. How, and what a seed changes, stands in `measuring.py`.

A bench gives `run` its cells and its own rows, and lets `end_with` end it.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import TUNING_RECORDS, Cell, Outcome, Row, at_bounds, measure, ms_per_token, over, tuned
from printed import DATASETS
from scenarios import PASS_S, REGIMES, Regime, paper_settings
from stamp import RESULTS, begin, finish

from pipesd.errors import UsageError
from pipesd.sim.simulate import SUMMED
from pipesd.sim.synthetic import table7
from pipesd.sim.trace import Record, Trace

REFERENCE = "pipesd"
TRACES = Path(__file__).parent / "traces"
SYNTHETIC = "table7"


def standing_rows(policies: Sequence[str] = ()) -> dict[str, Row]:
    """What stands in every table; `policies`: files, each of which gives a row of its own."""
    rows = {
        "cloud only": Row({"strategy": "cloud"}),
        "edge only": Row({"strategy": "local"}),
        "co-located": tuned(strategy="vanilla")._replace(linked=False),
        "vanilla": tuned(strategy="vanilla"),
        "hsl": tuned(strategy="hsl"),
        "edgellm": tuned(strategy="edgellm"),
        REFERENCE: tuned(strategy="pipesd"),
        "auto": tuned(strategy="auto"),
    }
    for path in policies:
        from pipesd.policy.plugin import load_policy

        rows = joined(rows, {load_policy(path).name: tuned(policy=path)})
    return rows


def joined(standing: Mapping[str, Row], own: Mapping[str, Row]) -> dict[str, Row]:
    """Both. UsageError where they share a name, which a policy may bring about."""
    if twice := [name for name in own if name in standing]:
        raise UsageError(f"--policy: there is a row {twice[0]!r} already; give the policy another name")
    return {**standing, **own}


def paper_rows(dataset: str) -> dict[str, Row]:
    """The baselines with the paper's own settings, untuned."""
    return {
        name: Row(settings, printed=name.removesuffix("-paper")) for name, settings in paper_settings(dataset).items()
    }


def parsed(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The options that are given; with `--quick` among them, `quick` are the defaults of those that are not."""
    short = argparse.ArgumentParser(add_help=False)
    short.add_argument("--quick", action="store_true")
    if short.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


def options_of(
    doc: str, add: Callable[[argparse.ArgumentParser], None] | None = None, **quick: Any
) -> argparse.Namespace:
    """The options that every table has, and what `add` adds; `quick`: defaults of these with `--quick`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="very little of everything that is not given: only to see that it works"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it too, as the file's ending says (needs matplotlib)")
    for name, default, text in (
        ("seeds", 5, "repetitions, each with a seed of its own"),
        ("samples", 16, "tries of each row's parameters; 0: their defaults"),
        ("tune-tokens", 64, "at most so many behind each of a try's prompts"),
        ("tokens", 128, "at most so many behind each prompt that is measured"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--pass-ms", type=float, default=1e3 * PASS_S, metavar="MS",
                        help=f"what a pass of the target takes (default {1e3 * PASS_S:g})")  # fmt: skip
    parser.add_argument("--regime", choices=tuple(REGIMES), help="one of the two payloads alone")
    parser.add_argument("--traces", nargs="+", metavar="FILE",
                        help=f"traces of other models or prompts; {SYNTHETIC}: one made up as in the paper's table 7"
                        )  # fmt: skip
    parser.add_argument("--policy", nargs="+", action="extend", default=[], metavar="FILE", help="a policy of your own")
    parser.add_argument("--only", metavar="ROW,...", help="these rows alone")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="where results are kept")
    if add is not None:
        add(parser)
    few = {name: min(parser.get_default(name), 2) for name in ("seeds", "samples")}
    options = parsed(parser, **few, tokens=16, tune_tokens=8, **quick)
    for name, least in (("seeds", 1), ("samples", 0), ("tune-tokens", 1), ("tokens", 1)):
        if (value := getattr(options, name.replace("-", "_"))) < least:
            raise UsageError(f"--{name}: got {value}, wanted at least {least}")
    if not 0.0 < options.pass_ms < math.inf:
        raise UsageError(f"--pass-ms: got {options.pass_ms:g}, wanted more than 0")
    return options


def traces_of(options: argparse.Namespace, datasets: Sequence[str] = DATASETS) -> dict[str, tuple[Record, ...]]:
    """The records by data set: of the files given, named as they are, or of `datasets`, with `--quick` its first.
    UsageError for a trace that leaves none to measure."""
    found: dict[str, tuple[Record, ...]] = {}
    for given in options.traces or datasets[: 1 if options.quick else None]:
        path = TRACES / f"{given}.jsonl.gz" if given in datasets else Path(given)
        records = (table7(3 * TUNING_RECORDS) if given == SYNTHETIC else Trace.load(path)).records
        if len(records) <= TUNING_RECORDS:
            raise UsageError(f"{path}: it has {len(records)} records, of which {TUNING_RECORDS} tune: give more")
        name = path.name.split(".")[0]
        if name in found:
            raise UsageError(f"--traces: two are named {name!r}; give one of them another name")
        found[name] = records
    return found


def regimes_of(options: argparse.Namespace) -> list[Regime]:
    """The payloads that are asked for."""
    return [REGIMES[options.regime]] if options.regime else list(REGIMES.values())


def report(name: str, row: Row, cell: Cell, outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """What is said of a row."""
    mine = outcomes[name]
    every = [stats for outcome in mine for stats in outcome.each.values()]
    sums: dict[str, float] = {key: sum(stats[key] for stats in every) for key in (*SUMMED, "machine_s")}
    tokens = max(1, sums["tokens"])
    fat = cell.link.up_bytes_per_draft_token * row.linked * (sums["verified"] + sums["stale"])
    said: dict[str, Any] = {
        "kind": "simulated",
        "settings": {**cell.settings, **row.settings},
        "tuned": [dict(outcome.found) for outcome in mine],
        "at_bounds": [at_bounds(row, outcome.found) for outcome in mine],
        "ms_per_token": ms_per_token(every),
        "cloud_s_per_1000_tokens": 1000 * sums["machine_s"] / tokens,
        "passes_per_token": sums["target_passes"] / tokens,
        "bytes_per_token": (sums["bytes_up"] + sums["bytes_down"] + fat) / tokens,
        "acceptance": sums["accepted"] / sums["verified"] if sums["verified"] else None,
        "navs_per_token": sums["navs"] / tokens,  # asked for; those that are void by then bring nothing
        "verifications_per_token": sums["rounds"] / tokens if sums["verified"] else None,
        "draft_length": sums["verified"] / sums["rounds"] if sums["verified"] else None,
        "each_ms_per_token": [ms_per_token(list(outcome.each.values())) for outcome in mine],
        **sums,
    }
    if REFERENCE in outcomes and name != REFERENCE:
        ratio = over(mine, outcomes[REFERENCE])
        said["over_pipesd"] = {**ratio._asdict(), "verdict": ratio.verdict}
    theirs = {figure: rows.get(row.printed or name) for figure, rows in cell.printed.items()}
    said["printed"] = {figure: value for figure, value in theirs.items() if value is not None}
    said["ours_over_printed"] = {
        figure: said[figure] / value for figure, value in said["printed"].items() if said[figure] is not None
    }
    if "ms_per_token" in said["printed"] and name != REFERENCE:
        said["printed_over_pipesd"] = said["printed"]["ms_per_token"] / cell.printed["ms_per_token"][REFERENCE]
    return said


def text(cell: Cell, reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A cell's table, line by line."""
    yield f"\n{cell.name}"
    yield (f"{'':16}{'kind':10}{'ms/token':>9}{'printed':>9}{'ours/pr.':>9}{'cloud s/1000':>13}{'passes':>8}"
           f"{'bytes':>11}{'accepted':>9}{'printed/pipesd':>15}  over pipesd")  # fmt: skip
    for name, said in reports.items():
        ratio = said.get("over_pipesd")
        shown = f"{ratio['mean']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] {ratio['verdict']}" if ratio else ""
        theirs, against = (said[key].get("ms_per_token") for key in ("printed", "ours_over_printed"))
        yield (f"{name:16}{said['kind']:10}{said['ms_per_token']:9.1f}{_shown(theirs, 0):>9}"
               f"{_shown(against, 2):>9}{said['cloud_s_per_1000_tokens']:13.1f}"
               f"{said['passes_per_token']:8.3f}{said['bytes_per_token']:11.1f}{_shown(said['acceptance'], 3):>9}"
               f"{_shown(said.get('printed_over_pipesd'), 2):>15}  {shown}")  # fmt: skip


def bounded(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Which rows were tuned to a bound of what is searched, and how often: beyond it there may be better ones."""
    for name, said in reports.items():
        counts = Counter(parameter for seed in said["at_bounds"] for parameter in seed)
        for parameter, count in counts.items():
            yield f"{name}: {parameter} at a bound of what is searched with {count} of {len(said['at_bounds'])} seeds"


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def chosen(rows: Mapping[str, Row], only: str | None) -> dict[str, Row]:
    """The rows of `--only`, or all."""
    if only is None:
        return dict(rows)
    names = only.split(",")
    if unknown := set(names).difference(rows):
        raise UsageError(f"--only: no row {min(unknown)!r}; there are {', '.join(rows)}")
    return {name: row for name, row in rows.items() if name in names}


def run(
    bench: str,
    options: argparse.Namespace,
    cells: Sequence[Cell],
    own_rows: Callable[[Cell], Mapping[str, Row]] = lambda _: {},
    *,
    lines: Callable[[Sequence[Mapping[str, Any]]], Iterator[str]] = lambda _: iter(()),
    draw: Callable[[Sequence[Mapping[str, Any]], str], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure all cells with the standing rows and the bench's own; print tables, keep and print the JSON object.
    From the cells as they stand in it come `lines`, what else is printed, and `draw`, how `--plot` is drawn where bars
    are not the thing."""
    import plots

    if options.plot:
        plots.check(options.plot)
    stamp = begin()
    standing = standing_rows(options.policy)
    tables = [chosen(joined(standing, own_rows(cell)), options.only) for cell in cells]
    found = []
    for cell, rows in zip(cells, tables, strict=True):
        outcomes = measure(cell, rows, options)
        reports = {name: report(name, row, cell, outcomes) for name, row in rows.items()}
        print("\n".join([*text(cell, reports), *bounded(reports)]), flush=True)
        found.append({
            "name": cell.name, "dataset": cell.dataset, "gamma_ms": 1e3 * cell.gamma_s, "pass_ms": 1e3 * cell.pass_s,
            "token_ms": 1e3 * cell.token_s, "users": cell.users, **cell.facts, "rows": reports,
        })  # fmt: skip
    if options.plot:
        (draw or plots.bars)(found, options.plot)
    for line in lines(found):
        print(line)
    if options.seeds == 1:
        print("\none seed: intervals are over prompts alone, and what the tuner's luck did is in none of them")
    print("\npasses, bytes: for each output token, the payload of draft tokens included; accepted: of those verified")
    print("co-located: vanilla at the same drafting speed, without the link; rows -paper: the paper's own settings")
    finish(bench, stamp, options, {"cells": found})
    return found
