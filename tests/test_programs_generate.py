"""`pipesd-edge generate` as its users run it, with a tiny draft model and a cloud on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipesd.sim.check import check_file
from pipesd.sim.texts import KeyedText
from tests.clouds import NOWHERE, CloudProcess, Serving, serving, wait_until
from tests.programs import Models, Program, Ran, bad_files, edge
from tests.test_programs import one_object

PROMPT = "zanzibar xylophone"


def law(models: Models) -> KeyedText:
    """Letters, wider characters, and a byte that begins a character and is left alone."""
    wide = [models.vocabulary.pieces.index(each.encode()) for each in "é你🙂"]
    return KeyedText(3, alphabet=[*b"abcdefgh ", *wide, 0xC3])


def text_of(models: Models, ids: list[int]) -> str:
    return b"".join(models.vocabulary.pieces[each] for each in ids).decode(errors="replace")


@pytest.fixture(scope="module")
def scripted(models: Models) -> Iterator[Serving]:
    """A cloud that says what `law` says, with the draft model's vocabulary."""
    with serving(law(models), target={"vocabulary": models.vocabulary, "context": 400}) as served:
        yield served


@pytest.fixture
def options(models: Models, scripted: Serving) -> list[str]:
    return ["--draft", str(models.draft), "--cloud", scripted.address]


def notes(ran: Ran) -> list[str]:
    """What it said on stderr, without its name."""
    lines = ran.err.splitlines()
    assert all(line.startswith("pipesd-edge: ") for line in lines), ran.err
    return [line.removeprefix("pipesd-edge: ") for line in lines]


# ---- what comes out


def test_text_ids_and_statistics_agree(options: list[str], models: Models, tmp_path: Path) -> None:
    events = tmp_path / "events"
    result = one_object(
        edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 12, "--json", "--events", events, "--seed", 7)
    )
    assert (result["finish_reason"], result["strategy"], result["seed"]) == ("length", "auto", 7)
    assert len(result["token_ids"]) == 12 == result["stats"]["tokens"]
    assert result["stats"]["target_passes"] > 0 and result["stats"]["bytes_up"] > 0
    assert check_file(events) == []
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["kind"] for event in recorded if event["event"] == "sent"][-1] == "Close"
    assert [event["stats"] for event in recorded if event["event"] == "end"] == [result["stats"]]
    plain = edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 12)
    assert (plain.code, plain.out) == (0, result["text"] + "\n")
    assert result["text"] == text_of(models, result["token_ids"])
    assert "12 tokens, length" in notes(plain)[-1]
    quiet = edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 12, "--quiet", "--strategy", "cloud")
    assert (quiet.code, quiet.out, quiet.err) == (0, plain.out, "")


def test_the_three_sources_of_a_prompt(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\r\n")
    common = ["generate", *options, "--max-tokens", 4, "--quiet"]
    given = [
        edge(*common, "--prompt", PROMPT),
        edge(*common, "--file", file),
        edge(*common, stdin=f"{PROMPT}\n"),
    ]
    assert len({ran.out for ran in given}) == 1 and all(ran.code == 0 for ran in given)
    assert edge(*common, stdin=f"{PROMPT}\n\n").out != given[0].out, "only one newline is dropped"


@pytest.mark.parametrize("empty", [["--prompt", ""], []])
def test_an_empty_prompt(options: list[str], empty: list[str]) -> None:
    ran = edge("generate", *options, *empty, "--json", "--quiet")
    assert ran.code == 2 and "the prompt is empty" in ran.complaint
    assert one_object(ran)["finish_reason"] == "error"


def test_one_token_and_stop_texts(options: list[str], models: Models) -> None:
    common = ["generate", *options, "--prompt", PROMPT, "--json", "--quiet"]
    whole = one_object(edge(*common, "--max-tokens", 40))["text"]
    one = one_object(edge(*common, "--max-tokens", 1))
    assert one["text"] == whole[:1] and len(one["token_ids"]) == 1
    stops = [whole[20:23], whole[9:12], "nowhere"]
    first = min(whole.index(stop) for stop in stops[:2])
    stopped = one_object(edge(*common, "--max-tokens", 40, *(f"--stop={stop}" for stop in stops)))
    assert (stopped["text"], stopped["finish_reason"]) == (whole[:first], "stop")
    assert text_of(models, stopped["token_ids"]) == whole[:first]


def test_chat_puts_the_prompt_into_the_template(options: list[str], models: Models) -> None:
    common = ["generate", *options, "--prompt", PROMPT, "--max-tokens", 4, "--quiet"]
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    rendered = edge("generate", *options, "--prompt", text, "--max-tokens", 4, "--quiet")
    assert edge(*common, "--chat").out == rendered.out != edge(*common).out
    assert edge(*common, "--chat", "--system", "be brief").out != rendered.out
    for command in (["generate", "--chat", "--prompt", "x"], ["chat"]):
        ran = edge(*command, "--draft", models.untalkative, "--cloud", options[-1], "--quiet")
        assert ran.code == 2 and "has no chat template" in ran.complaint


def test_strategy_local_needs_no_cloud_and_says_what_it_is(models: Models, tmp_path: Path) -> None:
    events = tmp_path / "events"
    ran = edge(
        "generate", *models.options, "--cloud", NOWHERE, "--strategy", "local", "--prompt", PROMPT, "--max-tokens", 5,
        "--json", "--quiet", "--events", events,
    )  # fmt: skip
    assert ran.code == 0 and one_object(ran)["strategy"] == "local"
    said = notes(ran)
    assert said[0] == "strategy local: this is the draft model's output, not the target's"
    assert said[1:] == ["--cloud has no effect with --strategy local"]
    assert check_file(events) == []


def test_options_without_effect_are_told(options: list[str]) -> None:
    common = ["generate", *options, "--prompt", PROMPT, "--max-tokens", 1, "--quiet"]
    ran = edge(*common, "--top-k", 5, "--top-p", 0.5, "--min-p", 0.1)
    assert ran.code == 0
    assert notes(ran) == [f"--{name} has no effect at temperature 0" for name in ("top-k", "top-p", "min-p")]
    ran = edge(*common, "--strategy", "cloud", "--threads", 1, "--draft-length", 2)
    assert notes(ran) == [f"--{name} has no effect with --strategy cloud" for name in ("draft-length", "threads")]
    assert edge(*common, "--temperature", 0, "--top-k", 0).err == ""


def test_the_configuration_file_is_obeyed(options: list[str], models: Models, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text(
        f"[edge]\ndraft = '{models.draft}'\ncloud = '{options[-1]}'\nstrategy = 'cloud'\n"
        "[generate]\nmax-tokens = 3\nseed = 11\nstop = ['zzz']\n"
    )
    result = one_object(edge("generate", "--config", file, "--prompt", PROMPT, "--json"))
    assert (result["strategy"], result["seed"], len(result["token_ids"])) == ("cloud", 11, 3)
    result = one_object(edge("generate", "--config", file, "--prompt", PROMPT, "--json", "--max-tokens", 2))
    assert len(result["token_ids"]) == 2


def test_prompts_are_in_no_log(options: list[str], tmp_path: Path) -> None:
    events = tmp_path / "events"
    ran = edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 8, "--events", events, "--debug", debug=True)
    assert ran.code == 0
    for word in PROMPT.split():
        assert word not in ran.err and word not in events.read_text()
    long = edge("generate", *options, "--prompt", PROMPT * 40, "--max-tokens", 8)
    assert long.code == 4 and "secret" not in long.err


# ---- what goes wrong


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(options: list[str]) -> None:
    ran = edge("generate", *options, "--prompt", "x" * 500, "--json", "--quiet")
    assert ran.code == 4 and "500 ids" in ran.complaint and "400" in ran.complaint
    assert one_object(ran)["finish_reason"] == "error"


def test_no_cloud(models: Models) -> None:
    common = ["generate", *models.options, "--prompt", PROMPT, "--connect-s", 0.5, "--quiet", "--json"]
    ran = edge(*common, "--cloud", NOWHERE)
    assert ran.code == 3 and "nothing listens there" in ran.complaint and NOWHERE in ran.complaint
    assert one_object(ran)["strategy"] == "auto"
    ran = edge(*common, "--cloud", "no-such-host.invalid:1")
    assert ran.code == 3 and "no-such-host.invalid" in ran.complaint
    assert one_object(ran)["finish_reason"] == "error"


def test_another_vocabulary_is_refused(models: Models) -> None:
    with serving() as other:
        ran = edge("generate", *models.options, "--cloud", other.address, "--prompt", "x", "--json", "--quiet")
    assert ran.code == 4 and "does not fit" in ran.complaint
    assert one_object(ran)["token_ids"] == []


@pytest.mark.parametrize("as_json", [True, False])
def test_lost_in_mid_generation_gives_the_text_so_far(models: Models, tmp_path: Path, as_json: bool) -> None:
    settings: dict[str, Any] = {"vocabulary": models.vocabulary, "pass_s": 0.02}
    with CloudProcess(tmp_path, law(models), **settings) as gone:
        arguments = ["generate", *models.options, "--cloud", gone.address, "--prompt", PROMPT, "--patience-s", "0.5"]
        events = tmp_path / "events"
        more = ["--json"] if as_json else []
        with Program("edge", *arguments, "--max-tokens", 4000, "--quiet", "--events", events, *more) as program:
            wait_until(lambda: events.exists() and events.read_text().count('"committed"') > 3, "a text")
            gone.kill()
            ran = program.end()
    assert ran.code == 3 and "nothing heard from the cloud" in ran.complaint
    if as_json:
        result = one_object(ran)
        assert result["finish_reason"] == "error" and result["stats"]["tokens"] == len(result["token_ids"]) > 3
        assert result["text"]
    else:
        assert ran.out.endswith("\n") and len(ran.out) > 4


def test_files_that_are_no_model(models: Models, tmp_path: Path) -> None:
    for kind, (given, resolved) in bad_files(tmp_path, models.draft.read_bytes()).items():
        as_json = kind in ("home", "cut", "empty", "pickle")
        more = ["--json"] if as_json else ["--strategy", "cloud"]
        ran = edge("generate", "--draft", given, "--cloud", NOWHERE, "--prompt", "x", *more)
        assert ran.code == 2 and resolved in ran.complaint, f"{kind}: {ran.err}"
        assert (one_object(ran)["finish_reason"] == "error") if as_json else ran.out == "", kind
    ran = edge("generate", "--draft", given, "--cloud", NOWHERE, "--prompt", "x", "--debug", debug=True)
    assert ran.code == 2 and "Traceback" in ran.err


# ---- odd streams


@pytest.mark.parametrize(
    ("encoding", "environment"),
    [
        ("cp1252", {"PYTHONIOENCODING": "cp1252"}),
        ("ascii", {"PYTHONIOENCODING": "ascii"}),
        ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("utf-8", {"LC_ALL": "C"}),
    ],
)
def test_narrow_encodings(options: list[str], encoding: str, environment: dict[str, str]) -> None:
    common = ["generate", *options, "--max-tokens", 30, "--quiet", "--prompt", "über"]
    whole, narrow = edge(*common), edge(*common, **environment)
    assert (whole.code, narrow.code, narrow.err) == (0, 0, "")
    assert {"é", "🙂"} < set(whole.out), "a law with wide characters"
    assert narrow.raw == whole.out.encode(encoding, "backslashreplace")
    result = one_object(edge(*common, "--json", **environment))
    assert result["text"] + "\n" == whole.out


def test_a_reader_that_leaves(options: list[str]) -> None:
    ran = edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 300, "--quiet", shell="| head -c 3")
    assert (len(ran.raw), ran.err) == (3, "")
    alone = edge("generate", *options, "--prompt", PROMPT, "--quiet", shell="| true; exit ${PIPESTATUS[0]}")
    assert (alone.code, alone.err) == (130, "")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_full_disk(options: list[str], as_json: list[str]) -> None:
    common = ["generate", *options, "--prompt", PROMPT, "--max-tokens", 8, "--quiet", *as_json]
    ran = edge(*common, shell=">/dev/full")
    assert ran.code == 2 and "the output cannot be written: No space left on device" in ran.complaint
    ran = edge(*common, "--events", "/dev/full")
    assert ran.code == 2 and "/dev/full" in ran.complaint and "No space left" in ran.complaint


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("<&-", True, True),
        ("2>&-", True, False),
        (">&-", False, True),
        ("<&- 2>&-", True, False),
        ("<&- >&- 2>&-", False, False),
    ],
)
def test_closed_streams(options: list[str], closed: str, out: bool, err: bool) -> None:
    ran = edge("generate", *options, "--prompt", PROMPT, "--max-tokens", 8, shell=closed)
    assert (ran.code, bool(ran.out), bool(ran.err)) == (0, out, err)


def test_nothing_is_left_open(options: list[str]) -> None:
    """llama_cpp itself leaves two files open and is not ours to judge."""
    quiet = "import warnings; warnings.filterwarnings('ignore', '.*/dev/null'); "
    ran = edge(
        "generate", *options, "--prompt", PROMPT, "--max-tokens", 8, "--quiet", python=["-X", "dev"], before=quiet
    )
    assert (ran.code, ran.err) == (0, "")


def test_a_folder_that_is_gone(models: Models, tmp_path: Path) -> None:
    """Neither the program nor the child that tries the model needs it."""
    (tmp_path / "gone").mkdir()
    leave = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd()); "
    common = ["generate", "--strategy", "local", "--prompt", "x", "--max-tokens", 1, "--quiet"]
    ran = edge(*common, *models.options, before=leave, XDG_CACHE_HOME=str(tmp_path))
    assert (ran.code, len(ran.raw) > 1) == (0, True)
    (tmp_path / "gone").mkdir()
    ran = edge(*common, "--draft", "here.gguf", before=leave)
    assert ran.code == 2 and "here.gguf" in notes(ran)[-1]
