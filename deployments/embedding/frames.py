"""What travels between a Router and a replica: frames of a small JSON head and arrays as they lie in memory. Pure.

    frame    size uint32, head size uint32, head (JSON), arrays; little-endian, as both machines' arrays are

A Router sends `Offers`: queries with the seconds that each has left (never clock times), the offers that it calls off,
and the held offers that it confirms. A replica sends a `Report`: its state, and the offers that it refused, admitted,
answered or failed. Each side collects what one turn of its event loop sends into one frame, and cuts large frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from deployments.admission.fair_share import Tenant
from deployments.embedding.scheduler.state import ReplicaState
from deployments.models.outputs import TEXT, Numbers, Outputs
from deployments.models.tokenizer import TokenIds
from deployments.serving.frames import CUT_BYTES, SIZE, frame_of, head_of, plain_tenant, tenant_of


class Offer(NamedTuple):
    """Queries of one request, offered to one replica.

    - `number`: the offer's, on its connection; `Channel.offer` sets it.
    - `left_s`: seconds until the deadline of all its queries.
    - `queries`: token ids int32 [tokens] of each.
    - `outputs`: what is wanted of each query.
    - `bulk`: the queries are patient, and never held.
    - `partial`: the replica may admit only the first few. It holds those until the Router confirms them; if it admits
      all, it holds none.
    - `again`: another replica of the pool has already counted this work as arriving.
    - `trial`: of a calibration. The replica admits by the count `depth`, or, where that is None, by predicted finish
      with `left_s` as the SLO. `depth` is None for all other offers.
    - `tenant`: whose queries they are; None where nobody is told apart.
    """

    number: int
    left_s: float
    queries: Sequence[TokenIds]
    outputs: Outputs = TEXT
    bulk: bool = False
    partial: bool = False
    again: bool = False
    depth: int | None = None
    trial: bool = False
    tenant: Tenant | None = None


@dataclass(slots=True)
class Offers:
    """One frame of a Router. `offers` are in the order in which they were made; `called_off` and `confirmed` are
    numbers of offers. `refused_s`: planned device seconds of work that the Router refused without asking, by tenant.
    `settings`: see `Pool.configure`. `asks`: the replica should report its state at once.
    """

    offers: list[Offer] = field(default_factory=list)
    called_off: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    refused_s: dict[Tenant | None, float] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    asks: bool = False

    def __bool__(self) -> bool:
        return bool(self.offers or self.called_off or self.confirmed or self.settings or self.asks)

    def encode(self) -> list[bytes]:
        """As the buffers of one frame."""
        heads = [
            [
                o.number,
                round(o.left_s, 6),
                len(o.queries),
                o.outputs,
                o.bulk,
                o.partial,
                o.again,
                o.depth,
                o.trial,
                plain_tenant(o.tenant),
            ]
            for o in self.offers
        ]
        queries = [query for offer in self.offers for query in offer.queries]
        lengths = np.array(list(map(len, queries)), np.int32)
        refused = [(plain_tenant(tenant), work_s) for tenant, work_s in self.refused_s.items()]
        head = [heads, self.called_off, self.confirmed, refused, self.settings, self.asks]
        return frame_of(head, [lengths.tobytes(), *(query.tobytes() for query in queries)])

    @classmethod
    def decode(cls, frame: bytes) -> Offers:
        """Raises ValueError, TypeError or struct.error where it is not what it says."""
        head, start = head_of(frame)
        heads, called_off, confirmed, refused, settings, asks = head
        count = sum(one[2] for one in heads)
        lengths: list[int] = np.frombuffer(frame, np.int32, count, start).tolist()
        ids = np.frombuffer(frame, np.int32, offset=start + SIZE.size * count)
        ends = list(accumulate(lengths))
        if count and (min(lengths) < 1 or ends[-1] != len(ids)):
            raise ValueError("its lengths do not add up")  # one query's tokens would be another's
        queries = map(ids.__getitem__, map(slice, (0, *ends), ends))
        offers = [
            Offer(
                number,
                left_s,
                [*islice(queries, size)],
                tuple(outputs),
                bulk,
                part,
                again,
                depth,
                trial,
                tenant_of(whose),
            )
            for number, left_s, size, outputs, bulk, part, again, depth, trial, whose in heads
        ]
        refused_s = {tenant_of(tenant): work_s for tenant, work_s in refused}
        return cls(offers, called_off, confirmed, refused_s, settings, asks)


class Answered(NamedTuple):
    """Query `query` of offer `number`: the numbers of its outputs (`outputs.join`; an embedding as a unit vector), the
    norm that this had, and where its time went: waiting, in the run until its pass ended, and at the replica in all.
    The run had so many queries and tokens.
    """

    number: int
    query: int
    numbers: Numbers
    norm: float
    queue_s: float
    compute_s: float
    stay_s: float
    run_queries: int = 1
    run_tokens: int = 0


@dataclass(slots=True)
class Report:
    """One frame of a replica to one Router. `seen`: how many frames of this Router the replica has read.

    - `refused`: (offer, never) of each offer of which it admitted nothing. `never`: an idle device would be late, too.
    - `admitted`: (offer, how many of its first queries) of each `partial` offer.
    - `failed`: (offer, the sentence for the client).
    """

    state: ReplicaState | None = None  # until it is sent
    seen: int = 0
    refused: list[tuple[int, bool]] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)

    def encode(self) -> list[list[bytes]]:
        """As the buffers of one frame, or of several where it holds much."""
        frames = []
        answers, size = list[Answered](), 0
        head = [self.refused, self.admitted, self.failed]
        for one in self.answered:
            if size > CUT_BYTES:
                frames.append(self._encode(head, answers))
                head, answers, size = [[], [], []], [], 0
            answers.append(one)
            size += one.numbers.nbytes
        frames.append(self._encode(head, answers))
        return frames

    def _encode(self, head: list[Any], answers: list[Answered]) -> list[bytes]:
        assert self.state is not None
        about = [[a.number, a.query, len(a.numbers), *a[3:]] for a in answers]
        arrays = [np.ascontiguousarray(a.numbers, np.float32).tobytes() for a in answers]
        return frame_of([list(self.state), self.seen, *head, about], arrays)

    @classmethod
    def decode(cls, frame: bytes) -> Report:
        """Raises ValueError, TypeError or struct.error where it is not what it says."""
        head, start = head_of(frame)
        state, seen, refused, admitted, failed, about = head
        numbers = np.frombuffer(frame, np.float32, sum(one[2] for one in about), start)
        answered, first = [], 0
        for number, index, count, *figures in about:
            end = first + count
            answered.append(Answered(number, index, numbers[first:end], *figures))
            first = end
        if state[0] is None:  # JSON has no infinity: the queue is closed
            state[0] = math.inf
        return cls(ReplicaState(*state), seen, refused, admitted, failed, answered)
