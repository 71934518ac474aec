"""The draft model alone: fast, offline, and not the target's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipesd.clock import Clock
from pipesd.core import Piece
from pipesd.edge.models import Drafter
from pipesd.edge.run import Run
from pipesd.errors import Refused
from pipesd.protocol.messages import ErrorCode

PREFILL_CHUNK = 128  # ids that the draft model decodes between two looks at the rest of the world


def generate_alone(
    run: Run,
    drafter: Drafter | None,
    ids: Sequence[int],
    end_ids: frozenset[int],
    clock: Clock,
) -> Iterator[Piece]:
    """Generate behind `ids` what the draft model itself says, sampled as `run` says; nothing is verified."""
    assert drafter is not None, "the draft model is loaded"
    drafter.rollback(0)
    drafter.extend(ids)
    if drafter.room <= 0:
        text = f"the prompt has {len(ids)} ids, which fill the draft model's context: shorten the prompt"
        raise Refused(text, ErrorCode.LIMIT)
    while drafter.prefill(PREFILL_CHUNK) and not run.cancelled.is_set():
        pass
    run.opened(clock.now(), cloud=True, drafter=True)
    while run.reason is None:
        if run.cancelled.is_set():
            run.reason = "cancelled"
            break
        drawn, _ = run.draft(drafter, clock)
        run.tally.drafted += 1
        run.commit([drawn.id], ["unverified"], clock.now())
        if run.stream.stopped or drawn.id in end_ids:
            run.reason = "stop"
        elif len(run.ids) >= run.config.max_tokens or drafter.room <= 0:
            run.reason = "length"
        yield from run.ready()
