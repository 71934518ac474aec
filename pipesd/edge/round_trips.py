"""What a run shows of its link by itself: round trips of probes and of drafts, told to a monitor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pipesd.policy.monitor import Monitor
from pipesd.policy.sending import Uplink
from pipesd.protocol.messages import Draft, Message, Probed, Verdict

PROBED_SIZES = tuple(range(1, 9))  # draft tokens; PipeSD's start-up sends these eight sizes
LOST_S = 10.0  # after which an answer to a probe is not waited for any more
MOST_MESSAGES = 2  # in a sample: more of them would tell of the gap, which is taken for known here
CLEAR_S = 0.002  # between two verdicts, beyond the second pass: the cloud had nothing to do


class _Asked(NamedTuple):
    """A DRAFT that asks for a verdict, and awaits it."""

    end: int  # of the draft
    number: int  # of the message
    alone: bool  # nothing else awaited a verdict when it was sent


class RoundTrips:
    """Sees every message of a connection with its time.

    A sample begins with what found the link idle and spans one more message at most, sent while that kept it busy: of
    many, an error in the measured gap would become one of β, and that one of the gap. The verdict on the DRAFT that
    asks for one ends it, less what the cloud says to have spent on it. Whether the link was idle is told by
    the measured gap and β, and by verdicts: what one is on has left the link before the cloud began with it. So a link
    that is thought to be slower than it is does not hide its idle times, and where it never is idle there is no sample:
    what is sent at the pace that is known would only show that pace again. Whatever is repeated, or may have waited at
    the cloud for an earlier verification, or is answered without the cloud's own time, gives none.
    """

    def __init__(self, monitor: Monitor, uplink: Uplink) -> None:
        self._monitor, self._uplink = monitor, uplink
        self._sent: deque[tuple[float, int]] = deque()  # what no verdict has shown to be through: time, tokens
        self._through = 0  # number of the first of these
        self._free_s = -math.inf  # when the link had taken what was before them
        self._asked: deque[_Asked] = deque()
        self._opening = 0
        self._epoch = self._end = 0  # of what was sent last in this opening
        self._heard_s = -math.inf  # when the last verdict was read
        self._cloud_s = 0.0  # of this opening, as last told
        self._verified = 0  # likewise: draft tokens
        self._probe: tuple[int, float, int] | None = None  # one that is under way: its number, time and tokens

    def restart(self, opening: int) -> None:
        """A new opening, with its prompt on the link: what was asked before will not be answered, and the cloud's sums
        begin anew."""
        self._opening = opening
        self._asked.clear()
        self._probe = None
        self._lose_track()
        self._cloud_s = 0.0
        self._verified = self._epoch = self._end = 0

    def sent(self, message: Message, now_s: float) -> None:
        """A message was handed to the link, which `Uplink` has not been told yet."""
        if not isinstance(message, Draft):
            return
        if message.epoch != self._epoch:  # what was asked before is not answered any more
            self._epoch, self._end = message.epoch, 0
            self._asked.clear()
        repeated = message.again or message.pos < self._end
        self._end = max(self._end, message.pos + len(message.ids))
        if repeated:
            self._asked.clear()
            self._lose_track()
            return
        self._sent.append((now_s, len(message.ids)))
        if message.nav:
            number = self._through + len(self._sent)
            self._asked.append(_Asked(message.pos + len(message.ids), number, alone=not self._asked))

    def received(self, message: Message, now_s: float, lag_s: float) -> None:
        """A message came; it may have lain unread for `lag_s`."""
        if isinstance(message, Probed) and self._probe is not None and message.token == self._probe[0]:
            _, sent_s, tokens = self._probe
            self._probe = None
            self._monitor.round_trip(tokens, now_s - sent_s, 0.0, lag_s)
        if not isinstance(message, Verdict) or message.opening != self._opening:
            return
        heard_s, self._heard_s = self._heard_s, now_s
        asked = self._answered(message)
        if message.counters is None:
            return
        cloud_s = message.counters.busy_100us / 1e4
        spent_s, self._cloud_s = cloud_s - self._cloud_s, cloud_s
        verified, self._verified = message.counters.verified - self._verified, message.counters.verified
        if asked is None or spent_s < 0.0:
            return
        self._monitor.passed(spent_s, verified)
        trip = self._take(asked.number, now_s - spent_s)
        waited = not asked.alone and now_s - lag_s - heard_s <= spent_s + CLEAR_S
        if trip is not None and trip[1] and not waited:
            begun_s, tokens = trip
            self._monitor.round_trip(tokens, now_s - begun_s, spent_s, lag_s)

    @property
    def link_free_s(self) -> float:
        """When the link will have taken all that it was given."""
        return self._uplink.free_s

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
        self._sent.append((now_s, tokens))
        self._uplink.sent(now_s, tokens)

    def probed(self, replies: Sequence[tuple[int, float]]) -> None:
        """The answers to a train of probes: (tokens' worth of bytes, s from its sending)."""
        self._monitor.train(replies)

    def _answered(self, verdict: Verdict) -> _Asked | None:
        """What the verdict is on: the first draft that awaits one. It may bring others with it."""
        if not self._asked or verdict.epoch != self._epoch:
            return None
        asked = self._asked.popleft()
        while self._asked and self._asked[0].end <= verdict.pos + len(verdict.ids):
            self._asked.popleft()
        return asked

    def _take(self, number: int, through_s: float) -> tuple[float, int] | None:
        """All messages up to that number were through the link by that time. When the last that found it idle was sent,
        later by the gap of one behind it, and their tokens together; None: none of them did, or too many followed."""
        sent, uplink = self._sent, self._uplink
        free_s, begun_s, tokens, messages = self._free_s, math.inf, 0, 0
        while sent and self._through < number:
            at_s, count = sent.popleft()
            self._through += 1
            if at_s >= free_s:
                free_s = begun_s = at_s
                tokens = messages = 0
            tokens += count
            messages += 1
            free_s += uplink.takes_s(count)
        self._free_s = free_s = min(free_s, through_s)
        for at_s, count in sent:
            free_s = max(free_s, at_s) + uplink.takes_s(count)
        uplink.free_s = min(uplink.free_s, free_s)
        if begun_s == math.inf or messages > MOST_MESSAGES:
            return None
        return begun_s + (messages - 1) * uplink.gap_s, tokens

    def _lose_track(self) -> None:
        """What is on the link now cannot be told: no sample begins before all that it is known to have is through."""
        self._through += len(self._sent)
        self._sent.clear()
        self._free_s = math.inf
