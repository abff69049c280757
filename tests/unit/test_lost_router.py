"""Serve's own proxy says where a Router died with a request, so that HAProxy repeats that one and none of ours."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError
from ray.serve import context
from ray.serve._private.http_util import (
    _apply_middlewares,
    get_http_response_status,
    send_http_response_on_exception,
    validate_http_proxy_callback_return,
)

from deployments import errors
from deployments.errors import WindveError
from deployments.serve_adapter.local_ray import HAPROXY_RULES
from deployments.serve_adapter.lost_router import STATUS, middlewares
from serve_app.web.errors import error_answer
from tests.kit.asgi_client import call

START = {"type": "http.response.start", "status": 500, "headers": []}
BODY = {"type": "http.response.body", "body": b"ours"}


def proxy(*messages, error=None):
    """Serve's, as it wraps its application; with what came of a request."""

    async def application(scope, receive, send):
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    return _apply_middlewares(application, validate_http_proxy_callback_return(middlewares()))


def test_a_request_without_an_answer_met_a_router_that_died():
    died = send_http_response_on_exception(get_http_response_status(ActorDiedError(), None, "7"), False)
    assert died == []  # a bare 500 of uvicorn's comes of it
    reply = call(proxy(*died), "POST", "/embed")
    assert (reply.status, reply.headers["retry-after"]) == (STATUS, "1")
    assert b"try again in a second" in reply.body


def test_what_a_router_answers_stays():
    reply = call(proxy(START, BODY), "POST", "/embed")
    assert (reply.status, reply.body) == (500, b"ours")


def test_a_defect_of_the_proxy_stays_one():
    with pytest.raises(ZeroDivisionError):
        call(proxy(error=ZeroDivisionError()), "POST", "/embed")


def test_a_web_socket_is_not_answered_by_http():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(proxy()({"type": "websocket", "headers": []}, None, send))
    assert sent == []


def test_a_router_answers_for_itself(monkeypatch):
    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", object())
    assert middlewares() == []


def test_no_answer_of_ours_is_repeated():
    repeated = set(HAPROXY_RULES["RAY_SERVE_HAPROXY_RETRY_ON"].split())
    assert repeated == {"conn-failure", "empty-response", str(STATUS)}
    tree = [WindveError]
    for kind in tree:
        tree += kind.__subclasses__()
    found = [kind.__new__(kind) for kind in tree]
    assert {errors.Defect, errors.EngineFailed} < set(tree)
    for error in found:
        error.message, error.param, error.retry_after_s, error.allowed = "x", None, 1.0, []
        assert STATUS not in {error_answer(error, path)[0] for path in ("/embed", "/v1/embeddings", "/v1/embed")}
