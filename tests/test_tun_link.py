"""The link between network namespaces: its rules by themselves, and where there is root, its figures and its end."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tun_link
from tun_direction import Direction
from tun_link import LinkError, TunLink

from pipesd.sim.schedule import Schedule
from tests.clouds import wait_until
from tests.programs import Program

PROGRAM = str(Path(tun_link.__file__))
ROOT = Path(PROGRAM).parents[1]
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


STEPS = Schedule(1.0, (0.8, 8.0), (80.0, 0.8))  # 0.1 and 1 MB/s up, 10 and 0.1 down


def test_a_packet_under_way_at_a_change_is_finished_at_the_new_rate() -> None:
    up = Direction(delay_s=0.5, schedule=STEPS, begun_s=100.0)
    up.take(bytes(1500), 100.99)
    up.take(bytes(1500), 100.99)
    assert [at_s for at_s, _ in up.under_way] == pytest.approx([101.5005, 101.502]), "1000 bytes before, 500 behind"
    down = Direction(way="down", schedule=STEPS, begun_s=100.0)
    down.take(bytes(1500), 101.5)
    assert down.due_s() == pytest.approx(101.515)


def test_the_queue_holds_so_many_bytes_at_any_rate() -> None:
    """Ten thousand of them take a tenth of a second before a change, a hundredth behind it."""
    line = Direction(schedule=STEPS, queue_bytes=10_000)
    for _ in range(20):
        line.take(bytes(1000), 0.95)
    assert (len(line.under_way), line.dropped) == (10, 10)
    assert line.free_s == pytest.approx(1.005)
    line.take(bytes(1000), 1.0)
    assert line.dropped == 10, "half of them have gone"


@pytest.mark.parametrize("way", ["up", "down"])
def test_the_line_ends_each_packet_when_the_schedule_says(way: Any) -> None:
    line, chance = Direction(way=way, schedule=STEPS, queue_bytes=1e9), random.Random(1)
    now_s, wanted = 0.0, []
    for _ in range(300):
        now_s += chance.random() / 50
        length = chance.randrange(40, 1500)
        wanted.append(STEPS.finish_s(max(now_s, wanted[-1] if wanted else 0.0), length, way))
        line.take(bytes(length), now_s)
    assert [at_s for at_s, _ in line.under_way] == pytest.approx(wanted)


def test_a_cut_loses_what_it_meets_and_nothing_else() -> None:
    line = Direction(delay_s=0.5, bytes_per_s=1000, cuts=((2.0, 3.0), (8.0, 1.0)), begun_s=100.0)
    fates = {
        101.3: True,
        101.5: False,
        103.0: False,
        104.85: False,
        104.95: True,
        107.3: True,
        107.45: False,
        109.0: True,
    }
    for at_s in fates:
        line.take(str(at_s).encode().ljust(100), at_s)  # 0.1 s of line
    arrived = [float(packet) for packet in line.arrived(200.0)]
    assert arrived == [at_s for at_s, arrives in fates.items() if arrives]
    assert (line.cut, line.carried, line.lost, line.dropped) == (4, 4, 0, 0)


def test_each_direction_has_its_own_figures() -> None:
    flags = ["--delay-ms=5", "--jitter-ms=2", "--loss=.1", "--queue-bytes=999", "--up-mbps=8", "--cut=1:2", "--cut=4:1"]
    flags += ["--down-delay-ms=0", "--down-jitter-ms=3", "--down-loss=0", "--up-queue-bytes=77"]
    options = tun_link._options(flags)
    up, down = tun_link._direction(options, "up", 1), tun_link._direction(options, "down", 2)
    assert (up.delay_s, up.jitter_s, up.loss, up.queue_bytes, up.bytes_per_s) == (0.005, 0.002, 0.1, 77, 1e6)
    assert (down.delay_s, down.jitter_s, down.loss, down.queue_bytes) == (0.0, 0.003, 0.0, 999)
    assert up.cuts == down.cuts == ((1.0, 2.0), (4.0, 1.0)) and (up.way, down.way) == ("up", "down")


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss", "1.5"], ["--loss", "nan"], ["--delay-ms", "-1"], ["--up-mbps", "0"], ["--delay-ms", "inf"],
        ["--cut", "5"], ["--cut", "-1:1"], ["--cut", "1:0"], ["--cut", "nan:1"], ["--up-queue-bytes", "0"],
        ["--down-jitter-ms", "nan"], ["--schedule", "no-such-file"],
        ["--schedule", "bench/scenario4.json", "--up-mbps", "5"],
    ],
)  # fmt: skip
def test_wrong_use(flags: list[str]) -> None:
    done = subprocess.run([sys.executable, PROGRAM, *flags], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and flags[0] in done.stderr and "Traceback" not in done.stderr


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


@needs_root
@pytest.mark.slow
def test_packets_vanish_during_a_cut_and_the_schedule_holds(tmp_path: Path) -> None:
    """A round trip takes 1 kB of a line of 100 kB/s up; for the first seconds nothing comes back."""
    Schedule(3600.0, (0.8,), (800.0,)).save(tmp_path / "schedule.json")
    with TunLink(schedule=tmp_path / "schedule.json", cuts=[(0.0, 4.0)]) as link:
        times_s = round_trips_s(link, 8, 972)
    assert times_s[0] is None and times_s[-1] is not None
    assert all(took_s >= 0.0099 for took_s in times_s if took_s is not None)
    assert re.search(r"up: .* [1-9]\d* cut off", link.told)


CLOUD = """
import sys
from tests.clouds import serving
with serving(bind=sys.argv[1], insecure=True) as cloud:
    print(cloud.address, flush=True)
    sys.stdin.read()
"""


@needs_root
@pytest.mark.slow
def test_a_link_with_losses_and_a_cut_is_measured_to_its_end() -> None:
    """TCP at both ends repairs both: the figures are told, of a delay that was set."""
    delay_s = 0.01
    cuts = [(at_s, 0.3) for at_s in range(2, 120, 3)]  # whenever the programs are ready
    with TunLink(delay_s=delay_s, up_bytes_per_s=2.5e6, down_bytes_per_s=25e6, loss=0.01, cuts=cuts) as link:
        bind = f"tcp://{link.address}:7421"
        command = link.at_cloud([sys.executable, "-c", CLOUD, bind])
        with subprocess.Popen(
            command, cwd=ROOT, env=Program.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as cloud:
            try:
                assert cloud.stdout is not None and cloud.stdout.readline().decode().strip() == bind
                measure = [*Program.command("edge"), "link", "--cloud", bind, "--seconds", "5", "--json", "--quiet"]
                done = subprocess.run(
                    link.at_edge(measure), env=Program.environment(), capture_output=True, text=True, check=False
                )
            finally:
                cloud.kill()
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["error"] is None, done.stderr
    assert 2e3 * delay_s <= found["rtt_ms"]["min"] < 2e3 * delay_s + 100
    assert found["probes"] > 0  # the bandwidths are what TCP made of it
    for way in ("up", "down"):
        assert re.search(rf"{way}: \d+ packets, [1-9]\d* lost", link.told)
    assert re.search(r"[1-9]\d* cut off", link.told)


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


@pytest.mark.parametrize("closed", [False, True])
def test_where_stdin_is_at_its_end_it_says_how_to_run_it(closed: bool) -> None:
    """As of a shell that starts it in the background; whoever it is that asks, root or not."""
    command = f"exec '{sys.executable}' '{PROGRAM}' {'<&-' if closed else '</dev/null'}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: the link lasts until its stdin ends") and tun_link.BACKGROUND in done.stderr


@needs_root
def test_in_the_background_it_runs_as_it_says() -> None:
    command = tun_link.BACKGROUND.replace("sleep 1d", "sleep 60").replace("OPTIONS", "--delay-ms 1")
    script = f"{command} link=$!; read go; kill $link"
    process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    try:
        made = json.loads(process.stdout.readline())
        assert {made["edge"], made["cloud"]} <= namespaces()
        assert process.stdin is not None
        process.stdin.write(b"on\n")
        process.stdin.flush()
        wait_until(lambda: not {made["edge"], made["cloud"]} & namespaces(), "the end of its namespaces")
        assert process.wait(20) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # what `sleep` is left
        process.communicate()


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
