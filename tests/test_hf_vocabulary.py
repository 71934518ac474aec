"""Vocabularies of Hugging Face folders: the same bytes for every id as llama.cpp gives for the GGUF made of the folder.

The oracles: `gguf.vocab` reads the folder (as llama.cpp's own converter does), llama.cpp reads the GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny import CHAT_TEMPLATE, vocabulary_texts, write_tiny
from tiny_hf import write_tokenizer

from pipesd.core import Vocabulary
from pipesd.edge.tokeniser import Tokeniser
from pipesd.errors import UsageError
from pipesd.hf_vocabulary import HfVocabulary, read_hf_vocabulary
from pipesd.pieces import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from pipesd.protocol.vocabulary import block_hashes, vocabulary_hash

NORMAL = 1
TEXT = "Café — the def\n\t你好 🙂 return  in <0x41>"


def added(i: int, content: str, special: bool = True, normalized: bool = False) -> dict[str, Any]:
    return {"id": i, "content": content, "special": special, "normalized": normalized, "lstrip": False,
            "rstrip": False, "single_word": False}  # fmt: skip


def byte_level_folder(folder: Path) -> Path:
    """A byte-level BPE trained by the tokenizers package, with tokens added in every way."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<｜User｜>", "[eé]"])
    more = {"<think>": False, "   ": False, "▁two": True, "<|looks|>": True, "Ġx": False, "Ã©t": False}
    tokenizer.add_tokens([AddedToken(text, normalized=normalized) for text, normalized in more.items()])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False, "lstrip": False,
           "rstrip": False, "single_word": False}  # fmt: skip
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": "[nobody knows]",
        "mask_token": "Ġdef", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def sentencepiece_folder(folder: Path) -> Path:
    """BPE over metaspaces with a token for each byte, as tokenizer.json of Llama 2 or Mistral has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "t", "h", "e", "▁t", "he", "▁the", "é", "你", "🙂", "▁▁", "<0x0ax", "<|end|>", "▁<PRE>"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    model = models.BPE(
        vocab={text: i for i, text in enumerate(texts)}, merges=merges, unk_token="<unk>", byte_fallback=True,
        fuse_unk=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("é!", normalized=True)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True,
               "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def as_the_converter_has_it(folder: Path, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by the words of convert_hf_to_gguf.py's rule for byte-level BPE, through transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    by_id = {i: text for text, i in tokenizer.get_vocab().items()}
    added_tokens = tokenizer.added_tokens_decoder
    texts, types = [], []
    for i in range(vocab_size):
        text, type_ = by_id.get(i, f"[PAD{i}]"), NORMAL if i in by_id else UNUSED
        if i in added_tokens:
            if not added_tokens[i].normalized:
                text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
            looks = text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
            type_ = CONTROL if added_tokens[i].special or looks else USER_DEFINED
            text = text.replace("▁", " ") if type_ == USER_DEFINED else text
        texts.append(text)
        types.append(type_)
    return texts, types


def write_gguf(path: Path, found: HfVocabulary) -> Path:
    """A GGUF file with that vocabulary and no weights worth the name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(found.kind)
    writer.add_tokenizer_pre("gpt-2" if found.kind == "gpt2" else "default")
    writer.add_token_list(list(found.texts))
    writer.add_token_scores([0.0] * len(found.texts))
    writer.add_token_types(list(found.types))
    writer.add_token_merges(["t h"])
    special = gguf.SpecialVocab(path.parent / "folder", n_vocab=len(found.texts))
    special.add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_cpp_has_it(path: Path) -> Tokeniser:
    tokeniser = Tokeniser.open(path)
    tokeniser.close()
    return tokeniser


def check_against_llama_cpp(path: Path, found: HfVocabulary) -> None:
    theirs = as_llama_cpp_has_it(path)
    vocabulary, end_ids = found.pieces()
    for i, (ours, wanted) in enumerate(zip(vocabulary.pieces, theirs.vocabulary.pieces, strict=True)):
        assert ours == wanted, f"id {i}, {found.texts[i]!r}"
    assert set(end_ids) == set(theirs.end_ids)
    assert vocabulary_hash(vocabulary) == vocabulary_hash(theirs.vocabulary)  # an edge's handshake takes the pair
    assert block_hashes(vocabulary) == block_hashes(theirs.vocabulary)


def test_byte_level_texts_and_types_are_the_converters(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path / "folder")
    found = read_hf_vocabulary(folder, {"vocab_size": 310})
    texts, types = as_the_converter_has_it(folder, 310)
    assert list(found.texts) == texts and list(found.types) == types
    assert found.kind == "gpt2" and found.types[-1] == UNUSED
    assert texts[299] == "[nobody knows]" and types[299] == CONTROL
    check_against_llama_cpp(write_gguf(tmp_path / "m.gguf", found), found)


def test_sentencepiece_texts_and_types_are_the_converters(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path / "folder")
    found = read_hf_vocabulary(folder, {})
    assert found.kind == "llama" and found.add_bos
    theirs = list(gguf.LlamaHfVocab(folder).all_tokens())
    assert [text.encode() for text in found.texts] == [text for text, _, _ in theirs]
    assert list(found.types) == [int(type_) for _, _, type_ in theirs]
    check_against_llama_cpp(write_gguf(tmp_path / "m.gguf", found), found)


@pytest.mark.parametrize("n_real", [None, 470])
def test_the_tiny_folder_and_the_tiny_file_have_one_vocabulary(tmp_path: Path, n_real: int | None) -> None:
    write_tokenizer(tmp_path, 512, n_real)
    vocabulary, _ = read_hf_vocabulary(tmp_path, {"vocab_size": 512}).pieces()
    theirs = as_llama_cpp_has_it(write_tiny(tmp_path / "tiny.gguf", n_real=n_real)).vocabulary
    assert vocabulary == theirs and vocabulary.real_size == (n_real or 512)


def simple(tmp_path: Path, model: dict[str, Any] | None = None, **tokenizer: Any) -> Path:
    """A folder with a small byte-level tokenizer, changed."""
    texts, _, _ = vocabulary_texts(259)
    plain = {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "merges": []}
    table = {"model": plain | (model or {}), "decoder": {"type": "ByteLevel"}, "added_tokens": []} | tokenizer
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    return tmp_path


def options(folder: Path, **values: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_a_unigram_vocabulary_is_sentencepiece(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["</s>", 0.0], ["▁the", -1.5], ["<0x0A>", -2.0], ["▁", -3.0]]
    found = read_hf_vocabulary(simple(tmp_path, {"type": "Unigram", "vocab": vocab, "unk_token": "<unk>"}), {})
    assert found.kind == "llama" and found.types == (UNKNOWN, NORMAL, NORMAL, BYTE, NORMAL)
    assert found.pieces()[0] == Vocabulary((b"<unk>", b"</s>", b" the", b"\n", b" "))


@pytest.mark.parametrize(
    "steps",
    [
        {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace"}]}},
        {"decoder": None, "pre_tokenizer": {"type": "Metaspace"}},
    ],
)
def test_bpe_over_metaspaces_is_sentencepiece(tmp_path: Path, steps: dict[str, Any]) -> None:
    assert read_hf_vocabulary(simple(tmp_path, **steps), {}).kind == "llama"


def test_a_byte_level_step_may_stand_in_a_sequence(tmp_path: Path) -> None:
    steps = {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}
    assert read_hf_vocabulary(simple(tmp_path, decoder=None, pre_tokenizer=steps), {}).kind == "gpt2"


def test_special_ids_come_from_the_tokenizers_texts_then_from_the_config(tmp_path: Path) -> None:
    folder = simple(tmp_path, added_tokens=[added(256, "<|endoftext|>"), added(258, "<|im_end|>")])
    options(folder, eos_token="<|im_end|>", bos_token=None)
    config = {"vocab_size": 300, "eos_token_id": 256, "bos_token_id": 257, "pad_token_id": [1], "unk_token_id": 300}
    assert read_hf_vocabulary(folder, config).special_ids == {"eos_token_id": 258, "bos_token_id": 257}
    assert read_hf_vocabulary(folder, {"text_config": config}).special_ids["bos_token_id"] == 257


def test_a_template_that_ends_otherwise_names_a_second_end(tmp_path: Path) -> None:
    single = [
        {"SpecialToken": {"id": "<|im_start|>"}},
        {"Sequence": {"id": "A"}},
        {"SpecialToken": {"id": "<|im_end|>"}},
    ]
    tokens = [added(256, "<|endoftext|>"), added(257, "<|im_start|>"), added(258, "<|im_end|>")]
    folder = simple(tmp_path, added_tokens=tokens, post_processor={"type": "TemplateProcessing", "single": single})
    options(folder, eos_token="<|endoftext|>", bos_token="<|im_start|>")
    found = read_hf_vocabulary(folder, {})
    assert found.special_ids == {"bos_token_id": 257, "eos_token_id": 258, "eot_token_id": 256}
    assert found.add_bos is True
    assert gguf.SpecialVocab(folder).special_token_ids == {"bos": 257, "eos": 258, "eot": 256}


def test_codellama_has_an_end_that_its_folder_does_not_name(tmp_path: Path) -> None:
    vocab = [[f"t{i}", 0.0] for i in range(32016)]
    folder = simple(tmp_path, {"type": "Unigram", "vocab": vocab})
    found = read_hf_vocabulary(folder, {"vocab_size": 32016, "model_type": "llama"})
    assert 32010 in found.pieces()[1]


def in_options(folder: Path) -> None:
    options(folder, chat_template="one")


def in_named_options(folder: Path) -> None:
    options(folder, chat_template=[{"name": "tools", "template": "two"}, {"name": "default", "template": "one"}])


def in_jinja(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("one")


def in_json(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "one"}')


@pytest.mark.parametrize("put", [in_options, in_named_options, in_jinja, in_json])
def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path, put: Callable[[Path], None]) -> None:
    folder = simple(tmp_path)
    assert read_hf_vocabulary(folder, {}).template is None
    put(folder)
    assert read_hf_vocabulary(folder, {}).template == "one"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "is a WordPiece tokenizer"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}}}, "is a WordLevel tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "is a BPE without bytes tokenizer"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {}}}, "no vocabulary"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": -1}}}, "'a' has the id -1"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 1 << 40}}}, "'a' has the id 1099511627776"),
        ({"model": {"type": "Unigram", "vocab": ["a"]}}, "its vocabulary is damaged"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}, "added_tokens": [{"id": 1}]}, "its added token"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}, "added_tokens": {"a": 1}}, "its added_tokens"),
        ({"model": []}, "has no table 'model'"),
        ({}, "has no table 'model'"),
        ([], "a JSON list, an object was wanted"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_one_line(tmp_path: Path, content: Any, told: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(tmp_path, tmp_path / "tokenizer.json", told)


def refused(folder: Path, path: Path, told: str, config: dict[str, Any] | None = None) -> None:
    with pytest.raises(UsageError) as caught:
        read_hf_vocabulary(folder, config or {})
    assert str(caught.value).startswith(f"{path}: ") and told in str(caught.value) and "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "empty"),
        (b"\0" * 100, "all zeros"),
        (b'{"model": {"vocab"', "not JSON, or cut short"),
        (b"\xff\xfe{}", "not JSON, or cut short"),
        (b"[" * 100_000, "not JSON, or cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a git-lfs pointer"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, raw: bytes, told: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    refused(tmp_path, tmp_path / "tokenizer.json", told)
    simple(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(raw)
    refused(tmp_path, tmp_path / "tokenizer_config.json", told)


def test_more_tokens_than_embeddings_are_refused_and_fewer_padded(tmp_path: Path) -> None:
    folder = simple(tmp_path, added_tokens=[added(259, "<more>")])
    refused(folder, folder / "tokenizer.json", "has a token with id 259, the model only 259 ids", {"vocab_size": 259})
    assert read_hf_vocabulary(folder, {"vocab_size": 260}).texts[-1] == "<more>"
    found = read_hf_vocabulary(folder, {"vocab_size": 261})
    assert (found.texts[-1], found.types[-1]) == ("[PAD260]", UNUSED)


def test_tokens_added_to_sentencepiece_without_embeddings_are_left_out(tmp_path: Path) -> None:
    """As the converter does with them; Llama 2 folders have such a <pad>."""
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["▁the", -1.5]]
    tokens = [added(1, "<s>"), added(2, "</s>"), added(4, "<pad>"), added(9, "<far>")]
    folder = simple(tmp_path, {"type": "Unigram", "vocab": vocab}, added_tokens=tokens)
    options(folder, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    found = read_hf_vocabulary(folder, {"vocab_size": 4, "pad_token_id": 4})
    assert found.texts == ("<unk>", "<s>", "</s>", "▁the")
    assert found.special_ids == {"bos_token_id": 1, "eos_token_id": 2}
    padded = read_hf_vocabulary(folder, {"vocab_size": 9})
    assert padded.texts[4:] == ("<pad>", "[PAD5]", "[PAD6]", "[PAD7]", "[PAD8]")
    assert read_hf_vocabulary(folder, {}).texts[9] == "<far>"
    refused(folder, folder / "tokenizer.json", "has a token with id 3, the model only 3 ids", {"vocab_size": 3})


def test_a_token_that_only_the_options_name_needs_a_row_of_embeddings(tmp_path: Path) -> None:
    folder = options(simple(tmp_path), pad_token="[PAD]")
    assert read_hf_vocabulary(folder, {"vocab_size": 260}).texts[259] == "[PAD]"
    assert "[PAD]" not in read_hf_vocabulary(folder, {"vocab_size": 259}).texts


def test_a_folder_without_a_tokenizer_is_told_how_to_get_one(tmp_path: Path) -> None:
    refused(tmp_path, tmp_path, "has no tokenizer.json; download")
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    refused(tmp_path, tmp_path, f"has tokenizer.model but no tokenizer.json; make it with transformers: AutoTokenizer."
            f"from_pretrained({str(tmp_path)!r})")  # fmt: skip
