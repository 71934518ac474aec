"""What is wrong in a field of sampling is refused by its name."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import msgpack
import pytest
from test_wire_refusals import name_of, refusal, with_field

from pipesd.protocol import wire
from pipesd.protocol.layouts import fields_of
from tests.wire_samples import COUNTED_VERDICT, DRAFT, OPEN, PLAIN_VERDICT, TESTED_DRAFT, VERDICT


def law(*pairs: tuple[int, float]) -> bytes:
    return b"".join(struct.pack("<If", *pair) for pair in pairs)


def options(bias: Iterable[tuple[int, float]] = (), **other: Any) -> bytes:
    """The bytes of options, temperature 1 and nothing else unless said otherwise."""
    values = {
        "method": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0,
        "presence": 0.0, "frequency": 0.0, "top_mass": 0, "logprobs": 255,
    } | other  # fmt: skip
    return struct.pack("<BdIdddddHB", *values.values()) + law(*bias)


BAD: list[tuple[wire.Message, str, Any, str]] = [
    # message, field of the array, its bad value, what the error must say
    (TESTED_DRAFT, "p_draft", struct.pack("<2e", 0.5, math.nan), "DRAFT.p_draft: got float nan, wanted probabilities"),
    (TESTED_DRAFT, "p_draft", struct.pack("<2H", 0x3C01, 0), "DRAFT.p_draft: got float 1.0009765625"),
    (TESTED_DRAFT, "p_draft", struct.pack("<2e", 1.0, -0.0), "DRAFT.p_draft: got float -0.0"),
    (TESTED_DRAFT, "p_draft", struct.pack("<2e", -math.inf, 1.0), "DRAFT.p_draft: got float -inf"),
    (TESTED_DRAFT, "p_draft", struct.pack("<e", 0.5), "DRAFT.p_draft: got 1 probabilities, wanted as many as ids, 2"),
    (TESTED_DRAFT, "p_draft", b"abc", "DRAFT.p_draft: got 3 bytes"),
    (TESTED_DRAFT, "p_draft", "abcd", "DRAFT.p_draft: got a text of 4 characters"),
    (TESTED_DRAFT, "session", True, "DRAFT.session: got bool True"),
    (TESTED_DRAFT, "flags", 4, "DRAFT.flags: got 4"),
    (DRAFT, "tried", -1, "DRAFT.tried: got -1, wanted an integer from 0 to 1048576"),
    (DRAFT, "tried", 2**20 + 1, "DRAFT.tried: got 1048577"),
    (DRAFT, "tried", True, "DRAFT.tried: got bool True"),
    (DRAFT, "tried", b"", "DRAFT.tried: got 0 bytes"),
    (VERDICT, "flags", 0, "VERDICT.law: got one, wanted none without `rejected`"),
    (PLAIN_VERDICT, "flags", 2, "VERDICT.law: got nothing, wanted a distribution with `rejected`"),
    (PLAIN_VERDICT, "flags", 3, "VERDICT.law: got nothing"),
    (COUNTED_VERDICT, "flags", 2, "VERDICT.law: got nothing"),
    (VERDICT, "law", None, "VERDICT.law: got nothing"),
    (VERDICT, "law", b"", "VERDICT.law: got 0 pairs, wanted 1 to 1024 pairs"),
    (VERDICT, "law", law((1, 0.5), (2, 0.5))[:-1], "VERDICT.law: got 15 bytes, wanted packed pairs of 8 bytes each"),
    (VERDICT, "law", law((1, 0.5)) * 1025, "VERDICT.law: got 1025 pairs"),
    (VERDICT, "law", law((2**31, 0.5)), "VERDICT.law: got id 2147483648, wanted ids from 0 to 2147483647"),
    (VERDICT, "law", law((2**32 - 1, 0.5)), "VERDICT.law: got id 4294967295"),
    (VERDICT, "law", law((1, math.nan)), "VERDICT.law: got float nan, wanted probabilities from 0 to 1"),
    (VERDICT, "law", law((1, 1.0), (2, -math.nan)), "VERDICT.law: got float nan"),
    (VERDICT, "law", law((1, math.inf)), "VERDICT.law: got float inf"),
    (VERDICT, "law", law((1, -math.inf)), "VERDICT.law: got float -inf"),
    (VERDICT, "law", law((1, -0.25)), "VERDICT.law: got float -0.25"),
    (VERDICT, "law", law((1, -0.0), (2, 1.0)), "VERDICT.law: got float -0.0"),
    (VERDICT, "law", law((1, 1.0000001)), "VERDICT.law: got float 1.00000011920928"),
    (VERDICT, "law", law((1, 0.0), (2, 0.0)), "VERDICT.law: got probabilities that are all 0, wanted one above 0"),
    (VERDICT, "law", ((1, 0.5),), "VERDICT.law: got an array of 1"),
    (VERDICT, "first", -1, "VERDICT.first: got -1"),
    (VERDICT, "first", True, "VERDICT.first: got bool True"),
    (VERDICT, "first", 2**20 + 1, "VERDICT.first: got 1048577, wanted an integer from 0 to 1048576"),
    (VERDICT, "logprobs", b"", "VERDICT.logprobs: got 0 bytes, wanted a count byte and log-probabilities"),
    (VERDICT, "logprobs", b"\x00", "VERDICT.logprobs: got those of 0 ids, wanted as many as ids, 2"),
    (VERDICT, "logprobs", b"\x15" + bytes(2 * 172), "VERDICT.logprobs: got 21 ids beside each, wanted at most 20"),
    (VERDICT, "logprobs", b"\xff", "VERDICT.logprobs: got 255 ids beside each"),
    (VERDICT, "logprobs", b"\x01" + bytes(12), "VERDICT.logprobs: got those of 1 ids"),
    (VERDICT, "logprobs", b"\x01" + bytes(25), "VERDICT.logprobs: got 26 bytes, wanted 1 byte and 12 for each id"),
    (VERDICT, "logprobs", bytes(1 + 4 * 4097), "VERDICT.logprobs: got log-probabilities of 4097 ids"),
    (VERDICT, "logprobs", b"\x00" + struct.pack("<2f", -1.0, math.nan), "VERDICT.logprobs: got float nan"),
    (VERDICT, "logprobs", b"\x00" + struct.pack("<2f", 1e-9, -1.0), "VERDICT.logprobs: got float 9.99"),
    (VERDICT, "logprobs", b"\x00" + struct.pack("<2f", math.inf, -1.0), "VERDICT.logprobs: got float inf"),
    (VERDICT, "logprobs", b"\x01" + struct.pack("<fIf", -1, 2, 0.5) * 2, "VERDICT.logprobs: got float 0.5"),
    (VERDICT, "logprobs", b"\x01" + struct.pack("<fIf", -1, 2**31, -1) * 2, "VERDICT.logprobs: got id 2147483648"),
    (OPEN, "sampling", 0, "OPEN.sampling: got 0, wanted 56 bytes and 8 for each of at most 1024 biases"),
    (OPEN, "sampling", False, "OPEN.sampling: got bool False, wanted 56 bytes"),
    (OPEN, "sampling", options()[:55], "OPEN.sampling: got 55 bytes"),
    (OPEN, "sampling", options() + bytes(7), "OPEN.sampling: got 63 bytes"),
    (OPEN, "sampling", options(bias=[(i, 0.5) for i in range(1025)]), "OPEN.sampling: got 8256 bytes"),
    (OPEN, "sampling", options(method=3), "OPEN.sampling: got method 3, wanted a method: 0, 1, 2"),
    (OPEN, "sampling", options(bias=[(2**31, 0.5)]), "OPEN.sampling: got id 2147483648"),
]


@pytest.mark.parametrize(("message", "field", "value", "says"), BAD, ids=[says.split(",")[0][:60] for *_, says in BAD])
def test_a_bad_field_of_sampling_is_refused_by_name(message: wire.Message, field: str, value: Any, says: str) -> None:
    error = refusal(with_field(message, field, value))
    assert str(error).startswith(says)
    assert (error.kind, error.code) == (name_of(message), wire.ErrorCode.MALFORMED)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": -1.0}, {"temperature": 101.0},
    {"top_k": 2**32 - 1}, {"top_p": math.nan}, {"top_p": 1.1}, {"top_p": -0.5}, {"min_p": math.nan}, {"min_p": 1.5},
    {"repetition": math.nan}, {"repetition": 0.0}, {"repetition": -1.0}, {"repetition": math.inf},
    {"presence": math.nan}, {"presence": math.inf}, {"frequency": math.nan}, {"frequency": -math.inf},
    {"top_mass": 5}, {"method": 2}, {"method": 2, "top_mass": 1025}, {"logprobs": 21}, {"logprobs": 254},
    {"bias": [(1, math.nan)]}, {"bias": [(1, math.inf)]}, {"bias": [(1, 0.5), (1, 0.5)]},
]  # fmt: skip


@pytest.mark.parametrize("values", IMPOSSIBLE, ids=str)
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    error = refusal(with_field(OPEN, "sampling", options(**values)))
    assert (error.kind, error.field, error.session, error.opening) == ("OPEN", "sampling", *OPEN[:2])
    assert error.got.startswith("impossible options: ")
    assert "\n" not in str(error)


def test_the_number_of_a_proposal_needs_a_proposal() -> None:
    row = (*fields_of(PLAIN_VERDICT), None, None, None, None, None, 16)
    assert str(refusal(msgpack.packb(row))) == "VERDICT.first: got 16, wanted nothing without a distribution"
