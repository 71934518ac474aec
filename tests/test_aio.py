"""The session for asyncio: the event loop never waits, and what is cancelled leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from clouds import LAW, NOWHERE, PATIENT_S, Serving, said, serving

from pipesd import AsyncEdgeSession
from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.errors import Refused, Unreachable, UsageError
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.tokeniser import ByteTokeniser

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(target={"pass_s": 0.001}) as served:
        yield served


def edge(address: str, *, drafter: ScriptedDrafter | None = None, **config: Any) -> AsyncEdgeSession:
    drafter = ScriptedDrafter(Agreement(LAW, 0.8)) if drafter is None else drafter
    settings: dict[str, Any] = {"cloud": address, "connect_s": PATIENT_S, **config}
    return AsyncEdgeSession(EdgeConfig(**settings), drafter=drafter, tokeniser=ByteTokeniser())


async def ids_of(session: AsyncEdgeSession, prompt: str, **options: Any) -> list[int]:
    return [token async for piece in session.generate(prompt, **options) for token in piece.token_ids]


def run(body: Callable[[], Awaitable[None]]) -> None:
    """In an event loop of its own, for a limited time."""

    async def bounded() -> None:
        await asyncio.wait_for(body(), 3 * PATIENT_S)

    asyncio.run(bounded())


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("strategy", ["vanilla", "cloud", "local"])
def test_as_the_session_without_asyncio(cloud: Serving, strategy: str) -> None:
    async def body() -> None:
        async with edge(cloud.address, drafter=ScriptedDrafter(Agreement(LAW, 1.0)), strategy=strategy) as session:
            text = [piece.text async for piece in session.generate(PROMPT, max_tokens=50, seed=5)]
            assert list(session.token_ids) == said(LAW, PROMPT, 50)
            assert session.text == "".join(text) and session.finish_reason == "length"
            assert session.stats["tokens"] == 50 and session.seed == 5
            if strategy != "local":
                assert session.tokeniser.encode(PROMPT) == list(session.committed[:-50])
            ids = await ids_of(session, PROMPT, max_tokens=20, stop=["h"])
            assert session.text == "".join(text).split("h")[0] and ids[: len(session.token_ids)] == [*session.token_ids]

    run(body)


def test_sessions_side_by_side_and_the_loop_never_waits(cloud: Serving) -> None:
    async def body() -> None:
        async def user(number: int) -> bool:
            drafter = ScriptedDrafter(Agreement(LAW, 0.8), gamma_s=0.002)
            async with edge(cloud.address, drafter=drafter, strategy="cloud" if number % 2 else "vanilla") as session:
                return await ids_of(session, f"user {number}", max_tokens=60) == said(LAW, f"user {number}", 60)

        async def longest_step_s() -> float:
            longest_s, last_s = 0.0, time.perf_counter()
            while not users.done():
                await asyncio.sleep(0.001)
                longest_s, last_s = max(longest_s, time.perf_counter() - last_s), time.perf_counter()
            return longest_s

        users = asyncio.gather(*(user(number) for number in range(4)))
        longest_s = await longest_step_s()
        assert await users == [True] * 4 and longest_s < 0.5

    run(body)


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_five_hundred_cancels_and_then_a_complete_reply(cloud: Serving, strategy: str) -> None:
    async def body() -> None:
        chance = random.Random(1)
        async with edge(cloud.address, strategy=strategy) as session:
            for number in range(250):
                task = asyncio.create_task(ids_of(session, f"prompt {number}", max_tokens=1900))
                await asyncio.sleep(chance.uniform(0, 0.004) if number % 5 else 0)
                await cancelled(task)
                if number % 25 == 0:
                    assert await ids_of(session, "complete", max_tokens=30) == said(LAW, "complete", 30)
            assert await ids_of(session, "complete", max_tokens=30) == said(LAW, "complete", 30)
            assert session.stats["openings"] == 1

    run(body)


def test_a_cancelled_wait_ends_the_generation_soon() -> None:
    """In a pass of the target, in a step of the draft model, and in the prompt's prefill."""
    with serving(target={"pass_s": 0.5}) as cloud:

        async def body() -> None:
            async with edge(cloud.address, strategy="cloud") as session:
                task = asyncio.create_task(ids_of(session, PROMPT))
                await asyncio.sleep(0.1)
                begun_s = time.monotonic()
                await cancelled(task)
                assert time.monotonic() - begun_s < 0.4 and session.finish_reason == "cancelled"
            drafter = ScriptedDrafter(Agreement(LAW, 0.8), prefill_s=0.001)
            async with edge(cloud.address, drafter=drafter) as session:
                task = asyncio.create_task(ids_of(session, "x" * 1900))
                await asyncio.sleep(0.1)
                begun_s = time.monotonic()
                await cancelled(task)
                assert time.monotonic() - begun_s < 1.0 and drafter.fed < 1000

        run(body)


def test_a_timeout_is_a_cancel(cloud: Serving) -> None:
    async def body() -> None:
        async with edge(cloud.address) as session:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ids_of(session, PROMPT, max_tokens=1900), 0.05)
            assert session.finish_reason == "cancelled" and 0 < session.stats["tokens"] < 1900
            assert await ids_of(session, "next", max_tokens=20) == said(LAW, "next", 20)

    run(body)


def test_cancel_ends_the_output_in_good_order(cloud: Serving) -> None:
    async def body() -> None:
        async with edge(cloud.address) as session:
            ids: list[int] = []
            async for piece in session.generate(PROMPT, max_tokens=1900):
                ids.extend(piece.token_ids)
                if len(ids) > 20:
                    session.cancel()
            assert session.finish_reason == "cancelled" and ids == said(LAW, PROMPT, len(ids))
            assert await ids_of(session, "next", max_tokens=20) == said(LAW, "next", 20)

    run(body)


def test_a_loop_that_is_left_ends_its_generation(cloud: Serving) -> None:
    async def body() -> None:
        async with edge(cloud.address) as session:
            for _ in range(10):
                async for _piece in session.generate(PROMPT, max_tokens=1900):
                    break
                assert await ids_of(session, "next", max_tokens=5) == said(LAW, "next", 5)
            kept = session.generate(PROMPT, max_tokens=1900)
            await anext(kept)
            with pytest.raises(UsageError, match="generating already"):
                await ids_of(session, "other")
            await kept.aclose()
            assert [piece async for piece in kept] == []
            assert await ids_of(session, "next", max_tokens=5) == said(LAW, "next", 5)

    run(body)


def test_closing_ends_what_another_task_reads(cloud: Serving) -> None:
    async def body() -> None:
        session = edge(cloud.address)
        await session.open()
        task = asyncio.create_task(ids_of(session, PROMPT, max_tokens=1900))
        await asyncio.sleep(0.05)
        await session.close()
        ids = await task
        assert 0 < len(ids) < 1900 and ids == said(LAW, PROMPT, len(ids))
        await session.close()
        with pytest.raises(UsageError, match="closed"):
            session.generate(PROMPT)
        with pytest.raises(UsageError, match="closed"):
            await session.open()

    run(body)


def test_closing_does_not_wait_for_the_target() -> None:
    with serving(target={"pass_s": 1.0}) as cloud:

        async def body() -> None:
            session = edge(cloud.address, strategy="cloud")
            await session.open()
            task = asyncio.create_task(ids_of(session, PROMPT))
            await asyncio.sleep(0.1)
            begun_s = time.monotonic()
            await session.close()
            assert time.monotonic() - begun_s < 0.8 and await task == []

        run(body)


def test_errors_arrive_where_they_are_awaited(cloud: Serving) -> None:
    async def body() -> None:
        with pytest.raises(Unreachable, match="nothing listens"):
            async with edge(NOWHERE, connect_s=0.2):
                pass
        async with edge(cloud.address) as session:
            with pytest.raises(UsageError, match="max_tokens"):
                session.generate(PROMPT, max_token=3)
            with pytest.raises(Refused, match="2048"):
                await ids_of(session, "x" * 3000)
            assert await ids_of(session, "next", max_tokens=20) == said(LAW, "next", 20)

    run(body)


def test_waiting_for_a_cloud_can_be_cancelled() -> None:
    async def body() -> None:
        begun_s = time.monotonic()
        for wait_s in (0.0, 0.0, 0.1):
            session = edge(NOWHERE, connect_s=300)
            task = asyncio.create_task(session.__aenter__())
            await asyncio.sleep(wait_s)
            await cancelled(task)
            await cancelled_for_good(session)
        session = edge(NOWHERE, connect_s=300)
        task = asyncio.create_task(ids_of(session, PROMPT))
        await asyncio.sleep(0.1)
        await cancelled(task)
        await session.close()
        assert time.monotonic() - begun_s < 5.0

    async def cancelled_for_good(session: AsyncEdgeSession) -> None:
        for _ in range(500):
            try:
                session.generate(PROMPT)
            except UsageError:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a session whose opening was cancelled is not closed")

    run(body)
    no_thread_is_left()


def test_an_opening_may_be_cancelled_before_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's thread has taken the step, and has not come to where `cancel` would find it."""
    check_usable = EdgeSession._check_usable

    def slowly(session: EdgeSession) -> None:
        time.sleep(0.2)
        check_usable(session)

    monkeypatch.setattr(EdgeSession, "_check_usable", slowly)

    async def body() -> None:
        task = asyncio.create_task(edge(NOWHERE, connect_s=300).open())
        await asyncio.sleep(0.1)
        await cancelled(task)

    run(body)
    no_thread_is_left()


def test_no_thread_is_left(cloud: Serving) -> None:
    kept: list[AsyncEdgeSession] = []

    async def body() -> None:
        for _ in range(5):
            async with edge(cloud.address) as session:
                kept.append(session)
                assert any(thread.name.startswith("pipesd-edge") for thread in threading.enumerate())
                await ids_of(session, PROMPT, max_tokens=5)
        opened_by_use = edge(cloud.address)
        kept.append(opened_by_use)
        await ids_of(opened_by_use, PROMPT, max_tokens=5)
        await opened_by_use.close()
        with pytest.raises(Unreachable):
            kept.append(edge(NOWHERE, connect_s=0.1))
            await kept[-1].__aenter__()

    run(body)
    no_thread_is_left()


def no_thread_is_left() -> None:
    deadline_s = time.monotonic() + PATIENT_S
    while any(thread.name.startswith("pipesd-edge") for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "a session's thread is left"
        time.sleep(0.01)
