"""A trace as a gzipped file of JSON lines; `docs/traces.md` has it field by field."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipesd.errors import UsageError
from pipesd.regular_file import locate, open_regular, shown
from pipesd.sim.trace import Guess, Record, Trace

FORMAT, VERSION = "pipesd-trace", 1
_LONGEST_LINE = 64 << 20  # bytes; a record of 1000 ids at a depth of 32 has one or two
_AGAIN = "copy or record it again"
_COLUMNS = ("ids", "p_draft", "entropy", "runner_up", "p_runner_up", "margin")  # of guesses, in the file


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """See `Trace.save`."""
    lines = [_header_of(trace), *map(_line_of, trace.records)]
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    try:
        Path(path).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    except (OSError, ValueError) as error:  # a NUL in its name
        told = getattr(error, "strerror", None) or error
        raise UsageError(f"{os.fspath(path)}: cannot be written ({told}); name another file") from error


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """See `Trace.load`."""
    place = locate(path)[0]
    with open_regular(place) as file:
        try:
            return _read(gzip.GzipFile(fileobj=file))
        except _Wrong as error:
            raise UsageError(f"{place}: {error}; {_AGAIN}") from error
        except EOFError as error:
            raise UsageError(f"{place}: cut short; {_AGAIN}") from error
        except gzip.BadGzipFile as error:
            raise UsageError(f"{place}: not gzipped, or damaged ({shown(error)}); {_AGAIN}") from error
        except (OSError, zlib.error) as error:
            raise UsageError(f"{place}: cannot be read, or damaged ({shown(error)}); {_AGAIN}") from error


class _Wrong(Exception):
    """What is wrong with a file, with its line and field."""


def _header_of(trace: Trace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "draft": trace.draft,
        "target": trace.target,
        "vocabulary": trace.vocabulary,
        "vocabulary_size": trace.vocabulary_size,
        "end_ids": trace.end_ids,
        "sampling": {name: _written(value) for name, value in trace.sampling.items()},
        "depth": trace.depth,
        "gamma_s": trace.gamma_s,
        "pass_s": trace.pass_s,
        "records": len(trace.records),
    }


def _written(option: Any) -> Any:
    """An option of sampling as JSON has it, which knows no infinity."""
    if isinstance(option, tuple):
        return [_written(item) for item in option]
    return str(option) if isinstance(option, float) and math.isinf(option) else option


def _line_of(record: Record) -> dict[str, Any]:
    return {
        "prompt": record.prompt,
        "output": record.output,
        "seed": record.seed,
        "finish": record.finish,
        "guesses": _columns_of(record.guesses),
        "behind": {i: _columns_of(guesses) for i, guesses in record.behind.items()},
    }


def _columns_of(guesses: Sequence[Guess]) -> dict[str, Any]:
    """A list for each field; the margins only where there are any."""
    columns = {name: [guess[n] for guess in guesses] for n, name in enumerate(_COLUMNS)}
    if not any(columns["margin"]):
        del columns["margin"]
    return columns


def _read(file: io.BufferedIOBase) -> Trace:
    table = _object(file, 1)
    if table.get("format") != FORMAT:
        raise _Wrong(f"line 1: format: got {shown(table.get('format'))}, want {FORMAT}")
    take = _Fields(table, "line 1")
    if (version := take("version", _natural)) != VERSION:
        raise _Wrong(f"line 1: version: got {version}, want {VERSION}")
    count = take("records", _natural)
    header = Trace(
        take("draft", _text), take("target", _text), take("vocabulary", _hexadecimal),
        take("vocabulary_size", _positive), take("end_ids", _ids), (),
        take("sampling", _options), take("depth", _positive), take("gamma_s", _seconds), take("pass_s", _passes),
    )  # fmt: skip
    records = []
    for number in range(2, count + 2):
        take = _Fields(_object(file, number), f"line {number}")
        try:
            records.append(_record(take))
            header.check(records[-1])
        except UsageError as error:
            raise _Wrong(f"line {number}: {error}") from error
    if file.read(1):
        raise _Wrong(f"line {count + 2}: more than the {count} records of line 1")
    return Trace(**{**header.__dict__, "records": tuple(records)})


def _record(take: _Fields) -> Record:
    return Record(
        take("prompt", _ids), take("output", _ids), take("guesses", _guesses), take("behind", _behind),
        take("seed", _seed), take("finish", _finish),
    )  # fmt: skip


def _object(file: io.BufferedIOBase, number: int) -> dict[str, Any]:
    line = file.readline(_LONGEST_LINE)
    if not line:
        raise _Wrong(f"line {number}: missing, the file is cut short")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"line {number}: not JSON, or cut short ({shown(error)})") from error
    if not isinstance(found, dict):
        raise _Wrong(f"line {number}: got a JSON {type(found).__name__}, want an object")
    return found


class _Fields:
    """The fields of one line, each taken with what it has to be."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self._where = table, where

    def __call__(self, name: str, checked: Callable[[Any], Any]) -> Any:
        if name not in self._table:
            raise _Wrong(f"{self._where}: {name}: missing")
        try:
            return checked(self._table[name])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _Wrong(f"{self._where}: {name}: {shown(error)}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {shown(value)}, want a text")
    return value


def _hexadecimal(value: Any) -> str:
    bytes.fromhex(_text(value))
    return str(value)


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"got {shown(value)}, want an integer of at least 0")
    return value


def _positive(value: Any) -> int:
    if not _natural(value):
        raise ValueError("got 0, want at least 1")
    return int(value)


def _number(value: Any, high: float = math.inf) -> float:
    if type(value) not in (int, float) or not 0 <= value <= high or math.isinf(value):
        raise ValueError(f"got {shown(value)}, want a number from 0 to {high:g}")
    return float(value)


_seconds = _number


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"got {shown(value)}, want a list")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"got {shown(value)}, want an object")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_natural, _list(value)))


def _options(value: Any) -> dict[str, Any]:
    return {name: _biases(item) if name == "logit_bias" else item for name, item in _table(value).items()}


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    return tuple((_natural(token_id), float(bias)) for token_id, bias in _list(value))


def _passes(value: Any) -> dict[int, float]:
    return {_positive(int(n)): _seconds(s) for n, s in _table(value).items()}


def _behind(value: Any) -> dict[int, tuple[Guess, ...]]:
    return {_natural(int(i)): _guesses(columns) for i, columns in _table(value).items()}


def _seed(value: Any) -> int | None:
    return None if value is None else _natural(value)


def _finish(value: Any) -> Literal["length", "stop"]:
    if value not in ("length", "stop"):
        raise ValueError(f"got {shown(value)}, want length or stop")
    return "stop" if value == "stop" else "length"


def _guesses(value: Any) -> tuple[Guess, ...]:
    table = _table(value)
    ids, p_draft, entropy, runner_up, p_runner_up = (_list(table[name]) for name in _COLUMNS[:-1])
    margin = _list(table.get("margin", [0.0] * len(ids)))
    columns = (
        _ids(ids), [_number(p, 1.0) for p in p_draft], list(map(_number, entropy)),
        _ids(runner_up), [_number(p, 1.0) for p in p_runner_up], [_number(m, 1.0) for m in margin],
    )  # fmt: skip
    if len(set(map(len, columns))) > 1:
        raise ValueError(f"lists of {', '.join(str(len(column)) for column in columns)} items, want the same of each")
    return tuple(map(Guess, *columns))
