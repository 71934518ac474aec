"""What `pipesd-edge advise` found out, for a person and for a program."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipesd.config import EdgeConfig
from pipesd.sizes import counted
from pipesd.streams import utf8_output

if TYPE_CHECKING:
    from pipesd.edge.link_figures import LinkFigures

NAMES = (
    "draft cloud target link gamma_ms pass_ms token_ms sample strategies fastest runner_up lead lead_interval clear "
    "alike cheapest rtt_ms change_below change_above command error"
).split()
PROMPT = "YOUR PROMPT"  # in the command to run
KEPT = ("draft", "cloud", "draft_ahead", "link_model", "confidence", "context", "threads", "gpu_layers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is expected of one strategy. `settings`: fields of EdgeConfig."""

    strategy: str
    settings: Mapping[str, Any]
    tpt_s: float
    interval: tuple[float, float]
    cloud_s_per_1000_tokens: float
    acceptance: float | None

    @classmethod
    def of(cls, expected: Any) -> Row:
        """From what the simulation says."""
        return cls(**{name: getattr(expected, name) for name in cls.__dataclass_fields__})

    @property
    def exact(self) -> bool:
        """Whether the output is the target's."""
        return self.strategy != "local"

    def as_json(self) -> dict[str, Any]:
        from pipesd.edge.link_figures import to_ms

        return {
            "strategy": self.strategy,
            "exact": self.exact,
            "tpt_ms": to_ms(self.tpt_s),
            "interval_ms": None if math.isnan(self.interval[0]) else [to_ms(end) for end in self.interval],
            "cloud_s_per_1000_tokens": round(self.cloud_s_per_1000_tokens, 3),
            "acceptance_rate": None if self.acceptance is None else round(self.acceptance, 4),
            "settings": {name: rounded(value) for name, value in self.settings.items() if name != "strategy"},
        }


@dataclass(kw_only=True)
class Findings:
    """All that is known so far; what is not is None."""

    draft: str
    cloud: str
    target: str | None = None
    link: LinkFigures | None = None
    gamma_s: float | None = None
    pass_s: float | None = None  # of a pass over no ids
    token_s: float | None = None  # and of each id
    prompts: int = 0
    tokens: int = 0
    right: int = 0  # of them guessed by the draft model
    times_s: tuple[float, ...] = ()  # of draft tokens
    tuned_on: int = 0  # prompts
    judged_on: int = 0
    rows: list[Row] | None = None  # the fastest first, `local` last
    lead: tuple[float, tuple[float, float]] | None = None  # the fastest's time as a share of the next one's
    alike: tuple[str, ...] = ()  # the strategies that the sample cannot tell from the fastest
    cheapest: str | None = None
    command: str | None = None
    rtt_s: float | None = None
    most_rtt_s: float | None = None  # no further round trip was looked at
    below: Any = None  # (rtt_s, strategy), see pipesd.sim.advice.Change
    above: Any = None

    @property
    def clear(self) -> bool:
        """Whether the sample tells the fastest from the next."""
        return self.lead is not None and self.lead[1][1] < 1.0


def line(findings: Findings | None, error: str | None) -> str:
    """The object of `--json`: always the same names, null where there is nothing to say."""
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values["error"] = error
    if findings is not None:
        values.update(_values(findings))
    return json.dumps(values, ensure_ascii=not utf8_output()) + "\n"


def _values(findings: Findings) -> Iterator[tuple[str, Any]]:
    from pipesd.edge.link_figures import to_ms

    yield from (("draft", findings.draft), ("cloud", findings.cloud), ("target", findings.target))
    if findings.link is not None:
        yield "link", findings.link.as_json()
    for name in ("gamma", "pass", "token", "rtt"):
        yield f"{name}_ms", to_ms(getattr(findings, f"{name}_s"))
    if findings.prompts:
        yield (
            "sample",
            {
                "prompts": findings.prompts,
                "tokens": findings.tokens,
                "guessed": round(findings.right / findings.tokens, 4),
                "tuned_on": findings.tuned_on,
                "judged_on": findings.judged_on,
            },
        )
    if findings.rows is not None and findings.lead is not None:
        ratio, ends = findings.lead
        yield "strategies", [row.as_json() for row in findings.rows]
        yield from (("fastest", findings.rows[0].strategy), ("runner_up", findings.rows[1].strategy))
        yield "lead", round(ratio, 4)
        yield "lead_interval", None if math.isnan(ends[0]) else [round(end, 4) for end in ends]
        yield from (("clear", findings.clear), ("alike", list(findings.alike)))
        yield from (("cheapest", findings.cheapest), ("command", findings.command))
    for name, change in (("change_below", findings.below), ("change_above", findings.above)):
        if change is not None:
            yield name, {"rtt_ms": to_ms(change.rtt_s), "strategy": change.strategy}


def nothing(interrupted: bool) -> str:
    """What stdout gets from `advise --json` that failed before it could begin."""
    return line(None, "interrupted" if interrupted else "nothing was measured; stderr says why")


def describe(findings: Findings, *, ascii_only: bool) -> str:
    """All of it in lines that end with a newline: what was measured, a table, sentences, the command to run."""
    lines = [
        *(f"{name:<13}{value}" for name, value in _measured(findings)),
        "",
        *_table(findings),
        "",
        *_sentences(findings),
        "",
        str(findings.command),
    ]
    text = "\n".join(lines) + "\n"
    return text.encode("ascii", "backslashreplace").decode() if ascii_only else text


def _measured(findings: Findings) -> Iterator[tuple[str, str]]:
    link = findings.link
    assert link is not None and findings.pass_s is not None and findings.token_s is not None
    rates = ", ".join(
        f"{rate.bits_per_s / 1e6:.3g} Mbit/s {way}" for way, rate in (("up", link.up), ("down", link.down)) if rate
    )
    yield "link", f"round trip {_ms(link.rtt_s[1])} ms{', ' if rates else ''}{rates}"
    yield "draft model", f"{_ms(findings.gamma_s)} ms a token, {findings.right / findings.tokens:.0%} guessed right"
    alone_s = findings.pass_s + findings.token_s
    yield "target", f"{_ms(alone_s)} ms a pass, {_ms(findings.token_s)} ms more for each further id in it"
    yield "sample", f"{findings.tokens} tokens behind {counted(findings.prompts, 'prompt')}; greedy decoding"


def _table(findings: Findings) -> Iterator[str]:
    assert findings.rows is not None
    yield f"{'strategy':<10}{'ms a token':>11}  {'95 %':<18}{'cloud s per 1000':>17}  best with"
    for row in findings.rows:
        low, high = row.interval
        span = "" if math.isnan(low) else f"{_ms(low)} to {_ms(high)}"
        note = _settings(row) if row.exact else "not the target's output"
        cost = f"{row.cloud_s_per_1000_tokens:.3g}"
        yield f"{row.strategy:<10}{_ms(row.tpt_s):>11}  {span:<18}{cost:>17}  {note}".rstrip()


def _settings(row: Row) -> str:
    told = {name: value for name, value in row.settings.items() if name not in ("strategy", "policy")}
    return ", ".join(f"{name.replace('_', ' ')} {_flag_value(value)}" for name, value in told.items())


def _sentences(findings: Findings) -> Iterator[str]:
    assert findings.rows is not None and findings.lead is not None
    by_name = {row.strategy: row for row in findings.rows}
    first, second = findings.rows[:2]
    assert findings.cheapest is not None
    cheapest, cloud = by_name[findings.cheapest], by_name["cloud"]
    if findings.clear:
        yield f"{first.strategy} will be fastest: {_ms(first.tpt_s)} ms per token, {second.strategy} is next."
    else:
        yield (
            f"{first.strategy} looks fastest, {_ms(first.tpt_s)} ms per token; so small a sample cannot tell it from "
            f"{' and '.join(findings.alike)}."
        )
    share = cheapest.cloud_s_per_1000_tokens / cloud.cloud_s_per_1000_tokens if cloud.cloud_s_per_1000_tokens else 1.0
    against = "" if cheapest is cloud else f", {share:.0%} of what the target alone needs"
    yield (
        f"{cheapest.strategy} costs the cloud least: {cheapest.cloud_s_per_1000_tokens:.3g} s of its time per 1000 "
        f"tokens{against}."
    )
    yield _changes(findings)
    yield (
        f"This rests on {counted(findings.tokens, 'token')} of greedy decoding: settings were tried on "
        f"{counted(findings.tuned_on, 'prompt')} and judged on {counted(findings.judged_on, 'prompt')}, in simulation."
    )


def _changes(findings: Findings) -> str:
    assert findings.rows is not None and findings.most_rtt_s is not None
    most = f"{findings.most_rtt_s:g} s"
    name, parts = findings.rows[0].strategy, []
    for change, word in ((findings.below, "below"), (findings.above, "above")):
        if change is not None:
            doubt = " (so it may be here: the sample cannot tell)" if change.strategy in findings.alike else ""
            about = f"{float(f'{1e3 * change.rtt_s:.2g}'):g} ms"
            parts.append(f"{word} a round trip of about {about} {change.strategy} would be faster{doubt}")
    if not parts:
        return f"At no round trip up to {most} would another be faster than {name}."
    if findings.above is None:
        parts.append(f"up to {most} above it none")
    told = "; ".join(parts)
    return f"{told[0].upper()}{told[1:]}."


def command(edge: EdgeConfig, settings: Mapping[str, Any]) -> str:
    """The command line that generates so, with what was given of `edge` that matters for it. It runs as it is."""
    defaults = EdgeConfig.__dataclass_fields__
    given = {name: getattr(edge, name) for name in KEPT if getattr(edge, name) != defaults[name].default}
    words = ["pipesd-edge", "generate"]
    for name, value in {**given, **settings}.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", _flag_value(each)]
    return shlex.join([*words, "--prompt", PROMPT])


def rounded(value: Any) -> Any:
    """To what a person would write."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _flag_value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ms(seconds: float | None) -> str:
    """Milliseconds to three digits."""
    assert seconds is not None
    ms = seconds * 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
