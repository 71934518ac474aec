"""Clouds as their users run them, killed and stopped in the middle of generations."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clouds import (
    CloudProcess,
    EachStrategy,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudProcess]:
    with CloudProcess(tmp_path_factory.mktemp("cloud"), pass_s=0.002) as started:
        yield started
        assert started.stop() == 0


def test_a_worker_that_is_killed(process: CloudProcess) -> None:
    with EachStrategy(process.address) as each:
        each.begin(300)
        each.until(random.randrange(10, 100))
        process.kill_worker()
        each.go_on(100)
        assert min(each.right()) >= 2
    assert "worker 0 is down: it was killed (SIGKILL)" in process.errors.read_text()


@pytest.mark.slow
def test_a_cloud_that_is_stopped_and_goes_on(process: CloudProcess) -> None:
    with EachStrategy(process.address) as each:
        each.begin(300)
        each.until(20)
        process.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.process.send_signal(signal.SIGCONT)
        each.go_on(100)
        each.right()


@pytest.mark.slow
def test_a_cloud_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with CloudProcess(tmp_path, pass_s=0.002) as first, EachStrategy(first.address) as each:
        each.begin(300)
        each.until(random.randrange(10, 100))
        first.kill()
        with CloudProcess(tmp_path, port=first.port, pass_s=0.002):
            each.go_on(100)
            assert min(each.right()) >= 2
