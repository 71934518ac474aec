"""A rule that is broken in a machine breaks what the simulator shows, and what a real pair of models shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from traced import link_of, record_of
from virtual import Scene

from pipesd import CloudConfig, CloudServer, EdgeConfig, EdgeSession, simulate
from pipesd.errors import PipeSDError
from pipesd.policy.accept import Choices
from pipesd.protocol.actions import Action
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import Work
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import Message
from pipesd.sim.check import check_file
from tests.test_broken_rules import (
    ForgetsToRollBack,
    KeepsItsEpoch,
    NeverAcknowledges,
    TrustsItsCache,
)

NOTICED = (AssertionError, KeyError, PipeSDError)
TOKENS = 100
REAL_TOKENS = 16
PATIENCE: dict[str, Any] = {"patience_s": 4.0, "stall_s": 6.0}
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "cloud"},
    {"strategy": "vanilla", "draft_length": 3},
    {"strategy": "edgellm"},
    {"strategy": "pipesd", "tuning": "off", "batching": "immediate"},
]
SCENE = Scene(seed=5, agreement=0.75, delay_s=0.013)
PROMPTS = ([256, 72, 105, 10, 11, 12], [256, 72, 87, 10, 11, 12], [256, 72, 87])


class PromotesBehindARejection(EdgeMachine):
    """What was drafted behind a wrong token stays, one place earlier."""

    def _lose_branch(self) -> list[Action]:
        kept, kept_p = self.draft[1:], self.p_sent[1:]
        actions = super()._lose_branch()
        self.draft, self.p_sent = kept, kept_p
        return actions


class NeverAnswersANav(CloudMachine):
    def work(self) -> list[Work]:
        return [work for work in super().work() if work.rows < 2]


class AcceptsOneTooMany(CloudMachine):
    def done(self, work: Work, choices: Choices, elapsed_s: float, now_s: float) -> list[Message]:
        drafted = work.ids[len(work.ids) - work.rows + 1 :] if work.rows else ()
        if choices.accepted < len(drafted):
            ids = (*choices.ids[: choices.accepted], *drafted[choices.accepted :], choices.ids[-1])
            choices = choices._replace(accepted=choices.accepted + 1, ids=ids)
        return super().done(work, choices, elapsed_s, now_s)


class CountsNoRejection(EdgeMachine):
    """In the statistics."""

    def _lose_branch(self) -> list[Action]:
        actions = super()._lose_branch()
        self.tally.by_position = [[accepted, accepted] for accepted, _ in self.tally.by_position]
        return actions


BROKEN: list[type[EdgeMachine] | type[CloudMachine]] = [
    PromotesBehindARejection, NeverAnswersANav, AcceptsOneTooMany, CountsNoRejection, ForgetsToRollBack, KeepsItsEpoch,
    NeverAcknowledges, TrustsItsCache,
]  # fmt: skip


def install(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if issubclass(broken, EdgeMachine):
        monkeypatch.setattr("pipesd.edge.loop.EdgeMachine", broken)
    else:
        monkeypatch.setattr("pipesd.sim.sim_cloud.CloudMachine", broken)
        monkeypatch.setattr("pipesd.cloud.worker.CloudMachine", broken)


def simulated(folder: Path) -> None:
    """Runs of each kind, held to the records' ids by the simulator and to their event logs here."""
    records = [record_of(SCENE, prompt, TOKENS) for prompt in PROMPTS]
    for number, settings in enumerate(SETTINGS):
        log = str(folder / f"{number}.jsonl")
        simulate(records, link=link_of(SCENE), gamma_s=0.006, pass_s=0.02, max_tokens=TOKENS - 1,
                 settings={**PATIENCE, **settings, "events": log})  # fmt: skip
        assert not check_file(log)
        assert '"event":"deadline"' not in Path(log).read_text(), "somebody has waited in vain, as nothing is lost here"


def test_nothing_is_noticed_where_all_rules_hold(tmp_path: Path) -> None:
    simulated(tmp_path)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda x: x.__name__)
def test_the_simulator_shows_the_broken_rule(broken: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(broken, monkeypatch)
    with pytest.raises(NOTICED):
        simulated(tmp_path)


class RealPair:
    """The demo pair, loaded once, and what its target says behind two prompts."""

    PROMPTS = ("def add(a, b):", "Once upon a time there was")

    def __init__(self, draft: Path, target: Path, folder: Path) -> None:
        from pipesd.cloud.loading import load_target
        from pipesd.edge.drafter import Drafter

        self._folder = folder
        self.drafter, self.target = Drafter(draft), load_target(target, "cpu")
        self.said = self._generate({"strategy": "cloud"}, stall_s=600.0)

    def run(self) -> None:
        for settings in SETTINGS:
            assert self._generate(settings, **PATIENCE) == self.said

    def _generate(self, settings: dict[str, Any], **patience: float) -> list[tuple[int, ...]]:
        log = str(self._folder / f"{len(list(self._folder.iterdir()))}.jsonl")
        with CloudServer(CloudConfig(bind="tcp://127.0.0.1:0", drain_s=0.0), target=self.target) as server:
            config = EdgeConfig(cloud=server.address, events=log, **{**patience, **settings})
            with EdgeSession(config, drafter=self.drafter, tokeniser=self.drafter.tokeniser) as session:
                said = []
                for prompt in self.PROMPTS:
                    for _ in session.generate(prompt, max_tokens=REAL_TOKENS):
                        pass
                    said.append(session.token_ids)
        assert not check_file(log)
        return said


@pytest.fixture(scope="module")
def real_pair(demo_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPair]:
    pytest.importorskip("torch", reason="torch is not installed")
    pair = RealPair(*demo_pair, tmp_path_factory.mktemp("events"))
    yield pair
    pair.drafter.close()


@pytest.mark.model
@pytest.mark.slow
def test_a_real_pair_shows_nothing_where_all_rules_hold(real_pair: RealPair) -> None:
    real_pair.run()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("broken", [each for each in BROKEN if each is not NeverAcknowledges], ids=lambda x: x.__name__)
def test_a_real_pair_shows_the_broken_rule(broken: type, real_pair: RealPair, monkeypatch: pytest.MonkeyPatch) -> None:
    install(broken, monkeypatch)
    with pytest.raises(NOTICED):
        real_pair.run()
