"""Which pages of other sites a browser lets ask: preflights, headers, and the setting."""

import pytest

from deployments.errors import Busy, SettingsError
from deployments.settings import Settings
from serve_app.api_keys import ApiKeys
from serve_app.embedding.api import HttpApi
from serve_app.ingress import ServiceIngress, with_cors
from serve_app.web.asgi import Asgi, ResponseStream
from tests.kit.asgi_client import call, get, post
from tests.kit.fake_router import FakeRouter

OURS, OTHER = "https://app.example.com", "https://evil.example.com"
TEXT = {"inputs": "a"}


def asking(origin):
    return [(b"origin", origin.encode())]


def preflight(api, origin, method="POST", more=()):
    """As a browser asks before openai's JavaScript client sends anything."""
    wanted = b"authorization,content-type,x-stainless-lang"
    asked = [(b"access-control-request-method", method.encode()), (b"access-control-request-headers", wanted)]
    return call(api, "OPTIONS", "/v1/embeddings", headers=[*asking(origin), *asked, *more])


def guarded(origins):
    return with_cors(HttpApi(FakeRouter(), ApiKeys(["k"])), origins)


@pytest.mark.parametrize(("origins", "named"), [(["*"], "*"), ([OURS, "http://localhost:5173"], OURS)])
def test_a_page_that_is_named_may_ask(origins, named):
    api = guarded(origins)
    before = preflight(api, OURS)
    assert before.status == 200  # without a key
    assert before.headers["access-control-allow-origin"] == named
    assert before.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert "POST" in before.headers["access-control-allow-methods"]
    for key, status in ((b"Bearer k", 200), (b"Bearer no", 401)):  # errors can be read, too
        reply = post(api, "/embed", TEXT, headers=[*asking(OURS), (b"authorization", key)])
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, named)
        assert reply.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


def test_a_page_learns_when_to_come_back():
    api = with_cors(HttpApi(FakeRouter(error=Busy("x", retry_after_s=0.25))), [OURS])
    reply = post(api, "/v1/embeddings", {"input": "a"}, headers=asking(OURS))
    assert (reply.status, reply.headers["retry-after-ms"]) == (429, "250")
    assert reply.headers["access-control-allow-origin"] == OURS
    assert reply.headers["access-control-expose-headers"] == "*"


def test_a_page_reads_a_stream_and_what_becomes_of_a_defect():
    class Streams(Asgi):
        async def answer(self, request):
            if request.path == "/broken":
                raise ZeroDivisionError
            return [(b"content-type", b"text/event-stream")], Words()

    class Words(ResponseStream):
        async def run(self, gone, write):
            await write(b"data: a")

        async def close(self):
            pass

    told = []

    async def keep(message):
        told.append(message)

    api = with_cors(Streams(None, None, emulated=False), [OURS])
    reply = get(api, "/words", headers=asking(OURS), takes=keep)
    assert (reply.body, reply.headers["access-control-allow-origin"]) == (b"data: a", OURS)
    with pytest.raises(ZeroDivisionError):
        get(api, "/broken", headers=asking(OURS), takes=keep)
    start = told[-2]
    assert (start["status"], dict(start["headers"])[b"access-control-allow-origin"]) == (500, OURS.encode())


def test_another_page_may_not():
    api = guarded([OURS])
    assert preflight(api, OTHER).status == 400
    assert preflight(api, OURS, "DELETE").status == 400
    reply = post(api, "/embed", TEXT, headers=[*asking(OTHER), (b"authorization", b"Bearer k")])
    assert "access-control-allow-origin" not in reply.headers
    assert "origin" in reply.headers["vary"].lower()


@pytest.mark.parametrize(
    ("origins", "origin", "status"), [([OURS], OURS, 200), (["*"], OTHER, 400), ([OURS], OTHER, 400)]
)
def test_a_public_page_that_is_named_may_ask_in_a_private_network(origins, origin, status):
    """Chromium then adds this header: https://wicg.github.io/private-network-access"""
    before = preflight(guarded(origins), origin, more=[(b"access-control-request-private-network", b"true")])
    assert before.status == status
    allowed = before.headers.get("access-control-allow-private-network") == "true"
    assert allowed == (OURS in origins)  # 'true' to another site means nothing: its preflight has failed
    assert "access-control-allow-private-network" not in preflight(guarded(origins), origin).headers


def test_who_is_no_page_is_answered_as_ever():
    reply = post(guarded([OURS]), "/embed", TEXT, headers=[(b"authorization", b"Bearer k")])
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]
    api = HttpApi(FakeRouter())
    assert with_cors(api, []) is api  # nothing is between
    assert not [name for name in preflight(api, OURS).headers if name.startswith("access-control")]


def test_an_application_goes_by_its_settings():
    class Ingress(ServiceIngress):
        def __init__(self, origins):
            self._origins = origins

        def api(self):
            return HttpApi(FakeRouter())

        def every_router(self):
            return []

    asked = [preflight(Ingress(origins).asgi_app(), OURS) for origins in ([], [OURS])]
    assert [reply.status for reply in asked] == [405, 200]


@pytest.mark.parametrize(
    "origins",
    [
        [],
        ["*"],
        [OURS],
        ["http://localhost:5173", "https://a.b"],
        ["https://[::1]:8443"],
        ["chrome-extension://abcdef"],
    ],
)
def test_origins_that_browsers_send(origins):
    assert Settings.parse({"model": {"id": "m"}, "cors_allow_origins": origins}).cors_allow_origins == origins


@pytest.mark.parametrize(
    "origin",
    [
        *("app.example.com", "https://app.example.com/", "https://app.example.com/chat", "https://*.example.com"),
        *("https://App.example.com", "https://a.b:443", "http://a.b:80", "https://", "null", "", " https://a.b"),
        *("https://é.example.com", "https://user@a.b", "http://[::1]:80"),
    ],
)
def test_what_no_browser_sends_is_refused_at_the_start(origin):
    with pytest.raises(SettingsError, match=r"^args\.cors_allow_origins: .* is not an origin as browsers send it"):
        Settings.parse({"model": {"id": "m"}, "cors_allow_origins": [OURS, origin]})


@pytest.mark.parametrize("given", ["*", [5], ["*", OURS], {"a": 1}])
def test_other_mistakes_are_refused_by_the_key(given):
    with pytest.raises(SettingsError, match=r"^args\.cors_allow_origins"):
        Settings.parse({"model": {"id": "m"}, "cors_allow_origins": given})
