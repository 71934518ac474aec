"""Loading a target: device and precision, the decoder in the form that this machine is fastest with, a look at it."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipesd.cloud import huge_pages
from pipesd.cloud.checkpoint import Checkpoint, open_checkpoint
from pipesd.cloud.kv_cache import BUCKET, KVCache
from pipesd.cloud.memory import check_all_fit, check_fits, need_of, remedy, room_for_cache
from pipesd.cloud.model import Decoder, Linear, PackedLinear, PlainLinear, TiledLinear, packing_works
from pipesd.cloud.paged_cache import PagedCache, session_bytes
from pipesd.cloud.pass_batches import torch_threads
from pipesd.cloud.placing import DTYPES, checked_number, chosen_device, chosen_dtype, in_16_bits, why_no_kernels
from pipesd.cloud.progress import bytes_text
from pipesd.cloud.steps import steps_for
from pipesd.cloud.target import TorchTarget, growing_bytes, new_cache, working_bytes
from pipesd.core import ModelInfo, Vocabulary
from pipesd.errors import UsageError
from pipesd.free_memory import Free, all_on_host, free_on_host
from pipesd.model_shape import ModelShape

MOST_UNASKED_CONTEXT = 1 << 22  # positions; their rotations alone take a gigabyte or two
_log = logging.getLogger("pipesd.cloud")


def load_target(
    path: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    slots: int = 8,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    exact: bool | None = None,
    copies: int = 1,
    say: Callable[[str], None] = _log.warning,
) -> TorchTarget:
    """Loads the GGUF file or Hugging Face folder at `path` as a target with `slots` sessions of up to `context`
    positions (None: the model's).

    `device`: auto (CUDA if there is any), cpu, cuda or cuda:N. `dtype`: auto (float32 on the CPU, the file's on CUDA),
    float32, bfloat16 or float16. `threads`: torch threads of a pass, None: 1. `progress(done_bytes, all_bytes)` is
    called per tensor. `exact`: row-invariant (`target`); None: on the CPU with one thread, where it costs little.
    `copies`: workers of this machine that load the same, each for itself. `say` takes warnings. UsageError for what
    cannot be served, and, before any weight is read, for what would not fit.
    """
    checkpoint = open_checkpoint(path)
    place = chosen_device(device)
    precision = chosen_dtype(dtype, checkpoint.file_dtype, place, say)
    threads = checked_number("threads", 1 if threads is None else threads, 1, None)
    slots = checked_number("slots", slots, 1, None)
    trained = checkpoint.shape.context
    if context is None and trained > MOST_UNASKED_CONTEXT:
        raise UsageError(
            f"{checkpoint.path}: was trained for {trained} positions, more than fits; ask for fewer with --context"
        )
    context = checked_number("context", trained if context is None else context, 2, most_context(checkpoint.shape))
    checkpoint = replace(checkpoint, shape=replace(checkpoint.shape, context=context))
    exact = exact is not False and threads == 1 if place.type == "cpu" else exact is True
    kind = (place, DTYPES[precision], checkpoint.shape.cache(context))
    if place.type == "cuda" and (why := why_no_kernels(*kind)) is not None:
        say(f"{why}: passes on {place} are not recorded, and slower")
    _check_memory(checkpoint, place, DTYPES[precision], slots, copies)
    files = "1 file" if checkpoint.files == 1 else f"{checkpoint.files} files"
    _log.info("loading %s: %s from %s", checkpoint.path, bytes_text(checkpoint.size_bytes), files)
    with torch.inference_mode(), torch_threads(threads), _named_shortage(checkpoint, place, copies):
        decoder = _load(checkpoint, place, DTYPES[precision], exact, progress, say)
        cache = new_cache(
            checkpoint.shape.cache(context),
            slots,
            device=place,
            dtype=DTYPES[precision],
            exact=exact,
            room=_room(checkpoint.shape, place, DTYPES[precision], copies),
            say=say,
        )
    info = ModelInfo(
        name=checkpoint.name,
        vocabulary_size=checkpoint.vocabulary.size,
        context=context,
        end_ids=checkpoint.end_ids,
        fingerprint=checkpoint.fingerprint(precision, place.type),
        device=str(place),
        dtype=precision,
    )
    target = TorchTarget(decoder, cache, info, checkpoint.vocabulary, threads=threads, exact=exact)
    with _named_shortage(checkpoint, place, copies):
        agree = not exact or rows_agree(decoder, threads)
    if not agree:
        target.invariant = False
        say(
            f"WARNING: on {'this CPU' if place.type == 'cpu' else place} the bits of a row depend on the pass that it "
            f"shares (torch {torch.__version__}); the output may leave the target's own at near ties"
        )
    with _named_shortage(checkpoint, place, copies):
        target.prepare(lambda done, wanted: _log.info("recorded pass %d of %d", done, wanted))
    return target


@contextmanager
def _named_shortage(checkpoint: Checkpoint, device: torch.device, copies: int) -> Iterator[None]:
    """UsageError where the body finds the device full: by other programs, since what is needed was counted before."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = bytes_text(torch.cuda.mem_get_info(device)[0])
        fewer = " or fewer --workers" if copies > 1 else ""
        raise UsageError(
            f"{checkpoint.path}: {device} has {free} left, too little to go on loading; end what else uses it, or ask "
            f"for a smaller --context{fewer}"
        ) from error


def most_context(shape: ModelShape) -> int:
    """The longest context that may be asked for: dynamic scaling goes beyond what a model does unasked."""
    return int(shape.context * shape.rope.factor) if shape.rope.kind == "dynamic" else shape.context


def _check_memory(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, slots: int, copies: int) -> None:
    need = need_of(checkpoint.shape, dtype.itemsize, slots, packed=device.type == "cpu")
    half = need_of(checkpoint.shape, 2, slots, packed=device.type == "cpu") if dtype == torch.float32 else None
    name, on_host, half_name = str(checkpoint.path), free_on_host(), in_16_bits(device)
    if device.type == "cpu":
        free, there = on_host, all_on_host()
        alone, alone_in_half = need.loading, half.loading if half else None
    else:
        free, there = ([Free(count, str(device))] for count in torch.cuda.mem_get_info(device))
        alone, alone_in_half = need.in_place, half.in_place if half else None
    check_fits(name, alone, need.cache, free, remedy(alone_in_half, free, copies, half_name))
    advice = remedy(copies * half.in_place if half else None, there, copies, half_name)
    check_all_fit(name, need.in_place, need.cache, copies, there, advice)
    if device.type != "cpu":
        _check_session(checkpoint, device, dtype, copies)
        check_fits(name, need.staging, 0, on_host, "use another machine")


def _check_session(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, copies: int) -> None:
    """UsageError if one session at its longest does not fit behind the weights: with the longest that does."""
    free, there = torch.cuda.mem_get_info(device)
    in_pages = why_no_kernels(device, dtype, checkpoint.shape.cache(checkpoint.shape.context)) is None

    def lacking(context: int) -> int:
        """Bytes missing for one session of so many positions; not more than 0 where it fits."""
        shape = replace(checkpoint.shape, context=context)
        in_place = need_of(shape, dtype.itemsize, 1, packed=False).in_place
        room = room_for_cache(free - in_place, there, in_place, working_bytes(shape, dtype), copies)
        return taken(context) - room

    def taken(context: int) -> int:
        shape = checkpoint.shape.cache(context)
        return session_bytes(shape, 1, dtype) + (0 if in_pages else growing_bytes(shape, dtype))

    context = checkpoint.shape.context
    if (missing := lacking(context)) <= 0:
        return
    longest = bisect_right(range(2, context + 1), 0, key=lacking) + 1
    least = taken(context)
    advice = f"ask for --context {longest}" if longest >= 2 else "use a smaller model or a larger device"
    growing = "" if in_pages else ", twice while it grows"
    raise UsageError(
        f"{checkpoint.path}: a session of {context} positions takes {bytes_text(least)} of keys and values{growing}, "
        f"{device} has {bytes_text(max(0, least - missing))} for it behind the weights and the passes; {advice}"
    )


def _room(shape: ModelShape, device: torch.device, dtype: torch.dtype, copies: int) -> int | None:
    """Bytes that the cache may take when the weights are in their place; None where it grows with its sessions."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # what loading took and gave back is free for the cache
    free, there = torch.cuda.mem_get_info(device)
    in_place = need_of(shape, dtype.itemsize, 1, packed=False).in_place
    return room_for_cache(free, there, in_place, working_bytes(shape, dtype), copies)


def rows_agree(decoder: Decoder, threads: int = 1) -> bool:
    """Whether the same rows get the same bits in passes of several shapes, alone and with mates: one layer, the head.

    The positions cross from one bucket of keys into the next; a window hides a bucket from them.
    """
    table = decoder.embedding
    decoder = decoder.shallow(BUCKET // 2)
    shape = decoder.shape.cache(min(decoder.shape.context, (2 if decoder.shape.windows else 1) * BUCKET + 6))
    cache: KVCache | PagedCache
    if table.device.type == "cpu":
        cache = KVCache(shape, 3, device=table.device, dtype=table.dtype, exact=True)
    else:
        cache = new_cache(shape, 3, device=table.device, dtype=table.dtype, exact=True, room=None, say=_log.debug)
    info = ModelInfo("", decoder.shape.width, shape.context, (), b"", str(table.device), "")
    target = TorchTarget(decoder, cache, info, Vocabulary(()), threads=threads, exact=True)
    draw = np.random.default_rng(0)
    ids = draw.integers(decoder.shape.width, size=shape.context).tolist()
    late = max(0, shape.context - 12)
    target.forward([(0, ids[:late], 0), (1, ids[:late][:1], 0)])
    target.forward([(1, ids[:late][1:3], 0)])
    target.forward([(2, ids[:7], 0), (1, ids[:late][3:], 0)])
    target.truncate(2, 0)
    whole = target.forward([(0, ids[late:], len(ids) - late)])[0]
    parts = []
    for start, end in pairwise([late, late + 1, late + 3, late + 7, len(ids)]):
        part = ids[start:end]
        mates = [(2, ids[:2], 0)] if len(part) == 2 else []
        parts.append(target.forward([*mates, (1, part, len(part))])[-1])
    return bool(np.array_equal(whole, np.concatenate(parts)))


def _load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
    progress: Callable[[int, int], None] | None,
    say: Callable[[str], None],
) -> Decoder:
    done = 0

    def weight(name: str) -> Tensor:
        nonlocal done
        values = checkpoint.weight(name)
        assert values is not None, f"open_checkpoint let a file without {name} pass"
        if not torch.isfinite(values.sum()):  # one number that is none makes the sum none
            raise UsageError(
                f"{checkpoint.path}: tensor {name} has values that are no finite numbers; copy or download it again"
            )
        done += checkpoint.tensor_bytes(name)
        if progress is not None:
            progress(done, checkpoint.size_bytes)
        return values

    shape = checkpoint.shape
    linear: Callable[[Tensor, Tensor | None], Linear] = PlainLinear
    if device.type == "cpu":
        if packing_works((shape.hidden, shape.feed_forward, shape.heads * shape.head_size), dtype):
            linear = PackedLinear
        else:
            linear = TiledLinear if exact else PlainLinear
            say(
                f"oneDNN's packed linear layers do not work here (torch {torch.__version__}, "
                f"{str(dtype).removeprefix('torch.')}); passes are slower, not less exact"
            )
    divisors = weight("rope_freqs.weight") if "rope_freqs.weight" in checkpoint.tensors else None
    decoder = Decoder(
        shape, weight, linear, device=device, dtype=dtype, rope_divisors=divisors, steps=steps_for(device)
    )
    if device.type == "cpu":
        huge_pages.gather(matrix.memory for matrix in decoder.matrices())
    return decoder
