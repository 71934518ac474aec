"""The only import of llama-cpp-python, its checks, and llama.cpp's log.

Everything that uses the binding asks `native()` for it: the low-level module, one Python function for each function of
llama.h. The binding follows llama.cpp and renames functions between releases, so its version and every name that the
edge uses are checked here, once, rather than in the middle of a generation.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from collections import deque
from functools import cache
from typing import Any

from pipesd.errors import UsageError

OLDEST_VERSION = (0, 3, 30)
FIRST_UNSUPPORTED_VERSION = (0, 4)
SUPPORTED = "0.3.30 or newer, below 0.4"
INSTALL = "pip install 'llama-cpp-python>=0.3.30,<0.4'"

NAMES = (
    "llama_backend_init llama_supports_gpu_offload llama_log_callback llama_log_set "
    "llama_model_default_params llama_model_load_from_file llama_model_free llama_model_get_vocab "
    "llama_model_meta_val_str llama_model_chat_template llama_model_n_ctx_train llama_model_has_encoder "
    "llama_model_has_decoder llama_model_is_diffusion llama_vocab_n_tokens llama_vocab_type llama_vocab_bos "
    "llama_vocab_get_add_bos llama_vocab_get_attr llama_vocab_is_eog llama_token_to_piece llama_tokenize "
    "llama_context_default_params llama_init_from_model llama_free llama_n_ctx llama_get_memory llama_memory_clear "
    "llama_memory_seq_rm llama_memory_seq_pos_min llama_memory_seq_pos_max llama_batch_init llama_batch_free "
    "llama_decode llama_get_logits_ith"
).split()
FIELDS = {
    "llama_model_params": "vocab_only n_gpu_layers".split(),
    "llama_context_params": "n_ctx n_batch n_ubatch n_seq_max n_threads n_threads_batch swa_full no_perf".split(),
}

_ERROR, _CONTINUED = 4, 5  # enum ggml_log_level
_FUNCTION = re.compile(r"^\w+: (error loading model: )?")


class NativeLog:
    """Where llama.cpp's log goes: nowhere, but its last complaints are kept to explain a failure.

    `shown = True` prints all of it on stderr, for debugging.
    """

    def __init__(self) -> None:
        self.shown = False
        self._complaints: deque[str] = deque(maxlen=8)
        self._level = 0

    def take(self, level: int, text: bytes, _user_data: object = None) -> None:
        """Called by llama.cpp, from whichever thread logs."""
        line = text.decode("utf-8", "replace")
        if self.shown:
            sys.stderr.write(line)
        if level != _CONTINUED:
            self._level = level
        if self._level == _ERROR and line.strip():
            self._complaints.append(_FUNCTION.sub("", line.strip()))

    def forget(self) -> None:
        """Drop the complaints so far."""
        self._complaints.clear()

    def complaint(self) -> str:
        """The first complaint since the last `forget`; those that follow only say that the whole failed."""
        return self._complaints[0] if self._complaints else "it does not say why"


log = NativeLog()


@cache
def native() -> Any:
    """The low-level module of llama-cpp-python, checked and initialised, its log silenced.

    Raises `UsageError` when the package is missing, outside the supported range or lacks a name.
    """
    try:
        version = importlib.metadata.version("llama_cpp_python")
        from llama_cpp import llama_cpp
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(f"llama-cpp-python is not installed; the edge needs {SUPPORTED}: {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        # the binding raises RuntimeError where it finds its library but cannot load it
        raise UsageError(f"llama-cpp-python cannot be imported ({error}); install it again: {INSTALL}") from error
    check_binding(llama_cpp, version)
    callback = llama_cpp.llama_log_callback(log.take)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    log.callback = callback  # type: ignore[attr-defined]  # llama.cpp keeps the pointer, so this must live as long
    llama_cpp.llama_backend_init()
    return llama_cpp


def check_binding(module: Any, version: str) -> None:
    """Raises `UsageError` unless `version` is supported and `module` has every name and field that the edge uses."""
    number = _number(version)
    if not OLDEST_VERSION <= number < FIRST_UNSUPPORTED_VERSION:
        raise UsageError(f"llama-cpp-python {version} is installed, the edge needs {SUPPORTED}: {INSTALL}")
    missing = [name for name in NAMES if not hasattr(module, name)]
    for structure, fields in FIELDS.items():
        known = {field[0] for field in getattr(getattr(module, structure, None), "_fields_", ())}
        missing += [f"{structure}.{field}" for field in fields if field not in known]
    if missing:
        raise UsageError(
            f"llama-cpp-python {version} lacks {', '.join(missing)}; the edge needs {SUPPORTED}: {INSTALL}"
        )


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.3.36+cu124" gives (0, 3, 36)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((i for i, character in enumerate(part) if not character.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
