"""What a session needs of its draft model, and how it is loaded."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Protocol

from pipesd.config import EdgeConfig, GenerateConfig
from pipesd.core import Drawn, common_prefix
from pipesd.edge.chat import ChatTokeniser
from pipesd.errors import Refused, UsageError
from pipesd.policy.sampler import Chooser
from pipesd.policy.sampling import Sampling
from pipesd.protocol.messages import MAX_IDS_OPEN, SAMPLING, ErrorCode, Welcome
from pipesd.sizes import counted, size_text

log = logging.getLogger("pipesd.edge")


class Tokeniser(ChatTokeniser, Protocol):
    """Text and ids of the draft model's file; its ids mean the same to the target."""

    add_space_prefix: bool  # a space is glued to a text's first word

    def repeats_bos(self, text: str) -> bool:
        """Whether the text begins with the start token that is added anyway."""

    def close(self) -> None: ...


class Drafter(Protocol):
    """A draft model and the ids it knows: the committed ones and the live draft behind them."""

    @property
    def room(self) -> int:
        """How many tokens may still be drafted."""

    def __len__(self) -> int: ...

    def rollback(self, pos: int) -> None:
        """Forget every position from `pos` on."""

    def extend(self, ids: Sequence[int]) -> None:
        """Append committed ids."""

    def prefill(self, most: int) -> int:
        """Decode at most `most` appended ids; returns how many remain."""

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        """Draw by `sampler`, or take the most probable, append and return the next token, with probability and entropy
        at temperature 1."""

    def close(self) -> None: ...


def import_models() -> None:
    """Import all that `load_models` needs. Where another thread imports meanwhile this comes first: modules that need
    each other, as some of Python's own do, cannot be imported by two threads at once."""
    from pipesd.edge import drafter, llama, tokeniser  # noqa: F401

    llama.native()


def load_models(config: EdgeConfig, *, drafter: bool) -> tuple[Drafter | None, Tokeniser]:
    """The draft model of `config` and its tokeniser; only the latter (a tenth of a second) without `drafter`."""
    from pipesd.edge.drafter import Drafter as LlamaDrafter
    from pipesd.edge.drafter import estimate_bytes
    from pipesd.edge.tokeniser import Tokeniser as LlamaTokeniser

    if not config.draft:
        raise UsageError("no draft model: give --draft FILE.gguf (every strategy needs at least its vocabulary)")
    if not drafter:
        return None, LlamaTokeniser.open(config.draft)
    log.info("loading %s: about %s", config.draft, size_text(estimate_bytes(config.draft, config.context)))
    loaded = LlamaDrafter(config.draft, context=config.context, threads=config.threads, gpu_layers=config.gpu_layers)
    for notice in loaded.notices:
        log.warning(notice)
    log.info("draft model %s: %s, context %d", loaded.name, counted(loaded.threads, "thread"), loaded.context)
    return loaded, loaded.tokeniser


def prompt_ids(
    tokeniser: Tokeniser, prompt: str | Sequence[int], committed: Sequence[int], welcome: Welcome | None
) -> list[int]:
    """The ids of a prompt, given as text or as ids. Ids that were `committed` may be any that the target has said.

    Raises UsageError if it is empty, outside the vocabulary or neither text nor ids, Refused if the cloud that said
    `welcome` has no room for it and one token more.
    """
    ids = (
        _encoded(tokeniser, prompt)
        if isinstance(prompt, str)
        else _checked(prompt, tokeniser.vocabulary.size, committed)
    )
    if not ids:
        raise UsageError("the prompt is empty, and the model has no start token: give at least one character")
    if welcome is not None and len(ids) >= min(welcome.context, MAX_IDS_OPEN):
        bound = f"the target's context is {welcome.context}"
        if welcome.context > MAX_IDS_OPEN:
            bound = f"one opening carries at most {MAX_IDS_OPEN}"
        raise Refused(f"the prompt has {len(ids)} ids, {bound}: shorten the prompt", ErrorCode.LIMIT)
    return ids


def check_sampling(
    options: GenerateConfig, sampling: Sampling | None, tokeniser: Tokeniser, welcome: Welcome | None
) -> None:
    """Raises UsageError for a logit bias outside the vocabulary, Refused if the cloud that said `welcome` does not know
    sampling."""
    width = tokeniser.vocabulary.size
    for token, _ in options.logit_bias:
        if token >= width:
            raise UsageError(f"logit-bias: got id {token}, outside the vocabulary of {width} ids")
    if sampling is not None and welcome is not None and not welcome.features & SAMPLING:
        names = ", ".join(name.replace("_", "-") for name in options.beyond_greedy())
        raise Refused(
            f"this cloud knows nothing of sampling: leave out {names} or find a newer cloud", ErrorCode.FEATURE
        )


def _encoded(tokeniser: Tokeniser, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at position {error.start}"
        raise UsageError(f"the prompt holds {wrong}, which is no character: give it in UTF-8") from None
    if tokeniser.repeats_bos(text):
        log.warning("the prompt begins with the start token, which is added anyway: it is taken once")
    return tokeniser.encode(text, special=True)


def _checked(prompt: Sequence[int], width: int, committed: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | bytearray):
        raise UsageError("the prompt is bytes: give a text, or token ids as a list")
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise UsageError(f"the prompt is neither a text nor token ids: {error}") from None
    for token in ids[common_prefix(ids, committed) :]:
        if not 0 <= token < width:
            raise UsageError(f"id {token} in the prompt is outside the vocabulary of {width} ids")
    return ids
