"""Are sampled ids the target's own? `python bench/exactness_sampled.py --draft FILE --target FILE --results FILE`.

For each precision and seed the real pair (one thread a side, cloud and worker as processes) samples with `--strategy
cloud`, then with every other strategy and some combinations of their parts, then with one of these over a link that is
cut on the way, and with another while the worker is killed. All under shared noise, hence all must give the same ids.
Prompts, options of sampling and who meets which fault change from seed to seed. Every event log goes through the
checker.

What is done stands in --results, one JSON object a line, and is not done again: the work can be stopped and taken up,
or divided, as in `--seeds 0:10 --dtypes float32`. The last line is one JSON object over all that stands there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from exactness import KILL_EVERY_S, WAYS, cloud, generate, kill_worker
from recording import LONGEST_PROMPT, prompts_of
from stamp import end_with

from pipesd.config import EdgeConfig
from pipesd.core import common_prefix
from pipesd.edge.drafter import Drafter
from pipesd.sim.check import check_file
from pipesd.sim.proxy import LinkProxy

PATIENCE_S = 300.0  # a busy machine may take its time to start a worker again
OWN_PROMPTS = str(Path(__file__).parents[1] / "tests" / "prompts.json")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.6},
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.15},
    {"temperature": 0.7, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.2},
)


class Checked:
    """Runs generations, keeps what is wrong with them."""

    def __init__(self, drafter: Drafter, folder: str, tokens: int) -> None:
        self.drafter, self.tokens = drafter, tokens
        self.findings: list[str] = []
        self._log = Path(folder, "events.jsonl")

    def run(
        self, name: str, address: str, way: dict[str, Any], ids: Sequence[int], own: Sequence[int] | None,
        **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """One generation: its ids must be `own`, its event log without findings."""
        self._log.unlink(missing_ok=True)
        config = EdgeConfig(cloud=address, tuning="off", patience_s=PATIENCE_S, events=str(self._log), **way)
        done = generate(config, ids, self.tokens, drafter=self.drafter, **options)
        if own is not None and done["ids"] != own:
            self.findings.append(f"{name} {way}: other ids from number {common_prefix(done['ids'], own)} on")
        self.findings += [f"{name} {way}: {finding}" for finding in check_file(self._log)]
        return done


def seed_of(
    checked: Checked, where: tuple[str, int], seed: int, prompts: Sequence[Sequence[int]], wait: Callable[[], None]
) -> dict[str, Any]:
    """Everything of one seed, behind the first prompt from number `seed` on whose output does not end early; `wait`
    returns when a worker may be killed again."""
    address, front = where
    sampling = {**SAMPLINGS[seed % len(SAMPLINGS)], "seed": seed}
    for number in range(seed, seed + len(prompts)):
        ids = prompts[number % len(prompts)]
        own = checked.run("alone", address, {"strategy": "cloud"}, ids, None, **sampling)["ids"]
        if len(own) == checked.tokens:
            break
    drafted = 0
    for way in WAYS:
        drafted += checked.run("clean", address, way, ids, own, **sampling)["stats"]["accepted"]
    half = max(1, len(own) // 2)
    everything = [{"strategy": "cloud"}, *WAYS]
    with LinkProxy(address, delay_s=0.002) as link:
        way = everything[seed % len(everything)]
        checked.run("cut", link.address, way, ids, own, at=half, then=link.cut, **sampling)
        cuts = link.counts().connections - 1
    wait()
    way = everything[(seed + 4) % len(everything)]
    killed = checked.run("killed", address, way, ids, own, at=half, then=partial(kill_worker, front), **sampling)
    return {
        "seed": seed, "sampling": sampling, "ids": len(own), "runs": len(WAYS) + 2, "accepted": drafted,
        "cut": cuts, "killed": killed["stats"]["openings"] > 1,
    }  # fmt: skip


def killing(every_s: float) -> Callable[[], None]:
    """What waits until the last kill is so long ago: a cloud gives up on a worker that ends too often."""
    last_s = float("-inf")

    def wait() -> None:
        nonlocal last_s
        time.sleep(max(0.0, every_s - (time.monotonic() - last_s)))
        last_s = time.monotonic()

    return wait


def done_before(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(options: argparse.Namespace, path: Path) -> Iterator[dict[str, Any]]:
    """What is still to be done, seed by seed."""
    first, end = (int(part) for part in options.seeds.split(":"))
    have = {(row["dtype"], row["seed"]) for row in done_before(path)}
    drafter = Drafter(options.draft, threads=1)
    encoded = [drafter.tokeniser.encode(prompt, special=True) for prompt in prompts_of(options.prompts)]
    prompts = [ids for ids in encoded if len(ids) <= LONGEST_PROMPT]
    for dtype in options.dtypes.split(","):
        seeds = [seed for seed in range(first, end) if (dtype, seed) not in have]
        if not seeds:
            continue
        wait = killing(KILL_EVERY_S)
        with tempfile.TemporaryDirectory() as folder, cloud(options.target, dtype) as where:
            for seed in seeds:
                checked = Checked(drafter, folder, options.tokens)
                began_s = time.monotonic()
                done = seed_of(checked, where, seed, prompts, wait)
                yield {"dtype": dtype, **done, "findings": checked.findings, "seconds": time.monotonic() - began_s}
    drafter.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--results", required=True, metavar="FILE", help="where the results stand and are added")
    parser.add_argument("--prompts", nargs="+", metavar="FILE", default=[OWN_PROMPTS],
                        help="JSON objects with a prompt, question or text (default tests/prompts.json)")  # fmt: skip
    parser.add_argument("--seeds", metavar="FROM:TO", default="0:50", help="TO excluded (default 0:50)")
    parser.add_argument("--dtypes", metavar="NAME,...", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    path = Path(options.results)
    for row in work(options, path):
        with path.open("a") as results:
            results.write(json.dumps(row) + "\n")
        print(f"{row['dtype']}, seed {row['seed']}: {row['ids']} ids, {row['runs']} runs in {row['seconds']:.0f} s,"
              f" {len(row['findings'])} findings", file=sys.stderr, flush=True)  # fmt: skip
    rows = done_before(path)
    findings = [f"{row['dtype']}, seed {row['seed']}: {finding}" for row in rows for finding in row["findings"]]
    for finding in findings:
        print(finding)
    sums = {name: sum(row[name] for row in rows) for name in ("ids", "runs", "accepted", "cut", "killed", "seconds")}
    print(f"{len(rows)} seeds, {sums['runs']} runs beside cloud's own: {len(findings)} findings;"
          f" {sums['cut']} links cut, {sums['killed']} workers killed on the way")  # fmt: skip
    print(json.dumps({"bench": "exactness_sampled", "kind": "real", "seeds": len(rows), **sums,
                      "findings": len(findings)}))  # fmt: skip
    return 1 if findings or not rows else 0


if __name__ == "__main__":
    end_with(main)
