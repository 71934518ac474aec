"""What `generate` and `chat` show: text as it comes, one JSON object, a line of statistics."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, replace

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.core import FinishReason
from pipesd.edge.chat import Conversation
from pipesd.edge.interrupts import Interrupts
from pipesd.edge.result import result_line, session_result
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, PipeSDError, Refused, UsageError
from pipesd.policy.strategy import check_together, idle_options, without_effect
from pipesd.program import complain
from pipesd.streams import show

log = logging.getLogger("pipesd.edge")


def generate_once(
    edge: EdgeConfig,
    options: GenerateConfig,
    prompt: str,
    *,
    chat: bool,
    system: str | None,
    as_json: bool,
    interrupts: Interrupts,
) -> int:
    """One generation to stdout; returns the exit code. With `as_json` exactly one object is printed, on failure too.

    Raises PipeSDError for what cannot be tried at all.
    """
    session = EdgeSession(edge)
    warn(session, options)
    if options.logprobs is not None and not as_json:
        log.warning("--logprobs has no effect without --json")
        options = replace(options, logprobs=None)
    if as_json:
        interrupts.last_words = lambda: show(_json(session, options, "cancelled"))
    failure: PipeSDError | None = None
    try:
        with session:
            ids = Conversation(session.tokeniser, system=system or "").next_turn(prompt).ids if chat else prompt
            pieces = session.generate(ids, answer=chat, **asdict(options))
            with interrupts.calling(pieces.cancel):
                for piece in pieces:
                    if not as_json:
                        show(piece.text)
    except KeyboardInterrupt:
        failure = Cancelled("interrupted")
    except PipeSDError as error:
        failure = error
    interrupts.speak()
    reason = _finish_reason(session, failure)
    if as_json:
        show(_json(session, options, reason))
    elif session.text:
        show("\n")
    if failure is not None:
        return complain(failure)
    log.info(_summary_line(session, options))
    return Cancelled.exit_code if reason == "cancelled" else 0


def chat_loop(edge: EdgeConfig, options: GenerateConfig, *, system: str | None, interrupts: Interrupts) -> int:
    """Turns read from stdin, a line each, until its end; answers to stdout. Returns the exit code.

    Ctrl-C ends an answer, and the chat where there is none. At a terminal a turn that is refused (too long, say) is
    said to be so and the chat goes on; elsewhere it ends the chat, as whoever wrote the next lines cannot know of it.
    """
    if sys.stdin is None:
        raise UsageError("no turns: type them, or pipe them in")
    prompting = sys.stdin.isatty()
    session = EdgeSession(edge)
    warn(session, options)
    if options.logprobs is not None:
        log.warning("--logprobs has no effect in a chat")
        options = replace(options, logprobs=None)
    with session:
        conversation = Conversation(session.tokeniser, system=system or "")
        number = 0
        while interrupts.forgive():
            with interrupts.raising():
                data = _next_line(prompting)
            if not data:
                return 0
            if not data.strip():
                continue
            number += 1
            try:
                _take_turn(session, conversation, options, data, number, interrupts)
            except (UsageError, Refused) as error:
                if not prompting:
                    raise
                complain(error)
    return Cancelled.exit_code


def _next_line(prompting: bool) -> bytes:
    """The next line as it came, with its end; empty at the end of all."""
    if not prompting:
        return sys.stdin.buffer.readline()
    print("> ", end="", file=sys.stderr, flush=True)
    data = b""
    try:
        data = sys.stdin.buffer.readline()
    finally:
        if not data:
            print(file=sys.stderr)  # what comes next begins a line
    return data


def _take_turn(
    session: EdgeSession,
    conversation: Conversation,
    options: GenerateConfig,
    data: bytes,
    number: int,
    interrupts: Interrupts,
) -> None:
    """One question and its answer."""
    try:
        question = data.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"turn {number} is not UTF-8 (byte {error.start}): convert it first") from error
    turn = conversation.next_turn(question)
    if turn.rewritten:
        log.warning("the chat template rewrites earlier turns: they are computed again")
    pieces = session.generate(turn.ids, answer=True, **asdict(options))
    try:
        with interrupts.calling(pieces.cancel):
            for piece in pieces:
                show(piece.text)
    finally:
        if session.text:
            show("\n")
    conversation.answered(session.text, session.token_ids)
    log.info(_summary_line(session, options))


def warn(session: EdgeSession, options: GenerateConfig) -> None:
    """Say what is not as it looks. Raises UsageError for what does not go together."""
    edge, strategy = session.config, session.strategy
    check_together(strategy, options)
    if edge.strategy == "local":
        log.warning("strategy local: this is the draft model's output, not the target's")
    for name in (*without_effect(edge), *idle_options(strategy, options)):
        chosen = f"policy {edge.policy}" if edge.policy else f"strategy {edge.strategy}"
        log.warning("--%s has no effect with --%s", name.replace("_", "-"), chosen)
    for name in options.without_effect():
        log.warning("--%s has no effect at temperature 0", name.replace("_", "-"))


def _finish_reason(session: EdgeSession, failure: PipeSDError | None) -> FinishReason:
    if isinstance(failure, Cancelled):
        return "cancelled"
    return session.finish_reason or "error"


def _json(session: EdgeSession, options: GenerateConfig, reason: FinishReason) -> str:
    return result_line(session_result(session, options, reason))


def _summary_line(session: EdgeSession, options: GenerateConfig) -> str:
    stats = session.stats
    parts = [f"{stats['tokens']} tokens", session.finish_reason or "error"]
    if stats["alone_tokens"]:
        parts.append(f"{stats['alone_tokens']} of them by the cloud alone, as drafts did not pay")
    if stats["tpt_ms"] is not None:
        parts.append(f"{stats['tpt_ms']:.1f} ms per token")
    if stats["acceptance_rate"] is not None:
        parts.append(f"{stats['accepted']} of {stats['verified']} draft tokens accepted")
    if stats["target_passes"]:
        parts.append(f"{stats['target_passes']} target passes")
    parts.append(f"{stats['bytes_up']} bytes up, {stats['bytes_down']} down")
    if options.temperature:
        parts.append(f"seed {session.seed}")
    return ", ".join(parts)
