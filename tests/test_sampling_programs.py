"""Sampling as a user of `pipesd-edge` meets it: options, files, refusals, what is printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipesd.sim.check import check_file
from pipesd.sim.distributions import KeyedDistribution
from tests.clouds import NOWHERE, Serving, serving
from tests.programs import Models, edge
from tests.test_programs import one_object
from tests.test_programs_generate import notes

PROMPT = "zanzibar xylophone"


@pytest.fixture(scope="module")
def scripted(models: Models) -> Iterator[Serving]:
    with serving(KeyedDistribution(4), target={"vocabulary": models.vocabulary, "context": 400}) as served:
        yield served


@pytest.fixture
def common(models: Models, scripted: Serving) -> list[str]:
    base = ["generate", "--draft", str(models.draft), "--cloud", scripted.address, "--prompt", PROMPT]
    return [*base, "--max-tokens", "20", "--json"]


def test_a_seed_says_the_same_in_every_process_and_none_is_a_fresh_one(common: list[str]) -> None:
    sampled = [*common, "--quiet", "--temperature", "1"]
    first, cloud, fresh = [
        one_object(edge(*sampled, *more)) for more in (["--seed", "5"], ["--seed", "5", "--strategy", "cloud"], [])
    ]
    assert first["token_ids"] == cloud["token_ids"] != fresh["token_ids"] and first["seed"] == 5
    again = one_object(edge(*sampled, "--seed", fresh["seed"], "--strategy", "vanilla"))
    assert (again["token_ids"], again["seed"]) == (fresh["token_ids"], fresh["seed"])
    assert (first["stats"]["sampling"], first["stats"]["sampling_error"]) == ("noise", None)
    assert "logprobs" not in first


def test_log_probabilities_in_the_object(common: list[str]) -> None:
    result = one_object(edge(*common, "--quiet", "--logprobs", 3, "--temperature", 0.5, "--seed", 1, "--stop", "n"))
    assert result["finish_reason"] == "stop"
    assert len(result["logprobs"]) == len(result["token_ids"]) > 0
    for token, said in zip(result["token_ids"], result["logprobs"], strict=True):
        assert set(said) == {"logprob", "top"} and len(said["top"]) == 3
        values = [value for _, value in said["top"]]
        assert values == sorted(values, reverse=True) and said["logprob"] <= values[0] <= 0
        assert [token, said["logprob"]] in said["top"] or said["logprob"] <= values[-1]
    alone = one_object(edge(*common, "--quiet", "--logprobs", 0))
    assert [set(said) for said in alone["logprobs"]] == [{"logprob", "top"}] * 20
    assert all(said["top"] == [] for said in alone["logprobs"])
    wide = one_object(edge(*common, "--quiet", "--logprobs", 20, "--max-tokens", 2))
    assert {len(said["top"]) for said in wide["logprobs"]} == {13}, "ids that cannot occur are left out"


def test_methods_that_test(common: list[str], tmp_path: Path) -> None:
    events = tmp_path / "events"
    tested = [*common, "--quiet", "--temperature", "1", "--events", events, "--strategy", "vanilla"]
    result = one_object(edge(*tested, "--sampling", "rejection"))
    assert result["stats"]["sampling"] == "rejection" and result["stats"]["refusals"] > 0
    assert check_file(events) == []
    result = one_object(edge(*tested, "--sampling", "picospec", "--top-mass", 3))
    assert result["stats"]["sampling"] == "picospec" and 0 < result["stats"]["sampling_error"] < 1
    assert check_file(events) == []


def test_options_from_a_file(common: list[str], tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text(
        "[edge]\nconfidence = 'margin'\n[generate]\ntemperature = 0.7\nseed = 3\nfrequency-penalty = 0.5\n"
        "logit-bias = { 101 = 4, 116 = -inf }\nlogprobs = 0\n"
    )
    by_file = one_object(edge(*common, "--quiet", "--config", file))
    flags = ["--temperature", "0.7", "--seed", "3", "--frequency-penalty", "0.5", "--logprobs", "0"]
    bias = ["--logit-bias", "101=4", "--logit-bias", "116=-inf"]
    by_flags = one_object(edge(*common, "--quiet", *flags, *bias))
    assert by_file["token_ids"] == by_flags["token_ids"] and by_file["logprobs"] == by_flags["logprobs"]
    assert 101 in by_file["token_ids"] and 116 not in by_file["token_ids"]


REFUSED = [
    (["--temperature", "-1"], "temperature: got -1.0, wanted 0 to 100"),
    (["--temperature", "nan"], "temperature: got nan, wanted 0 to 100"),
    (["--top-k", "-1"], "top-k: got -1, wanted 0 to"),
    (["--top-p", "1.5"], "top-p: got 1.5, wanted 0 to 1"),
    (["--min-p", "inf"], "min-p: got inf, wanted 0 to 1"),
    (["--repetition-penalty", "0"], "repetition-penalty: got 0.0, wanted 0.01 to 10"),
    (["--presence-penalty", "3"], "presence-penalty: got 3.0, wanted -2 to 2"),
    (["--frequency-penalty", "nan"], "frequency-penalty: got nan, wanted -2 to 2"),
    (["--logit-bias", "5"], "logit-bias: got '5', wanted ID=BIAS"),
    (["--logit-bias", "5=1", "--logit-bias", "5=2"], "logit-bias: got id 5 twice"),
    (["--logprobs", "21"], "logprobs: got 21, wanted 0 to 20"),
    (["--sampling", "rejection", "--top-mass", "4"], "top-mass goes with sampling picospec, not with rejection"),
    (["--sampling", "picospec"], "sampling picospec needs top-mass"),
    (
        ["--sampling", "rejection", "--logprobs", "1", "--temperature", "1"],
        "logprobs do not go with sampling rejection",
    ),
    (["--strategy", "local", "--logprobs", "1"], "logprobs are the target's, which strategy local does without"),
    (["--confidence", "none"], "confidence: got 'none', wanted one of probability, margin"),
]


@pytest.mark.parametrize(("flags", "error"), REFUSED, ids=lambda each: " ".join(each) if isinstance(each, list) else "")
def test_what_cannot_be_had_is_refused_by_name_before_anything_is_loaded(flags: list[str], error: str) -> None:
    """Neither model nor cloud is there."""
    ran = edge("generate", "--draft", "/no/such.gguf", "--cloud", NOWHERE, "--prompt", "x", "--json", *flags)
    assert ran.code == 2 and error in "\n".join(notes(ran)[-1:]), ran.err
    assert one_object(ran)["finish_reason"] == "error"


def test_a_bias_outside_the_vocabulary(common: list[str], models: Models) -> None:
    ran = edge(*common, "--quiet", "--logit-bias", f"{models.vocabulary.size}=1")
    assert ran.code == 2 and f"outside the vocabulary of {models.vocabulary.size} ids" in ran.complaint
    assert one_object(ran)["token_ids"] == []


def test_what_has_no_effect_is_told(common: list[str]) -> None:
    ran = edge(*common, "--quiet", "--sampling", "picospec", "--top-mass", 2, "--seed", 3)
    assert notes(ran) == [f"--{name} has no effect at temperature 0" for name in ("sampling", "top-mass")]
    ran = edge(*common, "--quiet", "--sampling", "rejection", "--temperature", 1, "--strategy", "cloud")
    assert notes(ran) == ["--sampling has no effect with --strategy cloud"]
    ran = edge(*common[:-1], "--quiet", "--logprobs", 1)
    assert notes(ran) == ["--logprobs has no effect without --json"] and ran.out
    ran = edge(*common, "--quiet", "--confidence", "margin", "--strategy", "vanilla")
    assert notes(ran) == ["--confidence has no effect with --strategy vanilla"]


def test_chat_samples_turn_after_turn(models: Models, scripted: Serving) -> None:
    arguments = ["chat", *models.options, "--cloud", scripted.address, "--max-tokens", 8, "--temperature", 1, "--quiet"]
    chatted = edge(*arguments, "--seed", 4, "--logprobs", 1, stdin="one\none\n")
    assert notes(chatted) == ["--logprobs has no effect in a chat"]
    first, second = chatted.out.splitlines()
    assert first != second, "the noise goes on where the last turn ended"
    assert edge(*arguments, "--seed", 4, stdin="one\n").out == first + "\n"


def test_the_line_of_statistics_has_the_seed_of_a_sample(common: list[str]) -> None:
    arguments = [each for each in common if each != "--json"]
    sampled, greedy = edge(*arguments, "--temperature", 0.8), edge(*arguments)
    seed = int(notes(sampled)[-1].rpartition(", seed ")[2])
    assert seed < 1 << 53, "readers of JSON that know no whole numbers keep it"
    assert edge(*arguments, "--temperature", 0.8, "--seed", seed).out == sampled.out
    assert "seed" not in notes(greedy)[-1]


def test_log_probabilities_that_nobody_sees_do_not_travel(common: list[str]) -> None:
    arguments = [*(each for each in common if each != "--json"), "--strategy", "cloud"]
    without, unseen = edge(*arguments), edge(*arguments, "--logprobs", 20)
    assert "--logprobs has no effect without --json" in unseen.err
    assert down(unseen.err) < 2 * down(without.err), "twenty times as much would be"


def down(err: str) -> int:
    """Bytes that came down, by the line of statistics."""
    return int(err.partition(" bytes up, ")[2].split()[0])
