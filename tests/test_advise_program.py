"""`pipesd-edge advise` as its users run it: what a person reads, what a program reads, and what goes wrong."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.config import EdgeConfig
from pipesd.edge.advise_report import NAMES, PROMPT, Findings, Row, command, describe
from pipesd.sim.advice import Change
from pipesd.sim.texts import KeyedText, RecordedText
from tests.clouds import NOWHERE, PATIENT_S, Serving, serving
from tests.pairs import Make, maker
from tests.programs import Program, Ran, edge

PROMPTS = ["def f(x):", "Once upon", "Question: how"]
TOKENS = 32
QUICK = ["--tokens", str(TOKENS), "--samples", "2", "--link-s", "1", *(w for p in PROMPTS for w in ("--prompt", p))]
PASS_S, TOKEN_S = 0.03, 0.001
EXACT = {"cloud", "vanilla", "hsl", "edgellm", "pipesd"}
LOADING_S = 8 * PATIENT_S  # what a real pair may take, on a machine that is busy


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def draft(make: Make) -> str:
    return str(make())


@pytest.fixture(scope="module")
def agreeing(draft: str) -> Iterator[Serving]:
    """A slow cloud that says what the draft model says, for a while."""
    from pipesd.edge.drafter import Drafter

    model = Drafter(draft, context=256)
    records = []
    for prompt in PROMPTS:
        ids = model.tokeniser.encode(prompt, special=True)
        model.rollback(0)
        model.extend(ids)
        records.append((ids, [model.draft().id for _ in range(2 * TOKENS)]))
    vocabulary = model.vocabulary
    model.close()
    target = {"vocabulary": vocabulary, "context": 800, "pass_s": PASS_S, "token_s": TOKEN_S}
    with serving(RecordedText(records, beyond=KeyedText(3)), target=target) as served:
        yield served


def report(ran: Ran) -> dict[str, Any]:
    """The only thing on stdout."""
    assert ran.out.count("\n") == 1 and ran.out.endswith("\n"), ran.out
    found: dict[str, Any] = json.loads(ran.out)
    assert list(found) == NAMES
    return found


def test_a_person_reads_a_table_and_the_command_to_run(draft: str, agreeing: Serving) -> None:
    ran = edge("advise", "--draft", draft, "--cloud", agreeing.address, *QUICK)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["link", "draft model", "target", "sample"]
    assert "100% guessed right" in lines[1] and f"{3 * TOKENS} tokens behind 3 prompts" in lines[3]
    table = [line.split()[0] for line in lines[6:12]]
    assert set(table[:5]) == EXACT and table[5] == "local" and table[4] == "cloud"
    assert lines[11].endswith("not the target's output")
    assert f"{table[0]} will be fastest" in ran.out or f"{table[0]} looks fastest" in ran.out
    assert " costs the cloud least: " in ran.out and "of what the target alone needs" in ran.out
    assert "above a round trip of " in ran.out.lower() and "tried on 1 prompt and judged on 2 prompts" in ran.out
    words = shlex.split(lines[-1])
    assert words[:2] == ["pipesd-edge", "generate"] and words[words.index("--strategy") + 1] == table[0]
    assert words[-2:] == ["--prompt", PROMPT]
    generated = edge(*words[1:], "--max-tokens", "5", "--json", "--quiet")
    assert generated.code == 0 and json.loads(generated.out)["stats"]["tokens"] == 5
    assert [f"prompt {k} of 3" in ran.err for k in (1, 2, 3)] == [True] * 3 and "simulating a round trip of" in ran.err


def found_out(**values: Any) -> Findings:
    """A run that took no time: hsl before pipesd before cloud, on a round trip of 24 ms."""
    rows = [
        Row(strategy=name, settings={"strategy": name}, tpt_s=tpt_s, interval=(tpt_s, 2 * tpt_s), acceptance=0.7,
            cloud_s_per_1000_tokens=9.0)
        for name, tpt_s in (("hsl", 0.03), ("pipesd", 0.031), ("cloud", 0.06))
    ]  # fmt: skip
    given: dict[str, Any] = {
        "draft": "d.gguf", "cloud": NOWHERE, "link": SimpleNamespace(rtt_s=(0.023, 0.024, 0.03), up=None, down=None),
        "gamma_s": 0.01, "pass_s": 0.05, "token_s": 0.001, "prompts": 6, "tokens": 384, "right": 300, "tuned_on": 2,
        "judged_on": 4, "rows": rows, "lead": (0.97, (0.8, 1.1)), "alike": ("pipesd",), "cheapest": "hsl",
        "command": "c", "rtt_s": 0.024, "most_rtt_s": 1.0,
    }  # fmt: skip
    return Findings(**{**given, **values})


@pytest.mark.parametrize("alike", [True, False])
def test_a_crossing_is_as_doubtful_as_the_two_that_cross(alike: bool) -> None:
    doubt = "(so it may be here: the sample cannot tell)"
    told = describe(found_out(above=Change(0.0448, "pipesd" if alike else "cloud")), ascii_only=False)
    assert f"Above a round trip of about 45 ms {'pipesd' if alike else 'cloud'} would be faster" in told
    assert (doubt in told) == alike
    assert "cannot tell it from pipesd.\n" in told
    assert "cannot tell it from pipesd and cloud.\n" in describe(found_out(alike=("pipesd", "cloud")), ascii_only=False)
    far = describe(found_out(above=Change(0.4321, "cloud"), below=Change(0.00123, "pipesd")), ascii_only=False)
    assert (
        f"Below a round trip of about 1.2 ms pipesd would be faster {doubt}; above a round trip of about 430 ms" in far
    )


def test_the_command_is_for_a_shell_whatever_the_names_are() -> None:
    words = shlex.split(command(EdgeConfig(draft="my models/d $1.gguf", cloud=NOWHERE), {"strategy": "hsl"}))
    assert words[:6] == ["pipesd-edge", "generate", "--draft", "my models/d $1.gguf", "--cloud", NOWHERE]
    assert words[6:] == ["--strategy", "hsl", "--prompt", PROMPT]


def test_a_program_reads_all_that_was_found(draft: str, agreeing: Serving, tmp_path: Path) -> None:
    """Figures in their places; what is said of them follows from them. The file's strategy is not asked for."""
    file = tmp_path / "pipesd.toml"
    file.write_text('[advise]\ntokens = 30\n[edge]\nstrategy = "hsl"\ntoken-threshold = 0.9\n')
    ran = edge(
        "advise", "--draft", draft, "--cloud", agreeing.address, *QUICK[2:], "--config", file, "--json", "--quiet"
    )
    assert (ran.code, ran.err) == (0, "")
    found = report(ran)
    assert found["sample"] == {"prompts": 3, "tokens": 90, "guessed": 1.0, "tuned_on": 1, "judged_on": 2}
    assert found["pass_ms"] + found["token_ms"] >= 1e3 * (PASS_S + TOKEN_S) and found["token_ms"] >= 0.0
    assert found["gamma_ms"] > 0.0
    assert found["link"]["rtt_ms"]["median"] > 0.0 and found["rtt_ms"] > 0.0 and found["target"] == "scripted"
    exact = [row for row in found["strategies"] if row["exact"]]
    assert {row["strategy"] for row in exact} == EXACT and len(found["strategies"]) == 6
    times_ms = [row["tpt_ms"] for row in exact]
    assert times_ms == sorted(times_ms) and found["fastest"] == exact[0]["strategy"]
    assert found["lead"] == pytest.approx(times_ms[0] / times_ms[1], rel=1e-3)
    assert found["clear"] == (found["lead_interval"][1] < 1.0) == (found["runner_up"] not in found["alike"])
    assert set(found["alike"]) <= EXACT - {found["fastest"]}
    costs = {row["strategy"]: row["cloud_s_per_1000_tokens"] for row in exact}
    assert found["cheapest"] == min(costs, key=costs.__getitem__) != "cloud"
    by_name = {row["strategy"]: row for row in found["strategies"]}
    assert by_name["cloud"]["tpt_ms"] == pytest.approx(found["pass_ms"] + found["token_ms"], rel=0.05)
    assert by_name["local"]["tpt_ms"] == pytest.approx(found["gamma_ms"], rel=0.05)
    assert by_name["local"]["cloud_s_per_1000_tokens"] == 0.0
    for row in exact:
        low, high = row["interval_ms"]
        assert low <= row["tpt_ms"] <= high, row
    assert by_name["vanilla"]["settings"]["draft_length"] > 4, "with such drafts long ones are best"
    assert found["change_above"]["rtt_ms"] > found["rtt_ms"] and found["command"].startswith("pipesd-edge generate ")


@pytest.mark.slow
def test_where_drafts_are_never_right_the_cloud_alone_is_advised(draft: str, agreeing: Serving) -> None:
    """Behind another prompt this cloud says what no draft model would."""
    options = ["--tokens", "12", "--samples", "2", "--link-s", "1", "--prompt", "something else"]
    ran = edge("advise", "--draft", draft, "--cloud", agreeing.address, *options)
    assert ran.code == 0 and "0% guessed right" in ran.out
    assert "cloud looks fastest" in ran.out and "costs the cloud least" in ran.out
    assert ran.out.splitlines()[-1].endswith(f"--strategy cloud --prompt '{PROMPT}'")
    assert "judged on 1 prompt," in ran.out


@pytest.mark.parametrize(
    ("given", "code", "complaint"),
    [
        ([], 2, "no draft model: give --draft FILE.gguf"),
        (["--draft", "no/such.gguf"], 2, "no/such.gguf"),
        (["--draft", "DRAFT", "--cloud", NOWHERE, "--connect-s", "0.3"], 3, "nothing listens there"),
        (["--draft", "SWAPPED"], 4, "id 300"),
        (["--draft", "DRAFT", "--tokens", "1"], 2, "tokens: got 1, wanted 8 to 4096"),
        (["--draft", "DRAFT", "--cloud", NOWHERE, "--context", "16"], 2, "ids, the draft model's context is 16, and 8"),
        (["--draft", "DRAFT", "--cloud", NOWHERE, "--prompt", ""], 2, "the prompt is empty"),
        (["--draft", "DRAFT", "--strategy", "hsl"], 2, "unknown option --strategy"),
        (["--draft", "DRAFT", "--policy", "no/such.py"], 2, "no/such.py"),
    ],
)
def test_what_cannot_be_is_one_line(
    make: Make, draft: str, agreeing: Serving, given: list[str], code: int, complaint: str
) -> None:
    files = {"DRAFT": draft, "SWAPPED": str(make(swap=(300, 301)))}
    words = [files.get(word, word) for word in given]
    cloud = [] if "--cloud" in words else ["--cloud", agreeing.address]
    ran = edge("advise", *words, *cloud, "--json", "--quiet")
    assert ran.code == code and complaint in ran.complaint
    found = report(ran)
    assert found["error"] and found["fastest"] is None and found["strategies"] is None


def test_the_fewest_tokens_behind_one_prompt_are_a_sample(draft: str, agreeing: Serving) -> None:
    few = ["--prompt", PROMPTS[0], "--tokens", "8", "--samples", "2", "--link-s", "1"]
    ran = edge("advise", "--draft", draft, "--cloud", agreeing.address, *few, "--json", "--quiet")
    assert ran.code == 0 and report(ran)["sample"]["tokens"] == 8, ran.err


def test_a_target_that_ends_at_once_gives_no_sample(draft: str, agreeing: Serving) -> None:
    from pipesd.edge.tokeniser import Tokeniser

    tokeniser = Tokeniser.open(draft)
    target = {"vocabulary": tokeniser.vocabulary, "context": 800, "end_ids": [97]}
    tokeniser.close()
    with serving(KeyedText(3, alphabet=(97,)), target=target) as served:
        ran = edge("advise", "--draft", draft, "--cloud", served.address, *QUICK, "--json", "--quiet")
    assert ran.code == 2 and "the target ends at once behind every prompt: give others with --prompt" in ran.complaint
    found = report(ran)
    assert found["sample"]["tokens"] == 3 and found["link"]["alpha_ms"] > 0.0, "what was measured is not lost"


@pytest.mark.parametrize(
    ("when", "known"), [("prompt 1 of 3: the target writes", "link"), ("simulating a round", "sample")]
)
def test_an_interruption_keeps_what_was_measured(draft: str, agreeing: Serving, when: str, known: str) -> None:
    options = ["--draft", draft, "--cloud", agreeing.address, *QUICK, "--samples", "900", "--json"]
    with Program("edge", "advise", *options) as program:
        since_s = program.says(when, on="err").send(signal.SIGINT)
        ran = program.end(3.0, since_s=since_s)
    found = report(ran)
    assert ran.code == 130 and found["error"] == "interrupted" and found[known] is not None
    assert found["command"] is None


@pytest.mark.model
def test_the_real_pair_is_advised_what_its_own_figures_say(demo_pair: tuple[Path, Path]) -> None:
    """Consistency alone: a busy machine's figures are its own."""
    draft, target = demo_pair
    with Program("cloud", "serve", "--model", target, "--bind", "tcp://127.0.0.1:0") as cloud:
        address = cloud.says("tcp://", within_s=LOADING_S).out.decode().split()[-1]
        options = ["--tokens", "24", "--samples", "4", "--link-s", "1", "--json", "--quiet"]
        ran = edge("advise", "--draft", draft, "--cloud", address, *options, within_s=LOADING_S)
        assert ran.code == 0, ran.err
        found = report(ran)
        stats = {}
        for strategy in ("cloud", "vanilla"):
            row = next(row for row in found["strategies"] if row["strategy"] == strategy)
            words = [w for k, v in row["settings"].items() for w in (f"--{k.replace('_', '-')}", str(v))]
            said = edge(
                "generate", "--draft", draft, "--cloud", address, "--strategy", strategy, *words, "--prompt",
                "def add(a, b):", "--max-tokens", "48", "--json", "--quiet",
            )  # fmt: skip
            stats[strategy] = json.loads(said.out)["stats"]["tpt_ms"] / row["tpt_ms"]
        cloud.send(signal.SIGTERM)
        cloud.end()
    assert 0.3 < found["sample"]["guessed"] < 1.0 and found["gamma_ms"] < found["pass_ms"] + found["token_ms"]
    assert all(0.1 < ratio < 10.0 for ratio in stats.values()), stats
    assert found["cheapest"] != "cloud", "most drafts of this pair are right"
