"""The emulated link as a program, for any user: `python -m pipesd.sim.proxy`."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from collections.abc import Sequence

from pipesd.errors import PipeSDError
from pipesd.sim.cuts import parse_cut
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.schedule import Schedule


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a link until a signal ends it; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipesd.sim.proxy", description="Emulates a slow link on this machine: connect to it instead."
    )
    parser.add_argument("--to", required=True, metavar="ADDRESS", help="where the link leads, tcp://HOST:PORT")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", metavar="ADDRESS", help="default: a free local port")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, in each direction; default 0")
    for way, end in (("up", "to"), ("down", "from")):
        parser.add_argument(
            f"--{way}-mbps", type=float, default=math.inf, help=f"Mbit/s {end} ADDRESS; default no limit"
        )
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="late by chance up to this, each way; default 0")
    parser.add_argument(
        "--up-bytes-per-draft-token", type=int, default=0, metavar="N",
        help="each draft token takes the line as if N bytes came with it; default 0",
    )  # fmt: skip
    for way, end in (("up", "to"), ("down", "from")):
        parser.add_argument(
            f"--{way}-jitter-ms", type=float, metavar="MS", help=f"{end} ADDRESS, instead of --jitter-ms"
        )
    parser.add_argument(
        "--queue-bytes", type=int, default=1 << 18, help="of a connection before a line; default 256 KiB"
    )
    parser.add_argument("--schedule", metavar="FILE", help="bandwidths that change with time, instead of the rates")
    parser.add_argument(
        "--cut", metavar="AT:LASTS", action="append", default=[],
        help="connections are cut at second AT and refused for so many seconds; may be given again",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the jitter; default 0")
    options = parser.parse_args(arguments)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with LinkProxy(
            options.to,
            listen=options.listen,
            delay_s=options.delay_ms / 1e3,
            up_bytes_per_s=options.up_mbps * 1e6 / 8,
            down_bytes_per_s=options.down_mbps * 1e6 / 8,
            queue_bytes=options.queue_bytes,
            up_jitter_s=(options.jitter_ms if options.up_jitter_ms is None else options.up_jitter_ms) / 1e3,
            down_jitter_s=(options.jitter_ms if options.down_jitter_ms is None else options.down_jitter_ms) / 1e3,
            up_bytes_per_draft_token=options.up_bytes_per_draft_token,
            schedule=Schedule.load(options.schedule) if options.schedule else None,
            cuts=[parse_cut(text) for text in options.cut],
            seed=options.seed,
        ) as link:
            print(link.address, flush=True)
            try:
                ended.wait()
                return 0
            except KeyboardInterrupt:
                return 130
            finally:
                print(link.counts(), file=sys.stderr)
    except PipeSDError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
