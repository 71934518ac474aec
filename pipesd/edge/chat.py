"""A conversation as ids: the model's own chat template decides the text, and what was generated is never encoded again.

Decoding ids and encoding the text often gives other ids, and then neither side could reuse what it has computed. So a
conversation keeps the ids of every stretch beside its text: a new turn renders all messages, goes over the stretches as
long as the rendered text agrees with them, and encodes only the rest. A template that rewrites earlier turns (one that
drops the model's reasoning, say) costs the ids from there on, and the turn says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, Protocol

from pipesd.core import Vocabulary, common_prefix
from pipesd.edge.text import decode
from pipesd.errors import UsageError

Message = dict[str, str]
_TOO_MUCH = (MemoryError, RecursionError)  # what a template that asks for everything ends in


class ChatTokeniser(Protocol):
    """What a conversation needs of a tokeniser; see `pipesd.edge.tokeniser.Tokeniser`."""

    name: str
    vocabulary: Vocabulary
    end_ids: frozenset[int]
    hidden_ids: frozenset[int]
    template: str | None
    bos_text: str
    eos_text: str

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, continued: bool = False
    ) -> list[int]: ...


@dataclass(frozen=True)
class Turn:
    """The prompt of a turn, `ids`: the first `keep` are those of the conversation so far, then come `new_ids`.

    `rewritten`: the template changed earlier turns, so some ids of them had to be given up.
    """

    ids: tuple[int, ...]
    keep: int
    rewritten: bool

    @property
    def new_ids(self) -> tuple[int, ...]:
        return self.ids[self.keep :]


@dataclass(frozen=True)
class _Stretch:
    """A part of the conversation: its text without end ids, its ids, and whether the model wrote it."""

    text: str
    ids: tuple[int, ...]
    answer: bool


class Conversation:
    """Messages so far and their ids. Take `next_turn`, generate, tell `answered`; and so on."""

    def __init__(self, tokeniser: ChatTokeniser, *, system: str = "", now: datetime | None = None) -> None:
        """`now` is the time that a template is told; it stays the same, so that earlier turns do not change.

        Raises `UsageError` for a model without a chat template or with one that cannot be read.
        """
        if not tokeniser.template:
            raise UsageError(f"{tokeniser.name} has no chat template; leave out --chat or take an instruct model")
        self._tokeniser = tokeniser
        self._template = ChatTemplate(
            tokeniser.template,
            bos_text=tokeniser.bos_text,
            eos_text=tokeniser.eos_text,
            now=datetime.now().astimezone() if now is None else now,
        )
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._stretches: list[_Stretch] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, as the template sees it."""
        return tuple(dict(message) for message in self._messages)

    def next_turn(self, user_text: str) -> Turn:
        """The prompt that asks for an answer to `user_text`. A turn that was never answered is forgotten.

        Raises `UsageError` where the template refuses; the conversation is then as before.
        """
        asked = self._messages[:-1] if self._messages[-1:] and self._messages[-1]["role"] == "user" else self._messages
        messages = [*asked, {"role": "user", "content": user_text}]
        text = self._template.render(messages)
        kept, at = self._agreeing(text)
        ids_before = [token_id for stretch in kept for token_id in stretch.ids]
        tail = text[at:]
        if ids_before:
            shown_before = ids_before[-1] not in self._tokeniser.hidden_ids
            tail_ids = self._tokeniser.encode(tail, special=True, add_bos=False, continued=shown_before)
        else:
            tail_ids = self._tokeniser.encode(tail, special=True)
        old = [token_id for stretch in self._stretches for token_id in stretch.ids]
        rewritten = len(kept) < len(self._stretches)
        self._messages = messages
        self._stretches = [*kept, _Stretch(tail, tuple(tail_ids), answer=False)]
        ids = [*ids_before, *tail_ids]
        keep = common_prefix(old, ids)
        return Turn(tuple(ids), keep, rewritten)

    def answered(self, text: str, token_ids: Sequence[int]) -> None:
        """The model's answer to the last turn: its text as shown, and the ids committed behind the turn's prompt.

        The ids may end with an end id, or before the text does (an answer cut by a stop text within an id).
        """
        assert self._messages and self._messages[-1]["role"] == "user", "an answer to no turn"
        self._messages.append({"role": "assistant", "content": text})
        own_text = decode(self._tokeniser.vocabulary, token_ids, hidden=self._tokeniser.hidden_ids)
        self._stretches.append(_Stretch(own_text, tuple(token_ids), answer=True))

    def _agreeing(self, text: str) -> tuple[list[_Stretch], int]:
        """The stretches that `text` begins with, and how many characters they cover."""
        kept: list[_Stretch] = []
        at = 0
        for stretch in self._stretches:
            # templates like to strip an answer, and the space glued to its first word is not shown
            forms = [stretch.text]
            if stretch.answer:
                forms += [stretch.text.lstrip(), stretch.text.rstrip(), stretch.text.strip()]
            form = next((form for form in forms if text.startswith(form, at)), None)
            if form is None:
                break
            at += len(form)
            end = self._end_text(stretch)
            if end and not text.startswith(end, at):  # the template ends an answer in its own way
                kept.append(_Stretch(stretch.text, stretch.ids[:-1], answer=True))
                break
            at += len(end)
            kept.append(stretch)
        return kept, at

    def _end_text(self, stretch: _Stretch) -> str:
        """The text of the end id at the end of an answer, if it has one."""
        if not stretch.answer or not stretch.ids or stretch.ids[-1] not in self._tokeniser.end_ids:
            return ""
        return self._tokeniser.vocabulary.pieces[stretch.ids[-1]].decode("utf-8", "replace")


class ChatTemplate:
    """A model's chat template, rendered in Jinja's sandbox: it came with the model file, so it is not trusted."""

    def __init__(self, source: str, *, bos_text: str, eos_text: str, now: datetime) -> None:
        """Raises `UsageError` if `source` is no template."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # settings and helpers are those that templates are written for (Hugging Face's)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_mark()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=now.strftime)
        self._given = {"bos_token": bos_text, "eos_token": eos_text, "tools": None, "documents": None}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_TOO_MUCH, SyntaxError, ValueError) as error:
            raise UsageError(f"the model's chat template cannot be read ({error}); leave out --chat") from error

    def render(self, messages: Iterable[Mapping[str, str]]) -> str:
        """The text of `messages`, ready for the model's answer. Raises `UsageError` where the template fails."""
        import jinja2

        given = [dict(message) for message in messages]
        try:
            return self._template.render(self._given, messages=given, add_generation_prompt=True)
        except _TOO_MUCH as error:
            raise UsageError("the model's chat template takes more memory or depth than there is") from error
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error


def _refuse(reason: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(reason)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _generation_mark() -> Any:
    """The tag `{% generation %}`, by which some templates mark the model's part: its body is rendered as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationMark(Extension):
        tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationMark
