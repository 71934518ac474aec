"""What a scripted target says: laws that give the next id as a pure function of the whole prefix.

A prefix is carried as one number, its *state*, folded id by id, so that following one more id costs a constant time
and two prefixes that differ anywhere have different states (up to hash collisions of 64 bits). Target and drafter
stand-ins share a law; that is how a drafter can be made right exactly as often as wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from pipesd.policy.noise import GOLDEN, mix

EMPTY = GOLDEN  # the state of the empty prefix
LETTERS = tuple(b"etaoin shrdlu")  # ids of readable letters in a `byte_vocabulary`


def folded(state: int, token_id: int) -> int:
    """The state of a prefix one id longer. For one `state`, different ids below 2**63 give different results."""
    return mix(state + GOLDEN * (token_id + 1))


def state_of(ids: Iterable[int], state: int = EMPTY) -> int:
    """The state of the prefix `ids`, or of `ids` appended to the prefix that has `state`."""
    for token_id in ids:
        state = folded(state, token_id)
    return state


def unit(number: int) -> float:
    """A number in [0, 1) that depends on `number` alone; uniform over different numbers."""
    return (mix(number) >> 11) * 2.0**-53


class Law(Protocol):
    """What comes next: the same answer for the same prefix, in every process."""

    def choice(self, state: int) -> int:
        """The next id behind the prefix that has `state`."""
        ...


@dataclass(frozen=True)
class KeyedText:
    """A text without end that looks random: a keyed hash of the prefix picks one of `alphabet`.

    Any wrong id in a prefix shows at once in what follows, and other keys give other texts. With `end_rate` > 0 each
    position is `end_id` with that probability.
    """

    key: int = 0
    alphabet: Sequence[int] = LETTERS
    end_id: int | None = None
    end_rate: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.alphabet) > 0, "a text needs at least one id"
        assert self.end_rate == 0.0 or self.end_id is not None, "an end rate needs an end id"

    @cached_property
    def _key(self) -> int:
        return mix(self.key * 2 + 1)

    def choice(self, state: int) -> int:
        """The next id behind the prefix that has `state`."""
        drawn = mix(state ^ self._key)
        if self.end_id is not None and unit(drawn) < self.end_rate:
            return self.end_id
        return self.alphabet[drawn % len(self.alphabet)]


@dataclass(frozen=True)
class RecordedText:
    """Recorded outputs behind recorded prompts; behind any other prefix, what `beyond` says.

    `records` are pairs (prompt ids, output ids). Where two records share a prefix they must agree on what follows.
    """

    records: Sequence[tuple[Sequence[int], Sequence[int]]]
    beyond: Law = KeyedText()

    def __post_init__(self) -> None:
        assert self._choices is not None  # walks the records, so that a contradiction shows here

    @cached_property
    def _choices(self) -> dict[int, int]:
        choices: dict[int, int] = {}
        for prompt, output in self.records:
            state = state_of(prompt)
            for token_id in output:
                said = choices.setdefault(state, token_id)
                assert said == token_id, f"two records go on with {said} and {token_id} behind the same prefix"
                state = folded(state, token_id)
        return choices

    @cached_property
    def prefixes(self) -> frozenset[int]:
        """The states of every prefix of every record, the empty one and the whole ones included."""
        return frozenset(state for prompt, output in self.records for state in _states([*prompt, *output]))

    def recorded(self, state: int) -> bool:
        """Whether a recorded output goes on behind this prefix."""
        return state in self._choices

    def choice(self, state: int) -> int:
        """The next id behind the prefix that has `state`."""
        said = self._choices.get(state)
        return self.beyond.choice(state) if said is None else said


def _states(ids: Iterable[int]) -> Iterator[int]:
    state = EMPTY
    yield state
    for token_id in ids:
        state = folded(state, token_id)
        yield state


def continuation(law: Law, prompt: Sequence[int], count: int, end_ids: Iterable[int] = ()) -> list[int]:
    """The `count` ids that `law` says behind `prompt`, or fewer when one of `end_ids` (kept) comes first."""
    ends = frozenset(end_ids)
    state = state_of(prompt)
    output: list[int] = []
    while len(output) < count:
        token_id = law.choice(state)
        output.append(token_id)
        if token_id in ends:
            break
        state = folded(state, token_id)
    return output


def law_digest(law: Law) -> bytes:
    """Eight bytes that tell one law from another, for fingerprints; equal in every process."""
    return hashlib.blake2b(repr(law).encode(), digest_size=8).digest()
