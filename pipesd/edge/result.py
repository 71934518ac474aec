"""The JSON object of a generation: always the same names, whatever became of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipesd.core import FinishReason
from pipesd.metrics import Meter, Tally, summary
from pipesd.streams import utf8_output


def result_line(
    finish_reason: FinishReason,
    *,
    text: str = "",
    token_ids: Sequence[int] = (),
    strategy: str | None = None,
    seed: int | None = None,
    stats: Mapping[str, Any] | None = None,
) -> str:
    """One line for stdout. What never began has the defaults, and the statistics of nothing."""
    result = {
        "text": text,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "strategy": strategy,
        "seed": seed,
        "stats": stats or summary(Tally(), Meter(0.0)),
    }
    return json.dumps(result, ensure_ascii=not utf8_output()) + "\n"


def tune_failed(interrupted: bool) -> str:
    """What stdout gets from `tune --json` that was interrupted or failed."""
    return json.dumps({"error": "interrupted" if interrupted else "the search did not end; stderr says why"}) + "\n"
