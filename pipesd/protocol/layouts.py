"""What each field of each kind may hold, and the way between a message and its array of msgpack values by these tables.

For every kind, and slow: the quick ways of `wire` take what is right in every field and leave the rest to these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pipesd.core import Mode
from pipesd.policy.accept import ToldLaw
from pipesd.protocol import messages as m
from pipesd.protocol.fields import (
    U16,
    U32,
    U64,
    Blob,
    Bool,
    Choice,
    Codec,
    Fixed,
    Ids,
    Int,
    Optional,
    Pieces,
    Probabilities,
    Text,
    Unfit,
    describe,
)
from pipesd.protocol.messages import Counters, Kind, Message, WireError
from pipesd.protocol.sampling_fields import LawPairs, LogprobsOfIds, Options, count_of
from pipesd.protocol.vocabulary import BLOCK, BLOCK_HASH_BYTES, HASH_BYTES

_U16, _U32, _U64 = Int(U16), Int(U32), Int(U64)
_HASH, _NAME, _FLAGS, _BOOL = Fixed(HASH_BYTES), Text(m.MAX_NAME_BYTES), Int(3), Bool()
_IDS, _STOP_IDS = Ids(m.MAX_IDS), Ids(m.MAX_STOP_IDS)
_MOST_BLOCKS = m.MAX_VOCABULARY // BLOCK
_PIECES_READY = Pieces(m.MAX_VOCABULARY, m.MAX_INTERNAL_BYTES - (1 << 12))
_COUNTERS: dict[str, Codec] = dict.fromkeys(Counters._fields, Optional(_U32))

Row = dict[str, Any]  # by field name


class _Layout(NamedTuple):
    """How a kind looks: `attributes` of the message, `fields` on the wire, of which the first `required` must come."""

    message: Callable[..., Message]
    attributes: dict[str, Codec]
    fields: dict[str, Codec]
    required: int
    to_wire: Callable[[Row], Row] = lambda attributes: attributes
    to_message: Callable[[Row], Row] = lambda fields: fields


def _plain(message: Callable[..., Message], optional: int = 0, **own: Codec) -> _Layout:
    fields: dict[str, Codec] = {"session": _U64, "opening": _U32, **own}
    return _Layout(message, fields, fields, len(fields) - optional)


def _draft_to_wire(row: Row) -> Row:
    if row["p_draft"] is not None and len(row["p_draft"]) * 2 != len(row["ids"]):
        raise _uneven(len(row["p_draft"]) // 2, len(row["ids"]) // 4)
    return row | {"lag": row["pos"] - row["known"], "flags": row["nav"] | row["again"] << 1}


def _draft_to_message(row: Row) -> Row:
    known, flags = row["pos"] - row.pop("lag"), row.pop("flags")
    if row["p_draft"] is not None and len(row["p_draft"]) != len(row["ids"]):
        raise _uneven(len(row["p_draft"]), len(row["ids"]))
    return row | {"known": _fit("DRAFT", "known", _U32.unpack, known), "nav": flags & 1 == 1, "again": flags & 2 == 2}


def _uneven(probabilities: int, ids: int) -> WireError:
    return WireError("DRAFT", "p_draft", f"{probabilities} probabilities", f"as many as ids, {ids}")


def _verdict_to_wire(row: Row) -> Row:
    counters = row.pop("counters")
    if counters is None:
        numbers: Row = dict.fromkeys(Counters._fields)
    elif isinstance(counters, Counters):
        numbers = {name: _fit("VERDICT", name, _U32.pack, value) for name, value in counters._asdict().items()}
    else:
        raise WireError("VERDICT", "counters", describe(counters), "Counters or None")
    refused = row.pop("refused")
    if refused is not None and not isinstance(refused, ToldLaw):
        raise WireError("VERDICT", "refused", describe(refused), "ToldLaw or None")
    law = first = None
    if refused is not None:
        law = _fit("VERDICT", "law", _LAW.pack, refused.pairs)
        first = _fit("VERDICT", "first", _TRIED.pack, refused.first)
    _check_law(row["rejected"], law)
    if row["logprobs"] is not None:
        _check_logprobs(count_of(row["logprobs"]), len(row["ids"]) // 4)
    return row | numbers | {"flags": row["more"] | row["rejected"] << 1, "law": law, "first": first}


def _verdict_to_message(row: Row) -> Row:
    flags, numbers = row.pop("flags"), [row.pop(name) for name in Counters._fields]
    counters = None
    if any(number is not None for number in numbers):
        pairs = zip(Counters._fields, numbers, strict=True)
        counters = Counters(*(_fit("VERDICT", name, _U32.unpack, number) for name, number in pairs))
    law, first = row.pop("law"), row.pop("first")
    _check_law(flags & 2, law)
    _check_first(first, law)
    if row["logprobs"] is not None:
        _check_logprobs(len(row["logprobs"]), len(row["ids"]))
    refused = None if law is None else ToldLaw(law, first)
    return row | {"more": flags & 1 == 1, "rejected": flags & 2 == 2, "counters": counters, "refused": refused}


def _check_law(rejected: int, law: Any) -> None:
    if bool(rejected) != (law is not None):
        got, wanted = ("nothing", "a distribution with `rejected`") if rejected else ("one", "none without `rejected`")
        raise WireError("VERDICT", "law", got, wanted)


def _check_first(first: int | None, law: Any) -> None:
    if first is not None and law is None:
        raise WireError("VERDICT", "first", str(first), "nothing without a distribution")


def _check_logprobs(of: int, ids: int) -> None:
    if of != ids:
        raise WireError("VERDICT", "logprobs", f"those of {of} ids", f"as many as ids, {ids}")


class _Anything:
    """For an attribute that the layout's own function checks."""

    def pack(self, value: Any) -> Any:
        return value

    unpack = pack


_AHEAD: dict[str, Codec] = {"session": _U64, "opening": _U32, "epoch": _U32, "pos": _U32, "ids": _IDS}
_P_DRAFT = Optional(Probabilities(m.MAX_IDS))
_TRIED, _LAW, _LOGPROBS = Optional(Int(m.MAX_TRIED)), LawPairs(m.MAX_PAIRS), Optional(LogprobsOfIds(m.MAX_IDS))
LAYOUTS: dict[int, _Layout] = {
    Kind.HELLO: _plain(
        m.Hello, 1, major=_U16, minor=_U16, features=_U32, vocabulary_size=_U32, vocabulary_hash=_HASH,
        block=Optional(Int(_MOST_BLOCKS - 1)),
    ),
    Kind.WELCOME: _plain(
        m.Welcome, 3, major=_U16, minor=_U16, features=_U32, model=_NAME, vocabulary_size=_U32, vocabulary_hash=_HASH,
        model_fingerprint=_HASH, context=_U32, device=_NAME, dtype=_NAME,
        block_hashes=Optional(Blob(_MOST_BLOCKS * BLOCK_HASH_BYTES, BLOCK_HASH_BYTES)),
        pieces=Optional(Pieces(BLOCK, m.MAX_BLOCK_PIECES_BYTES)), end_ids=Optional(_STOP_IDS),
    ),
    Kind.OPEN: _plain(
        m.Open, 0, major=_U16, base=_U32, digest=_HASH, ids=Ids(m.MAX_IDS_OPEN), limit=_U32, stop_ids=_STOP_IDS,
        sampling=Optional(Options()), seed=_U64, mode=Choice(Mode), model_fingerprint=_HASH, vocabulary_hash=_HASH,
    ),
    Kind.OPENED: _plain(m.Opened, 0, limit=_U32, draft_ahead=_U32, run_ahead=_U32, pass_ms=_U32),
    Kind.DRAFT: _Layout(
        m.Draft,
        _AHEAD | {"known": _U32, "nav": _BOOL, "again": _BOOL, "p_draft": _P_DRAFT, "tried": _TRIED},
        _AHEAD | {"lag": Int(U32, -U32), "flags": _FLAGS, "p_draft": _P_DRAFT, "tried": _TRIED},
        7, _draft_to_wire, _draft_to_message,
    ),
    Kind.VERDICT: _Layout(
        m.Verdict,
        _AHEAD
        | {"more": _BOOL, "rejected": _BOOL, "counters": _Anything(), "refused": _Anything(), "logprobs": _LOGPROBS},
        _AHEAD | {"flags": _FLAGS} | _COUNTERS | {"law": Optional(_LAW), "first": _TRIED, "logprobs": _LOGPROBS},
        6, _verdict_to_wire, _verdict_to_message,
    ),
    Kind.RESEND: _plain(m.Resend, 0, epoch=_U32, pos=_U32),
    Kind.CANCEL: _plain(m.Cancel),
    Kind.CLOSE: _plain(m.Close),
    Kind.PROBE: _plain(m.Probe, 0, token=_U64, payload=Blob(m.MAX_PROBE_BYTES), reply_bytes=Int(m.MAX_PROBE_BYTES)),
    Kind.PROBED: _plain(
        m.Probed, 0, token=_U64, status=Choice(m.ProbeStatus), busy_ms=_U32, payload=Blob(m.MAX_PROBE_BYTES)
    ),
    Kind.ERROR: _plain(m.Error, 0, code=Choice(m.ErrorCode), text=Text(m.MAX_TEXT_BYTES, cut=True), retry_ms=_U32),
    Kind.READY: _plain(
        m.Ready, 0, name=Text(m.MAX_NAME_BYTES, cut=True), vocabulary_size=_U32, context=_U32, end_ids=_STOP_IDS,
        fingerprint=_HASH, device=_NAME, dtype=_NAME, pieces=_PIECES_READY,
    ),
    Kind.BEAT: _plain(m.Beat, 0, sessions=_U32, pass_ms=_U32),
    Kind.GONE: _plain(m.Gone),
}  # fmt: skip
_KINDS: dict[Any, Kind] = {layout.message: Kind(kind) for kind, layout in LAYOUTS.items()}
_VERSIONED = (Kind.HELLO, Kind.WELCOME, Kind.OPEN)  # major is their fourth field in every version

_T = TypeVar("_T")


def _fit(kind: str, field: str, codec: Callable[[Any], _T], value: Any) -> _T:
    try:
        return codec(value)
    except Unfit as unfit:
        raise WireError(kind, field, unfit.got, unfit.wanted) from None


def fields_of(message: Message) -> tuple[Any, ...]:
    """The array of a message, for msgpack. WireError: a value is not of its field's type or range."""
    assert type(message) in _KINDS, f"not a message: {type(message).__name__}"
    kind = _KINDS[type(message)]
    layout = LAYOUTS[kind]
    packed = {n: _fit(kind.name, n, codec.pack, getattr(message, n)) for n, codec in layout.attributes.items()}
    by_name = layout.to_wire(packed)
    row = [by_name[name] for name in layout.fields]
    while row[-1] is None:  # only what may be left out is None at the end
        row.pop()
    return (int(kind), *row)


def message_of(fields: Any, internal: bool = False) -> Message:
    """The message of what msgpack decoded. WireError: says what is wrong, with the address as far as it can be read."""
    if type(fields) is not tuple or not fields:
        raise WireError("message", "bytes", describe(fields), "an array [kind, session, opening, ...]")
    number = fields[0]
    if type(number) is not int or number not in LAYOUTS:
        wanted = f"a kind of version {m.MAJOR}.{m.MINOR}"
        raise WireError("message", "kind", describe(number), wanted, _address(fields))
    kind = Kind(number)
    if kind >= m.FIRST_INTERNAL_KIND and not internal:
        raise WireError(kind.name, "kind", "a message of worker and front", "a public one", _address(fields))
    try:
        return _by_layout(kind, LAYOUTS[number], fields[1:])
    except WireError as error:
        error.session, error.opening = _address(fields)
        if kind in _VERSIONED and len(fields) > 3 and _is_other_major(fields[3]):
            wanted = f"{m.MAJOR}: both sides must speak one major version"
            raise WireError(kind.name, "major", str(fields[3]), wanted, _address(fields), m.ErrorCode.VERSION) from None
        raise


def _is_other_major(value: Any) -> bool:
    return type(value) is int and 0 <= value <= U16 and value != m.MAJOR


def _by_layout(kind: Kind, layout: _Layout, row: tuple[Any, ...]) -> Message:
    if len(row) < layout.required:
        missing = list(layout.fields)[len(row)]
        raise WireError(kind.name, missing, "nothing", f"at least {layout.required + 1} fields")
    row += (None,) * (len(layout.fields) - len(row))
    pairs = zip(layout.fields.items(), row, strict=False)  # what a later minor version adds is not looked at
    values = {name: _fit(kind.name, name, codec.unpack, value) for (name, codec), value in pairs}
    return layout.message(**layout.to_message(values))


def _address(fields: tuple[Any, ...]) -> tuple[int, int]:
    """Session and opening of an array that may hold anything, 0 for what cannot be one."""
    session, opening = (*fields[1:3], 0, 0)[:2]
    return (
        session if type(session) is int and 0 <= session <= U64 else 0,
        opening if type(opening) is int and 0 <= opening <= U32 else 0,
    )
