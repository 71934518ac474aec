"""Plots of tables, as files. Matplotlib is loaded when one is asked for, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesd.errors import UsageError

Cells = Sequence[Mapping[str, Any]]  # as they stand in a table's JSON


def check(path: str) -> None:
    """UsageError, before anything is measured, where the plot could not be made."""
    canvas = pyplot().figure().canvas
    ending = Path(path).suffix.removeprefix(".")
    pyplot().close("all")
    if ending not in canvas.get_supported_filetypes():
        raise UsageError(f"--plot {path}: no plot ends in {ending!r}; take .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no such folder; make it first")


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files alone."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write the figure and forget it."""
    try:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}; give a place that can be written") from None
    pyplot().close(figure)


def bars(cells: Cells, path: str, figure: str = "ms_per_token", label: str = "ms per token") -> None:
    """A panel for each cell, a bar for each row, the printed figure as a mark where there is one."""
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    drawn, axes = pyplot().subplots(lines, columns, figsize=(4.2 * columns, 4.2 * lines), squeeze=False)
    for axis, cell in zip(axes.flat, cells, strict=False):
        names = list(cell["rows"])
        axis.barh(names, [cell["rows"][name][figure] or 0.0 for name in names], color="tab:blue")
        printed = {name: cell["rows"][name]["printed"].get(figure) for name in names}
        marks = {name: value for name, value in printed.items() if value is not None}
        axis.plot(list(marks.values()), list(marks), "k|", markersize=14, label="printed")
        axis.invert_yaxis()
        axis.set_title(cell["name"], fontsize=9)
        axis.set_xlabel(label)
    for axis in list(axes.flat)[len(cells) :]:
        axis.axis("off")
    save(drawn, path)


def lines(cells: Cells, path: str, x: str, x_label: str, group: Sequence[str]) -> None:
    """A panel for each set of values of `group`, a line for each row over `x`, printed figures dashed."""
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        panels.setdefault(tuple(cell[name] for name in group), []).append(cell)
    drawn, axes = pyplot().subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), squeeze=False)
    for axis, (names, members) in zip(axes.flat, panels.items(), strict=True):
        for number, row in enumerate(members[0]["rows"]):
            values = [cell["rows"][row] for cell in members]
            across = [cell[x] for cell in members]
            axis.plot(across, [value["ms_per_token"] for value in values], "o-", color=f"C{number % 10}", label=row)
            if not row.endswith("-paper") and all("ms_per_token" in value["printed"] for value in values):
                printed = [value["printed"]["ms_per_token"] for value in values]
                axis.plot(across, printed, "--", color=f"C{number % 10}")
        axis.set_xscale("log", base=2)
        axis.set_xticks([cell[x] for cell in members], [f"{cell[x]:g}" for cell in members])
        axis.set_title(", ".join(map(str, names)), fontsize=9)
        axis.set_xlabel(x_label)
        axis.set_ylabel("ms per token; dashed: printed")
    axes.flat[-1].legend(fontsize=7, bbox_to_anchor=(1.02, 1.0), loc="upper left")
    save(drawn, path)
