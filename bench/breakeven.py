"""Where do drafts pay, by round trip and draft speed? `python bench/breakeven.py [--quick] [--policy FILE]`.

In each cell of the map every row is tuned by a small budget of its own and simulated, in both payload regimes, behind
the prompts of the traces. Shown are the fastest row that gives the target's output, and the time per token of pipesd as
a share of that of the cloud alone. Over it the closed form of arXiv 2606.25091: drafts of a fixed length k beat the
target alone up to a round trip of a(1 - a^k)/(1 - a) · t_ar - k · t_d, with the k that is best; it knows of no bytes,
no further id's time in a pass, no window of the cloud and of guesses that are right with one chance everywhere. Where
the simulated vanilla disagrees, it is said. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plots
from measuring import TUNING_RECORDS, Cell, Outcome, measure, over
from scenarios import GAP_S, Regime
from stamp import begin, end_with, finish
from table import REFERENCE, chosen, options_of, regimes_of, report, standing_rows, traces_of

from pipesd.sim.advice import break_even_rtt_s
from pipesd.sim.link_model import Link
from pipesd.sim.trace import Record

RTTS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
GAMMAS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 36.0, 73.0)
QUICK_RTTS_MS, QUICK_GAMMAS_MS = (0.0, 500.0), (5.0, 36.0)
LONGEST = 16  # draft tokens of vanilla, as it is tuned
INEXACT = ("edge only", "co-located")  # not the target's output; not over this link
SIGNS = {"cloud only": "c", "vanilla": "v", "hsl": "h", "edgellm": "e", REFERENCE: "p", "auto": "a"}
BOX = {"facecolor": "white", "alpha": 0.7, "linewidth": 0.0, "boxstyle": "round,pad=0.2"}  # behind a letter of the plot
Found = Mapping[str, Any]


def link_of(regime: Regime, rtt_s: float) -> Link:
    """The regime's link with that round trip, without jitter: of a request of its own it is all start-up, of a stream
    all but what a message occupies."""
    gap_s = rtt_s / 2 if regime.name == "fat" else min(GAP_S, rtt_s / 2)
    return dataclasses.replace(regime.link(), gap_s=gap_s, latency_s=rtt_s / 2 - gap_s, jitter_s=0.0)


def cells(options: argparse.Namespace) -> list[Cell]:
    """A cell for each round trip, drafting time, data set and regime."""
    return [
        Cell(
            f"{dataset}, {regime.name}, RTT {rtt_ms:g} ms, draft token {gamma_ms:g} ms", dataset, records,
            link_of(regime, rtt_ms / 1e3), gamma_ms / 1e3, options.pass_ms / 1e3, settings=regime.settings,
            facts={"rtt_ms": rtt_ms, "regime": regime.name, "acceptance": acceptance(records)},
        )
        for dataset, records in traces_of(options).items()
        for regime in regimes_of(options)
        for gamma_ms in options.gammas
        for rtt_ms in options.rtts
    ]  # fmt: skip


def acceptance(records: Sequence[Record]) -> float:
    """The share of guesses behind the true text that are right, of the records that are measured: the closed form's
    a."""
    rest = records[TUNING_RECORDS:]
    return sum(record.right(i) for record in rest for i in range(len(record.output))) / sum(
        len(record.output) for record in rest
    )


def limit_s(a: float, alone_s: float, gamma_s: float) -> float:
    """The round trip of the closed form, with the draft length that reaches furthest; at least 0."""
    return max(0.0, *(break_even_rtt_s(a, k, alone_s, gamma_s) for k in range(1, LONGEST + 1)))


def judged(cell: Cell, reports: Mapping[str, Found], outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """What a cell says: the fastest row and those that are not surely slower, pipesd against the cloud, the closed form
    against vanilla."""
    tpt_ms = {name: said["ms_per_token"] for name, said in reports.items() if name not in INEXACT}
    limit = limit_s(cell.facts["acceptance"], cell.pass_s + cell.token_s, cell.gamma_s)
    fastest = min(tpt_ms, key=tpt_ms.__getitem__)
    others = (name for name in tpt_ms if name != fastest)
    ties = [name for name in others if not over(outcomes[name], outcomes[fastest]).low > 1.0]
    said: dict[str, Any] = {"fastest": fastest, "ties": ties, "closed_form_rtt_ms": 1e3 * limit}
    cloud_ms = tpt_ms.get("cloud only")
    if cloud_ms is not None:
        said |= {f"{name}_over_cloud": tpt_ms[name] / cloud_ms for name in (REFERENCE, "vanilla") if name in tpt_ms}
    if "vanilla_over_cloud" in said:
        said["agrees"] = (said["vanilla_over_cloud"] < 1.0) == (cell.facts["rtt_ms"] < 1e3 * limit)
    return said


def maps(found: Sequence[Found]) -> dict[tuple[str, str], list[Found]]:
    """The cells of each data set and regime."""
    by_map: dict[tuple[str, str], list[Found]] = {}
    for cell in found:
        by_map.setdefault((cell["dataset"], cell["regime"]), []).append(cell)
    return by_map


def text(found: Sequence[Found]) -> Iterator[str]:
    """A map for each data set and regime, and what disagrees with the closed form."""
    for (dataset, regime), members in maps(found).items():
        rtts, gammas = (sorted({cell[name] for cell in members}) for name in ("rtt_ms", "gamma_ms"))
        at = {(cell["rtt_ms"], cell["gamma_ms"]): cell for cell in members}
        yield f"\n{dataset}, {regime}: the fastest row, and pipesd's time as a share of the cloud's alone (simulated)"
        yield f"{'draft token':>12} | RTT " + "".join(f"{rtt:>11g} ms" for rtt in rtts) + "   closed form, RTT below"
        for gamma in gammas:
            line = "".join(_cell(at[rtt, gamma]) for rtt in rtts)
            yield f"{gamma:>9g} ms |     {line}   {at[rtts[0], gamma]['closed_form_rtt_ms']:.0f} ms"
        told = [cell for cell in members if "agrees" in cell]
        wrong = [cell for cell in told if not cell["agrees"]]
        yield f"vanilla disagrees with the closed form in {len(wrong)} of {len(told)} cells" + (":" if wrong else "")
        for cell in wrong:
            yield (f"  RTT {cell['rtt_ms']:g} ms, draft token {cell['gamma_ms']:g} ms: the form says below "
                   f"{cell['closed_form_rtt_ms']:.0f} ms, vanilla takes {cell['vanilla_over_cloud']:.2f} of the cloud's"
                   )  # fmt: skip
    shown = dict.fromkeys(cell["fastest"] for cell in found)
    yield "\n" + ", ".join(f"{_sign(name)}: {name}" for name in shown) + "; =: another is not surely slower"


def beside(found: Sequence[Found]) -> Iterator[str]:
    """Every row in every cell of the map."""
    for (dataset, regime), members in maps(found).items():
        yield f"\n{dataset}, {regime}: ms per token / cloud s per 1000 tokens, all simulated"
        names = list(members[0]["rows"])
        yield f"{'draft token':>12} {'RTT':>7}    |" + "".join(f"{name[:14]:>15}" for name in names)
        for cell in members:
            rows = (cell["rows"][name] for name in names)
            line = "".join(f"{row['ms_per_token']:>9.1f}/{row['cloud_s_per_1000_tokens']:<5.1f}" for row in rows)
            yield f"{cell['gamma_ms']:>9g} ms {cell['rtt_ms']:>7g} ms | {line}"


def _cell(cell: Found) -> str:
    share = cell.get(f"{REFERENCE}_over_cloud")
    return f"{_sign(cell['fastest']) + '=' * bool(cell['ties']):>8} {'' if share is None else format(share, '.2f'):>5}"


def _sign(name: str) -> str:
    return SIGNS.get(name, name[:6])


def draw(found: Sequence[Found], path: str) -> None:
    """A heat map for each data set and regime: pipesd against the cloud as colour, the fastest row as a letter, the
    closed form as a line."""
    from matplotlib.colors import LogNorm

    panels = maps(found)
    drawn, axes = plots.pyplot().subplots(1, len(panels), figsize=(6.0 * len(panels), 4.8), squeeze=False)
    image = None
    for axis, ((dataset, regime), members) in zip(axes.flat, panels.items(), strict=True):
        rtts, gammas = (sorted({cell[name] for cell in members}) for name in ("rtt_ms", "gamma_ms"))
        at = {(cell["rtt_ms"], cell["gamma_ms"]): cell for cell in members}
        shares = [[at[rtt, gamma].get(f"{REFERENCE}_over_cloud", 1.0) for rtt in rtts] for gamma in gammas]
        image = axis.imshow(shares, origin="lower", aspect="auto", cmap="RdBu_r", norm=LogNorm(0.25, 4.0))
        for row, gamma in enumerate(gammas):
            for column, rtt in enumerate(rtts):
                axis.text(column, row, _sign(at[rtt, gamma]["fastest"]), ha="center", va="center", bbox=BOX)
        limits = [at[rtts[0], gamma]["closed_form_rtt_ms"] for gamma in gammas]
        axis.plot([_place(limit, rtts) for limit in limits], range(len(gammas)), "k-", label="arXiv 2606.25091")
        axis.set_xlim(-0.5, len(rtts) - 0.5)
        axis.set_xticks(range(len(rtts)), [f"{rtt:g}" for rtt in rtts])
        axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
        axis.set_xlabel("round trip, ms")
        axis.set_ylabel("a draft token, ms")
        axis.set_title(f"{dataset}, {regime}", fontsize=9)
    axes.flat[0].legend(fontsize=7, loc="upper right")
    drawn.colorbar(image, ax=axes.ravel().tolist(), label="pipesd / cloud only, ms per token; letters: the fastest")
    plots.save(drawn, path)


def _place(rtt_ms: float, rtts: Sequence[float]) -> float:
    """Where a round trip stands on an axis whose ticks are `rtts`, between two of them by a line."""
    import numpy as np

    return float(np.interp(rtt_ms, rtts, range(len(rtts))))


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, default, what in (
        ("rtts", RTTS_MS, "round trips of the map, ms"), ("gammas", GAMMAS_MS, "drafting times of the map, ms"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=float, nargs="+", default=default, metavar="MS", help=what)
    parser.set_defaults(seeds=1, samples=8)


def main() -> int:
    options = options_of(__doc__, add_options, rtts=QUICK_RTTS_MS, gammas=QUICK_GAMMAS_MS)
    if options.plot:
        plots.check(options.plot)
    rows = chosen(standing_rows(options.policy), options.only)
    stamp = begin()
    found = []
    for cell in cells(options):
        outcomes = measure(cell, rows, options)
        reports = {name: report(name, row, cell, outcomes) for name, row in rows.items()}
        found.append({
            "name": cell.name, "dataset": cell.dataset, "gamma_ms": 1e3 * cell.gamma_s, "pass_ms": 1e3 * cell.pass_s,
            **cell.facts, **judged(cell, reports, outcomes), "rows": reports,
        })  # fmt: skip
    print("\n".join([*beside(found), *text(found)]))
    if options.plot:
        draw(found, options.plot)
    finish("breakeven", stamp, options, {"cells": found})
    return 0


if __name__ == "__main__":
    end_with(main)
