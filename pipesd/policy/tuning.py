"""Thresholds searched for while a run goes on: trials of some tokens each, then the best of them.

A trial holds one setting until it has brought 20 tokens, and is judged by its time per token; 16 of them make a search
(PipeSD, section 4). When the time per token later leaves that of the best setting by more than a fifth, over so many
tokens that chance does not do it, conditions have changed and another search begins from the setting in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipesd.errors import UsageError
from pipesd.policy.estimate import CHANGE
from pipesd.policy.search_space import Parameter
from pipesd.policy.strategy import Strategy
from pipesd.policy.tuner import SAMPLES, Tuner

TRIAL_TOKENS = 20
REFERENCE_TOKENS = 10 * TRIAL_TOKENS  # that a time per token is compared over
MOST_SHARE = 0.75  # beyond, nearly every token asks: much more for the cloud to do, and on the link, for little time
LEAST = 0.01  # thresholds below never fire in any draft of bearable length

SPACES: dict[str, dict[str, Parameter]] = {
    # The token threshold can only be first where it is above the sequence threshold, as the product of probabilities is
    # never above its last factor. So what is searched is the share of the way from there to 1.
    "dual": {"sequence_threshold": Parameter(LEAST, 0.9, log=True), "token_share": Parameter(0.0, MOST_SHARE)},
    "sequence": {"sequence_threshold": Parameter(LEAST, 0.99, log=True)},
    "token": {"token_threshold": Parameter(0.05, 0.995)},
    "fixed": {"draft_length": Parameter(1, 16, integer=True)},
    "entropy": {"entropy_threshold": Parameter(0.05, 3.0)},
    "adaptive": {"sequence_threshold": Parameter(LEAST, 0.99, log=True)},
}


def space_of(strategy: Strategy) -> Mapping[str, Parameter]:
    """What may be searched for in a strategy: the parameters of its policy or trigger; empty where there are none."""
    if strategy.policy is not None:
        return strategy.policy.parameters
    return SPACES.get(strategy.trigger or "", {})


def point_of(strategy: Strategy) -> dict[str, float]:
    """Where a strategy's setting stands in its space."""
    if strategy.policy is not None:
        return dict(strategy.values)
    point: dict[str, float] = {}
    for name, parameter in space_of(strategy).items():
        if name == "token_share":
            low = strategy.sequence_threshold
            value = (strategy.token_threshold - low) / (1.0 - low) if low < 1.0 else 0.0
        else:
            value = getattr(strategy, name)
        point[name] = min(max(value, parameter.low), parameter.high)
    return point


def values_of(strategy: Strategy, point: Mapping[str, float]) -> dict[str, Any]:
    """What a point of the strategy's space sets in its trigger, by the trigger's own names."""
    values: dict[str, Any] = dict(point)
    if strategy.policy is None and "token_share" in values:
        low = values["sequence_threshold"]
        values["token_threshold"] = low + (1.0 - low) * values.pop("token_share")
    return values


def settings_of(strategy: Strategy, point: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `EdgeConfig` that a point of the strategy's space stands for."""
    values = values_of(strategy, point)
    if strategy.policy is None:
        return values
    return {"policy_option": tuple(f"{name}={value!r}" for name, value in values.items())}


class Tuning:
    """The search, fed at each round's end; `options` is the setting in force."""

    def __init__(
        self,
        strategy: Strategy,
        state: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        samples: int = SAMPLES,
        trial_tokens: int = TRIAL_TOKENS,
    ) -> None:
        """`state`: what an earlier `state()` gave for the same trigger; the search goes on from there. It begins with
        the strategy's own setting. Raises UsageError for a state that is none of this trigger."""
        self._strategy = strategy
        self._space = space_of(strategy)
        assert self._space, f"nothing to tune in trigger {strategy.trigger}"
        self._seed, self._samples, self._trial_tokens = seed, samples, trial_tokens
        self._searches = 0
        self._reference_s: float | None = None
        self.tokens, self._elapsed_s = 0, 0.0  # of the trial that goes on
        self.news = False  # something was learnt since `state` was last asked for
        self.trials: list[tuple[dict[str, Any], float]] = []  # of this search in this run: options and s per token
        if state is None:
            self.tuner = self._search(point_of(strategy))
        else:
            self._restore(state)
        self._point: Mapping[str, float] = {}
        self._choose()

    @property
    def options(self) -> dict[str, Any]:
        """The setting in force, by the names that the trigger has for it."""
        return values_of(self._strategy, self._point)

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self.tuner.done

    def round_end(self, tokens: int, took_s: float) -> str | None:
        """A round brought so many tokens in that time; returns why there is another setting now, or None."""
        self.tokens += tokens
        self._elapsed_s += took_s
        if self.tokens < (REFERENCE_TOKENS if self.tuner.done else self._trial_tokens):
            return None
        tpt_s = self._elapsed_s / self.tokens
        self.news = True
        self.tokens, self._elapsed_s = 0, 0.0
        if not self.tuner.done:
            self.trials.append((self.options, tpt_s))
            self.tuner.tell(dict(self._point), tpt_s)
            self._choose()
            return "best of the search" if self.tuner.done else "next trial"
        if self._reference_s is None:
            self._reference_s = tpt_s
        elif abs(tpt_s - self._reference_s) > CHANGE * self._reference_s:
            self._reference_s = None
            self._searches += 1
            self.tuner, self.trials = self._search(self._point), []
            self._choose()
            return "the time per token changed"
        return None

    def state(self) -> dict[str, Any]:
        """All that another run needs to go on, ready for JSON."""
        self.news = False
        return {"tuner": self.tuner.state(), "searches": self._searches, "reference_s": self._reference_s}

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            tuner, searches, reference_s = state["tuner"], state["searches"], state["reference_s"]
        except KeyError as error:
            raise UsageError(f"tuning state: it has no {error}; search again") from None
        self.tuner = Tuner.restore(tuner)
        if self.tuner.space.parameters != dict(self._space) or self.tuner.samples != self._samples:
            raise UsageError("tuning state: it is of another search; search again")
        known = reference_s is None or (isinstance(reference_s, float) and 0.0 < reference_s < math.inf)
        if type(searches) is not int or not 0 <= searches < 1 << 31 or not known:
            raise UsageError(f"tuning state: got {searches!r} searches to {reference_s!r} s; search again")
        self._searches, self._reference_s = searches, reference_s

    def _search(self, first: Mapping[str, float]) -> Tuner:
        return Tuner(self._space, seed=self._seed + self._searches, samples=self._samples, first=dict(first), least=0.0)

    def _choose(self) -> None:
        self._point = self.tuner.best[0] if self.tuner.done else self.tuner.ask()
