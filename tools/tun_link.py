#!/usr/bin/env python3
"""An emulated link between two network namespaces of this machine, for real TCP at both ends (Linux, root).

Each namespace has a TUN device, and a process carries packets from one to the other: each direction serialises them at
a rate behind a bounded queue that drops what is too much, then delays them, by more or less if there is jitter (they
stay in order), and loses some at random and all during a cut. Rates may follow a schedule, as scenario 4 of PipeSD does
(bench/scenario4.json). Nothing of `tc` is needed, which many kernels lack the parts of.

    tools/tun_link.py --delay-ms 20 --up-mbps 20 --down-mbps 200 --loss 0.01
    tools/tun_link.py --delay-ms 25 --schedule bench/scenario4.json --cut 30:2

prints one JSON line, {"edge": NAMESPACE, "cloud": NAMESPACE, "address": IP}, and runs until a signal or the end of its
stdin: in the background, or from a script that has none, give it one that stays open, as `sleep 1d |` before it does.
Then `ip netns exec NAMESPACE COMMAND` runs a command at either end; the cloud is at IP, the edge at IP - 1.
Packets count in the rate with their IP and TCP headers. In a program:

    with TunLink(delay_s=0.02, up_bytes_per_s=2.5e6) as link:
        subprocess.Popen(link.at_cloud(["pipesd-cloud", "serve", "--bind", f"tcp://{link.address}:7421", ...]))
        subprocess.run(link.at_edge(["pipesd-edge", "link", "--cloud", f"tcp://{link.address}:7421"]))

Namespaces are named by the process and are removed when it ends, in whatever way: by itself, or, after a SIGKILL, by
`TunLink`, or by the next link that begins.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import math
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from tun_direction import Direction

if TYPE_CHECKING:
    from pipesd.sim.schedule import Schedule

TUN = "/dev/net/tun"
EDGE_ADDRESS, CLOUD_ADDRESS = "10.213.7.1", "10.213.7.2"  # in namespaces of their own they are in nobody's way
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
BACKGROUND = "sleep 1d | tools/tun_link.py OPTIONS &"
_MTU_BYTES = 1500
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_NAME = re.compile(r"pipesd-(\d+)-(?:edge|cloud)\b")
_STARTS_S, _ENDS_S = 20.0, 5.0
_SPIN_S, _FEW = 0.3e-3, 8


class LinkError(Exception):
    """The link cannot be made here; one line that says why."""


class TunLink:
    """A link in a process of its own, from `with` to its end. Raises LinkError where it cannot be made.

    `schedule` is a file of bandwidths that change, instead of the rates; `cuts` are pairs (begin, length), s from when
    the link is there. At the end `told` says what became of the packets, a line for each direction.
    """

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        queue_bytes: int = 1 << 20,
        schedule: str | os.PathLike[str] | None = None,
        cuts: Iterable[tuple[float, float]] = (),
        seed: int = 0,
    ) -> None:
        self.address = CLOUD_ADDRESS
        self.told = ""
        self._options = [
            f"--delay-ms={delay_s * 1e3!r}", f"--up-mbps={up_bytes_per_s * 8e-6!r}",
            f"--down-mbps={down_bytes_per_s * 8e-6!r}", f"--jitter-ms={jitter_s * 1e3!r}", f"--loss={loss!r}",
            f"--queue-bytes={queue_bytes}", f"--seed={seed}",
            *([] if schedule is None else [f"--schedule={os.fspath(schedule)}"]),
            *(f"--cut={at_s!r}:{lasts_s!r}" for at_s, lasts_s in cuts),
        ]  # fmt: skip

    def __enter__(self) -> Self:
        why = why_not()
        if why:
            raise LinkError(why)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = b""
        if select.select([self._process.stdout], [], [], _STARTS_S)[0]:
            line = self._process.stdout.readline()
        if not line:
            raise LinkError(self._end() or "the link did not start")
        made = json.loads(line)
        self._edge, self._cloud = made["edge"], made["cloud"]
        return self

    def __exit__(self, *_: object) -> None:
        self.told = self._end()

    def at_edge(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one at the edge."""
        return ["ip", "netns", "exec", self._edge, *command]

    def at_cloud(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._cloud, *command]

    def _end(self) -> str:
        """End the process, and what it may have left; its complaint."""
        process = self._process
        assert process.stderr is not None and process.stdin is not None and process.stdout is not None
        process.terminate()
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        complaint = process.stderr.read().decode(errors="replace").strip()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        remove_leftovers()
        return complaint


def why_not() -> str:
    """Why no link can be made here, in one line; empty if it can."""
    if sys.platform != "linux":
        return "a link between network namespaces needs Linux"
    if os.geteuid() != 0:
        return "a link between network namespaces needs root"
    if not os.path.exists(TUN):
        return f"there is no {TUN}"
    if shutil.which("ip") is None:
        return "there is no command 'ip' (package iproute2)"
    return ""


def remove_leftovers() -> None:
    """Remove the namespaces of links whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, number in ((match[0], int(match[1])) for match in map(_NAME.match, listed.splitlines()) if match):
        if not os.path.exists(f"/proc/{number}"):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")


def _device(name: str, namespace: str, own: str, other: str) -> int:
    """A TUN device in a namespace, of which the process keeps this descriptor."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("netns", "add", namespace)
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "addr", "add", own, "peer", other, "dev", name)
    _ip("-n", namespace, "link", "set", name, "mtu", str(_MTU_BYTES), "txqueuelen", "10000", "up")
    return descriptor


def _carry(edge: int, cloud: int, up: Direction, down: Direction) -> None:
    """Until stdin ends. One loop around select, whose timers are exact where those of epoll are in ms; just before one
    of few packets is due it does not sleep, since waking up takes long."""
    stdin = sys.stdin.fileno()
    up.begun_s = down.begun_s = time.monotonic()
    while True:
        due_s = min(up.due_s(), down.due_s())
        spin_s = _SPIN_S if len(up.under_way) + len(down.under_way) <= _FEW else 0.0
        wait_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic() - spin_s)
        readable = select.select([edge, cloud, stdin], [], [], wait_s)[0]
        for end, direction in ((edge, up), (cloud, down)):
            while end in readable:
                try:
                    packet = os.read(end, 1 << 16)
                except BlockingIOError:
                    break
                direction.take(packet, time.monotonic())
        now_s = time.monotonic()
        for direction, end in ((up, cloud), (down, edge)):
            for packet in direction.arrived(now_s):
                with contextlib.suppress(BlockingIOError):  # the receiver's own queue is full
                    os.write(end, packet)
        if stdin in readable and not os.read(stdin, 4096):
            return


def _stdin_has_ended() -> bool:
    """Whether there is none, or nothing will ever come of it."""
    if sys.stdin is None:
        return True
    descriptor = sys.stdin.fileno()
    return bool(select.select([descriptor], [], [], 0)[0]) and not os.read(descriptor, 4096)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _be_punctual() -> None:
    """Timers to the µs, ahead of other programs where that is allowed; and no link outlives who wanted it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share, 0 to 1")
    return share


def _positive(text: str) -> float:
    figure = float(text)
    if not figure > 0:
        raise argparse.ArgumentTypeError(f"{text}: give more than 0")
    return figure


def _time_ms(text: str) -> float:
    figure = float(text)
    if not 0 <= figure < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give milliseconds from 0")
    return figure


def _cut(text: str) -> tuple[float, float]:
    with _told_by_argparse():
        from pipesd.sim.cuts import parse_cut

        return parse_cut(text)


def _schedule(path: str) -> Schedule:
    with _told_by_argparse():
        from pipesd.sim.schedule import Schedule

        return Schedule.load(path)


@contextlib.contextmanager
def _told_by_argparse() -> Iterator[None]:
    """In here `pipesd` can be imported, also where it is not installed, and what it refuses is argparse's to tell."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from pipesd.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/tun_link.py",
        description="Emulates a slow link between two network namespaces (Linux, root), until a signal or the end of "
        f"its stdin. In the background: {BACKGROUND}",
    )
    both: tuple[tuple[str, Any, float, str], ...] = (
        ("delay-ms", _time_ms, 0.0, "one way, in each direction; default 0"),
        ("jitter-ms", _time_ms, 0.0, "a packet takes up to so much longer; default 0"),
        ("loss", _share, 0.0, "share of the packets lost, each way; default 0"),
        ("queue-bytes", _positive, 1 << 20, "before each line; default 1 MiB"),
    )
    for name, kind, default, text in both:
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of losses and jitter; default 0")
    for way, end in (("up", "edge to cloud"), ("down", "cloud to edge")):
        parser.add_argument(f"--{way}-mbps", type=_positive, default=math.inf, help=f"Mbit/s {end}; default no limit")
        for name, kind, _, _ in both:
            parser.add_argument(f"--{way}-{name}", type=kind, help=f"{end}, instead of --{name}")
    parser.add_argument("--schedule", type=_schedule, metavar="FILE", help="Mbit/s that change, instead of the rates")
    parser.add_argument(
        "--cut", type=_cut, metavar="AT:LASTS", action="append", default=[],
        help="no packet arrives from second AT on, for so many seconds; may be given again",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.schedule is not None and min(options.up_mbps, options.down_mbps) != math.inf:
        parser.error("--schedule and a rate: give one of them")
    return options


def _direction(options: argparse.Namespace, way: Literal["up", "down"], seed: int) -> Direction:
    given: dict[str, Any] = vars(options)

    def of(name: str) -> float:
        own = given[f"{way}_{name}"]
        return float(given[name] if own is None else own)

    return Direction(
        delay_s=of("delay_ms") / 1e3,
        bytes_per_s=given[f"{way}_mbps"] * 1e6 / 8,
        jitter_s=of("jitter_ms") / 1e3,
        loss=of("loss"),
        queue_bytes=of("queue_bytes"),
        random=random.Random(seed),
        way=way,
        schedule=options.schedule,
        cuts=tuple(options.cut),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a link until a signal or the end of stdin; the exit code."""
    options = _options(arguments)
    if _stdin_has_ended():
        print(
            f"error: the link lasts until its stdin ends, and that has none; in the background run {BACKGROUND}",
            file=sys.stderr,
        )
        return 2
    up, down = _direction(options, "up", 2 * options.seed), _direction(options, "down", 2 * options.seed + 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    names = [f"pipesd-{os.getpid()}-{end}" for end in ("edge", "cloud")]
    try:
        if why := why_not():
            raise LinkError(why)
        remove_leftovers()
        edge = _device(f"pse{os.getpid()}", names[0], EDGE_ADDRESS, CLOUD_ADDRESS)
        cloud = _device(f"psc{os.getpid()}", names[1], CLOUD_ADDRESS, EDGE_ADDRESS)
        _be_punctual()
        print(json.dumps({"edge": names[0], "cloud": names[1], "address": CLOUD_ADDRESS}), flush=True)
        _carry(edge, cloud, up, down)
        return 0
    except KeyboardInterrupt:
        return 0
    except (LinkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # one may come just as the end of stdin ended it
            _ignore_signals()
        _ignore_signals()  # nothing keeps it from tidying up
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
        for way, direction in (("up", up), ("down", down)):
            print(
                f"{way}: {direction.carried} packets, {direction.lost} lost, {direction.dropped} dropped, "
                f"{direction.cut} cut off",
                file=sys.stderr,
            )


if __name__ == "__main__":
    sys.exit(main())
