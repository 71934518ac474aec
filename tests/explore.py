"""A model world around the two state machines: edges, a front, workers and links, moved one event at a time.

`World.play("up; pass; down")` moves it. After each event the world checks what must hold always; a broken rule is an
AssertionError of its `witness`. `wander` says what could happen next, and brings worlds to their end.

Events, each with the number of an edge (default 0) unless it says otherwise:
    draw right|wrong|stop|refused    the drafter draws   send, ask, settle      as in the edge machine
    up, down                one message is delivered     again_up, again_down   and stays in the queue as well
    cut lose|late           the connection is replaced; what was in flight is lost, or may arrive late
    late_up, late_down      a late message of the oldest connection arrives
    block                   the next message is not taken by the link
    deadline, retry, cancel, close, stop_drafting, resume_drafting
    next BACK               the next turn keeps all but BACK ids and appends two
    redraw                  the drafter draws what stands where its token was refused, or asks for more
    pass W                  a pass of worker W           crash W, restart W     its state is lost
    forget                  the front loses its tables   wait, idle             time passes: a little, very much
    mode W SESSION MODE     the worker puts a session on another rung
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipesd.core import Mode
from pipesd.policy.sampling import Method, Sampling
from pipesd.protocol.actions import Action, Committed, Done, Extend, Fail, Redraw, Request, Retry, Rollback, Send
from pipesd.protocol.cloud_machine import CloudMachine
from pipesd.protocol.cloud_session import CloudLimits
from pipesd.protocol.edge_machine import EdgeMachine
from pipesd.protocol.messages import Cancel, Draft, Error, ErrorCode, Gone, Message, Open, Verdict
from pipesd.protocol.wire import decode, encode
from tests.model_target import P_SENT, STOPS, ModelTarget, taken
from tests.witness import Witness

QUIET_S, IDLE_S = 1.0, 100.0
HASH = b"eight by"


@dataclass(frozen=True)
class Setup:
    """One small world. `stops_at` are positions where the target's own choice is a stop id. Where draft tokens are
    tested, they are not compared with it.
    """

    mode: Mode = Mode.NAV
    drafts: bool = True
    ahead: bool = False
    ask_every: int = 2
    draft_ahead: int = 3
    cloud_ahead: tuple[int, ...] = (16,)  # the cloud's bounds: those of the first worker, of the next one, …
    run_ahead: int = 16
    prompt: int = 3
    tokens: int = 6
    context: tuple[int, ...] = (400,)
    edges: int = 1
    workers: int = 1
    max_sessions: int = 2
    prefill_piece: int = 2
    ids: int = 3
    stops_at: frozenset[int] = frozenset()
    reproducible: bool = True
    tests: bool = False
    proposes: bool | None = None  # what is told of a refusal: proposals, or all; None: as chance has it

    @property
    def sampling(self) -> Sampling | None:
        return Sampling(temperature=1.0, method=Method.REJECTION) if self.tests else None


@dataclass
class Link:
    """One connection: both directions keep their order, nothing is lost unless it is cut."""

    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)


@dataclass
class Edge:
    machine: EdgeMachine
    mirror: list[int] = field(default_factory=list)  # what the drafter's cache holds
    shown: list[int] = field(default_factory=list)  # what the user was given, prompts included
    link: Link = field(default_factory=Link)
    old: list[Link] = field(default_factory=list)
    blocked: bool = False
    retry_s: float | None = None
    redraw: Redraw | None = None  # what the drafter is still to do
    ended: str = ""
    failed: ErrorCode | None = None
    draws: int = 0
    accepted: int = 0
    rejected: int = 0
    turns: int = 0
    limit: int = 0


@dataclass
class Worker:
    machine: CloudMachine
    caches: dict[int, list[int]] = field(default_factory=dict)
    down: bool = False


class World:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now_s = 0.0
        self.target = ModelTarget(setup.ids, setup.stops_at, setup.proposes, setup.reproducible)
        self.made = 0
        self.edges = [Edge(EdgeMachine(100 + i, setup.draft_ahead)) for i in range(setup.edges)]
        self.workers = [Worker(self._new_machine()) for _ in range(setup.workers)]
        self.rows: dict[int, tuple[int, int]] = {}  # the front: session -> worker, opening
        self.routes: dict[int, Link] = {}  # the front: session -> connection
        self.placed = 0
        self.witness = Witness()
        self.counts: dict[str, int] = {}
        for number in range(setup.edges):
            self._generate(number, 0, list(range(10 + number, 10 + number + setup.prompt)))

    # -- moving it ----------------------------------------------------------------------------------------------------

    def play(self, events: str) -> World:
        """Do the events of a list like "up; draw wrong; pass"."""
        for event in events.split(";"):
            self.do(event.strip())
        return self

    def do(self, event: str) -> None:
        name, *words = event.split()
        getattr(self, name if name != "pass" else "pass_")(*(int(w) if w.isdigit() else w for w in words))
        self.witness.check(self)

    def draw(self, what: str, number: int = 0) -> None:
        edge = self.edges[number]
        prefix = edge.machine.committed + edge.machine.draft
        right = self.target.choice(prefix)
        token = {"right": right, "wrong": (right + 1) % self.setup.ids, "stop": STOPS[0], "refused": 0}[what]
        if what == "refused":
            token = next(token for token in range(self.setup.ids) if not self.target.accepts(prefix, token))
        self.witness.draws(edge.machine, token)
        edge.machine.drafted(token, P_SENT)
        edge.mirror.append(token)
        edge.draws += 1

    def redraw(self, number: int = 0) -> None:
        """What it draws may be over by then."""
        edge = self.edges[number]
        assert edge.redraw is not None
        (pos, refused), m, edge.redraw = edge.redraw, edge.machine, None
        token = taken(refused, m.committed[:pos])
        if token is not None:
            self._count("redrawn")
            self.witness.redraws(m, token)
            self._perform(number, m.redrawn(token))
        else:
            self._count("ask more")
            self._perform(number, m.ask_more((refused.first or 0) + len(refused.pairs)))

    def send(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.send())

    def ask(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.ask())

    def settle(self, number: int = 0) -> bool:
        actions = self.edges[number].machine.settle()
        self._perform(number, actions)
        return bool(actions)

    def deadline(self, number: int = 0) -> None:
        self._count("deadline")
        self._perform(number, self.edges[number].machine.deadline())

    def retry(self, number: int = 0) -> None:
        self.edges[number].retry_s = None
        self._perform(number, self.edges[number].machine.reopen())

    def cancel(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.cancel())

    def close(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.close())

    def stop_drafting(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.stop_drafting())

    def resume_drafting(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.resume_drafting(Mode.NAV))

    def next(self, back: int = 0, number: int = 0) -> None:
        edge = self.edges[number]
        keep = max(1, len(edge.shown) - back)
        self._generate(number, keep, [50 + edge.turns, 60 + edge.turns])

    def block(self, number: int = 0) -> None:
        self.edges[number].blocked = True

    def up(self, number: int = 0) -> None:
        link = self.edges[number].link
        self._arrive(link, link.up.popleft())

    def again_up(self, number: int = 0) -> None:
        link = self.edges[number].link
        self._arrive(link, link.up[0])

    def down(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.receive(self.edges[number].link.down.popleft()))

    def again_down(self, number: int = 0) -> None:
        self._perform(number, self.edges[number].machine.receive(self.edges[number].link.down[0]))

    def cut(self, what: str = "lose", number: int = 0) -> None:
        self._count("cut")
        edge = self.edges[number]
        if what == "late":
            edge.old.append(edge.link)
        edge.link = Link()

    def late_up(self, number: int = 0) -> None:
        link = next(link for link in self.edges[number].old if link.up)
        self._arrive(link, link.up.popleft())

    def late_down(self, number: int = 0) -> None:
        link = next(link for link in self.edges[number].old if link.down)
        self._perform(number, self.edges[number].machine.receive(link.down.popleft()))

    def pass_(self, number: int = 0) -> bool:
        """One pass of a worker; False if it had nothing to do."""
        worker = self.workers[number]
        for slot in worker.machine.take_freed():
            worker.caches[slot] = []
        works = [] if worker.down else worker.machine.work()
        assert len({work.slot for work in works}) == len(works)
        self.now_s += 0.01
        for work in works:
            cache = worker.caches.setdefault(work.slot, [])
            assert work.keep <= len(cache), "the target's cache does not hold what is to be kept"
            cache[work.keep :] = work.ids
            choices = self.target.answer(work, cache)
            replies = worker.machine.done(work, choices, 0.01, self.now_s)
            self.witness.passes(worker.machine._sessions[work.session], work, choices)
            self._answer(replies)
        return bool(works)

    def crash(self, number: int = 0) -> None:
        """The front notices, tells the sessions, and answers STARTING until the restart."""
        self._count("crash")
        worker = self.workers[number]
        worker.machine, worker.caches, worker.down = self._new_machine(), {}, True
        for session, (placed, opening) in list(self.rows.items()):
            if placed == number:
                del self.rows[session]
                self._answer([Error(session, opening, ErrorCode.UNKNOWN, "the worker is gone", 0)])

    def restart(self, number: int = 0) -> None:
        self.workers[number].down = False

    def forget(self) -> None:
        self._count("forget")
        self.rows.clear()
        self.routes.clear()

    def wait(self) -> None:
        self.now_s += QUIET_S + 0.1

    def idle(self) -> None:
        self._count("idle")
        self.now_s += IDLE_S + 0.1
        for worker in self.workers:
            self._answer(worker.machine.tick(self.now_s))

    def mode(self, worker: int, session: int, mode: int) -> None:
        self._answer(self.workers[worker].machine.set_mode(session, Mode(mode)))

    # -- the parts ----------------------------------------------------------------------------------------------------

    def _new_machine(self) -> CloudMachine:
        s, made = self.setup, self.made
        self.made += 1
        return CloudMachine(
            CloudLimits(
                context=s.context[made % len(s.context)],
                vocabulary_size=100,
                max_sessions=s.max_sessions,
                draft_ahead=s.cloud_ahead[made % len(s.cloud_ahead)],
                run_ahead=s.run_ahead,
                prefill_piece=s.prefill_piece,
                idle_s=IDLE_S,
                quiet_s=QUIET_S,
            )
        )

    def _generate(self, number: int, keep: int, prompt: list[int]) -> None:
        edge, s = self.edges[number], self.setup
        del edge.mirror[keep:], edge.shown[keep:]
        edge.mirror += prompt
        edge.shown += prompt
        edge.limit = len(edge.shown) + s.tokens
        edge.draws = edge.accepted = edge.rejected = 0
        edge.ended, edge.retry_s, edge.redraw, edge.turns = "", None, None, edge.turns + 1
        request = Request(edge.limit, frozenset(STOPS), s.mode, 0, HASH, HASH, 1, s.sampling)
        self._perform(number, edge.machine.generate(keep, prompt, request, drafts=s.drafts, ahead=s.ahead))

    def _perform(self, number: int, actions: Sequence[Action]) -> None:
        edge = self.edges[number]
        for action in actions:
            if isinstance(action, Send):
                self._put(edge, action.message)
            elif isinstance(action, Rollback):
                assert action.pos <= len(edge.mirror)
                self.witness.drops(edge.machine, action.pos)
                del edge.mirror[action.pos :]
            elif isinstance(action, Extend):
                edge.mirror += action.ids
            elif isinstance(action, Committed):
                self.witness.commits(self, edge, action)
                edge.shown += action.ids
                edge.accepted += sum(action.accepted)
                edge.rejected += action.rejected
            elif isinstance(action, Redraw):
                assert action.pos == len(edge.shown) and edge.machine.draft
                edge.redraw = action
            elif isinstance(action, Retry):
                edge.retry_s = action.after_s
            elif isinstance(action, Done):
                assert not edge.ended
                edge.ended, edge.retry_s = action.reason, None
            elif isinstance(action, Fail):
                assert "prompt" in action.text, f"honest traffic was refused: {action.text}"
                edge.failed = action.code

    def _put(self, edge: Edge, message: Message) -> None:
        assert decode(encode(message)) == message
        if isinstance(message, Draft) and edge.machine._redraw.pending:
            assert message.tried is not None, "nothing is said before the refused token's place is filled"
        if isinstance(message, Open):
            assert edge.retry_s is None, "it comes back before the time that the cloud named"
            self.witness.opens(message, edge.machine)
        self._count(type(message).__name__)
        if edge.blocked:
            edge.blocked = False
            self._count("lost" if isinstance(message, Open | Cancel) else "not sent")
            edge.machine.not_sent(message)
        else:
            edge.link.up.append(message)

    def _arrive(self, link: Link, message: Message) -> None:
        """The front: renew the route; an OPEN picks a worker, all else goes to the session's own."""
        session = message.session
        self.routes[session] = link
        if isinstance(message, Open):
            placed = self.rows[session][0] if session in self.rows else self.placed % len(self.workers)
            self.placed += session not in self.rows
            if self.workers[placed].down:
                self._answer([Error(session, message.opening, ErrorCode.STARTING, "the worker starts", 100)])
                return
            self.rows[session] = placed, message.opening
        if session not in self.rows:
            if isinstance(message, Draft):
                self._answer([Error(session, message.opening, ErrorCode.UNKNOWN, "no such session", 0)])
            return
        self._answer(self.workers[self.rows[session][0]].machine.receive(message, self.now_s))

    def _answer(self, messages: Sequence[Message]) -> None:
        """The front: messages of a worker go where the session was last heard; the dead take nothing."""
        for message in messages:
            assert decode(encode(message), internal=True) == message
            self._count(f"Error {message.code.name}" if isinstance(message, Error) else type(message).__name__)
            assert not isinstance(message, Error) or "are known at the edge" not in message.text, "an honest edge"
            if isinstance(message, Verdict):
                self.witness.says(message)
            if isinstance(message, Gone):
                if message.session in self.rows and self.rows[message.session][1] <= message.opening:
                    del self.rows[message.session]
            elif any(edge.link is self.routes.get(message.session) for edge in self.edges):
                self.routes[message.session].down.append(message)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
