"""What `generate` and `chat` show: text as it comes, one JSON object, a line of statistics; and interruption."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.edge.chat import Conversation
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, PipeSDError

log = logging.getLogger("pipesd.edge")


def generate_once(
    edge: EdgeConfig, options: GenerateConfig, prompt: str, *, chat: bool, system: str | None, as_json: bool
) -> int:
    """One generation to stdout; returns the exit code. With `as_json` exactly one object is printed, on failure too."""
    _warn(edge, options)
    session = EdgeSession(edge)
    failure: BaseException | None = None
    try:
        with session:
            ids: str | Sequence[int] = prompt
            if chat:
                ids = Conversation(session.tokeniser, system=system or "").next_turn(prompt).ids
            with _interruptible(session):
                for piece in session.generate(ids, answer=chat, **asdict(options)):
                    if not as_json:
                        _show(piece.text)
    except (PipeSDError, KeyboardInterrupt) as error:
        failure = error
    if as_json:
        print(json.dumps(_result(session, failure), ensure_ascii=not _utf8_output()))
    elif session.text:
        _show("\n")
    if failure is not None:
        failure.printed = as_json  # type: ignore[attr-defined]
        raise failure
    if session.stats:
        log.info(_summary_line(session))
    return Cancelled.exit_code if session.finish_reason == "cancelled" else 0


def chat_loop(edge: EdgeConfig, options: GenerateConfig, *, system: str | None) -> int:
    """Turns read from stdin, a line each, until its end; answers to stdout. Interrupting an answer ends only that."""
    _warn(edge, options)
    prompting = sys.stdin.isatty()
    with EdgeSession(edge) as session:
        conversation = Conversation(session.tokeniser, system=system or "")
        while True:
            if prompting:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return 0
            if not line.strip():
                continue
            turn = conversation.next_turn(line.rstrip("\n"))
            if turn.rewritten:
                log.warning("the chat template rewrites earlier turns: they are computed again")
            with _interruptible(session):
                for piece in session.generate(turn.ids, answer=True, **asdict(options)):
                    _show(piece.text)
            conversation.answered(session.text, session.token_ids)
            _show("\n")
            log.info(_summary_line(session))


@contextmanager
def _interruptible(session: EdgeSession) -> Iterator[None]:
    """SIGINT and SIGTERM cancel the generation; a second one ends the program at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        session.cancel()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn(edge: EdgeConfig, options: GenerateConfig) -> None:
    if edge.strategy == "local":
        log.warning("strategy local: this is the draft model's output, not the target's")
    for name in options.without_effect():
        log.warning("--%s has no effect at temperature 0", name.replace("_", "-"))


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _utf8_output() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _result(session: EdgeSession, failure: BaseException | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": session.text,
        "token_ids": list(session.token_ids),
        "finish_reason": session.finish_reason or "error",
        "strategy": session.config.strategy,
        "seed": session.seed,
        "stats": session.stats,
    }
    if isinstance(failure, KeyboardInterrupt):
        result["finish_reason"] = "cancelled"
    elif failure is not None:
        result["finish_reason"] = "error"
        result["error"] = str(failure)
    return result


def _summary_line(session: EdgeSession) -> str:
    stats = session.stats
    parts = [f"{stats['tokens']} tokens", session.finish_reason or "error"]
    if stats["tpt_ms"] is not None:
        parts.append(f"{stats['tpt_ms']:.1f} ms per token")
    if stats["acceptance_rate"] is not None:
        parts.append(f"{stats['accepted']} of {stats['verified']} draft tokens accepted")
    if stats["target_passes"]:
        parts.append(f"{stats['target_passes']} target passes")
    parts.append(f"{stats['bytes_up']} bytes up, {stats['bytes_down']} down")
    return ", ".join(parts)
