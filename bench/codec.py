"""What encoding and decoding cost, every check on: `python bench/codec.py [--quick]`.

Prints a table of microseconds (the smallest of many repeats: what the code costs when nothing disturbs it) and of
bytes, beside msgpack and JSON without any check in the same run, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import timeit
from collections.abc import Callable

import msgpack  # type: ignore[import-untyped]
from stamp import end_with

from pipesd.core import Logprobs, Mode
from pipesd.policy.accept import ToldLaw
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.wire import Counters, Draft, Message, Open, Verdict, decode, encode

DRAFT_20_FIGURE_US = 3.0  # encode and decode together
TESTED_FIGURE = 2.0  # times that, with probabilities


def samples(seed: int) -> dict[str, Message]:
    """Messages as a session in its second thousand of tokens sends them; ids of a vocabulary of 49,152."""
    rng = random.Random(seed)
    session = rng.getrandbits(64) | 1 << 63

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(49_152) for _ in range(count))

    def law(count: int) -> tuple[tuple[int, float], ...]:
        return tuple((token, rng.random()) for token in ids(count))

    draft = Draft(session, 2, 40, 1500, ids(20), 1498, nav=True)
    verdict = Verdict(session, 2, 40, 1500, ids(20), more=True)
    opening = Open(session, 2, 0, bytes(8), ids(1000), 2000, (2,), None, 7, Mode.EAGER, bytes(8), bytes(8))
    p_draft = struct.unpack("<20e", struct.pack("<20e", *(rng.random() for _ in range(20))))
    return {
        "DRAFT, 20 ids": draft,
        "DRAFT, 1 id": draft._replace(ids=ids(1)),
        "DRAFT, 20 ids, p_draft": draft._replace(p_draft=p_draft),
        "VERDICT, 20 ids": verdict,
        "VERDICT, 1 id": verdict._replace(ids=ids(1)),
        "VERDICT, 1 id, counters": verdict._replace(ids=ids(1), counters=Counters(100, 300, 60, 60_000)),
        "VERDICT, 3 ids, law of 16": verdict._replace(ids=ids(3), rejected=True, refused=ToldLaw(law(16), 0)),
        "VERDICT, 3 ids, law of 256": verdict._replace(ids=ids(3), rejected=True, refused=ToldLaw(law(256))),
        "VERDICT, 3 ids, logprobs 5": verdict._replace(
            ids=ids(3), logprobs=tuple(Logprobs(-rng.random(), tuple((i, -1.0) for i in ids(5))) for _ in range(3))
        ),
        "OPEN, 1000 ids": opening,
        "OPEN, 1000 ids, sampling": opening._replace(sampling=Sampling(temperature=0.8, method=Method.REJECTION)),
    }


def least_us(action: Callable[[], object], repeats: int) -> float:
    number = 1000
    return min(timeit.repeat(action, number=number, repeat=repeats)) / number * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: only to see that it works")
    parser.add_argument("--seed", type=int, default=1, help="for the ids (default 1)")
    options = parser.parse_args()
    repeats = 3 if options.quick else 60

    print(f"{'message':28}{'encode us':>10}{'decode us':>10}{'both us':>9}{'bytes':>7}{'beyond ids':>12}")
    rows = {}
    for name, message in samples(options.seed).items():
        payload = encode(message)
        encode_us = least_us(lambda message=message: encode(message), repeats)  # type: ignore[misc]
        decode_us = least_us(lambda payload=payload: decode(payload), repeats)  # type: ignore[misc]
        beyond = len(payload) - 4 * len(getattr(message, "ids", ()))
        rows[name] = {"encode_us": encode_us, "decode_us": decode_us, "bytes": len(payload), "beyond_ids": beyond}
        both = encode_us + decode_us
        print(f"{name:28}{encode_us:10.2f}{decode_us:10.2f}{both:9.2f}{len(payload):7}{beyond:12}")

    draft = samples(options.seed)["DRAFT, 20 ids"]
    assert isinstance(draft, Draft)
    fields = msgpack.unpackb(encode(draft))
    plain = [list(draft.ids) if isinstance(field, bytes) else field for field in fields]
    references = {
        "msgpack, no checks": least_us(lambda: msgpack.unpackb(msgpack.packb(fields)), repeats),
        "json, no checks": least_us(lambda: json.loads(json.dumps(plain)), repeats),
    }
    for name, both in references.items():
        print(f"{name + ' (20 ids)':48}{both:9.2f}")

    draft_us, tested_us = (
        rows[name]["encode_us"] + rows[name]["decode_us"] for name in ("DRAFT, 20 ids", "DRAFT, 20 ids, p_draft")
    )
    result = {
        "bench": "codec",
        "kind": "real",
        "draft_20_us": round(draft_us, 3),
        "figure_us": DRAFT_20_FIGURE_US,
        "reached": draft_us <= DRAFT_20_FIGURE_US,
        "tested_over_plain": round(tested_us / draft_us, 2),
        "tested_figure": TESTED_FIGURE,
        "tested_reached": tested_us <= TESTED_FIGURE * draft_us,
        "over_msgpack": round(draft_us / references["msgpack, no checks"], 2),
        "over_json": round(draft_us / references["json, no checks"], 2),
        "seed": options.seed,
        "rows": {name: {key: round(value, 3) for key, value in row.items()} for name, row in rows.items()},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    end_with(main)
