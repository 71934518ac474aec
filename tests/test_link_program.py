"""`pipesd-edge link` as its users meet it: a real cloud over an emulated link, files, failures, interrupts."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipesd.protocol.messages import Error, ErrorCode, Message, Probe
from pipesd.sim.proxy import LinkProxy
from tests.clouds import NOWHERE, FakeCloud, serving, wait_until
from tests.links import answered
from tests.programs import ENDS_S, Program, Ran, edge

NAMES = (
    "alpha_ms beta_ms gap_ms latency_ms jitter_ms rtt_ms up_mbps down_mbps intervals r2 beta_known spread_enough "
    "codec_ms token_bytes probes lost took_s error"
).split()
BRIEFLY = ["--seconds", "1", "--repeats", "5"]
TRIES = 4  # on a busy machine so few repeats may not tell a bandwidth


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cloud with a scripted target, 5 ms away, 20 Mbit/s up and 100 down."""
    with (
        serving() as cloud,
        LinkProxy(cloud.address, delay_s=0.005, up_bytes_per_s=2.5e6, down_bytes_per_s=12.5e6) as link,
    ):
        yield link.address


def one_object(ran: Ran) -> dict[str, Any]:
    assert ran.out.endswith("\n") and ran.out.count("\n") == 1, ran.out
    result = json.loads(ran.out)
    assert list(result) == NAMES
    return dict(result)


def failed(ran: Ran, code: int) -> str:
    """What the only object on stdout says of a failure: the line of stderr, if it was said there too."""
    result = one_object(ran)
    error = result.pop("error")
    assert ran.code == code and set(result.values()) == {None}
    return str(error)


# ---- what it prints


def test_json_is_one_object_with_every_figure(address: str) -> None:
    for _ in range(TRIES):
        ran = edge("link", "--cloud", address, *BRIEFLY, "--json", "--quiet")
        assert (ran.code, ran.err) == (0, "")
        result = one_object(ran)
        assert result["error"] is None
        if result["up_mbps"] is not None and result["down_mbps"] is not None:
            break
    assert 4.9 < result["alpha_ms"] < 15 and result["beta_ms"] >= 0 and 0 <= result["gap_ms"] <= result["alpha_ms"]
    assert 4.9 < result["latency_ms"] < 10 and result["jitter_ms"] >= 0
    rtt = result["rtt_ms"]
    assert 9.9 < rtt["min"] <= rtt["median"] <= rtt["p95"]
    assert 10 < result["up_mbps"] < 30 and 50 < result["down_mbps"] < 150, "with a wide margin: the machine may be busy"
    for name, interval in result["intervals"].items():
        assert interval is None or interval[0] <= result[name] * 1.0001
    assert result["probes"] > 50 and result["lost"] == 0 and 0 <= result["r2"] <= 1 and result["codec_ms"] > 0


def test_a_person_reads_a_table_and_a_plot(address: str) -> None:
    ran = edge("link", "--cloud", address, *BRIEFLY, "--gamma-ms", "7", COLUMNS="80", PYTHONIOENCODING="utf-8")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"link to {address}: ") and "none lost" in lines[0]
    names = "alpha beta gap latency jitter round up down codec".split()
    assert [line.split()[0] for line in lines[2:12] if line.strip() and line[0] != " "] == names
    assert "●" in ran.out and "32 draft tokens" in ran.out
    assert lines[-1].startswith("plan: at 7 ms a draft token, 20 of them go in")
    narrow = edge("link", "--cloud", address, *BRIEFLY, "--quiet", COLUMNS="30", PYTHONIOENCODING="ascii")
    assert narrow.out.isascii() and "32 draft tokens" not in narrow.out and "\\" not in narrow.out


@pytest.mark.slow
def test_progress_at_a_terminal_is_wiped_and_elsewhere_is_a_line_a_second(address: str) -> None:
    ours, theirs = pty.openpty()
    ran = edge("link", "--cloud", address, "--seconds", "2", "--json", shell=f"2>{os.ttyname(theirs)}")
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 0)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:
            break  # the other end is closed
    os.close(ours)
    assert ran.code == 0 and one_object(ran)["error"] is None
    assert b"\rmeasuring the link: probes, " in seen and seen.endswith(b"\r" + b" " * 60 + b"\r")
    piped = edge("link", "--cloud", address, "--seconds", "2", "--json")
    lines = piped.err.splitlines()
    assert 0 < len(lines) <= piped.took_s and all("measuring the link: " in line for line in lines)


# ---- slow beginnings


def test_slow_first_probes_are_no_figures() -> None:
    """The link is 50 times as slow until three probes have crossed."""
    heard: list[Probe] = []

    def answer(message: Message) -> list[Message | bytes]:
        assert isinstance(message, Probe)
        heard.append(message)
        if len(heard) == 3:
            link.change(delay_s=0.002)
        return [answered(message)]

    with FakeCloud(answer) as cloud, LinkProxy(cloud.address, delay_s=0.1) as link:
        result = one_object(edge("link", "--cloud", link.address, "--json", "--quiet", "--seconds", "2"))
    assert 1.9 < result["alpha_ms"] < 15 and result["rtt_ms"]["p95"] < 100
    frames = {len(probe.payload) for probe in heard if probe.reply_bytes == 0}
    assert min(frames) > 5, "no frame of a byte or so"


# ---- saving


def test_what_is_saved_is_what_plan_reads(address: str, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text("# at home\n[edge]\nthreads = 3  # few\n\n[plan]\nwindow = 12\nbeta_ms = 9 # a guess\n")
    ran = edge("link", "--cloud", address, *BRIEFLY, "--json", "--save", file)
    result = one_object(ran)
    assert ran.code == 0 and f"alpha, beta and gap are in table [plan] of {file}" in ran.err
    text = file.read_text()
    assert text.startswith("# at home\n[edge]\nthreads = 3  # few\n\n[plan]\nwindow = 12\nbeta-ms = ")
    assert "# a guess" in text
    plan = tomllib.loads(text)["plan"]
    assert plan == {
        "window": 12, "alpha-ms": result["alpha_ms"], "beta-ms": result["beta_ms"], "gap-ms": result["gap_ms"]
    }  # fmt: skip
    planned = edge("plan", "--config", file, "--gamma-ms", "10", "--json")
    assert planned.code == 0 and sum(json.loads(planned.out)["batches"]) == 12


def test_a_file_that_is_no_toml_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary")
    ran = edge("link", "--cloud", NOWHERE, "--save", file, "--json")
    assert "not TOML" in failed(ran, 2) and "not TOML" in ran.complaint
    assert file.read_text() == "dear diary" and ran.took_s < 5


def test_a_measurement_that_fails_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    ran = edge("link", "--cloud", NOWHERE, "--connect-s", "0.3", "--save", file)
    assert ran.code == 3 and not file.exists()


def test_what_cannot_be_saved_any_more_is_shown_all_the_same(address: str, tmp_path: Path) -> None:
    full = "import os; os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(28, 'No space left')); "
    ran = edge("link", "--cloud", address, *BRIEFLY, "--json", "--quiet", "--save", tmp_path / "a.toml", before=full)
    result = one_object(ran)
    assert ran.code == 2 and result["alpha_ms"] > 4.9 and "No space left; save it elsewhere" in result["error"]
    assert result["error"] in ran.complaint and not list(tmp_path.iterdir())


# ---- configuration


def test_address_and_settings_come_from_the_file_too(address: str, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text(f'[edge]\ncloud = "{address}"\n[link]\nseconds = 1\nrepeats = 5\n[plan]\nwindow = 3\n')
    ran = edge("link", "--config", file, "--json", "--quiet")
    assert ran.code == 0 and one_object(ran)["took_s"] < 8
    file.write_text("[link]\nsecond = 1\n")
    ran = edge("link", "--config", file)
    assert ran.code == 2 and "unknown option 'second': did you mean 'seconds'?" in ran.complaint


# ---- failures


def test_nobody_there() -> None:
    ran = edge("link", "--cloud", NOWHERE, "--connect-s", "0.3", "--json")
    error = failed(ran, 3)
    assert "nothing listens there; start pipesd-cloud, or check the port (waited 0.3 s)" in error
    assert error in ran.complaint
    assert edge("link", "--cloud", NOWHERE, "--connect-s", "0.3").out == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--repeats", "2"], "repeats: got 2, wanted 3 to 10000"),
        (["--seconds", "nan"], "seconds: got nan, wanted 1 to 3600"),
        (["--token-bytes", "65537"], "token-bytes: got 65537, wanted 0 to 65536"),
        (["--cloud", "127.0.0.1"], "127.0.0.1"),
        (["stray"], "an argument belongs to no option"),
    ],
)
def test_wrong_use(flags: list[str], says: str) -> None:
    ran = edge("link", *flags, "--json")
    assert says in ran.complaint
    assert failed(ran, 2)


def test_the_cloud_refuses() -> None:
    with FakeCloud(lambda message: [Error(0, 0, ErrorCode.FULL, "no room")]) as cloud:
        ran = edge("link", "--cloud", cloud.address, "--json")
    assert failed(ran, 4) == "the cloud refuses: no room" and "no room" in ran.complaint


@contextmanager
def under_way(address: str, *more: str) -> Iterator[Program]:
    with Program("edge", "link", "--cloud", address, "--seconds", "60", "--repeats", "10000", *more) as program:
        yield program.says("measuring the link: ", on="err")


def test_a_link_that_is_cut_for_good() -> None:
    with (
        serving() as cloud,
        LinkProxy(cloud.address, delay_s=0.002) as link,
        under_way(link.address, "--json") as program,
    ):
        link.refuse()
        link.cut()
        ran = program.end()
    assert "the link was lost while it was measured: " in failed(ran, 3)


@pytest.mark.slow
def test_a_link_that_is_cut_and_comes_back() -> None:
    """What was under way is lost and counted; what is measured stays right."""
    with serving() as cloud, LinkProxy(cloud.address, delay_s=0.002) as link:
        with Program(
            "edge", "link", "--cloud", link.address, "--seconds", "4", "--repeats", "10000", "--json"
        ) as program:
            program.says("probes,", on="err")
            link.cut()
            ran = program.end()
    result = one_object(ran)
    assert ran.code == 0 and result["lost"] > 0 and 1.9 < result["alpha_ms"] < 15


@pytest.mark.parametrize(("number", "as_json"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_interrupted(address: str, number: signal.Signals, as_json: bool, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    with under_way(address, "--save", str(file), *["--json"] * as_json) as program:
        ran = program.end(ENDS_S, since_s=program.send(number))
    if as_json:
        assert failed(ran, 130) == "interrupted"
    assert (ran.code, file.exists()) == (130, False) and (as_json or ran.out == "")


def test_interrupted_while_nobody_answers() -> None:
    with FakeCloud(lambda message: []) as cloud:
        with Program("edge", "link", "--cloud", cloud.address, "--connect-s", "60", "--json") as program:
            wait_until(lambda: bool(cloud.heard), "a probe")
            ran = program.end(ENDS_S, since_s=program.send(signal.SIGINT))
    assert failed(ran, 130) == "interrupted"
