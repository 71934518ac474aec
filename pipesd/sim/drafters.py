"""Draft models without weights: a bookkeeping drafter that asks a *proposal* for its next id.

`ScriptedDrafter` has the interface of the real drafter (`extend`, `prefill`, `draft`, `rollback`, …) and its two parts:
the ids it was told or drew, and a cache of those that were fed. After every step the cache must equal the beginning of
the ids, and a wrong call is an assertion, so the bookkeeping of a session is tested by using it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipesd.clock import Clock, SystemClock
from pipesd.core import Drawn, Vocabulary
from pipesd.policy.noise import mix
from pipesd.policy.sampler import Chooser
from pipesd.sim.distributions import Distribution, Row, probabilities
from pipesd.sim.texts import EMPTY, LETTERS, Law, folded, unit
from pipesd.sim.tokeniser import byte_vocabulary

_AGREES, _WRONG, _CONFIDENCE = (mix(i) for i in (11, 12, 13))  # independent draws from one state


class Proposal(Protocol):
    """What a drafter guesses: a pure function of where it stands, so that no order of calls changes it."""

    def propose(self, position: int, state: int) -> tuple[int, float]:
        """The id guessed at `position` behind the prefix that has `state`, and its probability."""
        ...


@dataclass(frozen=True)
class Agreement:
    """Guesses what `law` says with probability `agreement`, else one of `wrong`, by a hash of (seed, prefix).

    Confidences are even over 0.44..1.0 where the guess is right and over 0.10..0.66 where it is wrong (means 0.72 and
    0.38), or always `confidence`. `wrong` may hold any ids, such as an end id or what no vocabulary has.
    """

    law: Law
    agreement: float = 0.8
    seed: int = 0
    wrong: Sequence[int] = LETTERS
    confidence: float | None = None

    def __post_init__(self) -> None:
        assert 0.0 <= self.agreement <= 1.0, f"agreement {self.agreement}"
        assert self.agreement == 1.0 or len(set(self.wrong)) > 1, "a wrong guess needs at least two ids to choose from"

    def propose(self, position: int, state: int) -> tuple[int, float]:
        """See `Proposal`; `position` does not matter."""
        drawn = mix(state ^ mix(self.seed))
        said = self.law.choice(state)
        right = unit(drawn ^ _AGREES) < self.agreement
        if self.confidence is not None:
            p_draft = self.confidence
        else:
            p_draft = (0.44 if right else 0.10) + 0.56 * unit(drawn ^ _CONFIDENCE)
        return (said if right else self._other(said, drawn ^ _WRONG)), p_draft

    def _other(self, said: int, drawn: int) -> int:
        others = [token_id for token_id in self.wrong if token_id != said]
        return others[mix(drawn) % len(others)]


@dataclass(frozen=True)
class DraftScript:
    """Guesses given ids with given probabilities: `ids[i]` at position `start + i`; elsewhere `filler`, at 0.01.

    The ids may be anything, so that hostile ones (512, -1, 2**31) can be tried.
    """

    ids: Sequence[int]
    probabilities: Sequence[float] | float = 0.9
    start: int = 0
    filler: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.probabilities, float):
            assert len(self.probabilities) == len(self.ids), f"{len(self.probabilities)} for {len(self.ids)} ids"

    def propose(self, position: int, state: int) -> tuple[int, float]:
        """See `Proposal`; `state` does not matter."""
        at = position - self.start
        if not 0 <= at < len(self.ids):
            return self.filler, 0.01
        return self.ids[at], self.probabilities if isinstance(self.probabilities, float) else self.probabilities[at]


def entropy_of(p: float, ids: int) -> float:
    """Entropy (nats) of one id at probability `p` while the `ids` - 1 others, at least one, share the rest evenly."""
    own = p * math.log(p) if p > 0.0 else 0.0
    rest = (1.0 - p) * math.log((1.0 - p) / (ids - 1)) if p < 1.0 else 0.0
    return max(0.0, -own - rest)


def _entropy(share: Any) -> float:
    """Entropy (nats) of probabilities."""
    some = share[share > 0.0]
    return max(0.0, float(-(some * np.log(some)).sum()))


class ScriptedDrafter:
    """Drafts what `proposal` says. With a sampler it draws from the logits of a `Distribution`; other proposals give
    their guess its probability, and all other ids share the rest evenly.

    `gamma_s` is what one draft, `prefill_s` what each further id fed lasts by `clock`. `drawn` counts the drafts,
    `fed` the ids that went through the cache, so a test can see that a prefix was reused. No draft goes beyond
    `context` ids.
    """

    def __init__(
        self,
        proposal: Proposal,
        vocabulary: Vocabulary | None = None,
        *,
        context: int = 2048,
        end_ids: Iterable[int] = (),
        name: str = "scripted",
        gamma_s: float = 0.0,
        prefill_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.proposal = proposal
        self.vocabulary = byte_vocabulary() if vocabulary is None else vocabulary
        self.context = context
        self.end_ids = frozenset(end_ids)
        self.name = name
        self.gamma_s, self.prefill_s = gamma_s, prefill_s
        self.drawn = self.fed = 0
        self.closed = False
        self._clock: Clock = SystemClock() if clock is None else clock
        self._ids: list[int] = []
        self._cache: list[int] = []  # the ids fed so far
        self._states = [EMPTY]  # before each id fed, and behind the last

    @property
    def ids(self) -> tuple[int, ...]:
        """All that the drafter knows, pending ids included, for tests."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def room(self) -> int:
        """How many ids may still be drafted; 0 from the end of the context on."""
        return max(0, self.context - len(self._ids))

    def rollback(self, pos: int) -> None:
        """Forget every id at or behind `pos`."""
        self._check()
        assert 0 <= pos <= len(self._ids), f"{len(self._ids)} ids, cannot be cut to {pos}"
        del self._ids[pos:]
        del self._cache[pos:]
        del self._states[pos + 1 :]
        self._check()

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids; they are fed with the next draft or prefill, and may go beyond the context."""
        self._check()
        assert all(token_id >= 0 for token_id in ids), f"not ids: {ids}"
        self._ids.extend(ids)

    def prefill(self, most: int) -> int:
        """Feed at most `most` pending ids; how many remain. Nothing is fed of a text too long for the context."""
        self._check()
        assert most >= 0, f"prefill of {most} ids"
        if len(self._ids) > self.context:
            return 0
        fed = self._feed(most)
        self._last(fed * self.prefill_s)
        return len(self._ids) - len(self._cache)

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        """Feed what is pending; the id guessed next, or drawn by `sampler`, which becomes pending, with probability and
        entropy at temperature 1."""
        self._check()
        assert self._ids, "a draft behind no ids"
        assert self.room, f"a draft behind {len(self._ids)} ids, the context is {self.context}"
        fed = self._feed(len(self._ids))
        drawn = self._guessed() if sampler is None else self._drawn(sampler)
        self._ids.append(drawn.id)
        self.drawn += 1
        self._last(self.gamma_s + max(0, fed - 1) * self.prefill_s)
        return drawn

    def _guessed(self) -> Drawn:
        position, state = len(self._ids), self._states[-1]
        token_id, p_draft = self.proposal.propose(position, state)
        if isinstance(self.proposal, Distribution):
            share = probabilities(self.proposal.row(state, self.vocabulary.real_size))
            return Drawn(token_id, p_draft, _entropy(share))
        return Drawn(token_id, p_draft, entropy_of(p_draft, self.vocabulary.size))

    def _drawn(self, sampler: Chooser) -> Drawn:
        row = self.row(len(self._ids), self._states[-1])
        choice = sampler.choose(row, len(self._ids), self._ids)
        assert choice is not None, f"no id can be drawn from {row}"
        share = probabilities(row)
        return Drawn(choice.id, float(share[choice.id]), _entropy(share), choice.margin)

    def row(self, position: int, state: int) -> Row:
        """The logits of what may follow."""
        width = self.vocabulary.real_size
        if isinstance(self.proposal, Distribution):
            return self.proposal.row(state, width)
        token_id, p_draft = self.proposal.propose(position, state)
        row = np.full(width, -np.inf if p_draft >= 1.0 else math.log((1.0 - p_draft) / (width - 1)), np.float32)
        row[token_id] = math.log(p_draft) if p_draft > 0.0 else -np.inf
        return row

    def close(self) -> None:
        """No call may follow, but another `close`."""
        self.closed = True

    def _feed(self, most: int) -> int:
        begin = len(self._cache)
        pending = self._ids[begin : begin + most]
        for token_id in pending:
            self._cache.append(token_id)
            self._states.append(folded(self._states[-1], token_id))
        self.fed += len(pending)
        return len(pending)

    def _check(self) -> None:
        assert not self.closed, "the drafter is closed"
        assert self._cache == self._ids[: len(self._cache)], "the cache is not the beginning of the ids"
        assert len(self._states) == len(self._cache) + 1, "a state for each prefix fed"

    def _last(self, seconds: float) -> None:
        if seconds > 0:
            self._clock.sleep(seconds)


def self_drafter(law: Law, vocabulary: Vocabulary | None = None, *, context: int = 2048) -> ScriptedDrafter:
    """A drafter of the same weights as the target, so to speak: every draft is right as long as its prefix is."""
    return ScriptedDrafter(Agreement(law, 1.0), vocabulary, context=context, name="self")
