"""Long texts leave the event loop, in turns."""

import asyncio
from concurrent.futures import Executor, Future

import pytest

from deployments.models import tokenizing
from deployments.models.tokenizing import ON_LOOP, Tokenizing, estimated_tokens


class Later(Executor):
    """A thread that works when the test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, work, /, *args):
        self.waiting.append((future := Future(), work, args))
        return future

    def work(self):
        future, work, args = self.waiting.pop(0)
        try:
            future.set_result(work(*args))
        except ValueError as error:
            future.set_exception(error)


def encode(queries, first):
    return [[first + i, len(query)] for i, query in enumerate(queries)]


def by_hand(*how):
    """A tokenizer, and its thread."""
    told = Tokenizing(*how)
    told._thread = Later()
    return told, told._thread


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_short_stays_on_the_loop():
    told, thread = by_hand()
    assert await told.encode(["ab", "c"], ON_LOOP, encode) == ([[0, 2], [1, 1]], 0.0)
    assert thread.waiting == []


async def test_a_large_request_lets_others_in_between():
    told, thread = by_hand()
    large = ["x" * (tokenizing._TURN // 2)] * 5  # two turns of two, and one more
    first = asyncio.ensure_future(told.encode(large, sum(map(len, large)), encode))
    second = asyncio.ensure_future(told.encode(["y" * 5000], 5000, encode))
    await settle()
    assert (told.queries, len(thread.waiting)) == (6, 2)
    thread.work()
    thread.work()
    await settle()
    assert (await second)[0] == [[0, 5000]]
    assert not first.done()
    for _ in range(2):
        thread.work()
        await settle()
    ids, seconds = await first
    assert [index for index, _ in ids] == [0, 1, 2, 3, 4]
    assert seconds > 0
    assert (told.queries, told._characters) == (0, 0)


async def test_the_wait_for_a_turn_is_told_by_what_is_ahead():
    told, thread = by_hand()
    asked = asyncio.ensure_future(told.encode(["x" * 50_000], 50_000, encode))
    await settle()
    assert told.waiting_s == pytest.approx(50_000 / told.characters_per_s)
    thread.work()
    await asked
    assert told.waiting_s == 0


async def test_a_text_longer_than_a_turn_keeps_only_its_like_waiting():
    told, thread = by_hand(1000)
    told._slow_thread = slow = Later()
    text = "x" * (tokenizing._TURN + 1)
    long = [asyncio.ensure_future(told.encode([text], len(text), encode)) for _ in range(2)]
    short = asyncio.ensure_future(told.encode([text[:-1]], len(text) - 1, encode))
    await settle()
    assert (len(slow.waiting), len(thread.waiting)) == (2, 1)
    assert told.waiting_s == pytest.approx(3 * 1000 / told.characters_per_s)  # no more of them is tokenized
    thread.work()
    assert len((await short)[0]) == 1
    slow.work()
    slow.work()
    await asyncio.gather(*long)
    assert told.waiting_s == 0


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_nothing_is_kept_by_who_has_gone(how):
    told, thread = by_hand()

    def fails(queries, first):
        raise ValueError

    asked = asyncio.ensure_future(told.encode(["x" * 60_000, "y" * 60_000], 120_000, fails))
    await settle()
    if how == "cancelled":
        asked.cancel()
    else:
        thread.work()
    with pytest.raises((asyncio.CancelledError, ValueError)):
        await asked
    assert (told.queries, told._characters) == (0, 0)


@pytest.mark.parametrize(
    ("queries", "tokens"), [(["a"], 1), (["x" * 300], 75), (["x" * 9000], 512), (["x" * 300, "x" * 100], 50)]
)
def test_tokens_are_estimated_by_characters(queries, tokens):
    assert estimated_tokens(queries, 512) == tokens


async def test_a_prompt_before_each_text_does_not_make_the_queue_seem_longer():
    told, thread = by_hand()
    texts, prompt = ["x" * tokenizing._TURN] * 3, tokenizing._TURN
    one = asyncio.create_task(told.encode(texts, sum(map(len, texts)) + prompt * len(texts), encode))
    await settle()
    assert told._characters == 6 * tokenizing._TURN
    thread.work()
    await settle()
    assert told._characters == 4 * tokenizing._TURN
    while thread.waiting:
        thread.work()
        await settle()
    assert (told._characters, len((await one)[0])) == (0, 3)
