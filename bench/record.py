"""Record a trace: `python bench/record.py --draft FILE --target PATH --prompts FILE... --out FILE.jsonl.gz`.

What the target says behind each prompt, greedily or with options of sampling and seeds, and what the draft model would
have drafted at each place of it, to a depth of 32: ids, probabilities, entropies, runners-up. Beside them what a draft
token and passes of the target took on this machine. `docs/traces.md` describes the file; the simulator and the benches
read it.

The target is a GGUF file or a Hugging Face folder, served as `pipesd-cloud serve` does; or --cloud names one that is
being served. With a temperature each prompt has a seed of its own, counted up from --seed by the prompt's number, and
both models draw under shared noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from exactness import cloud
from recording import LONGEST_PROMPT, Wish, prompts_of, record_trace
from stamp import end_with

from pipesd.config import GenerateConfig, add_flags, make_config, set_options
from pipesd.errors import UsageError
from pipesd.sim.trace import DEPTH, Trace

LEFT_OUT = ("max_tokens", "seed", "sampling", "top_mass", "logprobs", "stop")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, metavar="FILE", help="draft model, a GGUF file")
    parser.add_argument("--target", metavar="PATH", help="target model, a GGUF file or a Hugging Face folder")
    parser.add_argument("--cloud", metavar="ADDRESS", help="a target that is being served, instead")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE",
                        help="JSON objects a line with a prompt, question or text; gzipped or not")  # fmt: skip
    parser.add_argument("--out", required=True, metavar="FILE", help="the trace, a name that ends in .jsonl.gz")
    for name, default, text in (
        ("count", 12, f"prompts; those of more than {LONGEST_PROMPT} ids are left out"),
        ("tokens", 128, "most ids of an output"), ("least", 1, "leave out prompts with a shorter output, ids"),
        ("skip", 0, "leave out so many prompts before"), ("depth", DEPTH, "guesses behind each place"),
        ("threads", 1, "threads of the draft model"), ("seed", 0, "that of the first prompt, with a temperature"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print what was recorded as one JSON object")
    add_flags(parser.add_argument_group("as of pipesd-edge generate"), GenerateConfig, leave_out=LEFT_OUT)
    options = parser.parse_args()
    if (options.target is None) == (options.cloud is None):
        raise UsageError("give either --target PATH or --cloud ADDRESS")
    for name in ("count", "tokens", "least", "depth", "threads", "skip", "seed"):
        least = 0 if name in ("skip", "seed") else 1
        if getattr(options, name) < least:
            raise UsageError(f"--{name} {getattr(options, name)}: want at least {least}")
    if not Path(options.out).absolute().parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no such folder; make it first")
    return options


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The target's address."""
    if options.cloud is not None:
        yield options.cloud
        return
    with cloud(options.target) as (address, _):
        yield address


def summary(trace: Trace, path: Path) -> dict[str, Any]:
    """What a trace holds, in figures. `acceptance`: how many of all guesses behind true prefixes are right."""
    places = sum(len(record.output) for record in trace.records)
    right = sum(record.right(i) for record in trace.records for i in range(len(record.output)))
    return {
        "bench": "record",
        "file": str(path),
        "bytes": path.stat().st_size,
        "draft": trace.draft,
        "target": trace.target,
        "records": len(trace.records),
        "tokens": places,
        "stopped": sum(record.finish == "stop" for record in trace.records),
        "acceptance": right / places,
        "gamma_ms": 1e3 * trace.gamma_s,
        "pass_ms": {n: 1e3 * took_s for n, took_s in trace.pass_s.items()},
    }


def main() -> int:
    options = arguments()
    names = [field.name for field in fields(GenerateConfig) if field.name not in LEFT_OUT]
    config = make_config(GenerateConfig, {}, {name: value for name, value in vars(options).items() if name in names})
    wish = Wish(
        options.count, options.tokens, options.skip, options.least, options.depth, options.chat,
        {name: getattr(config, name) for name in set_options(config, names)}, options.seed,
    )  # fmt: skip
    prompts = prompts_of(options.prompts)
    from pipesd.edge.drafter import Drafter

    drafter = Drafter(options.draft, threads=options.threads)
    try:
        with served(options) as address:
            trace = record_trace(
                address, drafter, drafter.tokeniser, prompts, wish,
                lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
    finally:
        drafter.close()
    path = Path(options.out)
    trace.save(path)
    said = summary(trace, path)
    print(json.dumps(said) if options.json else "\n".join(f"{name}: {value}" for name, value in said.items()))
    return 0


if __name__ == "__main__":
    end_with(main)
