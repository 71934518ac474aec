"""Watches a model world and remembers what was said and committed, so that a broken promise is noticed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesd.policy.accept import Choices
from pipesd.protocol.actions import Committed
from pipesd.protocol.cloud_session import CloudSession, Work
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import Open, Verdict
from tests.model_target import STOPS

if TYPE_CHECKING:
    from tests.explore import Edge, World

Opening = tuple[int, int]  # session, number


class Witness:
    def __init__(self) -> None:
        self.asked: dict[Opening, list[int]] = {}  # ids the edge opened with
        self.truth: dict[Opening, list[int]] = {}  # ids a cloud committed
        self.limits: dict[Opening, int] = {}  # the edge's own
        self.branches: dict[tuple[int, int, int], dict[int, int]] = {}  # with the epoch: ids drafted, by position
        self.said: dict[Opening, int] = {}  # position up to which verdicts went out
        self.said_again = 0
        self.redrawn: dict[tuple[int, int, int], int] = {}  # by position of an opening: what an edge drew there
        self.own: set[tuple[int, int, int, int]] = set()  # positions of an epoch where the target's own id stands

    def opens(self, message: Open, m: EdgeMachine) -> None:
        key = (message.session, message.opening)
        assert self.asked.setdefault(key, list(m.committed)) == m.committed, "one number, two openings"
        self.limits[key] = message.limit
        self.branches[*key, m.epoch] = dict(enumerate(m.draft, len(m.committed)))

    def draws(self, m: EdgeMachine, token: int) -> None:
        self.branches.setdefault((m.session, m.opening, m.epoch), {})[m.end] = token

    def drops(self, m: EdgeMachine, pos: int) -> None:
        branch = self.branches.get((m.session, m.opening, m.epoch), {})
        for p in [p for p in branch if p >= pos]:
            del branch[p]

    def redraws(self, m: EdgeMachine, token: int) -> None:
        if m._redraw.due:
            self.redrawn[m.session, m.opening, len(m.committed)] = token

    def passes(self, s: CloudSession, work: Work, choices: Choices) -> None:
        """A pass is over, and the session has what it brought."""
        own = work.keep + 1 + choices.accepted
        if work.rows and len(s.committed) > own and own < s.limit - 1:  # nothing drafted for the last place is kept
            self.own.add((s.session, s.opening, max(s.epoch, 0), own))

    def says(self, verdict: Verdict) -> None:
        key = (verdict.session, verdict.opening)
        said = self.said.get(key, len(self.asked[key]))
        while (*key, said) in self.redrawn and verdict.pos > said:
            said += 1
        assert verdict.pos <= said, "a verdict leaves out what was never said"
        end = verdict.pos + len(verdict.ids)
        self.said_again += verdict.pos < said or any((*key, p) in self.redrawn for p in range(verdict.pos, end))
        self.said[key] = max(said, end)

    def commits(self, world: World, edge: Edge, action: Committed) -> None:
        """An edge gives ids to its user: they must be the target's, once, in order, and none behind the end."""
        assert not edge.ended and action.pos == len(edge.shown), "committed ids are given once, in order"
        shown = [*edge.shown, *action.ids]
        truth = self.truth[edge.machine.session, edge.machine.opening]
        drawn = self.redrawn.get((edge.machine.session, edge.machine.opening, action.pos))
        if drawn is not None and len(truth) == action.pos:
            assert action.ids == (drawn,) and action.accepted == (False,) and action.rejected
            truth = [*truth, drawn]
        assert truth[: len(shown)] == shown, "not what the cloud committed"
        if world.setup.reproducible:
            for p, accepted in enumerate(action.accepted, action.pos):
                if world.setup.tests and accepted:
                    assert world.target.accepts(shown[:p], shown[p]), "the target refuses it"
                elif p == action.pos and drawn is not None:
                    assert shown[p] == world.target.refusal(shown[:p]).drawn, "not what the target left to be drawn"
                else:
                    assert shown[p] == world.target.choice(shown[:p]), "not the target's text"
        assert not any(token in STOPS for token in action.ids[:-1]) and len(shown) <= edge.limit, "beyond the end"

    def check(self, world: World) -> None:
        """What must hold at every moment."""
        for edge in world.edges:
            m, t = edge.machine, edge.machine.tally
            assert m.committed == edge.shown, "committed ids were changed or not given out"
            assert edge.mirror == m.committed + m.draft, "the drafter's cache is not committed + draft"
            assert len(m.draft) <= world.setup.draft_ahead
            assert (t.drafted, t.accepted, t.rejections) == (edge.draws, edge.accepted, edge.rejected)
            assert t.accepted + t.rejections + len(m.draft) <= t.drafted
            assert 0 <= t.proactive - t.promoted - t.dropped <= len(m.draft), "proactive tokens are decided once"
            assert m.nav is not None or t.proactive == t.promoted + t.dropped, "at the answer at the latest"
            assert m.running == (not edge.ended)
            truth = self.truth.get((m.session, m.opening), [])
            assert all(x == y for x, y in zip(truth, m.committed, strict=False)), "the two sides differ"
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
                assert len(s.p_draft) == len(s.draft) * world.setup.tests
                ids = s.committed + s.draft
                alive = all(branch.get(p, ids[p]) == ids[p] for p in range(len(ids)))
                assert not s.draft or alive, "a draft is kept that is not what the edge drafted there"
                assert not any(token in STOPS for token in s.committed[len(asked) : -1]), "beyond the end"
        if world.setup.tests:
            for *epoch, p in self.own:
                drafted = self.branches.get(tuple(epoch), {})  # type: ignore[arg-type]
                assert p not in drafted, "the target's own id stands where the edge had drawn one to be tested"
