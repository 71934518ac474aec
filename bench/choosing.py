"""What a choice costs: `Sampler.choose` beside numpy's arg-max and the plain draw, and beside a target's pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipesd.cloud.target import TorchTarget
from pipesd.policy.accept import Draw, choose
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling

WIDTHS = (49_152, 152_064)
TEMPERATURE = 0.8
PREFIX = 400  # ids that penalties count
WARM_UP = 3
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p .95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "min-p .05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
}
FIGURE_MS = 0.3  # of a choice without truncation among the most ids
ROWS = (1, 8)  # of the target's pass


def made_up_row(width: int, random: np.random.Generator) -> np.ndarray:
    """Logits like a language model's: most ids far below a few, float32 (width,)."""
    row = random.normal(0, 2.5, width)
    row[random.choice(width, 60, replace=False)] += random.exponential(5, 60)
    return row.astype(np.float32)


def plainly(row: np.ndarray, random: np.random.Generator) -> int:
    """A draw as one would first write it."""
    x = row.astype(np.float64) / TEMPERATURE
    weights = np.exp(x - x.max())
    return int(random.choice(len(row), p=weights / weights.sum()))


def in_turn(forms: dict[str, Callable[[int], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Best and median time of each form, ms; they take turns, and each is given the number of its turn."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(-WARM_UP, repeats):
        for name, form in forms.items():
            began = time.perf_counter()
            form(turn + WARM_UP)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: {"best_ms": min(ms), "median_ms": float(np.median(ms))} for name, ms in times.items()}


def costs(repeats: int, seed: int) -> dict[int, dict[str, dict[str, float]]]:
    """For each width and form the time of a choice."""
    return {width: in_turn(forms_of(width, seed), repeats) for width in WIDTHS}


def forms_of(width: int, seed: int) -> dict[str, Callable[[int], object]]:
    """Ways to choose among so many ids; turn after turn they are given other rows."""
    random = np.random.default_rng(seed)
    rows = [made_up_row(width, random) for _ in range(8)]
    prefix = random.integers(width, size=PREFIX).tolist()
    forms: dict[str, Callable[[int], object]] = {
        "numpy argmax": lambda turn: int(rows[turn % 8].argmax()),
        "plain draw": lambda turn: plainly(rows[turn % 8], random),
    }

    def chosen(sampler: Sampler, turn: int) -> object:
        return sampler.choose(rows[turn % 8], PREFIX + turn, prefix)

    for name in FORMS:
        forms[name] = partial(chosen, sampler_of(name, seed))
    return forms


def sampler_of(form: str, seed: int) -> Sampler:
    return Sampler(Sampling(**{"temperature": TEMPERATURE, **FORMS[form]}), seed)


def beside_a_pass(target: TorchTarget, ids: Sequence[int], repeats: int, seed: int) -> dict[int, dict[str, float]]:
    """For passes of some rows behind `ids`: what the pass takes, and what the choices of its rows add, ms."""
    found = {}
    prefix, new = list(ids[: -max(ROWS)]), list(ids[-max(ROWS) :])
    target.truncate(0, 0)
    target.forward([(0, prefix, 0)])
    logits: list[np.ndarray] = []

    def run(rows: int, turn: int) -> None:
        logits[:] = target.forward([(0, new[:rows], rows)])
        target.truncate(0, len(prefix))

    def chosen(draw: Draw, turn: int) -> object:
        return choose(logits[0], draw)

    for rows in ROWS:
        forms: dict[str, Callable[[int], object]] = {"pass": partial(run, rows)}
        for name in ("temperature", "top-p .95"):
            forms[name] = partial(chosen, Draw(sampler_of(name, seed), [*prefix, new[0]], new[1:rows]))
        times = in_turn(forms, repeats)
        found[rows] = {name: each["median_ms"] for name, each in times.items()}
    return found


def cost_table(found: dict[int, dict[str, dict[str, float]]]) -> list[str]:
    lines = [f"{'ids':>8} {'':14}{'best ms':>9}{'median':>9}{'× arg-max':>11}{'× plain draw':>14}"]
    for width, forms in found.items():
        for name, ms in forms.items():
            over = [ms["best_ms"] / forms[other]["best_ms"] for other in ("numpy argmax", "plain draw")]
            lines.append(f"{width:8} {name:14}{ms['best_ms']:9.3f}{ms['median_ms']:9.3f}{over[0]:11.2f}{over[1]:14.3f}")
    reached = found[max(found)]["temperature"]["best_ms"]
    return [
        *lines,
        f"without truncation, among {max(found)} ids: {reached:.3f} ms at best; the figure is {FIGURE_MS} ms",
    ]


def pass_table(found: dict[int, dict[str, float]]) -> list[str]:
    lines = []
    for rows, ms in found.items():
        whole = ms["pass"]
        added = ", ".join(f"{name} {each:.2f} ms ({each / whole:.1%})" for name, each in ms.items() if name != "pass")
        lines.append(f"a pass of {rows} rows takes {whole:.1f} ms; the choices of its rows add: {added}")
    return lines
