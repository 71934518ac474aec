"""The checker of event logs agrees with real runs, and notices every kind of lie in a log."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipesd.cloud.server import CloudServer
from pipesd.config import METHODS, CloudConfig, EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.policy.strategy import PRESETS
from pipesd.sim.check import check_events, check_file, main
from pipesd.sim.distributions import KeyedDistribution, draft_of
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.targets import Fault, ScriptedTarget
from pipesd.sim.texts import KeyedText
from pipesd.sim.tokeniser import ByteTokeniser

LAW = KeyedText()
Event = dict[str, Any]


def record(
    path: Path,
    strategy: str,
    *,
    cuts: int = 0,
    context: int = 2048,
    agreement: float = 0.8,
    floor: float = -math.inf,
    confidence: str = "probability",
    **sampling: Any,
) -> None:
    """Two generations of one session, the first with `cuts` of the link; with `sampling` both models have real
    distributions, with a `floor` for the ids that are not letters."""
    bind = CloudConfig(bind="tcp://127.0.0.1:0")
    law: KeyedText | KeyedDistribution = KeyedDistribution(3, floor=floor) if sampling else LAW
    proposal = draft_of(law, agreement) if isinstance(law, KeyedDistribution) else Agreement(LAW, agreement)
    with (
        CloudServer(bind, target=partial(ScriptedTarget, law, pass_s=0.001)) as cloud,
        LinkProxy(cloud.address) as link,
    ):
        config = EdgeConfig(
            cloud=link.address, strategy=strategy, events=str(path), tuning=str(path) + ".tuning", confidence=confidence
        )
        drafter = ScriptedDrafter(proposal, context=context)
        with EdgeSession(config, drafter=drafter, tokeniser=ByteTokeniser()) as session:
            for i, _ in enumerate(session.generate("the first prompt", max_tokens=60, **sampling), 1):
                if i % 7 == 0 and cuts > 0:
                    cuts -= 1
                    link.cut()
            for _ in session.generate("the first one's sequel", max_tokens=30, stop=["zq"], **sampling):
                pass


@pytest.mark.parametrize("strategy", [name for name in PRESETS if name != "local"])
@pytest.mark.parametrize("cuts", [0, 2])
def test_real_runs_have_no_findings(tmp_path: Path, strategy: str, cuts: int) -> None:
    record(tmp_path / "events", strategy, cuts=cuts)
    assert check_file(tmp_path / "events") == []


@pytest.mark.parametrize("confidence", ["probability", "margin"])
@pytest.mark.parametrize("sampling", METHODS)
def test_sampled_runs_have_no_findings(tmp_path: Path, sampling: str, confidence: str) -> None:
    options = {"seed": 5, "temperature": 1.0, "sampling": sampling, "top_mass": 8 if sampling == "picospec" else 0}
    for strategy, cuts, floor in (("pipesd", 1, -math.inf), ("edgellm", 0, -5.0)):
        path = tmp_path / strategy
        record(path, strategy, cuts=cuts, agreement=0.6, floor=floor, confidence=confidence, **options)
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert check_events(events) == []
        assert any(event["event"] == "redrawn" for event in events) == (sampling != "noise")


def test_a_run_whose_draft_context_ends_has_no_findings(tmp_path: Path) -> None:
    record(tmp_path / "events", "vanilla", context=40)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert any(event["event"] == "without_drafts" for event in events)
    assert check_events(events) == []


def test_a_run_whose_worker_crashes_has_no_findings(tmp_path: Path) -> None:
    """What was asked for and not answered is said again to the next worker, and counts once."""
    path, fault = tmp_path / "events", Fault("raise", at_pass=12, once_file=str(tmp_path / "once"))
    bind = CloudConfig(bind="tcp://127.0.0.1:0")
    with CloudServer(bind, target=partial(ScriptedTarget, LAW, faults=[fault])) as cloud:
        config = EdgeConfig(cloud=cloud.address, strategy="vanilla", events=str(path))
        drafter = ScriptedDrafter(Agreement(LAW, 0.8))
        with EdgeSession(config, drafter=drafter, tokeniser=ByteTokeniser()) as session:
            for _ in session.generate("the only prompt", max_tokens=60):
                pass
            assert session.stats["openings"] > 1
    assert check_file(path) == []


def first(events: list[Event], name: str, fits: Callable[[Event], bool] = lambda event: True) -> Event:
    return next(event for event in events if event["event"] == name and fits(event))


def drop(events: list[Event], event: Event) -> None:
    events.remove(event)


LIES: dict[str, Callable[[list[Event]], Any]] = {
    "a draw left out": lambda e: drop(e, first(e, "drafted")),
    "a draw of another id": lambda e: first(e, "drafted").update(id=1),
    "a probability above 1": lambda e: first(e, "drafted").update(p_draft=1.5),
    "a trigger left out": lambda e: drop(e, first(e, "trigger")),
    "a trigger too early": lambda e: e.insert(e.index(first(e, "drafted")), dict(first(e, "trigger"))),
    "another rule": lambda e: first(e, "trigger").update(rule="token"),
    "a message of other ids": lambda e: first(e, "sent", lambda x: x.get("ids")).update(ids=[1, 2]),
    "a wrong acknowledgement": lambda e: first(e, "sent", lambda x: "known" in x).update(known=3),
    "draft tokens sent unasked": lambda e: first(e, "sent", lambda x: x.get("ids")).update(nav=False),
    "an accepted id that was not drafted": lambda e: first(e, "committed", lambda x: not all(x["accepted"])).update(
        accepted=[True] * len(first(e, "committed", lambda x: not all(x["accepted"]))["ids"])
    ),
    "a commit left out": lambda e: drop(e, first(e, "committed")),
    "no rollback": lambda e: drop(e, first(e, "rollback")),
    "a clock that steps back": lambda e: e[-2].update(t=-1.0),
    "a log that breaks off": lambda e: drop(e, [x for x in e if x["event"] == "end"][-1]),
    **{
        f"a wrong sum of {name}": lambda e, name=name: first(e, "end")["stats"].update({name: 12345})  # type: ignore[misc]
        for name in (
            "tokens drafted accepted navs rounds promoted bytes_up bytes_down openings target_passes verified stale "
            "discarded acceptance_rate acceptance_per_token"
        ).split()
    },
}


def refused(events: list[Event]) -> Event:
    """The verdict before the first refusal."""
    at = events.index(first(events, "refused"))
    return [event for event in events[:at] if event.get("kind") == "Verdict"][-1]


def more_asked(event: Event) -> bool:
    return event.get("tried") is not None


def behind_redrawn(events: list[Event], name: str) -> Event:
    """The first event of that name behind the first draw anew."""
    return first(events[events.index(first(events, "redrawn")) :], name, lambda x: x.get("kind") in (None, "Draft"))


LIES_OF_TESTS: dict[str, Callable[[list[Event]], Any]] = {
    "a refusal that nobody spoke of": lambda e: refused(e).update(rejected=False, refused=None),
    "a refusal that is passed over": lambda e: [drop(e, first(e, name)) for name in ("refused", "redrawn")],
    "a refusal elsewhere": lambda e: first(e, "refused").update(pos=first(e, "refused")["pos"] + 1),
    "less than was told": lambda e: first(e, "refused").update(told=3),
    "proposals of another number": lambda e: first(e, "refused").update(first=7),
    "nothing drawn": lambda e: drop(e, first(e, "redrawn")),
    "an id drawn that was not proposed": lambda e: first(e, "redrawn").update(id=1),
    "another id committed": lambda e: behind_redrawn(e, "committed").update(ids=[1]),
    "what was refused, accepted": lambda e: behind_redrawn(e, "committed").update(accepted=[True]),
    "a branch that lives on": lambda e: drop(e, behind_redrawn(e, "rollback")),
    "a draft in between": lambda e: e.insert(e.index(first(e, "redrawn")), dict(first(e, "drafted"))),
    "what was drawn, not said": lambda e: behind_redrawn(e, "sent").update(
        pos=behind_redrawn(e, "sent")["pos"] + 1,
        ids=behind_redrawn(e, "sent")["ids"][1:],
        p_draft=behind_redrawn(e, "sent")["p_draft"][1:],
    ),
    "a run without tests": lambda e: first(e, "start").update(sampling=None),
    "a probability too few": lambda e: first(e, "sent", lambda x: x.get("p_draft")).update(p_draft=[]),
    "a probability above 1": lambda e: first(e, "sent", lambda x: x.get("p_draft")).update(
        p_draft=[1.5] * len(first(e, "sent", lambda x: x.get("p_draft"))["p_draft"])
    ),
    "more asked for than there were": lambda e: first(e, "sent", more_asked).update(tried=99),
    "more asked for with a draft": lambda e: first(e, "sent", more_asked).update(ids=[1]),
    "more asked for, unasked": lambda e: drop(e, e[e.index(first(e, "sent", more_asked)) - 1]),
    "a margin above 1": lambda e: first(e, "drafted", lambda x: "margin" in x).update(margin=1.5),
    "a wrong sum of refusals": lambda e: first(e, "end")["stats"].update(refusals=99),
    "a wrong sum of proposals": lambda e: first(e, "end")["stats"].update(proposals=9999),
    "another confidence": lambda e: first(e, "start").update(confidence="margin"),
}


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """A run with refusals, some of which took more than the first proposals."""
    path = tmp_path_factory.mktemp("log") / "events"
    record(path, "edgellm", agreement=0.95, floor=-5.0, seed=7, temperature=1.0, sampling="rejection")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lie", LIES_OF_TESTS)
def test_a_lie_about_tests_is_found(tested: list[Event], lie: str) -> None:
    events = copy.deepcopy(tested)
    assert check_events(events) == []
    LIES_OF_TESTS[lie](events)
    assert check_events(events) != []


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("log") / "events"
    record(path, "vanilla", agreement=0.6)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(honest: list[Event], lie: str) -> None:
    events = copy.deepcopy(honest)
    assert check_events(events) == []
    LIES[lie](events)
    assert check_events(events) != []


def test_the_program_tells(tmp_path: Path, honest: list[Event], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events"
    path.write_text("".join(json.dumps(event) + "\n" for event in honest))
    assert main([str(path)]) == 0
    honest_lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in honest_lines if '"event": "trigger"' not in line))
    assert main([str(path)]) == 1
    assert "trigger" in capsys.readouterr().out
    path.write_text("no json\n")
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "absent")]) == 2
