"""What the torch target draws is the same whatever shares the pass, however the text was read, in both precisions."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny

pytest.importorskip("torch")

import torch

from pipesd.cloud.loading import load_target
from pipesd.cloud.target import MOST_ROWS, TorchTarget
from pipesd.policy.accept import Choices, Draw, choose
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Method, Sampling

OPTIONS = {  # the tiny model is very sure of itself
    "plain": Sampling(temperature=5.0),
    "cut": Sampling(temperature=8.0, top_k=40, top_p=0.9, min_p=0.02),
    "penalised": Sampling(temperature=4.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "greedy and penalised": Sampling(repetition_penalty=1.5, logit_bias=((7, 2.0), (300, -3.0))),
}
SEED, PROMPT, COUNT = 11, 9, 50


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest, tiny_file: Path) -> TorchTarget:
    return load_target(tiny_file, device="cpu", dtype=request.param)


def some_ids(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(512, size=count).tolist()
    return drawn


def verify(target: TorchTarget, slot: int, text: Sequence[int], draft: Sequence[int], sampler: Sampler) -> Choices:
    """One pass over the last of `text` and a draft behind it."""
    target.truncate(slot, len(text) - 1)
    draw = Draw(sampler, tuple(text), tuple(draft))
    [choices] = target.sample([(slot, [text[-1], *draft], len(draft) + 1)], [draw])
    return choices


def alone(target: TorchTarget, prompt: Sequence[int], sampler: Sampler, count: int = COUNT) -> list[int]:
    """What the target samples by itself, one id a pass."""
    text = list(prompt)
    target.forward([(0, text[:-1], 0)])
    for _ in range(count):
        text.append(verify(target, 0, text, [], sampler).ids[0])
    target.truncate(0, 0)
    return text


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sampled_text_is_the_same_with_drafts_of_any_length(target: TorchTarget, options: str) -> None:
    sampler, prompt = Sampler(OPTIONS[options], SEED), some_ids(PROMPT)
    text = alone(target, prompt, sampler)
    assert len(set(text[PROMPT:])) > 15, "it varies"
    for length in range(1, 9):
        for wrong in (0, 3):  # drafts that are right, and drafts that are wrong from the third token on
            got = list(prompt)
            target.forward([(1, got[:-1], 0)])
            while len(got) < len(text):
                draft = text[len(got) : len(got) + length]
                if wrong:
                    draft[wrong - 1 :] = [(token + 1) % 512 for token in draft[wrong - 1 :]]
                choices = verify(target, 1, got, draft, sampler)
                assert choices.accepted == (min(len(draft), wrong - 1) if wrong else len(draft))
                got += [*draft[: choices.accepted], choices.ids[choices.accepted]]
            assert got[: len(text)] == text
            target.truncate(1, 0)


def test_sampled_ids_do_not_depend_on_mates_or_on_how_the_prompt_was_read(target: TorchTarget) -> None:
    samplers = [Sampler(options, seed) for seed, options in enumerate(OPTIONS.values())]
    texts = [alone(target, some_ids(PROMPT + 40 * i, i), sampler) for i, sampler in enumerate(samplers)]
    chance = np.random.default_rng(1)
    got = [text[:-COUNT] for text in texts]
    for slot, ids in enumerate(got):  # read in pieces, of which some share a pass with others' tokens
        start = 0
        while start < len(ids) - 1:
            piece = ids[start : min(start + int(chance.integers(1, 20)), len(ids) - 1)]
            target.forward([(7, [1, 2], 1), (slot, piece, 0)])
            target.truncate(7, 0)
            start += len(piece)
    while any(len(ids) < len(text) for ids, text in zip(got, texts, strict=True)):
        order = [i for i in chance.permutation(len(got)).tolist() if len(got[i]) < len(texts[i])]
        drafts = {i: texts[i][len(got[i]) :][: int(chance.integers(0, 6))] for i in order}
        batch: list[Any] = [(i, [got[i][-1], *drafts[i]], len(drafts[i]) + 1) for i in order]
        draws: list[Any] = [Draw(samplers[i], tuple(got[i]), tuple(drafts[i])) for i in order]
        batch.append((6, [5, 6, 7], 2))  # who wants the arg-max takes part
        for i, choices in zip(order, target.sample(batch, [*draws, None]), strict=False):
            got[i] += [*drafts[i], choices.ids[-1]]
            target.truncate(i, len(got[i]) - 1)
        target.truncate(6, 0)
    assert [ids[: len(text)] for ids, text in zip(got, texts, strict=True)] == texts


def test_a_seed_that_differs_shows(target: TorchTarget) -> None:
    """The comparisons above would notice a draw that is off."""
    prompt = some_ids(PROMPT)
    first = [alone(target, prompt, Sampler(OPTIONS["plain"], seed), 10)[PROMPT:] for seed in range(8)]
    assert len({ids[0] for ids in first}) > 3 and len(set(map(tuple, first))) == 8


def test_each_entry_has_what_its_logits_alone_give(target: TorchTarget) -> None:
    ids = some_ids(MOST_ROWS + 40)  # the pass is cut within the rows that are wanted
    [logits] = target.forward([(0, ids, 60)])
    target.truncate(0, 0)
    sampler = Sampler(OPTIONS["cut"], SEED)
    draw = Draw(sampler, tuple(ids[:-59]), tuple(ids[-59:]))
    plain, sampled, nothing = target.sample([(1, ids[:20], 1), (0, ids, 60), (2, ids[:3], 0)], [None, draw, None])
    assert sampled == choose(logits, draw) and len(sampled.ids) == 60
    assert nothing == Choices((), 0)
    target.truncate(1, 0)
    assert plain == Choices(target.greedy([(1, ids[:20], 1)])[0], 0)


def test_ids_drawn_where_the_logits_are_are_the_same(target: TorchTarget) -> None:
    """On a device of its own; here it is this one. What must be drawn by the host shares the pass."""
    ids = some_ids(MOST_ROWS + 40)
    tested, logged = Sampling(temperature=5.0, method=Method.REJECTION), Sampling(temperature=5.0, logprobs=2)
    batch: list[Any] = [(4, ids[:20], 1), (5, ids[:9], 0), *((slot, ids[: 30 + slot], 8) for slot in range(4))]
    draws: list[Draw | None] = [None, None]
    draws += [Draw(Sampler(options, SEED), tuple(ids[:23]), tuple(ids[23:30])) for options in OPTIONS.values()]
    draws = [
        draw and Draw(draw.sampler, tuple(fed[: len(fed) - 7]), tuple(fed[len(fed) - 7 :]))
        for draw, (_, fed, _) in zip(draws, batch, strict=True)
    ]
    for slot, options in ((6, tested), (7, logged)):
        batch.append((slot, ids, 60))
        p_draft = (0.1,) * 59 if options.tests else ()
        draws.append(Draw(Sampler(options, SEED), tuple(ids[:-59]), tuple(ids[-59:]), p_draft))
    wanted = target.sample(batch, draws)
    for slot in range(8):
        target.truncate(slot, 0)
    target._draws_on_device = True
    got = target.sample(batch, draws)
    assert [(c.ids, c.accepted, c.logprobs) for c in got] == [(c.ids, c.accepted, c.logprobs) for c in wanted]
    assert got[-2].refusal is not None and len(got[-1].logprobs or ()) == 1 + got[-1].accepted
    target.truncate(4, 0)
    assert target.sample([(4, ids[:20], 1)], [None]) == wanted[:1]


def test_the_logits_of_one_piece_are_gone_before_the_next_is_computed(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pass of many long drafts takes more of a device than was kept back for it."""
    seen: list[weakref.ref[torch.Tensor]] = []
    run = target._pass

    def watched(batch: Any) -> torch.Tensor | None:
        assert not any(each() is not None for each in seen)
        logits = run(batch)
        assert logits is not None
        seen.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(target, "_pass", watched)
    target._draws_on_device = True
    ids = some_ids(MOST_ROWS - 50)
    draw = Draw(Sampler(OPTIONS["cut"], SEED), tuple(ids[:1]), tuple(ids[1:]))
    target.sample([(slot, ids, len(ids)) for slot in range(3)], [draw] * 3)
    assert len(seen) == 3


@pytest.mark.parametrize("method", [Method.NOISE, Method.REJECTION])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_session_whose_rows_are_not_finite_harms_no_other(target: TorchTarget, value: float, method: Method) -> None:
    ids = some_ids(60)
    sampler = Sampler(Sampling(temperature=5.0, method=method), SEED)

    def draws() -> list[Draw | None]:
        p_draft = (0.25,) * 4 if method is Method.REJECTION else ()
        return [Draw(sampler, tuple(ids[:51]), tuple(ids[51:55]), p_draft) for _ in range(3)]

    for slot in range(3):
        target.forward([(slot, ids[:50], 0)])
    batch: list[Any] = [(slot, ids[50:55], 5) for slot in range(3)]
    wanted = target.sample(batch, draws())[0]
    for slot in range(3):
        target.truncate(slot, 50)
    with torch.inference_mode():
        target._cache._slots[1].data[0, 3, 20, 5] = value
    got = target.sample(batch, draws())
    assert (got[1].ids[0], got[1].accepted) == (-1, 0) and got[1].refusal is None
    for mate in (got[0], got[2]):
        assert (mate.ids, mate.accepted) == (wanted.ids, wanted.accepted)


def test_the_time_of_a_pass_includes_the_drawing(target: TorchTarget) -> None:
    class Slow(Sampler):
        def choose(self, *given: Any) -> Any:
            time.sleep(0.3)
            return super().choose(*given)

    target.sample([(0, [1, 2], 1)], [Draw(Slow(OPTIONS["plain"], SEED), (1, 2), ())])
    assert target.pass_ms >= 300


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", OPTIONS)
def test_cuda_draws_what_its_logits_give(tiny_file: Path, options: str) -> None:
    """Logarithms may differ in the last place: of 200 ids none is at such a tie."""
    target, sampler = load_target(tiny_file, device="cuda", dtype="float32"), Sampler(OPTIONS[options], SEED)
    ids = some_ids(240)
    draw = Draw(sampler, tuple(ids[:41]), tuple(ids[41:]))
    [logits] = target.forward([(0, ids, 200)])
    target.truncate(0, 0)
    [choices] = target.sample([(0, ids, 200)], [draw])
    assert choices == choose(logits, draw)
