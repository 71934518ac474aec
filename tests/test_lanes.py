"""Schedules and cuts on the lines of the emulated link, under times that are given, and through real sockets."""

from __future__ import annotations

import math
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipesd.address import split_address
from pipesd.errors import UsageError
from pipesd.sim.cuts import checked_cuts, is_cut, next_change_s, parse_cut
from pipesd.sim.lanes import Line
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.schedule import Schedule
from tests.test_proxy import (
    accept,
    address_of,
    connect,
    exactly,
    linked,
    listening,
    round_trips_s,
    run_by_hand,
    transfer_s,
    wait_until,
)

STEPS = Schedule(1.0, (0.8, 8.0), (80.0, 0.8))  # 0.1 and 1 MB/s up, 10 and 0.1 down


def test_a_line_finishes_at_the_new_rate_what_the_old_one_began() -> None:
    line = Line(0.5, math.inf, 1000, schedule=STEPS, begun_s=100.0)
    assert line.arrival_s(100.9, 30_000) == pytest.approx(101.02 + 0.5), "10 kB until the change, 20 at 1 MB/s"
    assert line.arrival_s(100.9, 100_000) == pytest.approx(101.12 + 0.5), "behind the first one"
    down = Line(0.0, math.inf, 1000, way="down", schedule=STEPS, begun_s=100.0)
    assert down.arrival_s(100.99, 110_000) == pytest.approx(101.1) and down.bytes_per_s == pytest.approx(1e7)
    for now_s, rate in ((100.5, 1e5), (101.0, 1e6), (102.0, 1e5)):
        line.follow(now_s)
        assert line.bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_ends_each_chunk_when_the_schedule_says(way: Any) -> None:
    line, chance = Line(0.0, math.inf, 1000, way=way, schedule=STEPS), random.Random(1)
    now_s = free_s = 0.0
    for _ in range(300):
        now_s += chance.random() / 50
        length = chance.randrange(1, 5000)
        free_s = STEPS.finish_s(max(free_s, now_s), length, way)
        assert line.arrival_s(now_s, length) == pytest.approx(free_s)


def test_cuts_are_checked() -> None:
    assert checked_cuts([(5, 1), (0, 2)]) == ((0.0, 2.0), (5.0, 1.0))
    assert parse_cut("10:2.5") == (10.0, 2.5)
    cuts = ((1.0, 2.0), (2.0, 3.0))
    assert [is_cut(cuts, t_s) for t_s in (0.9, 1.0, 2.5, 4.9, 5.0)] == [False, True, True, True, False]
    assert [next_change_s(cuts, t_s) for t_s in (0.0, 1.0, 2.0, 3.0, 5.0)] == [1.0, 2.0, 3.0, 5.0, math.inf]
    for text in ("10", "10:", ":1", "a:b", "-1:2", "1:0", "1:-1", "nan:1", "1:inf", "1:2:3"):
        with pytest.raises(UsageError, match="cut"):
            parse_cut(text)
    wrong: list[Any] = [[(-1.0, 1.0)], [(0.0, math.inf)], [(math.nan, 1.0)], [1, 2], [(1, 2, 3)], [("1", "2")], 5]
    for cuts in wrong:
        with pytest.raises(UsageError, match="cut"):
            LinkProxy("tcp://127.0.0.1:9", cuts=cuts)


def test_a_rate_and_a_schedule_are_too_much() -> None:
    with pytest.raises(UsageError, match="one of them"):
        LinkProxy("tcp://127.0.0.1:9", up_bytes_per_s=1e6, schedule=STEPS)


def test_the_link_follows_its_schedule_until_a_rate_is_given() -> None:
    steps = Schedule(0.2, (0.8, 800.0), (800.0, 800.0))
    with linked(schedule=steps) as (link, client, far):
        transfer_s(client, far, bytes(60_000))
        assert time.monotonic() - link._begun_s > 0.2, "at most 20 kB go until the change"
        link.change(up_bytes_per_s=1e5)
        assert transfer_s(client, far, bytes(30_000)) >= 0.3 * 0.98


def test_what_is_read_at_a_time_follows_the_schedule() -> None:
    """Else a chunk as of a fast step would come in one piece, late, in a slow one."""
    steps = Schedule(0.3, (800.0, *[0.8] * 9999), (800.0,) * 10_000)
    with linked(schedule=steps) as (link, client, far):
        assert link._up.chunk_bytes == 50_000
        wait_until(lambda: time.monotonic() - link._begun_s > 0.3)
        client.sendall(b"x")
        exactly(far, 1)
        assert link._up.chunk_bytes == 1448


def test_the_link_is_cut_at_its_time_and_away_until_its_end() -> None:
    with listening() as server, LinkProxy(address_of(server), delay_s=0.01, cuts=((1.5, 1.0), (9e9, 1.0))) as link:
        client = connect(link)
        far = accept(server)
        with client, far:
            assert far.recv(1) == b"" == client.recv(1), "both ends are told, by nobody's doing"
            assert time.monotonic() - link._begun_s > 1.5
            while True:
                try:
                    connect(link).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            assert time.monotonic() - link._begun_s > 2.5, "refused until its end"
        with connect(link) as client, accept(server), accept(server) as far:  # the one that only tried comes first
            assert round_trips_s(client, far, 1)
        assert link.counts().connections == 3


def test_the_program_follows_a_file_and_cuts(tmp_path: Path) -> None:
    Schedule(60.0, (0.8,), (8.0,)).save(tmp_path / "schedule.json")
    with listening() as server:
        process = run_by_hand(
            "--to", address_of(server), "--schedule", str(tmp_path / "schedule.json"), "--cut", "50:1"
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with socket.create_connection(split_address(address), timeout=10) as client, accept(server) as far:
                assert transfer_s(client, far, bytes(30_000)) >= 0.3 * 0.98
        finally:
            process.kill()
            process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--schedule", "no-such-file"], "no-such-file"), (["--cut", "1"], "'1'; give AT:LASTS"),
        (["--queue-bytes", "0"], "queue of 0 bytes"), (["--up-jitter-ms", "-1"], "delay of -0.001"),
        (["--schedule", "bench/scenario4.json", "--up-mbps", "1"], "give one of them"),
    ],
)  # fmt: skip
def test_the_program_says_in_one_line_what_is_wrong(flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "pipesd.sim.proxy", "--to", "tcp://127.0.0.1:9", *flags]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=root)
    assert done.returncode == 2 and done.stdout == "" and says in done.stderr and done.stderr.count("\n") == 1
