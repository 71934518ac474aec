"""How many draft tokens the target accepts, and what it commits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipesd.core import Logprobs
from pipesd.policy.noise import Stream
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Law, Method

MOST_WHOLE = 256  # ids of a distribution that is told whole
FIRST_PROPOSALS = 16
MOST_AT_ONCE = 1024  # proposals: where few are taken four times as many are told as were tried


class Draw(NamedTuple):
    """What is to be drawn from one session's rows of logits: one row behind `prefix`, one more behind each id of
    `drafted`. The first row's token stands at position len(prefix). `p_draft`: for rejection sampling the draft's own
    probability of each, in its warped distribution, rounded up to a float16."""

    sampler: Sampler
    prefix: Sequence[int]
    drafted: Sequence[int]
    p_draft: Sequence[float] = ()


class ToldLaw(NamedTuple):
    """What the edge is told of the target's distribution where a draft token was refused: pairs (id, probability).

    `first` None: they are that distribution, whole, or its most probable part where the method says so. Else they were
    drawn from it, one after the other, and are numbers `first`, `first` + 1, … of all that can be asked for.
    """

    pairs: tuple[tuple[int, float], ...]
    first: int | None = None

    @property
    def end(self) -> int:
        """How many proposals are refused once all of these are."""
        return 0 if self.first is None else self.first + len(self.pairs)


class Refusal:
    """The target's distribution at a position where a draft token was refused, kept until the edge has drawn."""

    def __init__(self, law: Law, sampler: Sampler, position: int) -> None:
        self._law = law
        self._sampler = sampler
        self._position = position
        self._sums: Any = None  # of the weights, where proposals are drawn from them
        self._told: ToldLaw | None = None

    def told(self, tried: int) -> ToldLaw:
        """What to tell an edge that refused the first `tried` proposals: the same whenever it is asked.

        A distribution of few ids is told whole, exactly; with method PICOSPEC the most probable ids of a larger one,
        highest first. Else proposals, drawn from it. A question that is repeated costs nothing.
        """
        if self._told is None:
            self._told = self._few() or self._proposed(tried)
        elif self._told.first not in (None, tried):
            self._told = self._proposed(tried)
        return self._told

    def _few(self) -> ToldLaw | None:
        """All that is ever told, None where proposals are."""
        import numpy as np

        weights = self._law.weights
        places = np.flatnonzero(weights)
        picospec = self._sampler.sampling.method is Method.PICOSPEC
        most = self._sampler.sampling.top_mass if picospec else MOST_WHOLE
        if len(places) > most and not picospec:
            self._sums = np.cumsum(weights, dtype=np.float64)
            return None
        return ToldLaw(self._pairs(places if len(places) <= most else highest(weights, most)))

    def _proposed(self, tried: int) -> ToldLaw:
        import numpy as np

        count = max(FIRST_PROPOSALS, min(4 * tried, MOST_AT_ONCE))
        units = self._sampler.units(self._position, Stream.PROPOSAL, range(tried, tried + count))
        # a unit is so far below 1 that its product is below the last sum: no place is beyond the last weight
        return ToldLaw(self._pairs(np.searchsorted(self._sums, units * self._sums[-1], side="right")), first=tried)

    def _pairs(self, places: Any) -> tuple[tuple[int, float], ...]:
        """Ids and their probabilities, those of `Law.probability`."""
        import numpy as np

        ids = places if self._law.ids is None else self._law.ids[places]
        p = (self._law.weights[places].astype(np.float64) / self._law.total).astype(np.float32)
        return tuple(zip(ids.tolist(), p.tolist(), strict=True))


class Choices(NamedTuple):
    """What the target makes of a draft: `ids[i]` is its own id behind the first i draft tokens, -1 where its logits
    were not finite; there is one more than there are draft tokens. `accepted`: how many of these it takes. `refusal`:
    it took fewer than all, and the edge draws what stands there; `ids[accepted]` is then of no meaning. Where draft
    tokens are tested, `ids` holds those accepted, then what follows them, then nothing of meaning.
    `logprobs`: of each drafted id that was accepted, and of `ids[accepted]` unless it is -1 or there is a refusal."""

    ids: tuple[int, ...]
    accepted: int
    refusal: Refusal | None = None
    logprobs: tuple[Logprobs, ...] | None = None


def accept_greedy(draft: Sequence[int], choices: Sequence[int]) -> int:
    """Length of the longest prefix of `draft` that equals the target's own choices.

    `choices[i]` is the target's id at the position of `draft[i]`, given that all before it were accepted; there is one
    choice more than there are draft tokens, and `choices[result]` is the id that the target commits itself.
    """
    assert len(choices) == len(draft) + 1, (
        f"{len(draft)} draft tokens need {len(draft) + 1} choices, not {len(choices)}"
    )
    for count, (drafted, chosen) in enumerate(zip(draft, choices, strict=False)):
        if drafted != chosen:
            return count
    return len(draft)


def choose(rows: Any, draw: Draw) -> Choices:
    """What the target makes of a draft, from float32 logits (1 + drafted, width)."""
    choices = _tested(rows, draw) if draw.sampler.sampling.tests else _compared(rows, draw)
    most = draw.sampler.sampling.logprobs
    if most is None:
        return choices
    told = choices.ids[: choices.accepted + (choices.refusal is None and choices.ids[choices.accepted] >= 0)]
    return choices._replace(logprobs=tuple(logprobs(row, token, most) for row, token in zip(rows, told, strict=False)))


def _compared(rows: Any, draw: Draw) -> Choices:
    text = list(draw.prefix)
    ids = []
    for row, token in zip(rows, [*draw.drafted, -1], strict=True):
        choice = draw.sampler.choose(row, len(text), text)
        ids.append(-1 if choice is None else choice.id)
        text.append(token)
    return Choices(tuple(ids), accept_greedy(draw.drafted, ids))


def _tested(rows: Any, draw: Draw) -> Choices:
    """Rejection sampling (Leviathan, Kalman and Matias, 2023): draft token x is accepted with probability
    min(1, p(x) / q(x)). With a q that was rounded up it is accepted less often, which the residual makes good."""
    sampler, drafted, text = draw.sampler, list(draw.drafted), list(draw.prefix)
    assert len(draw.p_draft) == len(drafted), f"{len(drafted)} draft tokens came with {len(draw.p_draft)} probabilities"
    for i, (token, q) in enumerate(zip(drafted, draw.p_draft, strict=True)):
        law = sampler.law(rows[i], text)
        if law is None:
            return Choices((*drafted[:i], -1, *drafted[i:]), i)
        if not sampler.unit(len(text), Stream.TEST) * q < law.probability(token):
            return Choices((*drafted, token), i, Refusal(law, sampler, len(text)))
        text.append(token)
    choice = sampler.choose(rows[len(drafted)], len(text), text)
    return Choices((*drafted, -1 if choice is None else choice.id), len(drafted))


def logprobs(row: Any, token: int, most: int) -> Logprobs:
    """Of one id and of the `most` most probable ones (as many as there are), from float32 logits (n,), the highest
    finite. Of ids that tie the lowest first."""
    import numpy as np

    top = row.max()
    log_total = float(np.log(np.exp(row - top).sum(dtype=np.float64)))

    def of(token: int) -> float:
        return min(0.0, float(row[token] - top) - log_total)

    return Logprobs(of(token), tuple((other, of(other)) for other in highest(row, most).tolist()))


def highest(values: Any, most: int) -> Any:
    """Places of the `most` highest of float32 (n,), all if there are fewer; highest first, on a tie the lowest place;
    int64."""
    import numpy as np

    most = min(most, len(values))
    if most == 0:
        return np.empty(0, np.int64)
    places = np.flatnonzero(values >= np.partition(values, len(values) - most)[len(values) - most])
    return places[np.argsort(-values[places], kind="stable")][:most]
