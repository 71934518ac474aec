"""`pipesd-edge advise`: which strategy will be fastest with this draft model, this cloud and the link between them.

What the answer hangs on is measured in a minute: the link; the text that the target writes behind a few prompts and
what a pass takes it; what the draft model would have guessed along that text, and how long a guess takes it. Then the
simulator runs every strategy behind that sample. This is the only place at the edge that knows the simulator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipesd.config import EdgeConfig, check, option
from pipesd.edge.advise_report import Findings, Row, command, describe, line
from pipesd.edge.interrupts import Interrupts
from pipesd.errors import Cancelled, PipeSDError, UsageError
from pipesd.program import complain
from pipesd.streams import show, utf8_output

if TYPE_CHECKING:
    from pipesd.edge.link_figures import LinkFigures
    from pipesd.edge.models import Drafter, Tokeniser
    from pipesd.edge.session import EdgeSession

NOT_ASKED = (  # what it finds out itself, or tries all of
    "strategy", "batching", "trigger", "waiting", "draft_length", "sequence_threshold", "token_threshold",
    "entropy_threshold", "tuning", "events", "policy", "policy_option",
)  # fmt: skip
PROMPTS = (
    'def moving_average(values, width):\n    """The mean of each window of `width` values."""\n',
    "Question: A train leaves at 9:40 and arrives at 12:05. It stops for 20 minutes on the way. For how long does it "
    "move?\nAnswer:",
    "The history of the lighthouse begins long before the first one of stone was built. In early times",
    'def is_palindrome(text):\n    """Whether `text` reads the same from both ends, whatever the case."""\n',
    "Question: Four shelves hold 23 books each, and 17 books lie on the floor. How many books are there in all?\n"
    "Answer:",
    "Dear Ms Okafor,\n\nthank you for your letter of last week. We have looked into the matter and",
)
DEPTH = 24  # guesses behind a wrong one: what is drafted while a verdict is awaited
PASS_DRAFT = 8  # draft tokens of the passes that tell what a further id takes
WARM_UP_TOKENS = 4
LEAST_TOKENS = 8  # a sample of fewer tells nothing
MARGIN = 0.02  # what another strategy must be faster by to change the answer
log = logging.getLogger("pipesd.edge")


@dataclass(frozen=True, kw_only=True)
class AdviseConfig:
    """How much to measure and to try. Raises UsageError for a value out of bounds."""

    tokens: int = option(64, "tokens to write behind each prompt", low=LEAST_TOKENS, high=4096)
    samples: int = option(12, "settings of each strategy to try in simulation, at each round trip", low=2, high=1000)
    link_s: float = option(4.0, "measure the link for about so long at most (s)", low=1, high=3600)

    def __post_init__(self) -> None:
        check(self)


def show_advice(
    edge: EdgeConfig,
    config: AdviseConfig,
    prompts: Sequence[str],
    *,
    as_json: bool,
    quiet: bool,
    interrupts: Interrupts,
) -> int:
    """Measure, simulate and print; returns the exit code. With `as_json` exactly one object is printed, on failure too,
    with what was measured until then."""
    defaults: dict[str, Any] = {name: EdgeConfig.__dataclass_fields__[name].default for name in NOT_ASKED}
    own = {"policy": edge.policy, "policy_option": edge.policy_option} if edge.policy else None
    edge = replace(edge, **{**defaults, "tuning": "off"})
    findings = Findings(draft=edge.draft, cloud=edge.cloud)
    if as_json:
        interrupts.last_words = lambda: show(line(findings, "interrupted"))
    failure: PipeSDError | None = None
    try:
        with interrupts.raising():
            _Advising(edge, own, config, findings, quiet, interrupts).run(prompts or PROMPTS)
    except KeyboardInterrupt:
        failure = Cancelled("interrupted")
    except PipeSDError as error:
        failure = error
    interrupts.speak()
    if as_json:
        show(line(findings, None if failure is None else str(failure)))
    elif failure is None:
        show(describe(findings, ascii_only=not utf8_output()))
    return 0 if failure is None else complain(failure)


class _Advising:
    """One run of the command; what it learns goes into `findings` at once."""

    def __init__(
        self,
        edge: EdgeConfig,
        own: dict[str, Any] | None,
        config: AdviseConfig,
        findings: Findings,
        quiet: bool,
        interrupts: Interrupts,
    ) -> None:
        """`own`: fields of EdgeConfig that make the user's own policy, if there is one."""
        self._edge, self._config, self._findings = edge, config, findings
        self._quiet, self._interrupts = quiet, interrupts
        self._own_row: dict[str, dict[str, Any]] = {}
        if own is not None:
            from pipesd.policy.strategy import make_strategy

            self._own_row[make_strategy(EdgeConfig(**own)).name] = own

    def run(self, prompts: Sequence[str]) -> None:
        from pipesd.edge.models import import_models, load_models

        import_models()
        drafter, tokeniser = load_models(self._edge, drafter=True)
        assert drafter is not None
        try:
            records = self._sample(drafter, tokeniser, prompts)
        finally:
            drafter.close()
        self._compare(records)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _sample(self, drafter: Drafter, tokeniser: Tokeniser, prompts: Sequence[str]) -> list[Any]:
        """The target's texts with the draft model's guesses, as records; link and passes are measured on the way."""
        from pipesd.edge.session import EdgeSession

        _check_room(drafter, tokeniser, prompts)
        parts = {"drafter": drafter, "tokeniser": tokeniser}
        with EdgeSession(replace(self._edge, strategy="cloud"), **parts) as session:  # type: ignore[arg-type]
            assert session.serving is not None
            self._findings.target = session.serving[0]
            self._findings.link = self._link()
            self._generate(session, prompts[0], WARM_UP_TOKENS)
            cloud_s = passes = 0.0
            records = []
            for number, prompt in enumerate(prompts, 1):
                log.info("prompt %d of %d: the target writes", number, len(prompts))
                self._generate(session, prompt, self._config.tokens)
                cloud_s, passes = cloud_s + session.stats["cloud_s"], passes + session.stats["target_passes"]
                records.append(self._read(session, drafter, f"prompt {number} of {len(prompts)}"))
        if self._findings.tokens < LEAST_TOKENS:
            raise UsageError("the target ends at once behind every prompt: give others with --prompt")
        log.info("passes over several ids")
        drafted = replace(self._edge, strategy="vanilla", draft_length=PASS_DRAFT)
        with EdgeSession(drafted, **parts) as session:  # type: ignore[arg-type]
            self._generate(session, prompts[0], WARM_UP_TOKENS)
            self._generate(session, max(prompts, key=len), self._config.tokens)
            self._passes(cloud_s / passes, session.stats)
        return records

    def _link(self) -> LinkFigures:
        from pipesd.edge.link import LinkConfig, Progress, measured

        progress = Progress(shown=not self._quiet)
        edge = self._edge
        try:
            return measured(
                LinkConfig(cloud=edge.cloud, connect_s=edge.connect_s, seconds=self._config.link_s), progress
            )
        finally:
            progress.end()

    def _generate(self, session: EdgeSession, prompt: str, tokens: int) -> None:
        pieces = session.generate(prompt, max_tokens=tokens)
        with self._interrupts.calling(pieces.cancel):
            for _ in pieces:
                pass
        if session.finish_reason == "cancelled":
            raise Cancelled("interrupted")

    def _read(self, session: EdgeSession, drafter: Drafter, where: str) -> Any:
        """The last generation of `session` as a record, with what the draft model makes of it."""
        from statistics import median

        from pipesd.edge.advise_reading import read_along
        from pipesd.sim.trace import Guess, Record

        said = session.token_ids
        prompt = session.committed[: len(session.committed) - len(said)]
        log.info("%s: the draft model reads along", where)
        with self._interrupts.raising():
            reading = read_along(drafter, prompt, said, DEPTH)
        assert reading.guesses, "the context has room for a few, as was checked"
        output = said[: len(reading.guesses)]
        guesses = tuple(Guess(*seen) for seen in reading.guesses)
        behind = {place: tuple(Guess(*seen) for seen in seens) for place, seens in reading.behind.items()}
        ended = session.finish_reason == "stop" and output == said
        ends = tuple(sorted(session.tokeniser.end_ids))
        record = Record(prompt, output, guesses, behind, finish="stop" if ended else "length", end_ids=ends)
        findings = self._findings
        findings.prompts += 1
        findings.tokens += len(output)
        findings.right += sum(record.right(i) for i in range(len(output)))
        findings.times_s += reading.times_s
        findings.gamma_s = median(findings.times_s)
        return record

    def _passes(self, alone_s: float, stats: dict[str, Any]) -> None:
        """From the passes of a drafted run what each further id takes, and from both a pass of none."""
        passes = stats["target_passes"]
        further = stats["verified"] / passes if passes else 0.0
        drafted_s = stats["cloud_s"] / passes if passes else alone_s
        token_s = max(0.0, drafted_s - alone_s) / further if further >= 1.0 else 0.0
        self._findings.token_s = min(token_s, alone_s)
        self._findings.pass_s = alone_s - self._findings.token_s

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _compare(self, records: Sequence[Any]) -> None:
        from pipesd.sim.advice import EXACT, MOST_RTT_S, Adviser, Place, interval, split
        from pipesd.sim.link_model import Link

        findings = self._findings
        figures = findings.link
        assert figures is not None and findings.gamma_s is not None
        assert findings.pass_s is not None and findings.token_s is not None
        gap_s = figures.gap_s or 0.0
        up, down = (math.inf if rate is None else rate.bits_per_s / 8 for rate in (figures.up, figures.down))
        latency_s = max(0.0, figures.alpha_s - gap_s)
        link = Link(latency_s=latency_s, gap_s=gap_s, up_bytes_per_s=up, down_bytes_per_s=down)
        place = Place(link=link, gamma_s=findings.gamma_s, pass_s=findings.pass_s, token_s=findings.token_s)
        common = {name: getattr(self._edge, name) for name in ("draft_ahead", "link_model", "confidence")}
        tuning, judged = split(records)
        findings.tuned_on, findings.judged_on = len(tuning), len(judged)
        rows = {name: {"strategy": name} for name in EXACT} | self._own_row
        log.info("simulating %d strategies", len(rows) + 1)
        with self._interrupts.raising():
            adviser = Adviser(
                place, tuning, judged, rows=rows, common=common, samples=self._config.samples, tell=_tell_rtt
            )
            expected = adviser.expected()
            alone = Adviser(place, tuning, judged, rows={"local": {"strategy": "local"}}, common=common).expected()
            findings.rows = [Row.of(each) for each in (*expected, *alone)]
            first, second = expected[:2]
            findings.lead = first.tpt_s / second.tpt_s, interval(first.each, second.each)
            told = {each.strategy: interval(first.each, each.each)[1] < 1.0 for each in expected[1:]}
            findings.alike = tuple(name for name, apart in told.items() if not apart)
            findings.cheapest = min(expected, key=lambda each: each.cloud_s_per_1000_tokens).strategy
            findings.command = command(self._edge, first.settings)
            findings.rtt_s, findings.most_rtt_s = place.rtt_s, MOST_RTT_S
            findings.below = adviser.change(above=False, margin=MARGIN)
            findings.above = adviser.change(above=True, margin=MARGIN)


def _tell_rtt(rtt_s: float) -> None:
    log.info("simulating a round trip of %.3g ms", 1e3 * rtt_s)


def _check_room(drafter: Drafter, tokeniser: Tokeniser, prompts: Sequence[str]) -> None:
    """Raises UsageError for a prompt behind which the draft model has no room to read along."""
    from pipesd.edge.models import prompt_ids

    drafter.rollback(0)
    for number, prompt in enumerate(prompts, 1):
        length = len(prompt_ids(tokeniser, prompt, (), None))
        if length + LEAST_TOKENS > drafter.room:
            raise UsageError(
                f"prompt {number} of {len(prompts)} has {length} ids, the draft model's context is {drafter.room}, "
                f"and {LEAST_TOKENS} more are needed: give a larger --context, or shorter prompts with --prompt"
            )
