"""A researcher's own policy in one file: a trigger, a token batching, their parameters. See docs/policy.md.

The file is Python and is executed, with all that its user may do: only one that the user named is ever loaded.
"""

from __future__ import annotations

import hashlib
import keyword
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

from pipesd.config import BATCHINGS, CONFIDENCES, WAITINGS
from pipesd.errors import UsageError
from pipesd.policy.search_space import Parameter, SearchSpace
from pipesd.policy.strategy import PLANNED, PRESETS
from pipesd.policy.token_batches import AtTrigger, Batching, TokenBatchPlan
from pipesd.policy.trigger import Costs, Trigger
from pipesd.policy.watched import (
    BATCHING,
    TRIGGER,
    Methods,
    PolicyFailed,
    Watch,
    WatchedBatching,
    WatchedTrigger,
    line_in,
    one_line,
    place,
    told,
)
from pipesd.streams import Aside

__all__ = ["BaseBatching", "BaseTrigger", "Costs", "Parameter", "Policy", "PolicyFailed", "load_policy"]

MODES = ("nav", "eager")
LARGEST_BYTES = 1 << 20  # of a file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_loaded: dict[tuple[str, str], Policy] = {}  # by file and digest


class BaseTrigger:
    """What a trigger needs beside `observe`: its parameters as attributes, and `reset` whenever a new draft begins."""

    def __init__(self, /, **parameters: float) -> None:
        for name, value in parameters.items():
            setattr(self, name, value)
        self.reset()

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        """See `pipesd.policy.trigger.Trigger`, as for the others."""
        raise NotImplementedError("a trigger says in `observe` when to ask")

    def reset(self) -> None:
        pass

    def asked(self) -> None:
        self.reset()

    def decided(self, accepted: int, rejected: bool) -> None:
        pass

    def adopt(self, costs: Costs) -> None:
        pass


class BaseBatching(AtTrigger):
    """A token batching by one question: `due`, asked with each token, and while the link is idle and some wait.
    `plan` is what the planner would do at present."""

    plan: TokenBatchPlan | None = None

    def due(self, link_idle: bool) -> bool:
        """Whether all `self.waiting` tokens go now; otherwise the trigger sends them."""
        return False

    def drafted(self, link_idle: bool) -> int:
        self.waiting += 1
        return self._going(link_idle)

    def idle(self) -> int:
        return self._going(True) if self.waiting else 0

    def adopt(self, plan: TokenBatchPlan) -> None:
        self.plan = plan

    def _going(self, link_idle: bool) -> int:
        if not self.due(link_idle):
            return 0
        count, self.waiting = self.waiting, 0
        return count


class TriggerFactory(Protocol):
    """Makes a trigger from the values of the policy's parameters, which come as keywords."""

    def __call__(self, **parameters: Any) -> Trigger: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A strategy of one's own. Raises UsageError for a part that is none.

    Args:
        name: what tables and statistics call it: letters, digits, `.`, `_` and `-`, at most 40, and no preset's.
        trigger: a class or function that makes the trigger; it gets each parameter as a keyword. The trigger keeps them
            as attributes of the same names, which are set while it runs where they are tuned.
        batching: `dp`, `greedy`, `immediate`, `none`, or what makes a `Batching`, without arguments.
        waiting: `draft` or `idle`, while a verdict is awaited.
        mode: `nav`, or `eager`: the cloud verifies what has arrived whenever it is free.
        confidence: `probability` or `margin`, what `observe` gets first.
        parameters: a `Parameter`, or a pair (low, high), for each name; they are tuned unless they are given.
        first: their first values; the middle of the bounds where there is none.
        guarded: the cloud goes on alone where drafts do not pay, as with `auto`.
        file, digest: where it came from, and the SHA-256 of what was there (hex); set by `load_policy`.
    """

    name: str
    trigger: TriggerFactory
    batching: str | Callable[[], Batching] = "dp"
    waiting: str = "draft"
    mode: str = "nav"
    confidence: str = "probability"
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    guarded: bool = False
    file: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"name: got {self.name!r}, wanted 1 to 40 letters, digits, '.', '_' and '-'")
        if self.name in (*PRESETS, *PLANNED):
            raise UsageError(f"name: {self.name!r} is a strategy of PipeSD: choose another")
        if not callable(self.trigger):
            raise UsageError(f"trigger: got {self.trigger!r}, wanted a class or function that makes one")
        if not callable(self.batching):
            _one_of("batching", self.batching, BATCHINGS, " or what makes one")
        _one_of("waiting", self.waiting, WAITINGS)
        _one_of("mode", self.mode, MODES)
        _one_of("confidence", self.confidence, CONFIDENCES)
        if type(self.guarded) is not bool:
            raise UsageError(f"guarded: got {self.guarded!r}, wanted True or False")
        space = _checked_parameters(self.parameters)
        if not isinstance(self.first, Mapping):
            raise UsageError(f"first: got {self.first!r}, wanted values of parameters by their names")
        for name in self.first:
            if name not in space:
                raise UsageError(f"first: no parameter {name!r}: there are {', '.join(space) or 'none'}")
        first = {name: p.checked(f"first: {name}", self.first.get(name, p.value(0.5))) for name, p in space.items()}
        object.__setattr__(self, "parameters", space)
        object.__setattr__(self, "first", first)

    def given(self, options: Sequence[str]) -> dict[str, float]:
        """The values in options NAME=VALUE. Raises UsageError for a name or a value that is none."""
        values: dict[str, float] = {}
        for each in options:
            name, found, text = each.partition("=")
            if name not in self.parameters or not found:
                known = ", ".join(self.parameters) or "none"
                raise UsageError(f"policy-option: got {each!r}, wanted NAME=VALUE; policy {self.name} has {known}")
            if name in values:
                raise UsageError(f"policy-option: {name} is given twice: give it once")
            try:
                value: float | str = float(text)
            except ValueError:
                value = text
            values[name] = self.parameters[name].checked(f"policy-option: {name}", value)
        return values

    def make_trigger(self, values: Mapping[str, float]) -> WatchedTrigger:
        """Its trigger with these values, watched. Raises PolicyFailed where it cannot be made, or is none."""
        watch = Watch(self.name, self.file)
        trigger = watch.call(self.trigger, **values)
        methods = _methods(self, watch, trigger, "trigger", TRIGGER)
        for name in values:
            if not watch.call(hasattr, trigger, name):
                raise PolicyFailed(
                    f"{self._place}: its trigger has no attribute {name!r}: keep each parameter under its name, where "
                    "it is set when another value is tried"
                )
        return WatchedTrigger(trigger, methods, watch, values)

    def make_batching(self, plan: TokenBatchPlan) -> WatchedBatching:
        """Its own token batching, watched; `plan` is what the planner starts with. Raises PolicyFailed."""
        assert callable(self.batching)
        watch = Watch(self.name, self.file)
        batching = watch.call(self.batching)
        watched = WatchedBatching(_methods(self, watch, batching, "batching", BATCHING), watch)
        watched.adopt(plan)
        return watched

    @property
    def _place(self) -> str:
        return place(self.name, self.file, None)


def load_policy(path: str) -> Policy:
    """Execute the Python file at `path` and give its `POLICY`, after its parts were made once. What was executed before
    in this process, and has not changed, is not executed again.

    Raises UsageError, in one line, for a file that cannot be read or is no Python, for what it raises, and for a policy
    that is none.
    """
    file = os.path.expanduser(path)
    try:
        with open(file, "rb") as opened:
            source = opened.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{place('', path, None)}: {getattr(error, 'strerror', None) or error}") from error
    if len(source) > LARGEST_BYTES:
        raise UsageError(f"{place('', path, None)}: more than {LARGEST_BYTES} bytes: this is no policy")
    digest = hashlib.sha256(source).hexdigest()
    key = os.path.abspath(file), digest
    if key not in _loaded:
        _loaded[key] = _executed(source, path, file, digest)
    return _loaded[key]


def _executed(source: bytes, path: str, file: str, digest: str) -> Policy:
    module = ModuleType(f"pipesd_policy_{digest[:16]}", "")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses of the file look for it
    try:
        with Aside():
            exec(compile(source, file, "exec"), module.__dict__)
            policy = module.__dict__.get("POLICY")
            if isinstance(policy, Policy):
                policy = replace(policy, file=file, digest=digest)
    except KeyboardInterrupt:
        raise
    except SyntaxError as error:
        line = error.lineno if error.filename == file else line_in(file, error.__traceback__)
        raise UsageError(f"{place('', path, line)}: {one_line(str(error.msg))}") from error
    except BaseException as error:  # the user's code, see `watched`
        what = one_line(str(error)) if isinstance(error, UsageError) else told(error)
        raise UsageError(f"{place('', path, line_in(file, error.__traceback__))}: {what}") from error
    if not isinstance(policy, Policy):
        got = "nothing is called POLICY" if policy is None else f"POLICY is a {one_line(type(policy).__name__)}"
        raise UsageError(f"{place('', path, None)}: {got}, wanted POLICY = Policy(name=…, trigger=…)")
    policy.make_trigger(policy.first)
    if callable(policy.batching):
        policy.make_batching(TokenBatchPlan((1,), 0.0, 0.0, 0.0, 0.0, 0.0))
    return policy


def _checked_parameters(parameters: Any) -> dict[str, Parameter]:
    if not isinstance(parameters, Mapping):
        raise UsageError(f"parameters: got {parameters!r}, wanted each one's bounds by its name")
    for name in parameters:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise UsageError(f"parameters: got the name {name!r}, wanted one that an attribute may have")
        if name in (*TRIGGER, "policy", "self"):
            raise UsageError(f"parameters: {name!r} means something else: choose another name")
    try:
        return SearchSpace(parameters).parameters if parameters else {}
    except UsageError as error:
        raise UsageError(f"parameters: {error}") from None


def _one_of(name: str, value: Any, choices: Sequence[str], more: str = "") -> None:
    if value not in choices:
        raise UsageError(f"{name}: got {value!r}, wanted one of {', '.join(choices)}{more}")


def _methods(policy: Policy, watch: Watch, made: Any, what: str, names: Sequence[str]) -> Methods:
    """All of these. Raises PolicyFailed where it lacks one."""
    methods = watch.methods(made, names)
    if missing := [name for name in names if name not in methods]:
        base = f"Base{what.capitalize()}"
        kind = one_line(type(made).__name__)
        raise PolicyFailed(f"{policy._place}: its {what} is a {kind} without {', '.join(missing)}: make it a {base}")
    return methods
