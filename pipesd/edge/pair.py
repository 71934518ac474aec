"""`pipesd-edge pair`: whether a draft and a target model fit, and what drafts would be worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipesd.config import EdgeConfig, check, option
from pipesd.edge.interrupts import Interrupts
from pipesd.errors import Cancelled, PipeSDError, Refused, UsageError
from pipesd.program import complain
from pipesd.streams import show, utf8_output

if TYPE_CHECKING:
    from pipesd.edge.pair_models import ModelFacts
    from pipesd.edge.pair_sample import Sample

_AT_A_CLOUD = "start pipesd-cloud with the target and give --cloud ADDRESS"


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Which models, and how to sample. Raises UsageError for a value out of bounds."""

    draft: str = option("", "draft model, a GGUF file", metavar="FILE")
    target: str = option("", "target model, a GGUF file or a Hugging Face folder", metavar="PATH")
    cloud: str = option(
        "", "a cloud that serves the target: acceptance is measured there; without it here, if both models fit into "
        "memory as GGUF files", metavar="ADDRESS",
    )  # fmt: skip
    tokens: int = option(48, "tokens to write behind each prompt", low=1, high=4096)
    threads: int = option(0, "threads of the models; 0: the usable processors but one, at most 8", low=0, high=512)
    connect_s: float = option(5.0, "give up if the cloud has not answered by then (s)", low=0.1, high=3600)

    def __post_init__(self) -> None:
        check(self)


def show_pair(config: PairConfig, prompts: Sequence[str], *, as_json: bool, interrupts: Interrupts) -> int:
    """Compare, measure and print; returns the exit code: 0 if the models fit and the target can be served. With
    `as_json` exactly one object is printed, on failure too. Raises KeyboardInterrupt."""
    from pipesd.edge.pair_folder import read_folder
    from pipesd.edge.pair_models import read_gguf
    from pipesd.edge.pair_report import as_json as as_object
    from pipesd.edge.pair_report import compare, describe
    from pipesd.edge.pair_sample import NotMeasured
    from pipesd.edge.pair_served import refused_folder, refused_gguf
    from pipesd.hf_paths import folder_at

    report = failure = None
    try:
        for name in ("draft", "target"):
            if not getattr(config, name):
                raise UsageError(f"no {name} model: give --{name} {'FILE.gguf' if name == 'draft' else 'PATH'}")
        draft = read_gguf(config.draft)
        folder = folder_at(config.target)
        target = read_gguf(config.target) if folder is None else read_folder(folder)
        refusal = refused_gguf(target.architecture) if folder is None else refused_folder(folder)
        report = compare(draft, target, refusal=refusal)
        if report.fits:
            sample = _sample(config, draft, target, prompts, interrupts)
            report = compare(draft, target, sample, refusal=refusal)
    except NotMeasured as reason:
        why = f"{reason}; {_AT_A_CLOUD}" if reason.args else _AT_A_CLOUD
        report = compare(draft, target, unmeasured=why, refusal=refusal)
    except PipeSDError as error:
        failure = error
        report = report and compare(draft, target, unmeasured=str(error), refusal=refusal)
    if isinstance(failure, Cancelled):
        raise failure
    if as_json:
        values = as_object(report, None if failure is None else str(failure))
        show(json.dumps(values, ensure_ascii=not utf8_output()) + "\n")
    elif report is not None:
        show(describe(report, ascii_only=not utf8_output()))
    if failure is not None:
        return complain(failure)
    assert report is not None
    return 0 if report.fits else Refused.exit_code


def _sample(
    config: PairConfig, draft: ModelFacts, target: ModelFacts, prompts: Sequence[str], interrupts: Interrupts
) -> Sample:
    from pipesd.edge.pair_sample import NotMeasured, sample_at_cloud, sample_here
    from pipesd.edge.tune import PROMPTS

    chosen = prompts or PROMPTS
    if config.cloud:
        edge = EdgeConfig(
            draft=str(draft.path), cloud=config.cloud, strategy="vanilla", tuning="off", threads=config.threads,
            connect_s=config.connect_s,
        )  # fmt: skip
        return sample_at_cloud(edge, chosen, config.tokens, interrupts)
    if not target.gguf:
        raise NotMeasured
    return sample_here(draft, target, chosen, config.tokens, config.threads)


def pair_failed(interrupted: bool) -> str:
    """What stdout gets from `pair --json` that was interrupted, or failed before it could begin."""
    from pipesd.edge.pair_report import as_json

    return json.dumps(as_json(None, "interrupted" if interrupted else "nothing was compared; stderr says why")) + "\n"
