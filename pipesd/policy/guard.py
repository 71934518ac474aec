"""Whether drafts pay: no slower than the cloud alone, whatever the models and the link.

With drafts a token costs what rounds take over what they bring; without them about what one pass of the target takes,
as the cloud then streams. When drafts turn out slower the cloud goes on alone. From time to time drafts get another
trial: as soon as what the last one lost is spread over enough tokens. So a bad pair costs a small share of the time,
and a bad stretch of text does not end drafting for good.
"""

from __future__ import annotations

WINDOW_ROUNDS = 16  # with drafts, between two looks at what they bring
TRIAL_ROUNDS = 4  # after which a trial that is far behind is over
FAR = 1.5  # how much slower than the cloud alone that is
SLOWER = 1.05  # drafts that are slower by no more than this stay: less is not worth the change
LOSS = 0.05  # share of the time that trials may cost
LEAST_REST_TOKENS, MOST_REST_TOKENS = 32, 4096
ALONE_MEMORY = 0.1  # weight of the last stretch in what the cloud alone takes
ALONE_TOKENS = 16  # of such a stretch
LEAST_S = 1e-5  # what a token takes at least: ids that come all at once are no measure of the cloud's speed


class Guard:
    """Fed at each round's end; `drafting` says which way is taken."""

    def __init__(self) -> None:
        self.drafting = True
        self.drafts_s: float | None = None  # time per token with drafts, over the last rounds looked at
        self.alone_s: float | None = None  # of the cloud alone: measured, before that a pass of the target
        self._measured = False
        self._rounds = self._tokens = 0
        self._took_s = 0.0
        self._rest_tokens = 0
        self._trial = True  # nothing is known of these drafts yet

    def round_end(self, tokens: int, took_s: float, pass_s: float | None, gamma_s: float | None = None) -> bool:
        """A verdict brought so many tokens in that time, a pass without draft tokens takes the cloud `pass_s`, drafting
        one takes `gamma_s`; returns whether to change the way."""
        self._rounds += 1
        self._tokens += tokens
        self._took_s += took_s
        return self._with_drafts(pass_s, gamma_s) if self.drafting else self._alone()

    def _with_drafts(self, pass_s: float | None, gamma_s: float | None) -> bool:
        if pass_s is not None and not self._measured:
            self.alone_s = max(pass_s, LEAST_S)
        if self.alone_s is None or not self._tokens:
            return False
        tpt_s = self._took_s / self._tokens
        over = self._rounds >= WINDOW_ROUNDS
        lost = self._trial and self._rounds >= TRIAL_ROUNDS and tpt_s > FAR * self.alone_s
        hopeless = gamma_s is not None and gamma_s > SLOWER * self.alone_s  # were every draft token right
        if not over and not lost and not hopeless:
            return False
        self.drafts_s = tpt_s
        slower = hopeless or tpt_s > SLOWER * self.alone_s
        if slower:
            lost_s = self._took_s - self._tokens * self.alone_s
            rest_tokens = round(lost_s / (LOSS * self.alone_s))
            self._rest_tokens = min(max(rest_tokens, LEAST_REST_TOKENS), MOST_REST_TOKENS)
            self.drafting = False
        self._trial = False
        self._restart()
        return slower

    def _alone(self) -> bool:
        if self._tokens >= ALONE_TOKENS:
            tpt_s = max(self._took_s / self._tokens, LEAST_S)
            if self._measured and self.alone_s is not None:
                tpt_s = self.alone_s + ALONE_MEMORY * (tpt_s - self.alone_s)
            self.alone_s, self._measured = tpt_s, True
            self._rest_tokens -= self._tokens
            self._restart()
        if self._rest_tokens > 0:
            return False
        self.drafting = self._trial = True
        self._restart()
        return True

    def _restart(self) -> None:
        self._rounds = self._tokens = 0
        self._took_s = 0.0
