"""What steering costs: `python bench/overhead.py [--quick] [--plot FILE] [--policy FILE]`. The paper's table 5.

Over the first 1000 rounds of `pipesd` that tunes its thresholds while it runs, behind an emulated link of 20 ms there
and back, every call of the tuner (with the file that keeps what it learnt), of the planner of token batches and of what
measures link and drafting is timed, each without the calls of the others inside it, and given as a share of the run's
time. `rest` is what else the policies do: triggers, batching, the decision to send. Draft model and target are scripted
and take the time that they are told to; by default that of a small draft model and of a pass. Importing and compiling
happen once and stand apart. Timing a call takes one or two microseconds, which are counted too. The paper's figures of
its table 5 and of its appendix H are beside ours.

The rows of every table follow, each with the share of its own time that its policies take: tuned by the same budget on
other prompts than those measured, then measured in turn, --seeds times. Draft model and target replay, or with --draft
the target alone.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plots
import strategies
from planner import loading_s
from printed import CONTROL_PLANE_PERCENT, OVERHEAD
from runs import Edge, Measured, add_options, edge_of
from stamp import begin, end_with, finish
from strategies import add_row_options, kind_of
from table import REFERENCE, chosen, parsed, standing_rows

from pipesd.errors import UsageError
from pipesd.sim.trace import Record, Trace

ROUNDS = 1000
TOKENS = 384  # of one generation
SHORT_TOKENS = 48  # of the rows that stand in every table
GOAL_PERCENT = 0.3  # of the three together
STEERING = (*OVERHEAD, "rest")


class Stopwatch:
    """Adds up what the calls of each group took, without those of other groups inside them (s), and how many there
    were, from outside their group."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.longest_s: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._groups = [""]  # of the calls that run, the innermost last
        self._inner_s = [0.0]  # what timed calls inside each of them took

    def timed(self, group: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if self._groups[-1] == group:
                return function(*given, **named)
            self._groups.append(group)
            self._inner_s.append(0.0)
            begun_s = self._clock()
            try:
                return function(*given, **named)
            finally:
                took_s = self._clock() - begun_s
                own_s = took_s - self._inner_s.pop()
                self._groups.pop()
                self._inner_s[-1] += took_s
                self.spent_s[group] += own_s
                self.longest_s[group] = max(self.longest_s[group], own_s)
                self.calls[group] += 1

        return call

    def watch_class(self, group: str, kind: type) -> None:
        """Time every public method and property of a class, and its making."""
        for name, member in list(vars(kind).items()):
            if (inspect.isfunction(member) or isinstance(member, property)) and name.strip("_") in (name, "init"):
                self.watch_method(group, kind, name)

    def watch_method(self, group: str, kind: type, name: str) -> None:
        """Time one method or property of a class."""
        member = vars(kind)[name]
        if isinstance(member, property):
            assert member.fget is not None
            setattr(kind, name, property(self.timed(group, member.fget)))
        else:
            setattr(kind, name, self.timed(group, member))

    def watch_function(self, group: str, function: Callable[..., Any]) -> None:
        """Time a function wherever a module of the package has its name."""
        timed = self.timed(group, function)
        for module in [module for name, module in sys.modules.items() if name.startswith("pipesd")]:
            for name, value in list(vars(module).items()):
                if value is function:
                    setattr(module, name, timed)


def watch(stopwatch: Stopwatch) -> None:
    """Time all that steers, in this process and for good."""
    from pipesd.edge import tuning_file
    from pipesd.edge.connection import Connection
    from pipesd.edge.round_trips import RoundTrips
    from pipesd.edge.steering import Steering
    from pipesd.policy import token_batches
    from pipesd.policy.monitor import Monitor
    from pipesd.policy.tuner import Tuner
    from pipesd.policy.tuning import Tuning

    groups: dict[str, Iterable[type]] = {
        "tuner": (Tuner, Tuning), "measuring": (Monitor, RoundTrips), "rest": (Steering,)
    }  # fmt: skip
    for group, kinds in groups.items():
        for kind in kinds:
            stopwatch.watch_class(group, kind)
    stopwatch.watch_method("opening", Connection, "greet")
    for function in (tuning_file.load, tuning_file.save):
        stopwatch.watch_function("tuner", function)
    stopwatch.watch_function("planner", token_batches.plan_for_run)


class Watched(NamedTuple):
    """An edge whose runs say too what steering took of them, `steering_s` in their sums."""

    edge: Edge
    stopwatch: Stopwatch

    @property
    def trace(self) -> Trace:
        return self.edge.trace

    def run(
        self, settings: Mapping[str, Any], records: Sequence[Record], tokens: int, *, linked: bool = True
    ) -> Measured:
        before_s = self._spent_s()
        run = self.edge.run(settings, records, tokens, linked=linked)
        return run._replace(sums={**run.sums, "steering_s": self._spent_s() - before_s})

    def _spent_s(self) -> float:
        return sum(self.stopwatch.spent_s.get(group, 0.0) for group in STEERING)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_row_options(parser)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time only, as on a busy machine")
    for name, default, text in (
        ("rounds", ROUNDS, "of the run that is looked into"), ("seeds", 3, "turns of each row"),
        ("samples", 6, "tries of each row's parameters; 0: their defaults"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    parser.set_defaults(gamma_ms=6.0, seed=0, tune_prompts=1, tune_tokens=SHORT_TOKENS // 2, prompts_each=1,
                        tokens=SHORT_TOKENS)  # fmt: skip
    options = parsed(parser, rounds=ROUNDS // 15, seeds=2, samples=1, tune_tokens=4, tokens=SHORT_TOKENS // 4)
    for name, least in (("rounds", 1), ("seeds", 1), ("samples", 0)):
        if (value := getattr(options, name)) < least:
            raise UsageError(f"--{name}: got {value}, wanted at least {least}")
    options.scripted, options.repetitions = not options.draft, options.seeds
    if options.plot:
        plots.check(options.plot)
    return options


def main() -> int:
    options = arguments()
    wanted = options.rounds
    rows = chosen(standing_rows(options.policy), options.only)

    stamp = begin()
    count = max(wanted * 8 // TOKENS, options.seeds) + 1
    with tempfile.TemporaryDirectory() as folder, edge_of(options, count, TOKENS) as edge:
        edge.run({"strategy": "pipesd", "tuning": "off"}, edge.trace.records[:1], 16)  # loads what is compiled
        stopwatch = Stopwatch(time.thread_time if options.cpu_time else time.perf_counter)
        watch(stopwatch)
        settings = {"strategy": "pipesd", "tuning": str(Path(folder, "tuning.json"))}
        run = edge.run(settings, edge.trace.records, TOKENS, rounds=wanted)
        spent_s, calls, longest_s = (dict(each) for each in (stopwatch.spent_s, stopwatch.calls, stopwatch.longest_s))
        tuned, turns = strategies.measure(Watched(edge, stopwatch), rows, options)
    reports = {
        name: {
            **strategies.report(row, tuned[name], turns[name], turns.get(REFERENCE, []), kind_of(row, options)),
            "steering_percent": steering_percent(turns[name]),
        }
        for name, row in rows.items()
    }
    wrong = [line for one in (run, *itertools.chain(*turns.values())) for line in one.wrong]
    rounds = run.sums["rounds"]
    run_s = run.ms_per_token * run.sums["tokens"] / 1e3
    apart_s = None if options.quick else loading_s()
    percent = {group: 100 * spent_s.get(group, 0.0) / run_s for group in STEERING}
    together = sum(percent[group] for group in OVERHEAD)

    print(f"{rounds} rounds, {run.sums['tokens']} tokens, {run_s:.1f} s, {1e3 * run_s / rounds:.1f} ms a round")
    print(f"{'':11}{'calls':>8}{'us a round':>12}{'longest ms':>12}{'%':>9}{'printed %':>11}{'ours/pr.':>10}")
    for group, share in percent.items():
        theirs = OVERHEAD.get(group)
        against = "" if theirs is None else f"{share / theirs:.2f}"
        print(f"{group:11}{calls.get(group, 0):8}{1e6 * spent_s.get(group, 0.0) / rounds:12.1f}"
              f"{1e3 * longest_s.get(group, 0.0):12.2f}{share:9.4f}{theirs or '':>11}{against:>10}")  # fmt: skip
    print(f"tuner, planner and measuring together {together:.3f} %, at most {GOAL_PERCENT} %; printed, with all else "
          f"that steers, {CONTROL_PLANE_PERCENT} %")  # fmt: skip
    print(f"once: greeting the cloud, with the first probes of the link, {1e3 * spent_s.get('opening', 0.0):.0f} ms")
    if apart_s is not None:
        print(f"once: {', '.join(f'{name} {value:.2f} s' for name, value in apart_s.items())}")
    print(f"\n{'':16}{'kind':10}{'ms/token':>9}{'cloud s/1000':>13}{'steering, %':>12}  over pipesd")
    for name, said in reports.items():
        over = said.get("over_pipesd")
        ratio = f"{over['mean']:.3f} [{over['low']:.3f}, {over['high']:.3f}] {over['verdict']}" if over else ""
        print(f"{name:16}{said['kind']:10}{said['ms_per_token']:9.1f}{said['cloud_s_per_1000_tokens']:13.1f}"
              f"{said['steering_percent']:12.4f}  {ratio}")  # fmt: skip
    print("steering: the policies' share of the row's own time, the rest of them included; rows are of "
          f"{options.tokens} tokens a turn, and so mostly of what a session begins with")  # fmt: skip
    for line in wrong:
        print(line)
    if options.plot:
        plots.bars([{"name": "steering", "rows": reports}], options.plot, "steering_percent", "% of the row's time")
    finish("overhead", stamp, options, {
        "kind": "replayed",
        "clock": "cpu" if options.cpu_time else "wall",
        "rounds": rounds,
        "tokens": run.sums["tokens"],
        "run_s": run_s,
        "percent": percent,
        "calls": calls,
        "longest_ms": {group: 1e3 * value for group, value in longest_s.items()},
        "together_percent": together,
        "paper_percent": OVERHEAD,
        "paper_control_plane_percent": CONTROL_PLANE_PERCENT,
        "goal_percent": GOAL_PERCENT,
        "reached": together <= GOAL_PERCENT,
        "opening_s": spent_s.get("opening", 0.0),
        "apart_s": apart_s,
        "wrong_outputs": len(wrong),
        "rows": reports,
    })  # fmt: skip
    return 1 if wrong else 0


def steering_percent(runs: Sequence[Measured]) -> float:
    """The policies' share of these runs' time."""
    took_ms = sum(run.ms_per_token * run.sums["tokens"] for run in runs)
    return 1e5 * sum(run.sums["steering_s"] for run in runs) / max(took_ms, 1e-9)


if __name__ == "__main__":
    end_with(main)
