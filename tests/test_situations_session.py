"""What a session tells its cloud, seen from the cloud's side: the prompt's ids as they are, and good-bye."""

from __future__ import annotations

import time

import pytest
from clouds import LAW, edge, ids_of, said, serving, wait_until

from pipesd.sim.proxy import LinkProxy
from pipesd.sim.tokeniser import BEGIN_ID, END_ID, ByteTokeniser


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize("strategy", ["vanilla", "cloud"])
@pytest.mark.parametrize("text", ["Café déjà vu — 123 😊", "<s>again", "<s><s>twice", "a</s>b", " "])
def test_both_sides_hold_the_same_prompt(text: str, strategy: str, begin: bool) -> None:
    """Only the edge turns text into ids; at most one start id stands in front, none where the model has none."""
    tokeniser = ByteTokeniser(begin=begin)
    with serving(max_sessions=1) as cloud, edge(cloud.address, tokeniser=tokeniser, strategy=strategy) as session:
        ids = ids_of(session, text, max_tokens=8)
        prompt = list(session.committed[: -len(ids)])
        assert prompt == tokeniser.encode(text, special=True)
        assert list(cloud.targets[0].ids(0)[: len(prompt)]) == prompt
        assert ids == said(LAW, prompt, 8)
        if begin:
            assert prompt[0] == BEGIN_ID and (prompt.count(BEGIN_ID) == 1 or text == "<s><s>twice")
        assert (END_ID in prompt) == ("</s>" in text)


def test_a_good_bye_arrives_over_a_slow_link() -> None:
    with (
        serving(max_sessions=2, idle_s=600) as cloud,
        LinkProxy(cloud.address, delay_s=0.2) as link,
        edge(link.address) as session,
    ):
        ids_of(session, "Once upon a time", max_tokens=3)
        assert cloud.targets[0].length(0) + cloud.targets[0].length(1) > 0
        begun_s = time.monotonic()
        session.close()
        assert time.monotonic() - begun_s < 2.0
        wait_until(lambda: not any(cloud.targets[0].length(slot) for slot in range(2)), "its place is free")


def test_a_seed_is_reported_and_a_fresh_one_each_time_unless_given() -> None:
    with serving() as cloud, edge(cloud.address) as session:
        seeds = []
        for options in ({}, {}, {"seed": 7}):
            ids_of(session, "x", max_tokens=2, **options)
            seeds.append(session.seed)
    assert seeds[2] == 7 and len(set(seeds)) == 3 and None not in seeds
