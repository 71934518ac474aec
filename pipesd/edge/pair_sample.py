"""How often the target would accept what the draft model proposes: a short sample, with both models here or at a cloud.

Here llama.cpp computes both. The target writes greedily, and the draft model reads along: at each token its guess is
compared, and the mass that both distributions share, Σ min(p, q), is what rejection sampling accepts there (Leviathan
et al., 2023, section 3). llama.cpp rounds activations where the cloud does not, so near ties may fall differently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipesd.config import EdgeConfig
from pipesd.edge.drafter import Drafter, estimate_bytes
from pipesd.edge.interrupts import Interrupts
from pipesd.edge.pair_models import ModelFacts
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, PipeSDError, UsageError, VocabularyMismatch
from pipesd.free_memory import free_on_host
from pipesd.policy.sampler import Choice
from pipesd.regular_file import shown
from pipesd.sizes import size_text

TEMPERATURE = 0.8
PREFILL_CHUNK = 128  # ids between two looks at a signal
_SAYS_EVERY_S = 2.0
log = logging.getLogger("pipesd.edge")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was measured over `tokens` tokens. `greedy`: share of draft tokens that equal the target's choice, where all
    before them did. `sampled`: the same for rejection sampling at temperature 0.8, None if not measured. `mean_run`:
    accepted tokens in a row, `longest` the most that there could have been."""

    where: str  # "edge" or "cloud"
    prompts: int
    tokens: int
    greedy: float
    sampled: float | None
    mean_run: float
    longest: int
    model: str | None = None  # what the cloud calls its target
    context: int | None = None  # where a text ends at the cloud


class NotMeasured(PipeSDError):
    """There is no sample, and why; the rest of the report stands."""


class _Rows:
    """Draws the most probable id, or `told` if that is given, and keeps the row's distribution."""

    told: int | None = None
    best = 0
    probabilities: Any = None

    def choose(self, row: Any, position: int, prefix: Sequence[int]) -> Choice | None:
        import numpy as np

        weights = np.exp((row.astype(np.float64) - float(row.max())) / TEMPERATURE)
        self.best, self.probabilities = int(row.argmax()), weights / weights.sum()
        return Choice(self.best if self.told is None else self.told, 0.0, None)


def sample_here(draft: ModelFacts, target: ModelFacts, prompts: Sequence[str], tokens: int, threads: int) -> Sample:
    """Let the target write `tokens` tokens behind each prompt and compare. Both models must mean the same by an id.

    Raises NotMeasured where memory does not suffice, UsageError for a prompt that does not fit or a model that cannot
    compute.
    """
    room = max(2048, tokens + max(len(prompt.encode()) for prompt in prompts) + 8)  # no id stands for less than a byte
    needed = sum(estimate_bytes(facts.path, room) for facts in (draft, target))
    least = min(free_on_host(), key=lambda free: free.bytes, default=None)
    if least is not None and needed > least.bytes:
        raise NotMeasured(
            f"both models take about {size_text(needed)}, {least.where} has {size_text(least.bytes)} free"
        )
    log.info("loading both models: about %s", size_text(needed))
    loaded: list[Drafter] = []
    try:
        loaded += [Drafter(facts.path, context=room, threads=threads) for facts in (target, draft)]
        for notice in loaded[1].notices:
            log.warning(notice)
        return _compared(loaded[0], loaded[1], prompts, tokens)
    finally:
        for model in loaded:
            model.close()


def _compared(target: Drafter, draft: Drafter, prompts: Sequence[str], tokens: int) -> Sample:
    says, guesses = _Rows(), _Rows()
    compared = agreed = runs = 0
    shared = 0.0
    next_s = time.monotonic() + _SAYS_EVERY_S
    for number, prompt in enumerate(prompts, 1):
        ids = draft.tokeniser.encode(prompt, special=True)
        if not ids:
            raise UsageError("a prompt is empty, and the model has no start token: give at least one character")
        most = min(target.context, draft.context) - len(ids)
        if most < 1:
            raise UsageError(f"a prompt has {len(ids)} ids, the shorter context holds {most + len(ids)}: shorten it")
        for model in (target, draft):
            model.rollback(0)
            model.extend(ids)
            while model.prefill(PREFILL_CHUNK):
                pass
        for count in range(1, min(tokens, most) + 1):
            guesses.told = target.draft(says).id
            draft.draft(guesses)
            shared += _common(says, guesses)
            compared += 1
            right = guesses.best == guesses.told
            agreed, runs = agreed + right, runs + (not right)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _SAYS_EVERY_S
                log.info("prompt %d of %d: token %d of %d", number, len(prompts), count, tokens)
            if guesses.told in target.end_ids:
                break
        runs += right  # the one that the sample's end cuts off
    return Sample(
        where="edge",
        prompts=len(prompts),
        tokens=compared,
        greedy=agreed / compared,
        sampled=shared / compared,
        mean_run=agreed / runs,
        longest=tokens,
    )


def _common(says: _Rows, guesses: _Rows) -> float:
    """Σ min(p, q) at temperature 0.8. Raises UsageError where a model gives numbers that are none."""
    import numpy as np

    mass = float(np.minimum(says.probabilities, guesses.probabilities).sum())
    if not 0 <= mass <= 1.001:
        raise UsageError("a model's logits are not finite: its file is damaged; download or convert it again")
    return min(mass, 1.0)


def sample_at_cloud(config: EdgeConfig, prompts: Sequence[str], tokens: int, interrupts: Interrupts) -> Sample:
    """Let a cloud write `tokens` tokens behind each prompt and verify drafts of fixed length.

    The draft model must fit the target. Raises `UsageError` if the cloud serves a target that it does not fit, and
    what a session has to say: Unreachable, Refused, Cancelled.
    """
    written = accepted = rejections = rounds = 0
    with _session(config) as session:
        serving = session.serving
        for number, prompt in enumerate(prompts, 1):
            log.info("prompt %d of %d at the cloud", number, len(prompts))
            pieces = session.generate(prompt, max_tokens=tokens)
            with interrupts.calling(pieces.cancel):
                for _ in pieces:
                    pass
            if session.finish_reason == "cancelled":
                raise Cancelled("interrupted")
            stats = session.stats
            written, rounds = written + stats["tokens"], rounds + stats["rounds"]
            accepted += stats["accepted"]
            rejections += rejected(stats)
    if not accepted + rejections:
        raise NotMeasured("the target ended at once behind every prompt: give others with --prompt")
    return Sample(
        where="cloud",
        prompts=len(prompts),
        tokens=written,
        greedy=accepted / (accepted + rejections),
        sampled=None,
        mean_run=accepted / rounds,
        longest=config.draft_length,
        model=serving and serving[0],
        context=serving and serving[1],
    )


@contextmanager
def _session(config: EdgeConfig) -> Iterator[EdgeSession]:
    try:
        with EdgeSession(config) as session:
            yield session
    except VocabularyMismatch as error:
        raise UsageError(
            f"the cloud at {config.cloud} serves {shown(error.model)}, not the target: its ids mean other texts; "
            "give the address of a cloud that serves the target"
        ) from error


def rejected(stats: Mapping[str, Any]) -> int:
    """How many drafts ended at a first difference, of the statistics of a generation."""
    accepted, per_token = stats["accepted"], stats["acceptance_per_token"]
    if per_token is None:
        return 0
    return round(accepted / per_token) - accepted if per_token else int(stats["rounds"])
