"""Sampling computed the slow way, one position at a time, by the target alone, and a cloud and an edge to compare it
with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from clouds import PROMPT, edge

from pipesd.config import GenerateConfig
from pipesd.edge.session import EdgeSession
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import make_sampling
from pipesd.sim.distributions import Distribution, KeyedDistribution, draft_of
from pipesd.sim.drafters import ScriptedDrafter
from pipesd.sim.texts import state_of
from pipesd.sim.tokeniser import ByteTokeniser

TARGET = KeyedDistribution(11)
DRAFT = draft_of(TARGET, 0.7)
PROMPT_IDS = ByteTokeniser().encode(PROMPT)
WIDTH = ByteTokeniser().vocabulary.size


def sampling_edge(address: str, *, draft: Distribution = DRAFT, **config: Any) -> EdgeSession:
    """A session whose draft model has its own distribution."""
    return edge(address, drafter=ScriptedDrafter(draft), **{"tuning": "off", **config})


def alone(law: Distribution, count: int, prompt: Sequence[int] = PROMPT_IDS, **options: Any) -> list[int]:
    """The ids that a model with this distribution says by itself behind the prompt."""
    config = GenerateConfig(**options)
    text = list(prompt)
    for _ in range(count):
        sampler = Sampler(make_sampling(config), config.seed or 0)
        choice = sampler.choose(law.row(state_of(text), WIDTH), len(text), text)
        assert choice is not None
        text.append(choice.id)
    return text[len(prompt) :]


def logprobs_of(law: Distribution, ids: Sequence[int], most: int) -> list[tuple[float, dict[int, float]]]:
    """Log-probability of each id behind the prompt and those before it, and the `most` highest."""
    found = []
    for at, token in enumerate(ids):
        row = law.row(state_of([*PROMPT_IDS, *ids[:at]]), WIDTH).astype(np.float64)
        said = row - math.log(np.exp(row).sum())
        found.append((float(said[token]), {int(k): float(said[k]) for k in np.argsort(-said)[:most]}))
    return found
