"""What a table says of energy: joules per 100 tokens of each row, the printed ones, ratios, or why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paired import paired_ratio
from printed import Figures
from table import REFERENCE

from pipesd.energy import Reading

FIGURE = "joules_per_100_tokens"


class Turn(NamedTuple):
    """What a row's turn brought: the statistics and ids of each generation, and what the meter says."""

    each: Sequence[Mapping[str, Any]]
    ids: Sequence[tuple[int, ...]]
    gpu: Reading
    cpu: Reading

    def reading(self, on_gpu: bool) -> Reading:
        """That of the GPUs, or that of the processors."""
        return self.gpu if on_gpu else self.cpu

    @property
    def tokens(self) -> int:
        """Output tokens, at least 1."""
        return max(1, sum(stats["tokens"] for stats in self.each))


def energy(name: str, turns: Mapping[str, Sequence[Turn]], figures: Figures, on_gpu: bool) -> dict[str, Any]:
    """What is said of a row's energy: joules per 100 tokens, or why there are none; the printed figure, and ratios."""
    each, theirs = joules(turns[name], on_gpu), figures.get(name)
    reasons = [reading.why for turn in turns[name] if (reading := turn.reading(on_gpu)).joules is None]
    said: dict[str, Any] = {
        FIGURE: None,
        "energy_of": "GPUs" if on_gpu else "processors, edge and cloud",
        "energy_why": f"not readable: {reasons[0]}" if reasons else "",
        "readings": [{"gpu": turn.gpu._asdict(), "cpu": turn.cpu._asdict()} for turn in turns[name]],
        "printed_joules_per_100_tokens": theirs,
        "printed_joules_over_pipesd": None if theirs is None else theirs / figures[REFERENCE],
    }
    if each is None:
        return said
    whole = sum(turn.reading(on_gpu).joules or 0.0 for turn in turns[name])
    said[FIGURE] = 100 * whole / sum(turn.tokens for turn in turns[name])
    if theirs is not None:
        said["joules_over_printed"] = said[FIGURE] / theirs
    if name != REFERENCE and REFERENCE in turns and (reference := joules(turns[REFERENCE], on_gpu)) is not None:
        ratio = paired_ratio(each, reference)
        said["joules_over_pipesd"] = {**ratio._asdict(), "verdict": ratio.verdict}
    return said


def joules(turns: Sequence[Turn], on_gpu: bool) -> list[float] | None:
    """Per token, of each turn; None if one has no reading."""
    each = [value / turn.tokens for turn in turns if (value := turn.reading(on_gpu).joules) is not None]
    return each if len(each) == len(turns) else None


def lines(name: str, reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The energy of a cell, line by line."""
    yield f"\n{name}: energy"
    yield f"{'':16}{'J/100 tokens':>13}{'printed':>9}{'ours/pr.':>9}{'printed/pipesd':>15}  over pipesd"
    for row, said in reports.items():
        ratio = said.get("joules_over_pipesd")
        shown = f"{ratio['mean']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] {ratio['verdict']}" if ratio else ""
        values = (said[FIGURE], said["printed_joules_per_100_tokens"], said.get("joules_over_printed"),
                  said["printed_joules_over_pipesd"])  # fmt: skip
        ours, theirs, over, printed_over = ("" if value is None else f"{value:.2f}" for value in values)
        yield f"{row:16}{ours or 'none':>13}{theirs:>9}{over:>9}{printed_over:>15}  {shown or said['energy_why']}"


def drawn(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows with the printed joules as what is printed."""
    return {name: {**said, "printed": {FIGURE: said["printed_joules_per_100_tokens"]}} for name, said in rows.items()}
