"""What this process may really use of the machine's processors: its affinity and the quota of its control group.

Standard library only. A machine's core count is the wrong default inside a container or under `taskset`: threads that
work in lock-step are throttled together as soon as there are more of them than the quota allows.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus(root: str | Path = "/") -> int:
    """Number of threads that can run at the same time, at least 1; a quota of 1.5 processors counts as 1.

    `root` is where `/proc` and `/sys` are looked for, so that a test can bring its own.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = cgroup_cpus(root)
    return max(1, count if quota is None else min(count, int(quota)))


def cgroup_cpus(root: str | Path = "/") -> float | None:
    """The smallest processor quota of this process's control group and those above it; None without one.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`), also where both are mounted. A group whose folder is
    not visible (a container that shares the host's names) counts as the one that is mounted.
    """
    root = Path(root)
    quotas = [
        quota
        for mount, group in _cpu_groups(root)
        for folder in _up_to(mount, group)
        if (quota := _quota(folder)) is not None
    ]
    return min(quotas, default=None)


def _cpu_groups(root: Path) -> list[tuple[Path, str]]:
    """(mounted folder, path of our group below it) of each hierarchy that may bound processor time."""
    groups: dict[str, str] = {}  # "" for version 2, "cpu" for version 1
    for line in _lines(root / "proc/self/cgroup"):
        _number, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            groups["cpu" if controllers else ""] = path
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mounted_root, mount_point = before.split()[3:5]
        kind, _source, options = [*after.split(), "", "", ""][:3]
        wanted = "" if kind == "cgroup2" else "cpu" if kind == "cgroup" and "cpu" in options.split(",") else None
        if wanted in groups:
            # a group outside of what is mounted ends at or above the mount, whose own files are always looked at
            below = os.path.normpath("/" + os.path.relpath(groups[wanted], mounted_root))
            found.append((root / mount_point.lstrip("/"), below))
    return found


def _up_to(mount: Path, group: str) -> list[Path]:
    """The folders of `group` and of every group above it, as far as they can be seen below `mount`."""
    parts = [part for part in group.split("/") if part]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota(folder: Path) -> float | None:
    """Processors allowed by one group, or None for no limit."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    if not words:
        words = _lines(folder / "cpu.cfs_quota_us")[:1] + _lines(folder / "cpu.cfs_period_us")[:1]
    if len(words) != 2:
        return None
    try:
        quota_us, period_us = float(words[0]), float(words[1])
    except ValueError:  # "max"
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
