"""What planning token batches costs: `python bench/planner.py [--quick]`.

Prints a table of microseconds (the smallest of many repeats: what the code costs when nothing disturbs it): the
compiled kernel called with its arrays ready, the whole call with its checks and the plan made, and the whole call in
plain Python. What compiling takes, once and for ever, and loading what was compiled, once a process, stand apart. The
links are a fat and a thin payload at 20 Mbps and one so slow that every token waits for it, the worst case of the
search. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from stamp import end_with

from pipesd._kernels.token_batches import PLAN
from pipesd.policy.token_batches import plan_token_batches, warmup

ROOT = Path(__file__).parents[1]
Link = tuple[float, float, float, float]
WINDOWS = (1, 6, 20, 100, 1000)
LINKS: dict[str, Link] = {  # α, β, γ, gap in s
    "fat": (0.025, 0.116, 0.036, 0.025),
    "thin": (0.025, 0.00001, 0.036, 0.0005),
    "slow": (0.025, 0.5, 0.001, 0.001),
}
FIGURES_US = {"kernel, 20": 1.0, "call, 20": 5.0, "call, 1000": 1000.0}
ENOUGH_S = 0.002  # of one repeat


class Row(NamedTuple):
    link: str
    window: int
    batches: int
    kernel_us: float
    call_us: float
    plain_us: float


def least_us(action: Callable[[], object], repeats: int) -> float:
    number = max(1, round(ENOUGH_S / min(timeit.repeat(action, number=1, repeat=3))))
    return min(timeit.repeat(action, number=number, repeat=repeats)) / number * 1e6


def kernel_call(window: int, link: Link) -> Callable[[], object]:
    kernel = PLAN.compiled()
    assert kernel is not None
    ends, sizes = np.empty(window + 1), np.empty(window, np.int64)
    return lambda: kernel(window, *link, 0.0, ends, sizes)


def measure(name: str, link: Link, window: int, repeats: int) -> Row:
    return Row(
        name,
        window,
        len(plan_token_batches(window, *link).sizes),
        least_us(kernel_call(window, link), repeats),
        least_us(lambda: plan_token_batches(window, *link), repeats),
        least_us(lambda: plan_token_batches(window, *link, compiled=False), max(3, repeats // 8)),
    )


def loading_s() -> dict[str, float]:
    """Seconds in fresh processes: `import numba` alone, then the warm-up without and with compiled code kept."""
    program = (
        "import time; begun = time.perf_counter(); import numba; imported = time.perf_counter()\n"
        "from pipesd.policy.token_batches import warmup; assert warmup()\n"
        "print(imported - begun, time.perf_counter() - imported)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
        times = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
            )
            times.append([float(word) for word in done.stdout.split()])
    return {"import_numba": times[1][0], "compile": times[0][1], "load_compiled": times[1][1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: only to see that it works")
    options = parser.parse_args()
    repeats = 3 if options.quick else 40

    if not warmup():
        print("numba is missing or does not work: there is nothing to compare", file=sys.stderr)
        return 2
    print(f"{'link':8}{'window':>7}{'batches':>9}{'kernel us':>11}{'call us':>10}{'plain us':>11}{'plain / call':>14}")
    rows = []
    for name, link in LINKS.items():
        for window in WINDOWS:
            row = measure(name, link, window, repeats)
            rows.append(row)
            print(
                f"{name:8}{window:7}{row.batches:9}{row.kernel_us:11.2f}{row.call_us:10.2f}{row.plain_us:11.1f}"
                f"{row.plain_us / row.call_us:14.1f}"
            )
    apart_s = loading_s()
    print(
        f"apart: compile {apart_s['compile']:.2f} s, load what was compiled {apart_s['load_compiled']:.2f} s, "
        f"import numba {apart_s['import_numba']:.2f} s"
    )
    worst = {
        f"{kind}, {window}": max(getattr(row, f"{kind}_us") for row in rows if row.window == window)
        for kind, window in (("kernel", 20), ("call", 20), ("call", 1000))
    }
    result = {
        "bench": "planner",
        "kind": "real",
        "worst_us": {name: round(value, 3) for name, value in worst.items()},
        "figures_us": FIGURES_US,
        "reached": all(worst[name] <= figure for name, figure in FIGURES_US.items()),
        "apart_s": {name: round(value, 3) for name, value in apart_s.items()},
        "rows": [
            {key: round(value, 3) if isinstance(value, float) else value for key, value in row._asdict().items()}
            for row in rows
        ],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    end_with(main)
