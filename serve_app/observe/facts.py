"""What the access log and traces record of a request. Pure.

`web/` and `rpc.py` create a `TracedRequest` for each request to be logged or traced. The handler that calls a Router
sets its `Facts`: `embedding.facts.EmbeddingFacts` or `generation.facts.GenerationFacts`. A request that fails before
then has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deployments.errors import WindveError

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Facts(Protocol):
    """What a request asked of a Router, and the outcome."""

    @property
    def model(self) -> str | None:
        """The model's name; None if its Router has not accepted the request."""

    @property
    def tenant(self) -> str | None:
        """The name of the API key that the request counts for."""

    def is_late(self, actual_s: float, slo_s: float) -> bool:
        """Whether the answer was later than promised. `actual_s`: how long it took; `slo_s`: the model's SLO."""

    def line(self) -> dict[str, Any]:
        """The request's fields in the access log and, unless they are None, its span's attributes. In seconds."""

    def phases(self, now: float) -> Iterator[Phase]:
        """The spans within the request's span, if it ended `now`."""


@dataclass(slots=True, eq=False)
class TracedRequest:
    """One request from arrival to end. `began_s`: Unix time; `started`: the event loop's time; both in seconds.
    `tenant`: the name of the API key that the client sent.
    """

    request_id: str | None
    trace_id: str | None
    began_s: float
    started: float
    tenant: str | None = None
    span: Any = None  # from `Tracer`, if the trace is sampled
    facts: Facts | None = None  # None until a Router is asked

    @property
    def model(self) -> str | None:
        return None if self.facts is None else self.facts.model


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How a request ended. `route`: a known route, never the client's text. `status`: HTTP's number or gRPC's name."""

    route: str
    status: int | str
    actual_s: float
    error: BaseException | None = None

    @property
    def code(self) -> str | None:
        """The error in one word; None if there was none."""
        if self.error is None:
            return None
        if isinstance(self.error, WindveError):
            return self.error.code
        return "cancelled" if isinstance(self.error, asyncio.CancelledError) else "internal_error"


Attributes = dict[str, str | int | float | list[str]]


class Phase(NamedTuple):
    """A span within a request's span. Times are the event loop's, in seconds. `error`: why it failed, in one word."""

    name: str
    began: float
    ended: float
    attributes: Attributes
    error: str | None = None


def trace_id(span: Span) -> str:
    """The trace id in the form of `traceparent`."""
    return f"{span.get_span_context().trace_id:032x}"
