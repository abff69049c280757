"""Sends ordinary traffic to the running application, as any client does: bursts, steady load and streams."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from calibration.load import Address, Clients, HttpReply, request_bytes
from calibration.report.report_model import Burst
from calibration.service.application import CalibrationFailed
from deployments.errors import SettingsError

_ROOM_IN_STREAM, _ROOM_AT_LEAST = 2.0, 50  # connections opened beforehand, times the arrivals within the SLO
_FREE_S = 15.0  # how long the first queries may be refused
_SHORT = 10  # tokens
_WORDS = (  # noqa: SIM905 - most are one token
    "river stone window garden market paper light winter road music water house "
    "field summer letter table bridge morning story night school forest money power"
).split()
_ROUTES = {  # kind of model -> the route for a single text, and the field for the text
    "embedding": ("/v1/embeddings", "input"),
    "reranker": ("/predict", "inputs"),
    "classifier": ("/predict", "inputs"),
    "sparse": ("/embed_sparse", "inputs"),
    "multi_vector": ("/v1/multi-vector", "input"),
}


@dataclass(slots=True)
class Traffic:
    """Ordinary queries. `pools`: their names. `tokens`: of a query, unless a stream says otherwise."""

    address: Address
    headers: Sequence[tuple[str, str]]  # of every query
    bursts: list[Burst]  # each is added
    pools: Sequence[str]
    tokens: int
    seed: int
    timeout_s: float
    kind: str = "embedding"  # the model's, from `/info`
    problem: str = ""  # of the last query that failed
    _words: dict[int, int] = field(default_factory=dict)  # tokens of a text -> its words
    _clients: Clients = field(init=False)
    _number: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._clients = Clients(self.address, self.timeout_s)

    async def prepare(self, most_tokens: int) -> None:
        """Find texts with the requested number of tokens, and with about the least that a stream has.

        Raises SettingsError if the model does not accept so many, CalibrationFailed if no query is answered.
        """
        if self.tokens > most_tokens:
            raise SettingsError("--tokens", f"should be at most {most_tokens}, the model's maximum, not {self.tokens}")
        await self.nearest(min(_SHORT, most_tokens))
        found = await self.nearest(self.tokens)
        if abs(found - self.tokens) > 0.1 * self.tokens:
            raise SettingsError("--tokens", f"no text has {self.tokens} tokens, the nearest one has {found}: use that")
        self._words[self.tokens] = self._words[found]

    async def nearest(self, tokens: int) -> int:
        """Find texts of about `tokens` tokens. Returns how many they have."""
        words = tokens
        for _ in range(8):  # most words are one token; other vocabularies need a few steps
            found = int((await self._first_answer(words)).headers["x-compute-tokens"])
            self._words[found] = words
            if found == tokens:
                break
            words = max(1, words + tokens - found)
        return found

    def _words_of(self, tokens: int) -> int:
        """How many words give about `tokens` tokens, interpolated from the lengths found so far."""
        (least, fewest), (most, many) = min(self._words.items()), max(self._words.items())
        slope = (many - fewest) / (most - least) if most > least else 1.0
        return self._words.get(tokens) or max(1, round(fewest + slope * (tokens - least)))

    async def _first_answer(self, words: int) -> HttpReply:
        """Send a query until it is answered: the queues may be full, or closed by the lease of a killed run."""
        ends = time.monotonic() + _FREE_S
        while True:
            await self._connect(1)
            (reply,) = await self._answers(self._clients.burst([self._request(words)]))
            if reply.status == 200:
                return reply
            if reply.status not in {429, 503} or time.monotonic() > ends:
                raise CalibrationFailed(f"the application did not answer a query: {reply.problem}")
            await asyncio.sleep(0.1)

    async def burst(self, stage: str, depths: Mapping[str, int], queries: int) -> Burst:
        """Send so many queries at once. Returns once all are answered. `depths`: those in force."""
        await self._connect(queries)
        words = self._words_of(self.tokens)
        requests = [self._request(words) for _ in range(queries)]
        return await self._done(stage, depths, queries, self._clients.burst(requests))

    async def steady(
        self, stage: str, depths: Mapping[str, int], clients: int, seconds: float, pause_s: float
    ) -> Burst:
        """So many clients, for `seconds`. Each sends its next query after a random pause of `pause_s` on average."""
        await self._connect(clients)
        words = self._words_of(self.tokens)
        asking = self._clients.steady(clients, lambda: self._request(words), seconds, pause_s, self.seed)
        return await self._done(stage, depths, clients, asking)

    async def stream(self, stage: str, slo_s: float, arrivals: Sequence[tuple[float, int]]) -> Burst:
        """Send queries at given times, (seconds after the first, tokens), regardless of earlier ones."""
        rate = len(arrivals) / max(arrivals[-1][0], slo_s)
        await self._connect(min(len(arrivals), math.ceil(_ROOM_IN_STREAM * rate * slo_s) + _ROOM_AT_LEAST))
        requests = [(at_s, self._request(self._words_of(tokens))) for at_s, tokens in arrivals]
        return await self._done(stage, {}, len(arrivals), self._clients.stream(requests))

    async def _done(
        self, stage: str, depths: Mapping[str, int], sent: int, asking: Awaitable[Sequence[HttpReply | Exception]]
    ) -> Burst:
        at, replies = time.time(), await self._answers(asking)
        self.bursts.append(done := self._collect(stage, at, depths, replies, sent))
        return done

    def close(self) -> None:
        self._clients.hang_up()

    async def _connect(self, connections: int) -> None:
        """Open connections and use each once, so that a burst has nothing left to set up."""
        try:
            await self._clients.open(connections)
        except (OSError, EOFError) as error:
            raise CalibrationFailed(f"the application at {self.address} no longer answers: {error}") from None

    async def _answers(self, asking: Awaitable[Sequence[HttpReply | Exception]]) -> list[HttpReply]:
        replies = []
        try:
            for outcome in await asking:
                if isinstance(outcome, Exception):
                    raise outcome
                replies.append(outcome)
        except (OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.timeout_s:.0f} s"
            raise CalibrationFailed(f"a connection to {self.address} broke during a burst: {reason}") from None
        return replies

    def _request(self, words: int) -> bytes:
        number = next(self._number)
        text = random.Random(self.seed * 1_000_003 + number).choices(_WORDS, k=words)  # noqa: S311 - texts
        route, field_name = _ROUTES[self.kind]
        payload = {field_name: " ".join(text), "encoding_format": "base64"}  # TEI's routes do not look at the format
        return request_bytes(payload, f"{self.address.prefix}{route}", self.headers, self.address.netloc)

    def _collect(
        self, stage: str, at: float, depths: Mapping[str, int], replies: Sequence[HttpReply], sent: int
    ) -> Burst:
        """Sum up a burst. A query that timed out counts as late. Raises CalibrationFailed if all failed."""
        latencies: dict[str, list[float]] = {pool: [] for pool in self.pools}
        busy = failed = 0
        for reply in replies:
            timed_out = reply.status in {503, 504} and b"no answer within" in reply.body
            pool = reply.pool if reply.status == 200 else self.pools[0] if timed_out else None
            if pool in latencies:
                latencies[pool].append(round(reply.seconds, 6))
            elif reply.status == 429:
                busy += 1
            else:
                failed += 1
                self.problem = reply.problem
        if failed and failed + busy == len(replies):
            raise CalibrationFailed(f"the application fails: {self.problem}")
        return Burst(stage, at, dict(depths), sent, busy, failed, latencies)
