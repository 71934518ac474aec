"""The vocabulary of a Hugging Face folder, as llama.cpp would have it from the GGUF file made of that folder.

The files are read as plain JSON. The rules are those of llama.cpp's convert_hf_to_gguf.py: which ids have which text
and type, which special ids are named, and what pads the vocabulary up to the model's width. `pipesd.pieces` makes bytes
of it, so an edge with such a GGUF file and a cloud with the folder come to the same vocabulary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesd.core import Vocabulary
from pipesd.errors import UsageError
from pipesd.json_file import read_object, read_small
from pipesd.pieces import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, byte_of_symbol, read_pieces
from pipesd.regular_file import shown

_NORMAL = 1
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MOST_IDS = 1 << 22
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class HfVocabulary:
    """What a GGUF file made of the folder would say of text.

    `kind`: "gpt2" (byte-level BPE) or "llama" (SentencePiece). `texts` and `types`: one for each id, types as GGUF
    numbers them, padding up to the model's width included. `special_ids`: name ("eos_token_id") -> id. `add_bos`: None
    where the folder does not say. `template`: the chat template, or None.
    """

    kind: str
    texts: tuple[str, ...]
    types: tuple[int, ...]
    special_ids: Mapping[str, int]
    add_bos: bool | None
    template: str | None

    def pieces(self) -> tuple[Vocabulary, tuple[int, ...]]:
        """The bytes of each id, and the sorted ids that llama.cpp takes for an end."""
        pieces, end_ids = read_pieces(self.kind, self.texts, self.types, self.special_ids)
        return Vocabulary(pieces), end_ids


def read_hf_vocabulary(folder: Path, config: Mapping[str, Any]) -> HfVocabulary:
    """Reads the tokenizer of `folder`, whose config.json holds `config`. UsageError, one line, if it cannot be used."""
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        raise _missing(folder)
    tokenizer, options = read_object(path), _options(folder)
    model = _table(path, tokenizer, "model")
    kind = _kind(path, tokenizer, model)
    ids = _model_ids(path, model)
    added = _added(path, tokenizer)
    width = _width(folder, config)
    # Tokens added to SentencePiece without a row of embeddings are left out, such as Llama 2's <pad> with the id 32000.
    # With byte-level BPE the converter takes no such folder.
    last = max([*ids.values(), *(() if kind == "llama" else added)], default=-1)
    if width is not None and last >= width:
        raise UsageError(
            f"{path}: has a token with id {last}, the model only {width} ids (vocab_size); "
            "use the tokenizer that belongs to the model"
        )
    width = max([last, *added]) + 1 if width is None else width
    _add_named(options, ids, added, width)
    added = {i: token for i, token in added.items() if i < width}
    texts = [f"[PAD{i}]" for i in range(width)]
    types = [UNUSED] * width
    unknown = model.get("unk_token")
    for text, i in ids.items():
        texts[i], types[i] = text, _NORMAL
        if kind == "llama":
            types[i] = BYTE if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text) else UNKNOWN if text == unknown else _NORMAL
    for i, token in added.items():
        texts[i], types[i] = _as_added(kind, token)
    _check_characters(path, texts)
    return HfVocabulary(
        kind=kind,
        texts=tuple(texts),
        types=tuple(types),
        special_ids=_special_ids(tokenizer, options, config, added, kind, width),
        add_bos=_add_bos(tokenizer, options),
        template=_template(folder, options),
    )


def _check_characters(path: Path, texts: list[str]) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # one of the halves that JSON writes a character in stands alone
        half = error.object[error.start]
        text = next(text for text in texts if half in text)
        raise UsageError(f"{path}: token '{shown(text)}' has half a character in it; {_AGAIN}") from error


def model_name(folder: Path) -> str:
    """The folder's name, or the model's where the folder is a snapshot in a hub's cache."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return folder.name


def stated_end_ids(folder: Path, config: Mapping[str, Any], width: int) -> tuple[int, ...]:
    """The ids that generation_config.json, else config.json, calls ends; () if neither does."""
    path = folder / "generation_config.json"
    places = [(path, read_object(path))] if os.path.lexists(path) else []
    places.append((folder / "config.json", dict(config)))
    for place, table in places:
        value = table.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < width]
        if wrong:
            raise UsageError(
                f"{place}: eos_token_id '{shown(wrong[0])}' is no id of the model (0 to {width - 1}); correct it"
            )
        if ids:
            return tuple(sorted(set(ids)))
    return ()


def _missing(folder: Path) -> UsageError:
    others = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model")
    found = next((name for name in others if (folder / name).exists()), None)
    if found is None:
        return UsageError(f"{folder}: has no tokenizer.json; download the folder again with it")
    name = str(folder)
    return UsageError(
        f"{folder}: has {found} but no tokenizer.json; make it with transformers: "
        f"AutoTokenizer.from_pretrained({name!r}).save_pretrained({name!r})"
    )


def _options(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_object(path) if os.path.lexists(path) else {}


def _table(path: Path, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise UsageError(f"{path}: has no table {key!r}; {_AGAIN}")
    return value


def _width(folder: Path, config: Mapping[str, Any]) -> int | None:
    """How many ids the model has; None if config.json does not say."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        width = table.get("vocab_size")
        if type(width) is int and 0 < width <= _MOST_IDS:
            return width
        if width is not None:
            raise UsageError(
                f"{folder / 'config.json'}: vocab_size is {shown(width)}, a whole number from 1 to {_MOST_IDS} was "
                "wanted; correct it or download the file again"
            )
    return None


def _kind(path: Path, tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    named = model.get("type") or ("BPE" if "merges" in model else "nameless")
    if named == "Unigram" or (named == "BPE" and model.get("byte_fallback")):
        return "llama"
    if named == "BPE":
        steps = {str(step.get("type")) for key in _STEPS for step in _steps(tokenizer.get(key))}
        if "ByteLevel" in steps:
            return "gpt2"
        if "Metaspace" in steps:
            return "llama"
        named = "BPE without bytes"
    raise UsageError(
        f"{path}: is a {shown(named)} tokenizer, byte-level BPE or SentencePiece (BPE, Unigram) was wanted; "
        "use another model"
    )


_STEPS = ("decoder", "pre_tokenizer", "normalizer")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """A step of the tokenizer and, if it is a sequence, those in it."""
    if isinstance(value, dict):
        yield value
        for key in ("decoders", "pretokenizers", "normalizers", "processors"):
            inner = value.get(key)
            for step in inner if isinstance(inner, list) else ():
                yield from _steps(step)


def _model_ids(path: Path, model: Mapping[str, Any]) -> dict[str, int]:
    """Text -> id of the model's own tokens."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: (text, score) in the order of the ids
        if not all(isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary):
            raise UsageError(f"{path}: its vocabulary is damaged; {_AGAIN}")
        return {entry[0]: i for i, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise UsageError(f"{path}: has no vocabulary in it; {_AGAIN}")
    wrong = next((text for text, i in vocabulary.items() if not _is_id(i)), None)
    if wrong is not None:
        raise UsageError(f"{path}: token '{shown(wrong)}' has the id {shown(vocabulary[wrong])}; {_AGAIN}")
    return vocabulary


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_IDS


def _added(path: Path, tokenizer: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Id -> entry of `added_tokens`."""
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise UsageError(f"{path}: its added_tokens are damaged; {_AGAIN}")
    for entry in entries:
        if not (isinstance(entry, dict) and _is_id(entry.get("id")) and isinstance(entry.get("content"), str)):
            raise UsageError(f"{path}: its added token {shown(entry)} is damaged; {_AGAIN}")
    return {entry["id"]: entry for entry in entries}


def _add_named(
    options: Mapping[str, Any], ids: Mapping[str, int], added: dict[int, dict[str, Any]], width: int
) -> None:
    """Puts into `added` what tokenizer_config.json alone names, as transformers does when it opens the folder.

    A text that nobody knows gets the next free id; without a row of embeddings there is no such token.
    """
    decoder = options.get("added_tokens_decoder")
    entries = [entry for entry in decoder.values() if isinstance(entry, dict)] if isinstance(decoder, dict) else []
    named = [_content(options.get(f"{name}_token")) for name in _SPECIAL]
    more = options.get("additional_special_tokens") or options.get("extra_special_tokens")
    named += [_content(entry) for entry in more] if isinstance(more, list) else []
    entries += [{"content": text, "special": True, "normalized": False} for text in named if text]
    known = {entry["content"] for entry in added.values()}
    for entry in entries:
        text = entry.get("content")
        if not isinstance(text, str) or not text or text in known:
            continue
        i = ids.get(text, max([len(ids), *(i + 1 for i in added)]))
        if i < width:
            known.add(text)
            added[i] = entry


def _content(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _as_added(kind: str, token: Mapping[str, Any]) -> tuple[str, int]:
    """Text and type of an added token."""
    text = token["content"]
    if kind == "gpt2" and not token.get("normalized", True):
        table = byte_of_symbol()  # what the tokenizer gives for it when it decodes
        if all(symbol in table for symbol in text):
            text = bytes(table[symbol] for symbol in text).decode("utf-8", "replace")
    if token.get("special") or _looks_special(text):
        return text, CONTROL
    return text.replace("▁", " "), USER_DEFINED


def _looks_special(text: str) -> bool:
    """Whether llama.cpp takes an added token for a control token although the folder does not call it special."""
    pairs = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    marked = any(text.startswith(start) and text.endswith(end) for start, end in pairs)
    return marked or text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def _special_ids(
    tokenizer: Mapping[str, Any], options: Mapping[str, Any], config: Mapping[str, Any],
    added: Mapping[int, Mapping[str, Any]], kind: str, width: int,
) -> dict[str, int]:  # fmt: skip
    """Name -> id of the special ids that the GGUF file names: by the tokenizer's texts, else by config.json."""
    texts = {f"{name}_token": _content(options.get(f"{name}_token")) for name in _SPECIAL}
    texts["bos_token"] = texts["bos_token"] or texts["cls_token"]
    texts["eos_token"] = texts["eos_token"] or texts["sep_token"]
    single = _single(tokenizer)
    last = _special_step(single[-1]) if len(single) > 1 else None
    if options and last and last != texts["eos_token"]:  # the tokenizer puts another end behind a text
        texts["eot_token"], texts["eos_token"] = texts["eos_token"], last
    by_text: dict[str, int] = {}
    for i, token in sorted(added.items()):
        by_text.setdefault(token["content"], i)
    found = {f"{key}_id": by_text[text] for key, text in texts.items() if text and text in by_text}
    inner = config.get("text_config")
    for name in _SPECIAL:
        for table in (config, inner if isinstance(inner, dict) else {}):
            named = table.get(f"{name}_token_id")
            if type(named) is int and 0 <= named < width:
                found.setdefault(f"{name}_token_id", named)
    if kind == "llama" and config.get("model_type") == "llama" and width == 32016:
        found["eot_token_id"] = 32010  # CodeLlama's, which its folder does not name
    return found


def _single(tokenizer: Mapping[str, Any]) -> list[Any]:
    """The steps of the template that the tokenizer puts around one text."""
    for step in _steps(tokenizer.get("post_processor")):
        if step.get("type") == "TemplateProcessing" and isinstance(step.get("single"), list):
            return list(step["single"])
    return []


def _special_step(step: Any) -> str | None:
    special = step.get("SpecialToken") if isinstance(step, dict) else None
    return _content(special.get("id")) if isinstance(special, dict) else None


def _add_bos(tokenizer: Mapping[str, Any], options: Mapping[str, Any]) -> bool | None:
    said = options.get("add_bos_token")
    if isinstance(said, bool):
        return said
    single = _single(tokenizer)
    first = _special_step(single[0]) if len(single) > 1 else None
    if first is None:
        return None
    return first == (_content(options.get("bos_token")) or first)


def _template(folder: Path, options: Mapping[str, Any]) -> str | None:
    """The default chat template, wherever the folder keeps it."""
    value = options.get("chat_template")
    jinja, older = folder / "chat_template.jinja", folder / "chat_template.json"
    if value is None and os.path.lexists(jinja):
        try:
            value = read_small(jinja).decode("utf-8")
        except ValueError as error:
            raise UsageError(f"{jinja}: is no UTF-8 text; {_AGAIN}") from error
    elif value is None and os.path.lexists(older):
        value = read_object(older).get("chat_template")
    if isinstance(value, list):  # several with names
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
