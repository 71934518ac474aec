"""What a run shows of its link by itself: round trips of probes and of drafts, told to a monitor."""

from __future__ import annotations

from collections.abc import Sequence

from pipesd.policy.monitor import Monitor
from pipesd.policy.sending import Uplink
from pipesd.protocol.messages import Draft, Message, Probed, Verdict

PROBED_SIZES = tuple(range(1, 9))  # draft tokens; PipeSD's start-up sends these eight sizes
TOKEN_BYTES = 4  # of an id in a DRAFT


class RoundTrips:
    """Sees every message of a connection with its time.

    A sample begins with the first DRAFT on an idle link and spans what is sent while the link is busy; the verdict on
    the first of them that asks for one ends it, less what the cloud says to have spent on it. Whatever is repeated,
    or said without the cloud's own time, gives none.
    """

    def __init__(self, monitor: Monitor, uplink: Uplink) -> None:
        self._monitor, self._uplink = monitor, uplink
        self._begun_s = 0.0
        self._tokens = self._messages = 0
        self._asked: tuple[float, int] | None = None  # when the sample began, and its tokens
        self._cloud_s = 0.0  # of this opening, as last told
        self._probe: tuple[int, int, float] | None = None  # one that is under way: its number, tokens, time

    def restart(self) -> None:
        """A new opening: nothing that was asked before will be answered, and the cloud's sums begin anew."""
        self._asked = self._probe = None
        self._tokens = self._messages = 0
        self._cloud_s = 0.0

    def sent(self, message: Message, now_s: float) -> None:
        """A message was handed to the link, which `Uplink` has not been told yet."""
        if not isinstance(message, Draft):
            return
        if message.again:
            self._asked = None
            return
        if self._uplink.busy_s(now_s) == 0.0:
            self._begun_s, self._tokens, self._messages = now_s, 0, 0
        self._tokens += len(message.ids)
        self._messages += 1
        if message.nav and self._asked is None:
            self._asked = self._begun_s + (self._messages - 1) * self._uplink.gap_s, self._tokens

    def received(self, message: Message, now_s: float, lag_s: float) -> None:
        """A message came; it may have lain unread for `lag_s`."""
        if isinstance(message, Probed) and self._probe is not None and message.token == self._probe[0]:
            _, tokens, sent_s = self._probe
            self._probe = None
            self._monitor.round_trip(tokens, now_s - sent_s, 0.0, lag_s)
        if not isinstance(message, Verdict) or message.counters is None:
            return
        cloud_s = message.counters.busy_100us / 1e4
        spent_s, self._cloud_s = cloud_s - self._cloud_s, cloud_s
        if self._asked is not None and spent_s >= 0.0:
            begun_s, tokens = self._asked
            self._monitor.passed(spent_s)
            if tokens:
                self._monitor.round_trip(tokens, now_s - begun_s, spent_s, lag_s)
        self._asked = None

    @property
    def probe_due(self) -> int:
        """How many tokens a probe should stand for that would tell more of the link; 0: none would, or one is under
        way."""
        if self._probe is not None:
            return 0
        sizes = self._monitor.needs_probes
        return sizes[0] if sizes else 0

    def probe_sent(self, number: int, tokens: int, now_s: float) -> None:
        """A probe as large as a DRAFT of so many tokens was sent by itself."""
        self._probe = (number, tokens, now_s)

    def probed(self, replies: Sequence[tuple[int, float]]) -> None:
        """The answers to a train of probes: (tokens' worth of bytes, s from its sending)."""
        self._monitor.train(replies)
