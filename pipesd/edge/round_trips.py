"""What a run shows of its link by itself: round trips of probes and of drafts, told to a monitor."""

from __future__ import annotations

from collections.abc import Sequence

from pipesd.policy.monitor import Monitor
from pipesd.policy.sending import Uplink
from pipesd.protocol.messages import Draft, Message, Probed, Verdict

PROBED_SIZES = tuple(range(1, 9))  # draft tokens; PipeSD's start-up sends these eight sizes
LOST_S = 10.0  # after which an answer to a probe is not waited for any more


class RoundTrips:
    """Sees every message of a connection with its time.

    A sample begins with what is sent on an idle link and spans what is sent while the link is busy with it; the verdict
    on the first DRAFT of it that asks for one ends it, less what the cloud says to have spent on it. Whatever is
    repeated, or answered without the cloud's own time, gives none.
    """

    def __init__(self, monitor: Monitor, uplink: Uplink) -> None:
        self._monitor, self._uplink = monitor, uplink
        self._begun_s: float | None = None  # when the link was idle last; None: not since what cannot be counted
        self._tokens = self._messages = 0  # since then
        self._asked: tuple[float, int] | None = None  # when a sample that awaits its verdict began, and its tokens
        self._cloud_s = 0.0  # of this opening, as last told
        self._verified = 0  # likewise: draft tokens
        self._probe: tuple[int, float, int] | None = None  # one that is under way: its number, time and tokens
        self._end = 0  # of what was sent in this opening

    def restart(self) -> None:
        """A new opening, with its prompt on the link: what was asked before will not be answered, and the cloud's sums
        begin anew."""
        self._asked = self._probe = self._begun_s = None
        self._cloud_s = 0.0
        self._verified = self._end = 0

    def sent(self, message: Message, now_s: float) -> None:
        """A message was handed to the link, which `Uplink` has not been told yet."""
        if not isinstance(message, Draft):
            return
        repeated = message.again or message.pos < self._end
        self._end = max(self._end, message.pos + len(message.ids))
        if repeated:
            self._asked = self._begun_s = None
            return
        self._count(len(message.ids), now_s)
        if message.nav and self._asked is None and self._begun_s is not None:
            self._asked = self._begun_s + (self._messages - 1) * self._uplink.gap_s, self._tokens

    def received(self, message: Message, now_s: float, lag_s: float) -> None:
        """A message came; it may have lain unread for `lag_s`."""
        if isinstance(message, Probed) and self._probe is not None and message.token == self._probe[0]:
            _, sent_s, tokens = self._probe
            self._probe = None
            self._monitor.round_trip(tokens, now_s - sent_s, 0.0, lag_s)
        if not isinstance(message, Verdict):
            return
        if message.pos + len(message.ids) < self._end:  # the branch may be dead: what comes next takes its place
            self._end = 0
        if message.counters is None:
            self._asked = None
            return
        cloud_s = message.counters.busy_100us / 1e4
        spent_s, self._cloud_s = cloud_s - self._cloud_s, cloud_s
        verified, self._verified = message.counters.verified - self._verified, message.counters.verified
        if self._asked is not None and spent_s >= 0.0:
            begun_s, tokens = self._asked
            self._monitor.passed(spent_s, verified)
            if tokens:
                self._monitor.round_trip(tokens, now_s - begun_s, spent_s, lag_s)
        self._asked = None

    def probe_due(self, now_s: float) -> int:
        """How many tokens a probe should stand for that would tell more of the link; 0: none would, or one is under
        way, or the link is busy."""
        if self._probe is not None and now_s - self._probe[1] > LOST_S:
            self._probe = None
        if self._probe is not None or self._uplink.free_s > now_s:
            return 0
        sizes = self._monitor.needs_probes
        return sizes[0] if sizes else 0

    def probe_sent(self, number: int, tokens: int, now_s: float) -> None:
        """A probe as large as a DRAFT of so many tokens was sent by itself, on an idle link."""
        self._probe = number, now_s, tokens
        self._count(tokens, now_s)
        self._uplink.sent(now_s, tokens)

    def probed(self, replies: Sequence[tuple[int, float]]) -> None:
        """The answers to a train of probes: (tokens' worth of bytes, s from its sending)."""
        self._monitor.train(replies)

    def _count(self, tokens: int, now_s: float) -> None:
        if self._uplink.free_s <= now_s:
            self._begun_s, self._tokens, self._messages = now_s, 0, 0
        self._tokens += tokens
        self._messages += 1
