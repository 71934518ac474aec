"""Makes a tiny random llama, qwen2 or qwen3 model as a GGUF file that both the torch target and llama.cpp load.

Ids 0..255 are the bytes, 256..258 the control tokens, then merges of two earlier ids, then padding ids without a text.
The weights come from a fixed seed and are scaled so that greedy text varies instead of repeating one id. The same seed
with some `noise`, or dtype q8_0, gives a drafter that often agrees with the undisturbed model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import gguf
import numpy as np

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
CONTROL_TEXTS = {ENDOFTEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TENSOR_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_BIASES = {"qwen2": ("attn_q", "attn_k", "attn_v")}  # that llama.cpp wants there


@dataclass(frozen=True)
class TinySpec:
    """Shape and oddities of a tiny model; the defaults are the one that most tests share."""

    seed: int = 0
    n_vocab: int = 512  # width of the output layer
    n_real: int | None = None  # ids with a text; the rest are padding (UNUSED). None: all
    context: int = 512
    dtype: str = "float32"  # of the matrices in the file: float32, float16, bfloat16, q8_0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    head_size: int | None = None  # None: hidden / heads
    biases: tuple[str, ...] | None = None  # matrices of a layer that have one; None: what the architecture must have
    tied: bool = False  # without an output layer of its own
    rope_divisors: tuple[float, ...] = ()  # one for each pair of a head; none: no such tensor
    noise: float = 0.0  # relative to each matrix's spread; 0.02: the same arg-max 5 times in 6, 0.1: 2 in 5
    swap: tuple[int, int] | None = None  # two ids that exchange their texts
    add_bos: bool = False
    bos_id: int = IM_START
    eos_id: int = IM_END
    architecture: str = "llama"
    name: str = "tiny"
    extra: tuple[tuple[str, int | float | str], ...] = ()  # further metadata, (key, value)
    split: int = 0  # tensors of one part, of a file in parts

    @property
    def head(self) -> int:
        """Size of an attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def biased(self) -> tuple[str, ...]:
        """Matrices of a layer that have a bias."""
        return _BIASES.get(self.architecture, ()) if self.biases is None else self.biases


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level BPE vocabulary (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = {byte: chr(byte) for byte in visible}
    hidden = (byte for byte in range(256) if byte not in symbols)
    symbols.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return [symbols[byte] for byte in range(256)]


def vocabulary_texts(n_vocab: int, n_real: int | None = None) -> tuple[list[str], list[int], list[str]]:
    """Texts, token types and merges of a vocabulary of `n_vocab` ids of which the first `n_real` have a text."""
    n_real = n_vocab if n_real is None else n_real
    assert 259 <= n_real <= n_vocab, "the bytes and three control tokens need 259 ids"
    symbols = byte_symbols()
    texts = [*symbols, *CONTROL_TEXTS.values()]
    types = [int(gguf.TokenType.NORMAL)] * 256 + [int(gguf.TokenType.CONTROL)] * 3
    space = symbols[ord(" ")]
    words = "the and def return in er on re at is print for self é 你 好 🙂".split()
    candidates = [(left, right) for word in words for left, right in _chain(_encode(word, symbols))]
    candidates += [(space, letter) for letter in "tasoiwcbphfmdr(="]
    letters = "etaoinshrdlucmfwypvbgk"
    candidates += [(left, right) for left in letters for right in letters]
    merges: list[str] = []
    known = set(texts)
    for left, right in candidates:
        if len(texts) == n_real:
            break
        if left + right not in known and {left, right} <= known:
            known.add(left + right)
            texts.append(left + right)
            types.append(int(gguf.TokenType.NORMAL))
            merges.append(f"{left} {right}")
    assert len(texts) == n_real, f"only {len(texts)} texts can be made, {n_real} were asked for"
    for i in range(n_real, n_vocab):
        texts.append(f"[PAD{i}]")
        types.append(int(gguf.TokenType.UNUSED))
    return texts, types, merges


def _encode(word: str, symbols: list[str]) -> str:
    return "".join(symbols[byte] for byte in word.encode())


def _chain(text: str) -> list[tuple[str, str]]:
    return [(text[:i], text[i]) for i in range(1, len(text))]


def tensors(spec: TinySpec) -> dict[str, np.ndarray]:
    """The float32 matrices of the model under their GGUF names, rows = outputs; a fixed function of the spec."""
    hidden, query_rows, key_rows = spec.hidden, spec.heads * spec.head, spec.kv_heads * spec.head
    made: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        # a generator a matrix, rows first: models of other widths share the rows that both have
        scale = gain / np.sqrt(columns)
        value = np.random.default_rng([spec.seed, crc32(name.encode())]).standard_normal((rows, columns))
        if spec.noise:
            other = np.random.default_rng([spec.seed, 1, crc32(name.encode())])
            value += spec.noise * other.standard_normal((rows, columns))
        made[name] = (value * scale).astype(np.float32)

    def norm(name: str, size: int = hidden, middle: float = 1.0) -> None:
        draw = np.random.default_rng([spec.seed, crc32(name.encode())]).standard_normal(size)
        made[name] = (middle + 0.1 * draw).astype(np.float32)

    matrix("token_embd.weight", spec.n_vocab, hidden, gain=8.0)
    for i in range(spec.layers):
        norm(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", query_rows, hidden, gain=1.5)
        matrix(f"blk.{i}.attn_k.weight", key_rows, hidden, gain=1.5)
        matrix(f"blk.{i}.attn_v.weight", key_rows, hidden)
        matrix(f"blk.{i}.attn_output.weight", hidden, query_rows, gain=2.0)
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", spec.feed_forward, hidden)
        matrix(f"blk.{i}.ffn_up.weight", spec.feed_forward, hidden)
        matrix(f"blk.{i}.ffn_down.weight", hidden, spec.feed_forward, gain=2.0)
        for name in spec.biased:
            norm(f"blk.{i}.{name}.bias", made[f"blk.{i}.{name}.weight"].shape[0], middle=0.0)
        if spec.architecture == "qwen3":
            norm(f"blk.{i}.attn_q_norm.weight", spec.head)
            norm(f"blk.{i}.attn_k_norm.weight", spec.head)
    norm("output_norm.weight")
    if not spec.tied:
        matrix("output.weight", spec.n_vocab, hidden, gain=4.0)
        if spec.n_real is not None:
            made["output.weight"][spec.n_real :] = 0  # padding never wins, as in real checkpoints
    if spec.rope_divisors:
        made["rope_freqs.weight"] = np.array(spec.rope_divisors, np.float32)
    return made


def write_tiny(path: str | Path, spec: TinySpec | None = None, **changes: object) -> Path:
    """Writes the model of `spec` (default: `TinySpec()` with `changes`) to `path` and returns it, or its first part."""
    spec = TinySpec(**changes) if spec is None else spec  # type: ignore[arg-type]
    path = Path(path)
    writer = gguf.GGUFWriter(path, spec.architecture, split_max_tensors=spec.split)
    writer.add_name(spec.name)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.feed_forward)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    if spec.head_size is not None:
        writer.add_key_length(spec.head)
        writer.add_value_length(spec.head)
    writer.add_rope_dimension_count(spec.head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(spec.n_vocab)

    texts, types, merges = vocabulary_texts(spec.n_vocab, spec.n_real)
    if spec.swap is not None:
        first, second = spec.swap
        texts[first], texts[second] = texts[second], texts[first]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(spec.bos_id)
    writer.add_eos_token_id(spec.eos_id)
    writer.add_add_bos_token(spec.add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)

    for key, value in spec.extra:
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)

    matrix_type = _TENSOR_TYPES[spec.dtype]
    for name, weights in tensors(spec).items():
        kind = matrix_type if weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = -(-len(tensors(spec)) // spec.split) if spec.split else 1
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")
