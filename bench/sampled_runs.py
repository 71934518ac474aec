"""Whole sessions that sample: shared noise on a target that replays, rejection sampling on the real one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from exactness import cloud, generate
from replay import HEADROOM, Record, Recording, Replay, prompts_of, record, replaying
from runs import STALL_S, Edge, link_of

from pipesd.config import EdgeConfig
from pipesd.edge.drafter import Drafter
from pipesd.sim.proxy import LinkProxy

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
            recording = record(
                options.draft, options.target, drafter.tokeniser, prompts, options.run_prompts,
                options.tokens + HEADROOM, temperature=temperature,
            )  # fmt: skip
            for row in (*_replayed(options, drafter, recording), *_real(options, drafter, recording)):
                say(f"temperature {temperature:g}, {row.method}, {row.strategy}: {row.ms_per_token:.1f} ms per token")
                found.append(row)
    finally:
        drafter.close()
    return found


def _replayed(options: argparse.Namespace, drafter: Drafter, recording: Recording) -> Iterator[Row]:
    pace = {"pass_s": options.pass_ms / 1e3, "token_s": options.token_ms / 1e3}
    make = Replay(recording, drafter.vocabulary, sorted(drafter.end_ids), pace)
    with replaying(make, link_of(options)) as where:
        edge = Edge(where, drafter, drafter.tokeniser, recording, None)
        edge.run({"strategy": "vanilla"}, recording.records[:1], 4)  # all is loaded and compiled then
        for strategy in STRATEGIES:
            measured = edge.run({"strategy": strategy, "tuning": "off"}, recording.records, options.tokens)
            temperature = recording.sampling["temperature"]
            yield row_of(temperature, "noise", strategy, "replayed", measured.each, len(measured.wrong))


def _real(options: argparse.Namespace, drafter: Drafter, recording: Recording) -> Iterator[Row]:
    with _linked_cloud(options) as address:
        for method, settings in METHODS.items():
            sampling = {**recording.sampling, **settings}
            for strategy in STRATEGIES[1:]:
                config = EdgeConfig(cloud=address, strategy=strategy, tuning="off", stall_s=STALL_S)
                done = [_generated(config, record, options.tokens, drafter, sampling) for record in recording.records]
                wrong = sum(
                    tuple(one["ids"]) != record.output[: options.tokens]
                    for one, record in zip(done, recording.records, strict=True)
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
    return generate(config, record.ids, tokens, drafter=drafter, seed=record.seed, **sampling)


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
