"""How well a run comes to know its link: `python bench/fit.py [--quick] [--seconds S]`.

PipeSD's figure of the fit of α, β and γ. Sessions of `pipesd` in virtual time go over links whose figures are known:
clean, with jitter, with loss, with bandwidths that change; in both payloads. What the monitor is told of round trips
are the points, what it makes of them the line. The table has what is true of each figure and the error at the end of
the session, in ms, the mean over the seeds, and beside it that of the paper's way on the same points: the mean time of
each size over the last 100, least squares through them. Where the bandwidth changes, `followed` is after how many
seconds, in the median, β is within a fifth of what it has become, and how often that was not before the next change.

Rows `link` are real: the code of `pipesd-edge link` measures an emulated link on this machine, so its errors have in
them what the machine adds. The tables above stand for what the strategies make of such links.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import plots
from fitting import Known, Seen, by_least_squares, errors_ms, followed, known_of, watched
from measuring import Cell, Row, measure, run_row, split
from real_links import REAL, RealLink, measured
from scenarios import FAT, REGIMES, gamma_s
from stamp import begin, end_with, finish, progress
from table import chosen, options_of, regimes_of, report, standing_rows, text, traces_of

from pipesd.sim.link_model import Link
from pipesd.sim.schedule import Schedule

FIGURES = ("alpha", "beta", "gap", "gamma")
PIPESD = Row({"strategy": "pipesd"})
JITTER_S = 0.010
LOSS = 0.01
EVERY_S = 40.0  # between two bandwidths


class Fit(NamedTuple):
    """What one session knew at its end, what was true then, and what it was told."""

    known: Known
    found: Known
    plain: Known
    seen: Seen


def links(regime_name: str) -> dict[str, Link]:
    """The conditions, by name."""
    regime = REGIMES[regime_name]
    clean = regime.link(jitter_s=0.0)
    changing = Schedule(EVERY_S, (20.0, 40.0, 10.0, 30.0), (200.0,) * 4)
    return {
        "clean": clean,
        "jitter": dataclasses.replace(clean, jitter_s=JITTER_S),
        "loss": dataclasses.replace(clean, loss=LOSS),
        "changing": regime.changing(changing, jitter_s=0.0),
    }


def cells(options: argparse.Namespace) -> list[Cell]:
    """Each condition and payload, on the first data set."""
    dataset, records = next(iter(traces_of(options).items()))
    return [
        Cell(f"{name}, {regime.name}", dataset, records, link, gamma_s(1), options.pass_ms / 1e3,
             settings=regime.settings, facts={"regime": regime.name, "condition": name})
        for regime in regimes_of(options)
        for name, link in links(regime.name).items()
    ]  # fmt: skip


def session(cell: Cell, options: argparse.Namespace, seed: int) -> Fit:
    """One session over the prompts that measure, and what it learnt."""
    _, rest = split(cell, options.quick)
    with watched() as seen:
        run_row(PIPESD, cell, rest, tokens=options.tokens, seed=seed, found={})
    known = known_of(cell.link, cell.gamma_s, seen.elapsed_s)
    return Fit(known, Known.of(seen.estimate), by_least_squares(seen), seen)


def fit_report(cell: Cell, fits: Sequence[Fit]) -> dict[str, Any]:
    """Errors in per cent, mean over the sessions, and how a change was followed."""
    said: dict[str, Any] = {"kind": "simulated", "known_ms": fits[0].known.as_ms(), "found_ms": fits[0].found.as_ms(),
                            "samples": [len(fit.seen.samples) for fit in fits]}  # fmt: skip
    for name, of in (("error_ms", "found"), ("least_squares_error_ms", "plain")):
        each = [errors_ms(getattr(fit, of), fit.known) for fit in fits]
        said[name] = {figure: _mean([one[figure] for one in each]) for figure in FIGURES}
    schedule = cell.link.bandwidths
    if schedule is not None and cell.facts["regime"] == FAT.name:
        said["followed"] = followed([fit.seen for fit in fits], cell.link, schedule)
    said["points"] = [[sample.tokens, 1e3 * sample.took_s] for sample in fits[0].seen.samples[-100:]]
    return said


def _mean(values: Sequence[float | None]) -> float | None:
    some = [value for value in values if value is not None]
    return statistics.fmean(some) if some else None


def fit_lines(name: str, said: Mapping[str, Any]) -> Iterator[str]:
    """One table row for each way to fit."""
    ways = {"monitor": "error_ms", "least squares": "least_squares_error_ms"}
    if said["kind"] == "real":
        ways = {"link": "error_ms"}
    for way, key in {"true": "known_ms", **ways}.items():
        shown = "".join(f"{'' if said[key][f] is None else f'{said[key][f]:.4f}':>11}" for f in FIGURES)
        yield f"{name:30}{said['kind']:10}{way:15}{shown}"
    if "followed" in said:
        told = said["followed"]
        after = "never" if told["median_s"] is None else f"after {told['median_s']:.1f} s"
        yield f"{'':40}followed {after}; {told['missed']} of {told['changes']} changes not before the next"


def real_report(link: RealLink, seconds: float, seed: int) -> dict[str, Any]:
    """What `pipesd-edge link` finds of an emulated link."""
    found = measured(link, seconds, seed)
    known = link.known()
    told = Known(found.alpha_s, found.beta_s, found.gap_s, None)
    points = [[tokens, 1e3 * took_s] for tokens, took_s in found.points]
    return {"kind": "real", "known_ms": known.as_ms(), "found_ms": told.as_ms(), "error_ms": errors_ms(told, known),
            "samples": [len(points)], "points": points}  # fmt: skip


def draw(found: Sequence[Mapping[str, Any]], path: str) -> None:
    """Round trips over tokens, with the line that was found and the known one."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure, axes = plots.pyplot().subplots(
        rows, columns, figsize=(4.2 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis, cell in zip(axes.flat, found, strict=False):
        said = cell["fit"]
        axis.plot(*zip(*said["points"], strict=True), ".", markersize=4, label=f"round trips ({said['kind']})")
        most = max(tokens for tokens, _ in said["points"])
        for name, style in (("found", "r-"), ("known", "k--")):
            alpha, beta = (said[f"{name}_ms"][key] for key in ("alpha", "beta"))
            axis.plot([0, most], [2 * alpha, 2 * alpha + (beta or 0.0) * most], style, linewidth=1, label=name)
        axis.set_title(cell["name"], fontsize=9)
        axis.set_xlabel("draft tokens")
        axis.set_ylabel("round trip without the pass, ms")
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(found) :]:
        axis.axis("off")
    plots.save(figure, path)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S",
                        help="measure a real link for so long; 0: none (default 6)")  # fmt: skip


def main() -> int:
    options = options_of(__doc__, add, seconds=2.0)
    if options.plot:
        plots.check(options.plot)
    stamp = begin()
    rows = chosen(standing_rows(options.policy), options.only)
    found, real, tables = [], [], []
    for cell in cells(options):
        outcomes = measure(cell, rows, options)
        reports = {name: report(name, row, cell, outcomes) for name, row in rows.items()}
        print("\n".join(text(cell, reports)), flush=True)
        said = fit_report(cell, [session(cell, options, seed) for seed in range(options.seeds)])
        progress(f"{cell.name}: fitted")
        tables.append((cell.name, said))
        found.append({"name": cell.name, "dataset": cell.dataset, **cell.facts, "rows": reports, "fit": said})
    if options.seconds:
        for name, link in REAL.items():
            said = real_report(link, options.seconds, seed=0)
            tables.append((name, said))
            real.append({"name": name, "fit": said})
    print(f"\n{'ms':30}{'':10}{'error of':15}{''.join(f'{figure:>11}' for figure in FIGURES)}")
    for name, said in tables:
        print("\n".join(fit_lines(name, said)))
    if options.plot:
        draw(found + real, options.plot)
    finish("fit", stamp, options, {"cells": found, "real": real})
    return 0


if __name__ == "__main__":
    end_with(main)
