"""Compiled functions: arrays in, arrays out. numba is loaded at their first use or by `warmup`, never by an import.

Each kernel is a plain Python function that reads and writes what it is given by index only, so it runs as it is on
lists and compiled on arrays; nothing in it may be reordered, so both give the same bits. Where numba is absent or does
not work, the plain function is all there is.

Compiled code is kept by numba's own rules: in NUMBA_CACHE_DIR, else beside the source, else in the user's cache
folder; where none can be written it is compiled in every process. Its files are named by a digest of the kernel's
source file, the version of numba and the processor. numba itself tells old code from new by a stamp of the source, in
older versions its size and time, and replaces two files one after the other. With names of their own, processes that
differ in one of these never share a file, and those that do not write the same content. So a kernel must use nothing
from another file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

log = logging.getLogger("pipesd")


class Kernel:
    """A function in both forms. `signature` is that of the compiled one, as numba writes it."""

    def __init__(self, plain: Callable[..., Any], signature: str) -> None:
        self.plain = plain
        self._signature = signature
        self._compiled: Callable[..., Any] | None = None
        self._loaded = False

    def compiled(self) -> Callable[..., Any] | None:
        """The compiled form, or None where numba cannot be used. The first call loads or compiles it.

        From several threads at once it may be done more than once, with the same result.
        """
        if not self._loaded:
            self._compiled = _load(self.plain, self._signature)
            self._loaded = True
        return self._compiled

    def at_hand(self) -> Callable[..., Any]:
        """The compiled form if it has been loaded, else the plain one; loads nothing."""
        return self._compiled or self.plain


def warmup() -> bool:
    """Load or compile every kernel, so that no later call does; returns whether all are compiled. The first that cannot
    be ends it: what keeps numba from one keeps it from all."""
    from pipesd._kernels.confidence import OBSERVE
    from pipesd._kernels.race import RACE
    from pipesd._kernels.token_batches import PLAN

    return all(kernel.compiled() is not None for kernel in (PLAN, OBSERVE, RACE))


def _load(function: Callable[..., Any], signature: str) -> Callable[..., Any] | None:
    try:
        import numba  # type: ignore[import-untyped,unused-ignore]

        settings: Any = numba.config
        if settings.DISABLE_JIT:
            return None
    except Exception as error:  # noqa: BLE001 — an installation that is broken or does not fit numpy raises anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            _complain(error)
        return None
    try:
        return _compile(numba, _named_by_content(function, numba), signature, cache=True)
    except Exception as error:  # noqa: BLE001 — nowhere to write, a full disk, damaged files: then without a cache
        log.debug("compiled code is not kept (%s: %s)", type(error).__name__, error)
    try:
        return _compile(numba, function, signature, cache=False)
    except Exception as error:  # noqa: BLE001 — whatever the compiler's trouble is, the plain function does the same
        _complain(error)
        return None


def _compile(numba: Any, function: Callable[..., Any], signature: str, *, cache: bool) -> Callable[..., Any]:
    from numba.core import event  # type: ignore[import-untyped,unused-ignore]

    class Waiting(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: Any) -> None:  # which does not come where compiled code is found
            if not self.told:
                log.info("compiling %s with numba, a second or more: only where it was never done", name)
            self.told = True

        def on_end(self, event: Any) -> None:
            pass

    name = function.__name__.strip("_")
    with event.install_listener("numba:compile", Waiting()):
        compiled: Callable[..., Any] = numba.njit(signature, cache=cache)(function)
    return compiled


def _named_by_content(function: Callable[..., Any], numba: Any) -> FunctionType:
    """The function under a name, which becomes that of its cache files, that tells all that its machine code hangs on
    (numba adds the version of Python)."""
    from numba.core.registry import cpu_target  # type: ignore[import-untyped,unused-ignore]

    processor = cpu_target.target_context.codegen().magic_tuple()
    source = Path(function.__code__.co_filename).read_bytes()
    digest = hashlib.blake2b(repr((numba.__version__, processor)).encode() + source, digest_size=8).hexdigest()
    named = FunctionType(function.__code__, function.__globals__)
    named.__module__, named.__qualname__ = function.__module__, f"{function.__name__}_{digest}"
    return named


def _complain(error: Exception) -> None:
    log.warning("numba cannot be used (%s: %s): plain Python computes the same, slower", type(error).__name__, error)
