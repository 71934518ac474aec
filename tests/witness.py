"""Watches a model world and remembers what was said and committed, so that a broken promise is noticed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesd.protocol.actions import Committed
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import Open, Verdict

if TYPE_CHECKING:
    from tests.explore import Edge, World

STOPS = (90, 91)  # the stop ids of every world
Opening = tuple[int, int]  # session, number


class Witness:
    def __init__(self) -> None:
        self.asked: dict[Opening, list[int]] = {}  # ids the edge opened with
        self.truth: dict[Opening, list[int]] = {}  # ids a cloud committed
        self.limits: dict[Opening, int] = {}  # the edge's own
        self.branches: dict[tuple[int, int, int], dict[int, int]] = {}  # with the epoch: ids drafted, by position
        self.said: dict[Opening, int] = {}  # position up to which verdicts went out
        self.said_again = 0

    def opens(self, message: Open, m: EdgeMachine) -> None:
        key = (message.session, message.opening)
        assert self.asked.setdefault(key, list(m.committed)) == m.committed, "one number, two openings"
        self.limits[key] = message.limit
        self.branches[*key, m.epoch] = dict(enumerate(m.draft, len(m.committed)))

    def draws(self, m: EdgeMachine, token: int) -> None:
        self.branches.setdefault((m.session, m.opening, m.epoch), {})[m.end] = token

    def says(self, verdict: Verdict) -> None:
        key = (verdict.session, verdict.opening)
        said = self.said.get(key, len(self.asked[key]))
        assert verdict.pos <= said, "a verdict leaves out what was never said"
        self.said_again += verdict.pos < said
        self.said[key] = max(said, verdict.pos + len(verdict.ids))

    def commits(self, world: World, edge: Edge, action: Committed) -> None:
        """An edge gives ids to its user: they must be the target's, once, in order, and none behind the end."""
        assert not edge.ended and action.pos == len(edge.shown), "committed ids are given once, in order"
        shown = [*edge.shown, *action.ids]
        truth = self.truth[edge.machine.session, edge.machine.opening]
        assert truth[: len(shown)] == shown, "not what the cloud committed"
        if world.setup.reproducible:
            for p in range(action.pos, len(shown)):
                assert shown[p] == world.choice(shown[:p]), "not the target's text"
        assert not any(token in STOPS for token in action.ids[:-1]) and len(shown) <= edge.limit, "beyond the end"

    def check(self, world: World) -> None:
        """What must hold at every moment."""
        for edge in world.edges:
            m, t = edge.machine, edge.machine.tally
            assert m.committed == edge.shown, "committed ids were changed or not given out"
            assert edge.mirror == m.committed + m.draft, "the drafter's cache is not committed + draft"
            assert len(m.draft) <= world.setup.draft_ahead
            assert (t.drafted, t.accepted) == (edge.draws, edge.accepted)
            assert t.accepted + t.rejections + len(m.draft) <= t.drafted
            assert 0 <= t.proactive - t.promoted - t.dropped <= len(m.draft), "proactive tokens are decided once"
            assert m.nav is not None or t.proactive == t.promoted + t.dropped, "at the answer at the latest"
            assert m.running == (not edge.ended)
        for worker in world.workers:
            assert worker.machine.sessions <= world.setup.max_sessions
            for s in worker.machine._sessions.values():
                asked = self.asked[s.session, s.opening]
                truth = self.truth.setdefault((s.session, s.opening), asked)
                assert s.committed[: len(truth)] == truth, "two truths within one opening, or another prompt"
                self.truth[s.session, s.opening] = list(s.committed)
                bounds = worker.machine.limits
                assert len(s.draft) <= min(bounds.draft_ahead, world.setup.draft_ahead)
                assert len(s.committed) - s.known <= max(bounds.run_ahead, bounds.draft_ahead + 1)
                assert len(s.committed) <= min(self.limits[s.session, s.opening], bounds.context)
                branch = self.branches.get((s.session, s.opening, s.epoch), {})
                ids = s.committed + s.draft
                alive = all(branch.get(p, ids[p]) == ids[p] for p in range(len(ids)))
                assert not s.draft or alive, "a draft is kept that is not what the edge drafted there"
                assert not any(token in STOPS for token in s.committed[len(asked) : -1]), "beyond the end"
