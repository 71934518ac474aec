"""Files that a run writes: a mistyped path costs nothing that was there, a full disk is one line."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("strategy", ["vanilla", "cloud", "local"])
def test_an_event_log_holds_nothing_of_the_prompt(tmp_path: Path, strategy: str) -> None:
    file = tmp_path / "events"
    prompt = [301, 305, 309]  # ids that the output never has
    with serving() as cloud, edge(cloud.address, strategy=strategy, events=str(file)) as session:
        ids_of(session, prompt, max_tokens=20)
        ids_of(session, [*session.committed, 313], max_tokens=20)
    written = file.read_text()
    assert written and not [token for token in (*prompt, 313) if re.search(rf"\b{token}\b", _ids(written))]


def _ids(log: str) -> str:
    """The lists and single ids of a log; other numbers may equal an id by chance."""
    return " ".join(re.findall(r'"(?:ids|id|token_ids|stop_ids)":(\[[^\]]*\]|\d+)', log))


@pytest.mark.parametrize("path", ["~nobody-of-this-name/events", "a\0b", "no/such/folder/events", "."])
def test_an_event_log_that_cannot_be_made_is_one_line(path: str) -> None:
    with pytest.raises(UsageError, match="event file"):
        edge("", events=path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("count", [5, 400])
def test_a_full_disk_is_said_once_and_the_text_so_far_stays(count: int) -> None:
    """Found at the end, or while it is written."""
    with serving() as cloud:
        session = edge(cloud.address, strategy="vanilla", events="/dev/full")  # few events before the first token
        with pytest.raises(UsageError, match="event file '/dev/full': No space left"):
            with session:
                ids_of(session, PROMPT, max_tokens=count)
        assert list(session.token_ids) == said(LAW, PROMPT, len(session.token_ids)) and session.token_ids
