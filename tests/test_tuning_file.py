"""The file that searches are kept in: what it withstands, and that no run fails by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipesd.edge import tuning_file
from pipesd.edge.tuning_file import LARGEST_BYTES, MOST_KEYS, load, save
from pipesd.policy.search_space import Parameter
from pipesd.policy.tuner import Tuner

STATE = {"version": 1, "trials": [[{"a": 0.1}, 0.5], [{"a": 0.2}, None]]}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines told, as they come."""
    lines: list[str] = []
    monkeypatch.setattr(tuning_file.log, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_what_is_saved_is_loaded(tmp_path: Path, warnings: list[str]) -> None:
    path = str(tmp_path / "new" / "folder" / "tuning.json")
    assert load(path) is None
    assert save(path, {"pipesd, a, b": STATE})
    assert save(path, {"hsl, a, b": {"x": 1}})
    assert load(path) == {"pipesd, a, b": STATE, "hsl, a, b": {"x": 1}}
    assert save(path, {"pipesd, a, b": {"x": 2}})
    assert load(path) == {"hsl, a, b": {"x": 1}, "pipesd, a, b": {"x": 2}}
    assert os.listdir(tmp_path / "new" / "folder") == ["tuning.json"]
    assert not warnings


def test_a_search_goes_on_in_the_next_run(tmp_path: Path) -> None:
    path = str(tmp_path / "tuning.json")
    tuner = Tuner({"a": (0.0, 1.0), "n": Parameter(1, 9, integer=True)}, seed=3)
    for k in range(7):
        tuner.tell(tuner.ask(), None if k == 2 else 1.0 + k % 3)
    save(path, {"key": tuner.state()})
    states = load(path)
    assert states is not None
    again = Tuner.restore(states["key"])
    assert (again.ask(), again.best, again.samples_left) == (tuner.ask(), tuner.best, 9)


def test_the_longest_unused_keys_are_forgotten(tmp_path: Path) -> None:
    path = str(tmp_path / "tuning.json")
    for k in range(MOST_KEYS + 3):
        save(path, {f"key {k}": {"k": k}})
        save(path, {"key 0": {"k": 0}})
    states = load(path)
    assert states is not None and len(states) == MOST_KEYS
    assert "key 0" in states and f"key {MOST_KEYS + 2}" in states and "key 1" not in states


def full_states() -> dict[str, dict[str, object]]:
    tuner = Tuner({f"threshold number {k}": (0.0, 1.0) for k in range(4)})
    for k in range(80):
        tuner.tell({f"threshold number {name}": 1 / (k + name + 3) for name in range(4)}, 1 / (k + 3))
    return {f"{'k' * 200}{k}": tuner.state() for k in range(MOST_KEYS)}


def test_full_files_are_far_below_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert save(str(path), full_states())
    assert path.stat().st_size < LARGEST_BYTES / 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"pipesd_tuning": 1, "states": {"a": {', "damaged"),
        (b"[edge]\ncloud = 'tcp://'\n", "another kind"),
        (b"\xff\xfe\x00GGUF", "another kind"),
        (b"[1, 2]", "another kind"),
        (b'{"pipesd_tuning": true, "states": {}}', "another kind"),
        (b'{"states": {}}', "another kind"),
        (b'{"pipesd_tuning": 2, "states": {}}', "version 2"),
        (b'{"pipesd_tuning": 1, "states": [1]}', "damaged"),
        (b'{"pipesd_tuning": 1, "states": {"a": 3}}', "damaged"),
        (b"[" * 100_000, "damaged"),
        (b" " * (LARGEST_BYTES + 1), "more than"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_and_kept(
    tmp_path: Path, warnings: list[str], content: bytes, says: str
) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    assert load(str(path)) is None
    assert not save(str(path), {"key": STATE})
    assert path.read_bytes() == content
    assert [str(path) in line and says in line and "\n" not in line for line in warnings] == [True, True]


@pytest.mark.parametrize("content", [b"", b"\0" * 300])
def test_what_lost_power_leaves_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    assert load(str(path)) is None
    assert save(str(path), {"key": STATE})
    assert load(str(path)) == {"key": STATE}


def test_places_that_no_file_can_have(tmp_path: Path, warnings: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "file" / "below", "/dev/zero", "a\0b"):
        warnings.clear()
        assert load(str(path)) is None
        assert not save(str(path), {"key": STATE})
        assert len(warnings) == 2, path


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "tuning.json")
    save(path, {"key": STATE})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not save(path, {"key": {"x": 1}})
    assert len(warnings) == 1 and "No space left" in warnings[0]
    assert load(path) == {"key": STATE}  # as it was, and nothing beside it
    assert os.listdir(tmp_path) == ["tuning.json"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "tuning.json"
    link.symlink_to(tmp_path / "real" / "kept.json")
    assert save(str(link), {"key": STATE})
    assert link.is_symlink() and (tmp_path / "real" / "kept.json").exists()


def test_two_processes_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    program = (
        "import sys; from pipesd.edge.tuning_file import save\n"
        "for k in range(25): assert save(sys.argv[1], {sys.argv[2]: {'k': k, 'long': 'x' * 20000}})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("a", "b")]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            assert set(json.loads(path.read_bytes())["states"]) <= {"a", "b"}
    assert [writer.wait() for writer in writers] == [0, 0]
    assert os.listdir(tmp_path) == ["tuning.json"]
    states = tuning_file.load(str(path))
    assert states and 24 in {state["k"] for state in states.values()}
