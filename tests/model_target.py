"""The target of a model world: a hash of what stands before says what it chooses, accepts, and leaves to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipesd.policy.accept import Choices, ToldLaw, accept_greedy
from pipesd.policy.batch_choices import NOTHING
from pipesd.protocol.cloud_session import Work

STOPS = (90, 91)  # the stop ids of every world
P_SENT = 0.5  # what every draft token's probability is said to be
PROPOSED, TAKEN_BEFORE = 2, 5  # how many proposals are told at once; one of so many is taken


@dataclass
class ModelTarget:
    """`ids` are what it chooses from, beside stop ids at the positions `stops_at`. One that is not reproducible chooses
    anew at each call."""

    ids: int
    stops_at: frozenset[int]
    proposes: bool | None
    reproducible: bool
    salt: int = 0

    def choice(self, prefix: Sequence[int]) -> int:
        """Its own id behind `prefix`."""
        self.salt += not self.reproducible
        return drawn(self.salt, prefix, self.ids, self.stops_at)

    def accepts(self, prefix: Sequence[int], token: int) -> bool:
        """Whether it takes a draft token that is tested."""
        return token == self.choice(prefix) or hash((self.salt, 1, *prefix, token)) % 3 == 0

    def refusal(self, prefix: Sequence[int]) -> ModelRefusal:
        self.salt += not self.reproducible
        proposes = hash((self.salt, 2, *prefix)) % 2 == 0 if self.proposes is None else self.proposes
        return ModelRefusal(self.salt, tuple(prefix), self.ids, self.stops_at, proposes)

    def answer(self, work: Work, cache: Sequence[int]) -> Choices:
        """What it makes of a session's share of a pass; `cache` is what it has read of that session."""
        if not work.rows:
            return NOTHING
        drafted, before = work.ids[1:], cache[: len(cache) - work.rows + 1]
        ids = tuple(self.choice([*before, *drafted[:i]]) for i in range(work.rows))
        if work.draw is None:
            return Choices(ids, accept_greedy(drafted, ids))
        assert list(work.draw.prefix) == before and work.draw.drafted == drafted, "it draws behind another text"
        assert list(work.draw.p_draft) == [P_SENT] * len(drafted), "each draft token has its probability"
        for i, token in enumerate(drafted):
            if not self.accepts([*before, *drafted[:i]], token):
                return Choices(ids, i, self.refusal([*before, *drafted[:i]]))  # type: ignore[arg-type]
        return Choices(ids, len(drafted))


@dataclass(frozen=True)
class ModelRefusal:
    """What stands in the place of a refused token: told at once, or to be found among proposals."""

    salt: int
    prefix: tuple[int, ...]
    ids: int
    stops_at: frozenset[int]
    proposes: bool

    def told(self, tried: int) -> ToldLaw:
        if not self.proposes:
            return ToldLaw(((self._proposal(0), 1.0),))
        return ToldLaw(tuple((self._proposal(tried + j), 0.5) for j in range(PROPOSED)), tried)

    @property
    def drawn(self) -> int:
        """What an edge makes of it in the end."""
        return self._proposal(hash((4, *self.prefix)) % TAKEN_BEFORE if self.proposes else 0)

    def _proposal(self, number: int) -> int:
        return drawn(self.salt + 100 + number, self.prefix, self.ids, self.stops_at)


def taken(refused: ToldLaw, prefix: Sequence[int]) -> int | None:
    """What an edge draws from what it is told of the place behind `prefix`, None: none of that."""
    if refused.first is None:
        return refused.pairs[0][0]
    at = hash((4, *prefix)) % TAKEN_BEFORE - refused.first
    assert at >= 0, "it was taken already, but not heard"
    return refused.pairs[at][0] if at < len(refused.pairs) else None


def drawn(salt: int, prefix: Sequence[int], ids: int, stops_at: frozenset[int]) -> int:
    return STOPS[len(prefix) % 2] if len(prefix) in stops_at else hash((salt, *prefix)) % ids
