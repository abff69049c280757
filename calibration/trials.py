"""Trials on the running application: queries of a given length, sent by the depths that they are to be admitted by."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from calibration.application import CalibrationFailed
from calibration.journal import Burst, Journal
from calibration.load import Address, Connection, Reply, ask_all, connect, ping, request_bytes
from deployments.errors import SettingsError
from deployments.trial import HEADER, Trial

T = TypeVar("T")

_ROOM_FOR_OTHERS = 1000  # the depth by which the first query is admitted, whatever else is in flight
_PASS_ARRIVES_S = 15.0  # the new user_config is on its way to the Router
_WORDS = (
    *("river", "stone", "window", "garden", "market", "paper", "light", "winter", "road", "music", "water", "house"),
    *(
        "field",
        "summer",
        "letter",
        "table",
        "bridge",
        "morning",
        "story",
        "night",
        "school",
        "forest",
        "money",
        "power",
    ),
)

_ROUTES = {  # of a lone text, by the model's kind, and the field that holds it
    "embedding": ("/v1/embeddings", "input"),
    "reranker": ("/predict", "inputs"),
    "classifier": ("/predict", "inputs"),
    "sparse": ("/embed_sparse", "inputs"),
}


@dataclass(slots=True)
class Trials:
    """Bursts and steady streams at depths that are not in force. `replicas[pool]`: depths are for each of them."""

    address: Address
    headers: Sequence[tuple[str, str]]  # of every query, beside the trial's
    secret: str
    journal: Journal
    replicas: Mapping[str, int]
    tokens: int
    seed: int
    timeout_s: float
    kind: str = "embedding"  # of the model, as `/info` says
    _words: int = 0
    _connections: list[Connection] = field(default_factory=list)
    _number: count[int] = field(default_factory=count)

    async def prepare(self, most_tokens: int) -> None:
        """Wait until the pass is in force, and find texts of the wanted number of tokens.

        Raises SettingsError where the model does not take so many, CalibrationFailed where the pass does not arrive.
        """
        if self.tokens > most_tokens:
            raise SettingsError("--tokens", f"the model takes at most {most_tokens}, not {self.tokens}")
        self._words = self.tokens
        for _ in range(8):  # most words are one token; other vocabularies need a few steps
            found = int((await self._first_answer()).headers["x-compute-tokens"])
            if found == self.tokens:
                return
            self._words = max(1, self._words + self.tokens - found)
        if abs(found - self.tokens) > 0.1 * self.tokens:
            raise SettingsError("--tokens", f"no text of {self.tokens} tokens was found, only one of {found}")

    async def _first_answer(self) -> Reply:
        """An answered query: until the pass is in force, and while others take the places, it is sent again."""
        ends = time.monotonic() + _PASS_ARRIVES_S
        depths = dict.fromkeys(self.replicas, _ROOM_FOR_OTHERS)
        while True:
            await self._connect(1)
            (reply,) = await self._answers(ask_all(self._connections[:1], [self._request(depths)], self.timeout_s))
            if reply.status == 200:
                return reply
            if reply.status not in {403, 429} or time.monotonic() > ends:
                raise CalibrationFailed(f"the application did not answer a trial query: {_problem(reply)}")
            await asyncio.sleep(0.1)

    async def burst(self, stage: str, depths: Mapping[str, int], extra: int = 0) -> Burst:
        """As many queries at once for each pool as fill its depth, and `extra` more for any. All answered when it
        returns.
        """
        aims = self._aims(depths, extra)
        done = self.journal.replayed(stage, depths, len(aims))
        if done is None:
            await self._connect(len(aims))
            requests = [self._request(depths, only) for only in aims]
            at = time.time()
            replies = await self._answers(ask_all(self._connections[: len(aims)], requests, self.timeout_s))
            done = self._collect(stage, at, depths, list(zip(aims, replies, strict=True)), len(aims))
            self.journal.add(done)
        return done

    async def steady(self, stage: str, depths: Mapping[str, int], extra: int, seconds: float, pause_s: float) -> Burst:
        """Keep these depths full for `seconds`, with queries that arrive at any moment: a client for each place, and
        `extra` more for any; each asks again after a random pause of `pause_s` on average.
        """
        aims = self._aims(depths, extra)
        done = self.journal.replayed(stage, depths, len(aims))
        if done is None:
            await self._connect(len(aims))
            at, ends = time.time(), time.monotonic() + seconds
            # How long a client pauses is nobody's secret: `random`, with a seed, so that a run can be repeated.
            chance = random.Random(self.seed)  # noqa: S311

            async def ask_again_and_again(connection: Connection, only: str | None) -> list[tuple[str | None, Reply]]:
                replies = []
                await asyncio.sleep(chance.random() * pause_s)
                while time.monotonic() < ends:
                    replies.append((only, await connection.ask(self._request(depths, only), self.timeout_s)))
                    await asyncio.sleep(chance.expovariate(1 / pause_s))
                return replies

            clients = zip(self._connections[: len(aims)], aims, strict=True)
            answers = await self._answers(asyncio.gather(*(ask_again_and_again(*client) for client in clients)))
            done = self._collect(stage, at, depths, [pair for pairs in answers for pair in pairs], len(aims))
            self.journal.add(done)
        return done

    def _aims(self, depths: Mapping[str, int], extra: int) -> list[str | None]:
        """Each place gets a query aimed at its pool: a quick accelerator would otherwise answer some before the burst
        has arrived, take the CPU's share too, and leave the CPU's depth untried.
        """
        places = [pool for pool, depth in depths.items() for _ in range(depth * self.replicas[pool])]
        return [*places, *[None] * extra]

    def close(self) -> None:
        for connection in self._connections:
            connection.hang_up()

    async def _connect(self, connections: int) -> None:
        """So many connections, each just used: nothing is left to set up when the burst comes."""
        try:
            await ping(self._connections, self.address)
            if connections > len(self._connections):
                self._connections += await connect(self.address, connections - len(self._connections))
        except (OSError, EOFError):  # the server has closed some
            self.close()
            try:
                self._connections = await connect(self.address, connections)
            except (OSError, EOFError) as error:
                raise CalibrationFailed(f"the application is gone from {self.address}: {error}") from None

    async def _answers(self, asking: Awaitable[list[T]]) -> list[T]:
        try:
            return await asking
        except (OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.timeout_s:.0f} s"
            raise CalibrationFailed(
                f"a connection to {self.address} broke in the middle of a burst: {reason}"
            ) from None

    def _request(self, depths: Mapping[str, int], only: str | None = None) -> bytes:
        number = next(self._number)
        words = random.Random(self.seed * 1_000_003 + number).choices(_WORDS, k=self._words)  # noqa: S311 - texts
        route, text = _ROUTES[self.kind]
        payload = {text: " ".join(words), "encoding_format": "base64"}  # TEI's routes do not look at the format
        headers = [*self.headers, (HEADER, Trial(self.secret, depths, only).header())]
        return request_bytes(payload, f"{self.address.prefix}{route}", headers, self.address.netloc)

    def _collect(
        self,
        stage: str,
        at: float,
        depths: Mapping[str, int],
        answers: Sequence[tuple[str | None, Reply]],
        sent: int,
    ) -> Burst:
        """A query that the application gave up on counts as late on its pool. Raises CalibrationFailed if all fail."""
        latencies: dict[str, list[float]] = {pool: [] for pool in depths}
        busy = failed = 0
        for only, reply in answers:
            pool = reply.pool if reply.status == 200 else only if _timed_out(reply) else None
            if pool in latencies:
                latencies[pool].append(round(reply.seconds, 6))
            elif reply.status == 429:
                busy += 1
            else:
                failed += 1
        if failed and failed + busy == len(answers):
            problem = next(reply for _, reply in answers if reply.status not in {200, 429})
            raise CalibrationFailed(f"the application fails: {_problem(problem)}")
        return Burst(stage, at, dict(depths), sent, busy, failed, latencies)


def _timed_out(reply: Reply) -> bool:
    return reply.status == 503 and b"(request_timeout_s)" in reply.body


def _problem(reply: Reply) -> str:
    try:
        told = reply.json()["error"]
        told = told if isinstance(told, str) else told["message"]
    except (ValueError, KeyError, TypeError):
        told = reply.body[:200].decode(errors="replace")
    return f"{reply.status} {told}"
