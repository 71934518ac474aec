"""tools/demo: a draft and a target model in two processes write together, on a fresh machine too."""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision import Provision, provisioned
from workshop import (
    GRACE_S,
    Command,
    Failure,
    Parser,
    cache_folder,
    clean_environment,
    is_ours,
    last_line,
    lock,
    made_in,
    say,
    seconds,
    stop,
    stop_on_terminate,
)

TOOL = "tools/demo"
STRATEGIES = ("pipesd", "cloud")
PROMPTS = (
    "Write a Python function that returns the greatest common divisor of two numbers.",
    "A train goes 60 km in 40 minutes. How far does it go in 2 hours?",
)
START_LIMIT_S = 180.0  # for the cloud to load a small model
ANSWER_LIMIT_S = 600.0  # for one answer of a small model
LOADED_BYTES_PER_S = 20e6  # by a slow disk, and while the weights are arranged
READ_BYTES_PER_S = 0.5e9  # of weights, for each token, by a slow machine
BIG_BYTES = 2e9  # of a target that is no longer quick without a GPU
STILL_LOADING_S = 20.0  # between two words on it

DESCRIPTION = f"""\
Makes an environment, builds the model pair, starts pipesd-cloud with the target model and lets pipesd-edge, with the
draft model, answer two prompts: once with drafts that the cloud verifies (pipesd) and once by the cloud alone (cloud).
Prints the answers and what each way cost, and whether both gave the same tokens. Says what it will fetch and build
before it does; a second run fetches nothing. Everything made is kept in {cache_folder()} (PIPESD_CACHE chooses another
folder). --target and --draft, together, take a pair of your own instead.
"""


def main() -> int:
    """Exit code: 0 when both ways gave the same tokens, 1 when not, 2 when something cannot be had or started."""
    parser = Parser(TOOL, DESCRIPTION)
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="of each answer (default: 64)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="instead of the two; may be given again")
    parser.add_argument("--target", metavar="PATH", help="your target model, a Hugging Face folder or a GGUF file")
    parser.add_argument("--draft", metavar="FILE", help="your draft model, a GGUF file with the target's vocabulary")
    parser.add_argument("--clean", action="store_true", help="remove what the tools made in the cache folder, and end")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    stop_on_terminate()
    try:
        if options.clean:
            return clean(cache_folder())
        own = None if options.target is None else own_pair(options.target, options.draft)
        with provisioned(TOOL, ("edge", "cloud"), llama=True, pair=own is None) as provision:
            pair = own or Pair(target=provision.pair / "target.gguf", draft=provision.pair / "draft.gguf")
            return demonstrate(provision, pair, options.prompt or PROMPTS, options.max_tokens)
    except (Failure, OSError) as error:
        say(f"{TOOL}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"\n{TOOL}: interrupted")
        return 130


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Pair:
    """The models of a run, by absolute paths. `chat`: whether prompts go through the draft model's chat template."""

    target: Path
    draft: Path
    chat: bool = True

    @property
    def target_bytes(self) -> int:
        """Size of the files with the target's weights."""
        return sum(file.stat().st_size for file in weight_files(self.target) if file.exists())


def own_pair(target: str, draft: str) -> Pair:
    """The models that the user names, looked at before anything is fetched. Raises Failure for what cannot be them."""
    paths = [Path(os.path.abspath(os.path.expanduser(path))) for path in (target, draft)]
    for name, path in zip(("--target", "--draft"), paths, strict=True):
        if not path.exists():
            raise Failure(f"{name} {path}: there is no such file{' or folder' if name == '--target' else ''}")
    if paths[0].is_dir():
        if not (paths[0] / "config.json").is_file():
            raise Failure(f"--target {paths[0]}: has no config.json; name a Hugging Face folder or a GGUF file")
        if not weight_files(paths[0]):
            raise Failure(f"--target {paths[0]}: has no *.safetensors; download the folder again with its weights")
    for name, path in zip(("--target", "--draft"), paths, strict=True):
        if (name, path.is_dir()) != ("--target", True) and not is_gguf(path):
            raise Failure(f"{name} {path}: is no GGUF file; pipesd-edge needs one, see docs/models.md")
    pair = Pair(target=paths[0], draft=paths[1], chat=has_template(paths[1]))
    say(f"{TOOL}: target {pair.target}, {pair.target_bytes / 1e9:.2f} GB")
    say(f"{TOOL}: draft {pair.draft}, {pair.draft.stat().st_size / 1e9:.2f} GB")
    if pair.target_bytes > BIG_BYTES:
        say(f"{TOOL}: without a GPU a target of that size takes minutes to load and seconds for each token, and on a")
        say("  processor its weights take 4 bytes each in memory, whatever the file has")
    if not pair.chat:
        say(f"{TOOL}: the draft model has no chat template: prompts are continued as they are")
    return pair


def weight_files(target: Path) -> list[Path]:
    """The files with a target's weights: those of a folder, or a GGUF file with the parts beside it."""
    if target.is_dir():
        return sorted(target.glob("*.safetensors"))
    found = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", target.name)
    return sorted(target.parent.glob(f"{found[1]}-?????-of-{found[2]}.gguf")) if found else [target]


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def has_template(draft: Path) -> bool:
    """Whether a GGUF file's header, which is shorter than this, names a chat template."""
    with draft.open("rb") as file:
        return b"tokenizer.chat_template" in file.read(64 << 20)


def demonstrate(provision: Provision, pair: Pair, prompts: Sequence[str], max_tokens: int) -> int:
    """Starts the cloud, has every prompt answered by every strategy, prints what came of it, stops the cloud."""
    start_s = time.monotonic()
    answers: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in STRATEGIES}
    with cloud(provision, pair) as address:
        say(f"{TOOL}: pipesd-cloud is ready at {address}, after {seconds(time.monotonic() - start_s)}")
        for prompt in prompts:
            print(f"\n>>> {prompt}", flush=True)
            for strategy in STRATEGIES:
                asked_s = time.monotonic()
                found = answer(provision, pair, address, prompt, strategy, max_tokens)
                answers[strategy].append(found)
                took = seconds(time.monotonic() - asked_s)
                say(f"  {strategy}: {found['stats']['tokens']} tokens, {took} with the start of pipesd-edge")
            texts = {strategy: answers[strategy][-1]["text"] for strategy in STRATEGIES}
            if len(set(texts.values())) == 1:
                print(texts[STRATEGIES[0]].strip(), flush=True)
            else:
                for strategy, text in texts.items():
                    print(f"[{strategy}] {text.strip()}", flush=True)
    print_table(answers)
    ids = [[found["token_ids"] for found in answers[strategy]] for strategy in STRATEGIES]
    same = all(other == ids[0] for other in ids)
    verdict = "Both ways gave the same tokens." if same else "THE TOKENS DIFFER, which must never be: please report it."
    print(verdict, flush=True)
    say(f"{TOOL}: ended after {seconds(time.monotonic() - start_s)}. To go on by hand:")
    say(f"  pipesd-edge and pipesd-cloud are in {provision.environment.folder / 'bin'}")
    say(f"  the models are {pair.draft} and {pair.target}")
    return 0 if same else 1


@contextmanager
def cloud(provision: Provision, pair: Pair) -> Iterator[str]:
    """A pipesd-cloud with the target model on a free port of this machine; gives its address, stops it at the end."""
    log = provision.cache / "logs" / "demo-cloud.log"
    command: Command = [
        provision.environment.program("pipesd-cloud"),
        "serve",
        "--model",
        pair.target,
        "--bind",
        "tcp://127.0.0.1:0",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield ready_address(process, log, START_LIMIT_S + pair.target_bytes / LOADED_BYTES_PER_S)
        finally:
            process.terminate()  # the cloud itself ends its workers
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
            stop(process)


def ready_address(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> str:
    """The address in the line that the cloud prints when it is ready; what it says meanwhile is shown now and then."""
    assert process.stdout is not None
    start_s = time.monotonic()
    says_s = start_s + STILL_LOADING_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (now_s := time.monotonic()) < start_s + limit_s:
            if now_s >= says_s:
                says_s = now_s + STILL_LOADING_S
                say(f"  {last_line(log)} ({seconds(now_s - start_s)} so far)")
            if selector.select(timeout=min(1.0, limit_s)):
                line = process.stdout.readline().decode("utf-8", "replace")
                if found := re.search(r"tcp://\S+:\d+", line):
                    return found[0]
                if not line:
                    process.wait()
                    raise Failure(f"pipesd-cloud ended with code {process.returncode}: {last_line(log)} (log: {log})")
    raise Failure(f"pipesd-cloud was not ready after {limit_s:.0f} s: {last_line(log)} (log: {log})")


def answer(
    provision: Provision, pair: Pair, address: str, prompt: str, strategy: str, max_tokens: int
) -> dict[str, Any]:
    """What `pipesd-edge generate --json` says for one prompt."""
    command: Command = [
        provision.environment.program("pipesd-edge"), "generate", "--draft", pair.draft,
        "--cloud", address, "--strategy", strategy, "--tuning", "off", "--prompt", prompt,
        "--max-tokens", str(max_tokens), "--json", *(["--chat"] if pair.chat else []),
    ]  # fmt: skip
    limit_s = ANSWER_LIMIT_S + max_tokens * pair.target_bytes / READ_BYTES_PER_S
    try:
        done = subprocess.run(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failure(f"pipesd-edge --strategy {strategy} gave no answer in {limit_s:.0f} s") from None
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise Failure(f"pipesd-edge --strategy {strategy} ended with code {done.returncode}: {reason}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def print_table(answers: dict[str, list[dict[str, Any]]]) -> None:
    """What each strategy cost, over all prompts."""
    costs = {strategy: Costs.of([one["stats"] for one in found]) for strategy, found in answers.items()}
    print(f"\n{'':<32}" + "".join(f"{strategy:>12}" for strategy in costs))
    for title, cell in ROWS.items():
        print(f"{title:<32}" + "".join(f"{cell(cost):>12}" for cost in costs.values()))
    print("Both models share this machine's cores and no network lies between them, so the times are of this machine")
    print("alone, whichever is less; passes and bytes are what a cloud of yours would see too.\n", flush=True)


@dataclass(frozen=True)
class Costs:
    """Sums over the answers of one strategy."""

    tokens: int
    time_ms: float
    target_passes: int
    verified: int
    accepted: int
    bytes_up: int
    bytes_down: int

    @staticmethod
    def of(stats: Sequence[dict[str, Any]]) -> Costs:
        names = ("tokens", "target_passes", "verified", "accepted", "bytes_up", "bytes_down")
        sums = {name: sum(one[name] for one in stats) for name in names}
        return Costs(time_ms=sum((one["tpt_ms"] or 0) * one["tokens"] for one in stats), **sums)


ROWS: dict[str, Callable[[Costs], str]] = {
    "output tokens": lambda cost: str(cost.tokens),
    "time per output token, ms": lambda cost: f"{cost.time_ms / max(1, cost.tokens):.1f}",
    "target passes per output token": lambda cost: f"{cost.target_passes / max(1, cost.tokens):.2f}",
    "draft tokens accepted": lambda cost: f"{cost.accepted / cost.verified:.0%}" if cost.verified else "-",
    "bytes up per output token": lambda cost: f"{cost.bytes_up / max(1, cost.tokens):.1f}",
    "bytes down per output token": lambda cost: f"{cost.bytes_down / max(1, cost.tokens):.1f}",
}


def clean(cache: Path) -> int:
    """Removes what these tools made in the cache folder, says what, and leaves everything else."""
    if not is_ours(cache):
        say(f"{TOOL}: these tools have made nothing in {cache}")
        return 0
    with lock(cache, "use"):
        for path in made_in(cache):
            size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() or file.is_symlink())
            say(f"{TOOL}: removing {path} ({size / 1e6:.0f} MB)")
            shutil.rmtree(path)
        for name in ("prepare.lock", "use.lock", "CACHEDIR.TAG"):
            (cache / name).unlink(missing_ok=True)
    if not any(cache.iterdir()):
        cache.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
