"""The frames between a Router and an embedding replica, in the format of `serving.frames`. Pure.

A Router sends `Offers`: queries with the seconds left to their deadlines (never clock times), the offers that it calls
off, and those that it confirms. A replica sends a `Report`: its state, and which offers it refused, admitted, answered
or failed. Each side collects what one turn of its event loop sends into one frame, and cuts large frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from deployments.admission.fair_share import Tenant
from deployments.embedding.scheduler.state import ReplicaState
from deployments.models.outputs import TEXT, Outputs
from deployments.serving.frames import CUT_BYTES, Head, encode_head, frame_of, head_of, known

# A NaN or a negative number would spoil a replica's counts for good.
Work = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # planned device seconds
Count = Annotated[int, msgspec.Meta(ge=0)]


class Offer(Head):
    """Queries of one request, offered to one replica.

    - `number`: identifies the offer on its connection. `Channel.offer` sets it.
    - `left_s`: seconds until the deadline of all its queries.
    - `queries`: token ids of each query, int32 [tokens]. The head holds their lengths.
    - `outputs`: what to compute for each query.
    - `bulk`: the queries are deferrable, and each can run without the others.
    - `partial`: the replica may admit only the first few. It then delays its next run a little, until the Router
      confirms them or calls them off.
    - `again`: another replica of the pool has already counted this work as arriving.
    - `tenant`: the owner of the queries; None if tenants are not distinguished.
    """

    number: int
    left_s: float
    queries: list[Any]
    outputs: Outputs = TEXT
    bulk: bool = False
    partial: bool = False
    again: bool = False
    tenant: Tenant | None = None


class Offers(Head):
    """A Router's frame.

    - `offers`: in the order in which they were made.
    - `called_off`, `confirmed`: numbers of offers. A part is confirmed when the rest of its request is admitted.
    - `refused_s`: planned device seconds of work that the Router refused without asking and that an idle device would
      admit, by tenant.
    - `refused_sizes`: how many such queries with about the usual time to their deadline, by their tokens.
    - `settings`: see `Pool.configure`.
    - `asks`: the replica should report its state at once.
    """

    offers: list[Offer] = msgspec.field(default_factory=list)
    called_off: list[int] = msgspec.field(default_factory=list)
    confirmed: list[int] = msgspec.field(default_factory=list)
    refused_s: dict[Tenant | None, Work] = msgspec.field(default_factory=dict)
    settings: dict[str, Any] | None = None
    asks: bool = False
    refused_sizes: dict[Count, Count] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.offers or self.called_off or self.confirmed or self.settings is not None or self.asks)

    def encode(self) -> list[bytes]:
        """The buffers of one frame."""
        return frame_of(encode_head(self), [query.tobytes() for offer in self.offers for query in offer.queries])

    @classmethod
    def decode(cls, frame: bytes) -> Offers:
        """Decode a frame. Raises ValueError, TypeError or struct.error if it is malformed."""
        head, start = head_of(frame)
        found = _OFFERS.decode(head)
        ids = np.frombuffer(frame, np.int32, offset=start)
        first = 0
        for offer in found.offers:
            lengths, offer.queries = offer.queries, []
            for length in lengths:
                end = first + length
                if length < 1:
                    raise ValueError("it has a query without tokens")
                offer.queries.append(ids[first:end])
                first = end
        if first != len(ids):
            raise ValueError("its lengths do not add up")  # queries would get each other's tokens
        return found


class Answered(msgspec.Struct, gc=False):
    """The answer to query `query` of offer `number`, as a Router takes it from a report.

    - `numbers`: its outputs, float32 (`outputs.join`); an embedding is a unit vector.
    - `norm`: the embedding's norm before it became a unit vector.
    - `queue_s`, `compute_s`: its time in the queue, and in the run until its pass ended.
    - `batch_queries`, `batch_tokens`: the size of its run.
    """

    number: int
    query: int
    numbers: Any
    norm: float
    queue_s: float
    compute_s: float
    batch_queries: int = 1
    batch_tokens: int = 0

    @property
    def stay_s(self) -> float:
        """Its time at the replica in all."""
        return self.queue_s + self.compute_s


class PassAnswers(Head):
    """The answers of one pass, by column: see `Answered`.

    - `numbers`: of all queries, one after another, float32; the head holds how many there are. `sizes`: of each query.
    """

    offers: list[int]
    queries: list[int]
    norms: list[float]
    queue_s: list[float]
    sizes: list[Count]
    numbers: Any
    compute_s: float
    batch_queries: int = 1
    batch_tokens: int = 0

    def __len__(self) -> int:
        return len(self.offers)

    def __iter__(self) -> Iterator[Answered]:
        """Each answer. Its numbers are a view."""
        numbers, compute_s, end = self.numbers, self.compute_s, 0
        batch_queries, batch_tokens = self.batch_queries, self.batch_tokens
        columns = zip(self.offers, self.queries, self.norms, self.queue_s, self.sizes, strict=True)
        for offer, query, norm, queue_s, size in columns:
            first, end = end, end + size
            yield Answered(offer, query, numbers[first:end], norm, queue_s, compute_s, batch_queries, batch_tokens)

    @classmethod
    def of_one(cls, one: Answered) -> PassAnswers:
        """A single answer."""
        of_run = one.compute_s, one.batch_queries, one.batch_tokens
        return cls([one.number], [one.query], [one.norm], [one.queue_s], [len(one.numbers)], one.numbers, *of_run)


class Report(Head):
    """A replica's frame to one Router.

    - `state`: its ReplicaState, once it is sent.
    - `seen`: how many frames of this Router the replica had read.
    - `refused`: (offer, never) for each offer of which it admitted nothing. `never`: even an idle device would be late.
    - `admitted`: (offer, how many of its first queries) for each `partial` offer.
    - `answered`: by pass.
    - `failed`, `broken`, `suspect`: see `Failures`.
    """

    state: Any = None
    seen: int = 0
    refused: list[tuple[int, bool]] = msgspec.field(default_factory=list)
    admitted: list[tuple[int, int]] = msgspec.field(default_factory=list)
    failed: list[tuple[int, str]] = msgspec.field(default_factory=list)
    answered: list[PassAnswers] = msgspec.field(default_factory=list)
    broken: list[int] = msgspec.field(default_factory=list)
    suspect: list[int] = msgspec.field(default_factory=list)

    @property
    def answers(self) -> int:
        """How many queries it answers."""
        return sum(map(len, self.answered))

    def encode(self) -> list[list[bytes]]:
        """The buffers of one frame, or of several if the report is large."""
        if sum(some.numbers.nbytes for some in self.answered) <= CUT_BYTES:
            return [_report_frame(self)]
        parts, size = [list[PassAnswers]()], 0
        for one in chain(*self.answered):
            if size > CUT_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(PassAnswers.of_one(one))
            size += one.numbers.nbytes
        first = msgspec.structs.replace(self, answered=parts[0])
        others = (Report(self.state, self.seen, answered=part) for part in parts[1:])
        return list(map(_report_frame, (first, *others)))

    @classmethod
    def decode(cls, frame: bytes) -> Report:
        """Decode a frame. Raises ValueError, TypeError or struct.error if it is malformed."""
        head, start = head_of(frame)
        report = _REPORT.decode(head)
        report.state = known(ReplicaState, report.state)
        numbers, first = np.frombuffer(frame, np.float32, offset=start), 0
        for some in report.answered:
            end = first + some.numbers
            are_equal = len(some.offers) == len(some.queries) == len(some.norms) == len(some.queue_s) == len(some.sizes)
            if not are_equal or sum(some.sizes) != some.numbers or end > len(numbers):
                raise ValueError("its answers do not add up")  # queries would get each other's numbers
            some.numbers, first = numbers[first:end], end
        return report


def _report_frame(report: Report) -> list[bytes]:
    return frame_of(encode_head(report), [some.numbers.tobytes() for some in report.answered])


_OFFERS, _REPORT = msgspec.msgpack.Decoder(Offers), msgspec.msgpack.Decoder(Report)
