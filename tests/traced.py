"""One world, told twice: a scene of the virtual world, and the records and link that say the same to the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import virtual
from virtual import FRAME_BYTES, Scene, Trouble, VirtualWorld
from virtual_cloud import VOCABULARY

from pipesd.sim.drafters import Agreement, Proposal, entropy_of
from pipesd.sim.link_model import Link
from pipesd.sim.simulate import Simulated, simulate
from pipesd.sim.texts import continuation, folded, state_of
from pipesd.sim.trace import DEPTH, Guess, Record

BATCHINGS, TRIGGERS = ("none", "dp", "immediate", "greedy"), ("dual", "sequence", "token", "fixed", "adaptive", "gain")


def record_of(scene: Scene, prompt: Sequence[int], tokens: int) -> Record:
    """What the scene's law says behind a prompt, and what its drafter would draft at each place."""
    proposal = scene.proposal or Agreement(scene.law, scene.agreement, scene.seed)
    output = tuple(continuation(scene.law, prompt, tokens))
    guesses, behind, state = [], {}, state_of(prompt)
    for i, said in enumerate(output):
        guess = _guess(proposal, len(prompt) + i, state)
        guesses.append(guess)
        if guess.id != said or i == len(output) - 1:
            behind[i] = _behind(proposal, len(prompt) + i + 1, folded(state, guess.id))
        state = folded(state, said)
    return Record(tuple(prompt), output, tuple(guesses), behind)


def _guess(proposal: Proposal, position: int, state: int) -> Guess:
    token_id, p_draft = proposal.propose(position, state)
    return Guess(token_id, p_draft, entropy_of(p_draft, VOCABULARY.size), 0, 0.0)


def _behind(proposal: Proposal, position: int, state: int) -> tuple[Guess, ...]:
    guesses: list[Guess] = []
    while len(guesses) < DEPTH - 1:
        guesses.append(_guess(proposal, position + len(guesses), state))
        state = folded(state, guesses[-1].id)
    return tuple(guesses)


def link_of(scene: Scene, **further: Any) -> Link:
    """The scene's link."""
    return Link(
        latency_s=scene.delay_s, up_bytes_per_s=scene.up_bytes_per_s, down_bytes_per_s=scene.down_bytes_per_s,
        up_bytes_per_draft_token=scene.up_bytes_per_draft_token, message_bytes=FRAME_BYTES, **further,
    )  # fmt: skip


def random_scene(seed: int) -> Scene:
    """Times that never meet by being round numbers."""
    chance = random.Random(seed)

    def some(low: float, high: float) -> float:
        return low + (high - low) * chance.random()

    edge: dict[str, Any] = {
        "strategy": chance.choice(("cloud", "vanilla", "hsl", "edgellm", "pipesd", "pipesd", "auto"))
    }
    if edge["strategy"] == "pipesd":
        edge |= {"batching": chance.choice(BATCHINGS), "trigger": chance.choice(TRIGGERS),
                 "waiting": chance.choice(("draft", "idle")),
                 "link_model": chance.choice(("hockney", "streamed"))}  # fmt: skip
    fat = chance.random() < 0.3
    return Scene(
        seed=seed, agreement=some(0.3, 0.98), gamma_s=some(0.002, 0.04), delay_s=some(0.001, 0.06),
        up_bytes_per_s=some(1e5, 3e6) if fat or chance.random() < 0.5 else some(1e6, 1e8),
        down_bytes_per_s=some(1e6, 1e8), up_bytes_per_draft_token=chance.choice((2000, 20000)) * fat,
        pass_s=some(0.005, 0.09), token_s=some(0.0, 0.004), edge={**edge, "tuning": "off"},
    )  # fmt: skip


def both(
    scene: Scene,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    cuts: Sequence[float] = (),
    lasts_s: float = 0.1,
    events: str = "",
) -> tuple[VirtualWorld, list[tuple[tuple[int, ...], dict[str, Any]]], Simulated]:
    """The scene in its own world, ids and statistics of each generation, and as it is simulated; with cuts at these
    times from the first generation on."""
    link = link_of(scene, cuts=[(at_s, lasts_s) for at_s in cuts])
    world = VirtualWorld(scene)
    told: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    virtual_connect_s, virtual.CONNECT_S = virtual.CONNECT_S, link.away_s(lasts_s)
    try:
        with world.session as session:
            session.tokeniser.end_ids = frozenset()  # the records are cut off, and so is what an OPEN says
            for at_s in cuts:
                trouble = Trouble(at_s, "cut")
                world.at(world.clock.now() + at_s, lambda trouble=trouble: world._trouble(trouble))  # type: ignore[misc]
            for prompt in prompts:
                for _ in session.generate(prompt, max_tokens=tokens, seed=0):
                    pass
                told.append((session.token_ids, session.stats))
    finally:
        virtual.CONNECT_S = virtual_connect_s
    simulated = simulate(
        [record_of(scene, prompt, tokens) for prompt in prompts], link=link, gamma_s=scene.gamma_s,
        pass_s=scene.pass_s, token_s=scene.token_s, settings={**scene.edge, "events": events},
    )  # fmt: skip
    return world, told, simulated
