"""What traces say of a request to an embedding model. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from deployments.embedding.channel import Refused
from deployments.embedding.frames import Answered
from deployments.embedding.request import OfferedPart, Record
from deployments.errors import EngineFailed
from serve_app.observe.facts import Attributes, Phase


def phases(record: Record, now: float) -> Iterator[Phase]:
    """What a request went through until it ended, `now`."""
    request = record.request
    if request is None:
        return
    sizes: Attributes = {"windve.queries": len(request.queries)}
    if request.tokenised:
        yield Phase("tokenize", request.started, request.tokenised, {**sizes, "windve.tokens": tokens_of(record)})
    if not record.parts and record.done is None:  # no replica was asked
        yield Phase("admission", request.tokenised or request.started, now, {**sizes, "windve.admission": "refused"})
    for part, predicted_s in record.parts:
        yield from _at_replica(part, predicted_s, now)


def _at_replica(part: OfferedPart, predicted_s: float, now: float) -> Iterator[Phase]:
    pending = part.pending
    outcome, answers = _outcome(part)
    there = pending.settled_at if pending.ended and outcome != "cancelled" else now
    if answers:
        stay_s = max(answer.stay_s for answer in answers)
        there = pending.sent_at + max(0.0, pending.settled_at - pending.sent_at - stay_s) / 2
    place: Attributes = {"windve.pool": part.pool, "windve.replica": part.link.view.replica}
    asked: Attributes = {"windve.queries": pending.size, "windve.predicted_s": predicted_s, "windve.admission": outcome}
    failed = outcome if outcome in {"failed", "lost"} else None
    yield Phase("admission", pending.sent_at, there, place | asked, failed)
    for queue_s, together in groupby(sorted(answers, key=_queue_s), key=_queue_s):  # of one run
        ran = list(together)
        ours: Attributes = {**place, "windve.queries": len(ran)}
        size: Attributes = {"windve.run.queries": ran[0].run_queries, "windve.run.tokens": ran[0].run_tokens}
        began = there + queue_s
        yield Phase("queue", there, began, ours)
        yield Phase("run", began, began + max(answer.compute_s for answer in ran), ours | size)


def _outcome(part: OfferedPart) -> tuple[str, list[Answered]]:
    """What the replica decided, in one word, and its answers."""
    outcome = part.pending.outcome
    if not outcome.done() or outcome.cancelled():
        return "cancelled", []
    if (error := outcome.exception()) is not None:
        return "failed" if isinstance(error, EngineFailed) else "lost", []
    found = outcome.result()
    if isinstance(found, Refused):
        return "never" if found.never else "refused", []
    return "admitted", found


def _queue_s(answer: Answered) -> float:
    return answer.queue_s


def tokens_of(record: Record) -> int:
    return sum(map(len, record.request.ids)) if record.request is not None else 0
