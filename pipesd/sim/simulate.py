"""A run in virtual time: the runtime's own loop, policies, wire and machines on recorded models and a modelled link.

Nothing waits and no model computes: the edge's clock moves by drafting and by waiting, the cloud's by passes, and what
happens next is the earliest of all events. The same arguments always give the same figures, on any machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pipesd.config import EdgeConfig, make_config
from pipesd.errors import UsageError
from pipesd.policy.strategy import make_strategy
from pipesd.policy.token_batches import warmup
from pipesd.sim.link_model import Link, is_from_0
from pipesd.sim.sim_cloud import SimCloud
from pipesd.sim.sim_user import User
from pipesd.sim.sim_world import World
from pipesd.sim.trace import Record

SUMMED = ("tokens", "rounds", "navs", "drafted", "verified", "accepted", "proactive", "promoted", "discarded", "stale",
          "target_passes", "openings", "alone_tokens", "bytes_up", "bytes_down", "cloud_s", "draft_s",
          "wait_s")  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """What a simulated run showed.

    `tpt_ms`: time per output token, over all tokens of all users. `stats`: sums over the generations of what a session
    counts, `tpt_ms`, `acceptance_rate`, `acceptance_per_token`, `triggers`, and `cloud_s_per_1000_tokens`, for which
    the passes of the one machine count once however many users shared them. `each`: the statistics of every generation,
    with its `user` and the number of its `record`; `ids`: its output. Both are in the order of the records.
    `elapsed_s`: virtual time from the first prompt to the last token.
    """

    tpt_ms: float
    stats: Mapping[str, Any]
    each: Sequence[Mapping[str, Any]]
    ids: Sequence[tuple[int, ...]]
    elapsed_s: float


def simulate(
    records: Sequence[Record],
    *,
    link: Link | None = None,
    gamma_s: float,
    pass_s: float,
    token_s: float = 0.0,
    max_tokens: int | None = None,
    users: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Simulated:
    """Generate behind the prompts of `records` with the edge's `settings` (fields of `EdgeConfig`: strategy, …).

    `link`: of each user, none takes no time; `gamma_s` is what drafting a token takes, `pass_s` and `token_s` what a
    pass of the target takes, and each id in it. `max_tokens`: of each output, at most what was recorded. User u
    generates behind `records[u::users]`, one after the other in one session; all share one machine and its passes.
    `seed` is of what happens by chance on the links, and of what a strategy that tunes itself tries (a session always
    has 0); it begins without earlier knowledge.

    Raises UsageError for what cannot be run: no records, fewer than users, a time below 0, settings out of bounds.
    """
    link = link or Link()
    config = make_config(EdgeConfig, settings or {}, {})
    _check(records, users, seed, config, gamma_s=gamma_s, pass_s=pass_s, token_s=token_s, max_tokens=max_tokens)
    if make_strategy(config).batching == "dp":
        warmup()
    world = World()
    cloud = SimCloud(world, users, pass_s, token_s)
    everyone = [User(number, world, cloud, config, link, gamma_s, seed) for number in range(users)]
    world.hears = [user.link.answer for user in everyone]
    for user in everyone:
        user.greet()
    start_s = max(user.clock.now_s for user in everyone)
    for number, user in enumerate(everyone):
        user.begin(start_s, list(enumerate(records))[number::users], max_tokens)
    world.run(math.inf)
    each = sorted((stats for user in everyone for stats in user.each), key=lambda stats: stats["record"])
    assert len(each) == len(records), "a generation never ended"
    ids = [said for _, said in sorted(pair for user in everyone for pair in user.said)]
    elapsed_s = max(user.clock.now_s for user in everyone) - start_s
    stats = _sums(each, sum(user.rejections for user in everyone), cloud)
    return Simulated(stats["tpt_ms"], stats, tuple(each), tuple(ids), elapsed_s)


def _check(
    records: Sequence[Record], users: int, seed: int, config: EdgeConfig, max_tokens: int | None, **times_s: float
) -> None:
    whole: dict[str, Any] = {"users": users, "seed": seed, "max_tokens": 1 if max_tokens is None else max_tokens}
    for name, number in whole.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise UsageError(f"{name} {number!r:.60}: want a whole number")
    if not 1 <= users <= len(records):
        raise UsageError(f"users {users}: want from 1 up to the number of records, {len(records)}")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens {max_tokens}: want at least 1")
    for name, value in times_s.items():
        if not is_from_0(value):
            raise UsageError(f"{name} {value!r:.60}: want seconds from 0")
    if config.events and users > 1:
        raise UsageError("events: the log is of one user; leave it out, or simulate one")


def _sums(each: Sequence[Mapping[str, Any]], rejections: int, cloud: SimCloud) -> dict[str, Any]:
    """Sums and rates over the generations."""
    sums: dict[str, Any] = {name: sum(stats[name] for stats in each) for name in SUMMED}
    elapsed_ms = sum((stats["tpt_ms"] or 0.0) * stats["tokens"] for stats in each)
    decided = sums["accepted"] + rejections
    return {
        **sums,
        "tpt_ms": elapsed_ms / sums["tokens"],
        "acceptance_rate": sums["accepted"] / sums["verified"] if sums["verified"] else None,
        "acceptance_per_token": sums["accepted"] / decided if decided else None,
        "triggers": dict(sum((Counter(stats["triggers"]) for stats in each), Counter())),
        "cloud_s_per_1000_tokens": 1000 * cloud.busy_s / sums["tokens"],
    }
