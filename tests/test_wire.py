"""The wire as it should be: bytes of every kind, there and back, versions, sizes, price."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipesd.config import MOST_LOGPROBS
from pipesd.core import Logprobs, Mode, ModelInfo, Vocabulary
from pipesd.logit_bias import MOST_BIASED
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Sampling
from pipesd.protocol import messages, wire
from pipesd.protocol.layouts import LAYOUTS, fields_of, message_of
from pipesd.protocol.wire import Counters, Draft, Open, Ready, Verdict, WireError, check_version, decode, encode
from tests import wire_samples as samples
from tests.wire_samples import GOLDEN, HASH, MODEL, SESSION

IDS_20 = tuple(range(1000, 49000, 2400))


def arrays(payload: bytes) -> tuple:
    return msgpack.unpackb(payload, use_list=False)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda x: type(x).__name__ if isinstance(x, tuple) else "")
def test_every_kind_has_these_bytes_and_no_others(message: wire.Message, golden: str) -> None:
    assert encode(message).hex() == golden
    decoded = decode(bytes.fromhex(golden), internal=True)
    assert decoded == message
    assert type(decoded) is type(message)


def test_golden_frames_cover_every_kind_and_numbers_are_fixed() -> None:
    assert {type(message) for message, _ in GOLDEN} == {layout.message for layout in LAYOUTS.values()}
    assert {kind.name: int(kind) for kind in wire.Kind} == {
        "HELLO": 1, "WELCOME": 2, "OPEN": 3, "OPENED": 4, "DRAFT": 5, "VERDICT": 6, "RESEND": 7, "CANCEL": 8,
        "CLOSE": 9, "PROBE": 10, "PROBED": 11, "ERROR": 12, "READY": 64, "BEAT": 65, "GONE": 66,
    }  # fmt: skip
    assert [int(code) for code in wire.ErrorCode] == list(range(1, 12))
    assert [int(status) for status in wire.ProbeStatus] == list(range(4))


def test_the_specification_names_every_field_in_its_order_and_every_limit() -> None:
    assert wire.__doc__ is not None
    rows = re.findall(r"^ {4}([ \d]\d) ([A-Z]+) +(.*(?:\n {19}.*)*)", wire.__doc__, re.MULTILINE)
    assert {(int(number), name) for number, name, _ in rows} == {(int(kind), kind.name) for kind in LAYOUTS}
    for number, _, text in rows:
        layout = LAYOUTS[int(number)]
        names = [re.match(r"(\w+)(\??)", part.strip()) for part in re.sub(r"\([^)]*\)", "", text).split(",")]
        own = list(layout.fields)[2:]
        if own:
            found = [match.group(1) for match in names if match and match.group(1) in own]
            assert found == own, f"kind {number}"
            optional = [match.group(1) for match in names if match and match.group(2)]
            assert optional == own[layout.required - 2 :], f"kind {number}"
    limits = {name: value for name, value in vars(messages).items() if name.startswith("MAX_")}
    for name in (
        "MAX_MESSAGE_BYTES",
        "MAX_INTERNAL_BYTES",
        "MAX_IDS_OPEN",
        "MAX_PROBE_BYTES",
        "MAX_VOCABULARY",
        "MAX_TRIED",
    ):
        assert f"{limits[name]:,}" in wire.__doc__, name
    for name in ("MAX_IDS", "MAX_NAME_BYTES", "MAX_TEXT_BYTES", "MAX_STOP_IDS", "MAX_FIELDS", "MAX_PAIRS"):
        assert str(limits[name]) in wire.__doc__, name


@given(samples.messages)
def test_there_and_back(message: wire.Message) -> None:
    decoded = decode(encode(message), internal=True)
    assert decoded == message
    assert type(decoded) is type(message)
    assert [type(value) for value in decoded] == [type(value) for value in message]


@given(st.one_of(samples.drafts(), samples.verdicts))
def test_the_quick_ways_do_what_the_tables_do(message: Draft | Verdict) -> None:
    payload = encode(message)
    assert payload == msgpack.packb(fields_of(message))
    by_table = message_of(arrays(payload))
    decoded = decode(payload)
    assert decoded == by_table == message
    assert [type(value) for value in decoded] == [type(value) for value in by_table]


@given(st.sampled_from(GOLDEN), st.lists(st.none() | st.integers() | st.text() | st.booleans(), max_size=8))
def test_fields_of_a_later_minor_version_are_ignored(sample: tuple[wire.Message, str], more: list) -> None:
    message, golden = sample
    fields = list(arrays(bytes.fromhex(golden)))
    fields += [None] * (1 + len(LAYOUTS[fields[0]].fields) - len(fields))  # what this version may leave out
    later = msgpack.packb([*fields, *[x if not isinstance(x, int) else x % 2**32 for x in more]])
    assert decode(later, internal=True) == message


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 4096])
def test_any_number_of_ids_up_to_the_limit(count: int) -> None:
    ids = tuple(range(2**31 - count, 2**31))
    draft = Draft(SESSION, 1, 0, 5, ids, 5)
    tested, verdict = draft._replace(p_draft=(0.5,) * count), Verdict(SESSION, 1, 0, 5, ids)
    told = verdict._replace(logprobs=(Logprobs(-1.0, ((7, -1.0),)),) * count)
    for message in (draft, tested, tested._replace(tried=3), verdict, told):
        assert decode(encode(message)) == message


def rounded_up(p: float) -> float:
    """The least float16 that is not below p, by looking at its neighbours."""
    nearest = np.float16(p)
    return float(nearest if float(nearest) >= p else np.nextafter(nearest, np.float16(1.0)))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9).map(lambda ps: tuple(map(rounded_up, ps))))
@example((rounded_up(0.1), rounded_up(1e-9), rounded_up(0.99999), 2.0**-24, 1.0, 0.0))
def test_a_probability_rounded_up_to_a_float16_stays_as_it_is(p_draft: tuple[float, ...]) -> None:
    draft = Draft(SESSION, 1, 0, 5, tuple(range(len(p_draft))), 5, p_draft=p_draft)
    assert decode(encode(draft)).p_draft == p_draft
    assert message_of(arrays(msgpack.packb(fields_of(draft)))).p_draft == p_draft


@pytest.mark.parametrize("count", [0, 1, 20, 63])
@pytest.mark.parametrize("pos", [0, 1500, 131_072])
def test_a_draft_and_a_verdict_cost_at_most_28_bytes_beyond_their_ids(count: int, pos: int) -> None:
    ids = IDS_20[:1] * count
    for opening, epoch in [(1, 0), (200, 255), (1000, 1000)]:
        head = (2**64 - 1, opening, epoch, pos, ids)
        assert len(encode(Draft(*head, known=max(0, pos - 32), nav=True))) - 4 * count <= 28
        assert len(encode(Verdict(*head, more=True))) - 4 * count <= 28
        tested = Draft(*head, known=max(0, pos - 32), nav=True, p_draft=(0.5,) * count)
        assert len(encode(tested)) - 6 * count <= 30
        for pairs, size in [(1, 2), (256, 3)]:
            refused = Verdict(*head, rejected=True, refused=ToldLaw(((1, 0.5),) * pairs))
            assert len(encode(refused)) - 4 * count <= 28 + 4 + size + 8 * pairs  # 4 for the counters' places
    usual = Verdict(2**64 - 1, 3, 100, 1500, ids, True, False, Counters(90, 250, 60, 60_000))
    assert len(encode(usual)) - 4 * count <= 28


def test_the_longest_legal_messages_fit_the_limit_of_a_message() -> None:
    ids = (2**31 - 1,) * wire.MAX_IDS_OPEN
    stop_ids = (2**31 - 1,) * wire.MAX_STOP_IDS
    top = 2**32 - 1
    options = Sampling(temperature=1.0, logit_bias=tuple((2**31 - 1 - i, 1.0) for i in range(MOST_BIASED)))
    longest = Open(2**64 - 1, top, top, HASH, ids, top, stop_ids, options, 2**64 - 1, Mode.FREE, MODEL, HASH)
    assert len(encode(longest)) <= wire.MAX_MESSAGE_BYTES
    assert decode(encode(longest)) == longest
    head = (2**64 - 1, top, top, top, ids[: wire.MAX_IDS])
    refused = ToldLaw(tuple((2**31 - 1 - i, 1.0) for i in range(messages.MAX_PAIRS)), messages.MAX_TRIED)
    logprobs = (Logprobs(-1.0, ((2**31 - 1, -1.0),) * MOST_LOGPROBS),) * wire.MAX_IDS
    verdict = Verdict(*head, True, True, Counters(top, top, top, top), refused, logprobs)
    assert len(encode(verdict)) <= wire.MAX_MESSAGE_BYTES
    assert decode(encode(verdict)) == verdict
    name = "x" * messages.MAX_NAME_BYTES
    pieces = (b"x" * (messages.MAX_BLOCK_PIECES_BYTES // 256 - 2),) * 256
    hashes = b"hash" * (messages.MAX_VOCABULARY // 256)
    welcome = wire.Welcome(1, 0, 1, 0, 0, name, 1, HASH, MODEL, 1, name, name, hashes, pieces)
    assert decode(encode(welcome)) == welcome


def test_a_workers_first_word_carries_a_whole_vocabulary() -> None:
    vocabulary = Vocabulary(tuple(b"piece %d" % i for i in range(150_000)) + (b"",) * 64)
    info = ModelInfo("a model", vocabulary.size, 32768, (2, 7), MODEL, "cuda:0", "bfloat16")
    payload = encode(Ready.of(info, vocabulary))
    ready = decode(payload, internal=True)
    assert isinstance(ready, Ready)
    assert (ready.info, ready.vocabulary) == (info, vocabulary)
    with pytest.raises(WireError, match="length"):
        decode(payload)


def test_the_longest_vocabulary_fits_the_limit_of_an_internal_message() -> None:
    most = wire.MAX_INTERNAL_BYTES - 4096
    pieces = (b"x" * 65535,) * 511
    pieces += (b"x" * (most - 511 * 65537 - 2),)
    name = "x" * messages.MAX_NAME_BYTES
    ready = Ready(0, 0, name, 512, 1, (2**31 - 1,) * wire.MAX_STOP_IDS, MODEL, name, name, pieces)
    assert decode(encode(ready), internal=True) == ready
    with pytest.raises(WireError, match=f"READY.pieces: got {most + 2} bytes, wanted at most {most}"):
        encode(ready._replace(pieces=(*pieces, b"")))


def test_another_major_version_is_told_both_versions() -> None:
    assert check_version(wire.MAJOR, 99) is None
    for major in (wire.MAJOR - 1, wire.MAJOR + 1):
        text = check_version(major, 3, peer="the edge")
        assert text is not None
        assert f"{major}.3" in text
        assert f"{wire.MAJOR}.{wire.MINOR}" in text
    assert "2.0, this side" in str(check_version(2))
    assert "update the edge" in str(check_version(wire.MAJOR - 1, 0, "the edge"))
    assert "update this side" in str(check_version(wire.MAJOR + 1, 0, "the edge"))


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("major", [0, 2, 65535])
def test_a_message_of_another_major_that_does_not_fit_is_refused_for_its_version(kind: int, major: int) -> None:
    with pytest.raises(WireError) as refusal:
        decode(msgpack.packb([kind, SESSION, 7, major, "who knows"]))
    error = refusal.value
    assert (error.field, error.code, error.session, error.opening) == ("major", wire.ErrorCode.VERSION, SESSION, 7)
    assert f"got {major}, wanted 1: both sides must speak one major version" in str(error)


def test_a_message_of_another_major_that_fits_is_left_to_the_front() -> None:
    hello = wire.Hello(SESSION, 0, 2, 0, 0, 1, HASH)
    assert decode(encode(hello)) == hello


def test_each_direction_is_known() -> None:
    public = set(wire.FROM_EDGE) | set(wire.FROM_CLOUD)
    assert public == {layout.message for kind, layout in LAYOUTS.items() if kind < messages.FIRST_INTERNAL_KIND}
    assert not set(wire.FROM_EDGE) & set(wire.FROM_CLOUD)


def test_the_msgpack_of_before_1_is_refused_by_name() -> None:
    wire.check_msgpack((1, 0), "somewhere")
    with pytest.raises(ImportError, match=r"msgpack 0\.5\.6 at /old/msgpack.*1\.0.*msgpack-python"):
        wire.check_msgpack((0, 5, 6), "/old/msgpack")


def test_threads_encode_at_once() -> None:
    drafts = [Draft(SESSION + i, i, 0, i, IDS_20, i, nav=True) for i in range(8)]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(2000) if decode(encode(drafts[i])) != drafts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(drafts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_import_is_light() -> None:
    heavy = ("numpy", "torch", "zmq", "llama_cpp", "pickle")
    code = f"import sys, pipesd.protocol.wire; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_the_codec_bench_ends_with_one_object() -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, str(root / "bench" / "codec.py"), "--quick"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    result = json.loads(out.stdout.splitlines()[-1])
    assert 0 < result["draft_20_us"] < 1000
    assert result["rows"]["DRAFT, 20 ids"]["beyond_ids"] <= 28
    assert result["rows"]["VERDICT, 3 ids, law of 256"]["beyond_ids"] <= 28 + 4 + 3 + 8 * 256
