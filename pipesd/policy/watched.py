"""A user's trigger and token batching at work: what goes wrong in them is one line that names the policy, its file and
the line in it. What they return is checked, so that a policy decides when things are sent and asked, and nothing else.

What is called here is the user's code, which may raise anything: whatever it is, the mistake is the policy's and not
the program's, and what was committed before it has to be ended in order. So everything is caught, but for an interrupt,
which is meant for the run. What the code prints goes to stderr: stdout is for results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType, MethodType, TracebackType
from typing import Any

from pipesd.errors import UsageError
from pipesd.policy.token_batches import TokenBatchPlan
from pipesd.policy.trigger import Costs, confidence
from pipesd.streams import Aside

FORCED = "must"  # the rule by which an edge asks that can do nothing else: no policy's
LONGEST_NAME = 40  # characters of a rule's name
TRIGGER = ("observe", "asked", "reset", "decided", "adopt")  # methods of what is watched
BATCHING = ("drafted", "idle", "flush", "taken", "reset", "adopt")
_LONGEST = 300  # characters of what was raised
Methods = dict[str, Callable[..., Any]]


class PolicyFailed(UsageError):
    """Something in a user's policy raised, or returned what it may not. What was committed before stays valid."""


class Watch:
    """Calls into one policy's code. After its first failure nothing of it is called any more."""

    def __init__(self, policy: str, file: str) -> None:
        self._policy, self._file = policy, file
        self.failure: PolicyFailed | None = None

    def call(self, method: Callable[..., Any], /, *arguments: Any, **parameters: Any) -> Any:
        """What the method returns. Raises PolicyFailed."""
        try:
            with Aside():
                return method(*arguments, **parameters)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self.raised(method, error) from error

    def methods(self, made: Any, names: Sequence[str]) -> Methods:
        """Those of these methods that it has. Raises PolicyFailed."""
        found = {name: self.call(getattr, made, name, None) for name in names}
        return {name: method for name, method in found.items() if callable(method)}

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
        """What to raise for what the method raised, or what the user's method did that it called."""
        frames = _frames_in(self._file, error.__traceback__)
        own = frames[0].tb_frame.f_code.co_name if frames else "<"
        name = _name(method) if own.startswith("<") else own
        return self._failed(name, frames[-1].tb_lineno if frames else None, f"raised {told(error)}")

    def refuse(self, method: Callable[..., Any], got: Any, wanted: str) -> PolicyFailed:
        """What to raise for an answer that is none."""
        name, line = _name(method), None
        if isinstance(method, FunctionType | MethodType):
            if method.__code__.co_filename == self._file:
                line = method.__code__.co_firstlineno
            elif isinstance(method, MethodType):  # inherited
                name += f" of {_name(type(method.__self__))}"
        return self._failed(name, line, f"returned {_shown(got)}, wanted {wanted}")

    def _failed(self, name: str, line: int | None, what: str) -> PolicyFailed:
        self.failure = PolicyFailed(f"{place(self._policy, self._file, line)}: {name} {what}")
        return self.failure


class WatchedTrigger:
    """The trigger of a policy, watched, with the policy's parameters as attributes."""

    def __init__(self, trigger: Any, methods: Methods, watch: Watch, values: Mapping[str, float]) -> None:
        put = object.__setattr__
        put(self, "_trigger", trigger)
        put(self, "_observe", methods["observe"])
        put(self, "_methods", methods)
        put(self, "_watch", watch)
        put(self, "_values", dict(values))

    _trigger: Any
    _observe: Callable[[float, float], Any]
    _methods: Methods
    _watch: Watch
    _values: dict[str, float]

    def observe(self, p_draft: float, entropy: float = 0.0) -> str | None:
        rule = self._watch.ask(self._observe, confidence(p_draft), entropy if entropy >= 0.0 else math.inf)
        if rule is None or (type(rule) is str and _named(rule)):
            return rule
        wanted = f"None or the name of a rule, 1 to {LONGEST_NAME} characters that can be printed, not {FORCED!r}"
        raise self._watch.refuse(self._observe, rule, wanted)

    def asked(self) -> None:
        self._watch.tell(self._methods["asked"])

    def reset(self) -> None:
        self._watch.tell(self._methods["reset"])

    def decided(self, accepted: int, rejected: bool) -> None:
        self._watch.tell(self._methods["decided"], accepted, rejected)

    def adopt(self, costs: Costs) -> None:
        self._watch.tell(self._methods["adopt"], costs)

    def __getattr__(self, name: str) -> float:
        """A parameter as the trigger has it now; as it was set last where that is no number, or cannot be had."""
        if name not in self._values:
            raise AttributeError(name)
        number: float | None = None
        if self._watch.failure is None:
            with suppress(PolicyFailed):  # it is asked for where a generation ends, and told by the next call
                number = self._watch.call(_number, self._trigger, name)
        return self._values[name] if number is None else number

    def __setattr__(self, name: str, value: float) -> None:
        assert name in self._values, f"the policy has no parameter {name}"
        self._values[name] = value
        self._watch.tell(setattr, self._trigger, name, value)


class WatchedBatching:
    """The token batching of a policy, watched; counts what waits by itself."""

    def __init__(self, methods: Methods, watch: Watch) -> None:
        self.waiting = 0
        self._methods, self._watch = methods, watch

    def drafted(self, link_idle: bool) -> int:
        self.waiting += 1
        return self._going("drafted", link_idle)

    def idle(self) -> int:
        return self._going("idle") if self.waiting else 0

    def flush(self) -> int:
        count, self.waiting = self.waiting, 0
        self._watch.tell(self._methods["flush"])
        return count

    def taken(self) -> None:
        self.waiting = 0
        self._watch.tell(self._methods["taken"])

    def reset(self) -> None:
        self.waiting = 0
        self._watch.tell(self._methods["reset"])

    def adopt(self, plan: TokenBatchPlan) -> None:
        self._watch.tell(self._methods["adopt"], plan)

    def _going(self, name: str, *arguments: Any) -> int:
        waiting, method = self.waiting, self._methods[name]
        got = self._watch.ask(method, *arguments)
        count: int = got if type(got) is int else self._watch.call(_whole, got)
        if count not in (0, waiting):
            raise self._watch.refuse(method, got, f"0 or all that wait, {waiting}")
        if count:
            self.waiting = 0
        return count


def place(policy: str, file: str, line: int | None) -> str:
    """Where in which policy."""
    file = _printable(file)
    where = f"{file}, line {line}" if line else file
    return f"policy {policy} ({where})" if policy else f"policy {where}"


def line_in(file: str, trace: TracebackType | None) -> int | None:
    """The last line of `file` that a trace went through; None if it did not."""
    frames = _frames_in(file, trace)
    return frames[-1].tb_lineno if frames else None


def told(error: BaseException) -> str:
    """What was raised, on one line that is not too long, whatever its text is."""
    try:
        with Aside():
            text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 (the user's code again)
        text = "without a text that can be shown"
    kind = one_line(type(error).__name__)
    return f"{kind}: {one_line(text)}" if text else kind


def one_line(text: str) -> str:
    """A user's text as a message may repeat it."""
    line = _printable(text[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _frames_in(file: str, trace: TracebackType | None) -> list[TracebackType]:
    """Where a trace went through `file`, the calling one first."""
    frames = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            frames.append(trace)
        trace = trace.tb_next
    return frames


def _name(method: Callable[..., Any]) -> str:
    named = isinstance(method, FunctionType | MethodType | BuiltinFunctionType | type)
    return one_line(method.__name__ if named else type(method).__name__)


def _number(of: Any, name: str) -> float | None:
    now: Any = getattr(of, name, None)
    real = isinstance(now, Real) and not isinstance(now, bool)
    return float(now) if real and math.isfinite(now) else None


def _whole(got: Any) -> int:
    """As an int; -1 for what is no count."""
    return -1 if isinstance(got, bool) or not isinstance(got, Integral) else operator.index(got)


def _named(rule: str) -> bool:
    return 0 < len(rule) <= LONGEST_NAME and rule.isprintable() and rule != FORCED


def _shown(value: Any) -> str:
    """In few words; the repr of the user's own classes is not called."""
    if type(value) not in (bool, int, float, str):
        return f"a {one_line(type(value).__name__)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
