"""Strategies: which rung of the cloud's ladder, when draft tokens are sent, when verification is asked for, what the
edge does meanwhile. Presets by name, each part also by itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesd.config import EdgeConfig, GenerateConfig, set_options
from pipesd.core import Mode
from pipesd.errors import UsageError
from pipesd.policy.baselines import AdaptiveSequence
from pipesd.policy.gain import Gain
from pipesd.policy.token_batches import Batching, TokenBatchPlan, make_batching
from pipesd.policy.trigger import (
    DualThreshold,
    EntropyThreshold,
    FixedLength,
    SequenceThreshold,
    TokenThreshold,
    Trigger,
)

if TYPE_CHECKING:
    from pipesd.policy.plugin import Policy

PLANNED = ("flow",)
OWN = "policy"  # trigger, or token batching, that a policy brings with it
TUNABLE = ("dual", "sequence", "token", "entropy")  # triggers whose thresholds may be searched for in a run


@dataclass(frozen=True)
class Strategy:
    """One way to share the work, in the words of the options. Without a trigger the edge does not draft for
    verification. Thresholds that the trigger does not know are of no effect."""

    name: str
    mode: Mode = Mode.NAV
    batching: str = "none"
    trigger: str | None = None
    waiting: str = "idle"
    draft_length: int = 1
    sequence_threshold: float = 0.0
    token_threshold: float = 0.0
    entropy_threshold: float = 0.0
    confidence: str = "probability"  # what the trigger takes for it, or "margin"
    tuned: bool = False  # thresholds are searched for while it runs
    guarded: bool = False  # the cloud goes on alone where drafts do not pay
    policy: Policy | None = None  # a user's own, whose trigger has these values of its parameters
    values: tuple[tuple[str, float], ...] = ()

    @property
    def drafts(self) -> bool:
        """Whether the edge proposes tokens to the cloud."""
        return self.trigger is not None

    @property
    def ahead(self) -> bool:
        """Whether the edge drafts on while a verdict is awaited."""
        return self.waiting == "draft"

    @property
    def plans(self) -> bool:
        """Whether token batches are sent by plans that are made for link and drafting."""
        return self.batching in ("dp", OWN)

    @property
    def key(self) -> str:
        """What tells one way from another for which other thresholds are best."""
        margin = " margin" if self.confidence == "margin" else ""
        trigger = self.trigger if self.policy is None else f"policy {self.policy.name} {self.policy.digest[:16]}"
        return f"{trigger} {self.batching} {self.waiting}{margin}"

    def recorded(self) -> dict[str, Any]:
        """All of it for an event log, ready for JSON."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "policy", "values")}
        if self.policy is not None:
            said["policy"] = {"name": self.policy.name, "digest": self.policy.digest, **dict(self.values)}
        return {"strategy": self.name, **said}

    @property
    def uses_cloud(self) -> bool:
        return self.name != "local"


PRESETS = {
    "auto": Strategy("auto", batching="dp", trigger="dual", waiting="draft", tuned=True, guarded=True),
    "pipesd": Strategy("pipesd", batching="dp", trigger="dual", waiting="draft", tuned=True),
    "vanilla": Strategy("vanilla", trigger="fixed"),
    "hsl": Strategy("hsl", trigger="token"),
    "edgellm": Strategy("edgellm", trigger="adaptive", waiting="draft"),
    "cloud": Strategy("cloud", mode=Mode.FREE),
    "local": Strategy("local"),
}


class Thresholds(NamedTuple):
    """What a trigger starts with where nothing else is given."""

    sequence: float = 0.0
    token: float = 0.0
    entropy: float = 0.0


USED_BY = {  # options of triggers, and which have them
    "draft_length": ("fixed",),
    "sequence_threshold": ("dual", "sequence", "adaptive"),
    "token_threshold": ("dual", "token"),
    "entropy_threshold": ("entropy",),
    "confidence": ("dual", "sequence", "token", "gain", "adaptive"),
}
ALWAYS = {  # options without effect on strategies that leave one of the sides out
    "cloud": ("context", "gpu_layers", "threads"),
    "local": ("cloud", "connect_s", "patience_s"),
}
FIRST = {
    "dual": Thresholds(sequence=0.1, token=0.45),
    "sequence": Thresholds(sequence=0.3),
    "token": Thresholds(token=0.5),
    "entropy": Thresholds(entropy=1.0),
    "adaptive": Thresholds(sequence=0.5),
}


def make_strategy(config: EdgeConfig) -> Strategy:
    """The preset that `config` names, or the policy, with the parts and thresholds that it gives; a threshold that is
    given is kept, so nothing is tuned then. Raises UsageError for a name that is none, and for a policy that is none.
    The policy's file is executed."""
    if config.policy:
        return _of_policy(config)
    if config.strategy in PLANNED:
        raise UsageError(
            f"strategy {config.strategy!r} is not part of this version: choose one of {', '.join(PRESETS)}"
        )
    if config.strategy not in PRESETS:
        raise UsageError(f"unknown strategy {config.strategy!r}: choose one of {', '.join(PRESETS)}")
    preset = PRESETS[config.strategy]
    if not preset.drafts:
        return preset
    trigger = config.trigger or preset.trigger
    assert trigger is not None
    first = FIRST.get(trigger, Thresholds())
    given = config.sequence_threshold, config.token_threshold, config.entropy_threshold
    sequence, token, entropy = (
        first_value if value is None else value for value, first_value in zip(given, first, strict=True)
    )
    return replace(
        preset,
        batching=config.batching or preset.batching,
        trigger=trigger,
        waiting=config.waiting or preset.waiting,
        draft_length=config.draft_length,
        sequence_threshold=sequence,
        token_threshold=token,
        entropy_threshold=entropy,
        confidence=config.confidence,
        tuned=preset.tuned and trigger in TUNABLE and config.tuning != "off" and given == (None, None, None),
    )


def _of_policy(config: EdgeConfig) -> Strategy:
    from pipesd.policy.plugin import load_policy

    for name in ("strategy", "trigger"):
        if (value := getattr(config, name)) != EdgeConfig.__dataclass_fields__[name].default:
            raise UsageError(f"a policy has its own {name}: leave out --{name} {value}, or --policy {config.policy}")
    policy = load_policy(config.policy)
    given = policy.given(config.policy_option)
    margins = "margin" in (config.confidence, policy.confidence)
    return Strategy(
        policy.name,
        mode=Mode[policy.mode.upper()],
        batching=config.batching or (policy.batching if isinstance(policy.batching, str) else OWN),
        trigger=OWN,
        waiting=config.waiting or policy.waiting,
        confidence="margin" if margins else "probability",
        tuned=bool(policy.parameters) and not given and config.tuning != "off",
        guarded=policy.guarded,
        policy=policy,
        values=tuple({**policy.first, **given}.items()),
    )


def without_effect(config: EdgeConfig) -> tuple[str, ...]:
    """Names of the options of `config` that were set and change nothing with its strategy."""
    strategy = make_strategy(config)
    idle = set(ALWAYS.get(strategy.name, ()))
    if not strategy.drafts:
        idle |= {"batching", "trigger", "waiting", "link_model", "draft_ahead", "tuning", *USED_BY}
    else:
        idle |= {name for name, triggers in USED_BY.items() if strategy.trigger not in triggers}
        if strategy.policy is not None:
            idle.discard("confidence")
        if not strategy.plans:
            idle.add("link_model")
        if not strategy.tuned and config.tuning != "off":
            idle.add("tuning")
    return tuple(f.name for f in fields(config) if f.name in idle and getattr(config, f.name) != f.default)


def check_together(strategy: Strategy, options: GenerateConfig) -> None:
    """Raises UsageError that names what cannot be had with this strategy."""
    if options.logprobs is None:
        return
    if not strategy.uses_cloud:
        raise UsageError(f"logprobs are the target's, which strategy {strategy.name} does without: leave them out")
    if strategy.drafts and options.temperature > 0 and options.sampling != "noise":
        raise UsageError(
            f"logprobs do not go with sampling {options.sampling}, where the edge draws what is not accepted: "
            "take sampling noise, or strategy cloud"
        )


def idle_options(strategy: Strategy, options: GenerateConfig) -> list[str]:
    """Names of the options that were set and change nothing with this strategy."""
    return [] if strategy.drafts or options.temperature == 0 else set_options(options, ("sampling", "top_mass"))


def make_trigger(strategy: Strategy) -> Trigger:
    """The trigger of a strategy that drafts. Raises UsageError for a threshold out of its bounds."""
    if strategy.policy is not None:
        return strategy.policy.make_trigger(dict(strategy.values))
    match strategy.trigger:
        case "dual":
            return DualThreshold(strategy.sequence_threshold, strategy.token_threshold)
        case "sequence":
            return SequenceThreshold(strategy.sequence_threshold)
        case "token":
            return TokenThreshold(strategy.token_threshold)
        case "fixed":
            return FixedLength(strategy.draft_length)
        case "entropy":
            return EntropyThreshold(strategy.entropy_threshold)
        case "gain":
            return Gain()
        case "adaptive":
            return AdaptiveSequence(strategy.sequence_threshold)
    raise AssertionError(f"no trigger {strategy.trigger!r}")


def batching_of(strategy: Strategy, plan: TokenBatchPlan) -> Batching:
    """The token batching of a strategy that drafts; `plan` is what it starts with."""
    if strategy.batching != OWN:
        return make_batching(strategy.batching, plan)
    assert strategy.policy is not None
    return strategy.policy.make_batching(plan)
