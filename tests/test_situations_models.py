"""A llama.cpp draft model and a torch target model, tiny ones, joined as users join them: whatever is odd about the two
files, the output is that of the target alone."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import torch
from clouds import PATIENT_S, ids_of

from pipesd import CloudConfig, CloudServer, EdgeConfig, EdgeSession
from pipesd.cpu import usable_cpus
from pipesd.edge.chat import Conversation
from pipesd.edge.drafter import Drafter
from pipesd.errors import Unreachable, UsageError, VocabularyMismatch
from pipesd.protocol.messages import Draft, Verdict, WireError
from pipesd.protocol.wire import decode, encode
from tests.pairs import Make, maker
from tests.tiny_mamba import write_tiny_mamba

PROMPT = "Café déjà vu — 123 😊"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Writes a tiny model once."""
    return maker(tmp_path_factory.mktemp("tiny"))


def cloud(model: Path, **config: Any) -> CloudServer:
    return CloudServer(CloudConfig(model=str(model), bind="tcp://127.0.0.1:0", **config))


def edge(draft: Path, server: CloudServer, **config: Any) -> EdgeSession:
    return EdgeSession(EdgeConfig(draft=str(draft), cloud=server.address, connect_s=PATIENT_S, **config))


def alone(draft: Path, server: CloudServer, count: int) -> list[int]:
    with edge(draft, server, strategy="cloud") as session:
        return ids_of(session, PROMPT, max_tokens=count)


@pytest.fixture(scope="module")
def plain(make: Make) -> Iterator[CloudServer]:
    with cloud(make()) as server:
        yield server


@pytest.mark.parametrize("target_width", [480, 512])
def test_output_layers_of_different_widths(make: Make, target_width: int) -> None:
    with cloud(make(n_vocab=target_width, n_real=470)) as server:
        for draft_width in (480, 512):
            draft = make(n_vocab=draft_width, n_real=470, noise=0.02)
            expected = alone(draft, server, 80)
            with edge(draft, server) as session:
                assert ids_of(session, PROMPT, max_tokens=80) == expected and max(expected) < 470
                assert session.stats["acceptance_per_token"] > 0.4


def test_a_target_that_says_padding_ids_beyond_the_draft_models_width(make: Make) -> None:
    """Without an output layer of their own the two models have logits for padding ids too, which may win."""
    draft = make(n_vocab=480, n_real=470, tied=True, noise=0.02)
    with cloud(make(n_vocab=512, n_real=470, tied=True)) as server:
        expected = alone(draft, server, 120)
        assert max(expected) >= 480, "it says none"
        with edge(draft, server, strategy="pipesd") as session:
            assert ids_of(session, PROMPT, max_tokens=120) == expected
            assert session.stats["accepted"] > 0 and session.stats["openings"] == 1
            shown = [session.tokeniser.vocabulary.pieces[token] for token in expected if token < 470]
            assert session.text == b"".join(shown).decode("utf-8", "replace")


def test_other_vocabularies_are_refused_by_name(make: Make, plain: CloudServer) -> None:
    for changes, told in (
        ({"swap": (300, 301)}, r"draft model tiny \(512 ids\).*cloud's tiny \(512 ids\): id 300 is '.+' .* '.+' to"),
        ({"n_vocab": 400}, r"tiny \(400 ids\).*tiny \(512 ids\): id 400 is ''"),
    ):
        with pytest.raises(VocabularyMismatch, match=told) as refused:
            edge(make(**changes), plain).open()
        assert refused.value.exit_code == 4


def test_a_model_of_an_endless_name_is_served(make: Make) -> None:
    draft = make(n_vocab=400)
    with cloud(make(name="é" * 200)) as server, pytest.raises(VocabularyMismatch, match=f"cloud's {'é' * 128} "):
        edge(draft, server).open()


def test_a_draft_context_smaller_than_the_output(
    make: Make, plain: CloudServer, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make(noise=0.02)
    expected = alone(draft, plain, 150)
    with edge(draft, plain, context=64, strategy="pipesd") as session:
        assert ids_of(session, PROMPT, max_tokens=150) == expected
        assert session.stats["drafted"] > 0 and session.stats["openings"] == 2
    assert sum("context is full" in record.message for record in caplog.records) == 1


def test_a_recurrent_draft_model_only_costs_time(
    tmp_path: Path, plain: CloudServer, caplog: pytest.LogCaptureFixture
) -> None:
    draft = write_tiny_mamba(tmp_path / "mamba.gguf")
    expected = alone(draft, plain, 25)
    with edge(draft, plain, draft_length=2) as session:
        assert ids_of(session, PROMPT, max_tokens=25) == expected
    assert sum("cannot drop the end of its memory" in record.message for record in caplog.records) == 1


def test_a_conversation_goes_on_with_the_ids_that_were_generated(make: Make, plain: CloudServer) -> None:
    draft = make(noise=0.02)
    with edge(draft, plain) as session, edge(draft, plain, strategy="cloud") as fresh:
        conversation = Conversation(session.tokeniser)
        said: list[int] = []
        for question in ("Wie heißt du?", "你好", "and in English? 🙂"):
            turn = conversation.next_turn(question)
            assert list(turn.ids[: turn.keep]) == said[: turn.keep] and turn.keep >= len(said) - 1
            answer = ids_of(session, turn.ids, answer=True, max_tokens=20)
            assert answer == ids_of(fresh, turn.ids, answer=True, max_tokens=20)
            conversation.answered(session.text, session.token_ids)
            said = [*turn.ids, *answer]


def damaged(good: Path, path: Path, weight: float) -> Path:
    """The model with another last weight, which is one of the output layer."""
    path.write_bytes(good.read_bytes()[:-4] + struct.pack("<f", weight))
    return path


def test_a_target_whose_logits_overflow_says_so(make: Make, tmp_path: Path) -> None:
    draft = make(noise=0.02)
    with cloud(damaged(make(), tmp_path / "huge.gguf", 3.4e38)) as server, edge(draft, server) as session:
        with pytest.raises(Unreachable, match="not finite"):
            ids_of(session, PROMPT, max_tokens=100)
        assert session.finish_reason == "error"


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_target_whose_weights_are_damaged_is_refused(make: Make, tmp_path: Path, weight: float) -> None:
    with pytest.raises(UsageError, match=r"bad\.gguf: tensor output\.weight has values that are no finite numbers; "):
        cloud(damaged(make(), tmp_path / "bad.gguf", weight)).start()


def test_numbers_of_torch_are_converted_or_refused_by_name() -> None:
    def number(value: Any) -> Any:
        return torch.tensor(value)

    draft = Draft(number(7), 1, number(0), number(5), (number(300), number(2)), number(5), True)
    assert decode(encode(draft)) == Draft(7, 1, 0, 5, (300, 2), 5, True)
    likely = draft._replace(p_draft=(number(0.5), number(1.0)))
    assert decode(encode(likely)).p_draft == (0.5, 1.0)
    for field, value in (("pos", number(1.5)), ("pos", number([1, 2])), ("ids", (number(0.5),)), ("ids", number(-1))):
        with pytest.raises(WireError, match=rf"DRAFT\.{field}: got "):
            encode(draft._replace(**{field: value}))
    with pytest.raises(WireError, match=r"VERDICT\.ids: got "):
        encode(Verdict(7, 1, 0, 5, (number(0.5),)))
    for probability in (float("nan"), float("-inf"), 7.0):
        with pytest.raises(WireError, match=r"DRAFT\.p_draft: got "):
            encode(draft._replace(p_draft=(number(probability), 0.5)))


def test_the_threads_of_both_sides_together_are_no_more_than_the_processors(make: Make) -> None:
    drafter = Drafter(make())
    try:
        assert drafter.threads + CloudConfig().threads <= max(2, usable_cpus())
    finally:
        drafter.close()


BOTH = """
import sys
from pipesd import CloudConfig, CloudServer, EdgeConfig, EdgeSession

target, draft = sys.argv[1:]
with CloudServer(CloudConfig(model=target, bind="tcp://127.0.0.1:0")) as cloud:
    for order in range(2):
        with EdgeSession(EdgeConfig(draft=draft, cloud=cloud.address, connect_s=20)) as edge:
            for piece in edge.generate("both in one", max_tokens=30):
                pass
            assert edge.finish_reason == "length", edge.finish_reason
"""


def test_both_models_in_one_program_end_cleanly(make: Make) -> None:
    """Two native libraries, each with its thread pool, in one process: it ends without a word."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(make()), str(make(noise=0.02))],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
