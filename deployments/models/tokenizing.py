"""Tokenizes short requests on the event loop, and long ones in a thread, so that they do not block the loop.

A long request is cut into turns of 64,000 characters, and requests take turns in the thread. A text that is longer than
a turn runs in a second thread. Most such texts are fast, because only an excerpt is tokenized (`excerpts`). One that
allows no excerpt may take seconds, but delays only other such texts. With `queries` and `waiting_s`, the Router refuses
a long request for which the devices would have no room (`Router._refuse_long_texts`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from deployments.models.text_pairs import Pair
from deployments.models.tokenizer import Query, TokenIds

# Tokenizing this many characters takes about a millisecond. Longer requests run in a thread.
ON_LOOP = 4_000
_TURN = 64_000  # characters; a larger request lets others run in between
_CHARACTERS_PER_S = 2e6  # speed of a core, until it is measured
_LEARN = 0.2
_CHARACTERS_A_TOKEN = 4.0  # roughly; rather fewer than more in most languages

Encode = Callable[[Sequence[Query], int], list[TokenIds]]  # (some queries, the index of the first)


@dataclass(slots=True)
class Tokenizing:
    """A Router's tokenizing. `waiting_s`: how long a text would wait for its turn. `most_characters`: the most
    characters of a text that are tokenized.
    """

    most_characters: float = math.inf
    characters_per_s: float = _CHARACTERS_PER_S
    queries: int = 0  # queries that are being tokenized in threads
    _characters: int = 0
    _thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"), repr=False)
    _slow_thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "slow-tokenizer"), repr=False)

    @property
    def waiting_s(self) -> float:
        """Seconds until the thread has tokenized everything that it was given so far."""
        return self._characters / self.characters_per_s

    async def encode(self, queries: Sequence[Query], characters: int, encode: Encode) -> tuple[list[TokenIds], float]:
        """The token ids of each query, and the seconds that a thread took for them. `characters`: of all queries
        together. Raises what `encode` raises.
        """
        if characters <= ON_LOOP:
            return encode(queries, 0), 0.0
        loop, found, total_s = asyncio.get_running_loop(), list[TokenIds](), 0.0
        prompt = (characters - sum(map(len, queries))) / len(queries)
        turns = [(part, self._size(part, prompt)) for part in _turns(queries)]
        left = sum(size for _, size in turns)
        self.queries += len(queries)
        self._characters += left
        try:
            for part, size in turns:
                is_slow = max(map(len, part)) > _TURN
                thread = self._slow_thread if is_slow else self._thread
                ids, seconds = await loop.run_in_executor(thread, _timed, encode, part, len(found))
                found += ids
                total_s += seconds
                if seconds > 0 and not is_slow:
                    self.characters_per_s += _LEARN * (size / seconds - self.characters_per_s)
                self._characters -= size
                left -= size
        finally:
            self.queries -= len(queries)
            self._characters -= left
        return found, total_s

    def _size(self, queries: Sequence[Query], prompt: float) -> int:
        """Characters to tokenize. `prompt`: the characters of the prompt before each query."""
        return round(sum(min(len(query) + prompt, self.most_characters) for query in queries))


def estimated_tokens(queries: Sequence[Query], most: int) -> float:
    """The estimated mean tokens of a query, before tokenizing."""
    total = 0.0
    for query in queries:
        tokens = len(query) / (_CHARACTERS_A_TOKEN if isinstance(query, (str, Pair)) else 1)
        total += min(most, max(1.0, tokens))
    return total / len(queries)


def _turns(queries: Sequence[Query]) -> Iterator[Sequence[Query]]:
    start = size = 0
    for end, query in enumerate(queries, 1):
        size += len(query)
        if size >= _TURN:
            yield queries[start:end]
            start, size = end, 0
    if start < len(queries):
        yield queries[start:]


def _timed(encode: Encode, part: Sequence[Query], first: int) -> tuple[list[TokenIds], float]:
    started = time.perf_counter()
    ids = encode(part, first)
    return ids, time.perf_counter() - started
