"""What the uplink's bandwidth changes: `python bench/bandwidth.py [--quick] [--plot FILE] [--policy FILE]`.

PipeSD's figure 5: 10, 20, 40 and 80 Mbit/s up, code, in both payload regimes. Its figures were read off a chart. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse

import plots
import printed
from measuring import Cell
from scenarios import GAMMA_S
from stamp import end_with
from table import SYNTHETIC, options_of, paper_rows, regimes_of, run, traces_of


def cells(options: argparse.Namespace) -> list[Cell]:
    """A cell for each bandwidth, data set and regime."""
    return [
        Cell(
            f"{mbps} Mbit/s, {dataset}, {regime.name}", dataset, records, regime.link(mbps), GAMMA_S,
            options.pass_ms / 1e3, settings=regime.settings,
            printed={"ms_per_token": figures} if dataset in ("humaneval", SYNTHETIC) else {},
            facts={"up_mbps": mbps, "regime": regime.name},
        )
        for dataset, records in traces_of(options, ("humaneval", SYNTHETIC)).items()
        for regime in regimes_of(options)
        for mbps, figures in printed.BANDWIDTH.items()
    ]  # fmt: skip


def main() -> int:
    options = options_of(__doc__)
    run(
        "bandwidth", options, cells(options), lambda cell: paper_rows(cell.dataset),
        draw=lambda found, path: plots.lines(found, path, "up_mbps", "uplink, Mbit/s", ("dataset", "regime")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    end_with(main)
