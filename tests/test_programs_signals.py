"""SIGINT and SIGTERM to both programs, whatever they are doing: they end in time, tidily, and tell the other side."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.errors import Unreachable
from pipesd.transport import Context, front_socket
from tests.clouds import NOWHERE, InThread, serving, wait_until
from tests.programs import ENDS_S, Models, Program, Ran
from tests.scripted_cloud import BEFORE, LAW
from tests.test_programs import one_object

SIGNALS = [signal.SIGINT, signal.SIGTERM]
EXIT = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGHUP: 0}  # of the cloud
BUSY = "import hashlib; busy = lambda *a, **b: hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9); "  # no step of Python
SLOW_S = 0.02  # of a pass


@pytest.fixture(params=SIGNALS, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> signal.Signals:
    return request.param  # type: ignore[no-any-return]


def interrupted(ran: Ran) -> dict[str, Any]:
    """What the edge leaves behind."""
    assert ran.code == 130
    result = one_object(ran)
    assert result["finish_reason"] == "cancelled"
    return result


# ---- the edge


@contextmanager
def generating(models: Models, *more: object, **settings: Any) -> Iterator[Program]:
    with Program("edge", "generate", *models.options, "--json", *more, **settings) as program:
        yield program


CALLED_BACK = """
import ctypes, signal, sys
from pipesd.edge.interrupts import Interrupts
with Interrupts() as interrupts:
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(int(sys.argv[1])))()  # what is raised in there is lost
    try:
        with interrupts.raising():
            print("goes on")
    except KeyboardInterrupt:
        print("ends")
    ctypes.CFUNCTYPE(None)(lambda: 1 / 0)()
"""


def test_while_native_code_calls_back(number: signal.Signals) -> None:
    """As llama.cpp does while it loads a model: no traceback, and not for nothing. Other errors are still told."""
    words = [sys.executable, "-c", CALLED_BACK, str(int(number))]
    ran = subprocess.run(words, env=Program.environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ends\n")
    assert "KeyboardInterrupt" not in ran.stderr and ran.stderr.count("Traceback") == 1, ran.stderr
    assert "ZeroDivisionError" in ran.stderr


def test_while_the_prompt_is_read(models: Models, number: signal.Signals) -> None:
    loaded = (
        "import os; import pipesd.edge.cli as c; read = c._prompt; "
        "c._prompt = lambda args: (os.write(2, b'reading'), read(args))[1]; "
    )
    with generating(models, stdin=subprocess.PIPE, before=loaded) as program:
        program.says("reading", on="err")
        interrupted(program.end(ENDS_S, since_s=program.send(number)))


STUCK = BUSY + "import os, pipesd.edge.drafter as d; d.Drafter = lambda *a, **b: (os.write(2, b'stuck'), busy()); "


def test_while_a_native_call_loads_the_model(models: Models) -> None:
    """Python cannot act on the signal."""
    with generating(models, "--prompt", "x", "--cloud", NOWHERE, before=STUCK) as program:
        program.says("stuck", on="err")
        interrupted(program.end(ENDS_S, since_s=program.send(signal.SIGINT)))


def test_a_second_signal_does_not_wait_even_for_a_native_call(models: Models, number: signal.Signals) -> None:
    with generating(models, "--prompt", "x", "--cloud", NOWHERE, before=STUCK) as program:
        program.says("stuck", on="err")
        begun_s = program.send(signal.SIGINT)
        time.sleep(0.1)
        program.send(number)
        ran = program.end(1.0, since_s=begun_s)
    assert ran.code == 130


def test_while_a_child_tries_the_model(models: Models, number: signal.Signals) -> None:
    """No orphan is left: `end` sees to that."""
    slow = (
        "import os, pipesd.edge.trial as t; child = t.run_child; "
        "t.try_model.__kwdefaults__['run'] = lambda c: (os.write(2, b'trying'), child(['sleep', '60']))[1]; "
    )
    with generating(models, "--prompt", "x", "--cloud", NOWHERE, before=slow, XDG_CACHE_HOME="/nowhere") as program:
        program.says("trying", on="err")
        interrupted(program.end(ENDS_S, since_s=program.send(number)))


@pytest.mark.parametrize(("peer", "number"), [("nobody", signal.SIGTERM), ("silence", signal.SIGINT)])
def test_without_a_peer(models: Models, number: signal.Signals, peer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = NOWHERE if peer == "nobody" else f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with generating(models, "--prompt", "x", "--connect-s", 60, "--cloud", address) as program:
            program.says("draft model", on="err")
            time.sleep(0.3)
            interrupted(program.end(ENDS_S, since_s=program.send(number)))


@pytest.mark.parametrize(
    ("busy", "strategy", "number"),
    [
        ("prefill", "vanilla", signal.SIGINT),
        ("prefill", "cloud", signal.SIGTERM),
        ("round", "vanilla", signal.SIGTERM),
        ("round", "cloud", signal.SIGINT),
        ("round", "vanilla", signal.SIGHUP),
    ],
)
def test_while_the_cloud_computes(models: Models, number: signal.Signals, strategy: str, busy: str) -> None:
    pace = {"token_s": 0.005} if busy == "prefill" else {"pass_s": SLOW_S}
    with serving(LAW, target={"vocabulary": models.vocabulary, **pace}) as served:
        front = served.server._front
        assert front is not None
        more = ["--prompt", "x" * (1000 if busy == "prefill" else 10), "--cloud", served.address]
        with generating(models, *more, "--strategy", strategy, "--max-tokens", 900) as program:
            wait_until(lambda: front.sessions == 1, "a session")
            if busy == "round":
                wait_until(lambda: served.passes > 20, "a text")
            sent_s = program.send(number)
            result = interrupted(program.end(ENDS_S, since_s=sent_s))
            wait_until(lambda: front.sessions == 0, "the cloud to forget the session, having heard CLOSE")
    assert (len(result["token_ids"]) > 3) == (busy == "round")
    assert result["stats"]["tokens"] == len(result["token_ids"])


def test_hangups_are_left_to_nohup(models: Models) -> None:
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    with serving(LAW, target={"vocabulary": models.vocabulary, "pass_s": SLOW_S}) as served:
        arguments = ["--prompt", "x", "--cloud", served.address, "--max-tokens", 20]
        with generating(models, *arguments, before=nohup) as program:
            wait_until(lambda: served.passes > 0, "a text")
            program.send(signal.SIGHUP)
            assert program.end().code == 0


@pytest.fixture
def full(tmp_path: Path) -> Iterator[str]:
    """What a program has to run first so that its output is a pipe that is full and nobody reads."""
    os.mkfifo(tmp_path / "full")
    end = os.open(tmp_path / "full", os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            os.write(end, bytes(1 << 12))
    except BlockingIOError:
        yield f"import os; os.dup2(os.open({str(tmp_path / 'full')!r}, os.O_WRONLY), 1); "
    finally:
        os.close(end)


@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_while_nobody_takes_the_output(models: Models, full: str, more: list[str]) -> None:
    with serving(LAW, target={"vocabulary": models.vocabulary, "pass_s": SLOW_S}) as served:
        arguments = [*models.options, "--prompt", "x", "--cloud", served.address, *more]
        with Program("edge", "generate", *arguments, before=full) as program:
            wait_until(lambda: served.passes > 0, "a text")
            time.sleep(0.2)
            assert program.end(ENDS_S, since_s=program.send(signal.SIGINT)).code == 130


def test_while_nobody_takes_the_last_words(models: Models, full: str) -> None:
    with generating(models, "--prompt", "x", "--cloud", NOWHERE, before=full + STUCK) as program:
        program.says("stuck", on="err")
        assert program.end(ENDS_S, since_s=program.send(signal.SIGINT)).code == 130


# ---- the cloud


@contextmanager
def cloud(models: Models, *more: object, **settings: Any) -> Iterator[Program]:
    bind = [] if "--bind" in more else ["--bind", "tcp://127.0.0.1:0"]
    with Program("cloud", "serve", "--model", models.draft, *bind, *more, **{"before": BEFORE, **settings}) as program:
        yield program


def address_of(program: Program) -> str:
    program.says("\n")
    return program.out.decode().split()[-1]


def free_at_once(address: str) -> None:
    with Context() as context, front_socket(context, address):
        pass


def test_cloud_while_workers_load(models: Models, number: signal.Signals, tmp_path: Path) -> None:
    """Workers that take a minute to come up."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\nif any('spawn_main' in each for each in sys.orig_argv):\n"
        "    os.write(2, b'loading')\n    time.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), Program.environment()["PYTHONPATH"]])
    with cloud(models, "--workers", 2, PYTHONPATH=path) as program:
        program.says("loadingloading", on="err")
        ran = program.end(ENDS_S, since_s=program.send(number))
    assert (ran.code, ran.out) == (EXIT[number], "")


@pytest.mark.parametrize("number", EXIT, ids=lambda number: number.name)
def test_cloud_when_idle_and_its_port_is_free_at_once(models: Models, number: signal.Signals) -> None:
    """To all that the program has started, as from a terminal; and nothing is left open."""
    with cloud(models, python=["-X", "dev"]) as program:
        address = address_of(program)
        ran = program.end(ENDS_S, since_s=program.send(number, group=True))
        free_at_once(address)
    assert (ran.code, ran.err) == (EXIT[number], "")
    assert ran.out == f"pipesd-cloud: serving at {address}\n"


@contextmanager
def in_a_round(models: Models, address: str, events: Path, *more: object) -> Iterator[Program]:
    """An edge that has some text and wants more."""
    arguments = [*models.options, "--cloud", address, "--prompt", "x", "--quiet", "--events", events, *more]
    with Program("edge", "generate", *arguments) as program:
        wait_until(lambda: events.exists() and events.read_text().count('"committed"') > 3, "a text")
        yield program


def test_cloud_lets_a_generation_end_when_it_is_terminated(models: Models, tmp_path: Path) -> None:
    with cloud(models, "--drain-s", 20, SCRIPTED_PASS_S=str(SLOW_S)) as program:
        address = address_of(program)
        config = EdgeConfig(draft=str(models.draft), cloud=address, patience_s=0.5, strategy="cloud")
        with EdgeSession(config) as late, in_a_round(models, address, tmp_path / "events", "--max-tokens", 60) as early:
            program.send(signal.SIGTERM)
            with pytest.raises(Unreachable, match="shutting down"):
                list(late.generate("y"))
            assert early.process.poll() is None, "the generation has ended too early for this test"
            ran = early.end()
            assert (ran.code, len(ran.raw)) == (0, 61)
        assert program.end().code == 0


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGTERM, signal.SIGTERM],
        pytest.param([signal.SIGINT], marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM, signal.SIGINT], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cloud_ends_at_once_in_a_round(models: Models, signals: list[signal.Signals], tmp_path: Path) -> None:
    more = ["--patience-s", 0.5, "--json", "--max-tokens", 900]
    with cloud(models, SCRIPTED_PASS_S=str(SLOW_S)) as program:
        with in_a_round(models, address_of(program), tmp_path / "events", *more) as other:
            for each in signals:
                sent_s = program.send(each)
                time.sleep(0.05)
            ran = program.end(ENDS_S, since_s=sent_s)
            lost = other.end()
    assert ran.code == (130 if signal.SIGINT in signals else 0)
    assert lost.code == 3 and one_object(lost)["finish_reason"] == "error"


def test_cloud_ends_at_once_in_a_pass_that_lasts(models: Models) -> None:
    with cloud(models, SCRIPTED_PASS_S="30") as program:
        config = EdgeConfig(draft=str(models.draft), cloud=address_of(program), patience_s=0.5, strategy="cloud")
        with EdgeSession(config) as session:
            result = InThread(lambda: list(session.generate("x")))
            time.sleep(0.3)
            ran = program.end(ENDS_S, since_s=program.send(signal.SIGINT))
            with pytest.raises(Unreachable):
                result.result()
    assert ran.code == 130
