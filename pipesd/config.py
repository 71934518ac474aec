"""What can be set: frozen, checked dataclasses. Each default, bound and help text is written once, here; command-line
flags and configuration files are made from the fields."""

from __future__ import annotations

import argparse
import difflib
import functools
import numbers
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pipesd.core import LEAST_AHEAD
from pipesd.errors import UsageError
from pipesd.logit_bias import checked_bias

DEFAULT_ADDRESS = "tcp://127.0.0.1:7421"
BACKENDS = ("plain", "transformers")
BATCHINGS = ("dp", "greedy", "immediate", "none")
TRIGGERS = ("dual", "sequence", "token", "fixed", "entropy", "gain", "adaptive")
WAITINGS = ("draft", "idle")
CONFIDENCES = ("probability", "margin")
METHODS = ("noise", "rejection", "picospec")
MOST_LOGPROBS = 20
Config = TypeVar("Config")
NO_OTHERS: Mapping[str, type] = {}


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    metavar: str | None = None,
    make: Callable[[Any], Any] | None = None,
) -> Any:
    """A field with its bounds (both included) and the help text of its flag. `make` checks what has no such bounds, and
    gives the value that is kept."""
    metadata = {"help": help, "low": low, "high": high, "choices": tuple(choices), "metavar": metavar, "make": make}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """One edge: its draft model, its cloud, how they share the work. Raises UsageError for a value out of bounds."""

    draft: str = option("", "draft model, a GGUF file", metavar="FILE")
    cloud: str = option(DEFAULT_ADDRESS, "address of the cloud", metavar="ADDRESS")
    strategy: str = option(
        "auto",
        "auto (pipesd where drafts pay), pipesd, vanilla, hsl, edgellm, cloud (target alone) or local (draft alone)",
        metavar="NAME",
    )
    policy: str = option(
        "", "a strategy of your own: a Python file, which is executed, see docs/policy.md", metavar="FILE"
    )
    policy_option: tuple[str, ...] = option(
        (), "value of a parameter of the policy, which is not tuned then; may be given several times",
        metavar="NAME=VALUE",
    )  # fmt: skip
    batching: str = option(
        "", "when draft tokens are sent; without it as the strategy says", choices=("", *BATCHINGS), metavar="NAME"
    )
    trigger: str = option(
        "", "when verification is asked for; without it as the strategy says", choices=("", *TRIGGERS), metavar="NAME"
    )
    waiting: str = option(
        "", "draft on or idle while a verdict is awaited; without it as the strategy says", choices=("", *WAITINGS),
        metavar="NAME",
    )  # fmt: skip
    link_model: str = option(
        "streamed", "what token batches are planned for: messages that overlap, or one after the other",
        choices=("streamed", "hockney"), metavar="NAME",
    )  # fmt: skip
    draft_length: int = option(4, "draft tokens per verification (trigger fixed)", low=1, high=LEAST_AHEAD)
    sequence_threshold: float | None = option(
        None, "ask when all tokens of the draft are right with at most this probability (dual, sequence, adaptive)",
        low=0, high=1,
    )  # fmt: skip
    token_threshold: float | None = option(
        None, "ask when a token is right with at most this probability (dual, token)", low=0, high=1
    )
    entropy_threshold: float | None = option(
        None, "ask when the root of the draft's entropy is above this (entropy)", low=0, high=100
    )
    confidence: str = option(
        "probability",
        "how sure of a token triggers take the draft model to be; probability: as it says itself, whatever the "
        "sampling options; margin: by how far ahead of all others the token was when it was drawn",
        choices=CONFIDENCES, metavar="NAME",
    )  # fmt: skip
    tuning: str = option(
        "auto",
        "file that keeps what tuning learns; auto: one in the user's state folder; off: no tuning",
        metavar="FILE",
    )
    draft_ahead: int = option(32, "most tokens drafted ahead of a verdict", low=LEAST_AHEAD, high=1024)
    context: int = option(0, "context of the draft model; 0: its own, at most 8192", low=0, high=1 << 24)
    threads: int = option(0, "threads of the draft model; 0: the usable processors but one, at most 8", low=0, high=512)
    gpu_layers: int = option(0, "layers of the draft model to put on a GPU", low=0, high=10000)
    connect_s: float = option(5.0, "give up if the cloud has not answered by then (s)", low=0.1, high=3600)
    patience_s: float = option(30.0, "give up after hearing nothing for so long (s)", low=0.5, high=86400)
    stall_s: float = option(3600.0, "give up when nothing new came for so long, alive or not (s)", low=1, high=1e7)
    events: str = option("", "write every event of the run to this file, one JSON object a line", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        if not self.tuning:
            raise UsageError("tuning: got an empty name, wanted auto, off or a file")
        if self.policy_option and not self.policy:
            raise UsageError(f"policy-option {self.policy_option[0]}: it goes with --policy FILE")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """One generation. Raises UsageError for a value out of bounds and for options that do not go together."""

    max_tokens: int = option(256, "most tokens to generate", low=1, high=1 << 24)
    temperature: float = option(
        0.0, "0: the target's most probable token, always; above: a sample, the more even the higher", low=0, high=100
    )
    top_k: int = option(0, "keep the k most probable tokens; 0: all", low=0, high=(1 << 31) - 1)
    top_p: float = option(1.0, "keep the most probable tokens up to this mass", low=0, high=1)
    min_p: float = option(0.0, "drop tokens below this share of the most probable one", low=0, high=1)
    repetition_penalty: float = option(
        1.0, "divide the logits above 0 of tokens that occurred by this, multiply those below 0", low=0.01, high=10
    )
    presence_penalty: float = option(0.0, "take this off the logits of tokens that occurred", low=-2, high=2)
    frequency_penalty: float = option(0.0, "take this off for each time that a token occurred", low=-2, high=2)
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "add this to the logit of one id, -inf to forbid it; may be given several times",
        metavar="ID=BIAS", make=checked_bias,
    )  # fmt: skip
    seed: int | None = option(None, "seed of the sampling; none: a fresh one, reported", low=0, high=(1 << 64) - 1)
    sampling: str = option(
        "noise",
        "how a sample is drawn with drafts; noise: a seed always gives the ids that the target alone would draw; "
        "rejection: the same law, other ids, more tokens accepted and more bytes; picospec: the same with fewer bytes, "
        "approximate",
        choices=METHODS, metavar="NAME",
    )  # fmt: skip
    top_mass: int = option(
        0,
        "how many of the target's most probable ids come down where it refuses a token, 1 to 1024 (sampling picospec)",
        low=0,
        high=1024,
    )
    logprobs: int | None = option(
        None,
        f"report log-probabilities: of each token, and of so many of the most probable ones, 0 to {MOST_LOGPROBS}",
        low=0,
        high=MOST_LOGPROBS,
    )
    stop: tuple[str, ...] = option((), "end before this text; may be given several times", metavar="TEXT")

    def __post_init__(self) -> None:
        check(self)
        if "" in self.stop:
            raise UsageError("a stop text is empty: it would end every output before its first character")
        if self.sampling == "picospec" and not self.top_mass:
            raise UsageError(
                "sampling picospec needs top-mass: say how many of the target's most probable ids come down"
            )
        if self.sampling != "picospec" and self.top_mass:
            raise UsageError(
                f"top-mass goes with sampling picospec, not with {self.sampling}: leave it out, or set it to 0"
            )

    def beyond_greedy(self) -> list[str]:
        """Names of the options that were set and ask for more than the target's most probable tokens."""
        always = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs")
        return set_options(self, ("temperature", *always))

    def without_effect(self) -> list[str]:
        """Names of the options that were set and change nothing at temperature 0."""
        return [] if self.temperature else set_options(self, ("top_k", "top_p", "min_p", "sampling", "top_mass"))


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How long to search for thresholds. Raises UsageError for a value out of bounds."""

    samples: int = option(16, "settings to measure", low=2, high=1000)
    tokens: int = option(60, "tokens to measure each over", low=5, high=10_000)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class CloudConfig:
    """One cloud: its model, where it listens, what it grants. Raises UsageError for a value out of bounds."""

    model: str = option("", "target model, a GGUF file or a Hugging Face folder", metavar="PATH")
    backend: str = option(
        "plain",
        "what runs it; plain: this package's own decoder of llama, mistral, qwen2 and qwen3 models; transformers: any "
        "causal decoder in a Hugging Face folder, several times slower",
        choices=BACKENDS, metavar="NAME",
    )  # fmt: skip
    bind: str = option(DEFAULT_ADDRESS, "address to listen on; port 0 takes a free one", metavar="ADDRESS")
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "precision; auto: float32 on the CPU, the file's own on CUDA",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    context: int = option(0, "longest sequence in tokens; 0: as the model says", low=0, high=1 << 24)
    max_sessions: int = option(8, "sessions held at once, by each worker", low=1, high=4096)
    workers: int = option(1, "worker processes, each with its own copy of the weights", low=1, high=64)
    threads: int = option(1, "threads of each worker; with more than one the output may vary", low=1, high=512)
    row_invariant: bool = option(
        False,
        "on CUDA too: the output does not depend on what shares a pass, not even at near ties, and passes take longer; "
        "on the CPU with one thread it is always so",
    )
    insecure: bool = option(
        False, "listen beyond this machine although nothing is encrypted and nobody is asked for a key"
    )
    keys: str = option("", "folder of keys", metavar="DIR")
    draft_ahead: int = option(32, "most tokens an edge may draft ahead of a verdict", low=LEAST_AHEAD, high=1024)
    run_ahead: int = option(64, "most tokens decoded ahead of the edge's acknowledgement", low=LEAST_AHEAD, high=1024)
    idle_s: float = option(600.0, "forget a session unheard of for so long (s)", low=1, high=1e7)
    stall_s: float = option(60.0, "restart a worker that owes work and says nothing for so long (s)", low=1, high=1e6)
    drain_s: float = option(5.0, "after SIGTERM let running generations go on for so long (s)", low=0, high=3600)

    def __post_init__(self) -> None:
        check(self)
        if self.row_invariant and self.threads > 1:
            raise UsageError(f"row-invariant goes with threads 1, not {self.threads}: several add up in another order")
        if self.keys:
            raise UsageError("--keys: keys are not part of this version; leave it out and listen on this machine only")


def check(config: Any) -> None:
    """Types and bounds of every field of a config; raises UsageError that names the field."""
    for f in fields(config):
        value = checked(type(config), f.name, getattr(config, f.name))
        object.__setattr__(config, f.name, value)


def checked(kind: type, name: str, value: Any) -> Any:
    """The value of field `name` of the config class `kind`, as the config keeps it. Raises UsageError that names it for
    a value of another type or out of its bounds."""
    f = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    hint = _hints(kind)[name]
    option_name = name.replace("_", "-")
    if value is None and type(None) in get_args(hint):
        return None
    if f.metadata["make"] is not None:
        return f.metadata["make"](value)
    wanted, given = _base_type(hint), value
    if wanted is tuple:
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{option_name}: got {value!r}, wanted a list of texts")
        return value
    if wanted in _KINDS and not isinstance(value, bool) and isinstance(value, _KINDS[wanted]):
        value = _exactly(value, wanted)
    elif type(value) is not wanted:
        raise UsageError(f"{option_name}: got {value!r}, wanted {_NAMES[wanted]}")
    low, high, choices = f.metadata["low"], f.metadata["high"], f.metadata["choices"]
    if wanted in (int, float) and not _within(value, low, high):
        raise UsageError(f"{option_name}: got {given!r}, wanted {_range(low, high)}")
    if choices and value not in choices:
        raise UsageError(f"{option_name}: got {value!r}, wanted one of {', '.join(filter(None, choices))}")
    return value


def set_options(config: Any, names: Sequence[str]) -> list[str]:
    """Those of `names` that are not at their defaults."""
    defaults = {f.name: f.default for f in fields(config)}
    return [name for name in names if getattr(config, name) != defaults[name]]


def add_flags(parser: argparse._ActionsContainer, kind: type, *, leave_out: Sequence[str] = ()) -> None:
    """A flag for every field of the config class `kind`; what is not given stays absent from the namespace."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        if f.name in leave_out:
            continue
        flag, wanted = "--" + f.name.replace("_", "-"), _base_type(hints[f.name])
        text = f.metadata["help"]
        names = [name for name in f.metadata["choices"] if name]
        if not all(f"{name}: " in text for name in names):  # the text does not explain each
            text += f": {', '.join(names)}"
        if f.default not in ("", (), None) and f.default is not False:
            text += f" (default {f.default:g})" if isinstance(f.default, float) else f" (default {f.default})"
        common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if wanted is bool:
            parser.add_argument(flag, action="store_true", **common)
        elif wanted is tuple:
            parser.add_argument(flag, action="append", type=utf8_text, metavar=f.metadata["metavar"], **common)
        else:
            parser.add_argument(flag, type=wanted, metavar=f.metadata["metavar"] or _METAVARS[wanted], **common)


def utf8_text(argument: str) -> str:
    """An argument's text: where the locale is not UTF-8 its bytes decide. For `type=` of options that are no paths."""
    try:
        argument.encode()
        return argument
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError("not UTF-8: convert it first") from None


def make_config(
    kind: type[Config], table: Mapping[str, Any], given: Mapping[str, Any], others: Mapping[str, type] = NO_OTHERS
) -> Config:
    """A config from a file's table and the flags given, which win. Unknown keys of the table are refused by name, those
    of the config classes `others` with the name of the table that they belong in."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise UsageError(f"option {key!r} is given twice, with - and with _: give it once")
        if name not in known:
            home = next((table for table, other in others.items() if name in {f.name for f in fields(other)}), None)
            if home is not None:
                raise UsageError(f"option {key!r} belongs in table [{home}]")
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"unknown option {key!r}: {hint}")
        values[name] = tuple(value) if isinstance(value, list) else value
    for name in known:
        if name in given:
            value = given[name]
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def read_tables(path: str | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tables `names` of a TOML file; other tables are refused by name. No path: all empty."""
    if path is None:
        return {name: {} for name in names}
    file = Path(os.path.expanduser(path))
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except OSError as error:
        raise UsageError(f"configuration file {file}: {error.strerror or error}") from error
    except RecursionError as error:
        raise UsageError(f"configuration file {file}: brackets are nested too deep") from error
    except ValueError as error:  # no UTF-8, no TOML, or a number of thousands of digits
        raise UsageError(f"configuration file {file}: not TOML: {error}") from error
    for name, table in tables.items():
        if name not in names:
            raise UsageError(f"unknown table or key {name!r} in {file}: known are [{'], ['.join(names)}]")
        if not isinstance(table, dict):
            raise UsageError(f"{name!r} in {file} must be a table: write [{name}]")
    return {name: tables.get(name, {}) for name in names}


_hints = functools.cache(get_type_hints)

_KINDS = {int: numbers.Integral, float: numbers.Real}
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _base_type(kind: Any) -> type:
    """The type behind `T`, `T | None` and `tuple[T, ...]`."""
    if kind in _NAMES:
        return kind  # type: ignore[no-any-return]
    inner = [item for item in get_args(kind) if item in _NAMES]
    return tuple if getattr(kind, "__origin__", None) is tuple else inner[0]


def _exactly(value: Any, wanted: Callable[[Any], Any]) -> Any:
    """A number of another type, numpy's say, as a plain one; as it is if no float can hold it."""
    try:
        return wanted(value)
    except OverflowError:
        return value


def _within(value: float, low: float | None, high: float | None) -> bool:
    finite = abs(value) <= sys.float_info.max  # also of whole numbers that no float can hold
    return finite and (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "a finite number"
    return f"at least {low}" if high is None else f"{low} to {high}"
