"""How many draft tokens the target accepts, and what it commits behind them."""

from __future__ import annotations

from collections.abc import Sequence


def accept_greedy(draft: Sequence[int], choices: Sequence[int]) -> int:
    """Length of the longest prefix of `draft` that equals the target's own choices.

    `choices[i]` is the target's id at the position of `draft[i]`, given that all before it were accepted; there is one
    choice more than there are draft tokens, and `choices[result]` is the id that the target commits itself.
    """
    assert len(choices) == len(draft) + 1, (
        f"{len(draft)} draft tokens need {len(draft) + 1} choices, not {len(choices)}"
    )
    for count, (drafted, chosen) in enumerate(zip(draft, choices, strict=False)):
        if drafted != chosen:
            return count
    return len(draft)
