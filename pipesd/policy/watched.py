"""A user's trigger and token batching at work: what goes wrong in them is one line that names the policy, its file and
the line in it. What they return is checked, so that a policy decides when things are sent and asked, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import TracebackType
from typing import Any

from pipesd.errors import UsageError
from pipesd.policy.token_batches import Batching, TokenBatchPlan
from pipesd.policy.trigger import Costs, Trigger, confidence

FORCED = "must"  # the rule by which an edge asks that can do nothing else: no policy's
LONGEST_NAME = 40  # characters of a rule's name


class PolicyFailed(UsageError):
    """Something in a user's policy raised, or returned what it may not. What was committed before stays valid."""


class Watch:
    """Calls into one policy's code. After its first failure nothing of it is called any more."""

    def __init__(self, policy: str, file: str) -> None:
        self._policy, self._file = policy, file
        self.failure: PolicyFailed | None = None

    def call(self, method: Callable[..., Any], *arguments: Any, **parameters: Any) -> Any:
        """What the method returns. Raises PolicyFailed."""
        try:
            return method(*arguments, **parameters)
        except (Exception, SystemExit) as error:
            raise self.raised(method, error) from error

    def tell(self, method: Callable[..., Any], *arguments: Any) -> None:
        """The same where nothing comes back, and where a failure that was told already is not told again."""
        if self.failure is None:
            self.call(method, *arguments)

    def ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The same where the answer is needed: after a failure that failure is raised again."""
        self.check()
        return self.call(method, *arguments)

    def check(self) -> None:
        """Raises the failure again, if there was one."""
        if self.failure is not None:
            raise PolicyFailed(str(self.failure)) from self.failure

    def raised(self, method: Callable[..., Any], error: BaseException) -> PolicyFailed:
        """What to raise for what the method raised."""
        line = line_in(self._file, error.__traceback__)
        return self._failed(method, line, f"raised {type(error).__name__}: {error}")

    def refuse(self, method: Callable[..., Any], got: Any, wanted: str) -> PolicyFailed:
        """What to raise for an answer that is none."""
        code = getattr(method, "__code__", None)
        return self._failed(method, code and code.co_firstlineno, f"returned {_shown(got)}, wanted {wanted}")

    def _failed(self, method: Callable[..., Any], line: int | None, what: str) -> PolicyFailed:
        name = getattr(method, "__name__", type(method).__name__)
        self.failure = PolicyFailed(f"{place(self._policy, self._file, line)}: {name} {what}")
        return self.failure


class WatchedTrigger:
    """The trigger of a policy, watched, with the policy's parameters as attributes."""

    def __init__(self, trigger: Trigger, watch: Watch, values: Mapping[str, float]) -> None:
        put = object.__setattr__
        put(self, "_trigger", trigger)
        put(self, "_observe", trigger.observe)
        put(self, "_watch", watch)
        put(self, "_values", dict(values))

    _trigger: Trigger
    _observe: Callable[[float, float], Any]
    _watch: Watch
    _values: dict[str, float]

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        self._watch.check()
        try:  # once for every draft token, so that a call less counts
            rule = self._observe(confidence(p_draft), entropy if entropy >= 0.0 else math.inf)
        except (Exception, SystemExit) as error:
            raise self._watch.raised(self._observe, error) from error
        if rule is None or (type(rule) is str and _named(rule)):
            return rule
        wanted = f"None or the name of a rule, 1 to {LONGEST_NAME} characters that can be printed, not {FORCED!r}"
        raise self._watch.refuse(self._observe, rule, wanted)

    def asked(self) -> None:
        self._watch.tell(self._trigger.asked)

    def reset(self) -> None:
        self._watch.tell(self._trigger.reset)

    def decided(self, accepted: int, rejected: bool) -> None:
        self._watch.tell(self._trigger.decided, accepted, rejected)

    def adopt(self, costs: Costs) -> None:
        self._watch.tell(self._trigger.adopt, costs)

    def __getattr__(self, name: str) -> float:
        """A parameter as the trigger has it now; as it was set last where that is no number."""
        if name not in self._values:
            raise AttributeError(name)
        now: Any = getattr(self._trigger, name, None)
        real = isinstance(now, Real) and not isinstance(now, bool)
        return float(now) if real and math.isfinite(now) else self._values[name]

    def __setattr__(self, name: str, value: float) -> None:
        assert name in self._values, f"the policy has no parameter {name}"
        self._values[name] = value
        self._watch.tell(setattr, self._trigger, name, value)


class WatchedBatching:
    """The token batching of a policy, watched; counts what waits by itself."""

    def __init__(self, batching: Batching, watch: Watch) -> None:
        self.waiting = 0
        self._batching, self._watch = batching, watch

    def drafted(self, link_idle: bool) -> int:
        self.waiting += 1
        return self._going(self._batching.drafted, link_idle)

    def idle(self) -> int:
        return self._going(self._batching.idle) if self.waiting else 0

    def flush(self) -> int:
        count, self.waiting = self.waiting, 0
        self._watch.tell(self._batching.flush)
        return count

    def taken(self) -> None:
        self.waiting = 0
        self._watch.tell(self._batching.taken)

    def reset(self) -> None:
        self.waiting = 0
        self._watch.tell(self._batching.reset)

    def adopt(self, plan: TokenBatchPlan) -> None:
        self._watch.tell(self._batching.adopt, plan)

    def _going(self, method: Callable[..., Any], *arguments: Any) -> int:
        waiting = self.waiting
        count = self._watch.ask(method, *arguments)
        whole = isinstance(count, Integral) and not isinstance(count, bool)
        if not whole or count not in (0, waiting):
            raise self._watch.refuse(method, count, f"0 or all that wait, {waiting}")
        if count:
            self.waiting = 0
        return int(count)


def place(policy: str, file: str, line: int | None) -> str:
    """Where in which policy."""
    where = file if line is None else f"{file}, line {line}"
    return f"policy {policy} ({where})" if policy else f"policy {where}"


def line_in(file: str, trace: TracebackType | None) -> int | None:
    """The last line of `file` that a trace went through; None if it did not."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _named(rule: str) -> bool:
    return 0 < len(rule) <= LONGEST_NAME and rule.isprintable() and rule != FORCED


def _shown(value: Any) -> str:
    """In few words; the repr of the user's own classes is not called."""
    if type(value) not in (bool, int, float, str):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
