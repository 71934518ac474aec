"""Traces of real models, for benches: what a target says behind prompts, and what a draft model makes of it.

The target is asked over a session of the product's own, so any that `pipesd-cloud` serves can be recorded; the draft
tokens are drawn by the product's own drafter, in the order of calls that a session makes.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipesd.config import EdgeConfig, GenerateConfig, make_config
from pipesd.core import Drawn
from pipesd.edge.advise_reading import Seen, read_along
from pipesd.edge.chat import Conversation
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.edge.session import EdgeSession
from pipesd.errors import UsageError
from pipesd.policy.sampler import Chooser, Sampler
from pipesd.policy.sampling import make_sampling
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.trace import DEPTH, Guess, Record, Trace

LONGEST_PROMPT = 256  # ids; longer ones are left out, as reading them takes time and is no part of what is measured
PASS_IDS = (1, 2, 4, 8, 16)  # of the passes that are timed
PASS_TOKENS = 64  # output tokens of each
PASS_TURNS = 2  # of which the faster counts
DIGITS = 7  # of a probability; float32 has no more


class Said(NamedTuple):
    """What a target said behind a prompt."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    seed: int | None = None
    finish: Literal["length", "stop"] = "length"


@dataclass(frozen=True)
class Wish:
    """What is to be recorded: outputs of at most `tokens` and at least `least` ids behind `count` prompts, the first
    `skip` of the usable ones left out; guesses to `depth`.

    `chat`: each prompt is put into the draft model's chat template. `sampling`: options of `generate`; with a
    temperature prompt number n of all has the seed `seed` + n.
    """

    count: int
    tokens: int
    skip: int = 0
    least: int = 1
    depth: int = DEPTH
    chat: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def prompts_of(paths: Sequence[str]) -> list[str]:
    """The prompts of each file in turn: JSON objects a line, gzipped or not, or one list of them, with a `prompt`, a
    `question` or a `text`. UsageError for a file that holds none."""
    sources = []
    for path in paths:
        try:
            data = Path(path).read_bytes()
            text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
            objects = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
            sources.append([next(o[key] for key in ("prompt", "question", "text") if key in o) for o in objects])
        except (OSError, EOFError, ValueError, TypeError, StopIteration) as error:
            told = str(error) or "an object without prompt, question and text"
            raise UsageError(f"{path}: no prompts can be read ({told}); give JSON objects, one a line") from error
    longest = max(map(len, sources))
    return [source[i] for i in range(longest) for source in sources if i < len(source)]


def record_trace(
    address: str,
    drafter: Drafter,
    tokeniser: Tokeniser,
    prompts: Sequence[str],
    wish: Wish,
    say: Callable[[str], None] = lambda line: None,
) -> Trace:
    """The trace of a draft model and of what the cloud at `address` serves. UsageError if there are not as many prompts
    as wished for, or the draft model's context is too small."""
    if wish.sampling.get("sampling", "noise") != "noise":
        raise UsageError("only with sampling noise can outputs be recorded: with others they hang on what is drafted")
    told: list[Said] = []
    with EdgeSession(EdgeConfig(cloud=address, strategy="cloud"), tokeniser=tokeniser) as session:
        assert session.serving is not None
        target = session.serving[0]
        for said in _outputs(session, tokeniser, prompts, wish):
            told.append(said)
            say(f"target: {len(told)} of {wish.count}, {len(said.prompt)} + {len(said.output)} ids, {said.finish}")
    if len(told) < wish.count:
        raise UsageError(f"{len(told)} of the prompts can be recorded, wanted {wish.count}: give more --prompts")
    pass_s = pass_times(address, tokeniser, max(told, key=lambda said: len(said.output)), wish.sampling)
    say("passes: " + ", ".join(f"{n} ids {1e3 * took_s:.1f} ms" for n, took_s in pass_s.items()))
    recorder = Recorder(drafter, wish.sampling, wish.depth)
    records = []
    for number, said in enumerate(told, 1):
        records.append(recorder.record(said))
        say(f"draft model: {number} of {wish.count}, {1e3 * recorder.gamma_s:.1f} ms a token")
    ends = {said.output[-1] for said in told if said.finish == "stop"}
    return trace_of(
        tokeniser, target, records, end_ids=ends, sampling=dict(wish.sampling), depth=wish.depth,
        gamma_s=recorder.gamma_s, pass_s=pass_s,
    )  # fmt: skip


def trace_of(
    tokeniser: Tokeniser, target: str, records: Sequence[Record], *, end_ids: Set[int] = frozenset(), **settings: Any
) -> Trace:
    """Records of one draft model as a trace."""
    return Trace(
        draft=tokeniser.name,
        target=target,
        vocabulary=vocabulary_hash(tokeniser.vocabulary).hex(),
        vocabulary_size=tokeniser.vocabulary.size,
        end_ids=tuple(sorted(tokeniser.end_ids | end_ids)),
        records=tuple(records),
        **settings,
    )


def _outputs(session: EdgeSession, tokeniser: Tokeniser, prompts: Sequence[str], wish: Wish) -> Iterator[Said]:
    skipped = taken = 0
    for number, prompt in enumerate(prompts):
        if taken == wish.count:
            return
        ids = Conversation(tokeniser).next_turn(prompt).ids if wish.chat else tokeniser.encode(prompt, special=True)
        if not 0 < len(ids) <= LONGEST_PROMPT:
            continue
        if skipped < wish.skip:
            skipped += 1
            continue
        seed = wish.seed + number if wish.sampling.get("temperature") else None
        for _ in session.generate(ids, max_tokens=wish.tokens, seed=seed, **wish.sampling):
            pass
        if len(session.token_ids) >= wish.least:
            taken += 1
            yield Said(tuple(ids), session.token_ids, seed, "stop" if session.finish_reason == "stop" else "length")


class Recorder:
    """Draws what a session would draft at every place of an output."""

    def __init__(self, drafter: Drafter, options: Mapping[str, Any], depth: int) -> None:
        """`options`: of `generate`, without a seed."""
        self._drafter, self._depth = drafter, depth
        self._sampling = make_sampling(make_config(GenerateConfig, {}, options))
        self._times_s: list[float] = []

    @property
    def gamma_s(self) -> float:
        """The median of what a draft token has taken so far."""
        return statistics.median(self._times_s)

    def record(self, said: Said) -> Record:
        """The record of one output."""
        sampler = Sampler(self._sampling, said.seed or 0, margins=True)
        reading = read_along(self._drafter, said.prompt, said.output, self._depth - 1, chooser=sampler)
        if len(reading.guesses) < len(said.output):
            context = len(said.prompt) + len(reading.guesses)
            raise UsageError(f"prompt and output do not fit into the draft model's context of {context} ids")
        self._times_s += reading.times_s
        behind = {i: tuple(map(_guess, seen)) for i, seen in reading.behind.items()}
        return Record(said.prompt, said.output, tuple(map(_guess, reading.guesses)), behind, said.seed, said.finish)


def _guess(seen: Seen) -> Guess:
    p_draft, entropy, p_runner_up, margin = map(_rounded, (seen.p_draft, seen.entropy, seen.p_runner_up, seen.margin))
    return Guess(seen.id, p_draft, entropy, seen.runner_up, p_runner_up, margin)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class Told:
    """A draft model that knows the output: each of its drafts is accepted."""

    def __init__(self, said: Said) -> None:
        self._all, self._ids = said.prompt + said.output, list[int]()

    @property
    def room(self) -> int:
        return len(self._all) - len(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def rollback(self, pos: int) -> None:
        del self._ids[pos:]

    def extend(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)

    def prefill(self, most: int) -> int:
        return 0

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        self._ids.append(self._all[len(self._ids)])
        return Drawn(self._ids[-1], 1.0, 0.0)

    def close(self) -> None:
        """Nothing is held."""


def pass_times(address: str, tokeniser: Tokeniser, said: Said, options: Mapping[str, Any]) -> dict[int, float]:
    """What a pass over so many ids takes the cloud, in s, while it says what it has said before; of those numbers of
    `PASS_IDS` for which the output is long enough."""
    found = {}
    for size in PASS_IDS:
        tokens = min(PASS_TOKENS, len(said.output) - 1) // size * size
        if not tokens:
            continue
        settings = {"strategy": "vanilla", "draft_length": size - 1} if size > 1 else {"strategy": "cloud"}
        config = EdgeConfig(cloud=address, tuning="off", **settings)
        took_s = []
        with EdgeSession(config, drafter=Told(said), tokeniser=tokeniser) as session:
            for _ in range(PASS_TURNS):
                for _ in session.generate(said.prompt, max_tokens=tokens, seed=said.seed, **options):
                    pass
                if session.stats["target_passes"] * size == tokens:  # else it did not say the same
                    took_s.append(session.stats["cloud_s"] * size / tokens)
        if took_s:
            found[size] = _rounded(min(took_s))
    return found
