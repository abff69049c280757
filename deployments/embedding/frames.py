"""The frames between a Router and an embedding replica, in the format of `serving.frames`. Pure.

A Router sends `Offers`: queries with the seconds left to their deadlines (never clock times), the offers that it calls
off, and those that it confirms. A replica sends a `Report`: its state, and which offers it refused, admitted, answered
or failed. Each side collects what one turn of its event loop sends into one frame, and cuts large frames.
"""

from __future__ import annotations

from itertools import pairwise
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


class Answered(Head):
    """The answer to query `query` of offer `number`.

    - `numbers`: its outputs, float32 (`outputs.join`); an embedding is a unit vector. The head holds how many there
      are.
    - `norm`: the embedding's norm before it became a unit vector.
    - `queue_s`, `compute_s`, `stay_s`: its time in the queue, in the run until its pass ended, and at the replica in
      all.
    - `batch_queries`, `batch_tokens`: the size of its run.
    """

    number: int
    query: int
    numbers: Any
    norm: float
    queue_s: float
    compute_s: float
    stay_s: float
    batch_queries: int = 1
    batch_tokens: int = 0


class Report(Head):
    """A replica's frame to one Router.

    - `state`: its ReplicaState, once it is sent.
    - `seen`: how many frames of this Router the replica had read.
    - `refused`: (offer, never) for each offer of which it admitted nothing. `never`: even an idle device would be late.
    - `admitted`: (offer, how many of its first queries) for each `partial` offer.
    - `failed`, `broken`, `suspect`: see `Failures`.
    """

    state: Any = None
    seen: int = 0
    refused: list[tuple[int, bool]] = msgspec.field(default_factory=list)
    admitted: list[tuple[int, int]] = msgspec.field(default_factory=list)
    failed: list[tuple[int, str]] = msgspec.field(default_factory=list)
    answered: list[Answered] = msgspec.field(default_factory=list)
    broken: list[int] = msgspec.field(default_factory=list)
    suspect: list[int] = msgspec.field(default_factory=list)

    def encode(self) -> list[list[bytes]]:
        """The buffers of one frame, or of several if the report is large."""
        cuts, size = [0], 0
        for index, one in enumerate(self.answered):
            if size > CUT_BYTES:
                cuts.append(index)
                size = 0
            size += one.numbers.nbytes
        if len(cuts) == 1:
            return [_report_frame(self)]
        parts = [self.answered[here:end] for here, end in pairwise([*cuts, len(self.answered)])]
        first = msgspec.structs.replace(self, answered=parts[0])
        others = (Report(self.state, self.seen, answered=part) for part in parts[1:])
        return list(map(_report_frame, (first, *others)))

    @classmethod
    def decode(cls, frame: bytes) -> Report:
        """Decode a frame. Raises ValueError, TypeError or struct.error if it is malformed."""
        head, start = head_of(frame)
        report = _REPORT.decode(head)
        report.state = known(ReplicaState, report.state)
        numbers = np.frombuffer(frame, np.float32, sum(one.numbers for one in report.answered), start)
        first = 0
        for one in report.answered:
            end = first + one.numbers
            one.numbers, first = numbers[first:end], end
        return report


def _report_frame(report: Report) -> list[bytes]:
    arrays = [np.ascontiguousarray(one.numbers, np.float32).tobytes() for one in report.answered]
    return frame_of(encode_head(report), arrays)


_OFFERS, _REPORT = msgspec.msgpack.Decoder(Offers), msgspec.msgpack.Decoder(Report)
