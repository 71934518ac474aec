"""The tuner against a grid and chance: `python bench/autotuner.py [--quick]`.

PipeSD's table 3. Each way to find the two thresholds has 16 samples, each the time per token over 20 tokens of the
tuning prompts, the same pieces of text for all. `tuner` is the runtime's with its defaults, `tuner xi 0.1` the same
with the margin of expected improvement that the paper gives, `paper's tuner` searches the whole square and begins at
random; `grid` has 4 × 4 settings, `random` draws evenly over the square; `first` are the thresholds that a run begins
with. What was found is measured afterwards on other prompts. `online` begins as `first` and tunes while it is measured,
so what its search costs is part of its figure. The row `pipesd` was tuned as in all tables: as many samples, each over
all of the tuning prompts.

`over tuner` is how many times the tuner's time per token a way's is, with a 95 % interval over the seeds. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import printed
from measuring import Cell, Row, Search, ms_per_token, run_row, split
from paired import paired_ratio
from scenarios import gamma_s, scenario_link
from searches import WAYS, Found, Thresholds, pieces
from stamp import end_with
from table import options_of, regimes_of, run, traces_of

from pipesd.errors import UsageError
from pipesd.policy.search_space import Setting
from pipesd.policy.tuner import SAMPLES
from pipesd.policy.tuning import TRIAL_TOKENS
from pipesd.sim.search import Cost, Space

PIPESD = Row({"strategy": "pipesd"})
ONLINE = Row({"strategy": "pipesd", "tuning": "auto"})
PRINTED = {"tuner": "pipesd"}  # how the paper names a way, where not as it is named here
Made = dict[tuple[str, str, int], Found]  # by cell, way and seed


def cells(options: argparse.Namespace) -> list[Cell]:
    """Scenario 1 for each data set and payload."""
    return [
        Cell(
            f"{dataset}, {regime.name}", dataset, records, scenario_link(1, regime), gamma_s(1), options.pass_ms / 1e3,
            settings=regime.settings, facts={"regime": regime.name},
            printed={"ms_per_token": printed.AUTOTUNER[dataset]} if dataset in printed.AUTOTUNER else {},
        )
        for dataset, records in traces_of(options).items()
        for regime in regimes_of(options)
    ]  # fmt: skip


def searching(way: str, cell: Cell, options: argparse.Namespace, made: Made) -> Search:
    """The way as a row's search. The cost that it is given, over all of the tuning prompts, is not what a sample is
    here: each takes its own piece of them."""
    tuning, _ = split(cell, options.quick)

    def search(space: Space, first: Setting, samples: int, seed: int, cost: Cost) -> Setting:
        texts = list(pieces(tuning, samples, seed, options.trial_tokens))

        def sample(number: int, thresholds: Thresholds) -> float:
            each = run_row(PIPESD, cell, [texts[number]], tokens=options.trial_tokens, seed=seed, found=thresholds)
            return ms_per_token(each) / 1e3

        made[cell.name, way, seed] = WAYS[way](sample, samples, seed)
        return dict(made[cell.name, way, seed].thresholds)

    return search


def budgets(found: Sequence[Mapping[str, Any]], made: Made, trial_tokens: int) -> Iterator[str]:
    """What each way spent and how it did against the tuner, into its row, and as lines."""
    yield f"\n{'':22}{'':16}{'budget':18}{'over tuner':24}R1, R2 found"
    for cell in found:
        tuner = cell["rows"].get("tuner", {}).get("each_ms_per_token")
        for way in WAYS:
            searches = [search for key, search in made.items() if key[:2] == (cell["name"], way)]
            if not searches:
                continue
            row = cell["rows"][way]
            row["samples"] = [len(search.samples) for search in searches]
            row["tried"] = [[[*s.thresholds.values(), s.tpt_s] for s in search.samples] for search in searches]
            against = ""
            if tuner and way != "tuner":
                ratio = paired_ratio(row["each_ms_per_token"], tuner)
                row["over_tuner"] = {**ratio._asdict(), "verdict": ratio.verdict}
                against = f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            at = "; ".join(", ".join(f"{v:.2f}" for v in search.thresholds.values()) for search in searches)
            budget = f"{max(row['samples'])} × {trial_tokens} tokens"
            yield f"{cell['name']:22}{way:16}{budget:18}{against:24}{at}"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trial-tokens", type=int, default=TRIAL_TOKENS, metavar="N",
                        help=f"of one sample (default {TRIAL_TOKENS}, as in the paper and in a run)")  # fmt: skip


def main() -> int:
    options = options_of(__doc__, add)
    if options.trial_tokens < 1:
        raise UsageError(f"--trial-tokens: got {options.trial_tokens}, wanted at least 1")
    if not 1 <= options.samples <= SAMPLES:
        raise UsageError(f"--samples: got {options.samples}, wanted 1 to {SAMPLES}: the grid has no more settings")
    made: Made = {}

    def own_rows(cell: Cell) -> dict[str, Row]:
        ways = {
            way: PIPESD._replace(search=searching(way, cell, options, made), printed=PRINTED.get(way, way))
            for way in WAYS
        }
        return {"first": PIPESD, "online": ONLINE, **ways}

    run("autotuner", options, cells(options), own_rows, lines=lambda found: budgets(found, made, options.trial_tokens))
    return 0


if __name__ == "__main__":
    end_with(main)
