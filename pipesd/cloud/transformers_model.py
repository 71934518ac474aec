"""A causal decoder of a Hugging Face folder as transformers builds it, with a cache that can be cut back; or a refusal.

Nothing is fetched, no code from the folder runs, and only safetensors are read. transformers is imported on first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesd.contexts import stated_context
from pipesd.errors import UsageError
from pipesd.hf_families import attends_alone, named, never_served
from pipesd.json_file import read_object

OLDEST = (4, 56)
_GET_IT = "pip install 'pipesd[transformers]'"
# What transformers raises for a folder that it cannot make a model of; it has no class for it.
_FAILURES = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ArithmeticError,
)  # fmt: skip
# Layers of a cache that hold nothing but keys and values, so that cutting them back leaves no trace.
_PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})


def import_transformers() -> ModuleType:
    """The package; UsageError where it is missing or too old."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"--backend transformers needs the package transformers: {_GET_IT}") from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"transformers {transformers.__version__} is too old, {oldest} was wanted: {_GET_IT}")
    return transformers


class TransformersModel:
    """A loaded model, the folder that it came from, and the class of its caches."""

    def __init__(self, path: Path, model: Any, make_cache: type) -> None:
        self.path = path
        self.model = model
        self.make_cache = make_cache
        self._on_trial = False
        taken = inspect.signature(model.forward).parameters
        self.takes_rows = "logits_to_keep" in taken
        self.cache_name = "cache" if "cache" in taken else "past_key_values"  # the older name goes in 5.40

    @property
    def name(self) -> str:
        """The model's type, as its configuration has it."""
        return str(self.model.config.model_type)

    def without_cache(self, ids: Sequence[int]) -> np.ndarray:
        """Logits (len(ids), width), float32, from one pass that keeps nothing."""
        with torch.inference_mode():
            return self.logits(ids, use_cache=False)[0].float().cpu().numpy()

    def logits(self, ids: Sequence[int], **options: Any) -> Tensor:
        """Logits (1, rows, width) of one pass over `ids`, with what else the model is told."""
        fed = torch.tensor([ids], device=self.model.device)
        with self.failures():
            found: Tensor = self.model(input_ids=fed, **options).logits
            return found

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """While the body runs, what transformers raises in a pass becomes one line; at other times it is a fault."""
        self._on_trial = True
        try:
            yield
        finally:
            self._on_trial = False

    def failures(self) -> AbstractContextManager[None]:
        """What a call into transformers runs in."""
        return _named(self.path) if self._on_trial else nullcontext()


class CachedModel:
    """A model with the keys and values of one session, which grows at its end and is cut back there."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._cache: Any = None
        self.length = 0

    def __call__(self, ids: Sequence[int], rows: int) -> Tensor:
        """Logits (rows, width), float32, behind the last `rows` ids (at least one), which join the cache."""
        if self._cache is None:
            self._cache = self._model.make_cache()
        options = {"use_cache": True, self._model.cache_name: self._cache}
        if self._model.takes_rows:
            options["logits_to_keep"] = rows
        logits = self._model.logits(ids, **options)
        self.length += len(ids)
        return logits[0, -rows:].float()

    def cut(self, length: int) -> None:
        """Keeps the first `length` positions; 0 frees the memory."""
        if length == 0:
            self._cache = None
        elif length < self.length:
            with self._model.failures():
                self._cache.crop(length - self.length)  # how many go: a negative number means that in all releases
        self.length = min(self.length, length)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the keys and values hold."""
        layers = [] if self._cache is None else self._cache.layers
        parts = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


def read_config(path: Path) -> Any:
    """The configuration of the folder at `path`. UsageError for what is no causal decoder, or cannot be cut back."""
    transformers = import_transformers()
    values = read_object(path / "config.json")
    if never := never_served(values):
        raise UsageError(f"{path}: {'; '.join(never)}")
    kind = values.get("model_type")
    if isinstance(kind, str) and kind and kind not in transformers.CONFIG_MAPPING:
        own = ", and code in a folder is never run" if values.get("auto_map") else ""
        raise UsageError(
            f"{path}: transformers {transformers.__version__} does not know {named(kind)} model; a newer one may{own}"
        )
    with _named(path), _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    kind = config.model_type
    if (path / "adapter_config.json").exists():  # transformers would load another folder, the one that it names
        raise UsageError(f"{path}: has an adapter (adapter_config.json); merge it into the model, and save that")
    if hasattr(config, "quantization_config"):  # an empty one, which transformers would not know how to read
        del config.quantization_config
    if config.is_encoder_decoder or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"{path}: {kind} is no causal decoder; use a model that continues text")
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _named(path):
        layers = transformers.DynamicCache(config=config).layers
    strange = {type(layer).__name__ for layer in layers} - _PLAIN_LAYERS
    stateful = getattr(model_class, "_is_stateful", False) and not attends_alone(values)
    if strange or stateful:
        raise UsageError(
            f"{path}: {kind} keeps a state that cannot be rolled back when a draft is refused; "
            "use a model that caches keys and values alone"
        )
    return config


def positions_of(config: Any) -> int | None:
    """How many positions the model is served for, by the rule of `stated_context`; None: nothing names a bound."""
    text = config.get_text_config()
    bound = getattr(text, "max_position_embeddings", None)  # some families map it to a name of their own
    return stated_context(text.to_dict() | {"max_position_embeddings": bound}) or None


def cached_numbers(config: Any) -> int:
    """How many numbers a position takes in a cache of whole keys and values, 0 where the configuration does not say."""
    text = config.get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", 0), getattr(text, "num_attention_heads", 0)
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(heads, 1)
    return int(2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * size)


def load_model(path: Path, config: Any, device: torch.device, dtype: torch.dtype, *, exact: bool) -> TransformersModel:
    """The model with all its weights on `device`. UsageError, one line, if some are missing or do not fit.

    `exact`: each row of a mixture of experts is multiplied by itself, where the release can do that; else the rows that
    share an expert are multiplied together, so that their bits depend on how many those are.
    """
    transformers = import_transformers()
    apart = exact and hasattr(transformers.PreTrainedModel, "get_correct_experts_implementation")
    options = {"experts_implementation": "batched_mm"} if apart else {}
    with _named(path), _quiet(transformers):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        model = model.to(device).eval()
    if missing := sorted(found["missing_keys"]):
        raise UsageError(f"{path}: has no tensor {missing[0]}; copy or download the folder again")
    return TransformersModel(path, model, transformers.DynamicCache)


def _first_line(error: Exception) -> str:
    """What an error says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " …"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Failures of transformers as one line with the folder's name."""
    from huggingface_hub import errors
    from safetensors import SafetensorError

    wrong_value = getattr(errors, "StrictDataclassError", SafetensorError)  # later releases look at a config's values
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"{path}: transformers needs a package for it ({_first_line(error)}); install that package"
        ) from error
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{path}: does not fit into the memory of the device ({_first_line(error)}); end what else uses it, ask "
            "for a smaller --context or fewer --workers"
        ) from error
    except (*_FAILURES, SafetensorError, wrong_value) as error:
        version = import_transformers().__version__
        raise UsageError(
            f"{path}: transformers {version} cannot run it ({_first_line(error)}); use a complete folder of a decoder "
            "that it knows"
        ) from error


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Runs the body without transformers' progress bars and warnings, and leaves its settings as it found them."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
