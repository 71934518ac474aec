"""The wire as it should not be: every wrong field is refused by its name, and nothing but WireError comes out."""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import pipesd
from pipesd.protocol import fields as f
from pipesd.protocol import wire
from pipesd.protocol.layouts import LAYOUTS, fields_of
from pipesd.protocol.wire import Counters, WireError, decode, encode
from tests.wire_samples import (
    COUNTED_VERDICT,
    DRAFT,
    ERROR,
    FULL,
    HELLO,
    OPEN,
    PLAIN_DRAFT,
    PLAIN_VERDICT,
    PROBE,
    PROBED,
    READY,
    SESSION,
    VERDICT,
    WELCOME,
)


def name_of(message: wire.Message) -> str:
    return type(message).__name__.upper()


def with_field(message: wire.Message, field: str, value: Any) -> bytes:
    """The bytes of `message` with one field of the array replaced by anything that msgpack can write."""
    row = list(fields_of(message))
    row[1 + list(LAYOUTS[row[0]].fields).index(field)] = value
    return msgpack.packb(row)


def refusal(payload: bytes, internal: bool = True) -> WireError:
    with pytest.raises(WireError) as caught:
        decode(payload, internal=internal)
    return caught.value


BAD: list[tuple[wire.Message, str, Any, str]] = [
    # message, field of the array, its bad value, what the error must say
    (PLAIN_DRAFT, "session", -1, "DRAFT.session: got -1, wanted an integer from 0 to 18446744073709551615"),
    (PLAIN_DRAFT, "session", True, "DRAFT.session: got bool True"),
    (PLAIN_DRAFT, "session", b"8 bytes!", "DRAFT.session: got 8 bytes"),
    (PLAIN_DRAFT, "opening", 2**32, "DRAFT.opening: got 4294967296, wanted an integer from 0 to 4294967295"),
    (PLAIN_DRAFT, "opening", True, "DRAFT.opening: got bool True"),
    (PLAIN_DRAFT, "epoch", -1, "DRAFT.epoch: got -1"),
    (PLAIN_DRAFT, "epoch", False, "DRAFT.epoch: got bool False"),
    (PLAIN_DRAFT, "epoch", 2**32, "DRAFT.epoch: got 4294967296"),
    (PLAIN_DRAFT, "pos", "1500", "DRAFT.pos: got a text of 4 characters"),
    (PLAIN_DRAFT, "pos", 1500.0, "DRAFT.pos: got float 1500.0"),
    (PLAIN_DRAFT, "pos", True, "DRAFT.pos: got bool True"),
    (PLAIN_DRAFT, "pos", -1, "DRAFT.pos: got -1"),
    (PLAIN_DRAFT, "pos", 2**32, "DRAFT.pos: got 4294967296"),
    (PLAIN_DRAFT, "ids", b"abc", "DRAFT.ids: got 3 bytes, wanted packed ids of 4 bytes each"),
    (PLAIN_DRAFT, "ids", (5, 6), "DRAFT.ids: got an array of 2"),
    (PLAIN_DRAFT, "ids", "abcd", "DRAFT.ids: got a text of 4 characters"),
    (PLAIN_DRAFT, "ids", None, "DRAFT.ids: got nothing"),
    (PLAIN_DRAFT, "ids", struct.pack("<2I", 1, 2**31), "DRAFT.ids: got id 2147483648, wanted ids from 0 to 2147483647"),
    (PLAIN_DRAFT, "ids", struct.pack("<i", -1), "DRAFT.ids: got id 4294967295"),
    (PLAIN_DRAFT, "ids", bytes(4 * 4097), "DRAFT.ids: got 4097 ids, wanted at most 4096 ids"),
    (PLAIN_DRAFT, "lag", True, "DRAFT.lag: got bool True"),
    (PLAIN_DRAFT, "lag", 0.0, "DRAFT.lag: got float 0.0"),
    (PLAIN_DRAFT, "lag", 1501, "DRAFT.known: got -1"),
    (PLAIN_DRAFT, "lag", 1500 - 2**32, "DRAFT.known: got 4294967296"),
    (PLAIN_DRAFT, "lag", 2**32, "DRAFT.lag: got 4294967296"),
    (PLAIN_DRAFT, "flags", 4, "DRAFT.flags: got 4, wanted an integer from 0 to 3"),
    (PLAIN_DRAFT, "flags", -1, "DRAFT.flags: got -1"),
    (PLAIN_DRAFT, "flags", True, "DRAFT.flags: got bool True"),
    (DRAFT, "p_draft", struct.pack("<2e", 0.5, math.nan), "DRAFT.p_draft: got float nan, wanted probabilities"),
    (DRAFT, "p_draft", struct.pack("<2e", math.inf, 0.5), "DRAFT.p_draft: got float inf"),
    (DRAFT, "p_draft", struct.pack("<2e", -math.inf, 0.5), "DRAFT.p_draft: got float -inf"),
    (DRAFT, "p_draft", struct.pack("<2e", 0.5, 7.0), "DRAFT.p_draft: got float 7.0"),
    (DRAFT, "p_draft", struct.pack("<2e", 0.5, -0.25), "DRAFT.p_draft: got float -0.25"),
    (DRAFT, "p_draft", struct.pack("<2e", 0.5, -0.0), "DRAFT.p_draft: got float -0.0"),
    (DRAFT, "p_draft", struct.pack("<e", 0.5), "DRAFT.p_draft: got 1 probabilities, wanted as many as ids, 2"),
    (DRAFT, "p_draft", b"abc", "DRAFT.p_draft: got 3 bytes"),
    (DRAFT, "p_draft", (0.5, 0.5), "DRAFT.p_draft: got an array of 2"),
    (DRAFT, "p_draft", bytes(2 * 4097), "DRAFT.p_draft: got 4097 probabilities, wanted at most 4096"),
    (VERDICT, "session", -1, "VERDICT.session: got -1"),
    (VERDICT, "epoch", True, "VERDICT.epoch: got bool True"),
    (VERDICT, "ids", struct.pack("<I", 2**31), "VERDICT.ids: got id 2147483648"),
    (VERDICT, "ids", b"abc", "VERDICT.ids: got 3 bytes"),
    (VERDICT, "ids", bytes(4 * 4097), "VERDICT.ids: got 4097 ids"),
    (VERDICT, "flags", 4, "VERDICT.flags: got 4"),
    (VERDICT, "passes", -1, "VERDICT.passes: got -1"),
    (VERDICT, "verified", True, "VERDICT.verified: got bool True"),
    (VERDICT, "stale", 2**32, "VERDICT.stale: got 4294967296"),
    (VERDICT, "stale", None, "VERDICT.stale: got nothing"),
    (VERDICT, "busy_100us", 0.5, "VERDICT.busy_100us: got float 0.5"),
    (PLAIN_VERDICT, "session", True, "VERDICT.session: got bool True"),
    (PLAIN_VERDICT, "opening", -1, "VERDICT.opening: got -1"),
    (PLAIN_VERDICT, "opening", True, "VERDICT.opening: got bool True"),
    (PLAIN_VERDICT, "epoch", True, "VERDICT.epoch: got bool True"),
    (PLAIN_VERDICT, "pos", True, "VERDICT.pos: got bool True"),
    (PLAIN_VERDICT, "pos", 2**32, "VERDICT.pos: got 4294967296"),
    (PLAIN_VERDICT, "flags", True, "VERDICT.flags: got bool True"),
    (PLAIN_VERDICT, "flags", -1, "VERDICT.flags: got -1"),
    (HELLO, "major", 2**16, "HELLO.major: got 65536"),
    (HELLO, "minor", -1, "HELLO.minor: got -1, wanted an integer from 0 to 65535"),
    (HELLO, "vocabulary_hash", b"short", "HELLO.vocabulary_hash: got 5 bytes, wanted 8 bytes"),
    (HELLO, "vocabulary_hash", "12345678", "HELLO.vocabulary_hash: got a text of 8 characters"),
    (HELLO, "block", 4096, "HELLO.block: got 4096, wanted an integer from 0 to 4095"),
    (OPEN, "base", -1, "OPEN.base: got -1"),
    (OPEN, "digest", b"", "OPEN.digest: got 0 bytes, wanted 8 bytes"),
    (OPEN, "ids", bytes(4 * (2**18 + 1)), "OPEN.ids: got 262145 ids, wanted at most 262144 ids"),
    (OPEN, "stop_ids", bytes(4 * 65), "OPEN.stop_ids: got 65 ids, wanted at most 64 ids"),
    (OPEN, "stop_ids", struct.pack("<i", -2), "OPEN.stop_ids: got id 4294967294"),
    (OPEN, "seed", -1, "OPEN.seed: got -1, wanted an integer from 0 to 18446744073709551615"),
    (OPEN, "mode", 3, "OPEN.mode: got 3, wanted a number of Mode: 0, 1, 2"),
    (OPEN, "mode", True, "OPEN.mode: got bool True"),
    (OPEN, "mode", 1.0, "OPEN.mode: got float 1.0"),
    (OPEN, "model_fingerprint", bytes(9), "OPEN.model_fingerprint: got 9 bytes"),
    (WELCOME, "model", "x" * 257, "WELCOME.model: got 257 bytes, wanted a text of at most 256 bytes"),
    (WELCOME, "model", "ä" * 129, "WELCOME.model: got 258 bytes"),
    (WELCOME, "model", b"m", "WELCOME.model: got 1 bytes"),
    (
        WELCOME,
        "block_hashes",
        b"12345",
        "WELCOME.block_hashes: got 5 bytes, wanted at most 16384 bytes, a multiple of 4",
    ),
    (WELCOME, "block_hashes", bytes(16388), "WELCOME.block_hashes: got 16388 bytes"),
    (WELCOME, "pieces", b"\x05\x00abc", "WELCOME.pieces: got the bytes end within a piece"),
    (WELCOME, "pieces", b"\x05", "WELCOME.pieces: got the bytes end within the length of a piece"),
    (WELCOME, "pieces", bytes(2 * 257), "WELCOME.pieces: got more than 256 pieces"),
    (WELCOME, "pieces", bytes(2**18 + 1), "WELCOME.pieces: got 262145 bytes"),
    (PROBE, "payload", bytes(2**18 + 1), "PROBE.payload: got 262145 bytes, wanted at most 262144 bytes"),
    (PROBE, "payload", "xy", "PROBE.payload: got a text of 2 characters"),
    (PROBE, "reply_bytes", 2**18 + 1, "PROBE.reply_bytes: got 262145"),
    (PROBED, "status", 4, "PROBED.status: got 4, wanted a number of ProbeStatus: 0, 1, 2, 3"),
    (ERROR, "code", 0, "ERROR.code: got 0, wanted a number of ErrorCode: 1, 2"),
    (ERROR, "text", "x" * 1025, "ERROR.text: got 1025 bytes, wanted a text of at most 1024 bytes"),
    (ERROR, "retry_ms", -500, "ERROR.retry_ms: got -500"),
    (READY, "pieces", "ab", "READY.pieces: got a text of 2 characters"),
    (READY, "end_ids", bytes(4 * 65), "READY.end_ids: got 65 ids"),
]


@pytest.mark.parametrize(("message", "field", "value", "says"), BAD, ids=[says.split(",")[0][:60] for *_, says in BAD])
def test_a_bad_field_is_refused_by_name(message: wire.Message, field: str, value: Any, says: str) -> None:
    error = refusal(with_field(message, field, value))
    assert str(error).startswith(says)
    assert (error.kind, error.code) == (name_of(message), wire.ErrorCode.MALFORMED)
    assert f"{error.kind}.{error.field}: got {error.got}, wanted {error.wanted}" == str(error)
    if field not in ("session", "opening"):
        assert (error.session, error.opening) == message[:2]


ALIEN: list[Any] = [
    None,
    True,
    False,
    -1,
    -(2**63),
    2**64 - 1,
    1.5,
    math.nan,
    "text",
    b"bytes",
    b"",
    (),
    (1, 2),
    ((),) * 9,
    {},
]
FITTING: dict[type, Callable[[Any], bool]] = {  # which alien values a field may well hold
    f.Fixed: lambda v: False,
    f.Choice: lambda v: False,
    f.Text: lambda v: type(v) is str,
    f.Blob: lambda v: type(v) is bytes,
    f.Pieces: lambda v: v == b"",
    f.Ids: lambda v: v == b"",
    f.Optional: lambda v: v is None or v == b"" or v == 2**64 - 1,
}


@pytest.mark.parametrize("message", FULL, ids=name_of)
def test_every_field_of_every_kind_refuses_what_is_alien_to_it(message: wire.Message) -> None:
    layout = LAYOUTS[fields_of(message)[0]]
    for field, codec in layout.fields.items():
        if list(layout.fields).index(field) + 1 >= len(fields_of(message)):
            continue
        for value in ALIEN:
            fits = FITTING.get(type(codec), lambda v, c=codec: type(v) is int and c.least <= v <= c.most)
            if fits(value):
                continue
            error = refusal(with_field(message, field, value))
            assert error.kind == name_of(message)
            named = {"lag": "known", "flags": "law", "law": "law"}.get(field, field)
            assert error.field in (field, named)


@pytest.mark.parametrize("message", FULL, ids=name_of)
def test_a_missing_field_is_refused_by_name(message: wire.Message) -> None:
    row = fields_of(message)
    layout = LAYOUTS[row[0]]
    for count in range(layout.required):
        error = refusal(msgpack.packb(row[: 1 + count]))
        assert (error.kind, error.field, error.got) == (name_of(message), list(layout.fields)[count], "nothing")


@pytest.mark.parametrize("count", [8, 9, 10])
def test_counters_come_together_or_not_at_all(count: int) -> None:
    error = refusal(msgpack.packb(fields_of(COUNTED_VERDICT)[:count]))
    assert str(error).startswith(f"VERDICT.{Counters._fields[count - 7]}: got nothing")
    assert decode(msgpack.packb((*fields_of(PLAIN_VERDICT), None, None, None, None))) == PLAIN_VERDICT


@pytest.mark.parametrize("kind", [0, 13, 63, 67, -1, 2**64 - 1, True, None, 5.0, "DRAFT", b"\x05", ()])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    error = refusal(msgpack.packb((kind, SESSION, 3, 1, 2)))
    assert (error.kind, error.field, error.session, error.opening) == ("message", "kind", SESSION, 3)
    assert "wanted a kind of version 1.1" in str(error)


@pytest.mark.parametrize("kind", [5.0, "5", b"\x05", {}, (5,)])
def test_a_kind_that_is_no_integer_is_refused_however_right_the_rest(kind: Any) -> None:
    assert refusal(msgpack.packb((kind, *fields_of(PLAIN_DRAFT)[1:]))).field == "kind"


@pytest.mark.parametrize("message", [READY, wire.Beat(0, 0, 2, 3), wire.Gone(SESSION, 1)], ids=name_of)
def test_what_only_a_worker_says_is_refused_from_outside(message: wire.Message) -> None:
    error = refusal(encode(message), internal=False)
    assert (error.kind, error.field) == (name_of(message), "kind")
    assert decode(encode(message), internal=True) == message


def test_a_limit_is_told_in_full() -> None:
    assert refusal(with_field(PROBE, "payload", bytes(2**18 + 1))).wanted == "at most 262144 bytes"


def test_the_address_of_a_refused_message_is_kept_only_if_it_can_be_one() -> None:
    for session, opening, read in [
        (-1, 3, (0, 3)),
        (5, 2**32, (5, 0)),
        (True, "x", (0, 0)),
        (2**64 - 1, 0, (2**64 - 1, 0)),
    ]:
        error = refusal(msgpack.packb((99, session, opening)))
        assert (error.session, error.opening) == read
    assert refusal(msgpack.packb((99,))).session == 0


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "message.bytes: got"),
    "cut": (encode(DRAFT)[:-1], "message.bytes: got"),
    "trailing": (encode(DRAFT) + b"\x00", "message.bytes: got"),
    "two messages": (encode(DRAFT) * 2, "message.bytes: got"),
    "map": (msgpack.packb({0: 5}), "message.bytes: got"),
    "empty map": (b"\x80", "message.bytes: got a value of type dict, wanted an array"),
    "map in a field": (msgpack.packb((5, {"a": 1})), "message.bytes: got"),
    "empty array": (b"\x90", "message.bytes: got an array of 0"),
    "int": (b"\x05", "message.bytes: got 5, wanted an array"),
    "text": (msgpack.packb("text"), "message.bytes: got a text of 4 characters"),
    "too many fields": (msgpack.packb((5, *range(64))), "message.bytes: got"),
    "array of 4 billion": (b"\xdd\xff\xff\xff\xff", "message.bytes: got"),
    "bin of 4 billion": (b"\x98\x05\xc6\xff\xff\xff\xff", "message.bytes: got"),
    "str of 4 billion": (b"\x98\x05\xdb\xff\xff\xff\xff", "message.bytes: got"),
    "map of 4 billion": (b"\x98\x05\xdf\xff\xff\xff\xff", "message.bytes: got"),
    "ext of 4 billion": (b"\x98\x05\xc9\xff\xff\xff\xff\x01", "message.bytes: got"),
    "ext": (msgpack.packb((5, msgpack.ExtType(5, b"data"))), "message.bytes: got"),
    "timestamp": (msgpack.packb((5, msgpack.Timestamp(1, 0), 1, 1, 1, b"", 0, 0)), "message.bytes: got"),
    "ext of no bytes": (
        b"\x98\x05\xc7\x00\x07\x01\x01\x01\xc4\x00\x00\x00",
        "DRAFT.session: got a value of type msgpack.ext.ExtType",
    ),
    "never used byte": (b"\xc1", "message.bytes: got"),
    "deep": (b"\x91" * 100_000 + b"\xc0", "message.bytes: got"),
    "deep in a field": (b"\x98\x05" + b"\x91" * 600 + b"\x01" * 7, "DRAFT.session: got an array of 1"),
    "not UTF-8": (b"\x96\x0c\x01\x01\x02\xa2\xff\xfe\x01", "ERROR.text: got a text with half a surrogate pair"),
    "surrogate": (b"\x96\x0c\x01\x01\x02\xa3\xed\xa0\x80\x01", "ERROR.text: got a text with half a surrogate pair"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "message.bytes: got"),
    "JSON": (b'{"kind": 5}', "message.bytes: got"),
    "pickle": (pickle.dumps((5, SESSION)), "message.bytes: got"),
}


@pytest.mark.parametrize(("payload", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_bytes_that_are_no_message_are_refused(payload: bytes, says: str) -> None:
    assert str(refusal(payload)).startswith(says)
    assert "\n" not in str(refusal(payload))


def test_a_message_over_the_limit_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("decoded"))
    error = refusal(bytes(wire.MAX_MESSAGE_BYTES + 1), internal=False)
    assert str(error) == "message.length: got 1064961 bytes, wanted at most 1064960 bytes"
    assert refusal(bytes(wire.MAX_INTERNAL_BYTES + 1)).field == "length"
    monkeypatch.undo()
    assert refusal(bytes(wire.MAX_MESSAGE_BYTES), internal=False).field == "bytes"
    assert refusal(bytes(wire.MAX_INTERNAL_BYTES)).field == "bytes"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "written"))
    for payload in (bomb, msgpack.packb((5, SESSION, 1, 0, 0, bomb, 0, 0)), with_field(OPEN, "sampling", bomb)):
        refusal(payload)
    assert not (tmp_path / "written").exists()
    pickle.loads(bomb)
    assert (tmp_path / "written").exists()  # the bomb is one
    root = Path(pipesd.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    words = re.compile(r"\bimport (c?pickle|marshal|shelve|dill)|recv_pyobj|send_pyobj|(?<![.\w])(eval|exec)\(")
    found = [(path.name, match[0]) for path, text in sources.items() for match in words.finditer(text)]
    assert found == [("plugin.py", "exec(")]  # of the file that its user names on the command line
