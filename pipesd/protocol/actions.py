"""What the edge's machine says is to be done, and what every OPEN of a generation repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipesd.core import FinishReason, Logprobs, Mode
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Sampling
from pipesd.protocol.messages import ErrorCode, Message, Open
from pipesd.protocol.vocabulary import digest


class Send(NamedTuple):
    """Give this message to the link; if it cannot be sent, a deadline repeats what matters."""

    message: Message


class Rollback(NamedTuple):
    """The drafter forgets every position from `pos` on."""

    pos: int


class Extend(NamedTuple):
    """The drafter decodes these committed ids behind what it holds."""

    ids: tuple[int, ...]


class Committed(NamedTuple):
    """`ids` are committed from `pos` on; `accepted[i]` says whether the i-th was the edge's own draft token;
    `rejected`: one of them stands where the draft had another, and ended it; `logprobs`: one for each id, where they
    were asked for; `goes_on`: the round is not over, as a refused token's place behind them is still to be drawn."""

    pos: int
    ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    rejected: bool = False
    logprobs: tuple[Logprobs, ...] = ()
    goes_on: bool = False


class Redraw(NamedTuple):
    """The cloud refused the draft token at `pos`: draw what stands there, then call `redrawn`, or `ask_more` if none of
    the proposals was taken."""

    pos: int
    refused: ToldLaw


class Retry(NamedTuple):
    """The cloud cannot serve just now: call `reopen` after `after_s`."""

    after_s: float
    code: ErrorCode
    text: str


class Fail(NamedTuple):
    """The cloud refuses this generation for good."""

    code: ErrorCode
    text: str


class Done(NamedTuple):
    reason: FinishReason


Action = Send | Rollback | Extend | Committed | Redraw | Retry | Fail | Done


@dataclass(frozen=True)
class Request:
    """What every OPEN of one generation repeats. `limit` is the absolute position behind the last id allowed.

    `sampling` None: the highest logit is taken.
    """

    limit: int
    stop_ids: frozenset[int]
    mode: Mode
    seed: int
    model_fingerprint: bytes
    vocabulary_hash: bytes
    major: int
    sampling: Sampling | None = None

    def opening(self, session: int, number: int, committed: Sequence[int], base: int, *, drafts: bool) -> Open:
        """The OPEN of that number, behind `committed` ids of which the cloud is to prove the first `base`. Where
        nothing is drafted nothing is tested."""
        sampling = self.sampling
        return Open(
            session=session,
            opening=number,
            base=base,
            digest=digest(committed[:base]),
            ids=tuple(committed[base:]),
            limit=self.limit,
            stop_ids=tuple(sorted(self.stop_ids)),
            sampling=sampling if sampling is None or drafts else sampling.untested,
            seed=self.seed,
            mode=self.mode,
            model_fingerprint=self.model_fingerprint,
            vocabulary_hash=self.vocabulary_hash,
            major=self.major,
        )
