"""The front with a worker of its own: what only shows when both are real."""

from __future__ import annotations

from clouds import LAW, serving
from front_harness import Edge, hello

from pipesd.core import Mode
from pipesd.protocol.messages import Draft, Open, Opened, Resend, Verdict, Welcome
from pipesd.transport import Context


def test_a_hole_asked_for_before_opened_does_not_lose_the_session() -> None:
    """An early DRAFT was lost: the worker asks for it while the prompt is computed, and OPENED still arrives."""
    ids = tuple(b"a prompt of several pieces " * 20)
    with serving(LAW, target={"token_s": 0.002}) as cloud, Context() as context, Edge(context, cloud.address) as edge:
        welcome = edge.ask(hello())
        assert isinstance(welcome, Welcome)
        hashes = welcome.model_fingerprint, welcome.vocabulary_hash
        edge.say(Open(7, 1, 0, bytes(8), ids, 1000, (), None, 0, Mode.NAV, *hashes))
        hole = edge.ask(Draft(7, 1, 0, len(ids) + 2, (5,), len(ids)))
        assert isinstance(hole, Resend) and hole.pos == len(ids)
        assert isinstance(edge.hear(), Opened)
        assert isinstance(edge.ask(Draft(7, 1, 0, len(ids), (5, 5, 5), len(ids), nav=True)), Verdict)
