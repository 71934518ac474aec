"""Emulated links on this machine, measured by the code of `pipesd-edge link`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fitting import Known
from replay import replaying

from pipesd.clock import SystemClock
from pipesd.edge.link_figures import LinkFigures
from pipesd.edge.link_measuring import Effort, measure
from pipesd.edge.link_probe import frame_bytes
from pipesd.protocol.messages import ID_BYTES
from pipesd.sim.targets import ScriptedTarget
from pipesd.transport import Context, edge_socket

REPEATS = 20
CONNECT_S = 10.0


class RealLink(NamedTuple):
    """A link of `LinkProxy`, whose messages only their bytes occupy; `token_bytes`: of a draft token beyond its id."""

    delay_s: float
    up_mbps: float
    down_mbps: float
    token_bytes: int

    def known(self) -> Known:
        """What is true of the link alone; the machine adds to it."""
        byte_s = 8 / (self.up_mbps * 1e6)
        gap_s = frame_bytes(0, 0) * byte_s
        return Known(self.delay_s + gap_s, (ID_BYTES + self.token_bytes) * byte_s, gap_s, None)


REAL = {
    "link, 0.5 Mbit/s, 10 ms, 64 B": RealLink(0.010, 0.5, 5.0, 64),
    "link, 20 Mbit/s, 25 ms, 4 kB": RealLink(0.025, 20.0, 200.0, 4096),
}


def measured(link: RealLink, seconds: float, seed: int) -> LinkFigures:
    """What is found of it in about so long."""
    settings = {
        "delay_s": link.delay_s, "up_bytes_per_s": link.up_mbps * 125e3, "down_bytes_per_s": link.down_mbps * 125e3
    }  # fmt: skip
    context = Context()
    try:
        with (
            replaying(partial(ScriptedTarget), settings) as where,  # type: ignore[arg-type]
            edge_socket(context, where.linked) as socket,
        ):
            return measure(socket, SystemClock(), Effort(REPEATS, link.token_bytes, seconds, seed), CONNECT_S)
    finally:
        context.term()
