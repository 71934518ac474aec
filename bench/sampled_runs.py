"""Whole sessions that sample: shared noise on a target that replays, rejection sampling on the real one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from exactness import cloud, generate
from recording import Wish, prompts_of, record_trace
from replay import Replay, replaying
from runs import STALL_S, Edge, link_of

from pipesd.config import EdgeConfig
from pipesd.edge.drafter import Drafter
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.trace import Record, Trace

STRATEGIES = ("cloud", "vanilla", "pipesd")
METHODS: dict[str, dict[str, Any]] = {
    "noise": {},
    "rejection": {"sampling": "rejection"},
    "rejection, top-p .95": {"sampling": "rejection", "top_p": 0.95},
    "picospec, 32": {"sampling": "picospec", "top_mass": 32},
}
SUMS = ("tokens", "drafted", "verified", "accepted", "navs", "target_passes", "bytes_up", "bytes_down", "refusals",
        "proposals")  # fmt: skip


class Row(NamedTuple):
    """One method under one strategy at one temperature."""

    temperature: float
    method: str
    strategy: str
    kind: str  # replayed or real
    ms_per_token: float
    acceptance_per_token: float | None
    bytes_up_per_token: float
    bytes_down_per_token: float
    sampling_error: float | None  # the largest of any position, as the edge reports it
    sums: dict[str, int]
    wrong: int  # outputs under shared noise that are not the target's own sample


def row_of(
    temperature: float, method: str, strategy: str, kind: str, each: Sequence[dict[str, Any]], wrong: int
) -> Row:
    """The row of some generations, from their statistics."""
    sums = {name: sum(stats[name] for stats in each) for name in SUMS}
    decided = sum(stats["accepted"] / stats["acceptance_per_token"] for stats in each if stats["acceptance_per_token"])
    errors = [stats["sampling_error"] for stats in each if stats["sampling_error"] is not None]
    return Row(
        temperature,
        method,
        strategy,
        kind,
        sum(stats["tpt_ms"] * stats["tokens"] for stats in each) / sums["tokens"],
        sums["accepted"] / decided if decided else None,
        sums["bytes_up"] / sums["tokens"],
        sums["bytes_down"] / sums["tokens"],
        max(errors, default=None),
        sums,
        wrong,
    )


def runs(options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """All rows. Every prompt has a seed of its own."""
    found: list[Row] = []
    drafter = Drafter(options.draft, threads=1)
    prompts = prompts_of(options.prompts)
    try:
        for temperature in options.temperatures:
            wish = Wish(
                options.run_prompts, options.tokens, least=options.tokens, depth=1,
                sampling={"temperature": temperature}, seed=options.seed,
            )  # fmt: skip
            with cloud(options.target) as (address, _):
                trace = record_trace(address, drafter, drafter.tokeniser, prompts, wish, say)
            for row in (*_replayed(options, drafter, trace), *_real(options, drafter, trace)):
                say(f"temperature {temperature:g}, {row.method}, {row.strategy}: {row.ms_per_token:.1f} ms per token")
                found.append(row)
    finally:
        drafter.close()
    return found


def _replayed(options: argparse.Namespace, drafter: Drafter, trace: Trace) -> Iterator[Row]:
    pace = {"pass_s": options.pass_ms / 1e3, "token_s": options.token_ms / 1e3}
    make = Replay(trace, drafter.vocabulary, pace)
    with replaying(make, link_of(options)) as where:
        edge = Edge(where, drafter, drafter.tokeniser, trace, None)
        edge.run({"strategy": "vanilla"}, trace.records[:1], 4)  # all is loaded and compiled then
        for strategy in STRATEGIES:
            measured = edge.run({"strategy": strategy, "tuning": "off"}, trace.records, options.tokens)
            temperature = trace.sampling["temperature"]
            yield row_of(temperature, "noise", strategy, "replayed", measured.each, len(measured.wrong))


def _real(options: argparse.Namespace, drafter: Drafter, trace: Trace) -> Iterator[Row]:
    with _linked_cloud(options) as address:
        for method, settings in METHODS.items():
            sampling = {**trace.sampling, **settings}
            for strategy in STRATEGIES[1:]:
                config = EdgeConfig(cloud=address, strategy=strategy, tuning="off", stall_s=STALL_S)
                done = [_generated(config, record, options.tokens, drafter, sampling) for record in trace.records]
                wrong = sum(
                    tuple(one["ids"]) != record.output[: options.tokens]
                    for one, record in zip(done, trace.records, strict=True)
                )
                each = [one["stats"] for one in done]
                temperature = sampling["temperature"]
                yield row_of(temperature, method, strategy, "real", each, wrong if method == "noise" else 0)


@contextmanager
def _linked_cloud(options: argparse.Namespace) -> Iterator[str]:
    """The real target behind the link; its address."""
    with cloud(options.target) as (address, _), LinkProxy(address, **link_of(options)) as link:
        yield link.address


def _generated(
    config: EdgeConfig, record: Record, tokens: int, drafter: Drafter, sampling: dict[str, Any]
) -> dict[str, Any]:
    return generate(config, record.prompt, tokens, drafter=drafter, seed=record.seed, **sampling)


def run_table(rows: Sequence[Row]) -> list[str]:
    lines = [f"{'T':>4} {'method':22}{'strategy':10}{'':10}{'ms/token':>9}{'accepted':>9}{'up':>8}{'down':>8}"
             f"{'passes':>8}{'refusals':>9}{'proposals':>10}{'error':>8}"]  # fmt: skip
    for row in rows:
        tokens, rate, error = row.sums["tokens"], row.acceptance_per_token, row.sampling_error
        lines.append(
            f"{row.temperature:4g} {row.method:22}{row.strategy:10}{row.kind:10}{row.ms_per_token:9.1f}"
            f"{'' if rate is None else f'{rate:.3f}':>9}{row.bytes_up_per_token:8.1f}{row.bytes_down_per_token:8.1f}"
            f"{row.sums['target_passes'] / tokens:8.3f}{row.sums['refusals'] / tokens:9.3f}"
            f"{row.sums['proposals'] / tokens:10.3f}{'' if error is None else f'{error:.3f}':>8}"
        )
    lines.append(f"{sum(row.wrong for row in rows)} outputs under shared noise are not the target's own sample")
    lines.append("accepted: of the tokens whose forerunners were right; up and down: bytes; all others for each token")
    lines.append("ms/token of real rows: both models share the processor, so they are not to be compared with replayed")
    return lines
