"""Bodies with too many values are refused before they are read; large answers are written in turns."""

import asyncio
import json

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import BodyTooLarge
from serve_app.web import json_values
from serve_app.web.asgi import HttpRequest, dumps, dumps_in_turns
from serve_app.web.json_values import LARGE, MOST_VALUES, check_values

HOSTILE = {
    "ids": b'{"input":[%s]}' % b",".join([b"7"] * 8_000_000),
    "lists in a field that nobody reads": b'{"input":"x","user":[%s]}' % b",".join([b"[]"] * 5_000_000),
}
TAKEN = {
    "texts with commas": b'{"input":[%s]}' % b",".join([b'"%s"' % (rb"1,[\"{\\" * 1000)] * 1500),
    "as many ids as are taken": b'{"input":[%s]}' % b",".join([b"777"] * (MOST_VALUES - 8 + 1)),
}


def too_many(body):
    try:
        check_values(body)
    except BodyTooLarge:
        return True
    return False


def sent(body):
    async def receive():
        return {"type": "http.request", "body": body}

    scope = {"method": "POST", "path": "/embed", "headers": []}
    return asyncio.run(HttpRequest(scope, receive).body(2**24))


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_too_many_values_are_refused(body):
    with pytest.raises(BodyTooLarge, match=r"more values than this server accepts \(300000 token ids in all"):
        sent(body)


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_what_is_large_otherwise_is_taken(body):
    assert sent(body) == body
    assert orjson.loads(body)


def test_one_more_than_are_taken_is_too_many():
    body = TAKEN["as many ids as are taken"]
    assert [too_many(body), too_many(body.replace(b"[", b"[7,"))] == [False, True]


@pytest.mark.parametrize(("size", "is_refused"), [(LARGE, False), (LARGE + 1, True)])
def test_a_small_body_cannot_hold_so_many(size, is_refused):
    assert too_many(b"[" * size) is is_refused


def cost(value):
    if not isinstance(value, list | dict):
        return 0
    inside = list(value.values()) if isinstance(value, dict) else value
    return 4 + max(0, len(inside) - 1) + sum(map(cost, inside))


TEXTS = st.text(st.sampled_from('a",[{\\\n'))
VALUES = st.recursive(TEXTS | st.integers(), lambda some: st.lists(some) | st.dictionaries(TEXTS, some))


@given(VALUES, st.integers(1, 9), st.integers(0, 1))
def test_what_texts_hold_does_not_count_wherever_a_piece_ends(value, piece, less):
    body = json.dumps(value, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE", piece)
        patch.setattr(json_values, "MOST_VALUES", cost(value) - less)
        assert too_many(body) is (less == 1)


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
CONTENTS = [
    {"object": "list", "data": [{"index": 0, "embedding": ROWS[0]}, {"index": 1, "embedding": ROWS[:, :2]}]},
    [ROWS, ROWS[:, 1:3]],
    {"embeddings": {"float": ROWS, "base64": ["x", "y"]}, "texts": [], "meta": {}, "none": None, "é": 'a"b'},
    [],
    [1.5, 2.5],
    ROWS[0],
]


@pytest.mark.parametrize("content", CONTENTS)
async def test_in_turns_the_same_is_written(content):
    plain = orjson.dumps(content, default=lambda rows: rows.tolist())
    assert await dumps_in_turns(content) == plain


async def test_others_go_on_while_much_is_written():
    rows, turns, writes = np.random.default_rng(0).random((2_000, 500), np.float32), 0, True

    async def others():
        nonlocal turns
        while writes:
            await asyncio.sleep(0)
            turns += 1

    going = asyncio.ensure_future(others())
    written = await dumps_in_turns(list(rows))
    writes = False
    await going
    assert written == dumps(rows)
    assert turns > 5
