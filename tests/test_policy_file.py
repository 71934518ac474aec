"""A user's own policy in one file: what it may say, where it runs, what goes wrong in it, and what it cannot change."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pipesd.config import BATCHINGS, EdgeConfig
from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.policy.plugin import load_policy
from pipesd.policy.search_space import Parameter
from pipesd.policy.strategy import make_strategy, make_trigger, without_effect
from pipesd.policy.tuner import Tuner
from pipesd.policy.tuning import Tuning, point_of, settings_of, space_of, values_of
from pipesd.sim.check import check_file
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace
from tests.clouds import serving
from tests.programs import Models
from tests.test_batch_program import here, results
from tests.test_programs_generate import law
from tests.virtual import Scene, VirtualWorld

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "bench" / "policies" / "example.py"
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROMPT = "hello there"

HEAD = "from pipesd.policy.plugin import *\nimport random, sys\nchance = random.Random(5)\n"
TRIGGER = HEAD + "class T(BaseTrigger):\n    def observe(self, p, h=0.0):\n        {}\n"  # the body is in line 6
MAKE = "POLICY = Policy(name='mine', trigger=T, {})\n"


def policy(folder: Path, observe: str = "return None", more: str = "", rest: str = "", name: str = "mine.py") -> str:
    """A file with this body of `observe`, further arguments of `Policy`, and further lines before it."""
    file = folder / name
    file.write_text(TRIGGER.format(observe) + rest + MAKE.format(more), encoding="utf-8")
    return str(file)


def generated(settings: dict[str, Any], tokens: int = 80, **options: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Ids and statistics of the real session in virtual time."""
    with VirtualWorld(Scene(edge=settings)).session as session:
        for _ in session.generate(PROMPT, max_tokens=tokens, **options):
            pass
    return session.token_ids, session.stats


# ---- the page


def test_the_example_is_that_of_the_page() -> None:
    assert BLOCKS[0] == EXAMPLE.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in BLOCKS[0].splitlines()[1:] if not line.startswith('"')) <= 10


@pytest.mark.parametrize("block", [block for block in BLOCKS if "POLICY" in block], ids=lambda block: block[-30:-2])
def test_the_policies_of_the_page_run(block: str, tmp_path: Path) -> None:
    file, events = tmp_path / "policy.py", tmp_path / "events"
    file.write_text(block, encoding="utf-8")
    ids, stats = generated({"policy": str(file), "events": str(events), "tuning": str(tmp_path / "t.json")})
    assert ids == generated({"strategy": "cloud"})[0]
    rules = set(re.findall(r'return "(\w+)" if', block))
    assert rules & set(stats["triggers"]) and set(stats["triggers"]) <= rules | {"must"}
    assert check_file(events) == []


def test_the_simulation_of_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in BLOCKS if "POLICY" not in block)
    monkeypatch.chdir(ROOT)
    exec(compile(block, "docs/policy.md", "exec"), {})
    assert "'doubt': " in capsys.readouterr().out


# ---- what a file may say


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing is called POLICY"),
        ("POLICY = 5", "POLICY is a int"),
        ("x = (\n1", r"line 1: '\(' was never closed"),
        ("\n\ndef f(:\n", "line 3: invalid syntax"),
        ("\nimport nothing_like_it", "line 2: ModuleNotFoundError"),
        ("\n\nraise SystemExit(0)", "line 3: SystemExit"),
        ("\0", "null bytes"),
        (HEAD + "POLICY = Policy(name='pipesd', trigger=BaseTrigger)", "line 4: name: 'pipesd' is a strategy"),
        (HEAD + "POLICY = Policy(name='flow', trigger=BaseTrigger)", "'flow' is a strategy"),
        (HEAD + "POLICY = Policy(name='a b', trigger=BaseTrigger)", "name: got 'a b'"),
        (HEAD + "POLICY = Policy(name='a', trigger='dual')", "trigger: got 'dual', wanted a class"),
        (HEAD + "POLICY = Policy(name='a')", "line 4: TypeError: .*trigger"),
        (HEAD + "POLICY = Policy(name='a', trigger=object)", "its trigger is a object without observe, asked"),
        (HEAD + "class T:\n observe = asked = reset = decided = len\nPOLICY = Policy(name='a', trigger=T)",
         "its trigger is a T without adopt: make it a BaseTrigger"),
        (TRIGGER.format("pass") + MAKE.format("parameters={'x': 3}"), "parameters: x: got 3, wanted a pair"),
        (TRIGGER.format("pass") + MAKE.format("parameters={'x': (3, 1)}"), "parameters: x: bounds: got 3 to 1"),
        (TRIGGER.format("pass") + MAKE.format("parameters={'no name': (1, 2)}"), "the name 'no name'"),
        (TRIGGER.format("pass") + MAKE.format("parameters={'reset': (1, 2)}"), "'reset' means something else"),
        (TRIGGER.format("pass") + MAKE.format("parameters={'x': (1, 2)}, first={'x': 3}"), "first: x: got 3"),
        (TRIGGER.format("pass") + MAKE.format("first={'x': 3}"), "no parameter 'x': there are none"),
        (TRIGGER.format("pass") + MAKE.format("batching='best'"), "batching: got 'best', wanted one of dp, greedy"),
        (TRIGGER.format("pass") + MAKE.format("batching=object"), "its batching is a object without drafted"),
        (TRIGGER.format("pass") + MAKE.format("mode='free'"), "mode: got 'free', wanted one of nav, eager"),
        (TRIGGER.format("pass") + MAKE.format("waiting='x'"), "waiting: got 'x'"),
        (TRIGGER.format("pass") + MAKE.format("confidence='x'"), "confidence: got 'x'"),
        (TRIGGER.format("pass") + MAKE.format("guarded=1"), "guarded: got 1"),
        (HEAD + "def T(**p): return BaseTrigger()\n" + MAKE.format("parameters={'x': (1, 2)}"), "no attribute 'x'"),
        (HEAD + "def T(**p):\n    return 1 / 0\n" + MAKE.format(""), "line 5.*: T raised ZeroDivisionError"),
        (HEAD + "def T(x): return BaseTrigger()\n" + MAKE.format(""), r"T raised TypeError.*'x'"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_policy(str(file))
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    with pytest.raises(UsageError, match=message):
        make_strategy(EdgeConfig(policy=str(file)))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name, why in ((tmp_path / "none.py", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        with pytest.raises(UsageError, match=why):
            load_policy(str(name))


def test_its_parts_become_a_strategy(tmp_path: Path) -> None:
    more = (
        "batching='greedy', waiting='idle', mode='eager', confidence='margin', guarded=True, parameters={'x': (1, 3)}"
    )
    file = policy(tmp_path, more=more)
    made = make_strategy(EdgeConfig(policy=file))
    parts = made.batching, made.waiting, made.mode, made.confidence, made.guarded, made.tuned, made.values
    assert parts == ("greedy", "idle", Mode.EAGER, "margin", True, True, (("x", 2.0),)) and made.name == "mine"
    for batching in BATCHINGS:
        assert make_strategy(EdgeConfig(policy=file, batching=batching, waiting="draft")).batching == batching
    given = make_strategy(EdgeConfig(policy=file, policy_option=("x=1.5",)))
    assert given.values == (("x", 1.5),) and not given.tuned
    assert not make_strategy(EdgeConfig(policy=file, tuning="off")).tuned
    assert without_effect(EdgeConfig(policy=file, draft_length=7, confidence="margin")) == ("draft_length",)
    json.dumps(made.recorded())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "vanilla"}, "a policy has its own strategy: leave out --strategy vanilla"),
        ({"trigger": "dual"}, "a policy has its own trigger"),
        ({"policy_option": ("y=1",)}, "got 'y=1', wanted NAME=VALUE; policy mine has x"),
        ({"policy_option": ("x",)}, "got 'x', wanted NAME=VALUE"),
        ({"policy_option": ("x=4",)}, "policy-option: x: got 4.0, wanted a whole number, 1 to 3"),
        ({"policy_option": ("x=1.5",)}, "x: got 1.5, wanted a whole number"),
        ({"policy_option": ("x=nan",)}, "x: got nan"),
        ({"policy_option": ("x=two",)}, "x: got 'two'"),
        ({"policy_option": ("x=1", "x=2")}, "x is given twice"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = policy(tmp_path, more="parameters={'x': Parameter(1, 3, integer=True)}")
    with pytest.raises(UsageError, match=re.escape(message)):
        make_strategy(EdgeConfig(policy=file, **settings))
    with pytest.raises(UsageError, match="it goes with --policy FILE"):
        EdgeConfig(policy_option=("x=1",))


# ---- its parameters


def test_a_point_of_its_space_is_options_and_values(tmp_path: Path) -> None:
    file = policy(tmp_path, more="parameters={'x': Parameter(0.1, 9, log=True), 'k': Parameter(1, 8, integer=True)}")
    made = make_strategy(EdgeConfig(policy=file))
    assert space_of(made) == {"x": Parameter(0.1, 9.0, log=True), "k": Parameter(1, 8, integer=True)}
    tuner = Tuner(space_of(made), seed=3, samples=4, first=point_of(made))
    for _ in range(4):
        point = tuner.ask()
        tuner.tell(point, 1.0)
        again = make_strategy(EdgeConfig(policy=file, **settings_of(made, point)))
        assert point_of(again) == point == values_of(made, point) and not again.tuned
    trigger: Any = make_trigger(made)
    for name, value in values_of(made, {"x": 3.0, "k": 5}).items():
        setattr(trigger, name, value)
    assert (trigger.x, trigger.k) == (3.0, 5)
    assert space_of(make_strategy(EdgeConfig(strategy="cloud"))) == {}
    assert space_of(make_strategy(EdgeConfig(policy=policy(tmp_path)))) == {}


def test_they_are_tuned_while_it_runs_under_a_key_of_name_and_content(tmp_path: Path) -> None:
    kept = tmp_path / "tuning.json"
    observe = "self.n = getattr(self, 'n', 0) + 1; return 'every' if self.n % round(self.x) == 0 else None"
    more = "waiting='idle', parameters={'x': Parameter(1, 30)}, first={'x': 30}"
    file = policy(tmp_path, observe, more)
    _, stats = generated({"policy": file, "tuning": str(kept)}, tokens=600)
    assert stats["tuning"] == "done" and set(stats["thresholds"]) == {"x"}
    assert stats["thresholds"]["x"] < 15, "long drafts are not the best there is"
    policy(tmp_path, observe, more, "# changed\n")
    generated({"policy": file, "tuning": str(kept)}, tokens=60)
    policy(tmp_path, observe, more)
    _, stats = generated({"policy": file, "tuning": str(kept)}, tokens=60)
    assert stats["tuning"] == "done", "what was learnt for the file as it was is known"
    first, second = json.loads(kept.read_text())["states"]
    assert first.startswith("policy mine ") and second.startswith("policy mine ")
    state = json.loads(kept.read_text())["states"][first]
    assert Tuning(make_strategy(EdgeConfig(policy=file)), state).done


# ---- what it cannot change

HOSTILE = {
    "always": "return 'x'",
    "never": "return None",
    "random": "return chance.choice([None, 'a', 'b'])",
    "garbage": "return ''.join(chance.choice('%\\\\\\'\"{}é你🙂 ') for _ in range(9))",
    "long": "return 'sequence' * 5",
}
HASTY = "class B(BaseBatching):\n    def due(self, idle):\n        return chance.random() < 0.5\n"


@pytest.mark.parametrize("waiting", ["draft", "idle"])
@pytest.mark.parametrize("mode", ["nav", "eager"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_policy_gives_the_clouds_ids(name: str, mode: str, waiting: str, tmp_path: Path) -> None:
    batching = random.Random(f"{name} {mode} {waiting}").choice(["B", "'dp'", "'greedy'", "'immediate'", "'none'"])
    file = policy(tmp_path, HOSTILE[name], f"mode={mode!r}, waiting={waiting!r}, batching={batching}", HASTY)
    events = tmp_path / "events"
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        ids, stats = generated({"policy": file, "events": str(events)}, **options)
        assert ids == generated({"strategy": "cloud"}, **options)[0] and stats["verified"] > 0
    assert mode == "eager" or check_file(events) == []


def test_nor_does_it_in_the_simulator(tmp_path: Path) -> None:
    records = synthetic_trace(2, 60, seed=1).records
    times: dict[str, Any] = {"gamma_s": 0.006, "pass_s": 0.03}
    truth = simulate(records, **times, settings={"strategy": "cloud"}).ids
    passes = {}
    for name, observe in HOSTILE.items():
        file = policy(tmp_path, observe, "batching=B", HASTY, name=f"{name}.py")
        run = simulate(records, **times, settings={"policy": file, "batching": "dp" if name == "random" else ""})
        assert run.ids == truth
        passes[name] = run.stats["target_passes"]
    assert passes["always"] > passes["never"], "that it decides when is seen"


def test_a_token_batching_sees_the_plan_and_decides_what_is_sent(tmp_path: Path) -> None:
    """One that halves the window sends more often than at the trigger only, and less often than always."""
    sent = {}
    for name, due in {"plan": "2 * self.waiting >= self.plan.window", "all": "True", "none": "False"}.items():
        rest = f"class B(BaseBatching):\n    def due(self, idle):\n        return {due}\n"
        observe = "self.n = getattr(self, 'n', 0) + 1; return 'eight' if self.n % 8 == 0 else None"
        file, events = policy(tmp_path, observe, "batching=B, waiting='idle'", rest), tmp_path / "events"
        world = VirtualWorld(Scene(agreement=1.0, up_bytes_per_s=3e4, up_bytes_per_draft_token=200,
                                   edge={"policy": file, "events": str(events)}))  # fmt: skip
        with world.session as session:
            list(session.generate(PROMPT, max_tokens=80))
        assert check_file(events) == []
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        sent[name] = sum(event["event"] == "sent" and event["kind"] == "Draft" for event in lines)
        sizes = {tuple(event["sizes"]) for event in lines if event["event"] == "plan"}
        assert len(sizes) > 1, "plans are made for it"
    assert sent["none"] < sent["plan"] < sent["all"], sent


# ---- the programs


def test_the_programs_run_it(models: Models, tmp_path: Path) -> None:
    config, out = tmp_path / "pipesd.toml", tmp_path / "out"
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "zanzibar"}\n')
    observe = "self.n = getattr(self, 'n', 0) + 1; return 'every' if self.n % round(self.x) == 0 else None"
    file = policy(tmp_path, observe, "parameters={'x': (1, 6)}")
    with serving(law(models), target={"vocabulary": models.vocabulary}) as served:
        where = ["--draft", models.draft, "--cloud", served.address]
        tuned = here("tune", *where, "--policy", file, "--samples", 2, "--tokens", 5, "--save", config, "--quiet")
        assert tuned.code == 0, tuned.err
        assert re.search(r"^policy = '.*mine.py'$\n^policy_option = \['x=\d.*'\]$", config.read_text(), re.MULTILINE)
        common = ["generate", *where, "--max-tokens", 20, "--quiet"]
        found = json.loads(here(*common, "--config", config, "--prompt", "zanzibar", "--json").out)
        assert found["strategy"] == "mine" and found["stats"]["triggers"].keys() <= {"every", "must"}
        assert f"'x={found['stats']['thresholds']['x']:.6g}'"[:6] in config.read_text()
        cloud = json.loads(here(*common, "--strategy", "cloud", "--prompt", "zanzibar", "--json").out)
        assert found["token_ids"] == cloud["token_ids"]
        batch = [*common, "--policy", file, "--file", prompts, "--out", out]
        assert here(*batch).code == 0 and results(out)[0]["strategy"] == "mine"
        file = policy(tmp_path, "return 1 / 0")
        ran = here(*batch)
        assert ran.code == 2 and "other prompts or options" in ran.complaint, "another policy is another option"
        ran = here(*batch, "--restart")
        assert ran.code == 2 and "ZeroDivisionError" in ran.complaint and out.read_text() == ""
        ran = here(*common, "--policy", file, "--prompt", "x")
        assert ran.code == 2 and f"policy mine ({file}, line 6): observe raised ZeroDivisionError" in ran.complaint
        shown = here(*common, "--policy", file, "--prompt", "x", "--debug")
        assert "Traceback" in shown.err and "return 1 / 0" in shown.err
        chosen = here(*common, "--policy", file, "--strategy", "hsl", "--prompt", "x")
        assert chosen.code == 2 and "leave out --strategy hsl" in chosen.complaint
