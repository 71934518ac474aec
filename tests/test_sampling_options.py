"""Every option with every strategy does what docs/sampling.md says, cell by cell; an option that is obeyed is obeyed at
every position, drafted or not."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clouds import Serving, serving
from sampled import DRAFT, PROMPT_IDS, TARGET, alone, logprobs_of, sampling_edge
from virtual import VOCABULARY, Scene, VirtualWorld

from pipesd.config import GenerateConfig, add_flags
from pipesd.edge.session import EdgeSession
from pipesd.errors import UsageError
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling
from pipesd.policy.strategy import PRESETS, idle_options
from pipesd.sim.distributions import sampled_continuation

TEXT = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text(encoding="utf-8")
COUNT = 24
SEED = 9
BASE = {1.0: {"temperature": 1.0, "seed": SEED}, 0.0: {"temperature": 0.0, "seed": SEED}}

Table = tuple[list[str], dict[str, list[str]]]  # names of strategies; cells by options


def tables() -> dict[float, Table]:
    """The two tables, by the temperature that they are for."""
    found = re.findall(r"((?:^\|.*\|\n)+)", TEXT, re.MULTILINE)[-2:]
    read = {}
    for temperature, table in zip(BASE, found, strict=True):
        head, _, *rows = [
            [cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in table.splitlines()
        ]
        read[temperature] = head[1:], {cells[0]: cells[1:] for cells in rows}
    return read


TABLES = tables()


def options_of(flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, GenerateConfig)
    given = vars(parser.parse_args(shlex.split(flags)))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(TARGET) as served:
        yield served


@pytest.fixture(scope="module", params=PRESETS)
def session(cloud: Serving, request: pytest.FixtureRequest) -> Iterator[EdgeSession]:
    with sampling_edge(
        cloud.address, strategy=request.param, trigger="fixed" if request.param == "auto" else ""
    ) as made:
        yield made


def ids_with(session: EdgeSession, **options: Any) -> list[int]:
    return [token for piece in session.generate(PROMPT_IDS, max_tokens=COUNT, **options) for token in piece.token_ids]


def test_the_tables_have_every_strategy_and_every_option() -> None:
    for names, rows in TABLES.values():
        assert sorted(names) == sorted(PRESETS)
        options = {name for flags in rows for name in options_of(flags)}
        assert options >= {name for name in GenerateConfig.__dataclass_fields__ if name != "max_tokens"} - {
            "temperature"
        }
        assert all(
            set(cells) <= {"yes", "no effect", "refused"} and len(cells) == len(names) for cells in rows.values()
        )


@pytest.mark.parametrize("temperature", BASE)
def test_every_cell_of_the_tables(session: EdgeSession, temperature: float) -> None:
    names, rows = TABLES[temperature]
    base, at, strategy = BASE[temperature], names.index(session.config.strategy), session.strategy
    law = TARGET if strategy.uses_cloud else DRAFT
    plain = ids_with(session, **base)
    assert plain == alone(law, COUNT, **base)
    for flags, cells in rows.items():
        given = options_of(flags)
        options = {**base, **given}
        where = f"{flags} with {strategy.name} at temperature {temperature:g}"
        if cells[at] == "refused":
            with pytest.raises(UsageError) as refused:
                session.generate(PROMPT_IDS, **options)
            assert all(word in str(refused.value) for word in ("logprobs", session.config.strategy) if word in flags), (
                where
            )
            continue
        ids, config = ids_with(session, **options), GenerateConfig(**options)
        told = {*config.without_effect(), *idle_options(strategy, config)} - {"seed"}
        if cells[at] == "no effect":
            assert ids == plain and told == given.keys() - {"seed"}, where
            assert session.stats["sampling"] == ("noise" if temperature else "greedy"), where
            continue
        assert not told & (given.keys() - {"sampling"}), where
        check_obeyed(session, plain, ids, config, given, where)


def check_obeyed(
    session: EdgeSession, plain: list[int], ids: list[int], config: GenerateConfig, given: dict[str, Any], where: str
) -> None:
    law = TARGET if session.strategy.uses_cloud else DRAFT
    if "stop" in given:
        assert session.finish_reason == "stop" and "e" not in session.text, where
        kept = list(session.token_ids)
        assert kept == plain[: len(kept)] and plain[len(kept)] == ord("e"), where
    elif given.get("sampling", "noise") != "noise" and "logprobs" not in given:
        assert session.stats["sampling"] == config.sampling and len(ids) == COUNT, where
    else:
        options = {name: getattr(config, name) for name in GenerateConfig.__dataclass_fields__ if name != "max_tokens"}
        assert ids == alone(law, COUNT, **options), where
        assert (ids == plain) == ("logprobs" in given), f"{where}: as without it"
    if "logprobs" in given:
        direct = logprobs_of(TARGET, ids, config.logprobs or 0)
        assert len(session.logprobs) == len(ids) == len(direct), where
        for said, (own, top) in zip(session.logprobs, direct, strict=True):
            assert said.own == pytest.approx(own, abs=1e-5), where
            assert dict(said.top) == pytest.approx(top, abs=1e-5), where
            assert [value for _, value in said.top] == sorted((value for _, value in said.top), reverse=True)
    else:
        assert session.logprobs == ()


PENALTIES = (
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.9},
)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", BASE)
def test_a_penalty_counts_the_same_for_every_draft_length(
    cloud: Serving, temperature: float, penalty: dict[str, float]
) -> None:
    """Draft tokens in front of a position count, those that were refused do not; every position is counted anew."""
    options = {**BASE[temperature], **penalty}
    direct = alone(TARGET, COUNT, **options)
    assert direct != alone(TARGET, COUNT, **BASE[temperature])
    ways: list[dict[str, Any]] = [{"strategy": "cloud"}]
    ways += [{"strategy": "vanilla", "draft_length": length} for length in (1, 4, 8)]
    for way in ways:
        with sampling_edge(cloud.address, **way) as session:
            assert ids_with(session, **options) == direct, way


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", BASE)
def test_a_penalty_counts_the_same_where_drafting_goes_on_ahead(temperature: float, penalty: dict[str, float]) -> None:
    """In virtual time: tokens that are drafted while a verdict is awaited count those in front of them too."""
    sampler = Sampler(Sampling(temperature=temperature, **penalty), SEED)
    direct = sampled_continuation(TARGET, PROMPT_IDS, 60, sampler, (), VOCABULARY.size)
    scene = Scene(law=TARGET, proposal=DRAFT, edge={"strategy": "pipesd", "tuning": "off"})
    with VirtualWorld(scene).session as session:
        for _ in session.generate(PROMPT_IDS, max_tokens=60, **BASE[temperature], **penalty):
            pass
        assert list(session.token_ids) == direct
        assert session.stats["proactive"] > 20 and session.stats["promoted"] > 0


def test_all_options_together(cloud: Serving) -> None:
    options: dict[str, Any] = {
        "temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.1, "logit_bias": {101: 1.5, 110: float("-inf")}, "seed": 3,
    }  # fmt: skip
    direct = alone(TARGET, 60, **options)
    assert 110 not in direct and 101 in direct
    for strategy in ("vanilla", "pipesd", "cloud"):
        with sampling_edge(cloud.address, strategy=strategy) as session:
            pieces = list(session.generate(PROMPT_IDS, max_tokens=60, **options))
            assert [token for piece in pieces for token in piece.token_ids] == direct
            if strategy != "cloud":
                assert {piece.origin for piece in pieces} == {"accepted", "target"}
