"""Whatever a user's policy raises, prints or keeps: one bounded line of its own, and nothing of it in the results."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pipesd.config import EdgeConfig
from pipesd.errors import UsageError
from pipesd.policy.plugin import PolicyFailed, load_policy
from pipesd.policy.strategy import make_strategy, make_trigger
from pipesd.policy.token_batches import TokenBatchPlan
from pipesd.sim.simulate import simulate
from pipesd.sim.synthetic import synthetic_trace
from pipesd.streams import Aside, show, utf8_output
from tests.clouds import serving
from tests.programs import Models, Program
from tests.test_batch_program import here
from tests.test_policy_file import HEAD, MAKE, PROMPT, generated, policy
from tests.test_programs_generate import law
from tests.virtual import Scene, VirtualWorld

LATE = (  # 29 tokens go well
    "self.n = getattr(self, 'n', 0) + 1\n"
    "        if self.n < 30: return 'x' if self.n % 3 == 0 else None\n"
    "        {}"  # line 8
)
WRONG = {
    "raises": ("return 1 / 0", r"line 8\): observe raised ZeroDivisionError: division by zero"),
    "exits": ("sys.exit('bye')", r"line 8\): observe raised SystemExit: bye"),
    "below": ("return deep()", r"line 10\): observe raised KeyError: 5"),
    "number": ("return 5", r"line 5\): observe returned 5, wanted None or the name of a rule"),
    "truth": ("return True", "observe returned True"),
    "empty": ("return ''", "observe returned ''"),
    "reserved": ("return 'must'", "observe returned 'must'"),
    "lines": ("return 'a\\nb'", "observe returned"),
    "object": ("return object()", "observe returned a object"),
}
DEEP = "def deep():\n    return {}[5]\n"


def failed(file: str, message: str, tmp_path: Path) -> int:
    """Run it into its failure, in the session and in the simulator; how many ids came before."""
    events = tmp_path / "events"
    world = VirtualWorld(Scene(edge={"policy": file, "events": str(events)}))
    truth = generated({"strategy": "cloud"})[0]
    with world.session as session:
        seen: list[int] = []
        with pytest.raises(PolicyFailed, match=message) as caught:
            for piece in session.generate(PROMPT, max_tokens=80):
                seen += piece.token_ids
        assert f"policy mine ({file}, line " in str(caught.value) and "\n" not in str(caught.value)
        assert tuple(seen) == session.token_ids == truth[: len(seen)] and len(seen) < 80
        assert session.finish_reason == "error" and session.stats["tokens"] == len(seen)
        with pytest.raises(PolicyFailed, match=re.escape(str(caught.value))):
            list(session.generate(PROMPT, max_tokens=80))
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["kind"] for event in recorded if event["event"] == "sent"][-1] == "Close"
    records = synthetic_trace(1, 60, seed=1).records
    with pytest.raises(PolicyFailed, match=message):
        simulate(records, gamma_s=0.006, pass_s=0.03, settings={"policy": file})
    return len(seen)


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_in_a_run_is_one_line_and_what_was_committed_stays(name: str, tmp_path: Path) -> None:
    statement, message = WRONG[name]
    assert failed(policy(tmp_path, LATE.format(statement), "", DEEP), message, tmp_path) > 0


def test_so_it_is_with_the_other_methods(tmp_path: Path) -> None:
    bad = "class Bad(BaseBatching):\n    def drafted(self, idle): return 7\n"
    file = policy(tmp_path, more="batching=Bad", rest=bad)
    failed(file, r"line 8\): drafted returned 7, wanted 0 or all that wait, 1", tmp_path)
    for name, arguments in (("decided", "accepted, rejected"), ("asked", ""), ("adopt", "costs")):
        method = f"class T(T):\n    def {name}(self{arguments and ', ' + arguments}): raise ValueError('no')\n"
        failed(policy(tmp_path, "return 'x'", rest=method), rf"line 8\): {name} raised ValueError: no", tmp_path)


def test_after_its_failure_it_is_not_called_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    body = f"open({str(calls)!r}, 'a').write('o'); return 1 / 0"
    reset = f"class T(T):\n    def reset(self): open({str(calls)!r}, 'a').write('r')\n"
    with VirtualWorld(Scene(edge={"policy": policy(tmp_path, body, rest=reset)})).session as session:
        for _ in range(2):
            with pytest.raises(PolicyFailed, match="ZeroDivisionError"):
                list(session.generate(PROMPT, max_tokens=80))
    assert calls.read_text().endswith("ro") and calls.read_text().count("o") == 1


# ---- whatever is raised

RAISED = {
    "base": ("raise BaseException('x')", "raised BaseException: x$"),
    "generator": ("raise GeneratorExit", "raised GeneratorExit$"),
    "long": ("raise ValueError('a\\n\\x1b[2J' * 999)", r"raised ValueError: a\\n\\x1b\[2J.*…$"),
    "mute": ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "raised E: without a text"),
    "named": ("raise type('E\\n', (Exception,), {})()", r"raised E\\n$"),
}


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.isprintable() and len(text) < 600, text
    return text


@pytest.mark.parametrize("name", RAISED)
def test_whatever_is_raised_is_one_bounded_line(name: str, tmp_path: Path) -> None:
    statement, message = RAISED[name]
    assert failed(policy(tmp_path, statement), rf"line 6\): observe {message}", tmp_path) == 0
    for method, arguments in (("reset", ""), ("__init__", ", **p"), ("adopt", ", costs")):
        file = policy(
            tmp_path, "return 'x'", rest=f"class T(T):\n    def {method}(self{arguments}):\n        {statement}\n"
        )
        with pytest.raises(PolicyFailed, match=rf"line 9\): {method} {message}") as caught:
            make_trigger(make_strategy(EdgeConfig(policy=file))).adopt(None)  # type: ignore[arg-type]
        one_line(caught.value)
    file = policy(tmp_path, rest=statement + "\n")
    with pytest.raises(UsageError, match=message.replace("raised ", "line 7: ")) as at_once:
        load_policy(file)
    one_line(at_once.value)


def test_an_interrupt_is_no_mistake_of_the_policy(tmp_path: Path) -> None:
    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        load_policy(policy(tmp_path, rest="raise KeyboardInterrupt\n"))
    trigger = make_trigger(make_strategy(EdgeConfig(policy=policy(tmp_path, "raise KeyboardInterrupt"))))
    with pytest.raises(KeyboardInterrupt):
        trigger.observe(0.5)
    assert sys.stdout is before


@pytest.mark.parametrize(
    ("due", "message"),
    [
        ("return 1 / 0", r", line 9\): due raised ZeroDivisionError"),
        (
            "return type('X', (), {'__bool__': lambda s: 1 / 0})()",
            r", line 9\): <lambda> raised|line 9\): drafted raised",
        ),
        ("self.waiting = -5; return True", r"mine.py\): drafted of B returned -5, wanted 0 or all that wait, 1"),
    ],
)
def test_a_token_batchings_mistake_is_named_by_what_its_user_wrote(due: str, message: str, tmp_path: Path) -> None:
    rest = f"class B(BaseBatching):\n    def due(self, idle):\n        {due}\n"
    made = load_policy(policy(tmp_path, more="batching=B", rest=rest))
    with pytest.raises(PolicyFailed, match=message):
        made.make_batching(TokenBatchPlan((1,), 0.0, 0.0, 0.0, 0.0, 0.0)).drafted(True)


@pytest.mark.parametrize(
    "count", ["type('I', (int,), {'__eq__': lambda s, o: 1 / 0, '__hash__': None})(1)", "__import__('numpy').int64(1)"]
)
def test_a_count_of_another_kind_is_taken_as_a_count(count: str, tmp_path: Path) -> None:
    rest = f"class B(BaseBatching):\n    def drafted(self, idle):\n        return {count}\n"
    made = load_policy(policy(tmp_path, more="batching=B", rest=rest))
    assert made.make_batching(TokenBatchPlan((1,), 0.0, 0.0, 0.0, 0.0, 0.0)).drafted(True) == 1


def test_where_a_file_is_no_text_no_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("# -*- coding: nothing -*-\n")
    with pytest.raises(UsageError, match=r"mine.py: unknown encoding"):
        load_policy(str(file))
    with pytest.raises(UsageError, match=r"policy a\\nb.py: No such file"):
        load_policy("a\nb.py")


@pytest.mark.parametrize("name", ["self", "class", "method", "parameters"])
def test_a_parameters_name_is_refused_or_may_be_had(name: str, tmp_path: Path) -> None:
    file = policy(tmp_path, more=f"parameters={{{name!r}: (0, 1)}}")
    if name in ("method", "parameters"):
        assert getattr(make_trigger(make_strategy(EdgeConfig(policy=file))), name) == 0.5
    else:
        with pytest.raises(UsageError, match=f"line 7: parameters: .*'{name}'"):
            load_policy(file)


def test_a_parameter_that_cannot_be_read_ends_the_next_call_and_not_the_statistics(tmp_path: Path) -> None:
    rest = "class T(T):\n    x = property(lambda s: s.y if s.y < 2 else 1 / 0, lambda s, x: s.__dict__.update(y=x))\n"
    made = load_policy(policy(tmp_path, rest=rest, more="parameters={'x': (0, 3)}"))
    trigger: Any = made.make_trigger({"x": 1.0})
    assert trigger.x == 1.0
    trigger.x = 2.5
    assert trigger.x == 2.5
    with pytest.raises(PolicyFailed, match=r"line 8.*ZeroDivisionError"):
        trigger.observe(0.5)


# ---- what it prints


def test_what_it_prints_is_not_among_the_results(models: Models, tmp_path: Path) -> None:
    rest = "print('once')\nclass T(T):\n    def adopt(self, costs): sys.stdout.write('adopted ')\n"
    file = policy(tmp_path, "print('observed'); return 'x'", rest=rest)
    with serving(law(models), target={"vocabulary": models.vocabulary}) as served:
        where = ["generate", "--draft", models.draft, "--cloud", served.address, "--policy", file, "--quiet"]
        ran = here(*where, "--prompt", "zanzibar", "--max-tokens", 9, "--json")
        plain = here(*where, "--prompt", "zanzibar", "--max-tokens", 9)
    assert ran.code == 0 and json.loads(ran.out)["text"] + "\n" == plain.out
    assert {"once", "observed", "adopted"} <= set(ran.err.split()) and "observed" in plain.err


def test_results_are_shown_even_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with Aside():
        with Aside():
            print("inner")
        print("outer")
        words = threading.Thread(target=show, args=("result",))  # the last words of a program that hangs in it
        words.start()
        words.join()
        utf8_output()
    assert sys.stdout is before
    print("behind")
    assert tuple(capsys.readouterr()) == ("resultbehind\n", "inner\nouter\n")


@pytest.mark.slow
def test_one_that_hangs_is_ended_by_a_signal_and_the_object_is_printed(models: Models, tmp_path: Path) -> None:
    file = policy(tmp_path, "print('here', flush=True)\n        while True: pass")
    with serving(law(models), target={"vocabulary": models.vocabulary}) as served:
        where = ["--draft", models.draft, "--cloud", served.address, "--policy", file]
        with Program("edge", "generate", *where, "--prompt", "zanzibar", "--json") as program:
            program.says("here", on="err").send(signal.SIGINT)
            ran = program.end()
    assert ran.code == 130 and json.loads(ran.out)["finish_reason"] == "cancelled"


def test_two_threads_that_overlap_leave_stdout_as_it_was() -> None:
    before, one, other = sys.stdout, Aside(), Aside()
    one.__enter__()
    other.__enter__()
    one.__exit__()
    other.__exit__()
    assert sys.stdout is before


# ---- how often it is executed


def test_a_file_is_executed_once_for_each_content(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rest = f"open({str(log)!r}, 'a').write('x')\n"
    records = synthetic_trace(4, 20, seed=1).records
    for _ in range(2):
        simulate(records, gamma_s=0.006, pass_s=0.03, users=3, settings={"policy": policy(tmp_path, rest=rest)})
    assert log.read_text() == "x"
    other = load_policy(policy(tmp_path, rest=rest + "# changed\n"))
    assert log.read_text() == "xx" and other is not load_policy(policy(tmp_path, rest=rest))
    copy = policy(tmp_path, rest=rest, name="copy.py")
    assert load_policy(copy).file == copy and log.read_text() == "xxx", "messages and __file__ name the copy"


def test_a_file_that_failed_is_executed_again(tmp_path: Path) -> None:
    file, there = tmp_path / "mine.py", tmp_path / "there"
    file.write_text(f"{HEAD}open({str(there)!r}).close()\nclass T(BaseTrigger):\n    pass\n{MAKE.format('')}")
    with pytest.raises(UsageError, match="line 4: FileNotFoundError"):
        load_policy(str(file))
    there.write_text("")
    assert load_policy(str(file)).name == "mine"
