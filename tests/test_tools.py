"""The commands of the README as a newcomer meets them, and the parts they are made of."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_wheel
import pytest
import run_tests
import workshop
from workshop import ROOT, Failure

SCRIPTS = [*sorted((ROOT / "tools").iterdir()), ROOT / ".ci" / "run"]


def call(*words: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=60, cwd=cwd, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHON": sys.executable, **variables},
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


# as commands


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.is_file()], ids=lambda path: path.name)
def test_what_is_run_can_be_run_and_nothing_else(path: Path) -> None:
    runnable = bool(path.stat().st_mode & stat.S_IXUSR)
    assert runnable == path.read_bytes().startswith(b"#!")


def test_ci_runs_the_command_of_the_readme_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    assert [line for line in lines[1:] if line and not line.startswith("#")] == [
        'exec "$(dirname -- "$0")/../tools/test"'
    ]


@pytest.mark.parametrize("tool", ["demo", "test"])
def test_help_works_from_anywhere(tool: str, tmp_path: Path) -> None:
    place = tmp_path / "a check out"
    shutil.copytree(ROOT / "tools", place / "tools")
    done = call(place / "tools" / tool, "--help", cwd=Path("/"), PIPESD_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0
    assert f"tools/{tool}" in done.stdout
    assert str(tmp_path / "cache") in re.sub(r"\s+", " ", done.stdout)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("chosen", ["/bin/false", "/no/such/python"])
def test_a_python_that_does_not_fit_is_named(chosen: str) -> None:
    assert f"PYTHON={chosen}" in one_line(call(ROOT / "tools" / "demo", "--help", PYTHON=chosen))


def test_a_machine_without_python_is_told_what_to_install(tmp_path: Path) -> None:
    dirname = shutil.which("dirname")
    assert dirname
    (tmp_path / "dirname").symlink_to(dirname)
    line = one_line(call("/bin/sh", ROOT / "tools" / "test", "--help", PATH=str(tmp_path), PYTHON=""))
    assert "python3-venv" in line


def test_clean_removes_what_the_tools_made_and_nothing_else(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    clean = (ROOT / "tools" / "demo", "--clean")
    assert "nothing" in call(*clean, PIPESD_CACHE=str(cache)).stderr
    for name in ("logs", "environments/one", "wheels", "pair-x", "mine"):
        (cache / name).mkdir(parents=True)
    (cache / "environments/one/link").symlink_to(tmp_path)
    (cache / "pair-x" / "draft.gguf").write_bytes(bytes(3_000_000))
    assert "nothing" in call(*clean, PIPESD_CACHE=str(cache)).stderr  # as long as it is not marked as ours
    assert (cache / "logs").is_dir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPESD_CACHE", str(cache))
        for name in ("logs", "environments", "wheels", "pair-x"):
            with pytest.raises(Failure, match="not made by these tools"):
                workshop.make_cache_folder()
            (cache / name).rename(tmp_path / name)
        workshop.make_cache_folder()
        (cache / "logs").rmdir()
        for name in ("logs", "environments", "wheels", "pair-x"):
            (tmp_path / name).rename(cache / name)
    done = call(*clean, PIPESD_CACHE=str(cache))
    assert done.returncode == 0
    assert "pair-x (3 MB)" in done.stderr
    assert [path.name for path in cache.iterdir()] == ["mine"]
    assert tmp_path.is_dir()


def test_clean_leaves_what_another_run_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPESD_CACHE", str(tmp_path))
    workshop.make_cache_folder()
    with workshop.lock(tmp_path, "use", shared=True):
        assert "another run" in one_line(call(ROOT / "tools" / "demo", "--clean"))
    assert (tmp_path / "logs").is_dir()


# the cache


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIPESD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert workshop.cache_folder() == tmp_path / ".cache" / "pipesd"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert workshop.cache_folder() == Path("/elsewhere/pipesd")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert workshop.cache_folder() == tmp_path / ".cache" / "pipesd"
    monkeypatch.setenv("PIPESD_CACHE", "~/mine")
    assert workshop.cache_folder() == tmp_path / "mine"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIPESD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(Failure, match=r"file/cache cannot be written .*PIPESD_CACHE"):
        workshop.make_cache_folder()


def test_a_second_run_waits_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        with workshop.lock(tmp_path, "prepare"):

            def second() -> float:
                with workshop.lock(tmp_path, "prepare", wait="waiting for the first"):
                    return time.monotonic()

            entered = pool.submit(second)
            time.sleep(0.3)
            left_s = time.monotonic()
        assert entered.result(timeout=20) >= left_s
    assert capsys.readouterr().err == "waiting for the first\n"


# commands with progress


def shell(script: str, log: Path, **more: object) -> None:
    workshop.run(["/bin/sh", "-c", script], log, "a step", **more)  # type: ignore[arg-type]


def test_a_failed_step_gives_its_last_words_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(Failure) as caught:
        shell("echo first; echo the reason >&2; echo; exit 7", log)
    assert str(caught.value) == f"a step failed (the reason); all of its output: {log}"
    assert log.read_text() == "first\nthe reason\n\n"
    with pytest.raises(Failure, match="exit code 7"):
        shell("exit 7", log)


def test_a_step_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workshop, "QUIET_TICK_S", 0.0)
    shell("echo '[3/83] Building'", tmp_path / "log", status=llama_wheel.build_status)
    said = capsys.readouterr().err
    assert "a step: 0 s compiling, step 3 of 83\n" in said
    assert "a step: done in 0 s\n" in said


def test_a_child_left_behind_does_not_hold_the_step_up(tmp_path: Path) -> None:
    start_s = time.monotonic()
    shell("sleep 60 & echo $!", tmp_path / "log")
    assert time.monotonic() - start_s < 20
    wait_until_gone(int((tmp_path / "log").read_text()))


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} lives")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_tool_stops_what_it_started(number: signal.Signals, code: int, tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import workshop
from pathlib import Path
workshop.stop_on_terminate()
try:
    workshop.run(["/bin/sh", "-c", "echo $$; sleep 60 & wait"], Path({str(tmp_path / "log")!r}), "a step")
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    log = tmp_path / "log"
    deadline_s = time.monotonic() + 20
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    wait_until_gone(int(log.read_text()))


def test_pip_settings_reach_pip_and_python_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    variables = workshop.clean_environment(MORE="x")
    assert variables["PIP_NO_INDEX"] == "1"
    assert variables["MORE"] == "x"
    assert variables["PYTHONPATH"] == str(ROOT)
    assert "PYTHONHOME" not in variables


# the tests


def test_the_closing_lines_of_the_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2" time="3"/></testsuites>')
    summary = run_tests.Summary()
    summary.counts.update(run_tests.counted(junit))
    summary.add("default tests", False, 61.0, "exit code 1; all of its output: log")
    assert run_tests.report(summary, 70.0, some_wanted=True) == 1
    said = capsys.readouterr()
    assert said.out == "5 passed, 2 failed, 2 skipped\n"
    assert "failed: default tests" in said.err
    assert "all of its output: log" in said.err


def test_no_test_at_all_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.report(run_tests.Summary(), 1.0, some_wanted=True) == 1
    assert "no test was run" in capsys.readouterr().err
    assert run_tests.counted(Path("/no/such/file")).total() == 0
