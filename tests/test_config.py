"""What can be set: every bound of every field by library, file and flag, and the words of a refusal."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from pipesd import CloudConfig, EdgeConfig, GenerateConfig
from pipesd.config import add_flags, make_config, read_tables
from pipesd.errors import UsageError

KINDS = (EdgeConfig, GenerateConfig, CloudConfig)
ABSENT = {("keys", "text")}  # refused by name: not part of this version
NEEDED = {"top_mass": {"sampling": "picospec"}}  # what an option goes with


def numbers(kind: type) -> Iterator[tuple[str, type, Any, Any]]:
    """The fields of whole and other numbers, with their bounds."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        wanted = {int: int, float: float, int | None: int}.get(hints[f.name])
        if wanted is not None:
            yield f.name, wanted, f.metadata["low"], f.metadata["high"]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def by_library(kind: type, name: str, value: Any) -> Any:
    return getattr(kind(**{**NEEDED.get(name, {}), name: value}), name)


def by_file(kind: type, name: str, value: Any, tmp_path: Path) -> Any:
    text = {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    file = tmp_path / "pipesd.toml"
    file.write_text(f"[table]\n{name} = {text}\n")
    return getattr(make_config(kind, read_tables(str(file), ["table"])["table"], NEEDED.get(name, {})), name)


def by_flag(kind: type, name: str, value: Any) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, kind)
    given = vars(parser.parse_args([f"{flag(name)}={value}"]))
    return getattr(make_config(kind, NEEDED.get(name, {}), given), name)


def every_way(kind: type, name: str, value: Any, tmp_path: Path) -> Iterator[Any]:
    yield lambda: by_library(kind, name, value)
    yield lambda: by_file(kind, name, value, tmp_path)
    yield lambda: by_flag(kind, name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_within_their_own_bounds(kind: type) -> None:
    config = kind()
    for f in fields(kind):
        assert getattr(config, f.name) == f.default
        assert f.metadata["help"] and not f.metadata["help"].endswith("."), f.name
    with pytest.raises(FrozenInstanceError):
        config.draft = "other"
    with pytest.raises(TypeError):
        kind("by position")


@pytest.mark.parametrize(("kind", "name", "wanted", "low", "high"), [(k, *n) for k in KINDS for n in numbers(k)])
def test_both_bounds_are_included_and_nothing_beyond(
    kind: type, name: str, wanted: type, low: Any, high: Any, tmp_path: Path
) -> None:
    assert low is not None, "every number has a least value"
    step: float = 1 if wanted is int else 1e-6
    for bound, sign in ((low, -1), (high, 1)):
        if bound is None:
            continue
        for way in every_way(kind, name, wanted(bound), tmp_path):
            if (name, bound) == ("top_mass", 0):
                continue
            value = way()
            assert value == bound and type(value) is wanted
        for beyond in (bound + sign * step, bound + sign * max(1.0, abs(bound)) * 10):
            for way in every_way(kind, name, wanted(beyond), tmp_path):
                with pytest.raises(UsageError, match=rf"^{flag(name)[2:]}: got .*, wanted ") as error:
                    way()
                assert f"{low}" in str(error.value), "what was wanted is said"


@pytest.mark.parametrize(("kind", "name", "wanted"), [(k, *n[:2]) for k in KINDS for n in numbers(k)])
def test_what_is_no_number_is_refused(kind: type, name: str, wanted: type, tmp_path: Path) -> None:
    for value in (math.nan, math.inf, -math.inf, True, False, "5", [5], 10**400, 1j, b"5"):
        with pytest.raises(UsageError, match=f"^{flag(name)[2:]}: got"):
            by_library(kind, name, value)
    for value in ("nan", "inf", "-inf", "true", '"5"', "[5]", "2020-01-01", "{ a = 1 }"):
        file = tmp_path / "pipesd.toml"
        file.write_text(f"[table]\n{name} = {value}\n")
        with pytest.raises(UsageError, match=f"^{flag(name)[2:]}: got"):
            make_config(kind, read_tables(str(file), ["table"])["table"], {})
    for value in ("nan", "inf", "-inf", "True", "", "abc", "5,5", "0x10"):
        with pytest.raises((UsageError, argparse.ArgumentError), match=flag(name)[2:]):
            by_flag(kind, name, value)
    if wanted is int:
        with pytest.raises(UsageError, match="wanted a whole number"):
            by_library(kind, name, 4.0)
        with pytest.raises(argparse.ArgumentError, match="invalid int value"):
            by_flag(kind, name, "4.0")
    if name not in ("seed", "logprobs"):
        with pytest.raises(UsageError):
            by_library(kind, name, None)


def test_help_names_each_choice_once_and_bounds_that_one_may_hit(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=1000))
    for kind in (EdgeConfig, GenerateConfig):
        add_flags(parser, kind)
    parser.print_help()
    text = capsys.readouterr().out
    for f in (*fields(EdgeConfig), *fields(GenerateConfig)):
        (shown,) = (line for line in text.splitlines() if f"{flag(f.name)} " in line and line.startswith("  --"))
        for choice in filter(None, f.metadata["choices"]):
            assert len(re.findall(rf"\b{choice}(?=[:,]|$| \(default)", shown)) == 1, shown
        if f.name in ("top_mass", "logprobs"):
            assert f"{1 if f.name == 'top_mass' else 0} to {f.metadata['high']}" in shown
    assert "above: a sample" in text


def test_whole_numbers_may_stand_for_others() -> None:
    config = EdgeConfig(connect_s=3)
    assert config.connect_s == 3.0 and type(config.connect_s) is float


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_switches(kind: type, tmp_path: Path) -> None:
    hints = get_type_hints(kind)
    for f in fields(kind):
        if hints[f.name] is bool:
            for way in (lambda n=f.name: by_library(kind, n, True), lambda n=f.name: by_file(kind, n, True, tmp_path)):  # type: ignore[misc]
                assert way() is True
            for value in (1, 0, "true", None):
                with pytest.raises(UsageError, match="wanted true or false"):
                    by_library(kind, f.name, value)
        elif hints[f.name] is str and not f.metadata["choices"] and (f.name, "text") not in ABSENT:
            for way in every_way(kind, f.name, "text", tmp_path):
                assert way() == "text"
            for value in (5, None, b"text", Path("text"), ["text"]):
                with pytest.raises(UsageError, match="wanted a text"):
                    by_library(kind, f.name, value)


def test_choices(tmp_path: Path) -> None:
    for name, choices in (("device", ("auto", "cpu", "cuda")), ("dtype", ("auto", "float32", "bfloat16", "float16"))):
        for choice in choices:
            for way in every_way(CloudConfig, name, choice, tmp_path):
                assert way() == choice
        for wrong in ("", "CPU", "gpu", "float"):
            for way in every_way(CloudConfig, name, wrong, tmp_path):
                with pytest.raises(UsageError, match=f"^{name}: got '{wrong}', wanted one of auto, "):
                    way()


def test_stop_texts(tmp_path: Path) -> None:
    assert GenerateConfig(stop=("a", "b")).stop == ("a", "b")
    assert make_config(GenerateConfig, {"stop": ["a", "b"]}, {}).stop == ("a", "b")
    assert by_file(GenerateConfig, "stop", ["a", "b"], tmp_path) == ("a", "b")
    parser = argparse.ArgumentParser()
    add_flags(parser, GenerateConfig)
    given = vars(parser.parse_args(["--stop", "a", "--stop", "b"]))
    assert make_config(GenerateConfig, {"stop": ["file's"]}, given).stop == ("a", "b")
    for value in ("a", ("a", 5), 5, None):
        with pytest.raises(UsageError, match=r"stop: got .*, wanted a list of texts"):
            make_config(GenerateConfig, {"stop": value}, {})
    with pytest.raises(UsageError, match="a stop text is empty"):
        GenerateConfig(stop=("a", ""))


def test_temperatures() -> None:
    for temperature in (0, 0.0, -0.0, 1e-8, 5e-324, 0.7, 1, 100):
        assert GenerateConfig(temperature=temperature).temperature == temperature
    for temperature in (-1, -1e-9, 100.1, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"^temperature: got .*, wanted 0 to 100$"):
            GenerateConfig(temperature=temperature)


def test_picospec_and_its_top_mass_go_together(tmp_path: Path) -> None:
    assert GenerateConfig(sampling="picospec", top_mass=8).top_mass == 8
    with pytest.raises(UsageError, match=r"^sampling picospec needs top-mass"):
        GenerateConfig(sampling="picospec")
    for method in ("noise", "rejection"):
        with pytest.raises(UsageError, match=f"^top-mass goes with sampling picospec, not with {method}"):
            GenerateConfig(sampling=method, top_mass=8)
    for way in every_way(GenerateConfig, "sampling", "gumbel", tmp_path):
        with pytest.raises(UsageError, match=r"^sampling: got 'gumbel', wanted one of noise, rejection, picospec"):
            way()


BIAS = ((3, -math.inf), (7, 2.5))


@pytest.mark.parametrize(
    "given",
    [
        {3: -math.inf, 7: 2.5},
        {7: 2.5, "3": -math.inf},
        [(7, 2.5), (3, -math.inf)],
        [[7, 2.5], ["3", -math.inf]],
        ("7=2.5", "3=-inf"),
        BIAS,
    ],
)
def test_a_logit_bias_in_every_form_of_the_library(given: Any) -> None:
    assert GenerateConfig(logit_bias=given).logit_bias == BIAS
    assert GenerateConfig(**asdict(GenerateConfig(logit_bias=given))).logit_bias == BIAS, "it can be passed on"


@pytest.mark.parametrize(
    "text",
    [
        "logit-bias = { 3 = -inf, 7 = 2.5 }",
        "logit_bias = [[7, 2.5], [3, -inf]]",
        "logit_bias = ['7=2.5', '3=-inf']",
        "[table.logit-bias]\n7 = 2.5\n3 = -inf",
    ],
)
def test_a_logit_bias_in_every_form_of_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text(f"[table]\n{text}\n")
    table = read_tables(str(file), ["table"])["table"]
    assert make_config(GenerateConfig, table, {}).logit_bias == BIAS
    assert make_config(GenerateConfig, table, {"logit_bias": ["1=1"]}).logit_bias == ((1, 1.0),), "a flag wins"


def test_a_logit_bias_by_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, GenerateConfig)
    given = vars(parser.parse_args(["--logit-bias", "7=2.5", "--logit-bias=3=-inf"]))
    assert make_config(GenerateConfig, {}, given).logit_bias == BIAS


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (5, "got 5, wanted ID=BIAS"),
        ("7=1", "got '7=1', wanted ID=BIAS"),
        (b"7=1", "wanted ID=BIAS"),
        (None, "got None, wanted ID=BIAS"),
        ({1, 2}, "wanted ID=BIAS"),
        ([7], "got 7, wanted ID=BIAS"),
        ([(7,)], r"got \(7,\), wanted ID=BIAS"),
        (["7"], "got '7', wanted ID=BIAS"),
        (["7="], "got '7=', wanted ID=BIAS"),
        (["7=x"], "got '7=x', wanted ID=BIAS"),
        (["x=1"], "got id 'x', wanted a whole number"),
        (["=1"], "got id '', wanted a whole number"),
        (["-1=1"], "got id '-1', wanted a whole number"),
        (["٣=1"], "wanted a whole number"),
        (["9" * 5000 + "=1"], "wanted a whole number"),
        ({-1: 1.0}, "got id -1, wanted a whole number"),
        ({1 << 31: 1.0}, "got id 2147483648, wanted a whole number, 0 to 2147483647"),
        ({True: 1.0}, "got id True"),
        ({1.0: 1.0}, "got id 1.0"),
        ({1: True}, "got True for id 1"),
        ({1: "1"}, "got '1' for id 1"),
        ({1: None}, "got None for id 1"),
        ({1: math.nan}, "got nan for id 1, wanted -1000 to 1000, or -inf"),
        ({1: math.inf}, "got inf for id 1"),
        ({1: 1e9}, "got 1000000000.0 for id 1"),
        ({1: 10**400}, "for id 1, wanted"),
        (["1=nan"], "got nan for id 1"),
        ([(1, 1.0), (1, 1.0)], "got id 1 twice"),
        ({1: 0.5, "1": 0.5}, "got id 1 twice"),
        (dict.fromkeys(range(1025), 0.0), "got 1025 ids, wanted at most 1024"),
    ],
)
def test_what_is_no_logit_bias_is_refused_in_one_line(given: Any, error: str) -> None:
    with pytest.raises(UsageError, match=f"^logit-bias: .*{error}") as refused:
        GenerateConfig(logit_bias=given)
    assert "\n" not in str(refused.value)


def test_what_this_version_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="keys are not part of this version"):
        CloudConfig(keys="folder")


def test_row_invariance_goes_with_one_thread() -> None:
    assert CloudConfig(row_invariant=True).threads == 1
    with pytest.raises(UsageError, match=r"^row-invariant goes with threads 1, not 2"):
        CloudConfig(row_invariant=True, threads=2)


def test_a_tuning_file_has_a_name() -> None:
    with pytest.raises(UsageError, match="tuning: got an empty name"):
        EdgeConfig(tuning="")


def test_options_without_effect_are_named() -> None:
    assert GenerateConfig().without_effect() == []
    idle = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "sampling": "picospec", "top_mass": 2}
    others = {"seed": 3, "presence_penalty": 0.5, "logit_bias": {1: 1.0}, "logprobs": 0}
    assert GenerateConfig(**idle, **others).without_effect() == list(idle)
    assert GenerateConfig(**idle, temperature=1e-8).without_effect() == []
    assert GenerateConfig(**idle, **others).beyond_greedy() == ["presence_penalty", "logit_bias", "logprobs"]
    assert GenerateConfig(temperature=1).beyond_greedy() == ["temperature"]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_options_are_refused_with_a_near_one(kind: type) -> None:
    for f in fields(kind):
        near = f.name + "s"
        with pytest.raises(UsageError, match=f"unknown option '{near}': did you mean '{f.name}'"):
            make_config(kind, {near: 1}, {})
    with pytest.raises(UsageError, match=f"unknown option 'zzz': known are {fields(kind)[0].name}, "):
        make_config(kind, {"zzz": 1}, {})


def test_flags_win_over_the_file_and_absent_flags_do_not() -> None:
    table = {"draft-length": 3, "connect_s": 7}
    config = make_config(EdgeConfig, table, {"draft_length": 5, "something": "else"})
    assert (config.draft_length, config.connect_s, config.patience_s) == (5, 7.0, EdgeConfig().patience_s)


def test_flags_are_never_abbreviated_twice_or_silent(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="test")
    add_flags(parser, EdgeConfig, leave_out=["events"])
    assert vars(parser.parse_args([])) == {}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for f in fields(EdgeConfig):
        assert (flag(f.name) in shown) == (f.name != "events")
    assert (
        "(default 30)" in shown
        and "at most 8192 (default 0)" in shown
        and "(default auto)" in shown
        and "dp, greedy, immediate, none" in shown
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[edge]\ndraft = ", "not TOML"),
        ("[edge]\ndraft = " + "[" * 20000, "nested too deep"),
        ("draft = 'x'\n", "unknown table or key 'draft'.*known are .edge., .generate."),
        ("[cloud]\n", "unknown table or key 'cloud'"),
        ("edge = 5\n", "'edge' in .* must be a table: write .edge."),
        ("[[edge]]\n", "must be a table"),
        ("[edge]\ndraft = 'x'\ndraft = 'y'\n", "not TOML"),
        ("[edge]\nthreads = " + "9" * 5000, "not TOML"),
        (b"[edge]\ndraft = '\xff'\n", "not TOML"),
    ],
)
def test_files_that_are_none(text: str | bytes, error: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=error) as refused:
        read_tables(str(file), ["edge", "generate"])
    assert str(file) in str(refused.value)


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_tables(None, ["edge"]) == {"edge": {}}
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        read_tables(str(tmp_path / "nowhere.toml"), ["edge"])
    with pytest.raises(UsageError, match="directory"):
        read_tables(str(tmp_path), ["edge"])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.toml").write_text("[edge]\nthreads = 2\n")
    assert read_tables("~/own.toml", ["edge", "generate"]) == {"edge": {"threads": 2}, "generate": {}}


def test_numbers_of_other_types_are_taken_as_plain_ones() -> None:
    config = GenerateConfig(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7), top_p=Fraction(1, 4))
    assert [(type(value), value) for value in (config.temperature, config.top_k, config.seed, config.top_p)] == [
        (float, 0.5), (int, 3), (int, 7), (float, 0.25),
    ]  # fmt: skip
    for wrong in (np.float64("nan"), np.True_, np.float64(3.0), np.int64(-1)):
        with pytest.raises(UsageError, match="top-k: got"):
            GenerateConfig(top_k=wrong)


def test_an_option_of_another_table_is_refused_with_the_tables_name() -> None:
    with pytest.raises(UsageError, match=r"option 'temperature' belongs in table \[generate\]"):
        make_config(EdgeConfig, {"temperature": 0.5}, {}, {"generate": GenerateConfig})
    with pytest.raises(UsageError, match="option 'top-p' is given twice, with - and with _"):
        make_config(GenerateConfig, {"top_p": 0.5, "top-p": 0.4}, {})
