"""Anything at all into the decoder: a message comes out, or a WireError."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.protocol import messages
from pipesd.protocol import wire as w
from pipesd.protocol.layouts import LAYOUTS, fields_of
from pipesd.protocol.wire import WireError, decode, encode
from tests.wire_samples import FULL, GOLDEN, OPEN, VERDICT

_anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9), inner, max_size=2),
    max_leaves=8,
)


def message_or_refusal(payload: bytes) -> None:
    for internal in (False, True):
        try:
            message = decode(payload, internal=internal)
        except WireError as error:
            assert len(str(error)) < 300 and str(error).isprintable()
        else:
            assert decode(encode(message), internal=True) == message


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_refusal(payload: bytes) -> None:
    message_or_refusal(payload)


@settings(max_examples=500)
@given(st.sampled_from([*LAYOUTS, 0, 13, True]), st.lists(_anything, max_size=16))
def test_random_arrays_give_a_message_or_a_refusal(kind: int, fields: list[Any]) -> None:
    message_or_refusal(msgpack.packb([kind, *fields]))


@settings(max_examples=1000)
@given(st.sampled_from(GOLDEN), st.data())
def test_a_damaged_message_gives_a_message_or_a_refusal(sample: tuple[w.Message, str], data: st.DataObject) -> None:
    payload = bytearray.fromhex(sample[1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "insert", "flip"]))
        if how == "set":
            payload[at] = data.draw(st.integers(0, 255))
        elif how == "flip":
            payload[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "insert":
            payload[at:at] = data.draw(st.binary(max_size=4))
        elif at:
            del payload[at:]
    message_or_refusal(bytes(payload))


@settings(max_examples=500)
@given(st.sampled_from(FULL), st.data())
def test_one_field_replaced_gives_a_message_or_names_that_field(message: w.Message, data: st.DataObject) -> None:
    row = list(fields_of(message))
    names = list(LAYOUTS[row[0]].fields)
    at = data.draw(st.integers(0, len(row) - 2))
    row[1 + at] = data.draw(_anything)
    try:
        decode(msgpack.packb(row), internal=True)
    except WireError as error:
        beside = {w.Draft: {"known", "p_draft"}, w.Verdict: {"law", "first", "logprobs", *w.Counters._fields}}
        allowed = {names[at]} | beside.get(type(message), set())
        assert error.field in allowed | ({"bytes"} if contains_map(row[1 + at]) else set())


@settings(max_examples=500)
@given(st.sampled_from(["law", "logprobs", "sampling"]), st.data())
def test_random_bytes_as_a_field_of_sampling_give_a_message_or_a_refusal(field: str, data: st.DataObject) -> None:
    row = list(fields_of(OPEN if field == "sampling" else VERDICT))
    names = list(LAYOUTS[row[0]].fields)
    at = 1 + names.index(field)
    payload = bytearray(data.draw(st.sampled_from([row[at], row[at] + row[at][-8:], b"\0"])))
    for _ in range(data.draw(st.integers(1, 6))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.sampled_from([0, 1, 63, 64, 127, 128, 255]))
    row[at] = bytes(payload)
    message_or_refusal(msgpack.packb(row))


def contains_map(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(contains_map, value)))


def test_messages_module_has_no_unused_limit() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(messages.__file__).parent.glob("*.py"))
    for name in vars(messages):
        if name.startswith("MAX_"):
            assert len(re.findall(rf"\b{name}\b", text)) > 1, name
