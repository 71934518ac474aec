"""Each family in each format behind a cloud, a tiny draft model before it: every strategy gives the target's own ids,
and those are transformers' for the same folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from clouds import PATIENT_S, ids_of

from pipesd import CloudConfig, CloudServer, EdgeConfig, EdgeSession
from pipesd.cloud.checkpoint import open_checkpoint
from tests.tiny_convert import write_gguf_of
from tests.tiny_hf import write_folder

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},  # fewer positions than the prompt has
    "qwen2": {},
    "qwen3": {},
}
FORMATS = ["folder", "shards", "gguf", "q8_0"]  # float32, bfloat16 in several files, float32, 8 bits
ROWS = [  # each family and each format in each precision
    (family, FORMATS[(i + shift) % len(FORMATS)], dtype)
    for shift, dtype in enumerate(("float32", "bfloat16"))
    for i, family in enumerate(FAMILIES)
]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip
PROMPT = "Once upon a time there was a printer in a town, and it was for the man to return."
TOKENS = 40
DRAFTING: list[dict[str, Any]] = [
    {"strategy": "vanilla", "draft_length": 3},
    {"strategy": "pipesd"},
    {"strategy": "hsl"},
    {"strategy": "edgellm"},
    {"strategy": "auto"},
]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
NEAR_TIE = 1e-3  # logits; float32 kernels of different kinds differ by less than a tenth of it here
Make = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The model of a family in a format, or its draft model: its weights with some noise, as GGUF. Written once."""
    at = tmp_path_factory.mktemp("families")

    def written(family: str, form: str) -> Path:
        path = at / f"{family}-{form}"
        if path.exists():
            return path
        if form == "folder":
            return write_folder(path, family, **FAMILIES[family])
        if form == "shards":
            return write_folder(path, family, dtype="bfloat16", shards=3, **FAMILIES[family])
        if form == "draft":
            noisy = write_folder(at / f"{family}-noisy", family, noise=0.04, **FAMILIES[family])
            return write_gguf_of(noisy, path)
        return write_gguf_of(written(family, "folder"), path, dtype="q8_0" if form == "q8_0" else "float32")

    return written


class Served:
    """A target behind a cloud in threads of this program, and its draft model."""

    def __init__(self, server: CloudServer, draft: Path) -> None:
        self._server = server
        self._draft = draft
        self.accepted = self.verified = 0

    def ids(self, *, strategy: str, prompt: str = PROMPT, draft_length: int | None = None, **options: Any) -> list[int]:
        config = {} if draft_length is None else {"draft_length": draft_length}
        made = EdgeConfig(
            draft=str(self._draft), cloud=self._server.address, strategy=strategy, connect_s=PATIENT_S, threads=1,
            **config,
        )  # fmt: skip
        with EdgeSession(made) as session:
            ids = ids_of(session, prompt, max_tokens=TOKENS, **options)
            assert session.finish_reason in ("length", "stop"), session.finish_reason
            self.accepted += session.stats["accepted"]
            self.verified += session.stats["verified"]
            return ids

    def prompt_ids(self, prompt: str = PROMPT) -> list[int]:
        from pipesd.edge.tokeniser import Tokeniser

        tokeniser = Tokeniser.open(self._draft)
        try:
            return list(tokeniser.encode(prompt))
        finally:
            tokeniser.close()


def served(target: Path, draft: Path, **config: Any) -> Iterator[Served]:
    with CloudServer(CloudConfig(model=str(target), bind="tcp://127.0.0.1:0", device="cpu", **config)) as server:
        yield Served(server, draft)


def check_strategies(cloud: Served, ways: list[dict[str, Any]]) -> list[int]:
    """Every way gives the ids of the target alone, which are returned; the first two when sampling too. Drafts are
    accepted in part."""
    own = cloud.ids(strategy="cloud")
    for way in ways:
        assert cloud.ids(**way) == own, way
    drawn = cloud.ids(strategy="cloud", **SAMPLED)
    for way in ways[:2]:
        assert cloud.ids(**way, **SAMPLED) == drawn, f"{way}, {SAMPLED}"
    assert min(len(own), len(drawn)) > 10 and own != drawn, "these texts tell nothing"
    assert 0 < cloud.accepted < cloud.verified
    return own


def check_against_transformers(folder: Path, prompt: list[int], ids: list[int]) -> None:
    """Each id is the arg-max of transformers' logits behind the ids before it, up to a near tie."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(dim=-1).values - logits[torch.arange(len(ids)), torch.tensor(ids)]
    assert behind.max().item() < NEAR_TIE, f"position {int(behind.argmax())}: {behind.max().item():.4f} below the best"


def choices(family: str, form: str, dtype: str) -> Any:
    return pytest.param(family, form, dtype, id=f"{family}-{form}-{dtype}")


@pytest.mark.parametrize(
    ("family", "form", "dtype"),
    [
        choices("mistral", "shards", "bfloat16"),
        choices("qwen2", "q8_0", "float32"),
    ],
)
def test_a_family_is_served_bit_by_bit(make: Make, family: str, form: str, dtype: str) -> None:
    for cloud in served(make(family, form), make(family, "draft"), dtype=dtype):
        check_strategies(cloud, DRAFTING[:2])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form", "dtype"), [choices(*each) for each in ROWS])
def test_every_strategy_gives_the_targets_own_ids(make: Make, family: str, form: str, dtype: str) -> None:
    for cloud in served(make(family, form), make(family, "draft"), dtype=dtype):
        check_strategies(cloud, DRAFTING)


@pytest.mark.parametrize("form", ["folder", pytest.param("shards", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["mistral", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "mistral")]
)
def test_the_ids_are_those_of_transformers(make: Make, family: str, form: str) -> None:
    for cloud in served(make(family, form), make(family, "draft"), dtype="float32"):
        own = cloud.ids(strategy="cloud")
        check_against_transformers(make(family, form), cloud.prompt_ids(), own)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_its_gguf_file_are_one_model(make: Make, family: str) -> None:
    """The same weights and the same texts. A GGUF file of mistral has no window, as llama.cpp converts it."""
    folder, converted = (open_checkpoint(make(family, form)) for form in ("folder", "gguf"))
    assert folder.vocabulary == converted.vocabulary
    assert set(folder.tensor_names) == set(converted.tensor_names)
    for name in folder.tensor_names:
        ours, theirs = folder.weight(name), converted.weight(name)
        assert ours is not None and theirs is not None and torch.equal(ours, theirs), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transformers_backend_is_served_bit_by_bit(make: Make, dtype: str) -> None:
    folder = make("qwen3", "folder")
    for cloud in served(folder, make("qwen3", "draft"), dtype=dtype, backend="transformers"):
        own = check_strategies(cloud, DRAFTING)
        if dtype == "float32":
            check_against_transformers(folder, cloud.prompt_ids(), own)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_scaling_is_served_bit_by_bit(make: Make, tmp_path: Path, scaling: str) -> None:
    target = write_folder(
        tmp_path / "target", "llama", rope_parameters={"rope_theta": 10000.0, **SCALINGS[scaling]},
        max_position_embeddings=256 if scaling != "yarn" else 512,
    )  # fmt: skip
    for cloud in served(target, make("llama", "draft")):
        own = check_strategies(cloud, DRAFTING[:2])
        check_against_transformers(target, cloud.prompt_ids(), own)
