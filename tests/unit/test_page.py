"""The page at `GET /`: who gets it, what a browser may do with it, and what it draws."""

import asyncio
import dataclasses
import re
from base64 import b64decode
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.errors import Busy, Unavailable
from deployments.settings import Settings
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.api import HttpApi
from serve_app.embedding.burst import Bursts
from serve_app.embedding.models_api import ModelsApi
from serve_app.ingress import KNOWN_ROUTES
from serve_app.web import about as page_module
from tests.kit.asgi_client import call, get, post
from tests.kit.fake_router import FakeRouter, asked_of, embedded
from tests.kit.replica_world import V100, XEON
from tests.kit.router_world import Replica, World, several

FILE = Path(page_module.__file__).with_name("page.html")
EMULATED = {"engine": "emulated", "emulated": {"alpha_s": 0.1, "beta_s": 0.2}}
POLICY = {
    "default-src": "'none'",
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def router(**args):
    found = FakeRouter()
    found.settings = Settings.parse({"model": {"id": "m"}, **args})
    return found


def test_a_browser_gets_one_file_that_may_load_nothing():
    reply = get(HttpApi(FakeRouter()), "/")
    assert (reply.status, reply.body) == (200, FILE.read_bytes())
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert (reply.headers["x-content-type-options"], reply.headers["cache-control"]) == ("nosniff", "no-store")
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        (inline,) = re.findall(f"<{kind}>(.*?)</{kind}>", reply.body.decode(), re.DOTALL)
        told = re.fullmatch("'sha256-(.+)'", policy.pop(f"{kind}-src"))[1]
        assert b64decode(told) == sha256(inline.encode()).digest()
    assert policy == POLICY
    head = call(HttpApi(FakeRouter()), "HEAD", "/")
    assert (head.status, head.body, head.headers) == (200, b"", reply.headers)


def test_the_file_is_small_and_names_no_other_place():
    content = FILE.read_text()
    assert len(content.splitlines()) < 400
    assert set(re.findall(r"https?://[^\"' ]+", content)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"<(script|style) |<link rel=\"style|\bon\w+=|style=|innerHTML|@import|url\(|eval\(", content)


def test_it_is_there_for_everybody_and_what_it_shows_is_not():
    keys = ApiKeys(["sk-one"])
    for api in (HttpApi(FakeRouter(), keys), models_api(FakeRouter(), keys)):
        assert [call(api, method, "/").status for method in ("GET", "HEAD")] == [200, 200]
        assert [post(api, path, {"inputs": "a"}).status for path in ("/", "/burst")] == [401, 401]
        assert [get(api, path).status for path in ("/info", "/models/m/")] == [401, 401]


def models_api(one, keys=None):
    return ModelsApi(ByModel({"m": one}), keys)


def test_each_of_several_models_has_one():
    assert [get(models_api(FakeRouter()), path).body for path in ("/", "/models/m/")] == [FILE.read_bytes()] * 2


def test_it_can_be_turned_off():
    off = router(page=False)
    for api in (HttpApi(off), models_api(off)):
        reply = get(api, "/")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert post(api, "/", {"inputs": "a"}).status == 200
    assert get(HttpApi(off, ApiKeys(["sk-one"])), "/").status == 401


def test_the_access_log_names_each_route_of_a_service_with_a_page():
    routes = {path for _, path in HttpApi(router(accelerator=EMULATED, cpu=EMULATED))._own_routes()}
    assert "/burst" in routes
    assert routes <= KNOWN_ROUTES


def burst(one):
    return post(HttpApi(one), "/burst", {}, headers=[(b"content-type", b"application/json")])


async def test_one_burst_at_a_time():
    one, may_end = router(accelerator=EMULATED, cpu=EMULATED), asyncio.Event()
    one.config = SimpleNamespace(slo_s=2.0)

    async def embed(request):
        await may_end.wait()
        return embedded([])

    one.embed, bursts = embed, Bursts(one)
    first = asyncio.create_task(bursts.send(None))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="another burst is running"):
        await bursts.send(None)
    may_end.set()
    assert (await first)["sent"] == 6
    assert (await bursts.send(None))["sent"] == 6


def test_only_an_emulated_service_sends_bursts():
    emulated = {"accelerator": EMULATED, "cpu": EMULATED}
    found = [router(), router(**emulated, page=False), router(**emulated)]
    for one in found:
        one.config = SimpleNamespace(slo_s=2.0)
    assert [burst(one).status for one in found] == [404, 404, 200]
    assert post(HttpApi(found[-1]), "/burst", {}).status == 422  # as a form of any other site's page may


def test_what_came_of_a_burst():
    one = router(accelerator=EMULATED, cpu=EMULATED)
    one.config = SimpleNamespace(slo_s=2.0)
    answered = [dataclasses.replace(embedded([]), pools=(pool,)) for pool in ("accelerator", "accelerator", "cpu")]
    answers = iter([*answered, *[Busy("x", retry_after_s=1.0)] * 2, Unavailable("x")])

    async def embed(request):
        assert (len(request.queries), asked_of(request)) == (1, {})
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    one.embed = embed
    told = burst(one).json
    counts = {"answered": {"accelerator": 2, "cpu": 1}, "refused": 2, "failed": 1}
    assert told == {"slo_s": 2.0, "sent": 6, **counts, "slowest_s": 0.0064}
    with pytest.raises(RuntimeError):  # no more answers: a mistake of ours is not counted away
        burst(one)


async def test_info_has_what_the_page_draws():
    found = await World({"accelerator": [Replica("a", V100)], "cpu": [Replica("c", XEON)]}, slo_s=2.0).router()
    before = found.describe_pools()
    assert 80 < before["accelerator"]["room"] <= before["accelerator"]["capacity"] < 100
    assert before["cpu"]["free_s"] == 0
    outcomes = several(found, 150)
    await asyncio.sleep(1.0)
    await found.hear_replicas()
    during = found.describe_pools()
    assert during["accelerator"]["room"] < 60
    assert 0.5 < during["accelerator"]["free_s"] < 1.5
    outcomes = await asyncio.gather(*outcomes)
    recent, refused = found.metrics.recent.describe(), [one for one in outcomes if isinstance(one, Busy)]
    answered = {pool: sum(counts) for pool, counts in recent["answered"].items()}
    assert answered.keys() == {"accelerator", "cpu"}
    assert (sum(answered.values()), sum(recent["refused"])) == (150 - len(refused), len(refused))
    assert refused
    assert sum(recent["late"]) == 0
    assert {pool for *_, pool in recent["finishes"]} == {"accelerator", "cpu"}
    assert recent["late_finishes"] == []
    assert all(0 < actual <= 2.0 and predicted > 0 for predicted, actual, _ in recent["finishes"])
    assert found.routers == 1
