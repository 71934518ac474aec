"""One edge with a replayed cloud, for benches: its parts as options of the command line, its sessions, its sums."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from recording import Recorder, Said, trace_of
from replay import CONTEXT, Addresses, Replay, replaying

from pipesd.config import EdgeConfig
from pipesd.core import Drawn, common_prefix
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.edge.session import EdgeSession
from pipesd.errors import UsageError
from pipesd.policy.sampler import Chooser
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.check import check_file
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.simulate import SUMMED
from pipesd.sim.texts import KeyedText, continuation
from pipesd.sim.tokeniser import ByteTokeniser
from pipesd.sim.trace import Record, Trace

PAPER_BETA_MS = 116.0  # 32,256 probabilities of 9 bytes at 20 Mbit/s
STALL_S = 60.0  # a setting that brings nothing new for so long has failed
LAW = KeyedText(7)  # what a scripted target says
AGREEMENT = 0.8  # of the scripted drafter
TRACES = tuple(str(Path(__file__).parent / "traces" / f"{name}.jsonl.gz") for name in ("humaneval", "gsm8k"))
ESTIMATES = ("alpha_ms", "beta_ms", "gap_ms", "gamma_ms", "rtt_ms")


class Paced:
    """A drafter that takes at least `gamma_s` for each token; it sleeps for the rest."""

    def __init__(self, inner: Drafter, gamma_s: float) -> None:
        self._inner, self._gamma_s = inner, gamma_s
        self.extend, self.prefill, self.rollback, self.close = inner.extend, inner.prefill, inner.rollback, inner.close

    @property
    def room(self) -> int:
        return self._inner.room

    def __len__(self) -> int:
        return len(self._inner)

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        begun_s = time.perf_counter()
        drawn = self._inner.draft(sampler)
        time.sleep(max(0.0, self._gamma_s - (time.perf_counter() - begun_s)))
        return drawn


class Measured(NamedTuple):
    """What one session did over some prompts."""

    ms_per_token: float
    sums: dict[str, float]
    estimates: dict[str, Any]  # the session's last
    triggers: dict[str, int]  # how often each rule asked for verification
    wrong: list[str]  # outputs that are not the recorded ones, and what an event log contradicts
    each: Sequence[dict[str, Any]] = ()  # the statistics of each generation


class Edge(NamedTuple):
    """One draft model with a cloud that replays `trace`."""

    where: Addresses
    drafter: Drafter
    tokeniser: Tokeniser
    trace: Trace
    events: Path | None  # a folder for the event log of each run, which is then checked

    def run(
        self,
        settings: Mapping[str, Any],
        records: Sequence[Record],
        tokens: int,
        *,
        linked: bool = True,
        rounds: float = math.inf,
    ) -> Measured:
        """Generate `tokens` behind the prompt of each record, in one session with these settings of `EdgeConfig`; no
        further generation begins when there were so many rounds."""
        address = self.where.linked if linked else self.where.direct
        log = "" if self.events is None else str(self.events / f"{sum(1 for _ in self.events.iterdir()):05}.jsonl")
        config = EdgeConfig(cloud=address, events=log, stall_s=STALL_S, **settings)
        each: list[dict[str, Any]] = []
        wrong = []
        with EdgeSession(config, drafter=self.drafter, tokeniser=self.tokeniser) as session:
            for record in records:
                if sum(stats["rounds"] for stats in each) >= rounds:
                    break
                for _ in session.generate(record.prompt, max_tokens=tokens, seed=record.seed, **self.trace.sampling):
                    pass
                each.append(session.stats)
                if config.strategy != "local" and session.token_ids != record.output[:tokens]:
                    at = common_prefix(session.token_ids, record.output)
                    wrong.append(f"{dict(settings)}: the ids differ from number {at} on")
        if log:
            wrong += [f"{dict(settings)}: {log}: {finding}" for finding in check_file(log)]
        sums = {name: sum(stats[name] for stats in each) for name in SUMMED}
        triggers = sum((Counter(stats["triggers"]) for stats in each), Counter())
        elapsed_ms = sum((stats["tpt_ms"] or 0.0) * stats["tokens"] for stats in each)
        estimates = {name: each[-1][name] for name in ESTIMATES}
        return Measured(elapsed_ms / max(1, sums["tokens"]), sums, estimates, dict(triggers), wrong, each)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models, link and times, as options of a bench."""
    parser.add_argument("--draft", help="draft model, a GGUF file")
    parser.add_argument("--traces", nargs="+", metavar="FILE", default=list(TRACES),
                        help="what the target says, as bench/record.py records it; records are taken from each in turn "
                        "(default: those in bench/traces, of the demo pair)")  # fmt: skip
    parser.add_argument("--scripted", action="store_true", help="scripted draft model and text: no models are needed")
    for name, default, text in (
        ("rtt", 20.0, "round trip of the link, ms"), ("pass", 40.0, "what a pass of the target takes, ms"),
        ("token", 3.0, "and so much more for each id in it, ms"), ("gamma", 0.0, "least time of a draft token, ms"),
        ("beta", 0.0, "what a draft token takes on the link beyond its bytes, ms"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}-ms", type=float, default=default, help=f"{text} (default {default:g})")
    parser.add_argument("--fat", action="store_true", help=f"the paper's payload: --beta-ms {PAPER_BETA_MS:g}")
    parser.add_argument("--up-mbps", type=float, default=20.0, help="Mbit/s (default 20)")
    parser.add_argument("--down-mbps", type=float, default=200.0, help="Mbit/s (default 200)")
    parser.add_argument("--events", metavar="FOLDER", help="write the event log of each run there, and check it")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of the draft model (default 1)")


@contextmanager
def edge_of(options: argparse.Namespace, count: int, tokens: int) -> Iterator[Edge]:
    """The edge that the options describe; its trace has `count` records of at least `tokens` ids."""
    pace = {"pass_s": options.pass_ms / 1e3, "token_s": options.token_ms / 1e3}
    with _models(options) as (drafter, tokeniser):
        if options.scripted:
            trace = scripted_trace(count, tokens)
        else:
            trace = joined([Trace.load(path) for path in options.traces], tokeniser, count, tokens)
        make = Replay(trace, tokeniser.vocabulary, pace)
        with replaying(make, link_of(options)) as where:
            paced = Paced(drafter, options.gamma_ms / 1e3) if options.gamma_ms else drafter
            events = Path(options.events) if options.events else None
            if events is not None:
                events.mkdir(parents=True, exist_ok=True)
            yield Edge(where, paced, tokeniser, trace, events)


@contextmanager
def _models(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """The drafter and its tokeniser."""
    if options.scripted:
        yield _scripted(), ByteTokeniser()
        return
    if not options.draft:
        raise UsageError("give --draft FILE.gguf, or --scripted")
    from pipesd.edge.drafter import Drafter as LlamaDrafter

    drafter = LlamaDrafter(options.draft, threads=options.threads)
    try:
        yield drafter, drafter.tokeniser
    finally:
        drafter.close()


def _scripted() -> ScriptedDrafter:
    return ScriptedDrafter(Agreement(LAW, AGREEMENT), context=CONTEXT)


def scripted_trace(count: int, tokens: int) -> Trace:
    """As much of a text that a law gives, for runs without models; what the drafter guesses, only one token ahead."""
    tokeniser, recorder = ByteTokeniser(), Recorder(_scripted(), {}, depth=1)
    prompts = [tokeniser.encode(f"Prompt {i}:") for i in range(count)]
    records = [recorder.record(Said(tuple(ids), tuple(continuation(LAW, ids, tokens)))) for ids in prompts]
    return trace_of(tokeniser, "scripted", records, depth=1)


def joined(traces: Sequence[Trace], tokeniser: Tokeniser, count: int, tokens: int) -> Trace:
    """One trace of several of one pair: their records with at least `tokens` ids of output, taken from each in turn.
    UsageError if they are not the draft model's or do not go together, or there are not `count`."""
    first = traces[0]
    for trace in traces:
        if trace.vocabulary != vocabulary_hash(tokeniser.vocabulary).hex():
            raise UsageError(f"a trace is of {trace.target}, whose vocabulary is not the draft model's; record another")
        if (trace.target, dict(trace.sampling)) != (first.target, dict(first.sampling)):
            raise UsageError(
                f"the traces are of {first.target} and {trace.target}, or not sampled alike; give some of one"
            )
    sources = [[record for record in trace.records if len(record.output) >= tokens] for trace in traces]
    turns = [record for turn in zip_longest(*sources) for record in turn if record is not None]
    if len(turns) < count:
        raise UsageError(
            f"the traces have {len(turns)} outputs of {tokens} ids, wanted {count}: record more (bench/record.py) or "
            "ask for fewer or shorter ones"
        )
    end_ids = sorted(set().union(*(trace.end_ids for trace in traces)))
    return replace(first, records=tuple(turns), end_ids=tuple(end_ids))


def link_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the link."""
    up, down = (mbps * 1e6 / 8 for mbps in (options.up_mbps, options.down_mbps))
    settings = {"delay_s": options.rtt_ms / 2e3, "up_bytes_per_s": up, "down_bytes_per_s": down}
    beta_ms = options.beta_ms or PAPER_BETA_MS * options.fat
    return settings | ({"up_bytes_per_draft_token": round(beta_ms / 1e3 * up)} if beta_ms else {})
