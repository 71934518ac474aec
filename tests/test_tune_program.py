"""`pipesd-edge tune` as its users run it: what it says, what it writes, what it refuses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipesd.sim.texts import KeyedText
from tests.clouds import NOWHERE, Serving, serving
from tests.programs import Models, edge
from tests.test_programs import one_object

QUICK = ["--samples", "3", "--tokens", "10"]


@pytest.fixture(scope="module")
def scripted(models: Models) -> Iterator[Serving]:
    with serving(KeyedText(3), target={"vocabulary": models.vocabulary, "context": 800}) as served:
        yield served


@pytest.fixture
def options(models: Models, scripted: Serving) -> list[str]:
    return ["--draft", str(models.draft), "--cloud", scripted.address]


def test_it_reports_and_writes_what_another_command_takes(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text("# mine\n[generate]\nmax-tokens = 7\n\n[edge]\nconnect-s = 9.0 # slow\n")
    ran = edge("tune", *options, *QUICK, "--save", file)
    assert ran.code == 0 and "ms per token expected" in ran.out
    assert [f"{k} of 3: sequence threshold" in ran.err for k in (1, 2, 3)] == [True] * 3
    written = tomllib.loads(file.read_text())
    assert written["generate"] == {"max-tokens": 7} and "# mine" in file.read_text()
    table = written["edge"]
    assert table["connect-s"] == 9.0 and table["strategy"] == "auto"
    assert 0.0 < table["sequence_threshold"] <= table["token_threshold"] <= 1.0
    result = one_object(edge("generate", *options, "--config", file, "--prompt", "x", "--json"))
    assert result["stats"]["tokens"] == 7


def test_json_is_one_object_with_every_trial(options: list[str]) -> None:
    ran = edge("tune", *options, *QUICK, "--json", "--quiet", "--strategy", "hsl", "--prompt", "abc")
    report = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert (report["strategy"], report["trigger"], report["samples"], len(report["trials"])) == ("hsl", "token", 3, 3)
    assert report["trials"][0] == {**report["first"], "tpt_ms": report["trials"][0]["tpt_ms"]}
    assert set(report["best"]) == {"token_threshold"} and report["tpt_ms"] > 0


def test_draft_lengths_are_whole(options: list[str]) -> None:
    report = json.loads(edge("tune", *options, *QUICK, "--json", "--quiet", "--strategy", "vanilla").out)
    assert all(isinstance(trial["draft_length"], int) for trial in report["trials"])


@pytest.mark.parametrize(
    "given, complaint",
    [
        (["--strategy", "cloud"], "strategy cloud has nothing to tune"),
        (["--trigger", "gain"], "trigger gain has nothing to tune"),
        (["--samples", "1"], "samples: got 1, wanted 2 to 1000"),
        (["--file", "no/such/file"], "prompt file no/such/file"),
        (["--tuning", "off"], "unknown option --tuning"),
        (["--save", "/dev/null/x"], "configuration file /dev/null/x"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], given: list[str], complaint: str) -> None:
    ran = edge("tune", *options, *given)
    assert (ran.code, ran.out) == (2, "") and complaint in ran.complaint


def test_no_cloud(models: Models) -> None:
    ran = edge("tune", "--draft", models.draft, "--cloud", NOWHERE, "--connect-s", "0.3", "--json", "--quiet")
    assert ran.code == 3 and "nothing listens there" in ran.complaint
    assert json.loads(ran.out)["error"]
