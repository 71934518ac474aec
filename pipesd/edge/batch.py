"""`pipesd-edge generate --file PROMPTS --out RESULTS`: many prompts in one session, to be gone on with at any time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.edge.batch_files import Job, Results, check_different, read_jobs, settings_digest
from pipesd.edge.chat import Conversation
from pipesd.edge.interrupts import Interrupts
from pipesd.edge.output import warn
from pipesd.edge.result import batch_line, result_of, session_result
from pipesd.edge.session import EdgeSession
from pipesd.errors import Cancelled, PipeSDError, Refused, Unreachable, UsageError
from pipesd.policy.strategy import make_strategy
from pipesd.program import complain
from pipesd.protocol.messages import ErrorCode
from pipesd.streams import show

log = logging.getLogger("pipesd.edge")


def generate_batch(
    edge: EdgeConfig,
    options: GenerateConfig,
    prompts: str,
    out: str,
    *,
    chat: bool,
    system: str | None,
    restart: bool,
    as_json: bool,
    interrupts: Interrupts,
) -> int:
    """Every prompt of the file that has no result yet; returns the exit code. A prompt that is refused for what it is
    becomes a result too; what would befall the next one as well (a lost or full cloud, another target, a failed policy)
    ends the run.

    Raises PipeSDError for what cannot be tried at all.
    """
    check_different(prompts, out)
    settings = settings_digest(edge, make_strategy(edge), options, {"chat": chat, "system": system})
    jobs = read_jobs(prompts, settings)
    with Results(out) as results:
        done = {} if restart else results.done(jobs)
        session = EdgeSession(edge)  # no sooner: it begins a new event log
        warn(session, options)
        batch = _Batch(session, options, jobs, results, done, chat, system)
        if as_json:
            interrupts.last_words = lambda: show(batch.told("cancelled"))
        failure: PipeSDError | None = None
        try:
            batch.run(interrupts, anew=restart)
        except KeyboardInterrupt:
            failure = Cancelled("interrupted")
        except PipeSDError as error:
            failure = error
        interrupts.speak()
        if as_json:
            show(batch.told("done" if failure is None else "cancelled" if isinstance(failure, Cancelled) else "error"))
    if failure is not None:
        told = PipeSDError(f"{failure}; {len(batch.done)} of {len(jobs)} prompts are done{_go_on(failure)}")
        told.exit_code = failure.exit_code
        return complain(told, cause=failure)
    log.info("%s", batch.summary())
    return 0


class _Batch:
    """The prompts, the session that they are all generated in, and `done`, the results so far by index."""

    def __init__(
        self,
        session: EdgeSession,
        options: GenerateConfig,
        jobs: Sequence[Job],
        results: Results,
        done: dict[int, dict[str, Any]],
        chat: bool,
        system: str | None,
    ) -> None:
        self.done = done
        self._session, self._options, self._jobs, self._results = session, options, jobs, results
        self._before = len(done)
        self._chat, self._system = chat, system or ""
        self._target: dict[str, str] | None = None

    def run(self, interrupts: Interrupts, *, anew: bool) -> None:
        """Do what is left; `anew`: what is in the file goes, once models and cloud are there."""
        left = [job for job in self._jobs if job.index not in self.done]
        if self._before:
            log.info("%d of %d prompts have their results: %d are left", self._before, len(self._jobs), len(left))
        if not left:
            self._results.begin(anew=False)
            return
        with self._session as session:
            self._target = _target(session)
            self._results.check_target(self.done.values(), self._target)
            session.check(self._options)
            if self._chat:
                self._conversation()
            self._results.begin(anew=anew)
            begun_s = time.monotonic()
            for number, job in enumerate(left, 1):
                result = self._result(session, job, interrupts)
                self._results.append(result)
                self.done[job.index] = result
                each_s = (time.monotonic() - begun_s) / number
                self._progress(job, result, each_s * (len(left) - number))

    def told(self, finish_reason: str) -> str:
        """The object for stdout."""
        ordered = [self.done[index] for index in sorted(self.done)]
        return batch_line(finish_reason, ordered, prompts=len(self._jobs), before=self._before)

    def summary(self) -> str:
        results = self.done.values()
        errors = sum(result["finish_reason"] == "error" for result in results)
        timed = [result["stats"] for result in results if result["stats"]["tpt_ms"] is not None]
        tokens = sum(stats["tokens"] for stats in timed)
        parts = [f"{len(self.done)} of {len(self._jobs)} prompts done", f"{tokens} tokens"]
        if errors:
            parts.insert(1, f"{errors} of them refused, see finish_reason error")
        if tokens:
            took_ms = sum(stats["tpt_ms"] * stats["tokens"] for stats in timed)
            parts.append(f"{took_ms / tokens:.1f} ms per token")
        return ", ".join(parts)

    def _result(self, session: EdgeSession, job: Job, interrupts: Interrupts) -> dict[str, Any]:
        """One line of results. Raises what would befall the next prompt too."""
        try:
            prompt: str | Sequence[int] = job.prompt()
            options = job.options(self._options)
            session.check(options)
            answer = False
            if self._chat and isinstance(prompt, str):
                prompt, answer = self._conversation().next_turn(prompt).ids, True
            ids = session.ids(prompt)
        except (UsageError, Refused) as error:  # the run's own options were found to be right
            return self._refused(job, error)
        begun = False
        try:
            pieces = session.generate(ids, answer=answer, **asdict(options))
            with interrupts.calling(pieces.cancel):
                for _ in pieces:
                    begun = True
        except Refused as error:
            if begun or error.code != ErrorCode.LIMIT:
                raise
            return self._refused(job, error)
        if session.finish_reason == "cancelled":
            raise Cancelled("interrupted")
        found = session_result(session, options, session.finish_reason or "error")
        return {**self._name(job), **found}

    def _conversation(self) -> Conversation:
        """One that nothing was said in. Raises UsageError for a model that has no template for any."""
        return Conversation(self._session.tokeniser, system=self._system)

    def _refused(self, job: Job, error: PipeSDError) -> dict[str, Any]:
        told = f"line {job.line}: {error}"
        log.warning("%s", told)
        found = result_of("error", strategy=self._session.strategy.name)
        return {**self._name(job), **found, "error": told}

    def _progress(self, job: Job, result: dict[str, Any], left_s: float) -> None:
        tpt_ms = result["stats"]["tpt_ms"]
        pace = "" if tpt_ms is None else f", {tpt_ms:.1f} ms per token"
        left = "" if len(self.done) == len(self._jobs) else f"; {_duration(left_s)} left"
        done, tokens = f"{len(self.done)} of {len(self._jobs)} done", result["stats"]["tokens"]
        log.info("line %d: %d tokens%s; %s%s", job.line, tokens, pace, done, left)

    def _name(self, job: Job) -> dict[str, Any]:
        return {"index": job.index, "line": job.line, "id": job.id, "digest": job.digest, "target": self._target}


def _target(session: EdgeSession) -> dict[str, str] | None:
    """The target whose text it is; None where a strategy does without."""
    if session.serving is None or session.fingerprint is None:
        return None
    return {"name": session.serving[0], "fingerprint": session.fingerprint}


def _go_on(failure: PipeSDError) -> str:
    """What is to be done to go on, where it is not told by the failure itself."""
    if isinstance(failure, Refused) and failure.code == ErrorCode.MODEL:
        return ": the same command goes on where the target that began is served, --restart begins anew with this one"
    full = isinstance(failure, Refused) and failure.code == ErrorCode.FULL
    waits = full or failure.exit_code in (Unreachable.exit_code, Cancelled.exit_code)
    return ": the same command goes on from there" if waits else ""


def _duration(seconds: float) -> str:
    """About how long, in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
