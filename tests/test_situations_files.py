"""Files that a run writes: a mistyped path costs nothing that was there, a full disk is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from clouds import LAW, edge, ids_of, said, serving

from pipesd.errors import UsageError

PROMPT = "Once upon a time"


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", b"my diary\n", b'{"text": "an output"}\n'])
def test_an_event_log_never_replaces_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "draft.gguf"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"draft\.gguf.*is no event log"):
        edge("", events=str(file))
    assert file.read_bytes() == content


def test_an_event_log_replaces_the_last_one(tmp_path: Path) -> None:
    file = tmp_path / "events"
    file.touch()
    sizes = []
    for count in (40, 5):
        with serving() as cloud, edge(cloud.address, events=str(file)) as session:
            ids_of(session, PROMPT, max_tokens=count)
        sizes.append(file.stat().st_size)
    assert 0 < sizes[1] < sizes[0]


@pytest.mark.parametrize("path", ["~nobody-of-this-name/events", "a\0b", "no/such/folder/events", "."])
def test_an_event_log_that_cannot_be_made_is_one_line(path: str) -> None:
    with pytest.raises(UsageError, match="event file"):
        edge("", events=path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("count", [5, 400])
def test_a_full_disk_is_said_once_and_the_text_so_far_stays(count: int) -> None:
    """Found at the end, or while it is written."""
    with serving() as cloud:
        session = edge(cloud.address, events="/dev/full")
        with pytest.raises(UsageError, match="event file '/dev/full': No space left"):
            with session:
                ids_of(session, PROMPT, max_tokens=count)
        assert list(session.token_ids) == said(LAW, PROMPT, len(session.token_ids)) and session.token_ids
