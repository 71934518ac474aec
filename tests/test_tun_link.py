"""The link between network namespaces: its rules by themselves, and where there is root, its figures and its end."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tun_link
from tun_link import Direction, LinkError, TunLink

from tests.clouds import wait_until

PROGRAM = str(Path(tun_link.__file__))
ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("10.213.7.2", 9)); print("ready", flush=True)
while True: s.sendto(*s.recvfrom(2000))
"""
PING = """
import socket, sys, time, json
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("10.213.7.2", 9)); s.settimeout(1)
times = []
for _ in range(int(sys.argv[1])):
    begin = time.perf_counter(); s.send(bytes(int(sys.argv[2])))
    try: s.recv(2000); times.append(time.perf_counter() - begin)
    except TimeoutError: times.append(None)
print(json.dumps(times))
"""
needs_root = pytest.mark.skipif(bool(tun_link.why_not()), reason=tun_link.why_not() or "it can be made")

# ---- rules


def test_a_packet_is_serialised_and_then_delayed() -> None:
    line = Direction(delay_s=0.5, bytes_per_s=1000)
    line.take(bytes(100), 1.0)
    line.take(bytes(50), 1.0)
    assert line.due_s() == pytest.approx(1.6) and line.arrived(1.5999) == []
    assert line.arrived(1.6001) == [bytes(100)] and line.due_s() == pytest.approx(1.65)
    assert line.arrived(9.0) == [bytes(50)] and line.due_s() == math.inf and line.carried == 2
    line.take(b"x", 9.0)
    assert line.due_s() == pytest.approx(9.501), "an idle line saves nothing up"


def test_the_queue_drops_what_is_too_much() -> None:
    line = Direction(bytes_per_s=1000, queue_bytes=250)
    for _ in range(4):
        line.take(bytes(100), 0.0)
    assert (line.dropped, len(line.under_way)) == (2, 2), "what is on the line counts as waiting"
    line.take(bytes(100), 0.15)
    assert line.dropped == 2
    tiny = Direction(bytes_per_s=1000, queue_bytes=10)
    tiny.take(bytes(100), 0.0)
    assert tiny.dropped == 0, "an idle line takes any packet"


def test_losses_are_the_share_that_was_set_and_come_again_with_the_seed() -> None:
    def arrived(seed: int) -> list[bytes]:
        line = Direction(loss=0.1, random=random.Random(seed))
        for number in range(2000):
            line.take(number.to_bytes(2, "big"), 0.0)
        assert 140 < line.lost < 260
        return line.arrived(1.0)

    assert arrived(1) == arrived(1) != arrived(2)


def test_jitter_delays_and_keeps_the_order() -> None:
    line = Direction(delay_s=0.01, jitter_s=0.005, random=random.Random(1))
    for number in range(200):
        line.take(number.to_bytes(2, "big"), number * 0.1)
    times = [at_s - k * 0.1 for k, (at_s, _) in enumerate(line.under_way)]
    assert min(times) >= 0.01 and max(times) <= 0.015 and statistics.mean(times) == pytest.approx(0.0125, rel=0.1)
    close = Direction(jitter_s=1.0, random=random.Random(2))
    for number in range(100):
        close.take(number.to_bytes(2, "big"), number * 0.001)
    assert close.arrived(9.0) == [number.to_bytes(2, "big") for number in range(100)]


@pytest.mark.parametrize(
    "flags", [["--loss", "1.5"], ["--loss", "nan"], ["--delay-ms", "-1"], ["--up-mbps", "0"], ["--delay-ms", "inf"]]
)
def test_wrong_use(flags: list[str]) -> None:
    done = subprocess.run([sys.executable, PROGRAM, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and flags[0] in done.stderr


def test_where_it_cannot_be_made_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match=r"needs root|needs Linux"), TunLink():
        pass


# ---- real ones


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


def devices() -> str:
    return Path("/proc/net/dev").read_text()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if tun_link.why_not():
        yield
        return
    before = namespaces()
    yield
    wait_until(lambda: {n for n in namespaces() - before if n.startswith("pipesd-")} == set(), "the end of namespaces")


def round_trips_s(link: TunLink, count: int, length: int = 20) -> list[float | None]:
    with subprocess.Popen(link.at_cloud([sys.executable, "-c", ECHO]), stdout=subprocess.PIPE) as echo:
        try:
            assert echo.stdout is not None and echo.stdout.readline() == b"ready\n"
            ping = [sys.executable, "-c", PING, str(count), str(length)]
            done = subprocess.run(link.at_edge(ping), capture_output=True, check=True)
        finally:
            echo.kill()
    return list(json.loads(done.stdout))


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_round_trips_are_what_was_set(delay_s: float) -> None:
    """Within 1.5 ms, by the better half of them: the machine may be busy, which makes them longer, never shorter."""
    with TunLink(delay_s=delay_s, up_bytes_per_s=1e6, down_bytes_per_s=2e6) as link:
        times_s = sorted(took for took in round_trips_s(link, 40, 972) if took is not None)
    wanted_s = 2 * delay_s + 1000 / 1e6 + 1000 / 2e6
    assert len(times_s) == 40
    assert wanted_s <= times_s[0] and times_s[20] < wanted_s + 1.5e-3


@needs_root
@pytest.mark.slow
def test_losses_are_real() -> None:
    with TunLink(loss=0.2, seed=3) as link:
        times_s = round_trips_s(link, 20)
    assert 2 <= times_s.count(None) <= 15


def started(*flags: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    process = subprocess.Popen([sys.executable, PROGRAM, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    made = json.loads(process.stdout.readline())
    assert {made["edge"], made["cloud"]} <= namespaces() and made["address"] == "10.213.7.2"
    return process, made


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_it_tidies_up_after_a_signal_and_at_the_end_of_stdin(number: signal.Signals | None) -> None:
    process, made = started()
    if number is None:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and errors.decode().startswith("up: ")
    assert not {made["edge"], made["cloud"]} & namespaces()


@needs_root
def test_what_a_killed_one_left_is_removed_by_the_next() -> None:
    process, made = started()
    process.kill()
    process.communicate(timeout=20)
    assert made["edge"] in namespaces()
    with TunLink() as link:
        assert not {made["edge"], made["cloud"]} & namespaces()
        assert str(os.getpid()) not in link.at_edge([])[3]
    assert "psc" not in devices() and "pse" not in devices()


@needs_root
def test_it_does_not_outlive_who_wanted_it() -> None:
    """A program that is killed in the middle leaves no link behind."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})\n"
        "from tun_link import TunLink\nimport time\n"
        "with TunLink() as link:\n    print(link.at_edge([])[3], flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    name = process.stdout.readline().decode().strip()
    assert name in namespaces()
    process.kill()
    process.communicate(timeout=20)
    begun_s = time.monotonic()
    wait_until(lambda: name not in namespaces(), "the end of its namespace")
    assert time.monotonic() - begun_s < 10
