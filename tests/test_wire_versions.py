"""Version 1.1 beside 1.0: what one says the other understands, and greedy generations have the bytes of 1.0."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given

from pipesd.protocol import wire
from pipesd.protocol.layouts import LAYOUTS
from pipesd.protocol.wire import Draft, Kind, Open, Verdict, decode, encode
from tests import wire_samples as samples
from tests.wire_samples import OF_1_0, OF_1_1

FIELDS_OF_1_0 = {
    Kind.HELLO: 9, Kind.WELCOME: 16, Kind.OPEN: 14, Kind.OPENED: 7, Kind.DRAFT: 9, Kind.VERDICT: 11, Kind.RESEND: 5,
    Kind.CANCEL: 3, Kind.CLOSE: 3, Kind.PROBE: 6, Kind.PROBED: 7, Kind.ERROR: 6, Kind.READY: 11, Kind.BEAT: 5,
    Kind.GONE: 3,
}  # fmt: skip
ADDED = {Kind.DRAFT: ["tried"], Kind.VERDICT: ["law", "first", "logprobs"]}


def as_1_0_reads(payload: bytes) -> bytes:
    """The fields that version 1.0 looks at, packed alone."""
    fields = msgpack.unpackb(payload, use_list=False)
    return msgpack.packb(fields[: FIELDS_OF_1_0[fields[0]]])


def test_a_minor_version_only_adds_fields_behind_the_last() -> None:
    assert (wire.MAJOR, wire.MINOR) == (1, 1)
    for kind, count in FIELDS_OF_1_0.items():
        assert list(LAYOUTS[kind].fields)[count - 1 :] == ADDED.get(kind, []), kind.name
    assert FIELDS_OF_1_0.keys() == LAYOUTS.keys()


@pytest.mark.parametrize(("message", "golden"), OF_1_0, ids=lambda x: type(x).__name__ if isinstance(x, tuple) else "")
def test_what_1_0_says_is_understood_and_what_it_could_say_has_its_bytes(message: wire.Message, golden: str) -> None:
    assert decode(bytes.fromhex(golden), internal=True) == message
    assert encode(message) == as_1_0_reads(encode(message)) == bytes.fromhex(golden)
    for field in ("sampling", "tried", "refused", "logprobs"):
        assert getattr(message, field, None) is None


@given(samples.drafts() | samples.verdicts)
def test_1_0_reads_all_but_the_sampling_of_a_draft_and_a_verdict(message: Draft | Verdict) -> None:
    if isinstance(message, Verdict) and message.rejected:
        message = message._replace(rejected=False, refused=None)
    without = {"tried": None} if isinstance(message, Draft) else {"logprobs": None}
    assert decode(as_1_0_reads(encode(message))) == message._replace(**without)


def test_what_only_1_1_can_say_is_more_than_1_0_reads() -> None:
    for message, golden in OF_1_1:
        payload = bytes.fromhex(golden)
        assert isinstance(message, Open) or as_1_0_reads(payload) != payload


def test_the_edge_can_tell_a_cloud_that_cannot_sample() -> None:
    assert wire.FEATURES & wire.SAMPLING == wire.SAMPLING == 1
    of_1_0 = next(message for message, _ in OF_1_0 if isinstance(message, wire.Welcome))
    assert of_1_0.minor == 0 and not decode(encode(of_1_0)).features & wire.SAMPLING
    later = of_1_0._replace(minor=7, features=wire.SAMPLING | 1 << 31)
    assert decode(encode(later)).features & wire.SAMPLING
    assert wire.check_version(1, 0) is None and wire.check_version(1, 7) is None
