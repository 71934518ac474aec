"""What a caller may put into a message: integers of any kind are converted, all else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipesd.core import Logprobs
from pipesd.policy.accept import ToldLaw
from pipesd.protocol import wire
from pipesd.protocol.wire import Counters, Draft, Verdict, WireError, decode, encode
from tests.wire_samples import (
    DRAFT,
    ERROR,
    HASH,
    HELLO,
    OPEN,
    PLAIN_DRAFT,
    PLAIN_VERDICT,
    PROBE,
    TESTED_DRAFT,
    VERDICT,
    WELCOME,
)


@pytest.mark.parametrize("make", [np.int64, np.uint32, np.int32, np.array], ids=lambda make: make.__name__)
def test_numpy_integers_are_converted(make: Callable[[int], Any]) -> None:
    draft = Draft(make(7), make(1), make(2), make(1500), (make(5), make(6)), make(1490), nav=True)
    verdict = Verdict(make(7), make(1), make(2), make(9), (make(5),), counters=Counters(*map(make, (1, 2, 3, 4))))
    probed = wire.Probed(make(7), make(0), make(9), make(1), make(40))
    hello = wire.Hello(make(7), make(0), make(1), make(0), make(0), make(5), HASH, make(3))
    for message in (draft, verdict, probed, hello):
        assert decode(encode(message)) == message
        assert {type(value) for value in decode(encode(message))} <= {
            int,
            bool,
            tuple,
            bytes,
            Counters,
            type(None),
            wire.ProbeStatus,
        }


def test_arrays_and_lists_of_ids_are_converted() -> None:
    draft = TESTED_DRAFT
    for ids in (np.array([5, 6], np.int64), [5, 6], np.array([5, 6], np.uint32)):
        assert decode(encode(PLAIN_DRAFT._replace(ids=ids))) == PLAIN_DRAFT
    for p_draft in (np.array([0.5, 1.0], np.float32), [0.5, 1], (np.float64(0.5), np.float32(1.0))):
        decoded = decode(encode(draft._replace(p_draft=p_draft)))
        assert decoded == draft
        assert [type(p) for p in decoded.p_draft] == [float, float]
    zero = decode(encode(draft._replace(p_draft=(0.5, -0.0)))).p_draft[1]
    assert math.copysign(1.0, zero) == 1.0


def test_numpys_numbers_in_a_distribution_and_in_log_probabilities_are_converted() -> None:
    refused = ToldLaw(((np.int64(3), np.float32(0.5)), (np.uint32(9), np.float64(0.25))), np.int64(16))
    own, top = np.float32(-0.5), ((np.int32(3), np.float64(-1.0)),)
    logprobs = [Logprobs(own, top), VERDICT.logprobs[1]]
    assert decode(encode(VERDICT._replace(refused=refused, logprobs=logprobs))) == VERDICT
    few = ToldLaw(((3, 1e-46), (9, 1.0)))  # what a float32 cannot hold becomes 0
    assert decode(encode(VERDICT._replace(refused=few))).refused.pairs == ((3, 0.0), (9, 1.0))


def bad_pairs(pairs: Any, says: str) -> tuple[wire.Message, str, Any, str]:
    return (VERDICT, "refused", ToldLaw(pairs), f"VERDICT.law: got {says}")


def bad_logprobs(own: Any, top: Any, says: str) -> tuple[wire.Message, str, Any, str]:
    return (VERDICT, "logprobs", (Logprobs(own, top), VERDICT.logprobs[1]), f"VERDICT.logprobs: got {says}")


WRONG_VALUES: list[tuple[wire.Message, str, Any, str]] = [
    (PLAIN_DRAFT, field, value, f"DRAFT.{field}: got ")
    for field in ("session", "opening", "epoch", "pos", "known")
    for value in (
        -1,
        2**64,
        True,
        1.0,
        np.float32(1.0),
        np.float64(3.0),
        np.array(1.5),
        np.array([1, 2]),
        None,
        "1",
        -math.inf,
    )
]
WRONG_VALUES += [
    (PLAIN_VERDICT, field, value, f"VERDICT.{field}: got ")
    for field in ("session", "opening", "epoch", "pos")
    for value in (-1, 2**64, True, 1.0, np.float32(1.0), None)
]
WRONG_VALUES += [
    (PLAIN_DRAFT, "opening", 2**32, "DRAFT.opening: got 4294967296, wanted an integer from 0 to 4294967295"),
    (PLAIN_DRAFT, "epoch", 2**32, "DRAFT.epoch: got 4294967296"),
    (PLAIN_DRAFT, "pos", 2**32, "DRAFT.pos: got 4294967296"),
    (PLAIN_DRAFT, "known", 2**32, "DRAFT.known: got 4294967296"),
    (PLAIN_DRAFT, "session", 2**128, "DRAFT.session: got a huge integer"),
    (PLAIN_DRAFT, "session", 2**128 - 1, "DRAFT.session: got 340282366920938463463374607431768211455"),
    (PLAIN_DRAFT, "ids", (512, -1), "DRAFT.ids: got -1, wanted an integer from 0 to 2147483647"),
    (PLAIN_DRAFT, "ids", (2**31,), "DRAFT.ids: got id 2147483648"),
    (PLAIN_DRAFT, "ids", (2**32,), "DRAFT.ids: got 4294967296"),
    (PLAIN_DRAFT, "ids", (1.0,), "DRAFT.ids: got float 1.0"),
    (PLAIN_DRAFT, "ids", np.array([1.0, 2.0]), "DRAFT.ids: got float 1.0"),
    (PLAIN_DRAFT, "ids", ("a",), "DRAFT.ids: got a text of 1 characters"),
    (PLAIN_DRAFT, "ids", b"1234", "DRAFT.ids: got 4 bytes, wanted a sequence of ids"),
    (PLAIN_DRAFT, "ids", "1234", "DRAFT.ids: got a text of 4 characters, wanted a sequence of ids"),
    (PLAIN_DRAFT, "ids", None, "DRAFT.ids: got nothing"),
    (PLAIN_DRAFT, "ids", np.array(5), "DRAFT.ids: got a value of type numpy.ndarray"),
    (PLAIN_DRAFT, "ids", (0,) * 4097, "DRAFT.ids: got 4097 ids"),
    (PLAIN_DRAFT, "nav", 1, "DRAFT.nav: got 1, wanted True or False"),
    (PLAIN_DRAFT, "nav", 7, "DRAFT.nav: got 7"),
    (PLAIN_DRAFT, "nav", np.True_, "DRAFT.nav: got a value of type numpy.bool"),
    (PLAIN_DRAFT, "again", None, "DRAFT.again: got nothing"),
    (PLAIN_DRAFT, "again", "no", "DRAFT.again: got a text of 2 characters"),
    (DRAFT, "p_draft", (0.5, math.nan), "DRAFT.p_draft: got float nan"),
    (DRAFT, "p_draft", (0.5, -math.inf), "DRAFT.p_draft: got float -inf"),
    (DRAFT, "p_draft", (0.5, 1.0001), "DRAFT.p_draft: got float 1.0001"),
    (DRAFT, "p_draft", (0.5, np.float32(-1e-9)), "DRAFT.p_draft: got float -"),
    (DRAFT, "p_draft", (0.5, "0.5"), "DRAFT.p_draft: got a text among them"),
    (DRAFT, "p_draft", (0.5, None), "DRAFT.p_draft: got an array of 2"),
    (DRAFT, "p_draft", (0.5, 10**400), "DRAFT.p_draft: got an array of 2"),
    (DRAFT, "p_draft", (0.5, 0.1), "DRAFT.p_draft: got float 0.1, wanted probabilities that are rounded to float16s"),
    (TESTED_DRAFT, "p_draft", (0.5, 0.1), "DRAFT.p_draft: got float 0.1"),
    (TESTED_DRAFT, "p_draft", (0.5, 1e-9), "DRAFT.p_draft: got float 1e-09"),
    (TESTED_DRAFT, "p_draft", (0.5, 1.0001), "DRAFT.p_draft: got float 1.0001"),
    (TESTED_DRAFT, "p_draft", (0.5, -0.5), "DRAFT.p_draft: got float -0.5"),
    (TESTED_DRAFT, "p_draft", (math.nan, 0.5), "DRAFT.p_draft: got float nan"),
    (TESTED_DRAFT, "p_draft", (0.5, 1e6), "DRAFT.p_draft: got float 1000000.0"),
    (TESTED_DRAFT, "p_draft", (0.5, "0.5"), "DRAFT.p_draft: got a text among them"),
    (TESTED_DRAFT, "p_draft", (0.5,), "DRAFT.p_draft: got 1 probabilities, wanted as many as ids, 2"),
    (TESTED_DRAFT, "p_draft", (), "DRAFT.p_draft: got 0 probabilities, wanted as many as ids, 2"),
    (TESTED_DRAFT, "ids", (2**31, 6), "DRAFT.ids: got id 2147483648"),
    (DRAFT, "tried", -1, "DRAFT.tried: got -1"),
    (DRAFT, "tried", 2**20 + 1, "DRAFT.tried: got 1048577"),
    (DRAFT, "tried", True, "DRAFT.tried: got bool True"),
    (DRAFT, "tried", 1.0, "DRAFT.tried: got float 1.0"),
    (DRAFT, "p_draft", 0.5, "DRAFT.p_draft: got float 0.5"),
    (DRAFT, "p_draft", (0.5,), "DRAFT.p_draft: got 1 probabilities, wanted as many as ids, 2"),
    (DRAFT, "p_draft", (0.5,) * 4097, "DRAFT.p_draft: got 4097 probabilities, wanted at most 4096"),
    (VERDICT, "ids", (-1,), "VERDICT.ids: got -1"),
    (PLAIN_VERDICT, "ids", b"1234", "VERDICT.ids: got 4 bytes, wanted a sequence of ids"),
    (PLAIN_VERDICT, "ids", (2**31,), "VERDICT.ids: got id 2147483648"),
    (VERDICT, "ids", (2**31,), "VERDICT.ids: got id 2147483648"),
    (VERDICT, "ids", [0] * 4097, "VERDICT.ids: got 4097 ids"),
    (VERDICT, "more", 1, "VERDICT.more: got 1"),
    (VERDICT, "rejected", np.int64(1), "VERDICT.rejected: got "),
    (VERDICT, "rejected", False, "VERDICT.law: got one, wanted none without `rejected`"),
    (PLAIN_VERDICT, "rejected", True, "VERDICT.law: got nothing, wanted a distribution with `rejected`"),
    (PLAIN_VERDICT, "refused", VERDICT.refused, "VERDICT.law: got one, wanted none without `rejected`"),
    (VERDICT, "refused", None, "VERDICT.law: got nothing"),
    (VERDICT, "refused", (((3, 0.5),), None), "VERDICT.refused: got an array of 2, wanted ToldLaw or None"),
    (VERDICT, "refused", ToldLaw(((3, 0.5),), -1), "VERDICT.first: got -1"),
    (VERDICT, "refused", ToldLaw(((3, 0.5),), True), "VERDICT.first: got bool True"),
    (VERDICT, "refused", ToldLaw(((3, 0.5),), 2**20 + 1), "VERDICT.first: got 1048577"),
    bad_pairs((), "0 pairs, wanted 1 to 1024 pairs"),
    bad_pairs(((3, 0.5),) * 1025, "1025 pairs"),
    bad_pairs(((3, math.nan),), "float nan, wanted probabilities from 0 to 1"),
    bad_pairs(((3, 0.5), (4, 1.0001)), "float 1.0001000"),
    bad_pairs(((3, -1e-9), (4, 1.0)), "float -9.99"),
    bad_pairs(((3, math.inf),), "float inf"),
    bad_pairs(((3, 1e300),), "a number that no float32 can hold"),
    bad_pairs(((3, -0.0), (9, 1.0)), "float -0.0"),
    bad_pairs(((3, 0.0), (4, 0.0)), "probabilities that are all 0"),
    bad_pairs(((3, 1e-46),), "probabilities that are all 0"),
    bad_pairs(((-1, 0.5),), "id -1, wanted ids from 0 to 2147483647"),
    bad_pairs(((2**31, 0.5),), "id 2147483648"),
    bad_pairs(((True, 0.5),), "an array of 1, wanted pairs of an id and a number"),
    bad_pairs(((1.0, 0.5),), "an array of 1"),
    bad_pairs(((1, "0.5"),), "an array of 1"),
    bad_pairs(((1, 0.5, 2),), "an array of 1"),
    bad_pairs(((1, None),), "an array of 1"),
    bad_pairs((5,), "an array of 1"),
    bad_pairs(5, "5, wanted pairs"),
    bad_logprobs(0.1, ((3, -1.0),), "float 0.1, wanted log-probabilities of at most 0"),
    bad_logprobs(math.nan, ((3, -1.0),), "float nan"),
    bad_logprobs("0", ((3, -1.0),), "an array of 2, wanted pairs of an id and a number"),
    bad_logprobs(None, ((3, -1.0),), "an array of 2"),
    bad_logprobs(-1e300, ((3, -1.0),), "a number that no float32 can hold"),
    bad_logprobs(-1.0, ((3, 1.0),), "float 1.0"),
    bad_logprobs(-1.0, ((3, math.nan),), "float nan"),
    bad_logprobs(-1.0, ((2**31, -1.0),), "id 2147483648"),
    bad_logprobs(-1.0, ((3, -1.0), (4, -1.0)), "1 ids beside one and 2 beside another"),
    bad_logprobs(-1.0, ((3, -1.0),) * 21, "21 ids beside each, wanted at most 20"),
    bad_logprobs(-1.0, 5, "5, wanted pairs of an id and a number"),
    (VERDICT, "logprobs", VERDICT.logprobs[:1], "VERDICT.logprobs: got those of 1 ids, wanted as many as ids, 2"),
    (PLAIN_VERDICT, "logprobs", (), "VERDICT.logprobs: got those of 0 ids, wanted as many as ids, 2"),
    (VERDICT, "logprobs", VERDICT.logprobs * 2049, "VERDICT.logprobs: got log-probabilities of 4098 ids"),
    (VERDICT, "logprobs", ((-0.5, ()), (-0.5, ())), "VERDICT.logprobs: got an array of 2, wanted a sequence of Log"),
    (VERDICT, "logprobs", b"", "VERDICT.logprobs: got 0 bytes"),
    (VERDICT, "counters", (1, 2, 3, 4), "VERDICT.counters: got an array of 4, wanted Counters or None"),
    (VERDICT, "counters", Counters(1, -1, 3, 4), "VERDICT.verified: got -1"),
    (VERDICT, "counters", Counters(1, 2, 3, 2**32), "VERDICT.busy_100us: got 4294967296"),
    (VERDICT, "counters", Counters(True, 2, 3, 4), "VERDICT.passes: got bool True"),
    (VERDICT, "counters", Counters(1, 2, 3, 4.0), "VERDICT.busy_100us: got float 4.0"),
    (HELLO, "vocabulary_hash", bytearray(8), "HELLO.vocabulary_hash: got a value of type bytearray"),
    (HELLO, "block", -1, "HELLO.block: got -1"),
    (OPEN, "stop_ids", (1,) * 65, "OPEN.stop_ids: got 65 ids"),
    (OPEN, "ids", (1,) * (2**18 + 1), "OPEN.ids: got 262145 ids"),
    (OPEN, "seed", -1, "OPEN.seed: got -1"),
    (OPEN, "sampling", {}, "OPEN.sampling: got a value of type dict, wanted Sampling or None"),
    (OPEN, "sampling", "noise", "OPEN.sampling: got a text of 5 characters"),
    (OPEN, "mode", True, "OPEN.mode: got bool True"),
    (OPEN, "mode", 3, "OPEN.mode: got 3"),
    (OPEN, "mode", "eager", "OPEN.mode: got a text of 5 characters"),
    (WELCOME, "model", "\udcff", "WELCOME.model: got a text with half a surrogate pair"),
    (WELCOME, "model", "x" * 257, "WELCOME.model: got 257 bytes"),
    (WELCOME, "pieces", (b"x" * 65536,), "WELCOME.pieces: got a piece of 65536 bytes"),
    (WELCOME, "pieces", (b"",) * 257, "WELCOME.pieces: got 257 pieces"),
    (WELCOME, "pieces", [b"a"], "WELCOME.pieces: got an array of 1, wanted a tuple of bytes"),
    (WELCOME, "pieces", ("text",), "WELCOME.pieces: got an array of 1, wanted a tuple of bytes"),
    (WELCOME, "pieces", (b"x" * 65535,) * 5, "WELCOME.pieces: got 327685 bytes"),
    (ERROR, "code", 12, "ERROR.code: got 12"),
    (ERROR, "text", b"x", "ERROR.text: got 1 bytes"),
    (PROBE, "payload", bytes(2**18 + 1), "PROBE.payload: got 262145 bytes"),
]


@pytest.mark.parametrize(
    ("message", "field", "value", "says"), WRONG_VALUES, ids=lambda x: "" if isinstance(x, tuple) else None
)
def test_a_wrong_value_does_not_leave_the_house(message: Any, field: str, value: Any, says: str) -> None:
    with pytest.raises(WireError) as caught:
        encode(message._replace(**{field: value}))
    assert str(caught.value).startswith(says)


def test_the_text_of_an_error_is_cut_and_not_refused() -> None:
    error = decode(encode(ERROR._replace(text="ä" * 600)))
    assert error.text == "ä" * 512
    assert decode(encode(ERROR._replace(text="x" + "ä" * 600))).text == "x" + "ä" * 511
    assert decode(encode(ERROR._replace(text="a\udcffb"))).text == "a?b"
