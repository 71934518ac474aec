"""A session against a cloud in threads of this program: the ids are the target's own, whatever is drafted, whoever else
is served, wherever it ends."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from clouds import LAW, PATIENT_S, Serving, at_once, edge, ids_of, recorded, said, serving, wait_until

from pipesd.core import Drawn, Piece
from pipesd.errors import DrafterFailed, Refused
from pipesd.policy.sampler import Chooser
from pipesd.protocol.messages import ErrorCode
from pipesd.sim.drafters import Agreement, DraftScript, ScriptedDrafter
from pipesd.sim.texts import KeyedText
from pipesd.sim.tokeniser import END_ID, ByteTokeniser

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(max_sessions=12) as served:
        yield served


# -- the target's own ids


@pytest.mark.parametrize(("strategy", "length"), [("cloud", 4), *(("vanilla", n) for n in range(1, 9))])
def test_ids_are_those_of_the_target_alone(cloud: Serving, strategy: str, length: int) -> None:
    chance = random.Random(length)
    drafter = ScriptedDrafter(Agreement(LAW))
    with edge(cloud.address, drafter=drafter, strategy=strategy, draft_length=length) as session:
        for agreement in (0.0, 0.3, 0.7, 0.95, 1.0):
            for seed in range(3):
                drafter.proposal = Agreement(LAW, agreement, seed)
                prompt = [chance.randrange(512) for _ in range(chance.randrange(1, 40))]
                count = chance.randrange(1, 60)
                assert ids_of(session, prompt, max_tokens=count) == said(LAW, prompt, count)
                assert session.finish_reason == "length"
                assert session.stats["openings"] == 1 and session.stats["tokens"] == count


def test_many_sessions_share_passes_and_each_gets_its_own_text() -> None:
    with serving(target={"pass_s": 0.002}, max_sessions=8) as cloud:

        def user(number: int) -> None:
            strategy = "cloud" if number % 3 == 0 else "vanilla"
            with edge(
                cloud.address, agreement=number / 7, strategy=strategy, draft_length=1 + number, patience_s=PATIENT_S
            ) as session:
                for turn in range(3):
                    prompt = f"user {number}, turn {turn}: "
                    assert ids_of(session, prompt, max_tokens=30) == said(LAW, prompt, 30)

        at_once([lambda number=number: user(number) for number in range(8)])  # type: ignore[misc]
        assert max(cloud.targets[0].batches) >= 3


def test_workers_share_the_sessions() -> None:
    with serving(workers=2) as cloud:

        def user(number: int) -> list[int]:
            with edge(cloud.address) as session:
                return ids_of(session, f"user {number}", max_tokens=40)

        users = [lambda number=number: user(number) for number in range(6)]  # type: ignore[misc]
        assert at_once(users) == [said(LAW, f"user {number}", 40) for number in range(6)]
        assert all(target.passes > 0 for target in cloud.targets) and len(cloud.targets) == 2


def test_more_sessions_than_slots_evict_each_other_and_nobody_notices() -> None:
    with serving(max_sessions=2) as cloud:
        sessions = [edge(cloud.address, strategy="cloud" if i % 2 else "vanilla") for i in range(5)]
        for session in sessions:
            session.open()
        texts = [f"user {i}: " for i in range(5)]
        prompts = [ByteTokeniser().encode(text) for text in texts]
        openings = 0
        for _ in range(3):
            for i, session in enumerate(sessions):
                expected = said(LAW, prompts[i], 10)
                assert ids_of(session, prompts[i], max_tokens=10) == expected
                openings += session.stats["openings"]
                prompts[i] = [*session.committed, *b" and "]
        for session in sessions:
            session.close()
        assert openings > 15, "nobody was evicted"
        # whoever says good-bye leaves nothing behind
        wait_until(lambda: not any(cloud.targets[0].length(slot) for slot in range(2)), "both slots are free")


def test_a_full_cloud_lets_its_users_in_one_after_the_other() -> None:
    with serving(target={"pass_s": 0.002}, max_sessions=1) as cloud:

        def user(number: int) -> list[int]:
            with edge(cloud.address, patience_s=PATIENT_S) as session:
                return ids_of(session, f"user {number}", max_tokens=30)

        users = [lambda number=number: user(number) for number in range(3)]  # type: ignore[misc]
        assert at_once(users) == [said(LAW, f"user {number}", 30) for number in range(3)]


def test_a_later_turn_computes_only_what_is_new(cloud: Serving) -> None:
    for strategy in ("vanilla", "cloud"):
        drafter = ScriptedDrafter(Agreement(LAW, 0.8))
        with edge(cloud.address, drafter=drafter, strategy=strategy) as session:
            prompt = [*b"A long beginning, " * 20]
            for turn in range(4):
                before = cloud.targets[0].fed, drafter.fed
                assert ids_of(session, prompt, max_tokens=20) == said(LAW, prompt, 20)
                fed = cloud.targets[0].fed - before[0], drafter.fed - before[1]
                if turn:
                    assert max(fed) < 200 < len(prompt), f"{fed} ids were fed on turn {turn} of {strategy}"
                prompt = [*session.committed, *b" and then "]


def test_a_turn_that_goes_back_is_right_too(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        ids_of(session, PROMPT, max_tokens=30)
        for keep in (30, 17, 5, 1, 33):
            prompt = [*session.committed[:keep], *b"no, "]
            assert ids_of(session, prompt, max_tokens=30) == said(LAW, prompt, 30)


@pytest.mark.parametrize("strategy", ["vanilla", "cloud", "local"])
def test_the_shortest_prompts_and_outputs(cloud: Serving, strategy: str) -> None:
    with edge(cloud.address, agreement=1.0, strategy=strategy) as session:
        for prompt in ("", " ", [65], "\n"):
            assert ids_of(session, prompt, max_tokens=9) == said(LAW, prompt, 9)
            assert ids_of(session, prompt, max_tokens=1) == said(LAW, prompt, 1)
            assert session.finish_reason == "length" and session.stats["tokens"] == 1


def test_one_token_is_asked_for_with_an_empty_draft(cloud: Serving) -> None:
    with edge(cloud.address, draft_length=8) as session:
        ids_of(session, PROMPT, max_tokens=1)
        stats = session.stats
        assert (stats["drafted"], stats["navs"], stats["rounds"], stats["target_passes"]) == (0, 1, 1, 1)


def test_pieces_say_where_their_ids_come_from(cloud: Serving) -> None:
    drafter = ScriptedDrafter(Agreement(LAW, 0.6))
    with edge(cloud.address, drafter=drafter, draft_length=4) as session:
        pieces = list(session.generate(PROMPT, max_tokens=60))
        origins = [piece.origin for piece in pieces for _ in piece.token_ids]
        assert origins.count("accepted") == session.stats["accepted"]
        assert origins.count("target") == 60 - session.stats["accepted"]
        assert all(isinstance(piece, Piece) for piece in pieces)
    with edge(cloud.address, strategy="local") as session:
        assert {piece.origin for piece in session.generate(PROMPT, max_tokens=9)} == {"unverified"}
        assert session.stats["target_passes"] == 0


# -- ends


def test_an_end_id_inside_an_accepted_block_ends_everything() -> None:
    prompt = ByteTokeniser().encode(PROMPT)
    law = recorded(prompt, [*b"ab", END_ID, *b"cd"])
    with serving(law) as cloud:
        for length in (1, 2, 3, 5, 8):
            drafter = ScriptedDrafter(Agreement(law, 1.0))
            with edge(cloud.address, drafter=drafter, draft_length=length) as session:
                assert ids_of(session, prompt, max_tokens=40) == [*b"ab", END_ID]
                assert (session.text, session.finish_reason) == ("ab", "stop")
                assert session.stats["tokens"] == 3 and session.stats["accepted"] <= 3
                assert list(session.committed) == [*prompt, *b"ab", END_ID]
                assert list(drafter.ids) == list(session.committed)[: len(drafter)]
                # behind the end the text goes on as if nothing had been
                longer = [*session.committed, *b"xy"]
                assert ids_of(session, longer, max_tokens=12) == said(law, longer, 12)
    with edge("", law, agreement=1.0, strategy="local") as session:
        assert ids_of(session, prompt, max_tokens=40) == [*b"ab", END_ID] and session.finish_reason == "stop"


def test_the_drafter_may_see_what_the_target_does_not_end() -> None:
    """A draft that goes past an end id, as with a drafter that knows fewer end ids than the tokeniser's file."""
    tokeniser = ByteTokeniser()
    tokeniser.end_ids = frozenset({END_ID, 300})
    prompt = tokeniser.encode(PROMPT)
    law = recorded(prompt, [*b"abc", 300, *b"de"])
    with serving(law) as cloud:
        script = DraftScript([*b"abc", 300, *b"de"], start=len(prompt))
        with edge(cloud.address, proposal=script, tokeniser=tokeniser, draft_length=6) as session:
            assert ids_of(session, prompt, max_tokens=40) == [*b"abc", 300]
            assert session.finish_reason == "stop" and session.stats["drafted"] == 4


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_several_end_ids_and_wrong_guesses_of_one(strategy: str) -> None:
    tokeniser = ByteTokeniser()
    tokeniser.end_ids = frozenset({END_ID, 300, 301})
    law = KeyedText(5, (*b"etaoin", 301), end_id=END_ID, end_rate=0.02)
    with serving(law) as cloud:
        wrong = Agreement(law, 0.6, wrong=(END_ID, 300, 301))
        with edge(cloud.address, proposal=wrong, tokeniser=tokeniser, strategy=strategy) as session:
            seen = set()
            for number in range(12):
                prompt = f"prompt {number}"
                expected = said(law, prompt, 40, tuple(tokeniser.end_ids))
                assert ids_of(session, prompt, max_tokens=40) == expected
                ended = expected[-1] in tokeniser.end_ids
                assert session.finish_reason == ("stop" if ended else "length")
                seen.add(expected[-1])
            assert {END_ID, 301} <= seen


@pytest.mark.parametrize("strategy", ["vanilla", "cloud", "local"])
def test_stop_texts_across_tokens(strategy: str) -> None:
    prompt = [*b"Say: "]
    output = [*b"one ST", *b"OPtwo STO", *b"Q three"]
    law = recorded(prompt, output)
    with serving(law) as cloud:
        for length in (1, 3, 8):
            with edge(cloud.address, law, agreement=1.0, strategy=strategy, draft_length=length) as session:
                ids = ids_of(session, prompt, max_tokens=22, stop=["STOQ", "STOP"])
                assert (bytes(ids), session.text, session.finish_reason) == (b"one ", "one ", "stop")
                assert session.stats["tokens"] < 22, "nothing is computed for nobody"
                ids = ids_of(session, prompt, max_tokens=22, stop=["STOQ"])
                assert bytes(ids) == b"one STOPtwo " and session.text == "one STOPtwo "
                ids = ids_of(session, prompt, max_tokens=13, stop=["STOQ", "two STOX"])
                assert bytes(ids) == b"one STOPtwo S" and session.text == "one STOPtwo S"
                assert session.finish_reason == "length"
                assert ids_of(session, prompt, max_tokens=11, stop=["STOP"]) == [*b"one "]
                assert session.finish_reason == "stop", "the text that ends it is complete with the last token allowed"
                assert session.stats["tokens"] <= 11
                # the next generation goes on behind the stop, as if the target had never gone further
                longer = [*prompt, *b"one ", *b"go"]
                assert ids_of(session, longer, max_tokens=20) == said(law, longer, 20)


def test_characters_of_several_tokens_are_shown_whole() -> None:
    prompt = [*b"Smile: "]
    output = [*"a😊é日".encode()]
    law = recorded(prompt, output)
    with serving(law) as cloud:
        for length in (1, 2, 3, 4):
            # the second halves are guessed wrong, so that each character needs several rounds
            script = DraftScript([*b"a\xf0\x9f\x9f\x8a\xc3\xaa\xe6\x98\xa5"], start=len(prompt))
            with edge(cloud.address, proposal=script, draft_length=length) as session:
                shown = [piece.text for piece in session.generate(prompt, max_tokens=len(output))]
                assert "".join(shown) == "a😊é日" and set(shown) <= {"", "a", "😊", "é", "日"}
                # an output that ends within a character says so once, at the very end
                *shown, last = [piece.text for piece in session.generate(prompt, max_tokens=3)]
                assert ("".join(shown), last) == ("a", "�")


# -- limits


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
@pytest.mark.parametrize("room", [1, 2, 5, 12, 17])
def test_the_targets_context_ends_the_output(strategy: str, room: int) -> None:
    with serving(target={"context": 64}) as cloud:
        prompt = [65] * (64 - room)
        for agreement in (0.5, 1.0):
            with edge(cloud.address, agreement=agreement, strategy=strategy, draft_length=16) as session:
                assert ids_of(session, prompt, max_tokens=100) == said(LAW, prompt, room)
                assert session.finish_reason == "length"


def test_a_prompt_too_long_is_refused_with_both_numbers_and_harms_nothing(cloud: Serving) -> None:
    for strategy in ("vanilla", "cloud"):
        with edge(cloud.address, strategy=strategy) as session:
            for length in (2048, 5000, 1 << 19):
                fed = cloud.passes
                with pytest.raises(Refused, match=rf"{length} ids.* 2048") as refused:
                    ids_of(session, [65] * length)
                assert refused.value.code == ErrorCode.LIMIT and refused.value.exit_code == 4
                assert cloud.passes == fed, "it was computed"
            assert ids_of(session, PROMPT, max_tokens=20) == said(LAW, PROMPT, 20)
    with serving(target={"context": 1 << 20}) as large, edge(large.address) as session:
        with pytest.raises(Refused, match=r"524288 ids.* 262144"):
            ids_of(session, [65] * (1 << 19))


@pytest.mark.parametrize("prompt", [[65] * 10, [65] * 39, [65] * 40, [65] * 41, [65] * 300])
def test_a_smaller_draft_context_goes_on_without_drafts(prompt: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with serving(target={"pass_s": 0.001}) as cloud:
        drafter = ScriptedDrafter(Agreement(LAW, 0.9), context=40)
        with edge(cloud.address, drafter=drafter, strategy="vanilla", draft_length=4) as session:
            for _ in range(2):
                caplog.clear()
                assert ids_of(session, prompt, max_tokens=150) == said(LAW, prompt, 150)
                warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
                assert len(warnings) == 1 and "context is full" in warnings[0].message
                stats = session.stats
                # in free run nobody asks for anything: no cliff
                assert stats["openings"] == 2 and stats["navs"] <= max(0, 40 - len(prompt)) + 2
                assert stats["tpt_ms"] < 20


def test_the_draft_context_limits_local() -> None:
    with edge("", drafter=ScriptedDrafter(Agreement(LAW, 1.0), context=40), strategy="local") as session:
        assert ids_of(session, [65] * 30, max_tokens=100) == said(LAW, [65] * 30, 10)
        assert session.finish_reason == "length"
        with pytest.raises(Refused, match=r"40 ids.*context"):
            ids_of(session, [65] * 40)
        assert ids_of(session, [65] * 3, max_tokens=5) == said(LAW, [65] * 3, 5)


class FailingDrafter(ScriptedDrafter):
    """Fails at its twentieth draft, as llama.cpp may."""

    def draft(self, sampler: Chooser | None = None) -> Drawn:
        if self.drawn == 20:
            raise DrafterFailed("scripted: no memory left")
        return super().draft(sampler)


def test_a_drafter_that_fails_costs_drafts_not_the_text(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as cloud, edge(cloud.address, drafter=FailingDrafter(Agreement(LAW)), strategy="vanilla") as session:
        prompt = session.tokeniser.encode("a prompt")
        assert ids_of(session, prompt, max_tokens=80) == said(LAW, prompt, 80)
    assert session.stats["drafted"] == 20 and session.stats["openings"] == 2
    assert "scripted: no memory left: going on without drafts" in [record.message for record in caplog.records]
