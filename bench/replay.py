"""A recorded target behind an emulated link, for benches: the processes that replay a trace.

The ids of a trace come in the time that is asked for and nothing is computed, so that a drafter on the same machine has
it for itself: under shared noise the target's samples do not hang on what is drafted. The cloud (a front process and a
worker process) and the link are processes of their own: no lock of Python's is shared with the edge.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, NamedTuple

from pipesd.cloud.server import serve
from pipesd.config import CloudConfig
from pipesd.core import Vocabulary
from pipesd.errors import PipeSDError
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, greedy_choices
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.targets import ReplayedTarget
from pipesd.sim.texts import RecordedText
from pipesd.sim.trace import Trace

CONTEXT = 4096
READY_S = 120.0


class DictatedTarget(ReplayedTarget):
    """Chooses what was recorded, whatever the options of sampling: its logits are none to draw from."""

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        return greedy_choices(batch, self.greedy(batch))


class Replay:
    """Makes the replayed target, in its worker's process."""

    def __init__(self, trace: Trace, vocabulary: Vocabulary, pace: dict[str, float]):
        self.trace, self.vocabulary, self.pace = trace, vocabulary, pace

    def __call__(self) -> DictatedTarget:
        text = RecordedText([(record.prompt, record.output) for record in self.trace.records])
        return DictatedTarget(text, self.vocabulary, context=CONTEXT, end_ids=self.trace.end_ids, **self.pace)


class Addresses(NamedTuple):
    """Where an edge finds the replayed cloud: through the link, or beside it."""

    linked: str
    direct: str


@contextmanager
def replaying(make: Replay, link: dict[str, Any]) -> Iterator[Addresses]:
    """A cloud that replays, and a link to it with the settings of `LinkProxy`."""
    with _process(cloud_process, make) as direct, _process(link_process, {"target": direct, **link}) as linked:
        yield Addresses(linked, direct)


@contextmanager
def _process(body: Any, given: Any) -> Iterator[str]:
    """A process that tells its address and works until it is ended."""
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    process = spawn.Process(target=body, args=(given, told))
    process.start()
    told.close()
    try:
        if not heard.poll(READY_S):
            raise PipeSDError(f"the process of {body.__name__} has said nothing for {READY_S:g} s")
        try:
            address = heard.recv()
        except EOFError:
            raise PipeSDError(f"the process of {body.__name__} has ended; what it said is above") from None
        yield address
    finally:
        heard.close()
        process.terminate()
        process.join()


def cloud_process(make: Replay, told: connection.Connection) -> None:
    _end_with_parent()
    config = CloudConfig(bind="tcp://127.0.0.1:0", drain_s=0.0)
    sys.exit(serve(config, make_target=make, announce=lambda line: told.send(line.split()[-1])))


def link_process(settings: dict[str, Any], told: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's, which ends this process
    _end_with_parent()
    with LinkProxy(**settings) as link:
        told.send(link.address)
        threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
