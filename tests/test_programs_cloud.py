"""`pipesd-cloud serve` as its users run it: where it listens, what it says and refuses; with a tiny real target."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipesd.address import split_address
from tests.programs import Models, Program, Ran, bad_files, cloud, edge
from tests.scripted_cloud import BEFORE
from tests.test_programs import one_object
from tests.test_programs_signals import address_of

ANY = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def models(models: Models) -> Models:
    pytest.importorskip("torch")
    return models


@pytest.fixture(scope="module")
def real(models: Models) -> Iterator[Program]:
    """The program with its real target."""
    with Program("cloud", "serve", "--model", models.target, "--bind", ANY) as program:
        yield program


def scripted(models: Models, bind: str = ANY, *more: object, **settings: Any) -> Program:
    return Program("cloud", "serve", "--model", models.draft, "--bind", bind, *more, before=BEFORE, **settings)


def ids(ran: Ran) -> list[int]:
    assert ran.code == 0, ran.err
    return list(one_object(ran)["token_ids"])


# ---- both programs together


def test_every_strategy_gives_the_targets_text(models: Models, real: Program) -> None:
    address = address_of(real)
    assert real.out.decode() == f"pipesd-cloud: serving at {address}\n"
    common = ["generate", *models.options, "--prompt", "def f(x):", "--max-tokens", 24, "--json", "--quiet"]
    told = {
        (strategy, length): ids(edge(*common, "--cloud", address, "--strategy", strategy, "--draft-length", length))
        for strategy, length in [("vanilla", 1), ("vanilla", 4), ("vanilla", 8)]
    }
    told["cloud", 0] = ids(edge(*common, "--cloud", address, "--strategy", "cloud"))
    assert len({tuple(each) for each in told.values()}) == 1
    own = ids(edge(*common, "--strategy", "local"))
    assert own != told["cloud", 0], "the pair is too much alike for this test"
    accepted = one_object(edge(*common, "--cloud", address))["stats"]["accepted"]
    assert accepted > 3, "the pair is too different for this test"


@pytest.mark.slow
def test_threads_and_workers(models: Models) -> None:
    """Two workers that hold one session each: two sessions at once."""
    more = ["--workers", 2, "--threads", 2, "--max-sessions", 1]
    with Program("cloud", "serve", "--model", models.target, "--bind", ANY, *more) as program:
        common = ["generate", *models.options, "--prompt", "x", "--max-tokens", 24, "--json", "--quiet"]
        others = [Program("edge", *common, "--cloud", address_of(program)) for _ in range(2)]
        assert [len(ids(other.end())) for other in others] == [24, 24]
        program.send(signal.SIGTERM)
        assert program.end().code == 0


# ---- where it listens


def test_a_port_in_use_and_free_again(models: Models) -> None:
    with scripted(models) as first:
        address = address_of(first)
        port = split_address(address)[1]
        ran = cloud("serve", "--model", models.draft, "--bind", address, before=BEFORE)
        assert (ran.code, ran.out) == (2, "")
        assert f"{address}: port {port} is in use" in ran.complaint
        first.send(signal.SIGTERM)
        assert first.end().code == 0
        with scripted(models, address) as second:
            assert address_of(second) == address
            second.send(signal.SIGTERM)
            assert second.end().code == 0


def test_ipv6(models: Models) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    with scripted(models, "tcp://[::1]:0") as program:
        address = address_of(program)
        assert address.startswith("tcp://[::1]:") and b"open to other machines" not in program.err
        ran = edge("generate", *models.options, "--cloud", address, "--prompt", "x", "--max-tokens", 2, "--quiet")
        assert (ran.code, len(ran.raw)) == (0, 3)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "[::]:0"])
def test_not_open_to_other_machines(models: Models, bind: str) -> None:
    ran = cloud("serve", "--model", models.draft, "--bind", bind)
    assert (ran.code, ran.out) == (2, "")
    assert "nothing is encrypted" in ran.complaint and "--insecure" in ran.complaint


def test_open_to_other_machines_if_asked_for(models: Models) -> None:
    with scripted(models, "tcp://*:0", "--insecure", "--quiet") as program:
        port = split_address(address_of(program), bind=True)[1]
        assert program.err.startswith(b"pipesd-cloud: WARNING: tcp://*:0 is open") and program.err.count(b"\n") == 1
        near = edge("generate", *models.options, "--cloud", f"localhost:{port}", "--prompt", "x", "--max-tokens", 1)
        assert near.code == 0


@pytest.mark.parametrize("bind", ["tcp://192.0.2.1:7421", "tcp://no-such-host.invalid:1", "tcp://127.0.0.1:1"])
def test_addresses_that_cannot_be_bound(models: Models, bind: str) -> None:
    if bind.endswith(":1") and "127" in bind and os.geteuid() == 0:
        pytest.skip("root may bind any port")
    ran = cloud("serve", "--model", models.draft, "--bind", bind, "--insecure", before=BEFORE)
    assert ran.code in (2, 3) and ran.out == ""
    assert bind.removeprefix("tcp://").partition(":")[0] in ran.err.splitlines()[-1]


# ---- what it is sent, what it is given


def test_strangers_do_not_hurt(models: Models, real: Program) -> None:
    address = address_of(real)
    place = split_address(address)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"\xff\0\0\0\0\0\0\0\1\x7f", b"", os.urandom(4096)):
        for _ in range(20):
            with socket.create_connection(place) as stranger:
                stranger.sendall(said)
    common = ["generate", *models.options, "--cloud", address, "--prompt", "x", "--max-tokens", 3, "--quiet"]
    assert edge(*common).code == 0
    assert real.process.poll() is None and b"Traceback" not in real.err
    assert real.out.count(b"\n") == 1


@pytest.mark.slow
def test_files_that_are_no_model(models: Models, tmp_path: Path) -> None:
    files = {**bad_files(tmp_path, models.target.read_bytes()), "nobody": ("~nobody-of-that-name/x", "~nobody-of-that")}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    files["pipe"] = (str(pipe), str(pipe.resolve()))
    for kind in ("missing", "pickle", "page", "half"):
        del files[kind]  # as the others; each takes the time in which torch is loaded
    programs = {kind: Program("cloud", "serve", "--model", given, "--bind", ANY) for kind, (given, _) in files.items()}
    for kind, program in programs.items():
        ran = program.end()
        assert (ran.code, ran.out) == (2, ""), kind
        assert files[kind][1] in ran.complaint, kind


@pytest.mark.slow
def test_the_transformers_backend(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.tiny_hf import write_folder

    folder = write_folder(tmp_path / "target", "olmo2", pad_token_id=0)
    backend = ("--backend", "transformers")
    with Program("cloud", "serve", "--model", folder, "--bind", ANY, *backend) as program:
        for options, why in (  # while the other loads: importing transformers takes seconds
            (["--model", models.target, *backend], "--backend transformers reads Hugging Face folders"),
            (["--model", folder], "--backend transformers may serve it"),
        ):
            ran = cloud("serve", "--bind", ANY, *options)
            assert (ran.code, ran.out) == (2, "") and why in ran.complaint
        words = ["--draft", models.draft, "--cloud", address_of(program), "--prompt", "x", "--max-tokens", 9]
        texts = [
            ids(edge("generate", *words, "--json", "--quiet", "--strategy", name)) for name in ("cloud", "vanilla")
        ]
        assert texts[0] == texts[1] and len(texts[0]) > 1


@pytest.mark.slow
def test_debug_shows_where_an_error_came_from() -> None:
    pytest.importorskip("torch")
    ran = cloud("serve", "--model", "/no/such", "--bind", ANY, "--debug", debug=True)
    assert ran.code == 2 and ran.err.count("Traceback") == 2 and "checkpoint.py" in ran.err


@pytest.mark.slow
def test_a_device_that_is_not_there(models: Models) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    ran = cloud("serve", "--model", models.target, "--bind", ANY, "--device", "cuda")
    assert (ran.code, ran.out) == (2, "") and "cuda" in ran.complaint.lower()


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", pytest.param("2>/dev/full", marks=pytest.mark.slow)])
def test_closed_streams(models: Models, streams: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with scripted(models, address, shell=f"{streams} & trap 'kill $!' TERM; wait $!; wait $!") as program:
        common = ["generate", *models.options, "--cloud", address, "--prompt", "x", "--max-tokens", 3]
        assert edge(*common, "--quiet", "--connect-s", 20).code == 0
        program.send(signal.SIGTERM)
        assert program.end().code == 0
    assert program.err == b""
