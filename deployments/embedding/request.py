"""A request on its way through the Router, and its answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Charge, Client, Quota
from deployments.admission.trial import Trial
from deployments.embedding.channel import PendingOffer
from deployments.embedding.frames import Answered
from deployments.embedding.link import Link
from deployments.models.colbert import Role
from deployments.models.outputs import TEXT, Output, Outputs
from deployments.models.text_pairs import NO_BOUNDS, Pair, Side, TokenBounds
from deployments.models.tokenizer import Query, TokenIds
from deployments.settings import Kind


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to a request.

    - `vectors`, one for each query, in order, of the first output that was asked for. Of "text" for an embedding model
      unit vectors float32 [dimension], for rerankers and classifiers logits float32 [labels], for sparse models rows
      for `sparse.unpack`. Of "sparse" rows for `sparse.unpack` too. Of the others float32 [tokens, numbers].
    - `norms`: of each vector before it was made a unit vector; 1.0 for all that are not unit vectors.
    - `pools`: the names of the pools that answered, sorted.
    - `tokens`: of all queries together, prompts and special tokens included.
    - `characters`: of all texts and pairs together, without prompts.
    - `tokenization_s`: from arrival to the last token id. `queue_s`, `compute_s`: the slowest query's. `total_s`: all.
    """

    vectors: Sequence[npt.NDArray[np.float32]]
    norms: Sequence[float]
    pools: tuple[str, ...]
    tokens: int
    characters: int
    tokenization_s: float
    queue_s: float
    compute_s: float
    total_s: float
    others: Mapping[Output, Sequence[npt.NDArray[np.float32]]] = field(default_factory=dict)  # outputs after the first


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a request.

    - `kinds`: the kinds of model whose answers the caller can use; a model of no such kind raises WrongKind.
    - `truncate`: cut inputs that are too long, or refuse them; None: as `limits.auto_truncate` says.
    - `truncation_direction`: the side on which they are cut.
    - `bounds`: on tokens, where they are to be fewer than the model takes.
    - `prompt_name`: the prompt to put before each input; empty: none; None: the model's default, if it has one.
    - `bulk`: answer it as a bulk request.
    - `trial`: admit it by a calibration's rule. It is then never bulk.
    - `timeout_s`: seconds that the caller will wait. They replace the SLO as the deadline.
    - `waited_s`: seconds since the request came to this host. Its deadline counts from then.
    - `role`: read the texts as queries or as documents; it counts for models that read the two in different ways.
    - `outputs`: what to answer, all from one run; empty: what such kinds of model answer.
    - `record`: where the Router keeps what becomes of the request, for logs and traces; None: nobody asks.
    - `client`: who asks; None where clients are not told apart.
    """

    kinds: tuple[Kind, ...] = ("embedding",)
    truncate: bool | None = None
    truncation_direction: Side = "right"
    bounds: TokenBounds = NO_BOUNDS
    prompt_name: str | None = None
    bulk: bool = False
    trial: Trial | None = None
    timeout_s: float | None = None
    waited_s: float = 0.0
    outputs: Outputs = ()
    role: Role = "document"
    record: Record | None = None
    client: Client | None = None

    @property
    def charged(self) -> Client | None:
        """Whose share and quota it counts against: a calibration's queries count against nobody's."""
        return None if self.trial is not None else self.client


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. Times are the loop's, in seconds. `deferrable`: it waits behind early deadlines.

    What replicas said is kept for the error, if it comes to that: `retry_s` is the earliest that one of them has room,
    `room` is how many such requests it has room for then at once, `asked` counts them, `never` those of them on which
    it would not end in time even if they were idle, and `last_pool` is the pool of the last one. `is_over_share`: one
    said that the tenant asks for more than its share.
    """

    queries: Sequence[Query]
    wanted: Wanted
    prompt: str
    started: float
    due: float
    deferrable: bool
    bulk: bool
    outputs: Outputs = TEXT
    ids: list[TokenIds] = field(default_factory=list)
    tokenised: float = 0.0
    retry_s: float = math.inf
    room: float = 0.0
    asked: int = 0
    never: int = 0
    last_pool: str | None = None
    is_over_share: bool = False
    charge: Charge | None = None  # what it has cost its client's quota, if there is one
    characters: int = field(init=False)  # of all queries, with the prompt before each; token ids count as characters

    def __post_init__(self) -> None:
        self.characters = sum(map(len, self.queries)) + len(self.prompt) * len(self.queries)

    @property
    def tenant(self) -> Tenant | None:
        return None if self.wanted.charged is None else self.wanted.charged.tenant

    @property
    def quota(self) -> Quota | None:
        return None if self.wanted.charged is None else self.wanted.charged.quota

    @property
    def allowed_s(self) -> float:
        """From its arrival to its deadline."""
        return self.due - self.started

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of these queries."""
        return [len(self.ids[index]) for index in indices]


@dataclass(slots=True, eq=False)
class OfferedPart:
    """Some queries of a request, offered to one replica."""

    link: Link
    pool: str
    pending: PendingOffer
    indices: list[int]


@dataclass(slots=True, eq=False)
class Record:
    """What became of a request; the Router fills it in.

    - `model`: its name. None, as all that follows, if the request did not come so far.
    - `parts`: each offer to a replica, in their order, and in how many seconds of it the Router predicted the answer.
    - `done`: the answer, if there is one.
    """

    model: str | None = None
    request: Request | None = None
    parts: list[tuple[OfferedPart, float]] = field(default_factory=list)
    done: Embedded | None = None

    @property
    def predicted_s(self) -> float | None:
        """From the request's arrival to its answer, as predicted with its last offer; None: nothing was offered."""
        if self.request is None or not self.parts:
            return None
        part, finish_s = self.parts[-1]
        return part.pending.sent_at - self.request.started + finish_s


Answers = dict[int, tuple[str, Answered]]
"""By the query's index: the pool that answered, and its answer."""


RowsOf = Callable[[npt.NDArray[np.float32], TokenIds], Mapping[Output, npt.NDArray[np.float32]]]
"""What the numbers of a query's answer say of each output, given its token ids (`Encoder.rows`)."""


def embedded(request: Request, answers: Answers, rows_of: RowsOf) -> Embedded:
    """The answer to a whole request."""
    in_order = [answers[index] for index in range(len(request.queries))]
    outputs = request.outputs
    if outputs == TEXT:
        found: dict[Output, Sequence[npt.NDArray[np.float32]]] = {"text": [answer.numbers for _, answer in in_order]}
    else:
        each = [rows_of(answer.numbers, ids) for (_, answer), ids in zip(in_order, request.ids, strict=True)]
        found = {output: [one[output] for one in each] for output in outputs}
    vectors = found.pop(outputs[0])
    tokenization_s = request.tokenised - request.started
    parts_s = tokenization_s + max(answer.queue_s + answer.compute_s for _, answer in in_order)
    elapsed_s = asyncio.get_running_loop().time() - request.started  # uvloop counts whole milliseconds: it may be less
    return Embedded(
        vectors=vectors,
        norms=[answer.norm for _, answer in in_order],
        pools=tuple(sorted({pool for pool, _ in in_order})),
        tokens=sum(map(len, request.ids)),
        characters=sum(len(query) for query in request.queries if isinstance(query, str | Pair)),
        tokenization_s=tokenization_s,
        queue_s=max(answer.queue_s for _, answer in in_order),
        compute_s=max(answer.compute_s for _, answer in in_order),
        total_s=max(elapsed_s, parts_s),
        others=found,
    )
