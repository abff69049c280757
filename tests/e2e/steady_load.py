"""A stream of queries that does not wait for answers, over kept connections, as HTTP clients keep them."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager

from calibration.load import Connection, request_bytes

TEXT = "a query of about seventy five tokens, as the paper has them, " * 5
BELOW_THE_BUFFER, ABOVE_IT = 32_000, 200_000  # bytes of a text; the buffer has 65,536
WITHOUT_ANSWER, CLOSED_UNDER_IT = "no answer", "sent on a connection that was closed, and again"


class Stream:
    """What became of each query: `outcomes` counts statuses by "small" and "large", `answers` has (when, status)."""

    def __init__(self, address, queries_s, large_share, headers):
        self._address, self._queries_s, self._large_share, self._headers = address, queries_s, large_share, headers
        self._idle: list[Connection] = []
        self.outcomes: Counter = Counter()
        self.answers: list[tuple[float, object]] = []
        self.slowest_s = 0.0
        self.strange: list[str] = []
        self.refusals: Counter = Counter()  # by the status and what is said

    async def run(self, enough):
        chance, sent, due = random.Random(7), set(), time.monotonic()
        while not enough.is_set():
            due += chance.expovariate(self._queries_s)
            await asyncio.sleep(due - time.monotonic())
            large = chance.random() < self._large_share
            size = ABOVE_IT if large else BELOW_THE_BUFFER if chance.random() < 0.1 else len(TEXT)
            task = asyncio.create_task(self._one("large" if large else "small", size))
            sent.add(task)
            task.add_done_callback(sent.discard)
        await asyncio.gather(*sent)
        for connection in self._idle:
            connection.hang_up()

    async def _one(self, kind, size):
        request = request_bytes({"input": (TEXT * (size // len(TEXT) + 1))[:size]}, headers=self._headers)
        started = time.monotonic()
        status = WITHOUT_ANSWER
        for kept in (True, False):  # one that HAProxy closed as the query was sent: clients try a new one, once
            connection = None
            try:
                connection = self._idle.pop() if kept and self._idle else await Connection.open(self._address)
                reply = await connection.ask(request)
            except (OSError, EOFError, TimeoutError):
                if connection is not None:
                    connection.hang_up()
                self.outcomes[kind, CLOSED_UNDER_IT] += kept
                continue
            status = reply.status
            self._check(reply)
            self._idle.append(connection)
            break
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self.outcomes[kind, status] += 1
        self.answers.append((time.monotonic(), status))

    def _check(self, reply):
        """Whoever is refused hears when to come back, in the route's own shape."""
        if reply.status == 200:
            good = len(reply.json()["data"]) == 1
        else:
            error = reply.json()["error"]
            good = "retry-after-ms" in reply.headers and "message" in error
            self.refusals[reply.status, error.get("code")] += 1
        if not good:
            self.strange.append(f"{reply.status} {reply.body[:200]!r}")

    def of(self, kind):
        """{status: how many} of "small" or "large" queries."""
        return {
            status: count for (of, status), count in self.outcomes.items() if of == kind and status != CLOSED_UNDER_IT
        }

    def pause_s(self):
        """The longest time between two 200, in seconds."""
        times = [when for when, status in self.answers if status == 200]
        return max(later - before for before, later in itertools.pairwise(times))

    def __str__(self):
        what = {" ".join(map(str, key)): count for key, count in self.outcomes.items()}
        return f"{what}, slowest {self.slowest_s:.1f} s"


@contextmanager
def streaming(address, queries_s, *, large_share=0.0, headers=()):
    """Queries beside what is done meanwhile; all are answered once it is left."""
    stream, enough = Stream(address, queries_s, large_share, headers), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(stream.run(enough)))
    thread.start()
    try:
        yield stream
    finally:
        enough.set()
        thread.join()
