"""The JSON object of a generation: always the same names, whatever became of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipesd.core import FinishReason, Logprobs
from pipesd.metrics import Meter, Tally, summary
from pipesd.streams import utf8_output


def result_line(
    finish_reason: FinishReason,
    *,
    text: str = "",
    token_ids: Sequence[int] = (),
    strategy: str | None = None,
    seed: int | None = None,
    logprobs: Sequence[Logprobs] | None = None,
    stats: Mapping[str, Any] | None = None,
) -> str:
    """One line for stdout. What never began has the defaults, and the statistics of nothing. `logprobs`, one for each
    id, stand in it where there are any; ids that cannot occur are left out of them."""
    result = {
        "text": text,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "strategy": strategy,
        "seed": seed,
        **({} if logprobs is None else {"logprobs": [_logprobs(one) for one in logprobs]}),
        "stats": stats or summary(Tally(), Meter(0.0)),
    }
    return json.dumps(result, ensure_ascii=not utf8_output()) + "\n"


def _logprobs(said: Logprobs) -> dict[str, Any]:
    """JSON has no number for minus infinity."""
    top = [[token, value] for token, value in said.top if math.isfinite(value)]
    return {"logprob": said.own if math.isfinite(said.own) else None, "top": top}


def tune_failed(interrupted: bool) -> str:
    """What stdout gets from `tune --json` that was interrupted or failed."""
    return json.dumps({"error": "interrupted" if interrupted else "the search did not end; stderr says why"}) + "\n"
