"""What the access log and traces say of a request. Pure.

`web/` and `rpc/` make a `TracedRequest` for each request that somebody wants to know of. The handler that asks a Router
puts `Facts` of its kind there: `embedding.facts.EmbeddingFacts` or `generation.facts.GenerationFacts`. A request that
fails before has none.
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
    """What a request asked of a Router, and what became of it."""

    @property
    def model(self) -> str | None:
        """The model's name; None: its Router has not taken the request."""

    @property
    def tenant(self) -> str | None:
        """The name of the API key that the request counts for."""

    def is_late(self, actual_s: float, slo_s: float) -> bool:
        """It was answered later than promised. `actual_s`: how long it took; `slo_s`: of its model."""

    def line(self) -> dict[str, Any]:
        """Its fields of the access log."""

    def attributes(self) -> dict[str, Any]:
        """Its attributes of the request's span; those that are None are left out."""

    def phases(self, now: float) -> Iterator[Phase]:
        """The spans within it."""


@dataclass(slots=True, eq=False)
class TracedRequest:
    """One request from its arrival to its end. `began_s`: Unix time; `started`: the loop's, s. `tenant`: the name of
    the API key that it came with.
    """

    request_id: str | None
    trace_id: str | None
    began_s: float
    started: float
    tenant: str | None = None
    span: Any = None  # of `Tracer`, if its trace is sampled
    facts: Facts | None = None  # None until a Router is asked

    @property
    def model(self) -> str | None:
        return None if self.facts is None else self.facts.model


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How it ended. `route`: one of ours, never what the client wrote. `status`: HTTP's number or gRPC's name."""

    route: str
    status: int | str
    actual_s: float
    error: BaseException | None = None

    @property
    def code(self) -> str | None:
        """Of the error, in one word."""
        if self.error is None:
            return None
        if isinstance(self.error, WindveError):
            return self.error.code
        return "cancelled" if isinstance(self.error, asyncio.CancelledError) else "internal_error"


Attributes = dict[str, str | int | float | list[str]]


class Phase(NamedTuple):
    """A span within a request's. Times are the loop's, s. `error`: what it failed of, in one word."""

    name: str
    began: float
    ended: float
    attributes: Attributes
    error: str | None = None


def trace_id(span: Span) -> str:
    """As `traceparent` has it."""
    return f"{span.get_span_context().trace_id:032x}"
