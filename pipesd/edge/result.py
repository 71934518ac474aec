"""The JSON object of a generation: always the same names, whatever became of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesd.config import GenerateConfig
from pipesd.core import FinishReason, Logprobs
from pipesd.metrics import Meter, Tally, summary
from pipesd.streams import utf8_output

if TYPE_CHECKING:
    from pipesd.edge.session import EdgeSession

SUMMED = (
    "tokens", "rounds", "navs", "drafted", "verified", "accepted", "bytes_up", "bytes_down", "target_passes",
    "cloud_s", "draft_s", "wait_s",
)  # fmt: skip


def result_line(result: Mapping[str, Any]) -> str:
    """One line for stdout, of what `result_of` gives."""
    return json.dumps(result, ensure_ascii=not utf8_output()) + "\n"


def session_result(session: EdgeSession, options: GenerateConfig, finish_reason: FinishReason) -> dict[str, Any]:
    """What became of the session's last generation, see `result_of`."""
    return result_of(
        finish_reason,
        text=session.text,
        token_ids=session.token_ids,
        strategy=session.strategy.name,
        seed=session.seed,
        logprobs=None if options.logprobs is None else session.logprobs,
        stats=session.stats,
    )


def result_of(
    finish_reason: FinishReason,
    *,
    text: str = "",
    token_ids: Sequence[int] = (),
    strategy: str | None = None,
    seed: int | None = None,
    logprobs: Sequence[Logprobs] | None = None,
    stats: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What became of a generation. What never began has the defaults, and the statistics of nothing. `logprobs`, one
    for each id, stand in it where there are any; ids that cannot occur are left out of them."""
    return {
        "text": text,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "strategy": strategy,
        "seed": seed,
        **({} if logprobs is None else {"logprobs": [_logprobs(one) for one in logprobs]}),
        "stats": stats or summary(Tally(), Meter(0.0)),
    }


def _logprobs(said: Logprobs) -> dict[str, Any]:
    """JSON has no number for minus infinity."""
    top = [[token, value] for token, value in said.top if math.isfinite(value)]
    return {"logprob": said.own if math.isfinite(said.own) else None, "top": top}


def tune_failed(interrupted: bool) -> str:
    """What stdout gets from `tune --json` that was interrupted or failed."""
    return json.dumps({"error": "interrupted" if interrupted else "the search did not end; stderr says why"}) + "\n"


def batch_line(finish_reason: str, results: Sequence[Mapping[str, Any]] = (), **more: Any) -> str:
    """What stdout gets from a batch with `--json`: sums over the results that are there, those of earlier runs too;
    `tpt_ms` is the mean over all their tokens."""
    stats = [result["stats"] for result in results]
    sums = {name: sum(each[name] for each in stats) for name in SUMMED}
    timed = [each for each in stats if each["tpt_ms"] is not None]
    tokens = sum(each["tokens"] for each in timed)
    took_ms = sum(each["tpt_ms"] * each["tokens"] for each in timed)
    told = {
        "finish_reason": finish_reason,
        "done": len(results),
        "errors": sum(result["finish_reason"] == "error" for result in results),
        **more,
        "tpt_ms": round(took_ms / tokens, 3) if tokens else None,
        "acceptance_rate": round(sums["accepted"] / sums["verified"], 6) if sums["verified"] else None,
        **{name: round(value, 6) for name, value in sums.items()},
    }
    return json.dumps(told) + "\n"
