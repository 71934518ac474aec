"""What is counted and recorded of a run: one event record, JSON lines, and the statistics of one generation."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipesd.clock import Clock
from pipesd.errors import UsageError

_BEGINNING = b'{"t":'  # of every line of an event log


class EventLog:
    """Writes one JSON object a line: `t` (seconds since the log began), `event`, and the event's own fields.

    `wanted`: there is a file. Who records something at every token asks first, and puts nothing together without.

    Raises UsageError, once, when the file cannot be made or written (a log with holes would tell lies), or when it
    holds something else than an earlier log: a mistyped path must not cost a model.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now()
        self._file: IO[str] | None = None
        self._path = os.path.expanduser(path)
        self.wanted = bool(path)
        if path:
            file = Path(self._path)
            try:
                if file.is_file() and _begins_otherwise(file):
                    raise UsageError(f"event file {self._path!r}: it exists and is no event log; write it elsewhere")
                self._file = file.open("w", encoding="utf-8")
            except (OSError, ValueError) as error:
                raise self._unusable(error) from error

    def record(self, event: str, **values: Any) -> None:
        """Write one event, if there is a file."""
        if self._file is not None:
            line = {"t": round(self._clock.now() - self._start_s, 6), "event": event, **values}
            try:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            except OSError as error:
                file, self._file, self.wanted = self._file, None, False
                with contextlib.suppress(OSError):
                    file.close()  # fails at the same rest
                raise self._unusable(error) from error

    def close(self) -> None:
        file, self._file, self.wanted = self._file, None, False
        if file is not None:
            try:
                file.close()
            except OSError as error:
                raise self._unusable(error) from error

    def _unusable(self, error: OSError | ValueError) -> UsageError:
        reason = getattr(error, "strerror", None) or error
        return UsageError(f"event file {self._path!r}: {reason}; write it elsewhere")


def _begins_otherwise(file: Path) -> bool:
    """Whether a file holds something that `EventLog` does not write."""
    with file.open("rb") as opened:
        return opened.read(len(_BEGINNING)) not in (_BEGINNING, b"")


@dataclass
class Tally:
    """Counts of one generation as the edge's machine keeps them; the cloud's own (`passes` to `busy_100us`) are sums of
    the last counters told in each opening."""

    drafted: int = 0
    navs: int = 0
    rounds: int = 0
    openings: int = 0
    proactive: int = 0
    promoted: int = 0
    dropped: int = 0
    passes: int = 0
    verified: int = 0
    stale: int = 0
    busy_100us: int = 0
    by_position: list[list[int]] = field(default_factory=list)  # [accepted, decided] by place in the draft

    @property
    def accepted(self) -> int:
        """Own draft tokens that equalled the committed id when it was committed, whoever computed it."""
        return sum(accepted for accepted, _ in self.by_position)

    @property
    def rejections(self) -> int:
        """Drafts that ended at a first difference."""
        return sum(decided - accepted for accepted, decided in self.by_position)

    def count_position(self, place: int, accepted: bool) -> None:
        rows = self.by_position
        while len(rows) <= place:
            rows.append([0, 0])
        row = rows[place]
        row[0] += accepted
        row[1] += 1


@dataclass
class Meter:
    """Times (seconds on the edge's clock) and bytes of one generation."""

    started_s: float
    opened_s: float | None = None  # both sides have prefilled
    first_token_s: float | None = None
    last_token_s: float | None = None
    draft_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    rtt_s: float = 0.0
    alpha_s: float | None = None  # of the link, as far as it is known
    beta_s: float | None = None
    gap_s: float | None = None
    drafts_s: float | None = None  # time per token with drafts, and of the cloud alone, where they were compared
    alone_s: float | None = None
    alone_tokens: int = 0  # what the cloud decoded alone because drafts did not pay
    tokens: int = 0
    triggers: dict[str, int] = field(default_factory=dict)  # how often each rule asked for verification
    thresholds: dict[str, float] = field(default_factory=dict)  # in force at the end
    tuning: str = "off"
    window: int | None = None  # draft tokens that are planned for
    sampling: str | None = None  # the method, or "greedy"
    sampling_error: float | None = None  # picospec: the largest share of the target's distribution that was left out
    refusals: int = 0  # draft tokens in whose place the edge drew another
    proposals: int = 0  # of the target's for these
    energy_j: float | None = None  # of this machine's processors, all programs together

    def token(self, now_s: float, count: int) -> None:
        """`count` tokens were committed."""
        self.tokens += count
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


def summary(tally: Tally, meter: Meter) -> dict[str, Any]:
    """The statistics of one generation, under their public names; None where there is nothing to say.

    TPT runs from the time when both sides had prefilled to the last committed token, TTFT from the call. `discarded`
    are the draft tokens that the cloud never compared, `stale` those of them that reached it all the same.
    """
    elapsed_s = None
    if meter.opened_s is not None and meter.last_token_s is not None:
        elapsed_s = meter.last_token_s - meter.opened_s
    first_s = None if meter.first_token_s is None else meter.first_token_s - meter.started_s
    # What was decided was compared, if not by the cloud: its own token may equal a guess that had not reached it.
    verified = max(tally.verified, tally.accepted + tally.rejections)
    return {
        "tokens": meter.tokens,
        "tpt_ms": _ms(None if elapsed_s is None else _ratio(elapsed_s, meter.tokens)),
        "ttft_ms": _ms(first_s),
        "tpt_drafts_ms": _ms(meter.drafts_s),
        "tpt_alone_ms": _ms(meter.alone_s),
        "alone_tokens": meter.alone_tokens,
        "rounds": tally.rounds,
        "navs": tally.navs,
        "triggers": dict(sorted(meter.triggers.items())),
        "drafted": tally.drafted,
        "verified": verified,
        "accepted": tally.accepted,
        "acceptance_rate": _ratio(tally.accepted, verified),
        "acceptance_per_token": _ratio(tally.accepted, tally.accepted + tally.rejections),
        "acceptance_by_position": [_ratio(accepted, decided) for accepted, decided in tally.by_position],
        "proactive": tally.proactive,
        "promoted": tally.promoted,
        "discarded": max(0, tally.drafted - verified),
        "stale": tally.stale,
        "bytes_up": meter.bytes_up,
        "bytes_down": meter.bytes_down,
        "target_passes": tally.passes,
        "openings": tally.openings,
        "cloud_s": tally.busy_100us / 1e4,
        "draft_s": round(meter.draft_s, 6),
        "wait_s": round(meter.wait_s, 6),
        "alpha_ms": _ms(meter.alpha_s),
        "beta_ms": _ms(meter.beta_s),
        "gap_ms": _ms(meter.gap_s),
        "gamma_ms": _ms(_ratio(meter.draft_s, tally.drafted)),
        "thresholds": {name: round(value, 6) for name, value in meter.thresholds.items()},
        "tuning": meter.tuning,
        "window": meter.window,
        "rtt_ms": _ms(meter.rtt_s or None),
        "sampling": meter.sampling,
        "sampling_error": meter.sampling_error,
        "refusals": meter.refusals,
        "proposals": meter.proposals,
        "energy_j": None if meter.energy_j is None else round(meter.energy_j, 6),
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
