"""Whether a model will fit, before it is loaded: what it needs against what the machine has left. No torch here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipesd.cloud.progress import bytes_text
from pipesd.cloud.shape import ModelShape
from pipesd.errors import UsageError

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "none"
_FIXED_BYTES = 96 << 20  # beside the tensors: pieces, small tensors, and up to 64 MB of freed memory that glibc keeps


@dataclass(frozen=True)
class Need:
    """Bytes that a loaded model takes, and the most that loading takes at once on the host and on the device."""

    weights: int
    rotation: int
    cache: int  # of all sessions at their longest; it grows as they do
    largest: int  # the largest fused matrix in float32, which exists while it is placed

    @property
    def loading(self) -> int:
        """At the worst moment of loading, where the weights stay on the host."""
        return self.weights + self.rotation + self.largest + _FIXED_BYTES

    @property
    def staging(self) -> int:
        """At the worst moment of loading on the host, where the weights go to a device."""
        return self.largest * 3 // 2 + self.rotation + _FIXED_BYTES  # it is rounded to the device's precision here

    @property
    def on_device(self) -> int:
        """On a device of its own."""
        return self.weights + self.rotation + _FIXED_BYTES


def need_of(shape: ModelShape, item_bytes: int, slots: int, *, packed: bool) -> Need:
    """What a model of this shape takes with weights of `item_bytes`. `shape.context`: the positions that are served.

    `packed`: matrices are kept in a form of their own, so that a tied output layer is a second copy of the embeddings.
    """
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    qkv, gate_up = (query + 2 * key) * shape.hidden, 2 * shape.feed_forward * shape.hidden
    layer = qkv + gate_up + (query + shape.feed_forward) * shape.hidden
    table = shape.width * shape.hidden
    tables = 1 if shape.tied and not packed else 2
    return Need(
        weights=(shape.layers * layer + tables * table) * item_bytes,
        rotation=shape.context * (shape.head_size // 2) * 8,
        cache=slots * shape.layers * 2 * key * shape.context * item_bytes,
        largest=max(qkv, gate_up, table, shape.feed_forward * shape.hidden) * 4,
    )


@dataclass(frozen=True)
class Free:
    """Memory that is left, and what bounds it: "this machine", "this container" or "cuda:0"."""

    bytes: int
    where: str


def check_fits(name: str, need: int, cache: int, free: Iterable[Free], advice: str) -> None:
    """UsageError, one line with both numbers, if `need` is more than the least of `free`. Unknown memory fits."""
    least = min(free, key=lambda each: each.bytes, default=None)
    if least is not None and need > least.bytes:
        raise UsageError(
            f"{name}: needs {bytes_text(need)} to load, {least.where} has {bytes_text(least.bytes)} free "
            f"(its sessions take up to {bytes_text(cache)} more); {advice}"
        )


def free_on_host() -> list[Free]:
    """What the system and the container of this process have left; empty where neither says so."""
    found = []
    if sys.platform.startswith("linux"):
        available = available_bytes(_text(Path("/proc/meminfo")))
        if available is not None:
            found.append(Free(available, "this machine"))
        contained = container_free(_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))
        if contained is not None:
            found.append(Free(contained, "this container"))
    elif "SC_PHYS_PAGES" in os.sysconf_names:  # what is in use there is not told: more than all of it cannot fit
        found.append(Free(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine in all"))
    return found


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of a text like /proc/meminfo; None if it is not there."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def container_free(own: str, root: Path) -> int | None:
    """What the control groups of a process leave it, from a text like /proc/self/cgroup and the folder `root`.

    Both versions: the least over the group and all above it, for any of them may have a limit. Pages of files count as
    free: they go when they must. None: no limit.
    """
    left = []
    for line in own.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        # inside a container the path is often the host's, and what is mounted at the top is the group itself
        for folder in [group, *group.parents]:
            if folder.is_relative_to(top):
                left += _left(folder, *names)
    return min(left, default=None)


def _left(folder: Path, limit: str, usage: str, cached: str) -> list[int]:
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= _NO_LIMIT:
        return []
    found = re.search(rf"^{cached} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return [max(0, int(most) - int(used) + (int(found[1]) if found else 0))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
