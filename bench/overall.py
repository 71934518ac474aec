"""Which strategy takes how long per token: `python bench/overall.py [--quick] [--plot FILE] [--policy FILE]`.

PipeSD's table 1: scenarios 1 to 4, code and maths, in both payload regimes, on recorded traces and on one made up as in
its table 7, which stands beside the figures for code. Rows are tuned; those that end in -paper have the paper's own
settings. The last line is one JSON object.
"""

from __future__ import annotations

import argparse

import printed
from measuring import Cell
from scenarios import EDGES, gamma_s, scenario_link
from stamp import end_with
from table import SYNTHETIC, options_of, paper_rows, regimes_of, run, traces_of

from pipesd.errors import UsageError


def cells(options: argparse.Namespace) -> list[Cell]:
    """A cell for each scenario, data set and regime."""
    found = []
    for scenario in options.scenarios:
        for dataset, records in traces_of(options, (*printed.DATASETS, SYNTHETIC)).items():
            figures = printed.OVERALL[scenario].get("humaneval" if dataset == SYNTHETIC else dataset)
            for regime in regimes_of(options):
                found.append(Cell(
                    f"scenario {scenario} ({EDGES[scenario]}), {dataset}, {regime.name}", dataset, records,
                    scenario_link(scenario, regime), gamma_s(scenario), options.pass_ms / 1e3,
                    settings=regime.settings, printed={"ms_per_token": figures} if figures else {},
                    facts={"scenario": scenario, "regime": regime.name},
                ))  # fmt: skip
    return found


def scenarios(text: str) -> list[int]:
    """The numbers of `--scenarios`."""
    numbers = text.split(",")
    if unknown := [number for number in numbers if number not in map(str, EDGES)]:
        raise UsageError(f"--scenarios: got {unknown[0]!r}, wanted some of {','.join(map(str, EDGES))}")
    return [int(number) for number in numbers]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", default="1,2,3,4", metavar="N,...", help="these alone (default 1,2,3,4)")


def main() -> int:
    options = options_of(__doc__, add)
    options.scenarios = scenarios(options.scenarios)
    run("overall", options, cells(options), lambda cell: paper_rows(cell.dataset))
    return 0


if __name__ == "__main__":
    end_with(main)
