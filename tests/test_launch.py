"""A worker process from its start to its end, seen by the front."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from front_harness import wait_for

from pipesd.cloud.launch import MAX_REASON_BYTES, WorkerProcess
from pipesd.errors import UsageError
from pipesd.transport import Context


def refuse(length: int, endpoint: str, *, context: Context, stop: threading.Event) -> None:
    """The body of a worker that ends with a reason which no encoding takes as it is."""
    raise UsageError("no such file \udcff" + length * "é")


@pytest.mark.parametrize("length", [1, MAX_REASON_BYTES, MAX_REASON_BYTES + 1])
def test_a_reason_of_any_text_and_length_is_told(length: int) -> None:
    with Context() as context:
        worker = WorkerProcess(context, 0, partial(refuse, length))
        ending = wait_for(worker.ended)
        assert worker.close(0.0)
    assert ending is not None
    assert ending.exit_code == UsageError.exit_code
    assert ending.reason.startswith("no such file \\udcffé")
    assert len(ending.reason.encode()) <= MAX_REASON_BYTES + len("\N{REPLACEMENT CHARACTER}".encode())
