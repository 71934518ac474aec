"""What a round trip costs beside raw TCP and HTTP: `python bench/transport.py [--quick]`.

A frame of 20 draft tokens goes up and an answer comes back, over the loopback, one at a time, everything pinned to one
core (free, the figures of ZeroMQ are bimodal). Five ways, interleaved in blocks, about the same bytes each way:

* raw: a ping-pong over TCP;
* zmq: the same by a bare DEALER and ROUTER, without any check, poll or bound: what libzmq itself costs;
* front: the cloud's front alone, by a DRAFT of a session that it does not know and its ERROR on it;
* worker: through front and worker, a real DRAFT that asks and the VERDICT on it, by a target that says one word;
* http: FastAPI under uvicorn and one kept-alive httpx client (left out where they are not installed).

Prints the medians of all round trips and, as its last line, one JSON object. Ratios are medians over the blocks, each
within its block, with the least and the largest. Where a core cannot be chosen they are not comparable to the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import zmq
from stamp import end_with

from pipesd.cloud.server import serve
from pipesd.config import CloudConfig
from pipesd.core import Mode, ModelInfo
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import Batch, greedy_choices
from pipesd.protocol import wire
from pipesd.protocol.vocabulary import vocabulary_hash
from pipesd.sim.tokeniser import byte_vocabulary
from pipesd.transport import Context, EdgeSocket, edge_socket

if TYPE_CHECKING:
    import httpx

DRAFTED = 20
CONTEXT = 1 << 18
SESSION = 0xFEDCBA9876543210
PROMPT = (1, 2, 3)
WORD = 100
FIGURES = {"front_over_raw": 5.0, "front_over_http": 1 / 8, "worker_over_http": 1 / 3}  # at most
WAIT_S = 5.0

Trip = Callable[[], None]


class OneWordTarget:
    """Always says the same id, at no cost."""

    slots = 1
    pass_ms = 1
    vocabulary = byte_vocabulary()
    info = ModelInfo("one word", vocabulary.real_size, CONTEXT, (), b"one word", "cpu", "float32")

    def truncate(self, slot: int, length: int) -> None:
        """There is nothing to forget."""

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        return [(WORD,) * rows for _, _, rows in batch]

    def sample(self, batch: Batch, draws: Sequence[Draw | None]) -> list[Choices]:
        return greedy_choices(batch, self.greedy(batch))


def draft_at(opening: int, round_: int) -> wire.Draft:
    """The right draft of a round: each round commits it and one id of the target's own."""
    pos = len(PROMPT) + round_ * (DRAFTED + 1)
    return wire.Draft(SESSION, opening, 0, pos, (WORD,) * DRAFTED, pos, nav=True)


class ThroughWorker:
    """Rounds of one session; each block is an opening of its own."""

    def __init__(self, edge: EdgeSocket, rounds: int) -> None:
        self._edge = edge
        self._rounds = rounds
        self._opening = 0
        self._payloads: Iterator[bytes] = iter(())

    def begin(self) -> None:
        self._opening += 1
        of_target = (OneWordTarget.info.fingerprint, vocabulary_hash(OneWordTarget.vocabulary))
        opened = ask(self._edge, wire.Open(
            SESSION, self._opening, 0, bytes(8), PROMPT, CONTEXT - 1, (), None, 0, Mode.NAV, *of_target
        ))  # fmt: skip
        assert isinstance(opened, wire.Opened), opened
        self._payloads = iter([wire.encode(draft_at(self._opening, n)) for n in range(self._rounds)])

    def trip(self) -> None:
        self._edge.send(next(self._payloads))
        answer = self._edge.receive(WAIT_S)
        assert answer is not None and len(answer) > 4 * DRAFTED, "every draft was right"


def ask(edge: EdgeSocket, message: wire.Message) -> wire.Message:
    """The answer to a message, sent as soon as there is a connection."""
    payload = wire.encode(message)
    deadline_s = time.monotonic() + WAIT_S
    while not edge.send(payload):
        assert time.monotonic() < deadline_s, edge.explain()
        time.sleep(0.01)
    answer = edge.receive(WAIT_S)
    assert answer is not None, edge.explain()
    return wire.decode(answer)


def front_trip(edge: EdgeSocket, payload: bytes, down: int) -> None:
    edge.send(payload)
    answer = edge.receive(WAIT_S)
    assert answer is not None and len(answer) == down


def raw_trip(connection: socket.socket, payload: bytes, down: int) -> None:
    connection.sendall(payload)
    got = 0
    while got < down:
        got += len(connection.recv(down - got))


def zmq_trip(dealer: zmq.Socket[bytes], payload: bytes, down: int) -> None:
    dealer.send(payload)
    assert len(dealer.recv()) == down


def http_trip(client: httpx.Client, url: str, payload: bytes, down: int) -> None:
    answer = client.post(url, content=payload)
    assert len(answer.content) == down


# ---- the servers, each a process of its own


def serve_raw(up: int, down: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reply = bytes(down)
        while True:
            got = 0
            while got < up:
                part = connection.recv(up - got)
                if not part:
                    return
                got += len(part)
            connection.sendall(reply)


def serve_zmq(up: int, down: int) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    reply = bytes(down)
    while True:
        routing_id, payload = router.recv_multipart()
        assert len(payload) == up
        router.send_multipart([routing_id, reply])


def serve_http(up: int, down: int) -> None:
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app = FastAPI()
    reply = bytes(down)

    async def verify(request: Request) -> Response:
        assert len(await request.body()) == up
        return Response(reply, media_type="application/octet-stream")

    verify.__annotations__ = {"request": Request, "return": Response}  # FastAPI reads them, and they are local names
    app.add_api_route("/verify", verify, methods=["POST"])
    listener = socket.socket(
        socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # by this asyncio knows TCP, no delay
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False)).run(sockets=[listener])


def serve_cloud() -> None:
    config = CloudConfig(bind="tcp://127.0.0.1:0", max_sessions=1)
    serve(config, make_target=OneWordTarget, announce=announce_port)


def announce_port(line: str) -> None:
    print(line.rpartition(":")[2], flush=True)


@contextmanager
def server(kind: str, up: int = 0, down: int = 0) -> Iterator[int]:
    """A server of that kind; its port."""
    command = [sys.executable, __file__, "--serve", kind, str(up), str(down)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


# ---- measuring


def pin() -> int | None:
    """This process and all that it starts, on one core; its number, None where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def block_us(trip: Trip, rounds: int, warm_up: int) -> list[float]:
    for _ in range(warm_up):
        trip()
    times_us = []
    for _ in range(rounds):
        begun_ns = time.perf_counter_ns()
        trip()
        times_us.append((time.perf_counter_ns() - begun_ns) / 1000)
    return times_us


def measure(blocks: int, rounds: int, warm_up: int) -> dict[str, list[list[float]]]:
    """For each way, for each block, its round trips in µs."""
    up = len(wire.encode(draft_at(1, 0)))
    down = len(wire.encode(wire.Verdict(SESSION, 1, 0, len(PROMPT), (WORD,) * (DRAFTED + 1))))
    print(f"{up} bytes up, {down} bytes down (raw, worker, http), {blocks} blocks of {rounds} round trips")
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", stack.enter_context(server("raw", up, down)))))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.connect(f"tcp://127.0.0.1:{stack.enter_context(server('zmq', up, down))}")
        edge = stack.enter_context(edge_socket(context, f"tcp://127.0.0.1:{stack.enter_context(server('cloud'))}"))
        through = ThroughWorker(edge, rounds + warm_up)
        stray = wire.encode(draft_at(1, 0)._replace(session=SESSION + 1))
        refusal = len(wire.encode(ask(edge, wire.decode(stray))))
        trips: dict[str, Trip] = {
            "raw": lambda: raw_trip(raw, bytes(up), down),
            "zmq": lambda: zmq_trip(dealer, bytes(up), down),
            "front": lambda: front_trip(edge, stray, refusal),
            "worker": through.trip,
        }
        if all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "httpx"))):
            import httpx

            client = stack.enter_context(httpx.Client())
            url = f"http://127.0.0.1:{stack.enter_context(server('http', up, down))}/verify"
            trips["http"] = lambda: http_trip(client, url, bytes(up), down)
        else:
            print("fastapi, uvicorn or httpx is not installed: no comparison with HTTP")
        through.begin()
        for trip in trips.values():
            block_us(trip, 1, 0)
        times: dict[str, list[list[float]]] = {name: [] for name in trips}
        for _ in range(blocks):
            through.begin()
            for name, trip in trips.items():
                times[name].append(block_us(trip, rounds, warm_up))
    return times


def ratio(times: dict[str, list[list[float]]], over: str) -> dict[str, float]:
    """Of `a_over_b`: the median over the blocks, the least and the largest."""
    a, b = over.split("_over_")
    of_blocks = [statistics.median(x) / statistics.median(y) for x, y in zip(times[a], times[b], strict=True)]
    found = (statistics.median(of_blocks), min(of_blocks), max(of_blocks))
    return dict(zip(("median", "least", "largest"), (round(value, 4) for value in found), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: only to see that it works")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        kind, up, down = options.serve[0], int(options.serve[1]), int(options.serve[2])
        servers: dict[str, Callable[[], None]] = {
            "raw": partial(serve_raw, up, down),
            "zmq": partial(serve_zmq, up, down),
            "http": partial(serve_http, up, down),
            "cloud": serve_cloud,
        }
        servers[kind]()
        return 0

    core = pin()
    times = measure(3, 50, 5) if options.quick else measure(9, 500, 50)
    medians = {name: statistics.median([us for block in blocks for us in block]) for name, blocks in times.items()}
    for name, median_us in medians.items():
        print(f"{name:8}{median_us:8.1f} us")
    ratios = {over: ratio(times, over) for over in FIGURES if over.split("_over_")[1] in times}
    for over, found in ratios.items():
        print(f"{over:18}{found['median']:8.3f}  ({found['least']:.3f} to {found['largest']:.3f}), "
              f"at most {FIGURES[over]:.3f}")  # fmt: skip
    result = {
        "bench": "transport",
        "kind": "real",
        "pinned_to_one_core": core is not None,
        "median_us": {name: round(value, 1) for name, value in medians.items()},
        "ratios": ratios,
        "figures": {over: round(figure, 4) for over, figure in FIGURES.items()},
        "reached": {over: found["median"] <= FIGURES[over] for over, found in ratios.items()},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    end_with(main)
