"""What energy 100 tokens take, strategy by strategy: `python bench/energy.py --draft FILE|--scripted
--target PATH|--scripted [--quick]`.

PipeSD's table 2: scenario 1's link, code and maths. Draft model and target are real: the target (a GGUF file or a
Hugging Face folder) is served by processes of its own, behind an emulated link of 25 ms one way and 20/200 Mbit/s, with
either payload. Rows with parameters are tuned for time, by as many tries each, on other prompts than those measured;
then all rows take turns, in random order, --seeds times. A meter runs around each turn, idle time and prompts included.

The figure is that of all GPUs where the target is on one (--gpus: of those), as the paper has the cloud's GPU; of a
target on the processor it is that of the processor packages, and the draft model's is in it. A figure that cannot be
read is none, and the reason is told; the rest of the row stands. J per 100 tokens are of all output tokens.

--quick takes the payload `thin` alone. --scripted: scripted models that compute nothing, on machines without. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import plots
import printed
from energy_report import FIGURE, Turn, drawn, energy, lines
from measuring import TUNING_RECORDS, Cell, Outcome, Row
from recording import LONGEST_PROMPT, prompts_of
from replay import Replay, replaying
from runs import AGREEMENT, LAW, STALL_S, scripted_trace
from scenarios import ALPHA_S, DOWN_MBPS, FAT_BYTES, UP_MBPS, Regime
from stamp import begin, end_with, finish, progress
from table import TRACES, chosen, options_of, regimes_of, report, standing_rows, text

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.energy import EnergyMeter
from pipesd.errors import PipeSDError, UsageError
from pipesd.sim.trace import Trace

WARM_UP = 8  # tokens of each row before anything counts
QUICK_PROMPTS = 2
LONGEST_END_S = 30.0  # of a program that was told to end


class Edge(NamedTuple):
    """The draft model with the addresses of the target: through the link, and beside it."""

    drafter: Any
    tokeniser: Any
    linked: str
    direct: str
    gpus: Sequence[int | str] | None  # (): the target is on none

    def turn(self, row: Row, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: int) -> Turn:
        """One session over all prompts."""
        config = EdgeConfig(
            cloud=self.linked if row.linked else self.direct,
            **{"tuning": "off", "stall_s": STALL_S, **row.settings, **settings},
        )
        each, ids = [], []
        with EdgeSession(config, drafter=self.drafter, tokeniser=self.tokeniser) as session:
            with EnergyMeter(gpus=self.gpus) as meter:
                for prompt in prompts:
                    for _ in session.generate(prompt, max_tokens=tokens):
                        pass
                    each.append({**session.stats, "machine_s": session.stats["cloud_s"]})
                    ids.append(session.token_ids)
        return Turn(each, ids, meter.gpu, meter.cpu)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", metavar="FILE", help="draft model, a GGUF file")
    parser.add_argument("--target", metavar="PATH", help="target model, a GGUF file or a Hugging Face folder")
    parser.add_argument("--scripted", action="store_true", help="scripted models: none are needed")
    parser.add_argument("--prompts", nargs="+", metavar="FILE",
                        help="a data set each, instead of the traces' prompts: JSON objects a line with a prompt, "
                        "question or text")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the target")
    parser.add_argument("--dtype", default="auto", help="of the target's weights, as pipesd-cloud has it")
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="GPUs to meter, by NVML's number; default all")
    for name, default, told in (
        ("threads", 1, "of each model on a processor"),
        ("each", 8, "prompts of a data set that are measured"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{told} (default {default})")


def prompts_by_dataset(options: argparse.Namespace, tokeniser: Any) -> dict[str, list[tuple[int, ...]]]:
    """The prompts' ids, those first that are tuned on. UsageError if a file has too few, or those of other models."""
    from pipesd.protocol.vocabulary import vocabulary_hash

    wanted = TUNING_RECORDS + 1
    found: dict[str, list[tuple[int, ...]]] = {}
    if options.scripted:
        count = TUNING_RECORDS + options.each
        return {"scripted": [record.prompt for record in scripted_trace(count, options.tokens).records]}
    for given in options.prompts or options.traces or printed.DATASETS:
        path = TRACES / f"{given}.jsonl.gz" if given in printed.DATASETS else Path(given)
        named = (known for known in printed.DATASETS if path.name.lower().startswith(known))
        name = next(named, path.name.split(".")[0])
        if options.prompts:
            ids = [tuple(tokeniser.encode(prompt, special=True)) for prompt in prompts_of([given])]
        else:
            trace = Trace.load(path)
            if trace.vocabulary != vocabulary_hash(tokeniser.vocabulary).hex():
                raise UsageError(f"{path}: of {trace.draft}, whose vocabulary is another; give --prompts, or a trace")
            ids = [record.prompt for record in trace.records]
        found[name] = [prompt for prompt in ids if 0 < len(prompt) <= LONGEST_PROMPT]
        if len(found[name]) < wanted:
            raise UsageError(f"{path}: it has {len(found[name])} prompts that can be used, wanted {wanted}; give more")
    return found


def tune(edge: Edge, row: Row, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> dict[str, Any]:
    """The setting with the least time per token, of as many as `--samples`; {} for a row without parameters."""

    def tpt_s(found: Mapping[str, Any]) -> float:
        return measuring.ms_per_token(edge.turn(row, found, prompts, options.tune_tokens).each) / 1e3

    return measuring.searched(row, options.samples, 0, tpt_s)


def measure(
    edge: Edge, rows: Mapping[str, Row], regime: Regime, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], dict[str, list[Turn]]]:
    """Tune every row, then give each its turns: the settings found, and the turns."""
    tuning, rest = prompts[:TUNING_RECORDS], prompts[TUNING_RECORDS : TUNING_RECORDS + options.each]
    tuning = tuning[:1] if options.quick else tuning
    rows = {name: row._replace(settings={**regime.settings, **row.settings}) for name, row in rows.items()}
    for row in rows.values():  # all is loaded and compiled then, and a wrong setting is told at once
        edge.turn(row, {}, tuning[:1], WARM_UP)
    found = {}
    for name, row in rows.items():
        found[name] = tune(edge, row, tuning, options)
        progress(f"{name}: {found[name] or 'nothing to tune'}")
    shuffled = random.Random(0)
    turns: dict[str, list[Turn]] = {name: [] for name in rows}
    for number in range(options.seeds):
        for name in shuffled.sample(list(rows), len(rows)):
            turns[name].append(edge.turn(rows[name], found[name], rest, options.tokens))
            said = measuring.ms_per_token(turns[name][-1].each)
            progress(f"{number + 1}/{options.seeds} {name}: {said:.1f} ms per token")
    return found, turns


def cell_of(
    edge: Edge, dataset: str, regime: Regime, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure and print one cell; as it stands in the JSON."""
    rows = chosen(standing_rows(options.policy), options.only)
    found, turns = measure(edge, rows, regime, prompts, options)
    figures = {} if options.scripted else printed.OVERALL[1].get(dataset, {})
    cell = Cell(
        f"scenario 1's link, {dataset}, {regime.name}", dataset, (), regime.link(), 0.0, settings=regime.settings,
        printed={"ms_per_token": figures} if figures else {},
    )  # fmt: skip
    outcomes = {
        name: [Outcome(found[name], dict(enumerate(turn.each))) for turn in mine] for name, mine in turns.items()
    }
    own = next((mine[0].ids for name, mine in turns.items() if name != "edge only"), ())
    reports = {
        name: {
            **report(name, row, cell, outcomes),
            "kind": "replayed" if options.scripted else "real",
            "other_outputs": 0 if name == "edge only" else sum(turn.ids != own for turn in turns[name]),
            **energy(name, turns, {} if options.scripted else printed.ENERGY.get(dataset, {}), edge.gpus != ()),
        }
        for name, row in rows.items()
    }
    print("\n".join([*text(cell, reports), *lines(cell.name, reports)]), flush=True)
    return {"name": cell.name, "dataset": dataset, "regime": regime.name, "rows": reports}


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The address of the real target."""
    command = [sys.executable, "-c", "import sys; from pipesd.cloud.cli import main; sys.exit(main())", "serve"]
    command += ["--model", options.target, "--bind", "tcp://127.0.0.1:0", "--threads", str(options.threads)]
    with _printing("the target", [*command, "--device", options.device, "--dtype", options.dtype]) as line:
        yield line.split()[-1]


@contextmanager
def link(address: str, regime: Regime) -> Iterator[str]:
    """The address of the paper's link to that address."""
    command = [sys.executable, "-m", "pipesd.sim.proxy", "--to", address, "--delay-ms", f"{1e3 * ALPHA_S:g}"]
    command += ["--up-mbps", f"{UP_MBPS:g}", "--down-mbps", f"{DOWN_MBPS:g}"]
    fat = ["--up-bytes-per-draft-token", str(FAT_BYTES)] if regime.name == "fat" else []
    with _printing("the link", [*command, *fat]) as line:
        yield line


@contextmanager
def _printing(name: str, command: Sequence[str]) -> Iterator[str]:
    """The first line of a program that runs meanwhile; what it says to stderr goes there."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise PipeSDError(f"{name} has ended with {process.wait()}; what it said is above")
        yield line
    finally:
        process.terminate()
        try:
            process.wait(LONGEST_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def models(options: argparse.Namespace) -> Iterator[tuple[Any, Any, str]]:
    """The drafter, its tokeniser, and the address of the target."""
    if options.scripted:
        from pipesd.sim.drafters import Agreement, ScriptedDrafter
        from pipesd.sim.tokeniser import ByteTokeniser

        trace = scripted_trace(TUNING_RECORDS + options.each, options.tokens + 64)
        make = Replay(trace, ByteTokeniser().vocabulary, {"pass_s": options.pass_ms / 1e3})
        with replaying(make, {}) as where:
            yield ScriptedDrafter(Agreement(LAW, AGREEMENT)), ByteTokeniser(), where.direct
        return
    if not options.draft or not options.target:
        raise UsageError("give --draft FILE.gguf and --target PATH, or --scripted")
    from pipesd.edge.drafter import Drafter

    drafter = Drafter(options.draft, threads=options.threads)
    try:
        with served(options) as address:
            yield drafter, drafter.tokeniser, address
    finally:
        drafter.close()


def gpus_of(options: argparse.Namespace) -> Sequence[int | str] | None:
    """The GPUs to meter, None: all, (): the target is on none."""
    if options.scripted or options.device == "cpu":
        return ()
    if options.device == "auto":
        import torch

        if not torch.cuda.is_available():
            return ()
    return options.gpus


def main() -> int:
    # over the fat link a session alone takes seconds to begin
    options = options_of(__doc__, add, each=QUICK_PROMPTS, regime="thin")
    for name in ("threads", "each"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}: got {getattr(options, name)}, wanted at least 1")
    if options.plot:
        plots.check(options.plot)
    stamp = begin()
    cells = []
    with models(options) as (drafter, tokeniser, direct), ExitStack() as links:
        prompts = prompts_by_dataset(options, tokeniser)
        for regime in regimes_of(options):
            linked = links.enter_context(link(direct, regime))
            edge = Edge(drafter, tokeniser, linked, direct, gpus_of(options))
            cells += [cell_of(edge, dataset, regime, ids, options) for dataset, ids in prompts.items()]
    if options.plot:
        plots.bars([{**cell, "rows": drawn(cell["rows"])} for cell in cells], options.plot, FIGURE, "J per 100 tokens")
    print("\nJ/100 tokens: of " + cells[0]["rows"][next(iter(cells[0]["rows"]))]["energy_of"] + ", idle time included")
    finish("energy", stamp, options, {"cells": cells})
    other = [f"{cell['name']}: {name}" for cell in cells for name, row in cell["rows"].items() if row["other_outputs"]]
    for line in other:
        progress(f"{line}: not the ids of the other rows")
    return 1 if other else 0


if __name__ == "__main__":
    end_with(main)
