"""What the access log and traces record of a request to an embedding model. It contains no text. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from deployments.embedding.frames import Answered
from deployments.embedding.link import PendingOffer, Refused
from deployments.embedding.request import Request
from deployments.errors import EngineFailed
from serve_app.observe.facts import Attributes, Phase


class EmbeddingFacts:
    """The facts of one request, read from what the Router writes into it while it answers."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def model(self) -> str | None:
        return self._request.model

    @property
    def tenant(self) -> str | None:
        """The name of the API key that the request counts for."""
        return None if self.model is None or self._request.tenant is None else self._request.tenant.name

    def is_late(self, actual_s: float, slo_s: float) -> bool:
        return actual_s > (slo_s if self.model is None else self._request.allowed_s)

    def line(self) -> dict[str, Any]:
        request, told = self._request, dict[str, Any]()
        if self.model is not None:
            told = {
                "queries": len(request.queries),
                "tokens": request.tokens if request.ids else None,
                "bulk": request.bulk,
                "deadline_s": round(request.allowed_s, 6),
                "offers": len(request.parts or ()),
                "predicted_s": _rounded(request.predicted_s),
            }
        if (done := request.done) is not None:
            told |= {
                "pools": done.pools,
                "tokenization_s": _rounded(done.tokenization_s),
                "queue_s": _rounded(done.queue_s),
                "compute_s": _rounded(done.compute_s),
            }
        return told

    def phases(self, now: float) -> Iterator[Phase]:
        """The spans of the request's phases. It ended `now`."""
        request = self._request
        if self.model is None:
            return
        sizes: Attributes = {"windve.queries": len(request.queries)}
        if request.tokenized:
            yield Phase("tokenize", request.started, request.tokenized, {**sizes, "windve.tokens": request.tokens})
        if not request.parts and request.done is None:  # no replica was asked
            began = request.tokenized or request.started
            yield Phase("admission", began, now, {**sizes, "windve.admission": "refused"})
        for part in request.parts or ():
            yield from _at_replica(part, now)


def _at_replica(part: PendingOffer, now: float) -> Iterator[Phase]:
    outcome, answers = _outcome(part)
    there = part.settled_at if part.ended and outcome != "cancelled" else now
    if answers:
        stay_s = max(answer.stay_s for answer in answers)
        there = part.sent_at + max(0.0, part.settled_at - part.sent_at - stay_s) / 2
    place: Attributes = {"windve.pool": part.link.pool.name, "windve.replica": part.link.view.replica}
    asked: Attributes = {"windve.queries": part.size, "windve.predicted_s": part.predicted_s}
    failed = outcome if outcome in {"failed", "lost"} else None
    yield Phase("admission", part.sent_at, there, place | asked | {"windve.admission": outcome}, failed)
    for queue_s, together in groupby(sorted(answers, key=_queue_s), key=_queue_s):  # of one batch
        ran = list(together)
        ours: Attributes = {**place, "windve.queries": len(ran)}
        size: Attributes = {"windve.batch.queries": ran[0].batch_queries, "windve.batch.tokens": ran[0].batch_tokens}
        began = there + queue_s
        yield Phase("queue", there, began, ours)
        yield Phase("run", began, began + max(answer.compute_s for answer in ran), ours | size)


def _outcome(part: PendingOffer) -> tuple[str, list[Answered]]:
    """The replica's decision in one word, and its answers."""
    outcome = part.outcome
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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
