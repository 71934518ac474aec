"""Target models without weights: they keep one list of ids a slot, as a real one keeps a cache, and check their caller.

Each has the interface of the real target: `length`, `truncate`, `forward`, `greedy`, `sample`, `pass_ms`, `info`,
`vocabulary`, `slots`. A wrong call (a slot out of range, ids past the context or the vocabulary, more rows than ids, a
slot twice in one pass) is an assertion, so the bookkeeping of whoever calls is tested by using them. All can be
pickled, and so can `functools.partial(ScriptedTarget, …)`, the usual factory for a worker in another process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipesd.clock import Clock, SystemClock
from pipesd.core import ModelInfo, Vocabulary
from pipesd.errors import UsageError
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, drawn_choices
from pipesd.sim.distributions import Distribution, TableDistribution
from pipesd.sim.texts import EMPTY, KeyedText, Law, RecordedText, folded, law_digest
from pipesd.sim.tokeniser import byte_vocabulary

Logits = npt.NDArray[np.float32]  # (rows, width)

ENDLESS = KeyedText()
PEAK = 16.0  # logit of the chosen id; the others have 0


class ScriptedFault(RuntimeError):
    """A fault that was asked for; a stranger to the tree of errors, as a bug would be."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in pass number `at_pass` (the first is 1).

    `raise` raises `ScriptedFault` before anything is appended, `exit` ends the process without a word, `sleep` makes
    the pass `seconds` longer; `nan` fills the rows of `slot` (every slot if None) with NaN, `one-nan` and `inf` spoil
    one logit of each row. With `once_file`, the fault happens only if that file can be created, hence once, however
    often the process is restarted.
    """

    kind: Literal["raise", "exit", "sleep", "nan", "one-nan", "inf"]
    at_pass: int
    slot: int | None = None
    seconds: float = 0.0
    once_file: str | None = None

    def due(self, passes: int) -> bool:
        """Whether it happens in this pass; claims `once_file`."""
        if passes != self.at_pass:
            return False
        if self.once_file is None:
            return True
        try:
            with open(self.once_file, "x"):
                return True
        except FileExistsError:
            return False


_SPOILED = {"nan": (None, np.nan), "one-nan": (1, np.nan), "inf": (1, np.inf)}  # how many logits (None: all), value


class ScriptedTarget:
    """Says what a `Law` says. Its logits are those of a `Distribution`, else flat but for the chosen id.

    `pass_s` and `token_s` pace it: each pass lasts that long and so much more for each id, by `clock`.
    `passes` counts the passes, `fed` the ids that went through them.
    """

    def __init__(
        self,
        law: Law = ENDLESS,
        vocabulary: Vocabulary | None = None,
        *,
        context: int = 2048,
        slots: int = 16,
        end_ids: Sequence[int] = (),
        name: str = "scripted",
        pass_s: float = 0.0,
        token_s: float = 0.0,
        clock: Clock | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.law = law
        self.vocabulary = byte_vocabulary() if vocabulary is None else vocabulary
        self.slots = slots
        self.info = ModelInfo(
            name=name,
            vocabulary_size=self.vocabulary.real_size,
            context=context,
            end_ids=tuple(end_ids),
            fingerprint=law_digest(law),
            device="cpu",
            dtype="float32",
        )
        self.pass_s, self.token_s = pass_s, token_s
        self.faults = tuple(faults)
        self.passes = self.fed = 0
        self._clock: Clock = SystemClock() if clock is None else clock
        self._ids: list[list[int]] = [[] for _ in range(slots)]
        # the states before each id and behind the last: one more than there are ids
        self._states: list[list[int]] = [[EMPTY] for _ in range(slots)]
        self._longest_s = pass_s + token_s

    @property
    def pass_ms(self) -> int:
        """The longest pass so far, in ms, at least 1."""
        return max(1, math.ceil(self._longest_s * 1000))

    def length(self, slot: int) -> int:
        """Number of ids in the slot."""
        return len(self._ids[self._checked(slot)])

    def ids(self, slot: int) -> tuple[int, ...]:
        """The ids in the slot, for tests."""
        return tuple(self._ids[self._checked(slot)])

    def truncate(self, slot: int, length: int) -> None:
        """Forget every id at or behind `length`; 0 frees the slot."""
        ids = self._ids[self._checked(slot)]
        assert 0 <= length <= len(ids), f"slot {slot} holds {len(ids)} ids, cannot be cut to {length}"
        del ids[length:]
        del self._states[slot][length + 1 :]

    def forward(self, batch: Batch) -> list[Logits]:
        """Append `ids` to each slot; for each the logits (rows, width) behind its last `rows` ids."""
        spoils = self._begin(batch)
        results = [self._logits(self._appended(slot, ids, rows)) for slot, ids, rows in batch]
        for (slot, _, _), logits in zip(batch, results, strict=True):
            for fault in spoils:
                if fault.slot in (None, slot):
                    spoiled, value = _SPOILED[fault.kind]
                    logits[:, :spoiled] = value
        return results

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        """The same pass; the arg-max id of each row, -1 for a row whose maximum is not finite."""
        spoils = self._begin(batch)
        results = [self._arg_max(self._appended(slot, ids, rows)) for slot, ids, rows in batch]
        if spoils:
            spoiled = {slot for slot, _, _ in batch if any(fault.slot in (None, slot) for fault in spoils)}
            results = [(-1,) * len(r) if b[0] in spoiled else r for b, r in zip(batch, results, strict=True)]
        return results

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        """The same pass; what each draw makes of its entry's logits, without one the arg-max ids."""
        return drawn_choices(batch, self.forward(batch), draws)

    def _begin(self, batch: Batch) -> list[Fault]:
        """Check and count the pass, let it last, raise what is due; the faults that spoil logits are returned."""
        seen = [slot for slot, _, _ in batch]
        assert batch, "a pass over nothing"
        assert len(set(seen)) == len(seen), f"a slot twice in one pass: {seen}"
        for slot, ids, rows in batch:
            assert ids, f"slot {slot}: a pass over no ids"
            assert 0 <= rows <= len(ids), f"slot {slot}: {rows} rows of {len(ids)} ids"
            length = self.length(slot) + len(ids)
            assert length <= self.info.context, f"slot {slot}: {length} ids, the context is {self.info.context}"
            for token_id in ids:
                assert 0 <= token_id < self.vocabulary.size, f"slot {slot}: id {token_id} of {self.vocabulary.size}"
        self.passes += 1
        due = [fault for fault in self.faults if fault.due(self.passes)]
        for fault in due:
            if fault.kind == "raise":
                raise ScriptedFault(f"pass {self.passes} was to fail")
            if fault.kind == "exit":
                os._exit(70)
        tokens = sum(len(ids) for _, ids, _ in batch)
        self.fed += tokens
        lasts_s = self.pass_s + tokens * self.token_s + sum(fault.seconds for fault in due)
        if lasts_s > 0:
            self._clock.sleep(lasts_s)
        self._longest_s = max(self._longest_s, lasts_s)
        return [fault for fault in due if fault.kind in _SPOILED]

    def _appended(self, slot: int, ids: Sequence[int], rows: int) -> list[int]:
        """Append to the slot; the states behind the last `rows` ids."""
        states = self._states[slot]
        for token_id in ids:
            states.append(folded(states[-1], token_id))
        self._ids[slot].extend(ids)
        return states[len(states) - rows :]

    def _arg_max(self, states: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.law.choice(state) for state in states)

    def _logits(self, states: Sequence[int]) -> Logits:
        logits = np.zeros((len(states), self.vocabulary.size), np.float32)
        if isinstance(self.law, Distribution):
            for i, state in enumerate(states):
                logits[i] = self.law.row(state, self.vocabulary.size)
            return logits
        logits[np.arange(len(states)), self._arg_max(states)] = PEAK
        return logits

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return slot


class TableTarget(ScriptedTarget):
    """Its next-id distribution is one fixed table, whatever the prefix, so that what is sampled can be counted."""

    TABLE = (0.30, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04, 0.01)

    def __init__(self, table: Sequence[float] = TABLE, vocabulary: Vocabulary | None = None, **settings: Any) -> None:
        """`table`: probabilities of the ids 0, 1, …; further ids of the vocabulary have none. `settings`: as above."""
        assert math.isclose(sum(table), 1.0), f"not a distribution: {table}"
        vocabulary = byte_vocabulary(len(table)) if vocabulary is None else vocabulary
        assert vocabulary.size >= len(table), f"{len(table)} probabilities for {vocabulary.size} ids"
        super().__init__(TableDistribution(tuple(table)), vocabulary, **{"name": "table", **settings})


class ReplayedTarget(ScriptedTarget):
    """Repeats recorded outputs in the recorded target's time, without computing anything; for fair speed comparisons.

    A wrong draft behind a recorded prefix gets an arbitrary but repeatable answer, as it will be rejected. A prompt
    that was not recorded, and a position past a recorded output that did not end with an end id, are `UsageError`s.
    """

    def __init__(self, text: RecordedText, vocabulary: Vocabulary | None = None, **settings: Any) -> None:
        super().__init__(text, vocabulary, **{"name": "replayed", **settings})
        self._text = text

    def _appended(self, slot: int, ids: Sequence[int], rows: int) -> list[int]:
        states, begin = self._states[slot], self.length(slot)
        answered = super()._appended(slot, ids, rows)
        known, recorded = self._text.prefixes, self._text.recorded
        for at, token_id in enumerate(ids):
            before, after = states[begin + at], states[begin + at + 1]
            row = at >= len(ids) - rows
            if after in known:
                if row and not recorded(after) and token_id not in self.info.end_ids:
                    raise self._refused(slot, begin + at + 1, "the recording stops here or its prompt is longer")
            elif row and (recorded(before) or self._ended(before, ids[:at])):
                break  # the first wrong draft: it and what lies behind it is answered anyhow
            else:
                raise self._refused(slot, begin + at + 1, f"no recording goes on with id {token_id}")
        return answered

    def _ended(self, state: int, ids: Sequence[int]) -> bool:
        return state in self._text.prefixes and bool(ids) and ids[-1] in self.info.end_ids

    def _refused(self, slot: int, length: int, why: str) -> UsageError:
        self.truncate(slot, 0)
        return UsageError(f"replayed target, prefix of {length} ids: {why}; record this prompt first")


class IrreproducibleTarget(ScriptedTarget):
    """Leaves its law with probability `drift` at each row, by `rng`: what is computed again comes out different.

    Stands for targets whose sums depend on timing. Without `rng` every instance drifts in its own way.
    """

    def __init__(
        self,
        law: Law = ENDLESS,
        vocabulary: Vocabulary | None = None,
        *,
        drift: float = 0.5,
        rng: np.random.Generator | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(law, vocabulary, **{"name": "irreproducible", **settings})
        assert self.vocabulary.real_size > len(self.info.end_ids) + 1, "no other id to say"
        self.drift = drift
        self._rng = np.random.default_rng() if rng is None else rng

    def _arg_max(self, states: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._drifted(choice) for choice in super()._arg_max(states))

    def _drifted(self, choice: int) -> int:
        if self._rng.random() >= self.drift:
            return choice
        while True:
            other = int(self._rng.integers(self.vocabulary.real_size))
            if other != choice and other not in self.info.end_ids:
                return other
