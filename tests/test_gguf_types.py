"""Each way in which a GGUF file can store numbers: read as the gguf package and as ggml itself read it, or refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import TinySpec, write_tiny

pytest.importorskip("torch")

from pipesd.cloud import gguf_tensor
from pipesd.cloud.checkpoint import open_checkpoint
from pipesd.cloud.gguf_tensor import stored_tensor
from pipesd.cloud.loading import load_target
from pipesd.errors import UsageError
from pipesd.gguf_layout import TensorPlace

Kind = gguf.GGMLQuantizationType
READABLE = [
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4, Kind.NVFP4,
    Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS,
]  # fmt: skip
UNREADABLE = [Kind.Q8_1, Kind.Q8_K, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q1_0]
ROWS, COLUMNS = 37, 512


def some_blocks(kind: Kind) -> bytes:
    """Random bytes as ROWS rows of that type; their scales may be anything, infinite or no number too."""
    entries, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).bytes(ROWS * COLUMNS // entries * size)


def read(
    path: Path, kind: Kind, data: bytes, shape: tuple[int, ...] = (ROWS, COLUMNS), head_size: int = 0
) -> np.ndarray:
    path.write_bytes(b"before " + data)
    place = TensorPlace(shape, int(kind), len(b"before "))
    return stored_tensor(path, path.stat().st_size, "x", place, head_size).read().numpy()


def test_every_type_of_the_package_is_known_here() -> None:
    assert sorted(READABLE + UNREADABLE) == sorted(Kind), "a new type: can it be read?"


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("piece", [1 << 20, 5 * COLUMNS, 1])
def test_blocks_are_read_as_by_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, piece: int
) -> None:
    monkeypatch.setattr(gguf_tensor, "_PIECE_VALUES", piece)
    data = some_blocks(kind)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(np.frombuffer(data, np.uint8).reshape(ROWS, -1), kind)
        found = read(tmp_path / "x", kind, data)
    assert found.dtype == np.float32 and np.isfinite(found).mean() > 0.5
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.filterwarnings("error")
def test_scales_without_end_are_read_without_a_word_from_numpy(tmp_path: Path) -> None:
    data = np.full(34 * ROWS * COLUMNS // 32, 0, np.uint8)
    data[:2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert np.isnan(read(tmp_path / "x", Kind.Q8_0, data.tobytes())[0, :32]).all()


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ggml() -> Callable[[Kind, bytes], np.ndarray]:
    """Dequantises with ggml's own code."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama_cpp.llama_backend_init()
    folder = Path(llama_cpp.__file__).parent / "lib"
    found = sorted(folder.glob("libggml-base.*"))
    if not found:
        pytest.skip("ggml's library is not where it was")
    traits_of = ctypes.CDLL(str(found[0])).ggml_get_type_traits
    traits_of.restype, traits_of.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]

    def dequantize(kind: Kind, data: bytes) -> np.ndarray:
        traits = traits_of(int(kind)).contents
        entries, size = gguf.GGML_QUANT_SIZES[kind]
        assert (traits.block, traits.size) == (entries, size)
        out = np.empty(len(data) // size * entries, np.float32)
        to_float = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)(traits.to_float)
        to_float(data, out.ctypes.data, out.size)
        return out.reshape(ROWS, COLUMNS)

    return dequantize


@pytest.mark.parametrize("kind", READABLE[1:], ids=lambda kind: kind.name)
def test_blocks_are_read_as_by_ggml(tmp_path: Path, ggml: Callable[[Kind, bytes], np.ndarray], kind: Kind) -> None:
    data = some_blocks(kind)
    with np.errstate(all="ignore"):
        found, wanted = read(tmp_path / "x", kind, data), ggml(kind, data)
        scale = (
            np.abs(wanted)
            .reshape(-1, gguf.GGML_QUANT_SIZES[kind][0])
            .max(axis=1)
            .repeat(gguf.GGML_QUANT_SIZES[kind][0])
            .reshape(wanted.shape)
        )
        finite = np.isfinite(scale)
        assert (np.abs(found - wanted)[finite] <= 2e-6 * scale[finite]).all() and finite.mean() > 0.5


@pytest.mark.parametrize("piece", [1 << 20, 3 * COLUMNS])
def test_halves_of_rotary_pairs_become_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(gguf_tensor, "_PIECE_VALUES", piece)
    matrix = np.arange(24 * COLUMNS, dtype=np.float32).reshape(24, COLUMNS)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    order = [*order, *(8 + i for i in order), *(16 + i for i in order)]
    np.testing.assert_array_equal(read(tmp_path / "x", Kind.F32, matrix.tobytes(), (24, COLUMNS), 8), matrix[order])
    vector = matrix[0, :24]
    np.testing.assert_array_equal(read(tmp_path / "x", Kind.F32, vector.tobytes(), (24,), 8), vector[order])


# --- what is refused when a file is opened ---


def with_type(path: Path, tensor: str, type_id: int) -> Path:
    """A tiny file in which a tensor says that it has another type."""
    data = bytearray(write_tiny(path).read_bytes())
    name = tensor.encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, type_id)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("type_id", "said"),
    [*((int(kind), kind.name) for kind in UNREADABLE), (31, "type 31"), (4_000_000_000, "type 4000000000")],
)
def test_types_that_cannot_be_read_are_refused_by_name_when_opened(tmp_path: Path, type_id: int, said: str) -> None:
    path = with_type(tmp_path / "m.gguf", "blk.1.ffn_up.weight", type_id)
    with pytest.raises(UsageError, match=rf"^{path}: tensor blk.1.ffn_up.weight is stored as {said}, which cannot"):
        open_checkpoint(path)


def test_rows_that_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    path = with_type(tmp_path / "m.gguf", "blk.1.ffn_up.weight", int(Kind.Q4_K))  # its rows have 64 entries
    with pytest.raises(UsageError, match=r"tensor blk.1.ffn_up.weight of shape \(128, 64\) does not fit blocks of 256"):
        open_checkpoint(path)


def test_a_file_that_changes_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=f"^{path}: ends early within tensor output.weight; it has changed"):
        checkpoint.weight("output.weight")
    path.unlink()
    with pytest.raises(UsageError, match=f"^{path}: cannot be read .* within tensor output.weight"):
        checkpoint.weight("output.weight")


# --- what llama.cpp's own quantiser writes ---


@pytest.mark.slow
@pytest.mark.parametrize("name", "Q4_0 Q5_1 Q8_0 Q2_K Q3_K_M Q4_K_M Q6_K IQ4_XS IQ3_S TQ2_0 BF16 F16".split())
def test_models_that_llama_cpp_has_quantised_have_its_logits(tmp_path: Path, name: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    spec = TinySpec(hidden=256, heads=4, kv_heads=2, feed_forward=512)
    full, path = write_tiny(tmp_path / "full.gguf", spec), tmp_path / "m.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    assert llama_cpp.llama_model_quantize(str(full).encode(), str(path).encode(), options) == 0
    ids = np.random.default_rng(0).integers(0, 256, 100).tolist()
    ours = load_target(path, "cpu", slots=1).forward([(0, ids, len(ids))])[0]
    model = llama_cpp.Llama(str(path), logits_all=True, n_ctx=128, type_k=0, type_v=0, verbose=False)
    model.eval(ids)
    theirs = np.array(model.scores[: len(ids)])
    model.close()
    # ggml rounds what it multiplies a quantised matrix with to 8 bits a number
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.05 * theirs.std()
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() >= 0.8
