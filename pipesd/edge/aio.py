"""The session for asyncio: `EdgeSession` driven by one thread of its own, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from pipesd.clock import Clock
from pipesd.config import EdgeConfig
from pipesd.core import FinishReason, Logprobs, Piece
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.edge.run import Pieces
from pipesd.edge.session import EdgeSession

T = TypeVar("T")


class AsyncEdgeSession:
    """As `EdgeSession`, with `async with` and `async for`:

        async with AsyncEdgeSession(EdgeConfig(draft=...)) as session:
            async for piece in session.generate("Once upon a time"):
                print(piece.text, end="")

    Cancelling the task that awaits a piece cancels the generation; leaving the loop does, too. The session can be used
    again at once. Loading, waiting and drafting happen in the session's thread, one thing after the other.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        drafter: Drafter | None = None,
        tokeniser: Tokeniser | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._session = EdgeSession(config, drafter=drafter, tokeniser=tokeniser, clock=clock)
        self._thread = ThreadPoolExecutor(1, "pipesd-edge")
        self._closed = False

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the last generation; these properties are those of `EdgeSession`."""
        return self._session.stats

    @property
    def text(self) -> str:
        return self._session.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._session.token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return self._session.logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._session.finish_reason

    @property
    def seed(self) -> int | None:
        return self._session.seed

    @property
    def committed(self) -> tuple[int, ...]:
        return self._session.committed

    @property
    def tokeniser(self) -> Tokeniser:
        return self._session.tokeniser

    def generate(self, prompt: str | Sequence[int], *, answer: bool = False, **options: Any) -> AsyncPieces:
        """As `EdgeSession.generate`; `aclose` of the result ends the generation early."""
        return AsyncPieces(self._session.generate(prompt, answer=answer, **options), self._do)

    def cancel(self) -> None:
        """As `EdgeSession.cancel`."""
        self._session.cancel()

    async def open(self) -> None:
        """As `EdgeSession.open`. A task that is cancelled here leaves a session that is closed."""
        cancelled = threading.Event()
        try:
            await self._do(partial(self._session.open, cancelled))
        except asyncio.CancelledError:
            cancelled.set()
            self._session.cancel()
            self._thread.submit(self._session.close)
            self._end()
            raise

    async def close(self) -> None:
        """As `EdgeSession.close`."""
        if not self._closed:
            self._session.cancel()
            try:
                await asyncio.shield(self._do(self._session.close))
            finally:
                self._end()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except Exception:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _do(self, step: Callable[[], T]) -> T:
        """Take a step in the session's thread, or here once it is closed: then nothing is left that takes time."""
        if self._closed:
            return step()
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)

    def _end(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False)


class AsyncPieces(AsyncIterator[Piece]):
    """The output of one generation, piece by piece; to drop it ends the generation."""

    def __init__(self, pieces: Pieces, do: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]) -> None:
        self._pieces = pieces
        self._do = do

    async def __anext__(self) -> Piece:
        try:
            piece: Piece | None = await self._do(partial(next, self._pieces, None))
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the generation here; a step that runs in the session's thread ends first."""
        self._pieces.cancel()
        await asyncio.shield(self._do(self._pieces.close))
