"""What each part of PipeSD brings: `python bench/ablation.py [--quick] [--plot FILE] [--policy FILE]`.

PipeSD's table 6, scenario 1, code, in both payload regimes: without the pipeline (nothing is sent or drafted before
its turn), with a fixed draft length, with the token's or the sequence's threshold alone, and all of it, `pipesd`. All
are tuned; rows that end in -paper have the paper's own settings where it gives them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse

import printed
from measuring import Cell, Row, tuned
from scenarios import GAMMA_S, TOKEN_ABLATION, VANILLA_TOKENS
from stamp import end_with
from table import SYNTHETIC, options_of, regimes_of, run, traces_of

ROWS = {
    "no-pipeline": tuned(strategy="pipesd", batching="none", waiting="idle"),
    "fixed": tuned(strategy="pipesd", trigger="fixed"),
    "token": tuned(strategy="pipesd", trigger="token"),
    "sequence": tuned(strategy="pipesd", trigger="sequence"),
    "fixed-paper": Row(
        {"strategy": "pipesd", "trigger": "fixed", "draft_length": VANILLA_TOKENS["humaneval"]}, printed="fixed"
    ),
    "token-paper": Row({"strategy": "pipesd", "trigger": "token", "token_threshold": TOKEN_ABLATION}, printed="token"),
}


def cells(options: argparse.Namespace) -> list[Cell]:
    """A cell for each data set and regime."""
    return [
        Cell(
            f"scenario 1, {dataset}, {regime.name}", dataset, records, regime.link(), GAMMA_S, options.pass_ms / 1e3,
            settings=regime.settings, facts={"regime": regime.name},
            printed={"ms_per_token": printed.ABLATION} if dataset in ("humaneval", SYNTHETIC) else {},
        )
        for dataset, records in traces_of(options, ("humaneval", SYNTHETIC)).items()
        for regime in regimes_of(options)
    ]  # fmt: skip


def main() -> int:
    options = options_of(__doc__)
    run("ablation", options, cells(options), lambda _: ROWS)
    return 0


if __name__ == "__main__":
    end_with(main)
