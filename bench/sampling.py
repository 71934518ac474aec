"""What does sampling cost? `python bench/sampling.py --draft FILE --target FILE [--prompts FILE...] [--quick]`.

In parts (--only):

- `acceptance`: how often a draft token is accepted at temperatures .6, .8 and 1, by rejection sampling and under
  shared noise (by their formulas, and counted with the real code), along texts that the target samples.
- `predictor`: how well the draft's probability, its entropy and the margin of the race foretell acceptance under noise,
  as areas under the ROC curve, on the same texts.
- `cost`: what a choice takes, beside numpy's arg-max, the plain way to draw, and the target's pass. Without models only
  the first two.
- `run`: time, bytes and acceptance of whole sessions. Under shared noise the target is replayed: what it samples for
  each prompt and seed is recorded first, then its ids come in a paced time, so that the draft model has the processor
  for itself. Rejection sampling cannot be replayed (its text hangs on what is drafted): real sessions, in which both
  models share the processor, so that only bytes and acceptance are to be compared.

Outputs under shared noise that are not the target's own sample make the exit code 1. Intervals
are of 95 %. The last line is one JSON object, in which they are [value, low, high].
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from acceptance import Tally, acceptance_table, predictor_table
from both_rows import Both
from choosing import FIGURE_MS, beside_a_pass, cost_table, costs, pass_table
from recording import prompts_of
from sampled_runs import run_table, runs
from stamp import end_with

from pipesd.errors import UsageError
from pipesd.policy.noise import warmup

PARTS = ("acceptance", "predictor", "cost", "run")
TEMPERATURES = (0.6, 0.8, 1.0)
OWN_PROMPTS = str(Path(__file__).parents[1] / "tests" / "prompts.json")


def tallies(both: Both, options: argparse.Namespace) -> dict[float, Tally]:
    """The texts of every temperature, taken in."""
    found = {}
    prompts = both.encode(prompts_of(options.prompts), options.texts)
    for temperature in options.temperatures:
        found[temperature] = tally = Tally(temperature, options.seeds)
        for number, ids in enumerate(prompts, options.seed):
            tally.text(list(both.text(ids, temperature, number, options.tokens)))
            progress(f"temperature {temperature:g}: {number + 1 - options.seed} of {len(prompts)} texts")
    return found


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="draft model, a GGUF file")
    parser.add_argument("--target", help="target model, a GGUF file")
    parser.add_argument("--prompts", nargs="+", metavar="FILE", default=[OWN_PROMPTS],
                        help="JSON objects with a prompt, question or text (default tests/prompts.json)")  # fmt: skip
    parser.add_argument("--only", metavar="PART,...", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="very little of everything: only to see that it works")
    for name, default, text in (
        ("rtt", 20.0, "round trip of the link, ms"), ("pass", 40.0, "what a pass of the replayed target takes, ms"),
        ("token", 3.0, "and so much more for each id in it, ms"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}-ms", type=float, default=default, help=f"{text} (default {default:g})")
    parser.set_defaults(beta_ms=0.0, fat=False, up_mbps=20.0, down_mbps=200.0, temperatures=TEMPERATURES)
    for name, default, text in (
        ("texts", 40, "texts at each temperature, at most one of each prompt"), ("tokens", 48, "ids of each"),
        ("seeds", 4, "seeds that are counted with, at each place"), ("repeats", 200, "turns of each form of `cost`"),
        ("run-prompts", 6, "prompts of `run`"), ("seed", 0, "the first seed"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    options = parser.parse_args()
    if options.quick:
        options.temperatures = (0.8,)
        options.texts, options.tokens, options.seeds, options.repeats, options.run_prompts = 3, 12, 2, 10, 1
    return options


def main() -> int:
    options = arguments()
    parts = options.only.split(",")
    if unknown := set(parts).difference(PARTS):
        raise UsageError(f"no part {min(unknown)!r}: there are {', '.join(PARTS)}")
    models = options.draft and options.target
    if not models and parts != ["cost"]:
        raise UsageError("give --draft FILE.gguf and --target FILE.gguf, or --only cost")
    began_s, wrong = time.monotonic(), 0
    result: dict[str, Any] = {"bench": "sampling", "options": vars(options), "compiled": warmup()}
    both = Both.load(options.draft, options.target) if models and parts != ["run"] else None
    if both is not None and {"acceptance", "predictor"}.intersection(parts):
        found = tallies(both, options)
        result["places"] = {t: tally.places for t, tally in found.items()}
        if "acceptance" in parts:
            result["acceptance"] = {"kind": "real", "rows": {t: tally.acceptance() for t, tally in found.items()}}
            show("acceptance (real logits, no sessions)", acceptance_table(result["acceptance"]["rows"]))
        if "predictor" in parts:
            result["predictor"] = {"kind": "real", "rows": {t: tally.predictors() for t, tally in found.items()}}
            show("predictors (real logits): area under the ROC curve", predictor_table(result["predictor"]["rows"]))
    if "cost" in parts:
        rows = costs(options.repeats, options.seed)
        result["cost"] = {"kind": "made-up logits", "rows": rows, "figure_ms": FIGURE_MS}
        show("cost of a choice (made-up logits)", cost_table(rows))
        if both is not None:
            ids = both.encode(prompts_of(options.prompts), 1)[0] * 8
            result["cost"]["pass"] = beside_a_pass(both.target, ids, max(3, options.repeats // 10), options.seed)
            show("cost beside a pass (real)", pass_table(result["cost"]["pass"]))
    if both is not None:
        both.drafter.close()
    if "run" in parts:
        sessions = runs(options, progress)
        result["run"] = [row._asdict() for row in sessions]
        show("sessions", run_table(sessions))
        wrong = sum(row.wrong for row in sessions)
    result["seconds"] = time.monotonic() - began_s
    print(json.dumps(result))
    return 1 if wrong else 0


def show(title: str, lines: list[str]) -> None:
    print("\n".join((title, *lines, "")), flush=True)


if __name__ == "__main__":
    end_with(main)
