"""A stream of queries that does not wait for answers, each on a connection of its own."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import Counter

from calibration.load import ClientConnection, request_bytes
from tests.kit.service import TEXT

BELOW_THE_BUFFER, ABOVE_IT = 32_000, 200_000  # bytes of a text; the buffer has 65,536
WITHOUT_ANSWER = "no answer"


class Stream:
    """`outcomes`: how many there were of each (size, status). `answers`: (when, status) of each. `strange`: those that
    are not in the route's own shape, or do not say when to come back. `refusals`: by their codes.
    """

    def __init__(self):
        self.outcomes, self.refusals, self.answers, self.strange = Counter(), Counter(), [], []

    async def run(self, enough, address, queries_s, large_share, headers):
        chance, due = random.Random(7), time.monotonic()
        async with asyncio.TaskGroup() as sent:
            while not enough.is_set():
                due += chance.expovariate(queries_s)
                await asyncio.sleep(due - time.monotonic())
                large = chance.random() < large_share
                size = ABOVE_IT if large else BELOW_THE_BUFFER if chance.random() < 0.1 else len(TEXT)
                request = request_bytes({"input": (TEXT * (size // len(TEXT) + 1))[:size]}, headers=headers)
                sent.create_task(self._ask(address, "large" if large else "small", request))

    async def _ask(self, address, size, request):
        status = WITHOUT_ANSWER
        for _ in range(2):  # HAProxy may close a connection as the query is sent: clients try a new one, once
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                status = await self._once(address, request)
                break
        self.outcomes[size, status] += 1
        self.answers.append((time.monotonic(), status))

    async def _once(self, address, request):
        connection = await ClientConnection.open(address)
        try:
            reply = await connection.ask(request)
        finally:
            connection.hang_up()
        told = reply.json()
        if reply.status != 200:
            self.refusals[told["error"].get("code")] += 1
        if not (len(told["data"]) == 1 if reply.status == 200 else "retry-after-ms" in reply.headers):
            self.strange.append(f"{reply.status} {reply.body[:200]!r}")
        return reply.status

    def of(self, size):
        """The statuses of "small" or "large" queries."""
        return {status for which, status in self.outcomes if which == size}

    def pause_s(self):
        """The longest time between two 200, in seconds."""
        times = [when for when, status in self.answers if status == 200]
        return max(later - before for before, later in itertools.pairwise(times))

    def __str__(self):
        return str({" ".join(map(str, key)): count for key, count in self.outcomes.items()})


@contextlib.contextmanager
def streaming(address, queries_s, *, large_share=0.0, headers=()):
    """Queries beside what is done meanwhile; all are answered once it is left."""
    stream, enough = Stream(), threading.Event()
    running = stream.run(enough, address, queries_s, large_share, headers)
    thread = threading.Thread(target=asyncio.run, args=[running])
    thread.start()
    try:
        yield stream
    finally:
        enough.set()
        thread.join()
