"""What the access log and traces record of a request that generates. It contains no text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deployments.generation.metrics import Streamed
from deployments.generation.request import GenerationRecord, OfferRecord, WantedGeneration
from serve_app.observe.facts import Attributes, Phase


class GenerationFacts:
    """The facts of one request to `model`, which has one generation per prompt. `sent`: returns how many answer tokens
    the client has got so far.
    """

    def __init__(self, model: str, wanted: Sequence[WantedGeneration], sent: Callable[[], int]) -> None:
        self.model = model
        self._wanted, self._sent = wanted, sent
        self._records = [one.record for one in wanted]

    @property
    def tenant(self) -> str | None:
        client = self._wanted[0].client
        return None if client is None else client.tenant.name

    def is_late(self, _actual_s: float, _slo_s: float) -> bool:
        """Whether a first token or the time per output token was late, as the metrics count it."""
        return any(streamed.is_late for streamed in self._begun)

    def line(self) -> dict[str, Any]:
        """Times are the worst of all generations."""
        return {
            "prompts": len(self._wanted),
            "tokens": sum(len(one.ids) for one in self._wanted),
            "answer_tokens": self._sent(),
            "bulk": self._wanted[0].bulk,
            "deadline_s": _most(streamed.promise.ttft_s for streamed in self._begun),
            "offers": sum(len(record.offers) for record in self._records),
            "pools": self._pools,
            "first_token_s": _most(streamed.first_s for streamed in self._begun),
            "pace_s": _most(streamed.pace_s for streamed in self._begun),
        }

    def phases(self, now: float) -> Iterator[Phase]:
        """The spans of the request's phases. It ended `now`."""
        for number, (wanted, record) in enumerate(zip(self._wanted, self._records, strict=True)):
            if record.streamed is None:
                return
            sizes: Attributes = {"windve.tokens": len(wanted.ids)}
            begun = record.streamed.arrived_at
            offered = record.offers[0].at if record.offers else now
            if number == 0 and record.offers:
                yield Phase("tokenize", begun, offered, sizes)
            if not record.offers:  # no replica was asked
                yield Phase("admission", begun, now, {**sizes, "windve.admission": "refused"})
            for offer in record.offers:
                told: Attributes = {**_place(offer), **sizes, "windve.admission": offer.outcome}
                failed = offer.outcome if offer.outcome == "lost" else None
                yield Phase("admission", offer.at, now if offer.decided is None else offer.decided, told, failed)
            yield from _streamed(record, record.streamed, now)

    @property
    def _begun(self) -> list[Streamed]:
        return [record.streamed for record in self._records if record.streamed is not None]

    @property
    def _pools(self) -> list[str]:
        return sorted({record.admitted.pool for record in self._records if record.admitted is not None})


def _streamed(record: GenerationRecord, streamed: Streamed, now: float) -> Iterator[Phase]:
    """The spans of the first token and of the later ones; none if the generation was not admitted."""
    admitted = record.admitted
    if admitted is None or admitted.decided is None:
        return
    over = now if streamed.over_at is None else streamed.over_at
    failed = "failed" if streamed.is_broken else None
    first = streamed.first_at
    if first is None:
        yield Phase("first_token", admitted.decided, over, _place(admitted), failed)
        return
    yield Phase("first_token", min(admitted.decided, first), first, _place(admitted))  # both may arrive at once
    told: Attributes = {**_place(admitted), "windve.answer_tokens": streamed.tokens, "windve.gap_s": streamed.gap_s}
    if streamed.pace_s is not None:
        told["windve.pace_s"] = streamed.pace_s
    yield Phase("stream", first, over, told, failed)


def _place(offer: OfferRecord) -> Attributes:
    return {"windve.pool": offer.pool, "windve.replica": offer.replica}


def _most(seconds: Iterator[float | None]) -> float | None:
    return max((round(one, 6) for one in seconds if one is not None), default=None)
