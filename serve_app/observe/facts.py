"""What the access log and traces say of a request. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from deployments.embedding.request import Record
from deployments.errors import WindveError

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Facts(Protocol):
    """What is told of a request of whose kind no `Record` is: `generation.facts`."""

    @property
    def is_late(self) -> bool:
        """It was answered later than promised."""

    def line(self) -> dict[str, Any]:
        """In the access log."""

    def attributes(self) -> Attributes:
        """Of its span."""

    def phases(self, now: float) -> Iterator[Phase]:
        """The spans within it."""


@dataclass(slots=True, eq=False)
class Followed:
    """One request from its arrival to its end. `began_s`: Unix time; `started`: the loop's, s. `key`: the name of the
    API key that it came with.
    """

    request_id: str | None
    trace_id: str | None
    began_s: float
    started: float
    record: Record = field(default_factory=Record)
    key: str | None = None
    span: Any = None  # of `traces.Tracer`, if its trace is sampled
    facts: Facts | None = None  # in place of the record, where text is generated


@dataclass(frozen=True, slots=True)
class Ended:
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
