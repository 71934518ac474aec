"""Whether two models fit, from what both files say, and how a person and a program are told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipesd.core import Vocabulary
from pipesd.edge.pair_models import ModelFacts
from pipesd.edge.pair_sample import Sample
from pipesd.edge.pair_served import Refusal
from pipesd.protocol.vocabulary import difference_text, first_difference, vocabulary_hash
from pipesd.sizes import size_text

MOST_DRAFT_CONTEXT = 8192  # that the edge makes room for, unless --context asks for another
FEW, MUCH = 0.4, 0.5  # greedy acceptance below this, cost above this share: drafts will hardly pay
_OTHER = "take a draft model of the target's own family"


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """Two models side by side. `difference` is the first id that means another text: (id, draft's, target's)."""

    draft: ModelFacts
    target: ModelFacts
    difference: tuple[int, bytes, bytes] | None
    sample: Sample | None = None
    unmeasured: str = ""  # why there is no sample
    refusal: Refusal | None = None  # of the cloud's own decoder
    remarks: Sequence[str] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the ids mean the same, and some cloud can serve the target."""
        return self.difference is None and not (self.refusal and self.refusal.final)

    @property
    def verdict(self) -> str:
        """One line: whether they fit, and where not, why and what to do."""
        if self.difference is not None:
            return f"does not fit: {difference_text(*self.difference)}; {_OTHER}"
        if self.refusal is not None and self.refusal.final:
            return f"cannot be served: {plain(self.refusal.why)}"
        if not self.remarks:
            return "fits"
        return f"fits, with {'a remark' if len(self.remarks) == 1 else f'{len(self.remarks)} remarks'}"


def compare(
    draft: ModelFacts,
    target: ModelFacts,
    sample: Sample | None = None,
    unmeasured: str = "",
    refusal: Refusal | None = None,
) -> PairReport:
    """The report on a pair. The vocabularies are compared as edge and cloud do when they meet. `refusal`: what the
    cloud would say of the target."""
    difference = differs(draft.vocabulary, target.vocabulary)
    remarks = () if difference else tuple(_remarks(draft, target, sample, refusal))
    return PairReport(
        draft=draft,
        target=target,
        difference=difference,
        sample=sample,
        unmeasured=unmeasured,
        remarks=remarks,
        refusal=refusal,
    )


def differs(draft: Vocabulary, target: Vocabulary) -> tuple[int, bytes, bytes] | None:
    """The first id that differs, with both pieces; None where edge and cloud would agree. Padding does not count."""
    if vocabulary_hash(draft) == vocabulary_hash(target):
        return None
    found = first_difference(draft.pieces[: draft.real_size], target.pieces[: target.real_size])
    assert found is not None, "the hashes differ"
    return found


def ratios(draft: ModelFacts, target: ModelFacts) -> tuple[float, float] | None:
    """Bytes of weights for a draft token over those for a token of the target, held in float32 and in 16 bits; None
    where the target's weights are not there to be counted."""
    weights = target.read_parameters
    if not weights:
        return None
    return draft.read_bytes / (4 * weights), draft.read_bytes / (2 * weights)


def _remarks(draft: ModelFacts, target: ModelFacts, sample: Sample | None, refusal: Refusal | None) -> Iterator[str]:
    if refusal is not None and not refusal.final:
        yield plain(refusal.why)
    if target.add_bos and not (draft.add_bos and draft.bos_id == target.bos_id):
        yield (
            "prompts lack the start token that the target's files want in front: the edge goes by the draft's file; "
            "take one whose metadata names it"
        )
    elif draft.add_bos and not target.add_bos:
        yield "prompts get a start token in front, as the draft's file wants it; the target's files do not"
    if not draft.template:
        yield "the draft's file has no chat template, which --chat and chat need; take an instruct model's"
    elif target.template and target.template != draft.template:
        yield "the chat templates differ: the edge uses the draft's"
    if target.context and 0 < draft.context < min(target.context, MOST_DRAFT_CONTEXT):
        yield f"the draft model's context ends at {draft.context}: behind it the target goes on alone"
    if target.missing:
        yield f"weights of the target are missing: {target.missing}; download them before it is served"
    if (shares := ratios(draft, target)) and shares[0] > MUCH:
        yield "the draft model is not much smaller than the target: take a smaller one, or a smaller quantisation"
    if sample is not None and sample.greedy < FEW:
        yield "few drafts are accepted: strategy auto will mostly leave the target alone"


def _texts(model: ModelFacts, ids: Collection[int]) -> str:
    shown = [f"{_piece(model, token)} ({token})" for token in sorted(ids)[:4]]
    return ", ".join([*shown, "…"] if len(ids) > 4 else shown)


def _piece(model: ModelFacts, token: int | None) -> str:
    if token is None or not 0 <= token < model.vocabulary.size:
        return "none"
    return plain(model.vocabulary.pieces[token].decode("utf-8", "replace"))


def plain(text: str) -> str:
    """A text from a file as one line that cannot steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def describe(report: PairReport, *, ascii_only: bool) -> str:
    """The report in lines that end with a newline."""
    rows = [
        ("draft", _model(report.draft)),
        ("target", _model(report.target)),
        ("vocabulary", _vocabulary(report)),
    ]
    if report.difference is None:
        rows += [
            ("end tokens", _ends(report)),
            ("start token", _starts(report)),
            ("chat template", _templates(report)),
            ("context", _contexts(report)),
            ("cost", _costs(report)),
            ("acceptance", _acceptance(report)),
        ]
    rows += [("remark", remark) for remark in report.remarks]
    text = "".join(f"{name:<15}{value}\n" for name, value in [*rows, ("verdict", report.verdict)])
    return text.replace("…", "...") if ascii_only else text


def _model(model: ModelFacts) -> str:
    context = f"context {model.context}" if model.context else "context unknown"
    size = (
        f"{_count(model.parameters)} parameters, {size_text(model.file_bytes)}" if model.parameters else "size unknown"
    )
    return f"{plain(model.name)}: {plain(model.architecture)}, {size}, {context} ({plain(str(model.path))})"


def _vocabulary(report: PairReport) -> str:
    draft, target = report.draft.vocabulary, report.target.vocabulary
    widths = "" if draft.size == target.size else f"; output layers {draft.size} and {target.size} wide: only padding"
    if report.difference is None:
        return f"the same {draft.real_size} ids{widths}"
    return f"differs: {draft.real_size} ids in the draft, {target.real_size} in the target"


def _ends(report: PairReport) -> str:
    draft, target = report.draft, report.target
    lists = [f"the same: {_texts(target, draft.end_ids & target.end_ids) or 'none'}"]
    for whose, model, other in (("draft", draft, target), ("target", target, draft)):
        if more := model.end_ids - other.end_ids:
            lists.append(f"also {_texts(model, more)}, by the {whose}'s files")
    return "; ".join(lists)


def _starts(report: PairReport) -> str:
    def told(model: ModelFacts) -> str:
        return f"{_piece(model, model.bos_id)}, {'' if model.add_bos else 'not '}added"

    draft, target = told(report.draft), told(report.target)
    return f"the same: {draft}" if draft == target else f"draft: {draft}; target: {target}; the draft's file decides"


def _templates(report: PairReport) -> str:
    draft, target = report.draft.template, report.target.template
    if draft and target:
        return "the same" if draft == target else "differ: the draft's is used"
    return {(True, False): "only in the draft", (False, True): "only in the target"}.get(
        (bool(draft), bool(target)), "in neither"
    )


def _contexts(report: PairReport) -> str:
    draft, target = report.draft.context, report.target.context
    if not draft or not target:
        return "not told by both files"
    drafting = min(draft, target, MOST_DRAFT_CONTEXT)
    more = f", with --context up to {min(draft, target)}" if drafting < min(draft, target) else ""
    sample = report.sample
    end = f"{target}, the target's" if sample is None or sample.context is None else f"{sample.context}, the cloud's"
    return f"drafts up to position {drafting}{more}; a text ends at {end}"


def _costs(report: PairReport) -> str:
    weights = report.target.read_parameters
    shares = ratios(report.draft, report.target)
    if shares is None:
        return f"a draft token reads {size_text(report.draft.read_bytes)} of weights; the target's are missing"
    exact, half = shares
    return (
        f"a draft token reads {size_text(report.draft.read_bytes)} of weights, a token of the target "
        f"{size_text(4 * weights)} in float32 and {size_text(2 * weights)} in 16 bits: "
        f"{_share(exact)} and {_share(half)} of a token of the target"
    )


def _share(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _acceptance(report: PairReport) -> str:
    sample = report.sample
    if sample is None:
        return f"not measured: {report.unmeasured or 'the target cannot be served'}"
    sampled = "" if sample.sampled is None else f", {sample.sampled:.0%} at temperature 0.8 (rejection sampling)"
    where = "both computed here by llama.cpp"
    if sample.where == "cloud":
        where = f"at the cloud, which serves {plain(sample.model or 'a target')}, strategy vanilla"
    return (
        f"{sample.greedy:.0%} greedy{sampled}; {sample.mean_run:.1f} in a row of at most {sample.longest} "
        f"({sample.tokens} tokens behind {sample.prompts} prompts, {where})"
    )


def _count(number: int) -> str:
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


NAMES = (
    "fits verdict remarks draft target first_difference same_end_ids same_start_token same_template draft_context "
    "context cost_ratio_float32 cost_ratio_16_bits acceptance not_measured error"
).split()


def as_json(report: PairReport | None, error: str | None = None) -> dict[str, Any]:
    """The object of `--json`: always the same names, null where there is nothing to say."""
    values: dict[str, Any] = dict.fromkeys(NAMES)
    values["error"] = error
    if report is None:
        return values
    draft, target = report.draft, report.target
    exact, half = ratios(draft, target) or (None, None)
    values.update(
        fits=report.fits,
        verdict=report.verdict,
        remarks=list(report.remarks),
        draft=_facts(draft),
        target=_facts(target),
        same_end_ids=draft.end_ids == target.end_ids,
        same_start_token=(draft.bos_id, draft.add_bos) == (target.bos_id, target.add_bos),
        same_template=draft.template == target.template,
        draft_context=min(filter(None, (draft.context, target.context, MOST_DRAFT_CONTEXT))),
        context=(report.sample and report.sample.context) or target.context or None,
        cost_ratio_float32=exact,
        cost_ratio_16_bits=half,
        acceptance=None if report.sample is None else _rounded(report.sample),
        not_measured=report.unmeasured or None,
    )
    if report.difference is not None:
        token, *pieces = report.difference
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        values["first_difference"] = {"id": token, "draft": texts[0], "target": texts[1]}
    return values


def _facts(model: ModelFacts) -> dict[str, Any]:
    return {
        "path": str(model.path),
        "name": model.name,
        "architecture": model.architecture,
        "ids": model.vocabulary.real_size,
        "width": model.vocabulary.size,
        "end_ids": sorted(model.end_ids),
        "start_id": model.bos_id,
        "start_added": model.add_bos,
        "template": model.template is not None,
        "context": model.context or None,
        "parameters": model.parameters or None,
        "bytes": model.file_bytes or None,
        "bytes_a_token": model.read_bytes or None,
    }


def _rounded(sample: Sample) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(sample).items()}
