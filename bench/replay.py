"""A recorded target behind an emulated link, for benches: recordings, and the processes that replay them.

A recording holds what a real target says behind prompts, greedily or as it samples with a seed; it is made once.
Replayed, the ids come in the time that is asked for and nothing is computed, so that a drafter on the same machine has
it for itself: under shared noise the target's samples do not hang on what is drafted. The cloud (a
front process and a worker process) and the link are processes of their own: no lock of Python's is shared with the
edge.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from exactness import cloud as real_cloud
from exactness import generate

from pipesd.cloud.server import serve
from pipesd.config import CloudConfig, EdgeConfig
from pipesd.core import Vocabulary
from pipesd.errors import PipeSDError, UsageError
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, greedy_choices
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.targets import ReplayedTarget
from pipesd.sim.texts import KeyedText, RecordedText, continuation
from pipesd.sim.tokeniser import ByteTokeniser

HEADROOM = 48  # ids recorded behind those that are generated: no draft looks further ahead
LONGEST_PROMPT = 256  # ids; longer ones are left out, as reading them takes time and is no part of what is measured
CONTEXT = 4096
LAW = KeyedText(7)  # what a scripted target says
READY_S = 120.0


class Record(NamedTuple):
    """A prompt and what the target says behind it, as ids."""

    ids: tuple[int, ...]
    output: tuple[int, ...]
    seed: int | None = None  # that it was sampled with


@dataclass(frozen=True)
class Recording:
    """Records of one target; all outputs are as long and none holds an end id."""

    target: str
    vocabulary: str  # its hash, hexadecimal
    records: tuple[Record, ...]
    sampling: dict[str, Any] = field(default_factory=dict)  # options of `generate`; without any it is greedy

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({**self.__dict__, "records": [r._asdict() for r in self.records]}) + "\n")

    @classmethod
    def load(cls, path: Path) -> Recording:
        table = json.loads(path.read_text())
        records = (Record(tuple(r["ids"]), tuple(r["output"]), r.get("seed")) for r in table.pop("records"))
        return cls(**table, records=tuple(records))


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends the program as `main` says, or with one line for what the world did to it."""
    try:
        sys.exit(main())
    except PipeSDError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def prompts_of(paths: Sequence[str]) -> list[str]:
    """The prompts of each file in turn: JSON objects a line, gzipped or not, or one list of them, with a `prompt`, a
    `question` or a `text`."""
    sources = []
    for path in paths:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
        objects = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        sources.append([next(o[key] for key in ("prompt", "question", "text") if key in o) for o in objects])
    longest = max(map(len, sources))
    return [source[i] for i in range(longest) for source in sources if i < len(source)]


def record(
    draft: str, target: str, tokeniser: Any, prompts: Sequence[str], count: int, tokens: int, **sampling: Any
) -> Recording:
    """What the real target says behind the first prompts whose output goes on for `tokens` ids, `count` of them; with
    options of `sampling`, under a seed of each prompt's own.

    Raises UsageError if there are not so many.
    """
    records: list[Record] = []
    with real_cloud(target) as (address, _):
        config = EdgeConfig(draft=draft, cloud=address, strategy="cloud")
        for tried, prompt in enumerate(prompts, 1):
            if len(records) == count:
                break
            ids = tokeniser.encode(prompt, special=True)
            if len(ids) > LONGEST_PROMPT:
                continue
            seed = tried if sampling else None
            output = generate(config, ids, tokens, seed=seed, **sampling)["ids"]
            if len(output) == tokens and not tokeniser.end_ids.intersection(output):
                records.append(Record(tuple(ids), tuple(output), seed))
            print(f"recorded {len(records)} of {count}, {tried} prompts tried", file=sys.stderr)
    made = Recording(Path(target).name, digest(tokeniser), tuple(records), sampling)
    return checked(made, tokeniser, count, tokens)


def scripted_recording(tokeniser: ByteTokeniser, count: int, tokens: int) -> Recording:
    """As much of a text that a law gives, for runs without models."""
    prompts = [tokeniser.encode(f"Prompt {i}:") for i in range(count)]
    records = tuple(Record(tuple(ids), tuple(continuation(LAW, ids, tokens))) for ids in prompts)
    return Recording("scripted", digest(tokeniser), records)


def digest(tokeniser: Any) -> str:
    return vocabulary_hash(tokeniser.vocabulary).hex()


def checked(recording: Recording, tokeniser: Any, count: int, tokens: int) -> Recording:
    """The recording, if `count` outputs of `tokens` ids can be taken from it; else UsageError."""
    if recording.vocabulary != digest(tokeniser):
        raise UsageError(f"the recording is of {recording.target}, whose vocabulary is not the draft model's")
    long_enough = sum(len(r.output) >= tokens for r in recording.records)
    if long_enough < count:
        raise UsageError(
            f"the recording has {long_enough} outputs of {tokens} ids, wanted {count}: give more --prompts and "
            "another --recording, or ask for fewer or shorter ones"
        )
    return recording


class DictatedTarget(ReplayedTarget):
    """Chooses what was recorded, whatever the options of sampling: its logits are none to draw from."""

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        return greedy_choices(batch, self.greedy(batch))


class Replay:
    """Makes the replayed target, in its worker's process."""

    def __init__(self, recording: Recording, vocabulary: Vocabulary, end_ids: Sequence[int], pace: dict[str, float]):
        self.recording, self.vocabulary, self.end_ids, self.pace = recording, vocabulary, tuple(end_ids), pace

    def __call__(self) -> DictatedTarget:
        text = RecordedText([(record.ids, record.output) for record in self.recording.records])
        return DictatedTarget(text, self.vocabulary, context=CONTEXT, end_ids=self.end_ids, **self.pace)


class Addresses(NamedTuple):
    """Where an edge finds the replayed cloud: through the link, or beside it."""

    linked: str
    direct: str


@contextmanager
def replaying(make: Replay, link: dict[str, Any]) -> Iterator[Addresses]:
    """A cloud that replays, and a link to it with the settings of `LinkProxy`."""
    with _process(cloud_process, make) as direct, _process(link_process, {"target": direct, **link}) as linked:
        yield Addresses(linked, direct)


@contextmanager
def _process(body: Any, given: Any) -> Iterator[str]:
    """A process that tells its address and works until it is ended."""
    spawn = multiprocessing.get_context("spawn")
    heard, told = spawn.Pipe(duplex=False)
    process = spawn.Process(target=body, args=(given, told))
    process.start()
    told.close()
    try:
        if not heard.poll(READY_S):
            raise PipeSDError(f"the process of {body.__name__} has said nothing for {READY_S:g} s")
        try:
            address = heard.recv()
        except EOFError:
            raise PipeSDError(f"the process of {body.__name__} has ended; what it said is above") from None
        yield address
    finally:
        heard.close()
        process.terminate()
        process.join()


def cloud_process(make: Replay, told: connection.Connection) -> None:
    _end_with_parent()
    config = CloudConfig(bind="tcp://127.0.0.1:0", drain_s=0.0)
    sys.exit(serve(config, make_target=make, announce=lambda line: told.send(line.split()[-1])))


def link_process(settings: dict[str, Any], told: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's, which ends this process
    _end_with_parent()
    with LinkProxy(**settings) as link:
        told.send(link.address)
        threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
