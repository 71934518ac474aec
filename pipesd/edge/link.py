"""`pipesd-edge link`: measure the link to a cloud, show it, and save it for planning."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipesd.config import DEFAULT_ADDRESS, check, option
from pipesd.edge.config_file import check_file, update_file
from pipesd.errors import PipeSDError
from pipesd.program import complain
from pipesd.streams import show, utf8_output

if TYPE_CHECKING:
    from pipesd.edge.link_figures import LinkFigures

PLAN_TABLE = "plan"
_TERMINAL_S, _LINES_S = 0.1, 1.0  # between two words on how far it is
log = logging.getLogger("pipesd.edge")


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """How to measure a link. Raises UsageError for a value out of bounds."""

    cloud: str = option(DEFAULT_ADDRESS, "address of the cloud", metavar="ADDRESS")
    repeats: int = option(20, "probes of each size, if the time allows them", low=3, high=10_000)
    token_bytes: int = option(0, "bytes of a draft token beyond its id, as other payloads have", low=0, high=1 << 16)
    seconds: float = option(10.0, "measure for about so long at most (s)", low=1, high=3600)
    gamma_ms: float = option(10.0, "time that drafting a token takes, for what planning would do", low=0, high=1e7)
    seed: int = option(0, "of the order in which sizes are probed", low=0, high=(1 << 64) - 1)
    connect_s: float = option(5.0, "give up if the cloud has not answered by then (s)", low=0.1, high=3600)

    def __post_init__(self) -> None:
        check(self)


def show_link(config: LinkConfig, *, as_json: bool, quiet: bool, save: str | None) -> int:
    """Measure and print; returns the exit code. With `as_json` exactly one object is printed, on failure too.

    `save` names a configuration file whose [plan] then has what was measured. Raises KeyboardInterrupt.
    """
    progress = Progress(shown=not quiet)
    try:
        if save is not None:
            check_file(save, PLAN_TABLE)
        figures = measured(config, progress)
    except PipeSDError as error:
        progress.end()
        if as_json:
            show(_line({"error": str(error)}))
        return complain(error)
    finally:
        progress.end()
    unsaved = _saved(figures, save)
    if as_json:
        show(_line({**figures.as_json(), "error": None if unsaved is None else str(unsaved)}))
    else:
        from pipesd.edge.link_report import describe

        columns = shutil.get_terminal_size().columns
        show(describe(figures, config.cloud, config.gamma_ms, columns, ascii_only=not utf8_output()))
    return 0 if unsaved is None else complain(unsaved)


def _saved(figures: LinkFigures, path: str | None) -> PipeSDError | None:
    """Why it could not be written: what was measured is shown in any case."""
    if path is None:
        return None
    try:
        update_file(path, PLAN_TABLE, plan_values(figures))
    except PipeSDError as error:
        return error
    log.info("alpha, beta and gap are in table [%s] of %s", PLAN_TABLE, path)
    return None


def link_failed(interrupted: bool) -> str:
    """What stdout gets from `link --json` that was interrupted, or failed before it could begin."""
    return _line({"error": "interrupted" if interrupted else "nothing was measured; stderr says why"})


def plan_values(figures: LinkFigures) -> dict[str, float | None]:
    """What a plan for this link takes, in ms; without a measured gap the key goes, since its default is α."""
    shown = figures.as_json()
    gap_ms = shown["gap_ms"]
    return {
        "alpha-ms": shown["alpha_ms"],
        "beta-ms": shown["beta_ms"] or 0.0,
        "gap-ms": None if gap_ms is None else min(gap_ms, shown["alpha_ms"]),
    }


def measured(config: LinkConfig, progress: Progress) -> LinkFigures:
    """Measure the link to the cloud that `config` names. Raises what `link_measuring.measure` does."""
    from pipesd.clock import SystemClock
    from pipesd.edge.link_measuring import Effort, measure
    from pipesd.transport import Context, edge_socket

    context = Context()
    try:
        with edge_socket(context, config.cloud) as socket:
            effort = Effort(config.repeats, config.token_bytes, config.seconds, config.seed)
            return measure(socket, SystemClock(), effort, config.connect_s, progress.tell)
    finally:
        context.term()


def _line(values: Mapping[str, Any]) -> str:
    """One object with the names that every answer has, those without a value null."""
    names = (
        "alpha_ms beta_ms gap_ms latency_ms jitter_ms rtt_ms up_mbps down_mbps intervals r2 beta_known spread_enough "
        "codec_ms token_bytes probes lost took_s error"
    ).split()
    assert set(values) <= set(names), set(values) - set(names)
    return json.dumps({name: values.get(name) for name in names}, ensure_ascii=not utf8_output()) + "\n"


class Progress:
    """How far it is, on stderr: at a terminal one line drawn anew and wiped in the end, else a line a second."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0 if self._terminal else time.monotonic() + _LINES_S
        self._drawn = False

    def tell(self, phase: str, share: float) -> None:
        """`phase` runs, and `share` of the time is over."""
        now_s = time.monotonic()
        if not self._shown or now_s < self._next_s:
            return
        line = f"measuring the link: {phase}, {share:.0%} of the time"
        if self._terminal:
            self._next_s, self._drawn = now_s + _TERMINAL_S, True
            _draw(f"\r{line:<60}")
        else:
            self._next_s = now_s + _LINES_S
            log.info("%s", line)

    def end(self) -> None:
        """Wipe what was drawn."""
        if self._drawn:
            self._drawn = False
            _draw(f"\r{'':<60}\r")


def _draw(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        return  # nobody to tell
