"""How much memory this process may still take: what the system has left, and what its container does. Standard library
only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "none"


@dataclass(frozen=True)
class Free:
    """Memory that is left, and what bounds it: "this machine", "this container" or "cuda:0"."""

    bytes: int
    where: str


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


def all_on_host() -> list[Free]:
    """What the system has in all, and what the container of this process may take; empty where neither says so."""
    found = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(Free(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"))
    limit = container_limit(_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))
    return found if limit is None else [*found, Free(limit, "this container")]


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of a text like /proc/meminfo; None if it is not there."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def container_free(own: str, root: Path) -> int | None:
    """What the control groups of a process leave it, from a text like /proc/self/cgroup and the folder `root`.

    Both versions: the least over the group and all above it, for any of them may have a limit. Pages of files count as
    free: they go when they must. None: no limit.
    """
    return min((left for _, left in _groups(own, root)), default=None)


def container_limit(own: str, root: Path) -> int | None:
    """The least limit of the control groups of a process, told as in `container_free`. None: no limit."""
    return min((limit for limit, _ in _groups(own, root)), default=None)


def _groups(own: str, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that has one, and what it leaves."""
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
                yield from _left(folder, *names)


def _left(folder: Path, limit: str, usage: str, cached: str) -> list[tuple[int, int]]:
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= _NO_LIMIT:
        return []
    found = re.search(rf"^{cached} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return [(int(most), max(0, int(most) - int(used) + (int(found[1]) if found else 0)))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
