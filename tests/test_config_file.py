"""Writing into a configuration file: the keys asked for change, nothing else does, or the file stays as it is."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesd.edge.config_file import check_file, update_file
from pipesd.errors import UsageError

VALUES = {"alpha-ms": 20.5, "beta-ms": 0.0, "gap-ms": 0.25}


def updated(folder: Path, text: str, values: dict[str, Any] = VALUES) -> str:
    file = folder / "config.toml"
    file.write_bytes(text.encode())
    check_file(str(file), "plan")
    assert file.read_bytes() == text.encode(), "checking writes nothing"
    update_file(str(file), "plan", values)
    return file.read_bytes().decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[plan]\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n"),
        (
            "# mine\n[edge]\nthreads = 3 # few\n",
            "# mine\n[edge]\nthreads = 3 # few\n\n[plan]\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n",
        ),
        ("[edge]\nthreads = 3", "[edge]\nthreads = 3\n\n[plan]\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n"),
        (
            "[plan] # of home\nwindow = 9\nbeta_ms = 7 # guessed\n\n# the rest\n[edge]\nthreads = 3\n",
            "[plan] # of home\nwindow = 9\nbeta-ms = 0.0 # guessed\nalpha-ms = 20.5\ngap-ms = 0.25\n\n"
            "# the rest\n[edge]\nthreads = 3\n",
        ),
        ("[plan]", "[plan]\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n"),
        ("[plan]\nwindow = 9", "[plan]\nwindow = 9\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n"),
        (
            '[ "plan" ]\n  "alpha-ms" = 1\ngap_ms=3\n"gap-ms" = 2\n',
            '[ "plan" ]\nalpha-ms = 20.5\ngap-ms = 0.25\nbeta-ms = 0.0\n',
        ),
        ("[plan]\r\nalpha-ms = 1\r\n", "[plan]\r\nalpha-ms = 20.5\r\nbeta-ms = 0.0\r\ngap-ms = 0.25\r\n"),
        ("\ufeff[plan]\nalpha-ms = 1\n", "\ufeff[plan]\nalpha-ms = 20.5\nbeta-ms = 0.0\ngap-ms = 0.25\n"),
    ],
)
def test_lines_of_the_table_change_and_no_others(before: str, after: str, tmp_path: Path) -> None:
    assert updated(tmp_path, before) == after
    assert updated(tmp_path, after) == after, "saving twice is saving once"


def test_a_value_of_none_takes_the_key_out(tmp_path: Path) -> None:
    assert updated(tmp_path, "[plan]\ngap-ms = 1 # old\ngap_ms = 2\nwindow = 3\n", {"gap-ms": None}) == (
        "[plan]\nwindow = 3\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "plan = { alpha-ms = 1 }\n",
        "plan.alpha-ms = 1\n",
        "plan = 3\n",
        'note = """\n[plan]\nalpha-ms = 2\n"""\n',
        "[[plan]]\nalpha-ms = 1\n",
        "[plan]\nalpha-ms = [\n1,\n2]\n",
        '[plan]\nother = """\nalpha-ms = 3\n"""\n',
    ],
)
def test_forms_that_lines_cannot_change_are_refused_and_stay(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    tomllib.loads(text)
    with pytest.raises(UsageError, match=r"table 'plan' is written in a form that cannot be changed here"):
        update_file(str(file), "plan", VALUES)
    assert file.read_text() == text and os.listdir(tmp_path) == ["config.toml"]


@pytest.mark.parametrize("content", [b"alpha = = 1\n", b"\xff\xfe", b"GGUF\0\0\0", b"[" * 100_000, b"<html>"])
def test_what_is_no_toml_is_refused_and_stays(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    for attempt in (lambda: check_file(str(file), "plan"), lambda: update_file(str(file), "plan", VALUES)):
        with pytest.raises(UsageError, match=r"configuration file .*model.gguf: .*(not TOML|too deep)"):
            attempt()
    assert file.read_bytes() == content


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "config.toml"):
        with pytest.raises(UsageError, match="configuration file"):
            check_file(str(path), "plan")
        with pytest.raises(UsageError, match="configuration file"):
            update_file(str(path), "plan", VALUES)
    assert os.listdir(tmp_path) == []


def test_permissions_stay_and_links_are_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_text("[edge]\n")
    real.chmod(0o600)
    link.symlink_to(real)
    update_file(str(link), "plan", VALUES)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o600
    assert tomllib.loads(real.read_text())["plan"] == VALUES
    fresh = tmp_path / "fresh.toml"
    update_file(str(fresh), "plan", VALUES)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o666 & ~mask
    assert sorted(os.listdir(tmp_path)) == ["fresh.toml", "link.toml", "real.toml"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[edge]\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device; save it elsewhere"):
        update_file(str(file), "plan", VALUES)
    assert file.read_text() == "[edge]\n" and os.listdir(tmp_path) == ["config.toml"]


LINES = st.lists(
    st.sampled_from(
        [
            "[plan]", "[edge]", "[plan.deep]", "alpha-ms = 1", "alpha_ms = 2.5 # c", "window = 3", "", "  # comment",
            'text = "a # [plan]"', "'gap-ms' = 4", "list = [1, 2]", '"beta_ms"=0', "name = '''x'''", "[link] # l",
        ]
    ),
    max_size=12,
)  # fmt: skip


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_whatever_stands_there(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, last: bool
) -> None:
    text = end.join(lines) + (end if last else "")
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(text.encode())
    try:
        before = tomllib.loads(text)
    except ValueError:
        with pytest.raises(UsageError):
            update_file(str(file), "plan", VALUES)
        assert file.read_bytes() == text.encode()
        return
    try:
        update_file(str(file), "plan", VALUES)
    except UsageError:
        assert file.read_bytes() == text.encode()
        return
    after = tomllib.loads(file.read_text())
    plan = after.pop("plan")
    old = before.pop("plan", {})
    assert after == before
    assert {key: plan[key] for key in VALUES} == VALUES
    kept = {key: value for key, value in old.items() if key.replace("_", "-") not in VALUES}
    assert {key: value for key, value in plan.items() if key not in VALUES} == kept
    comments = [line for line in lines if line.strip().startswith("#")]
    assert [line for line in file.read_text().splitlines() if line.strip().startswith("#")] == comments


def test_a_device_and_a_pipe_are_refused_and_stay(tmp_path: Path) -> None:
    """Not even root may lose a device by it, and a pipe without a writer is not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe, tmp_path):
        before = path.stat()
        with pytest.raises(UsageError, match=r"ordinary file|directory"):
            check_file(str(path), "plan")
        with pytest.raises(UsageError, match=r"ordinary file|directory"):
            update_file(str(path), "plan", {"a": 1.0})
        assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
