"""SIGINT, SIGTERM and SIGHUP at the edge: the first ends what runs, which tells the cloud; the second ends the program.

Python acts on a signal between two of its own steps. A native call that takes long (a model that is loaded, a prompt
that is read, a write that nobody takes) would hold it up, so a thread watches too and ends a program that does not end
by itself in time.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any, Self

from pipesd.errors import Cancelled

PATIENCE_S = 1.3  # how long an interrupted program may take to end by itself
WORDS_S = 0.3  # and its last words
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SETTLED = b"\0"  # no signal has this number


class _Mood(Enum):
    """What a signal does."""

    RAISE = "raise KeyboardInterrupt"
    CANCEL = "call what ends the generation"
    NOTE = "leave a note: what runs is ending anyway"


class Interrupts:
    """For the life of a command, in the main thread. A signal raises KeyboardInterrupt until something else is said.

    `last_words` is called before a program that does not end by itself is ended.
    """

    def __init__(self, last_words: Callable[[], None] = lambda: None) -> None:
        self.last_words = last_words
        self._mood = _Mood.RAISE
        self._cancel: Callable[[], None] = lambda: None
        self._came: int | None = None  # the signal
        self._speaking = threading.Lock()
        self._spoken = False

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._handle)
            for number in NUMBERS
            if number != signal.SIGHUP or signal.getsignal(number) == signal.SIG_DFL  # else it is nohup's business
        }
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._lost_before = sys.unraisablehook
        sys.unraisablehook = self._lost
        self._thread = threading.Thread(target=self._watch, name="pipesd-interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mood = _Mood.NOTE
        sys.unraisablehook = self._lost_before
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if self._came is None else signal.SIG_DFL)
        os.close(self._writer)  # ends the thread
        self._thread.join()
        os.close(self._reader)

    @contextmanager
    def calling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """In here a signal calls `cancel`, as does one that was noted before; afterwards it is noted only."""
        self._cancel, self._mood = cancel, _Mood.CANCEL
        if self._came is not None:
            cancel()
        try:
            yield
        finally:
            self._mood = _Mood.NOTE

    @contextmanager
    def raising(self) -> Iterator[None]:
        """In here a signal raises KeyboardInterrupt, as does one that was noted before."""
        self._mood = _Mood.RAISE
        if self._came is not None:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._mood = _Mood.NOTE

    def speak(self) -> None:
        """From here on the last words are the caller's business."""
        with self._speaking:
            self._spoken = True

    def forgive(self) -> bool:
        """Whether to go on: no signal came, or SIGINT, which was meant for what has just ended."""
        if self._came not in (None, signal.SIGINT):
            return False
        if self._came is not None:
            os.write(self._writer, _SETTLED)
            self._came = None
            for number in self._before:
                signal.signal(number, self._handle)
        return True

    def _handle(self, number: int, _: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._came = number
        if self._mood is _Mood.RAISE:
            raise KeyboardInterrupt
        if self._mood is _Mood.CANCEL:
            self._cancel()

    def _lost(self, told: sys.UnraisableHookArgs) -> None:
        """A KeyboardInterrupt that came while native code called back, as llama.cpp does to log, cannot be raised
        through it. That is no error: the signal is noted, and the next step or the watching thread ends the program."""
        if self._came is None or not isinstance(told.exc_value, KeyboardInterrupt):
            self._lost_before(told)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)  # it is the main thread's wait that a signal is to end
        while came := os.read(self._reader, 1):
            if came == _SETTLED:
                continue
            in_time = select.select([self._reader], [], [], PATIENCE_S)[0]
            if in_time and os.read(self._reader, 1) in (b"", _SETTLED):
                continue
            with self._speaking:
                if not in_time and not self._spoken:
                    words = threading.Thread(target=self.last_words, daemon=True)
                    words.start()
                    words.join(WORDS_S)  # perhaps it is the output that nobody takes
                os._exit(Cancelled.exit_code)
