"""What draft model and target say at the same places, for benches: texts that the target samples, and the logits that
both have at each position of them. Nothing goes over a link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from recording import LONGEST_PROMPT

from pipesd.cloud.loading import load_target
from pipesd.cloud.target import TorchTarget
from pipesd.edge.drafter import Drafter
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling


class Place(NamedTuple):
    """One position of a text: the ids before it, and the logits behind them, float32 (width,), of both models.

    `draft` ends with the last id that has a text, as what the edge draws from does.
    """

    prefix: tuple[int, ...]
    draft: np.ndarray
    target: np.ndarray


class Seen:
    """Stands in for a sampler to see what it is given; draws nothing."""

    row: np.ndarray

    def choose(self, row: np.ndarray, position: int, prefix: Sequence[int]) -> None:
        self.row = row.copy()


class Both(NamedTuple):
    """The two models of a pair in one process."""

    drafter: Drafter
    target: TorchTarget
    end_ids: frozenset[int]

    @classmethod
    def load(cls, draft: str, target: str) -> Both:
        drafter = Drafter(draft, threads=1)
        return cls(drafter, load_target(target, device="cpu", dtype="float32", slots=1), drafter.end_ids)

    def encode(self, prompts: Sequence[str], count: int) -> list[list[int]]:
        """The ids of the first `count` prompts that are not too long."""
        encoded = (self.drafter.tokeniser.encode(prompt, special=True) for prompt in prompts)
        return list(islice((ids for ids in encoded if len(ids) <= LONGEST_PROMPT), count))

    def text(self, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> Iterator[Place]:
        """The places of one text: what the target samples behind `prompt`, up to its end or `tokens` ids."""
        sampler = Sampler(Sampling(temperature=temperature), seed)
        ids, new = list(prompt), list(prompt)
        self.target.truncate(0, 0)
        self.drafter.rollback(0)
        for _ in range(tokens):
            row = self.target.forward([(0, new, 1)])[0][0]
            self.drafter.extend(new)
            seen = Seen()
            self.drafter.draft(seen)
            self.drafter.rollback(len(ids))
            yield Place(tuple(ids), seen.row, row)
            choice = sampler.choose(row, len(ids), ids)
            assert choice is not None, "the target's logits are not finite"
            if choice.id in self.end_ids:
                return
            new = [choice.id]
            ids += new
