"""The cloud as a whole: the program as a process that gets signals, the library as threads."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket as net
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from front_harness import SOON_S, Edge, edge_at, hello, wait_for

from pipesd.cloud.server import CloudServer, load_target
from pipesd.config import CloudConfig
from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.protocol import wire
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.protocol.wire import ErrorCode
from pipesd.sim.targets import Fault, ScriptedTarget

LOCAL = CloudConfig(bind="tcp://127.0.0.1:0")
PROMPT = (1, 2, 3)
TARGET = ScriptedTarget()


def expected(tokens: int) -> list[int]:
    """What the scripted target says behind the prompt."""
    target = ScriptedTarget()
    ids = list(PROMPT)
    for new in range(tokens):
        ((choice,),) = target.greedy([(0, ids if new == 0 else ids[-1:], 1)])
        ids.append(choice)
    return ids[len(PROMPT) :]


def open_free(session: int, opening: int, committed: list[int], tokens: int) -> wire.Open:
    """A free run of `tokens` ids in all behind what is committed so far."""
    ids = (*PROMPT, *committed)
    of_target = (TARGET.info.fingerprint, vocabulary_hash(TARGET.vocabulary))
    return wire.Open(session, opening, 0, bytes(8), ids, len(PROMPT) + tokens, (), None, 0, Mode.FREE, *of_target)


def generate(edge: Edge, session: int, tokens: int, *, patience_s: float = 20.0) -> list[int]:
    """As an edge does it, in the fewest words: opens again whenever it is told to, or hears nothing for a second."""
    committed: list[int] = []
    opening, deadline_s = 1, time.monotonic() + patience_s
    edge.say(open_free(session, opening, committed, tokens))
    while len(committed) < tokens:
        assert time.monotonic() < deadline_s, f"{len(committed)} ids only"
        answer = edge.hear(1.0)
        if isinstance(answer, wire.Verdict) and answer.opening == opening:
            assert answer.pos == len(PROMPT) + len(committed)
            committed += answer.ids
            edge.say(wire.Draft(session, opening, 0, len(PROMPT) + len(committed), (), len(PROMPT) + len(committed)))
        elif answer is None or (isinstance(answer, wire.Error) and answer.opening == opening):
            time.sleep(answer.retry_ms / 1000 if answer else 0)
            opening += 1
            edge.say(open_free(session, opening, committed, tokens))
    return committed


def port_is_free(address: str) -> bool:
    with net.socket() as listener:
        listener.setsockopt(net.SOL_SOCKET, net.SO_REUSEADDR, 1)  # as libzmq does
        try:
            listener.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            listener.listen()
        except OSError:
            return False
        return True


# ---- the library


def test_a_server_in_threads_serves_and_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    with CloudServer(LOCAL, target=ScriptedTarget()) as cloud:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", cloud.address)
        with edge_at(cloud.address) as edge:
            assert generate(edge, 7, 50) == expected(50)
    assert port_is_free(cloud.address), "at once"
    assert threading.active_count() == threads
    cloud.close()
    with CloudServer(CloudConfig(bind=cloud.address), target=ScriptedTarget()) as again, edge_at(again.address) as edge:
        assert again.address == cloud.address
        assert generate(edge, 7, 20) == expected(20)


def test_several_workers_in_threads_share_the_sessions() -> None:
    config = CloudConfig(bind="tcp://127.0.0.1:0", workers=2, max_sessions=2)
    with CloudServer(config, target=ScriptedTarget) as cloud, edge_at(cloud.address) as edge:
        for session in range(1, 5):
            edge.say(open_free(session, 1, [], 2))
            while not (isinstance(answer := edge.hear(), wire.Verdict) and answer.session == session):
                assert isinstance(answer, wire.Opened | wire.Verdict)
    with pytest.raises(UsageError, match="2 workers need"):
        CloudServer(config, target=ScriptedTarget())


def test_a_crash_in_a_thread_is_mended_and_the_ids_are_the_same(tmp_path: Path) -> None:
    fault = Fault("raise", at_pass=10, once_file=str(tmp_path / "once"))
    target = ScriptedTarget(faults=[fault])
    with CloudServer(LOCAL, target=target) as cloud, edge_at(cloud.address) as edge:
        assert generate(edge, 7, 40) == expected(40)
        assert (tmp_path / "once").exists()
        assert cloud.error is None


@pytest.mark.parametrize("backend", ["plain", "transformers"])
@pytest.mark.parametrize("row_invariant", [False, True])
def test_a_configuration_loads_its_target_by_its_backend(
    monkeypatch: pytest.MonkeyPatch, backend: str, row_invariant: bool
) -> None:
    pytest.importorskip("torch")
    from pipesd.cloud import loading, transformers_target

    asked: list[tuple[str, Any, Any]] = []

    def load(own: str, *given: Any, **more: Any) -> ScriptedTarget:
        *options, progress = given
        progress(1, 2)
        asked.append((own, options, more["exact"]))
        return ScriptedTarget()

    monkeypatch.setattr(loading, "load_target", partial(load, "plain"))
    monkeypatch.setattr(transformers_target, "load_transformers_target", partial(load, "transformers"))
    config = CloudConfig(model="m", backend=backend, row_invariant=row_invariant, max_sessions=3, dtype="bfloat16")
    assert isinstance(load_target(config), ScriptedTarget)
    assert asked == [(backend, ["m", "auto", "bfloat16", None, 3, 1], True if row_invariant else None)]


@pytest.mark.parametrize("backend", ["plain", "transformers"])
def test_without_torch_a_cloud_says_what_to_install(backend: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipesd.cloud.server import CloudServer\n"
        "from pipesd.config import CloudConfig\n"
        "from pipesd.errors import UsageError\n"
        f"server = CloudServer(CloudConfig(model='x', bind='tcp://127.0.0.1:0', backend={backend!r}))\n"
        "try:\n"
        "    server.start()\n"
        "except UsageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("torch is not installed; a cloud needs it: pip install 'pipesd[cloud]'\n")


def test_without_gguf_a_folder_is_served_and_a_gguf_file_says_what_to_install(tmp_path: Path) -> None:
    for package in ("torch", "gguf", "transformers"):
        pytest.importorskip(package)
    from tests.tiny import write_tiny
    from tests.tiny_hf import write_folder

    file, folder = write_tiny(tmp_path / "m.gguf"), write_folder(tmp_path / "folder")
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pipesd.cloud.server import load_target\n"
        "from pipesd.config import CloudConfig\n"
        "from pipesd.errors import UsageError\n"
        f"print(load_target(CloudConfig(model={str(folder)!r}, device='cpu')).info.name)\n"
        "try:\n"
        f"    load_target(CloudConfig(model={str(file)!r}, device='cpu'))\n"
        "except UsageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "folder", "gguf is not installed; a cloud needs it: pip install 'pipesd[cloud]'",
    ], done.stderr  # fmt: skip


def test_what_cannot_start_says_why_and_leaves_nothing_behind() -> None:
    threads = threading.active_count()

    def broken() -> ScriptedTarget:
        raise UsageError("model x.gguf: no such file")

    with pytest.raises(UsageError, match=r"model x\.gguf: no such file"), CloudServer(LOCAL, target=broken):
        pass
    with CloudServer(LOCAL, target=ScriptedTarget()) as cloud:
        taken = CloudServer(CloudConfig(bind=cloud.address), target=ScriptedTarget())
        with pytest.raises(UsageError, match=f"{cloud.address}: port .* is in use"):
            taken.start()
        taken.close()
    wait_for(lambda: threading.active_count() == threads)


@pytest.mark.parametrize("bind", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://192.0.2.1:7421"])
def test_other_machines_are_kept_out_unless_asked_for(bind: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=r"other machines.*--insecure"):
        CloudServer(CloudConfig(bind=bind), target=ScriptedTarget()).start()
    if bind.endswith(":0"):
        with CloudServer(CloudConfig(bind=bind, insecure=True), target=ScriptedTarget()) as cloud:
            assert "open to other machines" in caplog.text
            with edge_at(f"tcp://127.0.0.1:{cloud.address.rpartition(':')[2]}") as edge:
                assert generate(edge, 7, 5) == expected(5)


def test_a_cloud_that_ends_by_itself_keeps_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    target = ScriptedTarget(faults=[Fault("sleep", at_pass=5, seconds=2.0)])
    config = CloudConfig(bind="tcp://127.0.0.1:0", stall_s=1.0)
    with CloudServer(config, target=target) as cloud, edge_at(cloud.address) as edge:
        edge.say(open_free(7, 1, [], 40))
        wait_for(lambda: cloud.error is not None)
        assert "thread cannot be ended" in str(cloud.error) and "has ended" in caplog.text
    time.sleep(1.0)  # let the thread finish: it holds a socket


# ---- the program

PROGRAM = """
import sys
from functools import partial
from pipesd.cloud.server import serve
from pipesd.config import CloudConfig
from pipesd.errors import PipeSDError
from pipesd.sim.targets import Fault, ScriptedTarget

if __name__ == "__main__":
    try:
        config = CloudConfig(bind=sys.argv[1], workers=int(sys.argv[2]))
        sys.exit(serve(config, make_target=partial(ScriptedTarget, pass_s=float(sys.argv[3]))))
    except PipeSDError as error:
        sys.exit(f"error: {error}")
"""


class Program:
    """`serve` in a process of its own, in a process group of its own."""

    started: ClassVar[list[Program]] = []

    def __init__(
        self,
        folder: Path,
        bind: str = "tcp://127.0.0.1:0",
        workers: int = 1,
        pass_s: float = 0.0,
        limit: Callable[[], None] | None = None,
    ) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(script), bind, str(workers), str(pass_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=limit,
            env={**os.environ, "TMPDIR": str(self.scratch), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = ""
        Program.started.append(self)

    def ready(self) -> Program:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"pipesd-cloud: serving at (tcp://127\.0\.0\.1:\d+)\n", line)
        assert found, f"{line!r} {self.process.communicate()}"
        self.address = found[1]
        return self

    def children(self) -> list[int]:
        """Its workers, and what Python starts for them."""
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def workers(self) -> list[int]:
        def is_worker(pid: int) -> bool:
            return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()

        return [pid for pid in self.children() if is_worker(pid)]

    def end(self, *signals: int, within_s: float) -> tuple[int, str]:
        """Signals it; (exit code, stderr). All that it left is looked for."""
        children = self.children()
        begun_s = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        out, err = self.process.communicate(timeout=SOON_S * 2)
        assert time.monotonic() - begun_s < within_s
        assert out == ""
        wait_for(lambda: not any(map(runs, children)), 2.0)
        assert list(self.scratch.iterdir()) == []
        assert not self.address or port_is_free(self.address)
        return self.process.returncode, err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_an_address_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), LOCAL.bind, "1", "0"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables, timeout=60)
    assert done.stderr == "error: the output cannot be written: No space left on device; write it elsewhere\n"


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: what lies in it is the end of a local socket's address. No program outlives it."""
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield Path(made)
        while Program.started:
            process = Program.started.pop().process
            process.kill()
            process.communicate()


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_idle_program_ends_within_two_seconds_and_leaves_nothing(folder: Path, number: int, code: int) -> None:
    program = Program(folder, workers=2).ready()
    with edge_at(program.address) as edge:
        assert generate(edge, 7, 10) == expected(10)
    assert len(program.workers()) == 2
    time.sleep(1.1)
    assert program.end(number, within_s=2.0) == (code, "")


@needs_proc
def test_an_interrupt_from_the_terminal_reaches_all_and_only_the_front_acts(folder: Path) -> None:
    for wait_s in (0.0, 0.05, 0.15, 0.3, 0.5):
        program = Program(folder)
        time.sleep(0.3 + wait_s)
        os.killpg(program.process.pid, signal.SIGINT)
        _, err = program.process.communicate(timeout=SOON_S)
        if program.process.returncode == 130:
            assert err == "", "no stack trace from anyone, while starting either"
        assert list(program.scratch.iterdir()) == []


@needs_proc
def test_sigterm_lets_a_running_generation_finish_and_refuses_new_ones(folder: Path) -> None:
    program = Program(folder, pass_s=0.02).ready()
    with edge_at(program.address) as edge, edge_at(program.address) as other:
        other.say(open_free(8, 1, [], 2))
        assert isinstance(other.hear(), wire.Opened)
        edge.say(open_free(7, 1, [], 40))
        assert isinstance(edge.hear(), wire.Opened)
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        other.say(open_free(9, 1, [], 2))
        while not isinstance(answer := other.hear(), wire.Error):
            assert answer is not None
        assert answer.code is ErrorCode.DRAINING
        got: list[int] = []
        while len(got) < 40:
            answer = edge.hear(1.0)
            assert isinstance(answer, wire.Verdict)
            got += answer.ids
            edge.say(wire.Draft(7, 1, 0, 3 + len(got), (), 3 + len(got)))
        assert got == expected(40)
        _, err = program.process.communicate(timeout=SOON_S)
        assert (program.process.returncode, err) == (0, "")


@needs_proc
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_an_interrupt_and_a_second_sigterm_end_at_once(folder: Path, numbers: tuple[int, ...]) -> None:
    program = Program(folder, pass_s=0.05).ready()
    with edge_at(program.address) as edge:
        edge.say(open_free(7, 1, [], 60))
        assert isinstance(edge.hear(), wire.Opened)
        code = 130 if signal.SIGINT in numbers else 0
        assert program.end(*numbers, within_s=2.0) == (code, "")


@needs_proc
def test_a_pass_that_is_running_does_not_delay_an_interrupt(folder: Path) -> None:
    program = Program(folder, pass_s=30.0).ready()
    with edge_at(program.address) as edge:
        edge.say(open_free(7, 1, [], 60))
        time.sleep(0.2)
        assert program.end(signal.SIGINT, within_s=2.0) == (130, "")


@needs_proc
def test_workers_do_not_outlive_a_killed_front(folder: Path) -> None:
    for pass_s in (0.0, 30.0):
        program = Program(folder, workers=2, pass_s=pass_s).ready()
        if pass_s:
            with edge_at(program.address) as edge:
                edge.say(open_free(7, 1, [], 60))
                time.sleep(0.2)
        code, _ = program.end(signal.SIGKILL, within_s=2.0)
        assert code == -signal.SIGKILL


@needs_proc
def test_a_killed_worker_costs_time_and_no_ids(folder: Path) -> None:
    program = Program(folder, pass_s=0.01).ready()
    (worker,) = program.workers()
    killer = threading.Timer(0.2, os.kill, (worker, signal.SIGKILL))
    with edge_at(program.address) as edge:
        killer.start()
        assert generate(edge, 7, 60) == expected(60)
    killer.join()
    code, err = program.end(signal.SIGINT, within_s=2.0)
    assert code == 130
    assert "worker 0 is down: it was killed (SIGKILL)" in err and "worker 0 is ready again" in err
    assert "Traceback" not in err


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with net.create_server(("127.0.0.1", 0)) as listener:
        bind = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        program = Program(folder, bind=bind)
        out, err = program.process.communicate(timeout=20)
    assert program.process.returncode == 1 and out == ""
    assert re.fullmatch(rf"error: {bind}: port \d+ is in use[^\n]*\n", err)


@needs_proc
@pytest.mark.slow
def test_a_crowd_that_takes_all_files_ends_neither_front_nor_worker_for_good(folder: Path) -> None:
    few = 128
    program = Program(folder, limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))).ready()
    address = ("127.0.0.1", int(program.address.rpartition(":")[2]))
    crowd = [net.create_connection(address) for _ in range(few)]
    (worker,) = program.workers()
    os.kill(worker, signal.SIGKILL)
    with edge_at(program.address) as edge:  # those who do not greet are sent away after three seconds
        wait_for(lambda: edge.socket.send(wire.encode(hello())), 20.0)
        assert isinstance(edge.hear(), wire.Welcome)
        wait_for(lambda: edge.ask(wire.Probe(0, 0, 1)).status is wire.ProbeStatus.OK, 20.0)
    for each in crowd:
        each.close()
    code, err = program.end(signal.SIGTERM, within_s=3.0)
    assert code == 0
    assert "cannot be started: no socket can be made: Too many open files" in err and "ready again" in err
