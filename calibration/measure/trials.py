"""Sends trial loads to the running application: bursts and steady load at given depths, streams for a given SLO."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

from calibration.load import Address, Clients, HttpReply, request_bytes
from calibration.measure.journal import Burst, Journal
from calibration.service.application import Application, CalibrationFailed
from deployments.admission.trial import HEADER, Trial
from deployments.errors import SettingsError

T = TypeVar("T")
Answer = tuple[str | None, HttpReply]  # the only pool that the query was for, if any, and the reply
Ask = Callable[[], Awaitable[list[Answer]]]

_ROOM_FOR_OTHERS = 1000  # depth at which the first query is admitted, whatever else is in flight
_ROOM_IN_STREAM, _ROOM_AT_LEAST = 2.0, 50  # connections opened beforehand, times the arrivals within the SLO
GRANT_ARRIVES_S = 15.0  # for the new user_config to reach the Router
_ANOTHER_S = 10.0  # since the last trial query: a live run sends them more often
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
class TrialLoads:
    """Sends loads at depths, or for an SLO, that are not in force. `replicas`: by pool; depths are per replica."""

    address: Address
    headers: Sequence[tuple[str, str]]  # of every query, besides the trial's
    secret: str
    journal: Journal
    replicas: Mapping[str, int]
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
        """Wait until the grant is in force, and find texts with the requested number of tokens.

        Raises SettingsError if the model does not accept so many, CalibrationFailed if the grant does not arrive.
        """
        if self.tokens > most_tokens:
            raise SettingsError("--tokens", f"should be at most {most_tokens}, the model's maximum, not {self.tokens}")
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
        """Send a query until it is answered: the grant may not be in force yet, or the queues may be full."""
        ends = time.monotonic() + GRANT_ARRIVES_S
        request = self._request(Trial(self.secret, dict.fromkeys(self.replicas, _ROOM_FOR_OTHERS)), words)
        while True:
            await self._connect(1)
            (reply,) = await self._answers(self._clients.burst([request]))
            if reply.status == 200:
                return reply
            if reply.status not in {403, 429} or time.monotonic() > ends:
                raise CalibrationFailed(f"the application did not answer a trial query: {reply.problem}")
            await asyncio.sleep(0.1)

    async def burst(self, stage: str, depths: Mapping[str, int], extra: int = 0, tokens: int | None = None) -> Burst:
        """Send at once as many queries to each pool as fill its depth, and `extra` more to any pool. `tokens`: their
        length, if not the usual one. Returns once all are answered.
        """
        aims = self._aims(depths, extra)

        async def ask() -> list[Answer]:
            words = self._words_of(tokens or self.tokens)
            requests = [self._request(Trial(self.secret, depths, only), words) for only in aims]
            return list(zip(aims, await self._clients.burst(requests), strict=True))

        return await self._once(stage, depths, len(aims), len(aims), ask)

    async def steady(self, stage: str, depths: Mapping[str, int], extra: int, seconds: float, pause_s: float) -> Burst:
        """Keep these depths full for `seconds` with queries that arrive at any time: one client per slot, and `extra`
        more for any pool. Each sends its next query after a random pause of `pause_s` on average.
        """
        aims = self._aims(depths, extra)

        async def ask() -> list[Answer]:
            words = self._words_of(self.tokens)
            trials = [Trial(self.secret, depths, only) for only in aims]
            clients = [partial(self._request, trial, words) for trial in trials]
            replies = await self._clients.steady(clients, seconds, pause_s, self.seed)
            return [(only, reply) for only, of_client in zip(aims, replies, strict=True) for reply in of_client]

        return await self._once(stage, depths, len(aims), len(aims), ask)

    async def stream(self, stage: str, slo_s: float, arrivals: Sequence[tuple[float, int]], only: str | None) -> Burst:
        """Send queries at given times, (seconds after the first, tokens), regardless of earlier ones. They are admitted
        by predicted finish for `slo_s`, on the pool `only` if given.
        """
        rate = len(arrivals) / max(arrivals[-1][0], slo_s)
        connections = min(len(arrivals), math.ceil(_ROOM_IN_STREAM * rate * slo_s) + _ROOM_AT_LEAST)

        async def ask() -> list[Answer]:
            trial = Trial(self.secret, {}, only, slo_s)
            requests = [(at_s, self._request(trial, self._words_of(tokens))) for at_s, tokens in arrivals]
            answers: list[Answer] = []
            for outcome in await self._clients.stream(requests):
                if isinstance(outcome, Exception):
                    raise outcome
                answers.append((only, outcome))
            return answers

        return await self._once(stage, {}, len(arrivals), connections, ask)

    async def _once(self, stage: str, depths: Mapping[str, int], sent: int, connections: int, ask: Ask) -> Burst:
        """The burst of an interrupted run, if it has it; else what `ask` measures, on this many connections."""
        done = self.journal.replayed(stage, depths, sent)
        if done is None:
            await self._connect(connections)
            at = time.time()
            done = self._collect(stage, at, depths, await self._answers(ask()), sent)
            self.journal.add(done)
        return done

    def _aims(self, depths: Mapping[str, int], extra: int) -> list[str | None]:
        """The pool for each query. Otherwise a fast accelerator would answer some queries before the whole burst has
        arrived, take the CPU's share too, and leave the CPU's depth untested.
        """
        places = [pool for pool, depth in depths.items() for _ in range(depth * self.replicas[pool])]
        return [*places, *[None] * extra]

    def close(self) -> None:
        self._clients.hang_up()

    async def _connect(self, connections: int) -> None:
        """Open connections and use each once, so that a burst has nothing left to set up."""
        try:
            await self._clients.open(connections)
        except (OSError, EOFError) as error:
            raise CalibrationFailed(f"the application at {self.address} no longer answers: {error}") from None

    async def _answers(self, asking: Awaitable[list[T]]) -> list[T]:
        try:
            return await asking
        except (OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.timeout_s:.0f} s"
            raise CalibrationFailed(f"a connection to {self.address} broke during a burst: {reason}") from None

    def _request(self, trial: Trial, words: int) -> bytes:
        number = next(self._number)
        text = random.Random(self.seed * 1_000_003 + number).choices(_WORDS, k=words)  # noqa: S311 - texts
        route, field_name = _ROUTES[self.kind]
        payload = {field_name: " ".join(text), "encoding_format": "base64"}  # TEI's routes do not look at the format
        headers = [*self.headers, (HEADER, trial.header())]
        return request_bytes(payload, f"{self.address.prefix}{route}", headers, self.address.netloc)

    def _collect(self, stage: str, at: float, depths: Mapping[str, int], answers: Sequence[Answer], sent: int) -> Burst:
        """Sum up a burst. A query that timed out counts as late on its pool. Raises CalibrationFailed if all failed."""
        latencies: dict[str, list[float]] = {pool: [] for pool in self.replicas}
        busy = failed = 0
        for only, reply in answers:
            pool = reply.pool if reply.status == 200 else only if _timed_out(reply) else None
            if pool in latencies:
                latencies[pool].append(round(reply.seconds, 6))
            elif reply.status == 429:
                busy += 1
            else:
                failed += 1
                self.problem = reply.problem
        if failed and failed + busy == len(answers):
            raise CalibrationFailed(f"the application fails: {self.problem}")
        return Burst(stage, at, dict(depths), sent, busy, failed, latencies)


@asynccontextmanager
async def granted_trials(application: Application, note: Callable[[str], None]) -> AsyncIterator[str]:
    """Grant trials for the duration of the context, and yield their secret. `note` gets a line if the grant cannot be
    withdrawn. Raises CalibrationFailed.
    """

    def end() -> None:
        try:
            application.end_trials()
        except CalibrationFailed as error:
            note(f"could not withdraw the grant for trials; it expires within a day: {error}")

    await _wait_for_another_run(application)
    try:
        yield await finished(application.grant_trials)
    finally:
        await finished(end)


async def finished(change: Callable[[], T]) -> T:
    """What `change` returns, in a thread. Whoever is cancelled meanwhile hears of it when it has ended: then it can be
    put back.
    """
    changing = asyncio.ensure_future(asyncio.to_thread(change))
    try:
        return await asyncio.shield(changing)
    except asyncio.CancelledError:
        await asyncio.gather(changing, return_exceptions=True)
        raise


async def _wait_for_another_run(application: Application) -> None:
    """Wait until no other run sends trial queries: those of a killed run end. Raises CalibrationFailed if they do not
    end, because another run is active.
    """
    ends = time.monotonic() + 1.5 * _ANOTHER_S
    while True:
        ago_s = (await asyncio.to_thread(application.info))["windve"]["trial_seconds_ago"]
        if ago_s is None or ago_s >= _ANOTHER_S:
            return
        if time.monotonic() > ends:
            raise CalibrationFailed("another calibration of this application is running: wait until it ends")
        await asyncio.sleep(0.2)


def _timed_out(reply: HttpReply) -> bool:
    return reply.status == 503 and b"(request_timeout_s)" in reply.body
