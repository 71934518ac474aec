"""What a session does not take: ids that are none, prompts that are none, options it does not have, broken logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clouds import LAW, Serving, Watched, at_once, edge, ids_of, said, serving

from pipesd.errors import PipeSDError, ProtocolError, Unreachable, UsageError
from pipesd.sim.drafters import DraftScript
from pipesd.sim.targets import Batch
from pipesd.sim.texts import KeyedText
from pipesd.sim.tokeniser import END_ID, ByteTokeniser, byte_vocabulary

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Serving]:
    with serving(max_sessions=12) as served:
        yield served


@pytest.mark.parametrize(("target_width", "draft_width"), [(512, 480), (480, 512), (512, 470)])
def test_padding_ids_as_the_targets_choice(target_width: int, draft_width: int) -> None:
    law = KeyedText(2, (*b"etaoin", 475, target_width - 1))
    with serving(law, target={"vocabulary": byte_vocabulary(target_width, 470)}) as cloud:
        for strategy in ("vanilla", "cloud"):
            with edge(
                cloud.address, law, agreement=0.7, vocabulary=byte_vocabulary(draft_width, 470), strategy=strategy
            ) as session:
                ids = ids_of(session, PROMPT, max_tokens=60)
                assert ids == said(law, PROMPT, 60) and {475, target_width - 1} <= set(ids)
                assert session.text == bytes(i for i in ids if i < 256).decode()


@pytest.mark.parametrize(("proposed", "error"), [(512, "512"), (-1, "ids"), (1 << 31, "ids"), (1 << 70, "ids")])
def test_a_drafter_that_proposes_no_id_of_the_vocabulary(cloud: Serving, proposed: int, error: str) -> None:
    prompt = ByteTokeniser().encode(PROMPT)
    script = DraftScript([proposed], start=len(prompt) + 2)
    with (
        edge(cloud.address) as other,
        edge(cloud.address, proposal=script, strategy="vanilla", draft_length=4) as session,
    ):
        unharmed = other.generate(PROMPT, max_tokens=40)
        first = next(unharmed)
        with pytest.raises(ProtocolError, match=error):
            ids_of(session, prompt, max_tokens=40)
        assert session.finish_reason == "error"
        assert [*first.token_ids, *(i for piece in unharmed for i in piece.token_ids)] == said(LAW, PROMPT, 40)
        longer = [*prompt, *b", there"]
        assert ids_of(session, longer, max_tokens=20) == said(LAW, longer, 20)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([512], "512.*outside.*512"),
        ([65, -1], "-1.*outside"),
        ([65, 1.5], "neither a text nor token ids"),
        (["a"], "neither a text nor token ids"),
        (65, "neither a text nor token ids"),
        (None, "neither a text nor token ids"),
        (b"bytes", "bytes"),
        ([], "empty"),
        ("a\udcff", "no character"),
    ],
)
def test_a_prompt_that_is_none_is_refused(cloud: Serving, prompt: object, error: str) -> None:
    with edge(cloud.address) as session:
        with pytest.raises(UsageError, match=error):
            ids_of(session, prompt)  # type: ignore[arg-type]
        assert ids_of(session, PROMPT, max_tokens=5) == said(LAW, PROMPT, 5)


def test_texts_of_special_tokens_in_a_prompt_become_these(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        ids_of(session, "a</s>b", max_tokens=1)
        assert list(session.committed[:-1]) == [256, ord("a"), END_ID, ord("b")]


def test_an_empty_prompt_needs_a_start_token(cloud: Serving) -> None:
    with edge(cloud.address, tokeniser=ByteTokeniser(begin=False)) as session:
        with pytest.raises(UsageError, match="empty"):
            ids_of(session, "")


def test_a_start_token_in_the_prompt_is_taken_once(cloud: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with edge(cloud.address) as session:
        assert ids_of(session, "<s>" + PROMPT, max_tokens=5) == said(LAW, PROMPT, 5)
        assert list(session.committed[:-5]) == ByteTokeniser().encode(PROMPT)
        assert sum("start token" in record.message for record in caplog.records) == 1


def test_options_are_refused_at_once_by_name(cloud: Serving) -> None:
    with edge(cloud.address) as session:
        for options, error in (
            ({"temperature": -0.7}, "temperature"),
            ({"grammar": "x"}, "grammar"),
            ({"max_tokens": 0}, "max-tokens"),
            ({"max_token": 5}, "max_token.*max_tokens"),
            ({"stop": ["a", ""]}, "stop"),
            ({"logit_bias": {-1: 0.0}}, "logit-bias"),
        ):
            with pytest.raises(UsageError, match=error):
                session.generate(PROMPT, **options)
        assert ids_of(session, PROMPT, max_tokens=5, stop=("x y z",), seed=3) == said(LAW, PROMPT, 5)
        assert session.seed == 3


class Spoiled(Watched):
    """Gives logits that are not finite to whoever's text begins with "!", from its 30th id on."""

    def greedy(self, batch: Batch) -> list[tuple[int, ...]]:
        answered = super().greedy(batch)
        spoiled = [self.ids(slot)[0] == ord("!") and self.length(slot) >= 30 for slot, _, _ in batch]
        return [(-1,) * len(a) if bad else a for a, bad in zip(answered, spoiled, strict=True)]


@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
def test_logits_that_are_not_finite_end_one_session_of_three(strategy: str) -> None:
    with serving(make=lambda: Spoiled(LAW, pass_s=0.001)) as cloud:

        def user(prompt: bytes) -> object:
            with edge(cloud.address, strategy=strategy) as session:
                try:
                    return ids_of(session, [*prompt], max_tokens=60)
                except PipeSDError as error:
                    assert session.finish_reason == "error"
                    assert [*session.token_ids] == said(LAW, [*prompt], len(session.token_ids))
                    return error

        first, spoiled, third = at_once([lambda p=p: user(p) for p in (b"one", b"!two", b"three")])  # type: ignore[misc]
        assert isinstance(spoiled, Unreachable) and "not finite" in str(spoiled)
        assert (first, third) == (said(LAW, [*b"one"], 60), said(LAW, [*b"three"], 60))
        with edge(cloud.address) as session:
            assert ids_of(session, [*b"four"], max_tokens=60) == said(LAW, [*b"four"], 60)
