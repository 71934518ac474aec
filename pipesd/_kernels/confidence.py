"""The cumulative confidence of a draft and the two thresholds on it (PipeSD, section 3.3).

C1* = C1·P(D_n) is the product of the probabilities of all tokens drafted since verification was last asked for.
"""

from __future__ import annotations

from pipesd._kernels import Kernel

SEQUENCE, TOKEN = 1, 2  # which rule asks for verification; 0: none


def _observe(p: float, confidence: float, sequence_threshold: float, token_threshold: float) -> tuple[float, int]:
    """The cumulative confidence behind one more token of probability `p`, 1 where a rule asks, and that rule."""
    confidence *= p
    if confidence <= sequence_threshold:
        return 1.0, SEQUENCE
    if p <= token_threshold:
        return 1.0, TOKEN
    return confidence, 0


OBSERVE = Kernel(_observe, "Tuple((float64, int64))(float64, float64, float64, float64)")
