"""`pipesd-edge tune`: a search for a strategy's thresholds on purpose, written into a configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipesd.config import EdgeConfig, TuneConfig
from pipesd.edge.config_file import check_file, update_file
from pipesd.edge.interrupts import Interrupts
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, UsageError
from pipesd.policy.tuning import SPACES, Tuning, settings_of, space_of, values_of
from pipesd.streams import show

log = logging.getLogger("pipesd.edge")

GENERATED_TOKENS = 128  # behind a prompt, before it is the next one's turn
PROMPTS = (
    'def moving_average(values, width):\n    """The mean of each window of `width` values."""\n',
    "Question: A train leaves at 9:40 and arrives at 12:05. It stops for 20 minutes on the way. For how long does it "
    "move?\nAnswer:",
    "The history of the lighthouse begins long before the first one of stone was built. In early times",
)


def tune(
    edge: EdgeConfig,
    config: TuneConfig,
    prompts: Sequence[str],
    *,
    save: str | None,
    as_json: bool,
    interrupts: Interrupts,
) -> int:
    """Search and report; returns the exit code. Raises PipeSDError for what cannot be tried, or goes wrong."""
    auto = edge.strategy == "auto" and not edge.policy
    strategy = "pipesd" if auto else edge.strategy  # `auto` would stop drafting in the middle of it
    session = EdgeSession(replace(edge, strategy=strategy, tuning="off"))
    if not space_of(session.strategy):
        trigger = session.strategy.trigger
        what = f"trigger {trigger}" if trigger and not edge.policy else f"strategy {session.strategy.name}"
        raise UsageError(f"{what} has nothing to tune; triggers that have: {', '.join(SPACES)}")
    if save is not None:
        check_file(save, "edge")
    tuning = Tuning(session.strategy, samples=config.samples, trial_tokens=config.tokens)
    with session:
        session.tune(tuning)
        _search(session, tuning, prompts or PROMPTS, interrupts)
    report = _report(session, tuning)
    show(json.dumps(report) + "\n" if as_json else _told(report))  # before it is saved, which may fail
    if save is not None:
        parts = {name: getattr(edge, name) or None for name in ("strategy", "policy", "batching", "trigger", "waiting")}
        update_file(save, "edge", {**parts, "policy_option": None, **_saved(session, report["best"])})
        log.info("written to %s: with --config %s these are kept, and nothing is tuned while it runs", save, save)
    return 0


def _search(session: EdgeSession, tuning: Tuning, prompts: Sequence[str], interrupts: Interrupts) -> None:
    """Generate behind one prompt after the other until the search is done."""
    names = ", ".join(name.replace("_", " ") for name in values_of(session.strategy, tuning.tuner.first))
    log.info("%d settings of %s, on %d prompts in turn", tuning.tuner.samples, names, len(prompts))
    told = 0
    while True:
        before = told, tuning.tokens
        for prompt in prompts:
            pieces = session.generate(prompt, max_tokens=GENERATED_TOKENS)
            with interrupts.calling(pieces.cancel):
                for _ in pieces:
                    if len(tuning.trials) > told:
                        told = len(tuning.trials)
                        log.info("%d of %d: %s", told, tuning.tuner.samples, _trial(*tuning.trials[-1]))
                    if tuning.done:
                        pieces.close()
                        return
            if session.finish_reason == "cancelled":
                raise Cancelled("interrupted")
        if (told, tuning.tokens) == before:
            raise UsageError("the target ends at once behind every prompt: give others with --prompt or --file")


def _trial(options: dict[str, Any], tpt_s: float) -> str:
    return f"{_shown(options)}: {1000 * tpt_s:.2f} ms per token"


def _report(session: EdgeSession, tuning: Tuning) -> dict[str, Any]:
    tuner = tuning.tuner
    best, best_s = tuner.best
    return {
        "strategy": session.strategy.name,
        "trigger": session.strategy.trigger,
        "best": values_of(session.strategy, best),
        "tpt_ms": round(1000 * best_s, 3),
        "first": values_of(session.strategy, tuner.first),
        "gain": round(tuner.gain, 4),
        "samples": tuner.told,
        "failed": tuner.failed,
        "trials": [{**options, "tpt_ms": round(1000 * tpt_s, 3)} for options, tpt_s in tuning.trials],
    }


def _saved(session: EdgeSession, values: dict[str, Any]) -> dict[str, Any]:
    """The options that the values stand for, as a configuration has them."""
    rounded = {name: _rounded(value) for name, value in values.items()}
    if session.strategy.policy is None:
        return rounded
    space = space_of(session.strategy)
    within = {name: min(max(value, space[name].low), space[name].high) for name, value in rounded.items()}
    return {name: list(given) for name, given in settings_of(session.strategy, within).items()}


def _rounded(value: float) -> float:
    """To what a person would write."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _told(report: dict[str, Any]) -> str:
    lines = [f"{_shown(report['best'])}: {report['tpt_ms']:.2f} ms per token expected"]
    if report["gain"]:
        lines.append(f"{report['gain']:.0%} less than with {_shown(report['first'])}, which was in force")
    else:
        lines.append("no setting is better than the one in force beyond noise: it is kept")
    return "\n".join(lines) + "\n"


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in options.items())
