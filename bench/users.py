"""Several clients on one verifier, PipeSD against the others: `python bench/users.py [--quick]`.

PipeSD's appendix I. Each client has a link of its own and generates behind its share of the prompts; all share one
target, whose passes take up the drafts of whoever waits (a pass takes --pass-ms, and --token-ms for each id in it).
Every row is tuned anew for each number of clients. `lower` is by how many per cent the time per token of `pipesd` is
below the row's, with its 95 % interval; the paper prints 22.9 to 37.1 % with 2 to 8 clients.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plots
from measuring import TUNING_RECORDS, Cell
from printed import USERS_PERCENT
from scenarios import gamma_s, scenario_link
from stamp import end_with
from table import REFERENCE, options_of, regimes_of, run, traces_of

from pipesd.errors import UsageError

USERS = (1, 2, 4, 8)
QUICK_USERS = (1, 2)
BASELINES = ("vanilla", "hsl", "edgellm")  # of the paper


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, nargs="+", metavar="N", help="numbers of clients (default 1 2 4 8)")
    parser.add_argument("--token-ms", type=float, default=0.5, metavar="MS", help="of a pass for each id (default 0.5)")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Scenario 1 for each data set, payload and number of clients; without --users, of as many as have prompts."""
    if options.users and min(options.users) < 1:
        raise UsageError(f"--users: got {min(options.users)}, wanted at least 1")
    counts = options.users or USERS
    return [
        Cell(
            f"{users} client{'s' * (users > 1)}, {dataset}, {regime.name}", dataset, records,
            scenario_link(1, regime), gamma_s(1), options.pass_ms / 1e3, options.token_ms / 1e3, users,
            regime.settings, facts={"regime": regime.name},
        )
        for dataset, records in traces_of(options).items()
        for regime in regimes_of(options)
        for users in counts
        if options.users or users <= len(records) - TUNING_RECORDS
    ]  # fmt: skip


def compare(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """By how many per cent less time `pipesd` takes than each row: into the rows, and as lines."""
    yield f"\n{'':38}{'':16}{REFERENCE} lower by, %{'':14}printed, %"
    for cell in found:
        for name, said in cell["rows"].items():
            if "over_pipesd" not in said:
                continue
            mean, low, high = (100 * (1 - 1 / said["over_pipesd"][end]) for end in ("mean", "low", "high"))
            said["pipesd_lower_percent"] = {"mean": mean, "low": low, "high": high}
            theirs = ""
            if name in BASELINES and cell["users"] > 1:
                said["printed"] = {**said["printed"], "pipesd_lower_percent": list(USERS_PERCENT)}
                theirs = f"{USERS_PERCENT[0]} to {USERS_PERCENT[1]}"
            yield f"{cell['name']:38}{name:16}{mean:7.1f} {f'[{low:.1f}, {high:.1f}]':24}{theirs}"


def draw(found: Sequence[Mapping[str, Any]], path: str) -> None:
    plots.lines(found, path, "users", "clients of one verifier", ("dataset", "regime"))


def main() -> int:
    options = options_of(__doc__, add, users=QUICK_USERS)
    run("users", options, cells(options), lines=compare, draw=draw)
    return 0


if __name__ == "__main__":
    end_with(main)
