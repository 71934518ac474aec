"""Are the ids the target's own? `python bench/exactness.py --draft FILE --target FILE [--humaneval F] [--gsm8k F]`.

Runs the real pair (float32, one thread a side, cloud and worker as processes) over up to 20 prompts: code and maths
from the files given, and prompts in several scripts. For each it compares the ids of `cloud` with those of every other
strategy, of some combinations of their parts, and of a run whose worker is killed half way; then, where transformers
is installed, an independent greedy run from the same weights. Against that, a first difference is only allowed where
the two most probable ids are within 1e-3 in logits: other kernels, other last bits. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stamp import end_with

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.edge.tokeniser import Tokeniser
from pipesd.errors import PipeSDError

SCRIPTS = (
    "Résumé: la mémoire d'un ordinateur est",
    "Почему небо голубое? Потому что",
    "機械学習とは、",
    "人工智能的未来是",
    "الذكاء الاصطناعي هو",
    "नमस्ते, आज का मौसम",
    "Emoji story 🦊🌧️🏔️: once upon a time",
    "Τι είναι ο χρόνος;",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "auto"},
    {"strategy": "pipesd"},
    {"strategy": "pipesd", "batching": "immediate", "trigger": "gain"},
    {"strategy": "pipesd", "batching": "greedy", "trigger": "entropy", "waiting": "idle"},
    {"strategy": "hsl"},
    {"strategy": "edgellm"},
    {"strategy": "vanilla", "draft_length": 1},
    {"strategy": "vanilla", "draft_length": 8},
)
NEAR_TIE = 1e-3
KILL_EVERY_S = 25.0  # the cloud gives up on a worker that ends more than three times a minute


def prompts_of(options: argparse.Namespace) -> list[str]:
    """At most `options.prompts` prompts, taken in turn from the sources there are."""
    sources: list[list[str]] = [list(SCRIPTS)]
    for path, key in ((options.humaneval, "prompt"), (options.gsm8k, "question")):
        if path:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                sources.append([json.loads(line)[key] for line in lines][:: options.stride])
    taken: list[str] = []
    for i in range(max(map(len, sources))):
        taken += [source[i] for source in sources if i < len(source)]
    return taken[: options.prompts]


@contextmanager
def cloud(target: str, dtype: str = "float32") -> Iterator[tuple[str, int]]:
    """A served target as (address, process id)."""
    command = [sys.executable, "-c", "import sys; from pipesd.cloud.cli import main; sys.exit(main())"]
    command += ["serve", "--model", target, "--bind", "tcp://127.0.0.1:0", "--threads", "1", "--dtype", dtype]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if not said:
            raise PipeSDError(f"the target {target} cannot be served; why is said above")
        yield said[-1], process.pid
    finally:
        process.terminate()
        process.wait(30)


def worker_of(front: int) -> int:
    """Process id of the front's worker: the child with the most memory."""
    children = [int(pid) for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split()]
    return max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def kill_worker(front: int) -> None:
    os.kill(worker_of(front), signal.SIGKILL)


def generate(
    config: EdgeConfig,
    ids: Sequence[int],
    tokens: int,
    *,
    at: int = 0,
    then: Callable[[], object] | None = None,
    drafter: Any = None,
    **sampling: Any,
) -> dict[str, Any]:
    """One generation with these options of sampling; `then` is called once, when `at` tokens have come."""
    tokeniser = None if drafter is None else drafter.tokeniser
    with EdgeSession(config, drafter=drafter, tokeniser=tokeniser) as session:
        come = 0
        for piece in session.generate(ids, max_tokens=tokens, **sampling):
            come += len(piece.token_ids)
            if then is not None and come >= at:
                then()
                then = None
        return {"ids": list(session.token_ids), "stats": session.stats}


def independent(target: str, prompts: Sequence[Sequence[int]], end_ids: frozenset[int], tokens: int) -> list[Any]:
    """transformers' greedy ids from the same weights, and for each the margin between its two best logits."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    path = Path(target).resolve()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    runs = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=sorted(end_ids),
            pad_token_id=min(end_ids),
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [row[0].topk(2).values for row in out.logits]
        runs.append((out.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in best]))
    return runs


def record(file: Path, options: argparse.Namespace, tokeniser: Tokeniser) -> int:
    """Give each prompt in `file` its ids, the independent run's ids behind them, and the margin of each."""
    prompts = json.loads(file.read_text(encoding="utf-8"))
    encoded = [tokeniser.encode(prompt["text"], special=True) for prompt in prompts]
    runs = independent(options.target, encoded, tokeniser.end_ids, options.tokens)
    for prompt, ids, (reference, margins) in zip(prompts, encoded, runs, strict=True):
        prompt.update(ids=ids, reference=reference, margins=[float(f"{margin:.3g}") for margin in margins])
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--humaneval", help="HumanEval.jsonl.gz")
    parser.add_argument("--gsm8k", help="GSM8K problems, one JSON object with a question a line, gzipped")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--stride", type=int, default=7, help="take every so-manieth problem")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--record", metavar="FILE", help="only fill the prompts of this file with an independent run's ids"
    )
    options = parser.parse_args()

    tokeniser = Tokeniser.open(options.draft)
    if options.record:
        return record(Path(options.record), options, tokeniser)
    prompts = prompts_of(options)
    base = {"draft": options.draft, "threads": 1}
    encoded = [tokeniser.encode(prompt, special=True) for prompt in prompts]
    differing = killed = 0
    reference: list[list[int]] = []
    started_s, killed_s = time.monotonic(), float("-inf")
    with cloud(options.target) as (address, front):
        for number, ids in enumerate(encoded, 1):
            own = generate(EdgeConfig(**base, cloud=address, strategy="cloud"), ids, options.tokens)["ids"]
            reference.append(own)
            for way in WAYS:
                run = generate(EdgeConfig(**base, **way, cloud=address, tuning="off"), ids, options.tokens)
                differing += run["ids"] != own
            time.sleep(max(0.0, KILL_EVERY_S - (time.monotonic() - killed_s)))
            killed_s = time.monotonic()
            config = EdgeConfig(**base, cloud=address, strategy=("pipesd", "vanilla")[number % 2], tuning="off")
            kill = partial(kill_worker, front)
            run = generate(config, ids, options.tokens, at=max(1, len(own) // 2), then=kill)
            killed += run["stats"]["openings"] > 1
            differing += run["ids"] != own
            print(f"{number}/{len(prompts)}: {len(own)} ids, {differing} runs differ so far", file=sys.stderr)
    result: dict[str, Any] = {
        "models": "real",
        "prompts": len(prompts),
        "tokens": sum(map(len, reference)),
        "runs_differing_from_cloud": differing,
        "runs_reopened_after_a_kill": killed,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(
        f"{len(prompts)} prompts, {result['tokens']} ids: {differing} runs differ from cloud; {killed} survived a kill"
    )
    try:
        others = independent(options.target, encoded, tokeniser.end_ids, options.tokens)
    except ImportError:
        print("transformers is not installed: no independent run")
    else:
        firsts = []
        for own, (ids, margins) in zip(reference, others, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), None)
            if at is not None:
                firsts.append(margins[at])
        result["differ_from_transformers"] = len(firsts)
        result["largest_margin_at_a_difference"] = max(firsts, default=None)
        print(f"{len(firsts)} of {len(prompts)} differ from transformers, at margins {[f'{m:.1e}' for m in firsts]}")
        differing += sum(margin > NEAR_TIE for margin in firsts)
    print(json.dumps(result))
    return 1 if differing else 0


if __name__ == "__main__":
    end_with(main)
