"""An open-loop client: it sends each query at its scheduled time, regardless of earlier ones.

Latency counts from the *scheduled* time. So a client that falls behind makes answers late, and cannot hide late
answers. `lag_s` records how far it fell behind.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from benchmarks.overload.schedule import Query
from calibration.devices.shapes import text_of
from calibration.load import Address, Clients, HttpReply, request_bytes

REFUSALS = frozenset({408, 429, 503, 504})  # the server will not answer, now or in time
_FOLLOWED = 10  # every tenth refusal with a hint is followed
_MOST_TRIES = 8
_SHORTEST_PAUSE_S = 0.05  # between the tries of one client


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint: its address, model and API key."""

    address: Address
    path: str
    model: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, url: str, model: str | None = None, key: str | None = None) -> "Endpoint":
        """From the URL of a server (http://HOST:8000), OpenAI's base URL (.../v1), or the route (.../embeddings).
        Raises SettingsError.
        """
        address = Address.parse(url)
        path = address.prefix
        if not path.endswith("/embeddings"):
            path += "/embeddings" if path.endswith("/v1") else "/v1/embeddings"
        return cls(address, path, model, key)

    def request(self, tokens: int, number: int) -> bytes:
        """A request with one text of `tokens` tokens, unique to `number`."""
        payload = {"input": text_of(tokens, number)} | ({"model": self.model} if self.model else {})
        headers = [("authorization", f"Bearer {self.key}")] if self.key else []
        return request_bytes(payload, self.path, headers, self.address.netloc)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a query. `status` is None if there was no answer, because the connection broke or the client
    `gave_up`. Times count from the scheduled time; the client sent it `lag_s` later.
    """

    query: Query
    lag_s: float
    seconds: float
    status: int | None
    hint_s: float | None = None
    gave_up: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def refused(self) -> bool:
        return self.status in REFUSALS


@dataclass(frozen=True, slots=True)
class Comeback:
    """A refused client that retried after `hint_s` (half of it if `early`), and again after each further hint.
    `admitted_s`: from the first refusal until it was answered; None if not within `tries`.
    """

    hint_s: float
    early: bool
    tries: int
    admitted_s: float | None


def hint_of(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds until the client should retry, from `retry-after-ms`, or from `retry-after` in seconds or as a date. None
    if the answer has neither, or an invalid value.
    """
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        if (told := headers.get("retry-after")) is None:
            return None
        if told.replace(".", "", 1).isdigit():
            return float(told)
        return max(0.0, (parsedate_to_datetime(told) - (now or datetime.now(UTC))).total_seconds())
    except (ValueError, TypeError):
        return None


class OpenLoop:
    """One load on one endpoint. `outcomes` and `comebacks` are complete once `run` has returned.

    Every tenth refused client that got a hint retries; these requests are not among the `outcomes`. Every second of
    them retries early, at half its hint. If it is admitted then, the hint was too long.
    """

    def __init__(self, clients: Clients, endpoint: Endpoint) -> None:
        self._clients, self._endpoint = clients, endpoint
        self.outcomes: list[Outcome] = []
        self.comebacks: list[Comeback] = []
        self._hinted = 0
        self._following: list[asyncio.Task[None]] = []

    async def run(self, schedule: Sequence[Query]) -> None:
        """Returns once all queries and all retries have ended."""
        requests = [self._endpoint.request(query.tokens, number) for number, query in enumerate(schedule)]
        began, asking = time.perf_counter(), []
        for query, request in zip(schedule, requests, strict=True):
            if (wait_s := began + query.at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            asking.append(asyncio.create_task(self._ask(query, request, began + query.at_s)))
        self.outcomes = list(await asyncio.gather(*asking))
        await asyncio.gather(*self._following)

    async def _ask(self, query: Query, request: bytes, planned: float) -> Outcome:
        lag_s = time.perf_counter() - planned
        try:
            reply = await self._clients.ask(request)
        except (OSError, EOFError) as error:
            gave_up = isinstance(error, TimeoutError)
            return Outcome(query, lag_s, time.perf_counter() - planned, None, gave_up=gave_up)
        hint_s = hint_of(reply.headers)
        outcome = Outcome(query, lag_s, reply.ended_s - planned, reply.status, hint_s)
        if outcome.refused and hint_s is not None:
            self._hinted += 1
            if self._hinted % _FOLLOWED == 1:
                early = self._hinted % (2 * _FOLLOWED) != 1
                self._following.append(asyncio.create_task(self._come_back(request, hint_s, early=early)))
        return outcome

    async def _come_back(self, request: bytes, hint_s: float, *, early: bool) -> None:
        refused_at, wait_s, tries = time.perf_counter(), hint_s / 2 if early else hint_s, 0
        admitted_s = None
        while admitted_s is None and tries < (1 if early else _MOST_TRIES):
            await asyncio.sleep(max(wait_s, _SHORTEST_PAUSE_S))
            asked_s, tries = time.perf_counter() - refused_at, tries + 1
            try:
                reply = await self._clients.ask(request)
            except (OSError, EOFError):
                break
            admitted_s = asked_s if reply.status == 200 else None
            wait_s = hint_of(reply.headers) or hint_s
        self.comebacks.append(Comeback(hint_s, early, tries, admitted_s))


class ClosedLoop:
    """Clients that send the next query as soon as they have an answer, to find a server's maximum rate."""

    def __init__(self, clients: Clients, requests: Sequence[bytes]) -> None:
        self._clients, self._requests, self._next = clients, requests, 0
        self.answered = self.refused = 0

    async def run(self, connections: int, seconds: float) -> float:
        """Answers per second. Raises RuntimeError if a reply is neither an answer nor a refusal."""
        self.answered = self.refused = 0
        began = time.perf_counter()
        await asyncio.gather(*(self._again_and_again(began + seconds) for _ in range(connections)))
        return self.answered / (time.perf_counter() - began)

    async def _again_and_again(self, ends: float) -> None:
        while time.perf_counter() < ends:
            self._next += 1
            reply = await answer_to(self._clients, self._requests[self._next % len(self._requests)])
            if reply.status == 200:
                self.answered += 1
            else:
                self.refused += 1
                await asyncio.sleep(max(_SHORTEST_PAUSE_S, hint_of(reply.headers) or 0.0))


async def answer_to(clients: Clients, request: bytes) -> HttpReply:
    """An answer or a refusal. Raises RuntimeError if there is neither."""
    try:
        reply = await clients.ask(request)
    except (OSError, EOFError) as error:
        raise RuntimeError(f"{clients.address} does not answer: {error!r}") from error
    if reply.status != 200 and reply.status not in REFUSALS:
        raise RuntimeError(f"{clients.address} answers {reply.problem}")
    return reply
