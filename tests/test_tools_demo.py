"""tools/demo: what it refuses, the models that it takes, and what it makes of the answers."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import run_demo
from environment import Environment
from provision import Provision
from workshop import ROOT, Failure

from tests.test_tools import call, one_line

GGUF = b"GGUF" + bytes(60)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nonsense",), "--nonsense"),
        (("--max-tokens", "0"), "'0'"),
        (("--max-tokens", "-3"), "--max-tokens"),
        (("--max-tokens", "many"), "'many'"),
        (("--max-tokens",), "--max-tokens"),
        (("text",), "text"),
        (("--target", "x"), "--target and --draft go together"),
        (("--draft", "x"), "--target and --draft go together"),
    ],
)
def test_the_demo_refuses_what_it_does_not_know(words: tuple[str, ...], named: str, tmp_path: Path) -> None:
    line = one_line(call(ROOT / "tools" / "demo", *words, PIPESD_CACHE=str(tmp_path / "cache")))
    assert named in line
    assert "--help" in line
    assert not (tmp_path / "cache").exists()


def cloud_that(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)


def test_the_address_is_read_from_the_ready_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("loading\nno such model\n")
    with cloud_that("echo a note; echo ready at tcp://127.0.0.1:4242; exec sleep 5") as process:
        assert run_demo.ready_address(process, log, 60.0) == "tcp://127.0.0.1:4242"
        process.kill()
    with cloud_that("exit 2") as process, pytest.raises(Failure, match=r"ended with code 2: no such model"):
        run_demo.ready_address(process, log, 60.0)
    monkeypatch.setattr(run_demo, "STILL_LOADING_S", 0.0)
    with cloud_that("exec sleep 20") as process:
        with pytest.raises(Failure, match="not ready after"):
            run_demo.ready_address(process, log, 0.5)
        process.kill()
    assert "  no such model (0 s so far)" in capsys.readouterr().err


def answer(ids: list[int], passes: int) -> dict[str, object]:
    stats = {"tokens": len(ids), "tpt_ms": 10.0, "target_passes": passes, "verified": 4, "accepted": 3}
    stats |= {"bytes_up": 30, "bytes_down": 60}
    return {"text": "".join(map(str, ids)), "token_ids": ids, "stats": stats}


@pytest.mark.parametrize("same", [True, False])
def test_the_demo_compares_tokens_and_costs(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretend(
        _: Provision, pair: run_demo.Pair, _address: str, prompt: str, strategy: str, max_tokens: int
    ) -> dict[str, object]:
        assert (pair, max_tokens) == (models, 3)
        different = not same and (prompt, strategy) == ("b", "cloud")
        return answer([1, 2, 9] if different else [1, 2, 3], passes=1 if strategy == "pipesd" else 3)

    monkeypatch.setattr(run_demo, "cloud", lambda *_: nullcontext("tcp://127.0.0.1:1"))
    monkeypatch.setattr(run_demo, "answer", pretend)
    here = Provision(tmp_path, Environment(tmp_path), tmp_path)
    models = run_demo.Pair(tmp_path / "t", tmp_path / "d")
    assert run_demo.demonstrate(here, models, ["a", "b"], 3) == (0 if same else 1)
    said = capsys.readouterr().out
    assert ("same tokens" in said) == same
    assert ("THE TOKENS DIFFER" in said) != same
    rows = {line[:31].strip(): line[31:].split() for line in said.splitlines()}
    assert rows["output tokens"] == ["6", "6"]
    assert rows["target passes per output token"] == ["0.33", "1.00"]
    assert rows["draft tokens accepted"] == ["75%", "75%"]
    assert rows["bytes up per output token"] == ["10.0", "10.0"]


def test_a_pair_of_ones_own_is_looked_at_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(GGUF)
    (tmp_path / "page.gguf").write_bytes(b"<!DOCTYPE html>")
    (tmp_path / "empty").mkdir()
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "config.json").write_text("{}")
    for target, draft, said in (
        ("none", "good.gguf", "--target {}/none: there is no such file or folder"),
        ("good.gguf", "none.gguf", "--draft {}/none.gguf: there is no such file"),
        ("empty", "good.gguf", "--target {}/empty: has no config.json"),
        ("light", "good.gguf", "--target {}/light: has no *.safetensors"),
        ("page.gguf", "good.gguf", "--target {}/page.gguf: is no GGUF file"),
        ("good.gguf", "empty", "--draft {}/empty: is no GGUF file"),
    ):
        demo = (ROOT / "tools" / "demo", "--target", target, "--draft", draft)
        line = one_line(call(*demo, cwd=tmp_path, PIPESD_CACHE=str(tmp_path / "cache")))
        assert said.format(tmp_path) in line
    assert not (tmp_path / "cache").exists()


def test_what_is_told_of_a_pair_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(run_demo, "BIG_BYTES", 100)
    (tmp_path / "draft.gguf").write_bytes(GGUF + b"tokenizer.chat_template")
    (tmp_path / "base.gguf").write_bytes(GGUF)
    for i in (1, 2):
        (tmp_path / f"t-0000{i}-of-00002.gguf").write_bytes(GGUF)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))
    pair = run_demo.own_pair("~/t-00001-of-00002.gguf", "~/draft.gguf")
    assert (pair.target, pair.draft) == (tmp_path / "t-00001-of-00002.gguf", tmp_path / "draft.gguf")
    assert (pair.target_bytes, pair.chat) == (2 * 64, True)
    said = capsys.readouterr().err
    assert "target of that size takes minutes" in said and "no chat template" not in said
    pair = run_demo.own_pair(str(folder), "~/base.gguf")
    assert (pair.target_bytes, pair.chat) == (64, False)
    said = capsys.readouterr().err
    assert "takes minutes" not in said and "the draft model has no chat template" in said


def test_a_pair_of_ones_own_needs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def pretend(*_: object, llama: bool, pair: bool) -> nullcontext[Provision]:
        asked.append(pair)
        return nullcontext(Provision(tmp_path, Environment(tmp_path), tmp_path / "pair"))

    used: list[run_demo.Pair] = []
    monkeypatch.setattr(run_demo, "provisioned", pretend)
    monkeypatch.setattr(run_demo, "demonstrate", lambda _, pair, *__: used.append(pair) or 0)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    for words in ([], ["--target", str(tmp_path / "m.gguf"), "--draft", str(tmp_path / "m.gguf")]):
        monkeypatch.setattr(sys, "argv", ["demo", *words])
        assert run_demo.main() == 0
    assert asked == [True, False]
    assert [pair.target for pair in used] == [tmp_path / "pair" / "target.gguf", tmp_path / "m.gguf"]


@pytest.mark.model
def test_the_demo_runs(demo_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Environment(Path(sys.prefix))
    (tmp_path / "logs").mkdir()
    pair = run_demo.own_pair(str(demo_pair[1]), str(demo_pair[0]))
    code = run_demo.demonstrate(Provision(tmp_path, here, tmp_path), pair, ["What is two and two?"], 12)
    said = capsys.readouterr()
    assert code == 0, said
    assert "Both ways gave the same tokens." in said.out
    address = re.search(r"tcp://127\.0\.0\.1:(\d+)", said.err)
    assert address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address[1])), timeout=5)
