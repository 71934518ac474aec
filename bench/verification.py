"""How often is verified, and what is accepted: `python bench/verification.py [--quick] [--plot FILE] [--policy FILE]`.

PipeSD's table 7, scenario 1, code: verifications per token, draft tokens per verification, accepted of those verified,
in both payload regimes, with tuned rows and with the paper's own settings (-paper). The trace table7 is made up so that
`hsl-paper` has the paper's figures. What the other rows do on it is measured; it hangs on how sure of themselves wrong
guesses are, which the paper does not say and was chosen. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plots
import printed
from measuring import Cell
from scenarios import GAMMA_S
from stamp import end_with
from table import SYNTHETIC, options_of, paper_rows, regimes_of, run, traces_of

FIGURES = {"verifications_per_token": "verifications/token", "draft_length": "draft length", "acceptance": "accepted"}
PRINTED = {figure: {row: said[figure] for row, said in printed.VERIFICATION.items()} for figure in FIGURES}


def cells(options: argparse.Namespace) -> list[Cell]:
    """A cell for each data set and regime."""
    return [
        Cell(
            f"scenario 1, {dataset}, {regime.name}", dataset, records, regime.link(), GAMMA_S, options.pass_ms / 1e3,
            settings=regime.settings, facts={"regime": regime.name},
            printed=PRINTED if dataset in ("humaneval", SYNTHETIC) else {},
        )
        for dataset, records in traces_of(options, ("humaneval", "gsm8k", SYNTHETIC)).items()
        for regime in regimes_of(options)
    ]  # fmt: skip


def lines(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table's own columns, each beside the printed figure."""
    for cell in cells:
        yield f"\n{cell['name']}"
        yield f"{'':16}" + "".join(f"{label:>21}{'printed':>9}" for label in FIGURES.values())
        for name, said in cell["rows"].items():
            shown = (f"{_shown(said[figure]):>21}{_shown(said['printed'].get(figure)):>9}" for figure in FIGURES)
            yield f"{name:16}" + "".join(shown)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def draw(cells: Sequence[Mapping[str, Any]], path: str) -> None:
    plots.bars(cells, path, "verifications_per_token", "verifications per token")


def main() -> int:
    options = options_of(__doc__)
    run("verification", options, cells(options), lambda cell: paper_rows(cell.dataset), lines=lines, draw=draw)
    return 0


if __name__ == "__main__":
    end_with(main)
