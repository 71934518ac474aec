"""Logit bias as it may be given: what is added to the logits of single ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipesd.errors import UsageError

MOST_BIASED = 1024  # ids
LARGEST_BIAS = 1000.0  # logits of language models differ by some tens
MOST_ID = (1 << 31) - 1


def checked_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs (id, bias) in the order of ids. `given`: a mapping, or a list of pairs or of texts "ID=BIAS"; as in a file
    or on the command line an id may be a text. A bias of -inf forbids its id. Raises UsageError for anything else, and
    for an id that is given twice."""
    if isinstance(given, str | bytes) or not isinstance(given, Mapping | Sequence):
        raise _refused(given)
    if len(given) > MOST_BIASED:
        raise UsageError(f"logit-bias: got {len(given)} ids, wanted at most {MOST_BIASED}")
    pairs = given.items() if isinstance(given, Mapping) else [_pair(item) for item in given]
    bias = sorted(_checked(token, value) for token, value in pairs)
    for (token, _), (other, _) in pairwise(bias):
        if token == other:
            raise UsageError(f"logit-bias: got id {token} twice, wanted each id once")
    return tuple(bias)


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, str):
        token, _, value = item.partition("=")
        try:
            return token, float(value)
        except ValueError:
            raise _refused(item) from None
    if not isinstance(item, Sequence) or len(item) != 2:
        raise _refused(item)
    return item[0], item[1]


def _checked(token: Any, value: Any) -> tuple[int, float]:
    if isinstance(token, str) and token.strip().isascii() and token.strip().isdigit() and len(token) <= 20:
        token = int(token)
    if type(token) is not int or not 0 <= token <= MOST_ID:
        raise UsageError(f"logit-bias: got id {token!r}, wanted a whole number, 0 to {MOST_ID}")
    if type(value) not in (int, float) or not (value == -math.inf or -LARGEST_BIAS <= value <= LARGEST_BIAS):
        raise UsageError(
            f"logit-bias: got {value!r} for id {token}, wanted {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf"
        )
    return token, float(value)


def _refused(given: Any) -> UsageError:
    return UsageError(f"logit-bias: got {given!r}, wanted ID=BIAS, such as 42=-5 or 42=-inf")
