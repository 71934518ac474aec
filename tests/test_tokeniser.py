"""Text to ids: one start id at most, control texts only where wanted, and files that have no tokeniser to offer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

from pipesd.edge.drafter import Drafter
from pipesd.edge.text import TextStream, decode
from pipesd.edge.tokeniser import Tokeniser
from pipesd.errors import UsageError
from tests.tiny import CHAT_TEMPLATE, CONTROL_TEXTS, ENDOFTEXT, IM_END, IM_START, write_tiny

LONG = "=" * 300
BOS_TEXT = CONTROL_TEXTS[IM_START]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenisers")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Tokeniser]:
    made = Tokeniser.open(write_tiny(folder / "plain.gguf", n_vocab=512, n_real=500))
    yield made
    made.close()


@pytest.fixture(scope="module")
def with_bos(folder: Path) -> Iterator[Tokeniser]:
    made = Tokeniser.open(write_tiny(folder / "bos.gguf", add_bos=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Iterator[Tokeniser]:
    made = Tokeniser.open(write_sentencepiece(folder / "spm.gguf"))
    yield made
    made.close()


def write_sentencepiece(path: Path, *, spaces: bool = True) -> Path:
    """A file with nothing but a SentencePiece vocabulary; without `spaces` it has to spell them out in bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("spm")
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    texts = [*"▁helowrd", *"he ll llo hello ▁hello ▁world wor ▁h ▁he ▁w ▁wor ld world".split(), LONG]
    tokens += [(text, kinds.NORMAL) for text in texts if spaces or "▁" not in text]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts(plain: Tokeniser) -> None:
    assert plain.name == "tiny"
    assert (plain.vocabulary.size, plain.vocabulary.real_size) == (512, 500)
    assert plain.vocabulary.pieces[:256] == tuple(bytes([i]) for i in range(256))
    assert plain.vocabulary.pieces[IM_END] == b"<|im_end|>"
    assert plain.vocabulary.pieces[500:] == (b"",) * 12
    assert plain.end_ids == {ENDOFTEXT, IM_END}
    assert plain.hidden_ids == {ENDOFTEXT, IM_START, IM_END}  # padding has no text anyway
    assert (plain.bos_id, plain.add_bos, plain.bos_text, plain.eos_text) == (IM_START, False, BOS_TEXT, "<|im_end|>")
    assert plain.template == CHAT_TEMPLATE
    assert not plain.add_space_prefix


@pytest.mark.parametrize("text", ["", " ", "a", "Café déjà vu — 123 😊", "你好\n\t\0\x01", "the end" * 500])
def test_ids_give_their_text_back(plain: Tokeniser, text: str) -> None:
    ids = plain.encode(text)
    assert decode(plain.vocabulary, ids) == text
    assert (ids == []) == (text == "")


def test_control_texts_become_ids_only_where_wanted(plain: Tokeniser) -> None:
    assert plain.encode("<|im_end|>", special=True) == [IM_END]
    assert IM_END not in plain.encode("<|im_end|>")


def test_text_that_is_not_unicode_is_refused(plain: Tokeniser) -> None:
    with pytest.raises(UsageError, match=r"'\\udcff' at character 3"):
        plain.encode("abc\udcff")


def test_the_start_id_is_there_once(with_bos: Tokeniser, plain: Tokeniser) -> None:
    for special in (False, True):
        assert with_bos.encode("a", special=special) == [IM_START, 97]
        assert with_bos.encode(BOS_TEXT + "a", special=special) == [IM_START, 97]
        assert with_bos.encode("", special=special) == [IM_START]
    assert with_bos.repeats_bos(BOS_TEXT + "a") and not with_bos.repeats_bos("a" + BOS_TEXT)
    assert with_bos.encode("a", add_bos=False) == [97]
    assert plain.encode("a") == [97] and plain.encode("a", add_bos=True) == [IM_START, 97]
    assert not plain.repeats_bos(BOS_TEXT)
    assert plain.encode(BOS_TEXT + "a", special=True) == [IM_START, 97]


def test_a_model_without_a_start_id(folder: Path) -> None:
    path = write_tiny(folder / "no-bos.gguf", bos_id=99_999, add_bos=True)
    tokeniser = Tokeniser.open(path)
    assert (tokeniser.bos_id, tokeniser.add_bos, tokeniser.bos_text) == (None, False, "")
    assert tokeniser.encode("a", add_bos=True) == [97]
    assert not tokeniser.repeats_bos("a")
    tokeniser.close()


def test_sentencepiece_glues_a_space_to_a_text_but_not_to_what_continues_it(sentencepiece: Tokeniser) -> None:
    vocabulary = sentencepiece.vocabulary
    assert sentencepiece.add_space_prefix and sentencepiece.add_bos
    assert sentencepiece.hidden_ids == {0, 1, 2}
    shown = [
        decode(vocabulary, ids, hidden=sentencepiece.hidden_ids)
        for ids in (
            sentencepiece.encode("hello world"),
            sentencepiece.encode("hello world", add_bos=False, continued=True),
            sentencepiece.encode("</s>hello", special=True, add_bos=False, continued=True),
        )
    ]
    assert shown[:2] == [" hello world", "hello world"]
    assert shown[2].lstrip() == "hello"
    answer = TextStream(vocabulary, hidden=sentencepiece.hidden_ids, strip_space=sentencepiece.add_space_prefix)
    assert answer.push(sentencepiece.encode("hello world")) == "hello world"


def test_pieces_of_any_length(sentencepiece: Tokeniser) -> None:
    assert LONG.encode() in sentencepiece.vocabulary.pieces


def test_a_text_of_more_ids_than_bytes(folder: Path) -> None:
    tokeniser = Tokeniser.open(write_sentencepiece(folder / "spelled.gguf", spaces=False))
    ids = tokeniser.encode(" " * 50, add_bos=False)
    assert len(ids) > 100
    assert decode(tokeniser.vocabulary, ids).replace("▁", " ").strip(" ") == ""
    tokeniser.close()


def test_an_end_id_shows_nothing_whatever_its_type(folder: Path) -> None:
    tokeniser = Tokeniser.open(write_tiny(folder / "end.gguf", eos_id=97))
    assert 97 in tokeniser.end_ids and 97 in tokeniser.hidden_ids
    tokeniser.close()


def test_the_drafters_tokeniser_is_that_of_its_file(folder: Path, plain: Tokeniser) -> None:
    drafter = Drafter(folder / "plain.gguf", threads=1)
    assert drafter.tokeniser.vocabulary == plain.vocabulary
    assert drafter.tokeniser.encode("the end") == plain.encode("the end")
    drafter.close()


def test_close_twice(folder: Path, plain: Tokeniser) -> None:
    tokeniser = Tokeniser.open(folder / "plain.gguf")
    tokeniser.close()
    tokeniser.close()
    with pytest.raises(UsageError, match="the tokeniser of tiny is closed"):
        tokeniser.encode("a")


def test_native_output_is_silent(folder: Path, plain: Tokeniser, capfd: pytest.CaptureFixture[str]) -> None:
    Drafter(folder / "plain.gguf", threads=1).close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("opens", [Tokeniser.open, Drafter])
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("clip", "a part for images or sound"),
        ("t5", "t5"),
        ("nonsense", r"unknown model architecture: 'nonsense'"),
    ],
)
def test_models_that_cannot_draft(folder: Path, opens: type, architecture: str, reason: str) -> None:
    path = write_tiny(folder / f"{architecture}.gguf", architecture=architecture)
    with pytest.raises(UsageError, match=reason) as told:
        opens(path)
    assert str(told.value).startswith(f"{path}: ") and "\n" not in str(told.value)


def test_an_embedding_model_is_named(folder: Path) -> None:
    path = folder / "embedding.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("Embedder")
    writer.add_causal_attention(False)
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UsageError, match="Embedder is an embedding model, wanted a decoder"):
        Tokeniser.open(path)


def test_a_file_without_a_tokeniser(folder: Path) -> None:
    path = folder / "weights-only.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UsageError, match="has no tokeniser in it"):
        Tokeniser.open(path)


def test_a_model_that_lacks_its_last_bytes_or_kills_llama_cpp(folder: Path, plain: Tokeniser) -> None:
    data = (folder / "plain.gguf").read_bytes()
    cut = folder / "cut.gguf"
    cut.write_bytes(data[:-100])
    with pytest.raises(UsageError, match=r"cut\.gguf: llama\.cpp cannot load it \(.*not within the file bounds"):
        Drafter(cut)
    key = b"llama.block_count" + struct.pack("<I", 4)
    poisoned = folder / "poisoned.gguf"
    poisoned.write_bytes(data.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 0)))
    with pytest.raises(UsageError, match=r"poisoned\.gguf: (kills llama\.cpp \(SIGABRT|llama\.cpp cannot load it)"):
        Drafter(poisoned)
