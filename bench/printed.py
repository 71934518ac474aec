"""Every figure of PipeSD (arXiv 2605.13319) that the benches compare with, once, as it is printed.

Times are ms per accepted token, as the paper counts them. Rows are named as in the benches' tables, data sets as their
traces: `humaneval` (code) and `gsm8k` (maths)."""

from __future__ import annotations

from collections.abc import Mapping

Figures = Mapping[str, float]

STRATEGIES = ("vanilla", "hsl", "edgellm", "pipesd")
DATASETS = ("humaneval", "gsm8k")


def _by_strategy(*values: float) -> dict[str, float]:
    return dict(zip(STRATEGIES, values, strict=True))


# Table 1, ms per token: scenario, data set, strategy.
OVERALL: Mapping[int, Mapping[str, Figures]] = {
    1: {"humaneval": _by_strategy(194, 155, 153, 129), "gsm8k": _by_strategy(193, 174, 169, 145)},
    2: {"humaneval": _by_strategy(225, 184, 166, 134), "gsm8k": _by_strategy(318, 223, 197, 168)},
    3: {"humaneval": _by_strategy(306, 244, 201, 152), "gsm8k": _by_strategy(402, 296, 231, 186)},
    4: {"humaneval": _by_strategy(160, 132, 127, 108), "gsm8k": _by_strategy(234, 165, 161, 139)},
}

# Table 2, J per 100 accepted tokens, scenario 1.
ENERGY: Mapping[str, Figures] = {
    "humaneval": _by_strategy(68, 71, 75, 56),
    "gsm8k": _by_strategy(98, 102, 100, 84),
}

# Table 3, ms per token of PipeSD, scenario 1, by how its thresholds were found.
AUTOTUNER: Mapping[str, Figures] = {
    "humaneval": {"pipesd": 129, "grid": 139, "random": 148},
    "gsm8k": {"pipesd": 145, "grid": 155, "random": 162},
}

# Table 5, at most so many per cent of the run, and what all of the control plane takes (appendix H).
OVERHEAD: Figures = {"tuner": 1.1, "planner": 0.013, "measuring": 0.4}
CONTROL_PLANE_PERCENT = 1.513

# Table 6, ms per token, scenario 1, HumanEval.
ABLATION: Figures = {"no-pipeline": 147, "fixed": 164, "token": 137, "sequence": 139, "pipesd": 129}

# Table 7, HumanEval: verifications per token, draft tokens per verification, accepted of those verified.
VERIFICATION: Mapping[str, Figures] = {
    "hsl": {"verifications_per_token": 0.256, "draft_length": 3.18, "acceptance": 0.915},
    "edgellm": {"verifications_per_token": 0.191, "draft_length": 4.74, "acceptance": 0.892},
    "pipesd": {"verifications_per_token": 0.173, "draft_length": 4.96, "acceptance": 0.962},
}

# Figure 5, ms per token by uplink bandwidth in Mbit/s, HumanEval; read off a chart, within 2 ms.
BANDWIDTH: Mapping[int, Figures] = {
    10: _by_strategy(307, 243, 252, 232),
    20: _by_strategy(194, 155, 153, 132),
    40: _by_strategy(116, 101, 90, 80),
    80: _by_strategy(96, 86, 81, 71),
}

# Appendix F: the plan ahead of the other ways to send by so many times, at least and at most.
BATCHING = (1.02, 2.06)

# Appendix I: so much less time per token than the others, per cent, with 2 to 8 clients.
USERS_PERCENT = (22.9, 37.1)
