"""A request on its way through the Router, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.admission.fair_share import Tenant
from deployments.admission.quota import Charge, Client, Quota
from deployments.embedding.link import Answers, PendingOffer
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS
from deployments.models.colbert import Role
from deployments.models.outputs import TEXT, Output, Outputs
from deployments.models.text_pairs import Cuts, Pair
from deployments.models.tokenizer import Query, TokenIds
from deployments.settings import Kind

_NEW = 0.05  # weight of the newest request in the usual one


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to a request.

    - `vectors`: the first output that was asked for, one array for each query, in order. For "text": unit vectors
      float32 [dimension] of an embedding model, logits float32 [labels] of a reranker or classifier, rows for
      `outputs.unpack` of a sparse model. For "sparse": rows for `outputs.unpack`. Otherwise float32 [tokens, numbers].
    - `norms`: the norm of each embedding before it became a unit vector; 1.0 for everything else.
    - `pools`: the names of the pools that answered, sorted.
    - `tokens`: the total of all queries, including prompts and special tokens.
    - `characters`: the total of all texts and pairs, without prompts.
    - `tokenization_s`: from arrival to the last token id. `queue_s`, `compute_s`: the slowest query's. `total_s`: from
      arrival to the answer.
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


@dataclass(slots=True, eq=False)
class Request:
    """What a client wants, and how far the Router has got with it.

    - `kinds`: the kinds of model whose answers the caller can use. Any other model raises WrongKind.
    - `cuts`: how inputs that are too long are cut, and limits on tokens below the model's own.
    - `prompt_name`: the prompt to put before each input; empty: none; None: the model's default, if it has one.
    - `bulk`: answer it as a bulk request. The Router sets it if the queries do not fit at once.
    - `timeout_s`: how long the caller will wait. It replaces the SLO in the deadline.
    - `waited_s`: seconds since the request came to this host. Its deadline counts from then.
    - `role`: whether the texts are queries or documents. Only some models treat the two differently.
    - `outputs`: what to compute, all in one run; empty: the default of the model's kind, which the Router sets.
    - `client`: who sent the request; None if clients are not distinguished.
    - `parts`: collects each offer to a replica, for logs and traces; None: they are not kept.

    The Router sets the rest. Times are the loop's, in seconds.

    - `model`: the name of the model that answers; None until the Router has taken the request.
    - `deferrable`: it waits behind early deadlines.
    - `tokenizing_s`: seconds of a core, without the wait for it.
    - `asked`: how many replicas had no room. `last_pool`: the pool of the last one. `is_over_share`: one of them
      reported that the tenant is over its share. The error, if the request is refused, says so.
    - `charge`: against its client's quota, if there is one.
    - `predicted_s`: from its arrival to its answer, as predicted at the last offer.
    - `done`: the answer; None until there is one.
    """

    queries: Sequence[Query]
    kinds: tuple[Kind, ...] = ("embedding",)
    cuts: Cuts = Cuts()  # noqa: RUF009 - it is immutable
    prompt_name: str | None = None
    bulk: bool = False
    timeout_s: float | None = None
    waited_s: float = 0.0
    outputs: Outputs = ()
    role: Role = "document"
    client: Client | None = None
    parts: list[PendingOffer] | None = None
    model: str | None = None
    prompt: str = ""
    started: float = 0.0
    due: float = 0.0
    deferrable: bool = False
    ids: list[TokenIds] = field(default_factory=list)
    tokenized: float = 0.0
    tokenizing_s: float = 0.0
    asked: int = 0
    last_pool: str | None = None
    is_over_share: bool = False
    charge: Charge | None = None
    predicted_s: float | None = None
    done: Embedded | None = None

    @property
    def characters(self) -> int:
        """Of all queries, each with the prompt. A token id counts as a character."""
        return sum(map(len, self.queries)) + len(self.prompt) * len(self.queries)

    @property
    def tenant(self) -> Tenant | None:
        return None if self.client is None else self.client.tenant

    @property
    def quota(self) -> Quota | None:
        return None if self.client is None else self.client.quota

    @property
    def allowed_s(self) -> float:
        """From its arrival to its deadline."""
        return self.due - self.started

    @property
    def tokens(self) -> int:
        """All queries' tokens."""
        return sum(map(len, self.ids))

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """How many tokens each of these queries has."""
        return [len(self.ids[index]) for index in indices]


@dataclass(slots=True)
class UsualRequest:
    """The mean of the latest requests. `tokens`: of one query."""

    queries: float = 1.0
    tokens: float = float(QUERY_TOKENS)

    def learn(self, queries: int, tokens: int) -> None:
        """Take a request of so many queries with so many tokens in all."""
        self.queries += _NEW * (queries - self.queries)
        self.tokens += _NEW * (tokens / queries - self.tokens)


RowsOf = Callable[[npt.NDArray[np.float32], TokenIds], Mapping[Output, npt.NDArray[np.float32]]]
"""Splits the numbers of a query's answer into its outputs, given its token ids (`Encoder.rows`)."""


def embedded(request: Request, answers: Answers, rows_of: RowsOf) -> Embedded:
    """The answer to a whole request."""
    in_order = [answers[index][1] for index in range(len(request.queries))]
    outputs = request.outputs
    if outputs == TEXT:
        found: dict[Output, Sequence[npt.NDArray[np.float32]]] = {"text": [answer.numbers for answer in in_order]}
    else:
        each = [rows_of(answer.numbers, ids) for answer, ids in zip(in_order, request.ids, strict=True)]
        found = {output: [one[output] for one in each] for output in outputs}
    vectors = found.pop(outputs[0])
    tokenization_s = request.tokenized - request.started
    parts_s = tokenization_s + max([answer.queue_s + answer.compute_s for answer in in_order])
    elapsed_s = asyncio.get_running_loop().time() - request.started  # uvloop counts whole ms: it may be too small
    return Embedded(
        vectors=vectors,
        norms=[answer.norm for answer in in_order],
        pools=tuple(sorted({pool for pool, _ in answers.values()})),
        tokens=sum(map(len, request.ids)),
        characters=sum([len(query) for query in request.queries if isinstance(query, (str, Pair))]),
        tokenization_s=tokenization_s,
        queue_s=max([answer.queue_s for answer in in_order]),
        compute_s=max([answer.compute_s for answer in in_order]),
        total_s=max(elapsed_s, parts_s),
        others=found,
    )
