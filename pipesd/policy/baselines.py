"""The adaptive trigger of a published system that PipeSD is compared with: EdgeLLM."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pipesd.policy.trigger import Costs, checked_threshold, confidence

LEAST_THRESHOLD = 1e-12  # what R1 may sink to; one of its drafts that is wrong from the start brings it back to 1


@dataclass
class _Draft:
    """Tokens between two triggers: how many, the product of their probabilities, how many were accepted so far."""

    tokens: int = 0
    confidence: float = 1.0
    accepted: int = 0


class AdaptiveSequence:
    """Asks, by "sequence", when the product of the probabilities since the last time is at most R1, which it adapts
    (EdgeLLM; Xu et al., 2025; the trigger of PipeSD, appendix G.3).

    After the verdict on a draft of N̂ tokens with product C1, of which `correct` were accepted: if all were, R1 is
    halved, else R1 ← R1 / C1^((N̂ - correct) / N̂). R1 is kept from LEAST_THRESHOLD to 1; a product counts as no less
    either. Above 1 it would ask at every token from then on, at 0 never again.

    A draft that is dropped because the target's own token behind an accepted draft differs from the guess was not
    verified, and changes nothing. One of which a token was wrong before anything asked counts as far as it was drafted.
    `initial` is a number from 0 to 1, else UsageError.
    """

    def __init__(self, initial: float) -> None:
        self.sequence_threshold = initial
        self._asked: deque[_Draft] = deque()
        self._open = _Draft()

    @property
    def sequence_threshold(self) -> float:
        """R1 at present. What it is set to is checked as `initial` is."""
        return self._sequence_threshold

    @sequence_threshold.setter
    def sequence_threshold(self, value: float) -> None:
        self._sequence_threshold = max(checked_threshold("sequence_threshold", value), LEAST_THRESHOLD)

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        draft = self._open
        draft.tokens += 1
        draft.confidence *= confidence(p_draft)
        if draft.confidence > self._sequence_threshold:
            return None
        self.asked()
        return "sequence"

    def asked(self) -> None:
        if self._open.tokens:
            self._asked.append(self._open)
            self._open = _Draft()

    def reset(self) -> None:
        self._asked.clear()
        self._open = _Draft()

    def decided(self, accepted: int, rejected: bool) -> None:
        ended = False
        while self._asked:
            draft = self._asked[0]
            accepted = _accept(draft, accepted)
            if draft.accepted < draft.tokens:
                break
            self._asked.popleft()
            self._learn(draft)
            ended = True
        else:
            draft = self._open
            _accept(draft, accepted)
        if rejected:
            guess_only = ended and draft.accepted == 0
            if draft.accepted < draft.tokens and not guess_only:
                self._learn(draft)
            self.reset()

    def adopt(self, costs: Costs) -> None:
        pass

    def _learn(self, draft: _Draft) -> None:
        wrong = (draft.tokens - draft.accepted) / draft.tokens
        if wrong == 0.0:
            threshold = 0.5 * self._sequence_threshold
        else:
            threshold = self._sequence_threshold / math.pow(max(draft.confidence, LEAST_THRESHOLD), wrong)
        self._sequence_threshold = min(max(threshold, LEAST_THRESHOLD), 1.0)


def _accept(draft: _Draft, tokens: int) -> int:
    """Count at most `tokens` more of the draft as accepted; how many are left for the next."""
    taken = min(tokens, draft.tokens - draft.accepted)
    draft.accepted += taken
    return tokens - taken
