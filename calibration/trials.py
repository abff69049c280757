"""Trials on the running application: queries of a given length, sent by the depths that they are to be admitted by."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from calibration.application import CalibrationFailed
from calibration.journal import Burst, Journal
from calibration.load import Address, Connection, Reply, ask_all, connect, ping, request_bytes
from deployments.errors import SettingsError
from deployments.trial import HEADER, Trial

T = TypeVar("T")

_TIMEOUT_S = 120.0
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


@dataclass(slots=True)
class Trials:
    """Bursts and steady streams at depths that are not in force. `replicas[pool]`: depths are for each of them."""

    address: Address
    secret: str
    journal: Journal
    replicas: Mapping[str, int]
    tokens: int
    seed: int
    on_burst: Callable[[Burst], None] = lambda _: None
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
        self._connections = await connect(self.address, 1)
        ends = time.monotonic() + _PASS_ARRIVES_S
        everywhere = dict.fromkeys(self.replicas, 1)
        while (reply := await self._ask(0, everywhere)).status != 200:
            if reply.status != 403 or time.monotonic() > ends:
                raise CalibrationFailed(f"the application did not answer a trial query: {_problem(reply)}")
            await asyncio.sleep(0.1)
        for _ in range(8):  # most words are one token; other vocabularies need a few steps
            found = (await self._ask(0, everywhere)).json()["usage"]["prompt_tokens"]
            if found == self.tokens:
                return
            self._words = max(1, self._words + self.tokens - found)
        if abs(found - self.tokens) > 0.1 * self.tokens:
            raise SettingsError("--tokens", f"no text of {self.tokens} tokens was found, only one of {found}")

    async def burst(self, stage: str, depths: Mapping[str, int], extra: int = 0) -> Burst:
        """As many queries at once as fill these depths, and `extra` more. Answered before it returns."""
        sent = sum(depth * self.replicas[pool] for pool, depth in depths.items()) + extra
        done = self.journal.replayed(stage, depths, sent)
        if done is None:
            await self._connect(sent)
            requests = [self._request(depths) for _ in range(sent)]
            at = time.time()
            replies = await self._answers(ask_all(self._connections[:sent], requests, _TIMEOUT_S))
            done = self._collect(stage, at, depths, replies)
            self.journal.add(done)
        self.on_burst(done)
        return done

    async def steady(self, stage: str, depths: Mapping[str, int], extra: int, seconds: float, pause_s: float) -> Burst:
        """Keep these depths full for `seconds`, with queries that arrive at any moment: each client asks again after a
        random pause of `pause_s` on average. `extra` clients more than there are places.
        """
        clients = sum(depth * self.replicas[pool] for pool, depth in depths.items()) + extra
        done = self.journal.replayed(stage, depths, clients)
        if done is None:
            await self._connect(clients)
            at, ends = time.time(), time.monotonic() + seconds
            # How long a client pauses is nobody's secret: `random`, with a seed, so that a run can be repeated.
            chance = random.Random(self.seed)  # noqa: S311

            async def ask_again_and_again(connection: Connection) -> list[Reply]:
                replies = []
                await asyncio.sleep(chance.random() * pause_s)
                while time.monotonic() < ends:
                    replies.append(await connection.ask(self._request(depths), _TIMEOUT_S))
                    await asyncio.sleep(chance.expovariate(1 / pause_s))
                return replies

            answers = await self._answers(
                asyncio.gather(*(ask_again_and_again(connection) for connection in self._connections[:clients]))
            )
            done = self._collect(stage, at, depths, [reply for replies in answers for reply in replies], clients)
            self.journal.add(done)
        self.on_burst(done)
        return done

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
            reason = str(error) or f"no answer within {_TIMEOUT_S:.0f} s"
            raise CalibrationFailed(
                f"a connection to {self.address} broke in the middle of a burst: {reason}"
            ) from None

    def _request(self, depths: Mapping[str, int]) -> bytes:
        number = next(self._number)
        words = random.Random(self.seed * 1_000_003 + number).choices(_WORDS, k=self._words)  # noqa: S311 - texts
        payload = {"input": " ".join(words), "encoding_format": "base64"}
        path = f"{self.address.prefix}/v1/embeddings"
        return request_bytes(payload, path, [(HEADER, Trial(self.secret, depths).header())])

    async def _ask(self, connection: int, depths: Mapping[str, int]) -> Reply:
        return await self._connections[connection].ask(self._request(depths), _TIMEOUT_S)

    def _collect(
        self, stage: str, at: float, depths: Mapping[str, int], replies: Sequence[Reply], sent: int | None = None
    ) -> Burst:
        latencies: dict[str, list[float]] = {pool: [] for pool in depths}
        for reply in replies:
            if reply.status == 200 and reply.pool in latencies:
                latencies[reply.pool].append(round(reply.seconds, 6))
        answered = sum(map(len, latencies.values()))
        busy = sum(reply.status == 429 for reply in replies)
        failed = len(replies) - answered - busy
        if failed and not answered:
            problem = next(reply for reply in replies if reply.status not in {200, 429})
            raise CalibrationFailed(f"the application fails: {_problem(problem)}")
        return Burst(stage, at, dict(depths), len(replies) if sent is None else sent, busy, failed, latencies)


def _problem(reply: Reply) -> str:
    try:
        told = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = reply.body[:200].decode(errors="replace")
    return f"{reply.status} {told}"
