"""One message of each shape with its bytes, and hypothesis strategies for all messages."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from pipesd.core import Logprobs, Mode
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol import wire as w

SESSION = 0x1122334455667788
HASH = bytes(range(8))
MODEL = b"\xf0" * 8

_S = "cf1122334455667788"  # SESSION as msgpack writes it
_H = "c4080001020304050607"  # HASH
_M = "c408f0f0f0f0f0f0f0f0"  # MODEL
_CPU = "a3637075a7666c6f61743332"  # "cpu", "float32"
_WELCOME = (SESSION, 0, 1, 0, 0, "m", 49152, HASH, MODEL, 2048, "cpu", "float32")
_WELCOME_HEX = f"02{_S}00010000a16dcdc000{_H}{_M}cd0800{_CPU}"

SAMPLING = Sampling(
    temperature=0.75, top_k=300, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1.0,
    frequency_penalty=2.0, logit_bias=((1, 1.5), (65536, -math.inf)), method=Method.PICOSPEC, top_mass=258, logprobs=3,
)  # fmt: skip
_SAMPLING = (
    "c44802" "000000000000e83f" "2c010000" "000000000000e03f" "000000000000d03f" "000000000000f83f"
    "000000000000f0bf" "0000000000000040" "0201" "03" "010000000000c03f" "00000100000080ff"
)  # fmt: skip
_LAW = "c410030000000000003f090000000000803e"

# As a peer of version 1.0 says and understands them.
OF_1_0: list[tuple[w.Message, str]] = [
    (w.Hello(SESSION, 0, 1, 0, 0, 49152, HASH), f"9801{_S}00010000cdc000{_H}"),
    (w.Hello(SESSION, 0, 1, 0, 0, 49152, HASH, block=3), f"9901{_S}00010000cdc000{_H}03"),
    (w.Welcome(*_WELCOME), f"9d{_WELCOME_HEX}"),
    (w.Welcome(*_WELCOME, block_hashes=b"abcdefgh"), f"9e{_WELCOME_HEX}c4086162636465666768"),
    (w.Welcome(*_WELCOME, pieces=(b"a", b"", b"\xff\xfe")), f"9f{_WELCOME_HEX}c0c40901006100000200fffe"),
    (w.Welcome(*_WELCOME, end_ids=(2,)), f"dc0010{_WELCOME_HEX}c0c0c40402000000"),
    (
        w.Open(SESSION, 1, 2, HASH, (1, 256, 49151), 300, (2,), None, 2**64 - 1, Mode.EAGER, MODEL, HASH),
        f"9e03{_S}010102{_H}c40c0100000000010000ffbf0000cd012cc40402000000c0cfffffffffffffffff01{_M}{_H}",
    ),
    (w.Opened(SESSION, 1, 300, 32, 64, 250), f"9704{_S}01cd012c2040ccfa"),
    (w.Draft(SESSION, 1, 0, 1500, (7,), 1500, nav=True), f"9805{_S}0100cd05dcc404070000000001"),
    (w.Draft(SESSION, 1, 2, 1500, (), 1500), f"9805{_S}0102cd05dcc4000000"),
    (
        w.Draft(SESSION, 1, 2, 1500, (1, 2**31 - 1), 1502, again=True),
        f"9805{_S}0102cd05dcc40801000000ffffff7ffe02",
    ),
    (
        w.Draft(SESSION, 1, 2, 1500, (5, 6), 1490, nav=True, again=True, p_draft=(0.5, 1.0)),
        f"9905{_S}0102cd05dcc40805000000060000000a03c4040038003c",
    ),
    (w.Verdict(SESSION, 1, 0, 1500, (7,)), f"9706{_S}0100cd05dcc4040700000000"),
    (
        w.Verdict(SESSION, 1, 200, 1500, (7, 8), True, False, w.Counters(1, 20, 300, 70000)),
        f"9b06{_S}01ccc8cd05dcc4080700000008000000010114cd012cce00011170",
    ),
    (w.Resend(SESSION, 1, 2, 1500), f"9507{_S}0102cd05dc"),
    (w.Cancel(SESSION, 1), f"9308{_S}01"),
    (w.Close(SESSION, 2**32 - 1), f"9309{_S}ceffffffff"),
    (w.Probe(SESSION, 0, 9, b"xy", 16), f"960a{_S}0009c402787910"),
    (w.Probed(SESSION, 0, 9, w.ProbeStatus.UNKNOWN_SESSION, 40, b"z"), f"970b{_S}00090328c4017a"),
    (w.Error(SESSION, 3, w.ErrorCode.FULL, "voll ä", 500), f"960c{_S}0302a7766f6c6c20c3a4cd01f4"),
    (
        w.Ready(0, 0, "m", 3, 2048, (2,), MODEL, "cpu", "float32", (b"a", b"bc", b"")),
        f"9b400000a16d03cd0800c40402000000{_M}{_CPU}c409010061020062630000",
    ),
    (w.Beat(0, 0, 2, 250), "9541000002ccfa"),
    (w.Gone(SESSION, 4), f"9342{_S}04"),
]


OF_1_1: list[tuple[w.Message, str]] = [
    (
        w.Open(SESSION, 1, 2, HASH, (1,), 300, (), SAMPLING, 7, Mode.FREE, MODEL, HASH),
        f"9e03{_S}010102{_H}c40401000000cd012cc400{_SAMPLING}0702{_M}{_H}",
    ),
    (
        w.Open(SESSION, 1, 2, HASH, (1,), 300, (), Sampling(temperature=1.0), 7, Mode.FREE, MODEL, HASH),
        f"9e03{_S}010102{_H}c40401000000cd012cc400c43800000000000000f03f00000000000000000000f03f"
        f"0000000000000000000000000000f03f000000000000000000000000000000000000ff0702{_M}{_H}",
    ),
    (
        w.Draft(SESSION, 1, 2, 1500, (), 1500, nav=True, again=True, tried=300),
        f"9a05{_S}0102cd05dcc4000003c0cd012c",
    ),
    (
        w.Draft(SESSION, 1, 2, 1500, (5,), 1500, p_draft=(1.0,), tried=0),
        f"9a05{_S}0102cd05dcc404050000000000c402003c00",
    ),
    (
        w.Verdict(SESSION, 1, 2, 1500, (), rejected=True, refused=ToldLaw(((3, 0.5), (9, 0.25)))),
        f"9c06{_S}0102cd05dcc40002c0c0c0c0{_LAW}",
    ),
    (
        w.Verdict(SESSION, 1, 2, 1500, (7,), False, True, w.Counters(1, 2, 3, 4), ToldLaw(((3, 0.5), (9, 0.25)), 16)),
        f"9d06{_S}0102cd05dcc404070000000201020304{_LAW}10",
    ),
    (
        w.Verdict(SESSION, 1, 2, 1500, (7,), logprobs=(Logprobs(-0.5, ((3, 0.0), (9, -math.inf))),)),
        f"9e06{_S}0102cd05dcc4040700000000c0c0c0c0c0c0c41502000000bf030000000000000009000000000080ff",
    ),
    (
        w.Verdict(SESSION, 1, 2, 1500, (7, 8), logprobs=(Logprobs(-0.5, ()), Logprobs(-2.0, ()))),
        f"9e06{_S}0102cd05dcc408070000000800000000c0c0c0c0c0c0c40900000000bf000000c0",
    ),
]
GOLDEN = OF_1_0 + OF_1_1


def made(message: Any, *fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*fields).map(lambda values: message(*values))  # st.builds would draw the defaults as well


u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
ids = st.lists(st.integers(0, 2**31 - 1), max_size=300).map(tuple)
few_ids = st.lists(st.integers(0, 2**31 - 1), max_size=w.MAX_STOP_IDS).map(tuple)
hashes = st.binary(min_size=8, max_size=8)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
pieces = st.lists(st.binary(max_size=20), max_size=256).map(tuple)
counters = made(w.Counters, u32, u32, u32, u32)
probability = st.floats(0.0, 1.0, width=16).map(lambda p: p + 0.0)


token_id = st.integers(0, 2**31 - 1)
probability32 = st.floats(0.0, 1.0, width=32).map(lambda p: p + 0.0)
number = st.integers(0, 1 << 20)  # of a proposal
log_probability = st.floats(max_value=0.0, width=32)


@st.composite
def drafts(draw: st.DrawFn) -> w.Draft:
    draft = draw(made(w.Draft, u64, u32, u32, u32, ids, u32, st.booleans(), st.booleans()))
    if draw(st.integers(0, 2)) == 0:
        count = len(draft.ids)
        draft = draft._replace(p_draft=tuple(draw(st.lists(probability, min_size=count, max_size=count))))
    return draft._replace(tried=draw(st.none() | number)) if draw(st.integers(0, 3)) == 0 else draft


@st.composite
def logprobs(draw: st.DrawFn, count: int) -> tuple[Logprobs, ...]:
    beside = draw(st.sampled_from([0, 1, 3, 20]))
    top = st.lists(st.tuples(token_id, log_probability), min_size=beside, max_size=beside).map(tuple)
    return tuple(draw(st.lists(made(Logprobs, log_probability, top), min_size=count, max_size=count)))


pairs = st.lists(st.tuples(token_id, probability32), min_size=1, max_size=20).map(tuple)
refused = made(ToldLaw, pairs.filter(lambda pairs: any(p for _, p in pairs)), st.none() | number)


@st.composite
def verdicts_of(draw: st.DrawFn) -> w.Verdict:
    verdict = draw(made(w.Verdict, u64, u32, u32, u32, ids, st.booleans(), st.just(False), st.none() | counters))
    what = draw(st.integers(0, 5))
    if what in (0, 1):
        verdict = verdict._replace(rejected=True, refused=draw(refused))
    if what in (1, 2):
        some = verdict.ids[:8]
        verdict = verdict._replace(ids=some, logprobs=draw(logprobs(len(some))))
    return verdict


verdicts = verdicts_of()


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    method = draw(st.sampled_from(Method))
    bias = st.floats(-100.0, 100.0, width=32) | st.just(-math.inf)
    return Sampling(
        temperature=draw(st.floats(0.01, 2.0)),
        top_k=draw(st.integers(0, 2**20)),
        top_p=draw(st.floats(0.01, 1.0)),
        min_p=draw(st.floats(0.0, 1.0)),
        repetition_penalty=draw(st.floats(0.1, 2.0)),
        presence_penalty=draw(st.floats(-2.0, 2.0)),
        frequency_penalty=draw(st.floats(-2.0, 2.0)),
        logit_bias=tuple(draw(st.dictionaries(token_id, bias, max_size=9)).items()),
        method=method,
        top_mass=draw(st.integers(1, 1024)) if method is Method.PICOSPEC else 0,
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


blob = st.binary(max_size=100)
messages: st.SearchStrategy[w.Message] = st.one_of(
    drafts(),
    verdicts,
    made(w.Hello, u64, u32, u16, u16, u32, u32, hashes, st.none() | st.integers(0, 4095)),
    made(
        w.Welcome, u64, u32, u16, u16, u32, names, u32, hashes, hashes, u32, names, names,
        st.none() | st.integers(0, 9).map(lambda n: b"hash" * n), st.none() | pieces,
    ),
    made(
        w.Open, u64, u32, u32, hashes, ids, u32, few_ids, st.none() | samplings(), u64, st.sampled_from(Mode), hashes,
        hashes, u16,
    ),
    made(w.Opened, u64, u32, u32, u32, u32, u32),
    made(w.Resend, u64, u32, u32, u32),
    made(w.Cancel, u64, u32),
    made(w.Close, u64, u32),
    made(w.Probe, u64, u32, u64, blob, st.integers(0, w.MAX_PROBE_BYTES)),
    made(w.Probed, u64, u32, u64, st.sampled_from(w.ProbeStatus), u32, blob),
    made(w.Error, u64, u32, st.sampled_from(w.ErrorCode), names, u32),
    made(w.Ready, u64, u32, names, u32, u32, few_ids, hashes, names, names, pieces),
    made(w.Beat, u64, u32, u32, u32),
    made(w.Gone, u64, u32),
)  # fmt: skip

# One message of each kind with every optional field, and the usual DRAFT and VERDICT.
DRAFT = w.Draft(SESSION, 1, 2, 1500, (5, 6), 1490, nav=True, p_draft=(0.5, 1.0), tried=16)
VERDICT = w.Verdict(
    SESSION, 1, 2, 1500, (5, 6), False, True, w.Counters(1, 2, 3, 4), ToldLaw(((3, 0.5), (9, 0.25)), 16),
    (Logprobs(-0.5, ((3, -1.0),)), Logprobs(-1.5, ((4, -2.0),))),
)  # fmt: skip
PLAIN_DRAFT = DRAFT._replace(p_draft=None, tried=None)
TESTED_DRAFT = DRAFT._replace(tried=None)
PLAIN_VERDICT = VERDICT._replace(rejected=False, counters=None, refused=None, logprobs=None)
COUNTED_VERDICT = PLAIN_VERDICT._replace(counters=VERDICT.counters)
HELLO = w.Hello(SESSION, 0, 1, 0, 0, 49152, HASH, block=3)
OPEN = w.Open(SESSION, 1, 2, HASH, (1, 256), 300, (2,), SAMPLING, 7, Mode.EAGER, MODEL, HASH)
WELCOME = w.Welcome(SESSION, 0, 1, 0, 0, "m", 3, HASH, MODEL, 2048, "cpu", "float32", b"hash", (b"a", b""), (2,))
PROBE = w.Probe(SESSION, 0, 9, b"xy", 16)
PROBED = w.Probed(SESSION, 0, 9, w.ProbeStatus.OK, 40, b"z")
ERROR = w.Error(SESSION, 3, w.ErrorCode.FULL, "full", 500)
READY = w.Ready(0, 0, "m", 2, 2048, (2,), MODEL, "cpu", "float32", (b"a", b""))
FULL: list[w.Message] = [
    DRAFT, VERDICT, HELLO, OPEN, WELCOME, PROBE, PROBED, ERROR, READY, PLAIN_DRAFT, PLAIN_VERDICT,
    TESTED_DRAFT, COUNTED_VERDICT,
    w.Opened(SESSION, 1, 300, 32, 64, 250), w.Resend(SESSION, 1, 2, 3), w.Cancel(SESSION, 1),
    w.Close(SESSION, 1), w.Beat(0, 0, 2, 3), w.Gone(SESSION, 1),
]  # fmt: skip
