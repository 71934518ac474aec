"""Clouds as their users run them, killed and stopped in the middle of generations."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clouds import (
    Both,
    CloudProcess,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudProcess]:
    with CloudProcess(tmp_path_factory.mktemp("cloud"), pass_s=0.002) as started:
        yield started
        assert started.stop() == 0


def test_a_worker_that_is_killed(process: CloudProcess) -> None:
    with Both(process.address) as both:
        both.begin(300)
        both.until(random.randrange(10, 100))
        process.kill_worker()
        both.go_on(100)
        assert min(both.right()) >= 2
    assert "worker 0 is down: it was killed (SIGKILL)" in process.errors.read_text()


@pytest.mark.slow
def test_a_cloud_that_is_stopped_and_goes_on(process: CloudProcess) -> None:
    with Both(process.address) as both:
        both.begin(300)
        both.until(20)
        process.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.process.send_signal(signal.SIGCONT)
        both.go_on(100)
        both.right()


@pytest.mark.slow
def test_a_cloud_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with CloudProcess(tmp_path, pass_s=0.002) as first, Both(first.address) as both:
        both.begin(300)
        both.until(random.randrange(10, 100))
        first.kill()
        with CloudProcess(tmp_path, port=first.port, pass_s=0.002):
            both.go_on(100)
            assert min(both.right()) >= 2
