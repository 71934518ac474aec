"""Laws with real distributions, known exactly behind every prefix: for targets and drafters whose samples are counted.

A prefix is carried as its state, see `pipesd.sim.texts`; a row of logits is a pure function of it, equal in every
process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pipesd.policy.noise import mix, units
from pipesd.policy.sampler import Sampler
from pipesd.sim.texts import LETTERS, folded, state_of

Row = npt.NDArray[np.float32]  # logits (width,), not to be written to
_UNIT_SPREAD = math.sqrt(3.0) / math.pi  # what makes a logistic distribution one of standard deviation 1


class Distribution:
    """A law that knows the logits of every id, not only the highest."""

    def row(self, state: int, width: int) -> Row:
        """Logits of ids 0 to `width` - 1 behind the prefix that has `state`."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Width of a row that has every id that may follow."""
        raise NotImplementedError

    def choice(self, state: int) -> int:
        """The id with the highest logit."""
        return int(self.row(state, self.width).argmax())

    def propose(self, position: int, state: int) -> tuple[int, float]:
        """The same as a guess, see `Proposal`: with its probability at temperature 1."""
        row = self.row(state, self.width)
        token = int(row.argmax())
        return token, float(probabilities(row)[token])


@dataclass(frozen=True)
class KeyedDistribution(Distribution):
    """Logits that look random: a keyed hash of the prefix gives each of `alphabet` its own, of mean 0 and standard
    deviation `sharpness`. `end_id` may follow too, at twice that below; all others have the logit `floor`."""

    key: int = 0
    alphabet: Sequence[int] = LETTERS
    sharpness: float = 2.0
    end_id: int | None = None
    floor: float = -math.inf

    def row(self, state: int, width: int) -> Row:
        """See `Distribution`."""
        return _keyed_row(self.key, tuple(self.alphabet), self.sharpness, self.end_id, self.floor, state, width)

    @property
    def width(self) -> int:
        """See `Distribution`."""
        return 1 + max(*self.alphabet, -1 if self.end_id is None else self.end_id)


@dataclass(frozen=True)
class TableDistribution(Distribution):
    """The same probabilities behind every prefix: those of ids 0, 1, …; others have none."""

    probabilities: Sequence[float]

    def row(self, state: int, width: int) -> Row:
        """See `Distribution`."""
        return _table_row(tuple(self.probabilities), width)

    @property
    def width(self) -> int:
        """See `Distribution`."""
        return len(self.probabilities)


@dataclass(frozen=True)
class Blend(Distribution):
    """A draft model of `law`: its logits count `agreement`, those of `other` the rest. 1 is the law itself, 0 the
    other; in between only what both may say may follow."""

    law: Distribution
    other: Distribution
    agreement: float = 0.8

    def row(self, state: int, width: int) -> Row:
        """See `Distribution`."""
        if self.agreement in (0.0, 1.0):
            return (self.law if self.agreement else self.other).row(state, width)
        share = np.float32(self.agreement)
        return share * self.law.row(state, width) + (np.float32(1.0) - share) * self.other.row(state, width)

    @property
    def width(self) -> int:
        """See `Distribution`."""
        return max(self.law.width, self.other.width)


def draft_of(law: KeyedDistribution, agreement: float, seed: int = 0) -> Blend:
    """A draft model that agrees with a keyed law as much as wanted: 1 always, 0 by chance."""
    other = KeyedDistribution(mix(law.key ^ mix(seed + 1)), law.alphabet, law.sharpness, law.end_id, law.floor)
    return Blend(law, other, agreement)


def sampled_continuation(
    law: Distribution,
    prompt: Sequence[int],
    count: int,
    sampler: Sampler,
    end_ids: Iterable[int] = (),
    width: int | None = None,
) -> list[int]:
    """The `count` ids that a target of this law draws behind `prompt` by itself, or fewer when one of `end_ids` (kept)
    comes first. `width`: of its rows of logits, where ids beyond those of the law may follow."""
    width = width or law.width
    ends, text, state = frozenset(end_ids), list(prompt), state_of(prompt)
    while len(text) < len(prompt) + count:
        choice = sampler.choose(law.row(state, width), len(text), text)
        assert choice is not None, f"no id can be drawn behind {text}"
        text.append(choice.id)
        if choice.id in ends:
            break
        state = folded(state, choice.id)
    return text[len(prompt) :]


def probabilities(row: Any) -> npt.NDArray[np.float64]:
    """The distribution of a row of logits at temperature 1."""
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    share: npt.NDArray[np.float64] = weights / weights.sum()
    return share


@lru_cache(maxsize=1 << 16)
def _keyed_row(
    key: int, alphabet: tuple[int, ...], sharpness: float, end_id: int | None, floor: float, state: int, width: int
) -> Row:
    row = np.full(width, floor, np.float32)
    places = np.array(alphabet, np.int64)
    even = units(mix(state ^ mix(2 * key + 1)), places.astype(np.uint64))
    row[places] = sharpness * _UNIT_SPREAD * np.log(even / (1.0 - even))
    if end_id is not None:
        row[end_id] = -2.0 * sharpness
    row.setflags(write=False)
    return row


@lru_cache(maxsize=256)
def _table_row(table: tuple[float, ...], width: int) -> Row:
    row = np.full(width, -np.inf, np.float32)
    with np.errstate(divide="ignore"):
        row[: len(table)] = np.log(table)
    row.setflags(write=False)
    return row
