"""What steering costs: `python bench/overhead.py [--quick]`. The paper's table 5.

Over the first 1000 rounds of `pipesd` that tunes its thresholds while it runs, behind an emulated link of 20 ms there
and back, every call of the tuner (with the file that keeps what it learnt), of the planner of token batches and of what
measures link and drafting is timed, each without the calls of the others inside it, and given as a share of the run's
time. `rest` is what else the policies do: triggers, batching, the decision to send. Draft model and target are scripted
and take the time that they are told to; by default that of a small draft model and of a pass. Importing and compiling
happen once and stand apart. Timing a call takes one or two microseconds, which are counted too.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from planner import loading_s
from replay import end_with
from runs import add_options, edge_of

ROUNDS = 1000
TOKENS = 384  # of one generation
PAPER_PERCENT = {"tuner": 1.1, "planner": 0.013, "measuring": 0.4}  # at most, as the paper says
GOAL_PERCENT = 0.3  # of the three together


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds: only to see that it works")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time only, as on a busy machine")
    parser.set_defaults(scripted=True, gamma_ms=6.0)
    options = parser.parse_args()
    options.scripted = not options.draft
    wanted = ROUNDS // 10 if options.quick else ROUNDS

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, edge_of(options, wanted * 8 // TOKENS + 1, TOKENS) as edge:
        edge.run({"strategy": "pipesd", "tuning": "off"}, edge.trace.records[:1], 16)  # loads what is compiled
        stopwatch = Stopwatch(time.thread_time if options.cpu_time else time.perf_counter)
        watch(stopwatch)
        settings = {"strategy": "pipesd", "tuning": str(Path(folder, "tuning.json"))}
        run = edge.run(settings, edge.trace.records, TOKENS, rounds=wanted)
    rounds = run.sums["rounds"]
    run_s = run.ms_per_token * run.sums["tokens"] / 1e3
    apart_s = None if options.quick else loading_s()
    percent = {group: 100 * stopwatch.spent_s[group] / run_s for group in (*PAPER_PERCENT, "rest")}
    together = sum(percent[group] for group in PAPER_PERCENT)

    print(f"{rounds} rounds, {run.sums['tokens']} tokens, {run_s:.1f} s, {1e3 * run_s / rounds:.1f} ms a round")
    print(f"{'':11}{'calls':>8}{'us a round':>12}{'longest ms':>12}{'%':>9}{'paper %':>9}")
    for group, share in percent.items():
        print(f"{group:11}{stopwatch.calls[group]:8}{1e6 * stopwatch.spent_s[group] / rounds:12.1f}"
              f"{1e3 * stopwatch.longest_s[group]:12.2f}{share:9.4f}{PAPER_PERCENT.get(group, ''):>9}")  # fmt: skip
    print(f"tuner, planner and measuring together {together:.3f} %, at most {GOAL_PERCENT} %; the paper's 1.513 %")
    print(f"once: greeting the cloud, with the first probes of the link, {1e3 * stopwatch.spent_s['opening']:.0f} ms")
    if apart_s is not None:
        print(f"once: {', '.join(f'{name} {value:.2f} s' for name, value in apart_s.items())}")
    result = {
        "bench": "overhead",
        "kind": "scripted" if options.scripted else "replayed",
        "clock": "cpu" if options.cpu_time else "wall",
        "rounds": rounds,
        "tokens": run.sums["tokens"],
        "run_s": round(run_s, 3),
        "load_before": load,
        "percent": {group: round(share, 5) for group, share in percent.items()},
        "calls": dict(stopwatch.calls),
        "longest_ms": {group: round(1e3 * value, 3) for group, value in stopwatch.longest_s.items()},
        "together_percent": round(together, 4),
        "paper_percent": PAPER_PERCENT,
        "goal_percent": GOAL_PERCENT,
        "reached": together <= GOAL_PERCENT,
        "opening_s": round(stopwatch.spent_s["opening"], 4),
        "apart_s": apart_s,
        "wrong_outputs": len(run.wrong),
    }
    print(json.dumps(result))
    return 1 if run.wrong else 0


if __name__ == "__main__":
    end_with(main)
