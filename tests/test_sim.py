"""The stand-ins for models keep their promises, so that a test that uses them tests the other side."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesd.clock import VirtualClock
from pipesd.cloud.worker import Target
from pipesd.edge.models import Drafter, Tokeniser
from pipesd.errors import PipeSDError, UsageError
from pipesd.policy.accept import Choices, Draw
from pipesd.policy.batch_choices import greedy_choices
from pipesd.policy.noise import mix
from pipesd.policy.sampler import Sampler
from pipesd.policy.sampling import Sampling
from pipesd.sim.distributions import KeyedDistribution, draft_of, probabilities
from pipesd.sim.drafters import Agreement, DraftScript, ScriptedDrafter, entropy_of, self_drafter
from pipesd.sim.targets import (
    Fault,
    IrreproducibleTarget,
    ReplayedTarget,
    ScriptedFault,
    ScriptedTarget,
    TableTarget,
)
from pipesd.sim.texts import (
    EMPTY,
    LETTERS,
    KeyedText,
    RecordedText,
    continuation,
    folded,
    law_digest,
    state_of,
    unit,
)
from pipesd.sim.tokeniser import BEGIN_ID, END_ID, ByteTokeniser, byte_vocabulary

PROMPT = list(b"once upon a time")
ids_lists = st.lists(st.integers(0, 511), max_size=12)


# -- texts


@given(ids_lists, ids_lists)
def test_state_tells_prefixes_apart_and_folds(a: list[int], b: list[int]) -> None:
    assert (state_of(a) == state_of(b)) == (a == b)
    assert state_of(b, state_of(a)) == state_of(a + b)


def test_any_wrong_id_in_the_prefix_shows_in_what_follows() -> None:
    law = KeyedText(1)
    right = continuation(law, PROMPT, 20)
    for at in range(len(PROMPT)):
        wrong = [*PROMPT[:at], PROMPT[at] ^ 1, *PROMPT[at + 1 :]]
        assert continuation(law, wrong, 20) != right
    assert continuation(KeyedText(2), PROMPT, 20) != right
    assert continuation(law, PROMPT + right[:7], 13) == right[7:]


def test_texts_are_the_same_in_every_process() -> None:
    program = (
        "from pipesd.sim.texts import *; print(continuation(KeyedText(7), [1, 2, 3], 8), law_digest(KeyedText(7)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"{continuation(KeyedText(7), [1, 2, 3], 8)} {law_digest(KeyedText(7))!r}"


def test_keyed_text_ends_as_often_as_asked() -> None:
    law = KeyedText(3, end_id=END_ID, end_rate=0.1)
    lengths = [len(continuation(law, [n], 1000, [END_ID])) for n in range(400)]
    assert 8.5 < np.mean(lengths) < 11.5  # mean 10, standard error 0.5
    assert continuation(law, [1], 1000, [END_ID])[-1] == END_ID
    assert END_ID not in continuation(KeyedText(3), PROMPT, 500)


def test_recorded_text_follows_its_records_and_nothing_else() -> None:
    law = RecordedText([(PROMPT, [1, 2, 3]), ([*PROMPT, 1, 2], [3, 4]), ([9], [8])])
    assert continuation(law, PROMPT, 4) == [1, 2, 3, 4]
    assert continuation(law, [9], 1) == [8]
    assert continuation(law, [9, 9], 3) == continuation(KeyedText(), [9, 9], 3)
    with pytest.raises(AssertionError, match="two records"):
        RecordedText([([1], [2]), ([1], [3])])


# -- targets


def test_target_says_the_text_of_its_law_token_by_token_or_at_once() -> None:
    law = KeyedText(4)
    text = continuation(law, PROMPT, 10)
    whole, stepwise = ScriptedTarget(law), ScriptedTarget(law)
    assert whole.greedy([(3, PROMPT + text[:-1], 10)]) == [tuple(text)]
    assert stepwise.forward([(0, PROMPT[:5], 0)])[0].shape == (0, 512)
    said = stepwise.greedy([(0, PROMPT[5:], 1)])[0]
    while stepwise.length(0) < whole.length(3):
        said += stepwise.greedy([(0, said[-1:], 1)])[0]
    assert said == tuple(text)
    assert stepwise.passes == 2 + 9
    assert stepwise.fed == len(PROMPT) + 9


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_target_keeps_each_slot_apart_through_cuts_and_mixed_passes(data: st.DataObject) -> None:
    target, law = ScriptedTarget(slots=3), KeyedText()
    held: list[list[int]] = [[], [], []]
    for _ in range(data.draw(st.integers(1, 8))):
        batch = []
        for slot in data.draw(st.lists(st.integers(0, 2), unique=True, min_size=1)):
            length = data.draw(st.integers(0, len(held[slot])))
            target.truncate(slot, length)
            del held[slot][length:]
            ids = data.draw(st.lists(st.integers(0, 511), min_size=1, max_size=5))
            batch.append((slot, ids, data.draw(st.integers(0, len(ids)))))
        use_logits = data.draw(st.booleans())
        answers = [np.argmax(a, 1) for a in target.forward(batch)] if use_logits else target.greedy(batch)
        for (slot, ids, rows), answer in zip(batch, answers, strict=True):
            held[slot] += ids
            ends = range(len(held[slot]) - rows + 1, len(held[slot]) + 1)
            assert list(answer) == [law.choice(state_of(held[slot][:end])) for end in ends]
        for slot in range(3):
            assert target.ids(slot) == tuple(held[slot])
            assert target.length(slot) == len(held[slot])


WRONG_CALLS: list[Callable[[ScriptedTarget], object]] = [
    lambda t: t.forward([]),
    lambda t: t.forward([(0, [], 0)]),
    lambda t: t.forward([(4, [1], 1)]),
    lambda t: t.forward([(-1, [1], 1)]),
    lambda t: t.forward([(0, [1], 2)]),
    lambda t: t.forward([(0, [1], -1)]),
    lambda t: t.forward([(0, [1], 1), (0, [2], 1)]),
    lambda t: t.forward([(0, [512], 1)]),
    lambda t: t.forward([(0, [-1], 1)]),
    lambda t: t.greedy([(1, [1], 1), (0, [1] * 7, 1)]),  # 10 + 7 ids in a context of 16
    lambda t: t.truncate(0, 11),
    lambda t: t.truncate(0, -1),
    lambda t: t.truncate(4, 0),
    lambda t: t.length(4),
]


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_wrong_call_is_noticed_and_changes_nothing(call: Callable[[ScriptedTarget], object]) -> None:
    target = ScriptedTarget(context=16, slots=4)
    target.forward([(0, [1] * 10, 0)])
    with pytest.raises(AssertionError):
        call(target)
    assert [target.length(slot) for slot in range(4)] == [10, 0, 0, 0]
    assert target.passes == 1


def test_full_context_is_no_overflow() -> None:
    target = ScriptedTarget(context=16)
    assert len(target.greedy([(0, [1] * 16, 16)])[0]) == 16


def test_padding_ids_have_no_text_and_may_be_said() -> None:
    vocabulary = byte_vocabulary(512, real=470)
    assert (vocabulary.size, vocabulary.real_size) == (512, 470)
    target = ScriptedTarget(RecordedText([([1], [500, 2])]), vocabulary)
    assert target.info.vocabulary_size == 470
    assert target.greedy([(0, [1, 500], 2)]) == [(500, 2)]
    assert target.forward([(1, [1], 1)])[0].shape == (1, 512)


def test_another_law_is_another_model() -> None:
    prints = {ScriptedTarget(law).info.fingerprint for law in (KeyedText(), KeyedText(1), RecordedText([([1], [2])]))}
    assert len(prints) == 3
    assert ScriptedTarget(KeyedText(1)).info == ScriptedTarget(KeyedText(1)).info
    assert all(len(fingerprint) == 8 for fingerprint in prints)


def test_pace_of_a_target() -> None:
    clock = VirtualClock()
    target = ScriptedTarget(pass_s=0.04, token_s=0.003, clock=clock)
    assert target.pass_ms == 43
    target.greedy([(0, [1, 2, 3], 1), (1, [4], 1)])
    assert clock.now() == pytest.approx(0.04 + 4 * 0.003)
    assert target.pass_ms in (52, 53)  # rounded up
    assert ScriptedTarget().pass_ms == 1


def test_fault_that_raises_happens_in_its_pass_and_appends_nothing() -> None:
    target = ScriptedTarget(faults=[Fault("raise", 2)])
    target.greedy([(0, [1], 1)])
    with pytest.raises(ScriptedFault, match="pass 2"):
        target.greedy([(0, [2], 1)])
    assert not issubclass(ScriptedFault, PipeSDError)  # it stands for a bug
    assert target.ids(0) == (1,)
    assert target.greedy([(0, [2], 1)])


def test_fault_that_sleeps() -> None:
    clock = VirtualClock()
    target = ScriptedTarget(faults=[Fault("sleep", 2, seconds=10.0)], clock=clock)
    target.greedy([(0, [1], 1)])
    assert clock.now() == 0.0
    target.greedy([(0, [1], 1)])
    assert clock.now() == 10.0
    assert target.pass_ms == 10_000


@pytest.mark.parametrize("kind", ["nan", "one-nan", "inf"])
def test_fault_that_spoils_the_rows_of_one_slot(kind: Any) -> None:
    batch = [(0, [1, 2], 2), (1, [1, 2], 2), (2, [1, 2], 2)]
    faults = [Fault(kind, 1, slot=1), Fault(kind, 2, slot=1)]
    plain, spoiled = ScriptedTarget(), ScriptedTarget(faults=faults)
    wanted, got = plain.greedy(batch), spoiled.greedy(batch)
    assert got == [wanted[0], (-1, -1), wanted[2]]
    logits = spoiled.forward(batch)
    assert np.isfinite(logits[0]).all()
    assert np.isfinite(logits[2]).all()
    assert not np.isfinite(logits[1].max(axis=1)).any()
    assert np.isfinite(logits[1]).any() == (kind != "nan")
    assert spoiled.greedy([(0, [3], 1), (1, [3], 1)]) != [(-1,), (-1,)]


def test_fault_that_happens_once_though_the_target_is_made_again(tmp_path: Path) -> None:
    fault = Fault("raise", 1, once_file=str(tmp_path / "happened"))
    with pytest.raises(ScriptedFault):
        ScriptedTarget(faults=[fault]).greedy([(0, [1], 1)])
    assert ScriptedTarget(faults=[fault]).greedy([(0, [1], 1)])


def _pass_in_worker(factory: Callable[[], ScriptedTarget], results: Any) -> None:
    answer = None
    try:
        answer = factory().greedy([(0, PROMPT, 1)])
    finally:
        results.send(answer)


@pytest.mark.parametrize("faults", [(), (Fault("exit", 1),)])
def test_target_in_a_spawned_process(faults: tuple[Fault, ...]) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    factory = partial(ScriptedTarget, KeyedText(6), faults=faults)
    process = context.Process(target=_pass_in_worker, args=(factory, theirs))
    process.start()
    theirs.close()
    if faults:
        with pytest.raises(EOFError):
            ours.recv()
    else:
        assert ours.recv() == factory().greedy([(0, PROMPT, 1)])
    process.join(20)
    assert process.exitcode == (70 if faults else 0)


@pytest.mark.parametrize(
    "target",
    [
        ScriptedTarget(),
        ScriptedTarget(KeyedDistribution()),
        TableTarget(),
        IrreproducibleTarget(),
        ReplayedTarget(RecordedText([(PROMPT, [1, 2])])),
    ],
)
def test_every_target_can_be_pickled_with_its_slots(target: ScriptedTarget) -> None:
    prompt = [1, 2, 3] if isinstance(target, TableTarget) else PROMPT[:3]
    target.forward([(1, prompt, 0)])
    copy = pickle.loads(pickle.dumps(target))
    assert copy.ids(1) == tuple(prompt)
    assert copy.info == target.info
    target.truncate(1, 0)
    assert copy.length(1) == 3


def test_table_target_gives_its_table_whatever_the_prefix() -> None:
    target = TableTarget()
    for logits in target.forward([(0, [1, 2, 3], 2), (1, [7], 1)]):
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        assert probabilities == pytest.approx(np.tile(TableTarget.TABLE, (len(logits), 1)), abs=1e-6)
    assert target.greedy([(0, [1], 1)]) == [(0,)]
    padded = TableTarget((0.0, 0.5, 0.5), byte_vocabulary(512, 470))
    assert padded.greedy([(0, [1], 1)]) == [(1,)]  # the lowest of a tie
    row = padded.forward([(0, [1], 1)])[0][0]
    assert np.isneginf(row[[0, 3, 511]]).all()


# -- real distributions


def test_a_keyed_distribution_is_a_function_of_the_prefix() -> None:
    law = KeyedDistribution(3, range(1, 9), 2.0, end_id=9)
    rows = np.array([law.row(mix(state), 16) for state in range(4000)])
    assert np.isneginf(rows[:, [0, *range(10, 16)]]).all() and (rows[:, 9] == -4.0).all()
    assert abs(rows[:, 1:9].mean()) < 0.05 and rows[:, 1:9].std() == pytest.approx(2.0, abs=0.03)
    assert np.abs(np.corrcoef(rows[:, 1:9].T) - np.eye(8)).max() < 0.08  # five standard deviations
    copy = pickle.loads(pickle.dumps(law))
    assert np.array_equal(copy.row(mix(7), 16), rows[7]) and law.choice(mix(7)) == rows[7].argmax()
    assert not np.array_equal(KeyedDistribution(4, range(1, 9), 2.0, end_id=9).row(mix(7), 16), rows[7])
    assert law.row(mix(7), 12).shape == (12,) and KeyedDistribution(floor=-9.0).row(1, 128).min() == -9.0
    with pytest.raises(ValueError, match="read-only"):
        law.row(1, 16)[3] = 0.0  # rows are shared


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
def test_a_draft_of_a_distribution_is_as_good_as_asked(agreement: float) -> None:
    law = KeyedDistribution(3, range(8), 2.0)
    draft = draft_of(law, agreement, seed=1)
    overlap = np.mean(
        [
            np.minimum(probabilities(law.row(state, 8)), probabilities(draft.row(state, 8))).sum()
            for state in map(mix, range(500))
        ]
    )
    assert overlap == pytest.approx({0.0: 0.35, 0.3: 0.48, 0.8: 0.86, 1.0: 1.0}[agreement], abs=0.04)
    assert draft_of(law, agreement, seed=1) == draft != draft_of(law, agreement, seed=2)


def test_stand_ins_draw_from_their_distributions() -> None:
    """Drafter and target of one law draw the same under one sampler, and the probability is that at temperature 1."""
    law, vocabulary = KeyedDistribution(3, range(8), 2.0), byte_vocabulary(8)
    sampler = Sampler(Sampling(temperature=0.7), seed=5)
    drafter = ScriptedDrafter(draft_of(law, 1.0), vocabulary)
    drafter.extend([1, 2, 3])
    drawn = [drafter.draft(sampler) for _ in range(20)]
    ids = [guess.id for guess in drawn]
    assert len(set(ids)) > 3 and 0.0 < min(guess.margin for guess in drawn) < 1.0
    target = ScriptedTarget(law, vocabulary)
    [choices] = target.sample([(0, [1, 2, 3, *ids], 21)], [Draw(sampler, (1, 2, 3), ids)])
    assert choices.accepted == 20 and list(choices.ids[:20]) == ids
    share = probabilities(target.forward([(1, [1, 2, 3], 1)])[0][0])
    assert drawn[0].p_draft == pytest.approx(share[ids[0]])
    assert drawn[0].entropy == pytest.approx(-(share * np.log(share)).sum())
    drafter.rollback(3)
    assert drafter.draft().id == share.argmax(), "without a sampler the highest"


@pytest.mark.parametrize("p_draft", [0.0, 0.3, 1.0])
def test_a_guess_has_its_probability_when_it_is_drawn(p_draft: float) -> None:
    drafter = ScriptedDrafter(DraftScript([4], [p_draft], start=1), byte_vocabulary(8))
    drafter.extend([1])
    found: Counter[int] = Counter()
    for seed in range(300):
        drawn = drafter.draft(Sampler(Sampling(temperature=1.0), seed))
        found[drawn.id] += 1
        wanted = p_draft if drawn.id == 4 else (1 - p_draft) / 7
        assert drawn.p_draft == pytest.approx(wanted)
        assert drawn.entropy == pytest.approx(entropy_of(p_draft, 8))
        drafter.rollback(1)
    assert found[4] == pytest.approx(300 * p_draft, abs=32)  # four standard deviations


def test_a_pass_draws_for_some_and_takes_the_highest_for_others() -> None:
    law = KeyedDistribution(3, range(8), 2.0)
    target, sampler = ScriptedTarget(law, byte_vocabulary(8)), Sampler(Sampling(temperature=1.0), seed=5)
    alone = ScriptedTarget(law, byte_vocabulary(8))
    [wanted] = alone.sample([(0, [1, 2, 3], 2)], [Draw(sampler, (1, 2), (3,))])
    highest = alone.greedy([(1, [1, 2, 3], 2)])[0]
    fed = [(0, [1, 2, 3], 2), (1, [1, 2, 3], 2), (2, [5], 0)]
    got = target.sample(fed, [Draw(sampler, (1, 2), (3,)), None, None])
    assert got == [wanted, Choices(highest, int(highest[0] == 3)), Choices((), 0)]
    assert greedy_choices(fed[1:], [highest, ()]) == got[1:]


def test_irreproducible_target_says_other_ids_when_asked_again() -> None:
    law = KeyedText(5)
    first, second = IrreproducibleTarget(law), IrreproducibleTarget(law)
    assert first.info.fingerprint == second.info.fingerprint
    rows = 64
    batch = [(0, [1] * rows, rows)]
    answers = [first.greedy(batch)[0], second.greedy(batch)[0]]
    first.truncate(0, 0)
    answers.append(first.greedy(batch)[0])
    assert len(set(answers)) == 3
    said = ScriptedTarget(law).greedy(batch)[0]
    assert 0.2 < np.mean([a == b for a, b in zip(answers[0], said, strict=True)]) < 0.8
    seeded = [IrreproducibleTarget(law, rng=np.random.default_rng(1)).greedy(batch) for _ in range(2)]
    assert seeded[0] == seeded[1]
    always = IrreproducibleTarget(law, drift=1.0, end_ids=[3], vocabulary=byte_vocabulary(512, 256))
    drifted = always.greedy(batch)[0]
    assert not any(a == b for a, b in zip(drifted, said, strict=True))
    assert 3 not in drifted
    assert max(drifted) < 256


# -- replay

RECORD = (PROMPT, [11, 12, 13, END_ID])


def replayed() -> ReplayedTarget:
    return ReplayedTarget(RecordedText([RECORD, ([1], [2, 3])]), end_ids=[END_ID])


def test_replayed_target_repeats_its_record_and_answers_wrong_drafts_anyhow() -> None:
    target = replayed()
    target.forward([(0, PROMPT[:-1], 0)])
    assert target.greedy([(0, [PROMPT[-1], 11, 99, 98], 4)])[0][:2] == (11, 12)
    target.truncate(0, len(PROMPT) + 1)
    assert target.greedy([(0, [12, 13, END_ID, 5, 6], 5)])[0][:2] == (13, END_ID)  # drafted past the end
    target.truncate(0, 0)
    assert target.greedy([(0, [*PROMPT, 11], 1)])[0] == (12,)  # opened again with what was committed


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([7, 7, 7], 1),  # an unknown prompt
        ([*PROMPT[:-1], 7], 1),  # unknown in its last id
        (PROMPT[:-1], 1),  # half a prompt
        ([*PROMPT, 7], 0),  # committed what was not recorded
        ([1, 2, 3], 1),  # past a record that does not end
    ],
)
def test_replayed_target_refuses_what_was_not_recorded(ids: list[int], rows: int) -> None:
    target = replayed()
    with pytest.raises(UsageError, match="replayed target"):
        target.greedy([(0, ids, rows)])
    assert target.greedy([(0, PROMPT, 1)]) == [(11,)]  # and lives


# -- drafters


def follow(drafter: ScriptedDrafter, law: KeyedText, count: int) -> tuple[int, list[float], list[float]]:
    """Draft one at a time behind what the law says: how many were right, the probabilities when right and wrong."""
    hits = 0
    right: list[float] = []
    wrong: list[float] = []
    for _ in range(count):
        said = law.choice(state_of(drafter.ids))
        token_id, p_draft = drafter.draft()[:2]
        (right if token_id == said else wrong).append(p_draft)
        hits += token_id == said
        drafter.rollback(len(drafter) - 1)
        drafter.extend([said])
    return hits, right, wrong


def test_drafter_agrees_as_often_as_asked_and_knows_when() -> None:
    law = KeyedText(8)
    drafter = ScriptedDrafter(Agreement(law, 0.8, seed=1))
    drafter.extend(PROMPT)
    hits, right, wrong = follow(drafter, law, 1500)
    assert abs(hits - 1200) < 4 * 15.5  # four standard deviations
    assert np.mean(right) == pytest.approx(0.72, abs=0.03)
    assert np.mean(wrong) == pytest.approx(0.38, abs=0.04)
    assert all(0 <= p <= 1 for p in right + wrong)


def test_drafter_that_never_agrees() -> None:
    law = KeyedText(8)
    drafter = ScriptedDrafter(Agreement(law, 0.0))
    drafter.extend(PROMPT)
    assert follow(drafter, law, 200)[0] == 0


def test_drafter_of_another_seed_errs_elsewhere() -> None:
    law = KeyedText(8)
    answers = []
    for seed in (1, 1, 2):
        drafter = ScriptedDrafter(Agreement(law, 0.5, seed=seed))
        drafter.extend(PROMPT)
        answers.append([drafter.draft() for _ in range(40)])
    assert answers[0] == answers[1] != answers[2]


def test_self_drafter_is_always_right() -> None:
    law = KeyedText(8)
    drafter = self_drafter(law)
    drafter.extend(PROMPT)
    assert [drafter.draft()[0] for _ in range(300)] == continuation(law, PROMPT, 300)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.just("draft"), st.integers(0, 4), ids_lists), max_size=25))
def test_drafter_answers_by_its_prefix_whatever_came_before(steps: list[Any]) -> None:
    proposal = Agreement(KeyedText(9), 0.5)
    drafter = ScriptedDrafter(proposal)
    drafter.extend([1])
    held = [1]
    for step in steps:
        if step == "draft":
            guess = drafter.draft()
            assert guess[:2] == proposal.propose(len(held), state_of(held))
            held.append(guess[0])
        elif isinstance(step, int):
            length = max(1, len(held) - step)
            drafter.rollback(length)
            del held[length:]
        else:
            drafter.extend(step)
            held += step
            drafter.prefill(3)
        assert drafter.ids == tuple(held)
        assert len(drafter) == len(held)


def test_drafter_feeds_each_id_once_and_in_pieces() -> None:
    clock = VirtualClock()
    drafter = ScriptedDrafter(Agreement(KeyedText()), gamma_s=0.01, prefill_s=0.001, clock=clock)
    drafter.extend(PROMPT)
    assert len(drafter) == 16
    assert drafter.prefill(10) == 6
    assert drafter.prefill(10) == 0
    assert clock.now() == pytest.approx(0.016)
    drafter.extend([1])
    drafter.draft()
    assert clock.now() == pytest.approx(0.026)  # one id fed by one draft
    drafter.draft()
    drafter.rollback(17)
    drafter.extend([1, 2, 3])
    drafter.draft()
    assert clock.now() == pytest.approx(0.026 + 0.01 + 0.01 + 0.002)
    assert drafter.drawn == 3
    assert drafter.fed == 16 + 1 + 1 + 3


def test_drafter_stops_at_its_context() -> None:
    drafter = ScriptedDrafter(Agreement(KeyedText()), context=18)
    drafter.extend(PROMPT)
    assert drafter.room == 2
    drafter.draft()
    drafter.draft()
    assert (len(drafter), drafter.room) == (18, 0)
    with pytest.raises(AssertionError, match="context"):
        drafter.draft()
    fed = drafter.fed
    drafter.extend([1, 2])
    assert (len(drafter), drafter.room, drafter.prefill(99), drafter.fed) == (20, 0, 0, fed)
    drafter.rollback(17)
    drafter.draft()


def test_wrong_call_of_a_drafter_is_noticed() -> None:
    drafter = ScriptedDrafter(Agreement(KeyedText()))
    with pytest.raises(AssertionError, match="no ids"):
        drafter.draft()
    with pytest.raises(AssertionError):
        drafter.rollback(1)
    with pytest.raises(AssertionError, match="not ids"):
        drafter.extend([-1])
    drafter.close()
    drafter.close()
    with pytest.raises(AssertionError, match="closed"):
        drafter.extend([1])


def test_script_drafts_given_ids_even_impossible_ones() -> None:
    script = DraftScript([512, -1, 1 << 31], [0.9, 0.8, 0.7], start=2)
    drafter = ScriptedDrafter(script)
    drafter.extend([5, 6])
    assert [drafter.draft()[:2] for _ in range(4)] == [(512, 0.9), (-1, 0.8), (1 << 31, 0.7), (0, 0.01)]
    drafter.rollback(3)
    drafter.extend([9])
    assert drafter.draft()[:2] == (1 << 31, 0.7)
    assert ScriptedDrafter(DraftScript([4, 4], 0.5)).proposal.propose(1, EMPTY) == (4, 0.5)


@pytest.mark.parametrize("p_draft", [0.0, 1e-300, 0.3, 0.999, 1.0])
def test_entropy_is_that_of_the_guess_and_an_even_rest(p_draft: float) -> None:
    drafter = ScriptedDrafter(DraftScript([4], [p_draft], start=1), byte_vocabulary(8))
    drafter.extend([1])
    law = np.array([p_draft, *[(1 - p_draft) / 7] * 7])
    assert drafter.draft().entropy == pytest.approx(-sum(p * np.log(p) for p in law if p > 0), abs=1e-12)


def test_wrong_guesses_can_be_end_ids_and_confidence_can_lie() -> None:
    law = KeyedText(8)
    drafter = ScriptedDrafter(Agreement(law, 0.3, wrong=[END_ID, 300], confidence=0.99))
    drafter.extend(PROMPT)
    guesses = [drafter.draft() for _ in range(60)]
    assert {guess.p_draft for guess in guesses} == {0.99}
    assert {guess.id for guess in guesses} - set(LETTERS) == {END_ID, 300}


# -- vocabulary and tokeniser


def test_byte_vocabulary_has_distinct_pieces_and_its_beginnings() -> None:
    for size in (8, 256, 258, 512, 1200):
        vocabulary = byte_vocabulary(size)
        assert vocabulary.size == vocabulary.real_size == size
        assert len(set(vocabulary.pieces)) == size
        assert vocabulary.pieces[:8] == byte_vocabulary(8).pieces
    assert byte_vocabulary(512, 470).pieces[470:] == (b"",) * 42


@given(st.text(max_size=30))
def test_tokeniser_gives_back_the_text(text: str) -> None:
    tokeniser = ByteTokeniser()
    for special in (False, True):
        ids = tokeniser.encode(text, special=special, add_bos=False)
        assert b"".join(tokeniser.vocabulary.pieces[i] for i in ids) == text.encode()


def test_tokeniser_and_special_tokens() -> None:
    tokeniser = ByteTokeniser()
    assert tokeniser.add_bos
    assert tokeniser.encode("a") == tokeniser.encode("<s>a", special=True) == [BEGIN_ID, 97]
    assert tokeniser.repeats_bos("<s>a")
    assert tokeniser.encode("a<s></s>", special=True, add_bos=False) == [97, BEGIN_ID, END_ID]
    assert BEGIN_ID not in tokeniser.encode("<s>a</s>", add_bos=False)
    assert len(tokeniser.encode("the", add_bos=False)) == 2  # "th" is one id, though "t" and "h" are ids as well
    for plain in (ByteTokeniser(byte_vocabulary(256)), ByteTokeniser(begin=False)):
        assert not plain.add_bos
        assert not plain.repeats_bos("<s>a")
        assert plain.encode("<s>", add_bos=True) == list(b"<s>")


def test_stand_ins_have_the_interfaces_of_the_real_ones() -> None:
    target: Target = ScriptedTarget()  # held by the type checker
    drafter: Drafter = self_drafter(KeyedText())
    tokeniser: Tokeniser = ByteTokeniser()
    assert target.vocabulary == tokeniser.vocabulary
    assert drafter.room > 0


def test_unit_is_even() -> None:
    drawn = [unit(n) for n in range(2000)]
    assert min(drawn) >= 0
    assert max(drawn) < 1
    assert np.histogram(drawn, 10, (0, 1))[0].min() > 150
    assert folded(EMPTY, 1) != folded(EMPTY, 2)
