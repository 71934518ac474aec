"""Targets served through transformers: rows keep their bits whatever shares the pass, in families that the plain
decoder does not know; what cannot be rolled back is refused by name."""

from __future__ import annotations

import configparser
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_hf import write_folder

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipesd.cloud import transformers_model, transformers_target
from pipesd.cloud.loading import load_target
from pipesd.cloud.transformers_model import import_transformers  # the package may put another module in its place
from pipesd.cloud.transformers_target import TILE, TransformersTarget, load_transformers_target
from pipesd.contexts import stated_context
from pipesd.errors import UsageError
from pipesd.hf_families import is_recurrent, never_served
from pipesd.policy.accept import Draw
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling

POSITIONS = 93  # no multiple of a tile: the last one is shorter
WINDOW = 12  # shorter than the texts, and no multiple of a tile either
SMALL: dict[str, Any] = {"max_position_embeddings": POSITIONS, "vocab_size": 512}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "sliding_window": WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"pad_token_id": 0, "sliding_window": WINDOW},
    "gpt2": {"n_positions": POSITIONS, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "gpt_neox": {},
    "olmo2": {"pad_token_id": 0},
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": EXPERTS,
}  # fmt: skip
OF_EXPERTS = ("mixtral",)  # their rows have bits of their own from release 5 on
RELEASE = int(transformers.__version__.partition(".")[0])
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 64},
    "recurrent_gemma": {"lru_width": 64, "num_hidden_layers": 3},
    "lfm2": {"full_attn_idxs": [1]},
}


def quick(names: Iterable[str], *few: str) -> list[Any]:
    """Those names, all but `few` of them for the slow tests."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder of a family, written once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("folders") / family
            made[family] = write_folder(path, family, **SMALL | FAMILIES[family])
        return made[family]

    return folder


def load(path: Path, **options: Any) -> TransformersTarget:
    return load_transformers_target(path, "cpu", slots=3, **options)


@pytest.fixture(scope="module")
def target(folders: Callable[..., Path]) -> Iterator[TransformersTarget]:
    """Windows, tiles and a short last tile."""
    yield load(folders("gemma3_text"))


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "target" in request.fixturenames:
        for slot in range(3):
            request.getfixturevalue("target").truncate(slot, 0)


def some_ids(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(512, size=count).tolist()
    return drawn


def alone(target: TransformersTarget, ids: Sequence[int], slot: int = 0) -> np.ndarray:
    """Logits behind every id, from one prefill of an empty slot."""
    target.truncate(slot, 0)
    logits = target.forward([(slot, ids, len(ids))])[0]
    target.truncate(slot, 0)
    return logits


def in_pieces(target: TransformersTarget, ids: Sequence[int], sizes: Iterator[int], slot: int = 0) -> np.ndarray:
    rows, start = [], 0
    while start < len(ids):
        piece = ids[start : start + next(sizes)]
        rows.append(target.forward([(slot, piece, len(piece))])[0])
        start += len(piece)
    target.truncate(slot, 0)
    return np.concatenate(rows)


# --- the bits of a row ---


@pytest.mark.parametrize("family", quick(FAMILIES, "gemma3_text", "gpt2"))
def test_a_text_in_any_pieces_has_the_bits_of_one_pass_and_the_logits_of_transformers(
    folders: Callable[..., Path], family: str
) -> None:
    said: list[str] = []
    target = load(folders(family), say=said.append)
    ids = some_ids(POSITIONS)
    whole = alone(target, ids)
    assert whole.shape == (POSITIONS, 512) and whole.dtype == np.float32
    if family not in OF_EXPERTS or RELEASE >= 5:
        assert target.invariant and said == []
        for sizes in ([1, 2, 3], [2 * TILE + 1, 1, 5]):
            assert np.array_equal(in_pieces(target, ids, cycle(sizes)), whole), f"passes of {sizes}"
    model = transformers.AutoModelForCausalLM.from_pretrained(folders(family))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    assert wanted.std() > 0.1, "a model that says something"
    np.testing.assert_allclose(whole, wanted, atol=1e-4, rtol=0)


def test_bfloat16_has_the_same_bits_too(folders: Callable[..., Path]) -> None:
    target = load(folders("gemma3_text"), dtype="bfloat16")
    ids = some_ids(60)
    assert target.invariant and target.info.dtype == "bfloat16"
    assert np.array_equal(in_pieces(target, ids, cycle([1, 2, 3, 11])), alone(target, ids))


def test_sessions_that_share_passes_and_roll_back_have_the_bits_of_each_alone(target: TransformersTarget) -> None:
    draw = np.random.default_rng(5)
    texts = {slot: some_ids(20 + 7 * slot, slot) for slot in (1, 2)}
    target.forward([(slot, ids, 0) for slot, ids in texts.items()])
    for _ in range(12):
        drafts = {slot: draw.integers(512, size=draw.integers(1, 12)).tolist() for slot in texts}
        order = [1, 2] if draw.integers(2) else [2]
        rows = target.forward([(slot, drafts[slot], len(drafts[slot])) for slot in order])
        for slot, got in zip(order, rows, strict=True):
            assert np.array_equal(got, alone(target, texts[slot] + drafts[slot])[len(texts[slot]) :])
            texts[slot] += drafts[slot][: draw.integers(0, len(drafts[slot]) + 1)]
            texts[slot] = texts[slot][: min(len(texts[slot]), POSITIONS - 12)]
            target.truncate(slot, len(texts[slot]))
            assert target.length(slot) == len(texts[slot])


def test_a_rollback_to_any_position_leaves_no_trace(target: TransformersTarget) -> None:
    ids, others = some_ids(POSITIONS), some_ids(POSITIONS, 1)
    whole = alone(target, ids)
    target.forward([(0, others, 0)])
    for length in range(POSITIONS - 1, 0, -7):
        target.truncate(0, length)
        target.truncate(0, 0)
        target.forward([(0, ids[:length] + others[length:], 0)])
        target.truncate(0, length)
        rows = target.forward([(0, ids[length:], POSITIONS - length)])[0]
        assert np.array_equal(rows, whole[length:]), f"back to {length}"


def test_a_tile_known_in_part_runs_only_when_a_row_of_it_is_wanted(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    forward = transformers_model.CachedModel.__call__

    def counted(*args: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return forward(*args)

    monkeypatch.setattr(transformers_model.CachedModel, "__call__", counted)
    ids = some_ids(3 * TILE)
    for fed, rows, more in ((TILE - 1, 0, 0), (1, 0, 1), (2, 1, 1), (0, 0, 0), (TILE, TILE, 2)):
        passes = 0
        at = target.length(0)
        target.forward([(0, ids[at : at + fed], rows)])
        assert passes == more


def test_greedy_and_sample_choose_from_the_same_rows(target: TransformersTarget) -> None:
    ids = some_ids(40)
    whole = alone(target, ids)
    assert target.greedy([(0, ids, 5), (1, ids[:9], 1), (2, [], 0)]) == [
        tuple(whole[-5:].argmax(axis=1).tolist()),
        (int(whole[8].argmax()),),
        (),
    ]
    sampler = Sampler(Sampling(temperature=5.0), 11)
    target.truncate(0, 30)
    [drawn, highest] = target.sample(
        [(0, ids[30:35], 5), (1, ids[9:12], 2)], [Draw(sampler, tuple(ids[:31]), tuple(ids[31:35])), None]
    )
    target.truncate(0, 30)
    [again] = target.sample([(0, ids[30:31], 1)], [Draw(sampler, tuple(ids[:31]), ())])
    assert again.ids[0] == drawn.ids[0] and highest.ids[0] == whole[10].argmax()
    assert target.pass_ms >= 1


def test_a_context_is_filled_to_its_end(folders: Callable[..., Path]) -> None:
    for context in (2, TILE, 50, POSITIONS):
        target = load(folders("gpt2"), context=context)
        assert target.info.context == context
        ids = some_ids(context)
        target.forward([(0, ids[:-1], 0)])
        last = target.forward([(0, ids[-1:], 1)])[0]
        assert np.array_equal(last, alone(target, ids, slot=1)[-1:])
        with pytest.raises(AssertionError, match=f"{context + 1} positions in a context of {context}"):
            target.forward([(0, [1], 1)])


def test_memory_follows_use_and_comes_back(target: TransformersTarget) -> None:
    assert target.memory_bytes == 0
    target.forward([(0, some_ids(TILE), 0)])
    one = target.memory_bytes
    assert one == 2 * 2 * 2 * TILE * 16 * 4  # keys and values of two layers with two heads each
    target.forward([(1, some_ids(2 * TILE), 0)])
    assert target.memory_bytes == 3 * one
    for slot in (0, 1):
        target.truncate(slot, 0)
    assert target.memory_bytes == 0 and target.length(0) == 0


# --- beside independent implementations ---


def test_logits_are_those_of_the_plain_decoder(folders: Callable[..., Path]) -> None:
    ids = some_ids(80)
    plain = load_target(folders("llama"), "cpu")
    wanted = plain.forward([(0, ids, len(ids))])[0]
    ours = load(folders("llama"))
    np.testing.assert_allclose(alone(ours, ids), wanted, atol=5e-4, rtol=0)
    assert (ours.vocabulary, ours.info.end_ids, ours.info.name) == (
        plain.vocabulary, plain.info.end_ids, plain.info.name,
    )  # fmt: skip
    assert ours.info.fingerprint != plain.info.fingerprint, "near ties may fall otherwise"


@pytest.mark.parametrize("options", [{"exact": False}, pytest.param({"threads": 2}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", quick(["gemma3_text", "mixtral"], "mixtral"))
def test_what_is_not_exact_does_not_say_so_but_is_close(
    folders: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    said: list[str] = []
    target = load(folders(family), say=said.append, **options)
    assert not target.invariant and said == []
    ids = some_ids(50)
    whole = alone(load(folders(family), say=said.append), ids)
    target.forward([(0, ids[:20] + ids[:9], 0)])
    target.truncate(0, 20)
    got = target.forward([(0, ids[20:], 30), (1, ids[:9], 1)])
    for rows, wanted in zip(got, (whole[20:], whole[8:9]), strict=True):
        np.testing.assert_allclose(rows, wanted, atol=1e-4, rtol=0)


# --- what loading finds out ---


def test_what_keeps_a_state_is_known_without_transformers() -> None:
    assert [family for family in RECURRENT if not is_recurrent(family)] == []
    assert [family for family in FAMILIES if is_recurrent(family)] == []


@pytest.mark.parametrize("family", quick(RECURRENT, "mamba", "lfm2"))
def test_a_state_that_cannot_be_rolled_back_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path = write_folder(tmp_path / "m", family, **SMALL | RECURRENT[family])
    with pytest.raises(UsageError) as caught:
        load(path, context=64)
    assert str(caught.value).startswith(f"{path}: is a {family} model, which keeps a state that")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(transformers_model, "never_served", lambda config: None)
    with pytest.raises(UsageError) as caught:  # and known by what it does
        load(path, context=64)
    known = f"{path}: {family} keeps a state that cannot be rolled back"
    if family in ("mamba", "rwkv"):  # others by their logits, in older releases
        assert str(caught.value).startswith(known)
    assert str(caught.value).startswith((known, f"{path}: {family} gives other logits", f"{path}: transformers "))
    assert "\n" not in str(caught.value)


def test_layers_of_attention_alone_are_served_though_the_family_has_others(tmp_path: Path) -> None:
    sizes = SMALL | {"mamba_n_heads": 4, "mamba_d_head": 32, "shared_intermediate_size": 128, "num_local_experts": 0}
    mixed = write_folder(tmp_path / "mixed", "granitemoehybrid", **sizes, layer_types=["mamba", "attention"])
    with pytest.raises(UsageError, match=f"^{mixed}: is a granitemoehybrid model, which keeps a state"):
        load(mixed)
    alone_path = write_folder(tmp_path / "alone", "granitemoehybrid", **sizes, layer_types=["attention"] * 2)
    assert load(alone_path).info.context == POSITIONS


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_table_of_quantisation_is_none(tmp_path: Path, empty: dict[str, Any] | None) -> None:
    path = write_folder(tmp_path / "m", **SMALL)
    change_config(path, quantization_config=empty)
    assert load(path).info.context == load_target(path, "cpu").info.context


def test_each_wrapper_that_transformers_runs_as_text_is_known() -> None:
    wrappers = [
        family
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if family.startswith(("gemma", "llama")) and not family.endswith("_assistant")
        if "text_config" in transformers.CONFIG_MAPPING[family].sub_configs
    ]
    assert [family for family in wrappers if never_served({"model_type": family, "text_config": {"a": 1}})] == []


def test_a_cache_that_does_not_forget_is_refused(folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_all(self: Any, length: int) -> None:
        self.length = min(self.length, length)

    monkeypatch.setattr(transformers_model.CachedModel, "cut", keeps_all)
    with pytest.raises(UsageError, match="llama gives other logits after a draft was taken back"):
        load(folders("llama"))


def test_a_window_cut_off_the_cache_is_noticed(folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.from_pretrained(folders("gemma3_text"))
    plain = transformers.DynamicCache
    monkeypatch.setattr(import_transformers(), "DynamicCache", lambda **_: plain(config=config))
    with pytest.raises(UsageError, match=r"cannot run it|other logits"):
        load(folders("gemma3_text"))


def test_only_what_transformers_raises_is_said_of_the_folder(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("out of range")

    with monkeypatch.context() as ours:
        ours.setattr(TransformersTarget, "_tiles", broken)
        with pytest.raises(IndexError):
            load(folders("llama"))
    target = load(folders("llama"))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    with pytest.raises(IndexError):  # the folder was good when it was loaded
        target.forward([(0, [1, 2], 1)])
    with pytest.raises(UsageError, match=r"cannot run it \(out of range\)"):
        load(folders("llama"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "does not fit into the memory of the device .CUDA out of memory",
        ),
        (
            ImportError("it requires the kernels library"),
            "needs a package for it .it requires .*; install that package",
        ),
    ],
)
def test_what_is_no_fault_of_the_folder_has_its_own_advice(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    for place, name in (
        (transformers.AutoModelForCausalLM, "from_pretrained"),
        (transformers.LlamaForCausalLM, "forward"),
    ):  # while it is loaded, and in the trial
        with monkeypatch.context() as ours:
            ours.setattr(place, name, broken)
            with pytest.raises(UsageError, match=f"^{folders('llama')}: .*{said}") as told:
                load(folders("llama"))
            assert "\n" not in str(told.value) and "complete folder" not in str(told.value)


def test_what_is_said_of_the_precision_is_passed_on(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*given: Any) -> str:
        given[-1]("no bfloat16 arithmetic")
        return "float32"

    monkeypatch.setattr(transformers_target, "chosen_dtype", lacking)
    said: list[str] = []
    load(folders("llama"), say=said.append)
    assert said == ["no bfloat16 arithmetic"]


def test_rows_that_depend_on_the_ids_beside_them_are_told(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers_model.CachedModel.__call__

    def disturbed(self: Any, ids: Sequence[int], rows: int) -> torch.Tensor:
        return forward(self, ids, rows) * (1 + 2**-22 * (ids[-1] % 2))

    monkeypatch.setattr(transformers_model.CachedModel, "__call__", disturbed)
    said: list[str] = []
    assert not load(folders("llama"), say=said.append).invariant
    [line] = said
    assert line.startswith("WARNING: ") and "in llama the bits of a row depend on the ids beside it" in line


def test_loading_is_silent_and_leaves_settings_as_they_were(
    folders: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_num_threads()
    steps: list[tuple[int, int]] = []
    load(folders("llama"), progress=lambda *step: steps.append(step))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_num_threads()) == before
    assert capfd.readouterr() == ("", "")
    assert [done for done, _ in steps] == [0, steps[0][1]] and steps[0][1] > 0


def test_longrope_is_served_up_to_where_its_angles_change(tmp_path: Path) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    options = {"pad_token_id": 0, "original_max_position_embeddings": 40, "rope_scaling": factors}
    path = write_folder(tmp_path / "m", "phi3", **SMALL | options)
    assert load(path).info.context == 40
    with pytest.raises(UsageError, match="context 41: 2 to 40 was wanted"):
        load(path, context=41)
    assert stated_context(json.loads((path / "config.json").read_text())) == 40


def test_yarn_is_served_as_far_as_the_plain_decoder_serves_it(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
    path = write_folder(tmp_path / "m", "qwen2", **SMALL | {"max_position_embeddings": 40, "rope_scaling": yarn})
    ours, plain = load(path), load_target(path, "cpu")
    assert ours.info.context == plain.info.context == 160
    ids = some_ids(150)
    np.testing.assert_allclose(alone(ours, ids), plain.forward([(0, ids, len(ids))])[0], atol=5e-4, rtol=0)


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "t5"}, "is no causal decoder"),
        ({"model_type": "nonesuch"}, r"transformers \S+ does not know a nonesuch model; a newer one may$"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.Own"}},
            "does not know an own model; a newer one may, and code in a folder is never run",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised by gptq, which no backend reads"),
        ({"text_config": {"vocab_size": 8}}, "is a llama model with a part for images or sound, or a wrapper"),
        ({"is_encoder_decoder": True}, "is a llama model with an encoder"),
        ({"hidden_size": 128}, "cannot run it"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2."),
    ],
)
def test_folders_that_cannot_be_served_get_one_line(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    path = write_folder(tmp_path / "m", **SMALL)
    change_config(path, **changes)
    (path / "own.py").write_text("raise SystemExit('code of the folder was run')")
    with pytest.raises(UsageError, match=why) as caught:
        load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", **SMALL)
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(UsageError, match="has an adapter"):
        load(path)


def test_a_file_is_for_the_plain_backend(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="--backend transformers reads Hugging Face folders"):
        load(path)


def test_what_the_package_may_lack(folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_transformers(), "__version__", "4.55.4")
    with pytest.raises(UsageError, match=r"transformers 4\.55\.4 is too old, 4\.56 was wanted: pip install"):
        load(folders("llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs the package transformers: pip install 'pipesd\[transformers\]'"):
        load(folders("llama"))


def test_the_oldest_release_is_the_one_of_the_extra() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(Path(__file__).parents[1] / "setup.cfg", encoding="utf-8")
    bound = f"transformers >={'.'.join(map(str, transformers_model.OLDEST))},"
    assert bound in settings["options.extras_require"]["transformers"]


def test_a_model_that_does_not_fit_is_refused_before_loading(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipesd.cloud import transformers_target
    from pipesd.free_memory import Free

    monkeypatch.setattr(transformers_target, "free_on_host", lambda: [Free(1000, "this machine")])
    monkeypatch.setattr(transformers_target, "load_model", lambda *_, **__: pytest.fail("was loaded"))
    with pytest.raises(UsageError, match=r"needs \d\d\d kB to load, this machine has 1 kB free"):
        load(folders("llama"))
