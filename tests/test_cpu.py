"""Thread defaults: affinity and control groups of both versions, as containers and service managers set them up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipesd.cpu import cgroup_cpus, usable_cpus

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "33 32 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A file system of our own with the given control groups."""
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [
        ("max 100000", None),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("200000 50000", 4.0),
        ("", None),
        ("?", None),
    ],
)
def test_version_2(tmp_path: Path, cpu_max: str, cpus: float | None) -> None:
    root = tree(tmp_path, "0::/", V2_MOUNT, {"sys/fs/cgroup/cpu.max": cpu_max})
    assert cgroup_cpus(root) == cpus
    assert usable_cpus(root) == min(len(os.sched_getaffinity(0)), max(1, int(cpus or 99)))


def test_version_2_takes_the_smallest_quota_on_the_way_up(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "700000 100000",
        "sys/fs/cgroup/user.slice/cpu.max": "100000 100000",
        "sys/fs/cgroup/user.slice/shell.scope/cpu.max": "max 100000",
        "sys/fs/cgroup/other.slice/cpu.max": "10000 100000",
    }
    assert cgroup_cpus(tree(tmp_path, "0::/user.slice/shell.scope", V2_MOUNT, files)) == 1.0


def test_version_1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "250000",
        "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    groups = "12:pids:/jobs\n4:cpu,cpuacct:/jobs\n3:cpuset:/\n1:name=systemd:/"
    assert cgroup_cpus(tree(tmp_path, groups, V1_MOUNT.format(root="/"), files)) == 2.5


def test_a_container_that_sees_the_hosts_names_has_its_own_group_mounted(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    groups = "4:cpu,cpuacct:/docker/0123abcd"
    for root in ("/docker/0123abcd", "/"):
        assert cgroup_cpus(tree(tmp_path, groups, V1_MOUNT.format(root=root), files)) == 1.5
    assert usable_cpus(tmp_path) == 1


def test_version_2_mounted_beside_version_1(tmp_path: Path) -> None:
    mounts = V1_MOUNT.format(root="/") + "\n42 32 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert cgroup_cpus(tree(tmp_path, "4:cpu,cpuacct:/\n0::/init.scope", mounts, files)) == 3.0


def test_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path) is None
    assert usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


def test_affinity_is_obeyed() -> None:
    one = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {{{one}}}); from pipesd.cpu import usable_cpus; print(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
