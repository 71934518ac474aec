"""The draft model on llama.cpp: its cache is always the committed prefix and the live draft."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.cpu import usable_cpus
from pipesd.edge.drafter import PIECE, DraftContextFull, Drafter, DrafterFailed, estimate_bytes
from pipesd.edge.gguf_header import read_header
from pipesd.edge.llama import native
from pipesd.errors import UsageError
from pipesd.policy.residual import Proposals
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling
from tests.tiny import IM_END, TinySpec, write_tiny
from tests.tiny_mamba import write_tiny_mamba

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def mamba(folder: Path) -> Path:
    return write_tiny_mamba(folder / "mamba.gguf")


@pytest.fixture
def drafter(tiny: Path) -> Iterator[Drafter]:
    made = Drafter(tiny, threads=1)
    yield made
    made.close()


def drafts(drafter: Drafter, count: int) -> list[int]:
    return [drafter.draft()[0] for _ in range(count)]


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """The ids that a fresh model says, for comparison."""
    fresh = Drafter(path, threads=1)
    try:
        fresh.extend(prompt)
        return drafts(fresh, count)
    finally:
        fresh.close()


def logits(drafter: Drafter) -> np.ndarray:
    """The row behind all that the drafter knows."""
    drafter.prefill(len(drafter))
    drafter.draft()
    drafter.rollback(len(drafter) - 1)
    return drafter._logits().copy()


class Overridden:
    """llama.cpp's functions, some of them replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def test_guess_and_probability_are_the_softmax_of_the_row(drafter: Drafter) -> None:
    drafter.extend(PROMPT)
    token_id, p_draft, entropy, *_ = drafter.draft()
    drafter.rollback(len(PROMPT))
    row = logits(drafter).astype(np.float64)
    weights = np.exp(row - row.max())
    assert token_id == row.argmax()
    law = weights / weights.sum()
    assert p_draft == pytest.approx(law[token_id], rel=1e-5)
    assert entropy == pytest.approx(-(law * np.log(law)).sum(), rel=1e-4)


def row_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Logits of the tiny model's width."""
    row = rng.normal(0, 3, 512)
    if kind == "one id alone":
        row[:] = -np.inf
        row[7] = 2.0
    elif kind == "one id, others far below":
        row[7] += 1000.0
    elif kind == "even":
        row[:] = -4.5
    elif kind == "some ids impossible":
        row[::3] = -np.inf
    elif kind == "as far apart as can be":
        row = np.where(row > 0, 1.0e38, -1.0e38)
    return row.astype(np.float32)


@pytest.mark.parametrize(
    "kind",
    ["any", "one id alone", "one id, others far below", "even", "some ids impossible", "as far apart as can be"],
)
def test_probability_and_entropy_come_from_the_row_alone_at_temperature_1(drafter: Drafter, kind: str) -> None:
    """So the confidence that a trigger sees cannot depend on how a request asks to sample."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        row = row_of(kind, rng)
        drafter._logits = lambda row=row: row  # type: ignore[method-assign, misc]
        with np.errstate(all="raise", under="ignore"):
            drawn = drafter._choose()
        weights = np.exp(row.astype(np.float64) - float(row.max()))
        law = weights[weights > 0] / weights.sum()
        assert drawn.id == row.argmax()
        assert drawn.p_draft == pytest.approx(law.max(), rel=1e-5)
        assert drawn.entropy == pytest.approx(-(law * np.log(law)).sum(), rel=1e-4, abs=1e-6) and drawn.entropy >= 0.0


@pytest.mark.parametrize("options", [{"temperature": 0.1}, {"temperature": 2.0}, {"temperature": 1.0, "top_k": 1}])
def test_what_is_drawn_follows_the_options_and_its_probability_does_not(
    drafter: Drafter, options: dict[str, float]
) -> None:
    """The sampler gets the real ids' logits, the position and the whole text before it; triggers see the same figures
    for an id, however it came to be drawn."""
    sampler = Sampler(Sampling(**options, presence_penalty=0.5, logit_bias=((11, 3.0),)), seed=5)
    drafter.rollback(0)
    drafter.extend([3, 5, 7])
    prefix = [3, 5, 7, drafter.draft().id]
    drawn = drafter.draft(sampler)
    row = drafter._logits()
    choice = sampler.choose(row[: drafter._real], len(prefix), prefix)
    assert choice is not None and (drawn.id, drawn.margin) == (choice.id, choice.margin)
    assert drafter._ids == [*prefix, drawn.id] and drawn.p_sent is None
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    law = weights / weights.sum()
    assert drawn.p_draft == pytest.approx(law[drawn.id], rel=1e-4)
    assert drawn.entropy == pytest.approx(-(law * np.log(law)).sum(), rel=1e-4)


def test_what_a_token_was_drawn_from_stays_when_llama_cpp_writes_the_next_row(drafter: Drafter) -> None:
    proposals = Proposals(Sampler(Sampling(temperature=4.0, method=Method.REJECTION), seed=5))
    drafter.extend([3, 5, 7])
    drafter.draft(proposals)
    address, sent = drafter._row_address, [proposals.p_sent(3, token) for token in range(512)]
    drafter.draft(proposals)
    assert drafter._row_address == address, "the row is in the same place"
    assert [proposals.p_sent(3, token) for token in range(512)] == sent
    assert [proposals.p_sent(4, token) for token in range(512)] != sent


def test_a_sampler_that_cannot_draw_leaves_the_guess_without_confidence(drafter: Drafter) -> None:
    drafter._logits = lambda: np.full(512, np.nan, np.float32)  # type: ignore[method-assign]
    drafter.extend([3])
    drawn = drafter._choose(Sampler(Sampling(temperature=1.0), seed=5))
    assert (drawn.p_draft, drawn.margin) == (0.0, 0.0) and 0 <= drawn.id < 512


def test_the_cache_is_the_prefix_and_the_live_draft_after_every_step(drafter: Drafter) -> None:
    rng = np.random.default_rng(1)
    known: list[int] = []
    for _ in range(400):
        step = rng.integers(4)
        if step == 0:
            ids = rng.integers(0, 512, int(rng.integers(0, 2 * PIECE))).tolist()
            drafter.extend(ids)
            known += ids
        elif step == 1 and known and drafter.room:
            known.append(drafter.draft()[0])
        elif step == 2:
            most = int(rng.integers(0, PIECE))
            pending = len(known) - len(drafter.cached)
            assert drafter.prefill(most) == (pending - min(most, pending) if len(known) <= drafter.context else 0)
        else:
            pos = int(rng.integers(0, len(known) + 1))
            drafter.rollback(pos)
            del known[pos:]
        assert len(drafter) == len(known)
        assert drafter.cached == known[: len(drafter.cached)]


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_model_against_itself_is_always_right_but_where_a_rejection_is_forced(tiny: Path, length: int) -> None:
    edge, target = Drafter(tiny, threads=1), Drafter(tiny, threads=1)
    committed = list(PROMPT)
    edge.extend(committed)
    target.extend(committed)
    try:
        for round_ in range(200):
            draft = drafts(edge, length)
            forced = round_ % (length + 2)  # a position of the draft, the target's own token, or none
            for i in range(length + 1):
                said = target.draft()[0]
                target.rollback(len(committed))  # the guess was not fed, so this cuts no cache
                committed.append((said + 1) % 256 if i == forced else said)
                target.extend(committed[-1:])
                if i < length and i != forced:
                    assert draft[i] == said, f"round {round_}, position {i}"
                if i == length or draft[i] != committed[-1]:
                    break
            same = len(committed) - 1  # all but the last were drafted
            edge.rollback(same)
            assert edge.cached == committed[: len(edge.cached)]
            assert len(edge.cached) >= same - 1, "cut too far: only the last guess was not fed"
            edge.extend(committed[same:])
        edge.draft()
        assert edge.cached == committed
    finally:
        edge.close()
        target.close()


def test_a_second_prompt_gives_the_logits_of_a_fresh_model(tiny: Path, drafter: Drafter) -> None:
    first, second = [7, *range(100, 140)], [7, *range(30, 60)]
    drafter.extend(first)
    drafts(drafter, 8)
    drafter.rollback(1)
    drafter.extend(second[1:])
    fresh = Drafter(tiny, threads=1)
    fresh.extend(second)
    np.testing.assert_allclose(logits(drafter), logits(fresh), rtol=0, atol=1e-5)
    drafter.rollback(0)
    drafter.extend(first)
    fresh.rollback(0)
    fresh.extend(first)
    np.testing.assert_allclose(logits(drafter), logits(fresh), rtol=0, atol=1e-5)
    fresh.close()


def test_draft_behind_a_prefix_that_was_fed_before(drafter: Drafter, tiny: Path) -> None:
    drafter.extend(PROMPT)
    assert drafter.prefill(100) == 0
    told = drafts(drafter, 6)
    drafter.rollback(len(PROMPT) + 3)  # nothing pending: the last id is fed once more for its logits
    assert drafts(drafter, 3) == told[3:]
    drafter.rollback(2)
    assert drafts(drafter, 3) == greedy(tiny, PROMPT[:2], 3)


def test_prefill_in_small_pieces_can_be_left_at_any_time(drafter: Drafter, tiny: Path) -> None:
    prompt = [(11 * i) % 256 for i in range(300)]
    drafter.extend(prompt)
    assert drafter.prefill(0) == 300
    assert drafter.prefill(70) == 230
    assert drafter.cached == prompt[:70]
    drafter.rollback(70)  # its logits were not asked for
    assert drafts(drafter, 2) == greedy(tiny, prompt[:70], 2)
    drafter.rollback(50)  # cancelled: usable at once
    drafter.extend(PROMPT)
    assert drafts(drafter, 4) == greedy(tiny, prompt[:50] + PROMPT, 4)


def test_the_context_ends_without_an_error_of_llama_cpp(tiny: Path) -> None:
    drafter = Drafter(tiny, threads=1, context=40)
    assert drafter.context == 40 and drafter.room == 40
    drafter.extend(range(30))
    assert len(drafts(drafter, 10)) == 10
    assert drafter.room == 0
    with pytest.raises(DraftContextFull, match="40 positions"):
        drafter.draft()
    drafter.extend(range(500))  # what is committed beyond is kept in mind only
    assert (len(drafter), drafter.room, drafter.prefill(1000)) == (540, 0, 0)
    with pytest.raises(DraftContextFull):
        drafter.draft()
    drafter.rollback(5)
    assert drafts(drafter, 3) == greedy(tiny, list(range(5)), 3)
    drafter.close()


def test_a_context_beyond_the_models_own_is_not_used(tiny: Path) -> None:
    drafter = Drafter(tiny, threads=1, context=1 << 20)
    assert drafter.context == 2048
    drafter.close()


def test_padding_ids_are_never_proposed_and_the_probability_counts_the_whole_row(folder: Path) -> None:
    path = write_tiny(folder / "padded.gguf", n_vocab=512, n_real=470)
    drafter = Drafter(path, threads=1)
    assert (drafter.vocabulary.size, drafter.vocabulary.real_size) == (512, 470)
    drafter.extend(PROMPT)
    drafter.draft()
    row = np.zeros(512, np.float32)
    row[500], row[469], row[3] = 30.0, 29.0, 28.0
    drafter._logits = lambda: row  # type: ignore[method-assign]
    token_id, p_draft, *_ = drafter._choose()
    assert token_id == 469
    assert p_draft == pytest.approx(np.exp(-1) / (1 + np.exp(-1) + np.exp(-2)), rel=1e-4)
    drafter.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_a_guess_without_confidence(drafter: Drafter, bad: float) -> None:
    for row in (np.full(512, bad, np.float32), np.r_[np.zeros(500), [bad] * 12].astype(np.float32)):
        drafter._logits = lambda row=row: row  # type: ignore[method-assign, misc]
        with np.errstate(all="raise", under="ignore"):
            token_id, p_draft, entropy, *_ = drafter._choose()
        assert 0 <= token_id < 512 and 0.0 <= p_draft <= 1.0
        wanted = np.log(500) if np.isfinite(row.max()) else np.log(512)
        assert entropy == pytest.approx(wanted, rel=1e-5)
        if bad != -np.inf:
            assert p_draft == 0.0


def test_ids_that_the_model_cannot_hold_are_fed_as_a_stand_in(drafter: Drafter) -> None:
    drafter.extend([*PROMPT, 512, 2**31, 2**40])
    drafter.draft()
    assert drafter.cached == [*PROMPT, 512, 2**31, 2**40]


def test_an_end_id_is_proposed_like_any_other(drafter: Drafter) -> None:
    row = np.zeros(512, np.float32)
    row[IM_END] = 9.0
    drafter._logits = lambda: row  # type: ignore[method-assign]
    drafter.extend(PROMPT)
    assert drafter.draft()[0] == IM_END and IM_END in drafter.end_ids


def test_a_removal_that_fails_never_leaves_stale_state(drafter: Drafter, tiny: Path) -> None:
    real = drafter._llama
    for answer in (False, True):  # it says that it failed, or says nothing and does not do it
        drafter._llama = Overridden(real, llama_memory_seq_rm=lambda *_, answer=answer: answer)
        drafter.rollback(0)
        drafter.extend(PROMPT)
        told = drafts(drafter, 8)
        drafter.rollback(len(PROMPT) + 2)
        assert drafter.cached == []
        assert drafts(drafter, 6) == told[2:]
        assert drafter.cached == [*PROMPT, *told[:-1]]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_quantised_model_is_not_taken_for_a_recurrent_one(tmp_path: Path, seed: int) -> None:
    """Its logits depend on how a text is cut into pieces, by more than rounding."""
    import llama_cpp

    spec = TinySpec(hidden=256, feed_forward=512, layers=8, seed=seed)
    whole, path = write_tiny(tmp_path / "whole.gguf", spec), tmp_path / "quantised.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S
    assert llama_cpp.llama_model_quantize(bytes(whole), bytes(path), options) == 0
    with contextlib.closing(Drafter(path, context=64)) as drafter:
        assert drafter.drops_tail and drafter.notices == ()


def test_a_recurrent_model_is_recognised_and_fed_again(mamba: Path, drafter: Drafter) -> None:
    recurrent = Drafter(mamba, threads=1)
    assert drafter.drops_tail and drafter.notices == ()
    assert not recurrent.drops_tail
    assert "tiny-mamba" in recurrent.notices[0]
    recurrent.extend(PROMPT)
    told = drafts(recurrent, 12)
    recurrent.rollback(len(PROMPT) + 4)
    assert recurrent.cached == []
    assert drafts(recurrent, 8) == told[4:]
    recurrent.rollback(0)
    recurrent.extend(PROMPT)
    assert drafts(recurrent, 12) == told
    recurrent.close()


def test_a_failing_decode_is_told_and_the_next_try_starts_afresh(drafter: Drafter, tiny: Path) -> None:
    drafter.extend(PROMPT)
    drafter.draft()
    real, drafter._llama = drafter._llama, Overridden(drafter._llama, llama_decode=lambda *_: -3)
    with pytest.raises(DrafterFailed, match=r"tiny: llama\.cpp fails with code -3"):
        drafter.draft()
    assert drafter.cached == []
    drafter._llama = real
    drafter.rollback(len(PROMPT))
    assert drafts(drafter, 4) == greedy(tiny, PROMPT, 4)


def test_a_model_that_cannot_be_run_is_refused_at_load(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Overridden(native(), llama_decode=lambda *_: -3)
    monkeypatch.setattr("pipesd.edge.drafter.native", lambda: failing)
    with pytest.raises(UsageError, match=r"tiny\.gguf: cannot serve as a draft model: .*code -3"):
        Drafter(tiny)
    no_context = Overridden(native(), llama_init_from_model=lambda *_: None)
    monkeypatch.setattr("pipesd.edge.drafter.native", lambda: no_context)
    with pytest.raises(UsageError, match=r"tiny\.gguf: no context of 2048 positions"):
        Drafter(tiny)


def test_only_the_last_row_of_logits_is_asked_for(drafter: Drafter) -> None:
    asked: list[int] = []
    real = drafter._llama

    def decode(context: Any, batch: Any) -> int:
        asked.append(sum(batch.logits[i] for i in range(batch.n_tokens)))
        return int(real.llama_decode(context, batch))

    drafter._llama = Overridden(real, llama_decode=decode)
    drafter.extend(range(2 * PIECE + 5))
    drafts(drafter, 2)
    assert asked == [0, 0, 1, 1]


def test_the_estimate_does_not_grow_with_context_times_vocabulary(folder: Path) -> None:
    path = write_tiny(folder / "wide.gguf", n_vocab=152_064, n_real=300, context=32_768, hidden=16, heads=2, tied=True)
    cache = read_header(path).cache_bytes(32_768)
    assert cache == 2 * 2 * (8 + 8) * 32_768 * 2  # layers, heads, key and value, positions, float16
    assert estimate_bytes(path, 32_768) == path.stat().st_size + cache + PIECE * 152_064 * 4
    assert estimate_bytes(path) == estimate_bytes(path, 8192) < estimate_bytes(path, 32_768)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_context_times_vocabulary(folder: Path) -> None:
    path = write_tiny(folder / "wide.gguf", n_vocab=152_064, n_real=300, context=32_768, hidden=16, heads=2, tied=True)
    script = (
        "import re, sys\n"
        "from pipesd.edge.drafter import Drafter\n"
        "drafter = Drafter(sys.argv[1], threads=1, context=int(sys.argv[2]))\n"
        "drafter.extend(range(200)); drafter.draft(); drafter.close()\n"
        # its own peak; that of getrusage begins with the size of the process that started it
        "print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) * 1024)"
    )
    small, large = (
        int(subprocess.run([sys.executable, "-c", script, path, str(context)], capture_output=True, check=True).stdout)
        for context in (512, 32_768)
    )
    assert large - small < 2 * read_header(path).cache_bytes(32_768) + (64 << 20)
    assert large < estimate_bytes(path, 32_768) + (400 << 20)  # interpreter, numpy, llama.cpp, vocabulary


def test_calls_from_several_threads_queue(drafter: Drafter) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                drafter.extend(rng.integers(0, 512, 3).tolist())
                drafter.prefill(2)
                drafter.draft()
                drafter.rollback(1)
        except (AssertionError, UsageError) as failure:
            failures.append(failure)

    drafter.extend(PROMPT)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert drafter.cached == PROMPT[:1][: len(drafter.cached)]


def test_threads_default_to_what_the_process_may_use(tiny: Path) -> None:
    drafter = Drafter(tiny)
    assert drafter.threads == min(8, max(1, usable_cpus() - 1))
    drafter.close()
    one = min(os.sched_getaffinity(0))
    script = (
        f"import os, sys; os.sched_setaffinity(0, {{{one}}})\n"
        "from pipesd.edge.drafter import Drafter\n"
        "drafter = Drafter(sys.argv[1]); print(drafter.threads); drafter.close()"
    )
    done = subprocess.run([sys.executable, "-c", script, tiny], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "1"


def test_a_gpu_that_the_build_cannot_use_is_refused(tiny: Path) -> None:
    from llama_cpp import llama_supports_gpu_offload

    if llama_supports_gpu_offload():
        pytest.skip("this build of llama-cpp-python has GPU support")
    with pytest.raises(UsageError, match="--gpu-layers 4: this build"):
        Drafter(tiny, gpu_layers=4)


def test_close_may_be_called_twice_and_later_calls_are_told(tiny: Path) -> None:
    drafter = Drafter(tiny, threads=1)
    drafter.extend(PROMPT)
    drafter.close()
    drafter.close()
    for call in (drafter.draft, lambda: drafter.prefill(1), lambda: drafter.rollback(0)):
        with pytest.raises(UsageError, match="closed"):
            call()
    with pytest.raises(UsageError, match="closed"):
        drafter.tokeniser.encode("a")
    assert drafter.vocabulary.pieces[97] == b"a"  # what was read stays


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("drafter.close(); drafter.close()", 0),
        ("", 0),
        ("kept = [drafter]; kept.append(kept)", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_the_interpreter_ends_cleanly(tiny: Path, ending: str, code: int) -> None:
    script = (
        "import sys\n"
        "from pipesd.edge.drafter import Drafter\n"
        "drafter = Drafter(sys.argv[1], threads=1)\n"
        "drafter.extend([1, 2, 3]); drafter.draft()\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", script, tiny], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    if code != -2:
        assert done.stderr == ""
    assert "Exception ignored" not in done.stderr and done.stdout == ""


@pytest.mark.model
def test_the_real_pair_agrees_often_and_drafts_text(demo_pair: tuple[Path, Path]) -> None:
    draft_path, target_path = demo_pair
    edge, target = Drafter(draft_path, threads=1), Drafter(target_path, threads=1)
    prompt = edge.tokeniser.encode("def fibonacci(n):\n    if n")
    committed = list(prompt)
    edge.extend(committed)
    target.extend(committed)
    right = 0
    for _ in range(60):
        said = target.draft()[0]
        right += edge.draft()[0] == said
        edge.rollback(len(committed))
        edge.extend([said])
        committed.append(said)
        assert edge.cached == committed[:-1]
    assert right >= 36
    edge.close()
    target.close()


@pytest.mark.model
def test_the_real_model_forgets_a_first_prompt(demo_pair: tuple[Path, Path]) -> None:
    used, fresh = Drafter(demo_pair[0], threads=1), Drafter(demo_pair[0], threads=1)
    first, second = (used.tokeniser.encode(text) for text in ("The sea is full of", "The moon rises over the"))
    assert first[0] == second[0]
    used.extend(first)
    drafts(used, 5)
    used.rollback(1)
    # pieces of the same lengths, so that the same kernels run and nothing but the cache can differ
    fresh.extend(second[:1])
    fresh.prefill(1)
    for drafter in (used, fresh):
        drafter.extend(second[1:])
    np.testing.assert_allclose(logits(used), logits(fresh), rtol=0, atol=1e-5)
    used.close()
    fresh.close()
