"""Fixed thresholds, and where the tuner goes among them: `python bench/thresholds.py [--side N] [--quick]`.

The time per token over both thresholds of the trigger: PipeSD's figure of fixed thresholds. R1 is the sequence, R2 the
token threshold; each pair is measured on the prompts that measure, over all seeds. The product of a draft's
probabilities is never above the last of them, so where R2 <= R1 the token threshold never asks first: that part of the
square is useless for it, and R2 changes nothing there. That it is so, and how far the tuned thresholds, found on other
prompts, are from the best of the grid, is part of the result. With --plot heat maps, the useless part hatched, the
thresholds found with each seed marked.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import plots
import printed
from measuring import Cell, Row, ms_per_token, run_row, split
from scenarios import gamma_s, scenario_link
from stamp import end_with, progress
from table import REFERENCE, options_of, regimes_of, run, traces_of

from pipesd.errors import UsageError

SIDE, QUICK_SIDE = 9, 3
PIPESD = Row({"strategy": "pipesd"})


class Surface(NamedTuple):
    """ms per token over both thresholds: `ms[i][j]` with R1 = `values[i]`, R2 = `values[j]`."""

    values: tuple[float, ...]
    ms: tuple[tuple[float, ...], ...]

    def best(self) -> tuple[float, float, float]:
        """The lowest: R1, R2, ms per token."""
        ms, i, j = min((ms, i, j) for i, row in enumerate(self.ms) for j, ms in enumerate(row))
        return self.values[i], self.values[j], ms

    def useless(self) -> list[tuple[int, int]]:
        """Where the token threshold cannot ask first."""
        count = range(len(self.values))
        return [(i, j) for i in count for j in count if self.values[j] <= self.values[i]]

    def useless_changes_nothing(self) -> bool:
        """Whether there R2 is without any effect, as it has to be."""
        return all(self.ms[i][j] == self.ms[i][0] for i, j in self.useless())

    def as_json(self) -> dict[str, Any]:
        r1, r2, ms = self.best()
        worst = max(map(max, self.ms))
        return {
            "r1": self.values, "r2": self.values, "ms_per_token": self.ms,
            "best": {"sequence_threshold": r1, "token_threshold": r2, "ms_per_token": ms}, "worst_ms_per_token": worst,
            "useless_settings": len(self.useless()), "settings": len(self.values) ** 2,
            "useless_changes_nothing": self.useless_changes_nothing(),
        }  # fmt: skip


def sides(count: int) -> tuple[float, ...]:
    """The values of a threshold, from 0.01 to 0.99."""
    return tuple(0.01 + 0.98 * step / (count - 1) for step in range(count))


def surface(cell: Cell, count: int, options: argparse.Namespace) -> Surface:
    _, rest = split(cell, options.quick)

    def ms(r1: float, r2: float) -> float:
        found = {"sequence_threshold": r1, "token_threshold": r2}
        several = [
            run_row(PIPESD, cell, rest, tokens=options.tokens, seed=seed, found=found) for seed in range(options.seeds)
        ]
        return ms_per_token([stats for each in several for stats in each])

    values = sides(count)
    return Surface(values, tuple(tuple(ms(r1, r2) for r2 in values) for r1 in values))


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=SIDE, metavar="N", help=f"values of each (default {SIDE})")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Scenario 1 for each data set and payload, its surface measured."""
    made = []
    for dataset, records in traces_of(options).items():
        figures = printed.OVERALL[1].get(dataset)
        for regime in regimes_of(options):
            cell = Cell(
                f"{dataset}, {regime.name}", dataset, records, scenario_link(1, regime), gamma_s(1),
                options.pass_ms / 1e3, settings=regime.settings, printed={"ms_per_token": figures} if figures else {},
            )  # fmt: skip
            found = surface(cell, options.side, options)
            progress(f"{cell.name}: {options.side}² thresholds measured")
            made.append(cell._replace(facts={"regime": regime.name, "surface": found.as_json()}))
    return made


def draw(cells: Sequence[Mapping[str, Any]], path: str) -> None:
    """A heat map for each cell."""
    drawn, axes = plots.pyplot().subplots(
        1, len(cells), figsize=(5 * len(cells), 4.4), squeeze=False, layout="constrained"
    )
    for axis, cell in zip(axes.flat, cells, strict=True):
        found = cell["surface"]
        values, count = found["r1"], len(found["r1"])
        half = (values[1] - values[0]) / 2
        across = (values[0] - half, values[-1] + half) * 2
        image = axis.imshow(found["ms_per_token"], origin="lower", extent=across, aspect="auto", cmap="viridis_r")
        edges = [values[0] - half, values[-1] + half]
        axis.fill_between(edges, edges, edges[1], facecolor="none", edgecolor="white", hatch="//", linewidth=0.0)
        best = found["best"]
        axis.plot(best["token_threshold"], best["sequence_threshold"], "w*", markersize=14, label=f"best of {count}²")
        for number, tuned in enumerate(cell["rows"].get(REFERENCE, {}).get("tuned", ())):
            if tuned:
                axis.plot(tuned["token_threshold"], tuned["sequence_threshold"], "rx", label="" if number else "tuned")
        axis.set_xlim(*edges)
        axis.set_ylim(*edges)
        axis.set_xlabel("R2, token threshold (hatched: R2 <= R1)")
        axis.set_ylabel("R1, sequence threshold")
        axis.set_title(cell["name"], fontsize=9)
        axis.legend(fontsize=7)
        drawn.colorbar(image, ax=axis, label="ms per token")
    plots.save(drawn, path)


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the surfaces show; how far the tuned row is from the best of the grid goes into its row."""
    for cell in found:
        here, best = cell["surface"], cell["surface"]["best"]
        yield (f"\n{cell['name']}: best of {here['settings']} fixed thresholds R1 {best['sequence_threshold']:.2f}, "
               f"R2 {best['token_threshold']:.2f}: {best['ms_per_token']:.1f} ms per token; worst "
               f"{here['worst_ms_per_token']:.1f}")  # fmt: skip
        said = "nothing" if here["useless_changes_nothing"] else "SOMETHING: the trigger is not the paper's"
        yield (f"  useless, as R2 <= R1: half of the square, {here['useless_settings']} of {here['settings']} settings;"
               f" R2 changes {said} there")  # fmt: skip
        if REFERENCE in cell["rows"]:
            surplus = cell["rows"][REFERENCE]["ms_per_token"] / best["ms_per_token"]
            cell["rows"][REFERENCE]["over_best"] = surplus
            yield f"  tuned on other prompts: {surplus:.3f} times the best of the grid"


def main() -> int:
    options = options_of(__doc__, add, side=QUICK_SIDE)
    if options.side < 2:
        raise UsageError(f"--side: got {options.side}, wanted at least 2")
    if options.plot:
        plots.check(options.plot)
    found = run("thresholds", options, cells(options), lines=lines, draw=draw)
    return 0 if all(cell["surface"]["useless_changes_nothing"] for cell in found) else 1


if __name__ == "__main__":
    end_with(main)
