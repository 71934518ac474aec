"""The two files of a batch: prompts, one JSON object a line, and results, one line appended for each that is done."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from pipesd.config import EdgeConfig, GenerateConfig, make_config
from pipesd.edge.files import place_of
from pipesd.edge.result import SUMMED
from pipesd.errors import UsageError
from pipesd.policy.strategy import Strategy
from pipesd.regular_file import locate, open_regular, shown

PROMPT_KEYS = ("prompt", "question", "text", "ids")
LARGEST_BYTES = 1 << 30  # of prompts
NEAR = 0.85  # likeness from which a key is taken for an option with a slip in it
_DATA = ("context",)  # options of the edge which many data sets have a text by the name of
_GZIP = b"\x1f\x8b"
_BEGINNING = b'{"index": '  # of every line of results
_NO_MATTER = (  # settings that do not change what a line comes to
    "cloud", "events", "threads", "gpu_layers", "context", "connect_s", "patience_s", "stall_s", "tuning",
    "draft", "policy",  # of which the name and the content count
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One line of prompts. `fields` are all that stands in it, `digest` tells it and the run's options from others."""

    index: int
    line: int  # in the file, from 1
    fields: Mapping[str, Any]
    digest: str

    @property
    def id(self) -> Any:
        """The user's own name for it, None where there is none."""
        return self.fields.get("id")

    def prompt(self) -> str | list[int]:
        """Raises UsageError unless there is exactly one."""
        found = [key for key in PROMPT_KEYS if key in self.fields]
        if len(found) != 1:
            got = " and ".join(found) or "none of them"
            raise UsageError(f"got {got}, wanted one of {', '.join(PROMPT_KEYS)}")
        prompt = self.fields[found[0]]
        if found[0] != "ids" and not isinstance(prompt, str):
            raise UsageError(f"{found[0]}: got {prompt!r:.60}, wanted a text")
        if found[0] == "ids" and not isinstance(prompt, list):
            raise UsageError(f"ids: got {prompt!r:.60}, wanted a list of ids")
        if found[0] == "ids" and (wrong := [each for each in prompt if type(each) is not int]):
            raise UsageError(f"ids: got {wrong[0]!r:.60} in it, wanted whole numbers only")
        return prompt  # type: ignore[no-any-return]

    def options(self, run: GenerateConfig) -> GenerateConfig:
        """The run's options with those of the line, which win. Raises UsageError for a value out of its bounds, for a
        key that is nearly an option's name, and for an option of the whole run; other keys are the data set's own."""
        known, of_run = ({f.name for f in fields(config)} for config in (GenerateConfig, EdgeConfig))
        own: dict[str, Any] = {}
        for key, value in self.fields.items():
            name = key.replace("-", "_")
            if name in known:
                own[name] = value
            elif name in of_run and not (name in _DATA and isinstance(value, str | list | dict)):
                raise UsageError(f"{key!r} is an option of the whole run: give --{_flag(name)} on the command line")
            elif key not in (*PROMPT_KEYS, "id") and (near := difflib.get_close_matches(name, known, 1, NEAR)):
                raise UsageError(f"unknown option {key!r}: did you mean {near[0]!r}?")
        return make_config(GenerateConfig, {}, {**asdict(run), **own})


def settings_digest(edge: EdgeConfig, strategy: Strategy, options: GenerateConfig, more: Mapping[str, Any]) -> str:
    """Tells runs apart whose results may differ, in the ids or in what they took of passes and bytes."""
    told = {f.name: getattr(edge, f.name) for f in fields(edge) if f.name not in _NO_MATTER}
    policy = None if strategy.policy is None else strategy.policy.digest
    told |= {"draft": Path(edge.draft).name, "policy": policy, "generate": asdict(options), **more}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def read_jobs(path: str, settings: str) -> list[Job]:
    """The lines of a file of prompts, gzipped or not; empty ones are left out. Raises UsageError, with the number of
    the line, for a file that is not of JSON lines."""
    place, kind = locate(path)
    if kind != "file":
        what = "there is no such file" if kind == "nothing" else "it is no ordinary file"
        raise UsageError(f"prompt file {path}: {what}")
    with open_regular(place) as file:
        data = file.read(LARGEST_BYTES + 1) or b""
    if data.startswith(_GZIP):
        data = _unzipped(path, data)
    if len(data) > LARGEST_BYTES:
        raise UsageError(f"prompt file {path}: more than {LARGEST_BYTES} bytes: split it")
    jobs: list[Job] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"prompt file {path}, line {number}: not JSON ({error}); --out wants one object a line"
            ) from error
        if not isinstance(found, dict):
            raise UsageError(f"prompt file {path}, line {number}: got {found!r:.40}, wanted a JSON object")
        digest = hashlib.sha256(settings.encode() + line.strip()).hexdigest()[:16]
        jobs.append(Job(len(jobs), number, found, digest))
    if not jobs:
        raise UsageError(f"prompt file {path}: it is empty: give one JSON object a line")
    return jobs


def check_different(prompts: str, results: str) -> None:
    """Raises UsageError where both names are of one file."""
    one, other = place_of(prompts), place_of(results)
    same = one == other
    with contextlib.suppress(OSError):
        same = same or os.path.samefile(one, other)
    if same:
        raise UsageError(f"--out {results}: it is the file of the prompts: write the results elsewhere")


class Results:
    """The file of results, locked while it is open. A line that a kill has left half written is taken off.

    A line is handed to the system whole when its prompt is done: it outlives the end of this program, whatever ends it;
    not a power cut, which may take the last seconds. Nothing is changed before `begin`.
    """

    def __init__(self, path: str) -> None:
        """Raises UsageError if it cannot be written, is another run's at present, or holds something else."""
        self._path = path
        try:
            place = place_of(path)
            self._file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            raise self._unusable(getattr(error, "strerror", None) or str(error)) from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise self._unusable("it is no ordinary file")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._unusable("another run writes to it: wait for its end") from error
            except OSError as error:
                why = error.strerror or error
                raise self._unusable(f"it cannot be locked ({why}): write to another file system") from error
            self.lines, self._whole = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def done(self, jobs: Sequence[Job]) -> dict[int, dict[str, Any]]:
        """The results that are there, by index. Raises UsageError if one is of another line or of other options."""
        found: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(self.lines, 1):
            index = line["index"]
            if index in found:
                raise UsageError(
                    f"--out {self._path}, line {number}: index {index} is there twice: --restart does all anew"
                )
            if index >= len(jobs) or line["digest"] != jobs[index].digest:
                raise UsageError(
                    f"--out {self._path}, line {number}: it is of other prompts or options: give those again, another "
                    "file, or --restart, which does all anew"
                )
            found[index] = line
        return found

    def check_target(self, done: Iterable[Mapping[str, Any]], target: Mapping[str, str] | None) -> None:
        """Raises UsageError where what is done is another target's; what it is called does not matter."""
        for line in done:
            if (line["target"] or {}).get("fingerprint") != (target or {}).get("fingerprint"):
                raise UsageError(
                    f"--out {self._path}: its results are of {_named(line['target'])}, the cloud serves "
                    f"{_named(target)}: go on with the one that began, or give another file, or --restart"
                )

    def begin(self, *, anew: bool) -> None:
        """Take off what is not to stay: a half-written line, or all of it."""
        try:
            os.ftruncate(self._file, 0 if anew else self._whole)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def append(self, result: Mapping[str, Any]) -> None:
        """One line more. Raises UsageError if there is no room for it."""
        data = json.dumps(result).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The whole lines, and how many bytes they are."""
        with open(self._file, "rb", closefd=False) as file:
            data = file.read(len(_BEGINNING))  # a wrong name may be that of a file larger than the memory
            if not _BEGINNING.startswith(data):
                text = "it holds something else than results: line 1 is no result of such a run: name another file"
                raise self._unusable(text)
            data += file.read()
        whole = data.rfind(b"\n") + 1
        lines: list[dict[str, Any]] = []
        tail = data[whole:]
        if not (tail.startswith(_BEGINNING) or _BEGINNING.startswith(tail)):
            raise self._unusable("it holds something else than results: name another file")
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not _is_result(found):
                raise self._unusable(f"line {number} is no result of such a run: name another file")
            lines.append(found)
        return lines, whole

    def _unusable(self, why: str) -> UsageError:
        return UsageError(f"--out {self._path}: {why}")


def _is_result(found: Any) -> bool:
    """Whether it has what is looked at in it."""
    if not isinstance(found, dict) or not isinstance(found.get("stats"), dict):
        return False
    stats, index = found["stats"], found.get("index")
    counted = all(isinstance(stats.get(name), int | float) for name in SUMMED)
    named = type(index) is int and index >= 0 and isinstance(found.get("digest"), str) and "finish_reason" in found
    target = found.get("target", "")
    whose = target is None or (isinstance(target, dict) and isinstance(target.get("fingerprint"), str))
    return counted and named and whose and isinstance(stats.get("tpt_ms"), int | float | None)


def _named(target: Mapping[str, str] | None) -> str:
    """A target in a message."""
    return "none" if target is None else f"{shown(target.get('name'))} ({shown(target['fingerprint'][:12])})"


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _unzipped(path: str, data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(LARGEST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"prompt file {path}: damaged gzip ({error})") from error
