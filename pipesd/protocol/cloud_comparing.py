"""How the cloud compares by position: a draft with what is committed and kept, a pass's result with the draft.

The tables are those of `cloud_machine`.
"""

from __future__ import annotations

from pipesd.policy.accept import Choices
from pipesd.protocol.cloud_session import CloudSession
from pipesd.protocol.messages import Draft, Error, ErrorCode, Message, Resend


def take_draft(s: CloudSession, m: Draft, draft_ahead: int, now_s: float) -> Resend | Error | None:
    """Compare a draft that is not beyond what is known here, keep what is new, at most `draft_ahead` tokens."""
    after = m.pos + len(m.ids)
    if m.epoch < s.epoch or (m.epoch == s.epoch and s.dead) or s.ended:
        same = m.epoch == s.epoch
        s.stale += max(0, after - max(m.pos, s.end)) if same else len(m.ids)
        s.end = max(s.end, after) if same else s.end
        return None
    if m.epoch > s.epoch:
        s.drop_draft()
        s.epoch, s.dead, s.hole_asked = m.epoch, False, False
        s.want = s.want_end = 0
        s.end = min(m.known, len(s.committed))
    s.end = max(s.end, min(m.known, len(s.committed)))
    if m.nav:
        if not s.owed:
            s.owed_since_s = now_s
        s.want = min(s.limit, max(s.want, after, m.known + 1))
        s.want_end = min(s.limit - 1, max(s.want_end, after))
    if m.pos > s.end:
        if s.hole_asked and not (m.nav or m.again):
            return None
        s.hole_asked = True
        return Resend(s.session, s.opening, s.epoch, s.end)
    s.hole_asked = False
    length, tests = len(s.committed), s.tests
    for p, token in enumerate(m.ids, m.pos):
        seen = p < s.end
        if p < length:
            s.verified += not seen
            if token != s.committed[p]:
                s.kill_branch()
                s.stale += max(0, after - max(p + 1, s.end))
                break
        elif p - length < len(s.draft):
            if token != s.draft[p - length]:
                s.ended = True
                return error(m, ErrorCode.MALFORMED, f"two ids were drafted for position {p} in one epoch")
        elif p >= s.limit - 1:
            s.stale += not seen
        elif len(s.draft) >= draft_ahead:
            s.ended = True
            return error(m, ErrorCode.LIMIT, f"more than {draft_ahead} draft tokens are ahead of the verdict")
        else:
            s.draft.append(token)
            if tests:
                assert m.p_draft is not None
                s.p_draft.append(m.p_draft[p - m.pos])
    s.end = max(s.end, after)
    return None


def take_choices(s: CloudSession, drafted: tuple[int, ...], choices: Choices) -> bool:
    """Commit what the target makes of the first draft tokens, `drafted`; False if its logits were not finite where they
    were needed."""
    accepted, count = choices.accepted, len(drafted)
    assert list(drafted) == s.draft[:count] and len(choices.ids) == count + 1
    s.verified += count
    length, new = len(s.committed), drafted[:accepted]
    own = choices.refusal is None and (accepted < count or takes_own(s, length + accepted))
    if own:
        new += (choices.ids[accepted],)
    room = s.limit - length
    stop = room
    if not s.stop_ids.isdisjoint(new):
        stop = next(i + 1 for i, token in enumerate(new) if token in s.stop_ids)
    new = new[: min(room, stop)]
    broken = bool(new) and new[-1] < 0
    s.ended = broken or stop < room or len(new) == room
    s.committed += new[: len(new) - broken]
    s.cached = len(s.committed) - 1
    if choices.logprobs is not None:
        s.logprobs += choices.logprobs[: len(new) - broken]
    del s.draft[:count], s.p_draft[:count]
    if choices.refusal is not None and not s.ended:
        s.refuse(choices.refusal)
    elif s.ended or accepted < count:
        s.kill_branch()
    elif own and s.draft:
        s.verified += 1
        del s.p_draft[:1]
        if s.draft.pop(0) != new[-1]:
            s.kill_branch()
    return not broken


def takes_own(s: CloudSession, reached: int) -> bool:
    """Whether behind a draft that was accepted whole, up to there, stands a token of the target's own. Where draft
    tokens are tested the edge may have drawn one there: then only what it asked for."""
    return not s.tests or s.want_end <= reached < s.want


def error(m: Message, code: ErrorCode, text: str, retry_ms: int = 0) -> Error:
    """The answer that refuses `m`."""
    return Error(m.session, m.opening, code, text, retry_ms)
