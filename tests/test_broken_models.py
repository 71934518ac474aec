"""Model files whose metadata is odd: served, or refused in one line, on both sides; never an abort or a trace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipesd.edge.chat import ChatTemplate
from pipesd.errors import UsageError

gguf = pytest.importorskip("gguf")

from tiny import write_tiny  # noqa: E402


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a tiny model with one field replaced."""

    def make(key: str, value: Any) -> Path:
        write_header = gguf.GGUFWriter.write_header_to_file

        def replaced(writer: Any) -> None:
            kind = gguf.GGUFValueType.get_type(value) if isinstance(value, str) else writer.kv_data[0][key].type
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)
            write_header(writer)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", replaced)
        return write_tiny(tmp_path / "odd.gguf")

    return make


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_a_draft_model_with_hardly_any_context(odd: Callable[..., Path], context: int, tmp_path: Path) -> None:
    """llama.cpp ends the whole program if it is given more ids at once than its context holds."""
    pytest.importorskip("llama_cpp")
    from pipesd.edge.drafter import DraftContextFull, Drafter

    for path, asked in ((write_tiny(tmp_path / "plain.gguf"), context), (odd("llama.context_length", context), 0)):
        drafter = Drafter(path, context=asked)
        assert drafter.context == context
        for _ in range(context - 1):
            if not len(drafter):
                drafter.extend([72])
            drafter.draft()
        drafter.extend([72])
        with pytest.raises(DraftContextFull):
            drafter.draft()
        drafter.close()


def test_a_context_that_is_no_number(odd: Callable[..., Path]) -> None:
    pytest.importorskip("llama_cpp")
    from pipesd.edge.drafter import Drafter, estimate_bytes

    path = odd("llama.context_length", "many")
    assert estimate_bytes(path) > 0
    with pytest.raises(UsageError, match="context_length"):
        Drafter(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon"),
        ("llama.attention.layer_norm_rms_epsilon", float("inf"), "layer_norm_rms_epsilon"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base"),
        ("llama.context_length", 1, "context"),
        ("llama.context_length", (1 << 32) - 1, "--context"),
    ],
)
def test_a_target_that_nothing_can_come_of(odd: Callable[..., Path], key: str, value: float, said: str) -> None:
    pytest.importorskip("torch")
    from pipesd.cloud.loading import load_target

    with pytest.raises(UsageError, match=said):
        load_target(odd(key, value), "cpu")


def test_a_target_of_an_endless_context_takes_room_for_what_is_asked_for(odd: Callable[..., Path]) -> None:
    pytest.importorskip("torch")
    from pipesd.cloud.loading import load_target

    target = load_target(odd("llama.context_length", (1 << 32) - 1), "cpu", context=64)
    assert target.info.context == 64
    with pytest.raises(UsageError, match="context"):
        load_target(odd("llama.context_length", 512), "cpu", context=1)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% break %}",
        "{{ 'a'|center(10 ** 18) }}",
        "{{ (10 ** 5000)|string }}",
    ],
    ids=["endless depth", "nested", "a break of nothing", "memory", "digits"],
)
def test_chat_templates_that_ask_for_everything(template: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        ChatTemplate(template, bos_text="", eos_text="", now=datetime.now()).render([{"role": "user", "content": "a"}])
