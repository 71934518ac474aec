"""What a session does while it waits: nothing that makes the wait longer, and nothing without need."""

from __future__ import annotations

import pytest
from clouds import LAW, PATIENT_S, edge, ids_of, recorded, said, serving

from pipesd.errors import Unreachable, UsageError
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.proxy import LinkProxy
from pipesd.sim.tokeniser import ByteTokeniser, byte_vocabulary

LONG = [65 + i % 26 for i in range(6000)]


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_a_long_prompt_crosses_a_thin_link_once(strategy: str) -> None:
    """24 KB at 10 KB/s take longer than several deadlines: a second OPEN would only stand in the way of the first."""
    with (
        serving(context=8192, target={"context": 8192}) as cloud,
        LinkProxy(cloud.address, up_bytes_per_s=10_000) as link,
        edge(link.address, strategy=strategy, drafter=ScriptedDrafter(Agreement(LAW), context=8192)) as session,
    ):
        assert ids_of(session, LONG, max_tokens=8) == said(LAW, LONG, 8)
        assert session.stats["openings"] == 1
        assert link.counts().connections == 1


def test_a_prefill_may_take_longer_than_the_patience_with_a_silent_cloud() -> None:
    """The front says that the worker lives; ten times the patience would have ended it else."""
    with (
        serving(target={"token_s": 0.02}) as cloud,
        edge(cloud.address, patience_s=0.5, draft_length=1) as session,
    ):
        prompt = LONG[:400]
        assert ids_of(session, prompt, max_tokens=2) == said(LAW, prompt, 2)


def test_a_slow_draft_model_causes_no_deadline() -> None:
    """While the edge drafts and has asked for nothing, the cloud's silence means nothing."""
    drafter = ScriptedDrafter(Agreement(LAW), gamma_s=0.12)
    with serving() as cloud, edge(cloud.address, drafter=drafter, strategy="vanilla", draft_length=8) as session:
        ids_of(session, "slow", max_tokens=9)
        navs, up = session.stats["navs"], session.stats["bytes_up"]
    assert up <= navs * 22 + 4 * session.stats["drafted"], "each DRAFT once, and no PROBE"


def test_what_was_asked_for_can_be_cancelled_before_it_begins() -> None:
    with serving() as cloud, edge(cloud.address) as session:
        pieces = session.generate("never begun", max_tokens=100)
        session.cancel()
        assert list(pieces) == [] and session.finish_reason == "cancelled"
        assert len(ids_of(session, "the next", max_tokens=5)) == 5


def test_a_refused_prompt_leaves_statistics_too() -> None:
    with serving() as cloud, edge(cloud.address) as session:
        with pytest.raises(UsageError):
            next(session.generate([], max_tokens=3))
        assert session.finish_reason == "error" and session.token_ids == () and session.stats["tokens"] == 0
        assert session.stats["acceptance_rate"] is None


def test_ids_that_the_draft_model_lacks_stay_in_a_conversation() -> None:
    """The target said a padding id beyond the draft model's width: the next turn may contain it, a prompt may not."""
    first = list(b"one")
    narrow = byte_vocabulary(480, 470)
    law = recorded(first, [500, 501, *b" and more"])
    with (
        serving(law, target={"vocabulary": byte_vocabulary(512, 470)}) as cloud,
        edge(cloud.address, law, vocabulary=narrow, tokeniser=ByteTokeniser(narrow)) as session,
    ):
        assert ids_of(session, first, max_tokens=2) == [500, 501]
        sequel = [*session.committed, *b"two"]
        assert ids_of(session, sequel, max_tokens=4) == said(law, sequel, 4)
        with pytest.raises(UsageError, match="id 500"):
            next(session.generate([1, 500], max_tokens=2))


def test_the_targets_own_end_id_ends_the_output() -> None:
    """The target's file names an end id that the draft model's lacks."""
    prompt = list(b"once")
    law = recorded(prompt, [*b"abc", 300, *b"def"])
    with serving(law, target={"end_ids": (300,)}) as cloud:
        for strategy in ("vanilla", "cloud"):
            with edge(cloud.address, law, strategy=strategy) as session:
                assert ids_of(session, prompt, max_tokens=PATIENT_TOKENS) == [*b"abc", 300]
                assert session.finish_reason == "stop"


PATIENT_TOKENS = int(PATIENT_S)


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_a_cloud_that_lives_and_brings_nothing_is_left_in_the_end(strategy: str) -> None:
    """Its worker answers, and the front says that it lives, but no pass ends within the stated time."""
    with (
        serving(target={"pass_s": 4.0}) as cloud,
        edge(cloud.address, strategy=strategy, stall_s=1.0) as session,
        pytest.raises(Unreachable, match="nothing new for 1 s"),
    ):
        ids_of(session, "a", max_tokens=2)
