"""The routes that every service has: models, health, page, OpenAPI document; and the errors for all other paths."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html

from deployments.errors import Unavailable, WindveError
from deployments.serving.router import BaseRouter
from serve_app.api_keys import ApiKeys
from serve_app.observe.observer import ONE_MODEL, Observer
from serve_app.version import VERSION
from serve_app.web.asgi import PROBES, Answer, Asgi, Handler, HttpRequest, json_answer
from serve_app.web.errors import NoRoute, WrongMethod
from serve_app.web.fields import Rules
from serve_app.web.request_headers import SPACE, check_space

COMPLETIONS = "/v1/completions", "/completions"
CHATS = "/v1/chat/completions", "/chat/completions"
MODELS = "/v1/models", "/models"
SHARED_ROUTES = (
    *("/", "/tokenize", "/decode", "/detokenize", "/info", "/load", "/version", "/docs", "/openapi.json"),
    *MODELS,
    *PROBES,
)
Routes = Mapping[tuple[str, str], Handler]  # by method and path
_NOT_HERE = {  # routes that other servers have
    "/metrics": "Ray exports the Prometheus metrics of all replicas on each node's metrics port; /info has counters",
}


class ServiceApi(Asgi):
    """The routes about the models of one Router process."""

    _document: Mapping[str, Any]  # OpenAPI's

    @property
    @abstractmethod
    def parts(self) -> Sequence[ModelApi]:
        """The routes to each model."""

    @property
    def _shared_routes(self) -> Routes:
        return {
            **{("GET", path): self.openai_models for path in MODELS},
            ("GET", "/info"): self.info,
            ("GET", "/load"): self.load,
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.ping,
            ("GET", "/version"): self.version,
            ("GET", "/docs"): self.docs,
            ("GET", "/openapi.json"): self.openapi,
            **({("GET", "/"): self.page} if self._has_page else {}),
        }

    async def openai_models(self, _: HttpRequest) -> Answer:
        return json_answer({"object": "list", "data": [model for part in self.parts for model in part.models]})

    async def load(self, _: HttpRequest) -> Answer:
        """The answer of vLLM's `/load`."""
        await self._hear_replicas()
        return json_answer({"server_load": sum(part.router.load for part in self.parts)})

    async def info(self, _: HttpRequest) -> Answer:
        """The first model's fields, for clients that expect one model. Of several, under `models`, those of each."""
        await self._hear_replicas()
        models = {part.router.card.name: part.describe() for part in self.parts}
        first = next(iter(models.values()))
        return json_answer({**first, "models": models} if len(models) > 1 else first)

    async def _hear_replicas(self) -> None:
        await asyncio.gather(*(part.router.hear_replicas() for part in self.parts))

    async def health(self, _: HttpRequest) -> Answer:
        """Healthy while any model can answer, so that a load balancer does not remove the others with it. Raises
        Unavailable if none can. Callers need no key here, and with keys the models' names are not public.
        """
        models = {part.router.card.name: _health(part.router.live_pools) for part in self.parts}
        statuses = {one["status"] for one in models.values()}
        if statuses == {"unavailable"}:
            raise Unavailable("no pool can answer now: no live replica with an open queue")
        found: dict[str, Any] = {"status": "ok"}
        if statuses != {"ok"}:
            missing = {pool for one in models.values() for pool in one.get("missing", ())}
            found = {"status": "degraded", "missing": sorted(missing)}
        return json_answer(found if len(models) == 1 or self._api_keys is not None else {**found, "models": models})

    async def ping(self, _: HttpRequest) -> Answer:
        """Shows that the process lives."""
        return [], b""

    async def version(self, _: HttpRequest) -> Answer:
        """The answer of vLLM and Ollama."""
        return json_answer({"version": VERSION})

    async def docs(self, _: HttpRequest) -> Answer:
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"max-age=86400")]
        return headers, await asyncio.to_thread(_swagger_ui)  # it reads two megabytes the first time

    async def page(self, _: HttpRequest) -> Answer:
        """The live page of the service, for a browser: one static file, without data of the service. Its script calls
        `/info` with the API key that the user enters. Its headers forbid the browser to run or load anything else.
        """
        content, policy = _page()
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-store"),
        ]
        return headers, content

    async def openapi(self, request: HttpRequest) -> Answer:
        return json_answer({**self._document, "servers": [{"url": request.root or "/"}]})


class ModelApi(ServiceApi):
    """The routes to one model in one Router replica: those of every service, and `_own_routes`."""

    def __init__(
        self,
        rules: Rules,
        router: BaseRouter[Any, Any, Any, Any],
        api_keys: ApiKeys | None,
        observer: Observer | None,
        *,
        emulated: bool,
        has_page: bool,
    ) -> None:
        super().__init__(api_keys, observer, emulated=emulated, has_page=has_page)
        self._rules, self.router = rules, router
        self._space = SPACE.encode(), router.space.encode()
        self._routes: Routes = {**self._own_routes(), **self._shared_routes}

    @property
    def parts(self) -> Sequence[ModelApi]:
        return [self]

    @abstractmethod
    def _own_routes(self) -> Routes:
        """The routes of this kind of model, and of its tokenizer."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The content of `/info`."""

    def has(self, path: str, method: str | None = None) -> bool:
        """Whether there is such a route, for this method or for any."""
        return any(known == path and method in {None, of} for of, known in self._routes)

    async def answer(self, request: HttpRequest) -> Answer:
        """Each answer names the model's space. Raises WrongSpace before the body is read."""
        handler = self._routes.get((request.method, request.path)) or self._rare(request.method, request.path)
        check_space(request.headers, self.router.space)
        headers, body = await handler(request)
        return [*headers, self._space], body

    def _rare(self, method: str, path: str) -> Handler:
        """The handler for HEAD and for `/v1/models/NAME`. Raises NoRoute, WrongMethod or WrongKind for all else."""
        allowed = ["GET"] if path.startswith(ONE_MODEL) else [known for known, route in self._routes if route == path]
        allowed += ["HEAD"] if "GET" in allowed else []
        if not allowed:
            raise self._no_route(path)
        if method not in allowed:
            raise WrongMethod(f"{path} does not accept {method}; use {' or '.join(allowed)}", allowed=allowed)
        if path.startswith(ONE_MODEL):
            return partial(self.openai_model, path.removeprefix(ONE_MODEL))
        return self._routes["GET", path]

    def _no_route(self, path: str) -> WindveError:
        return NoRoute(f"there is no route {path}; {_NOT_HERE.get(path, 'see /docs for the list')}")

    async def openai_model(self, name: str, _: HttpRequest) -> Answer:
        self._rules.check_model(name)
        return json_answer(self._model(name))

    @property
    def models(self) -> list[dict[str, Any]]:
        """All names of the model, as OpenAI's `/v1/models` lists them."""
        return [self._model(name) for name in self._rules.names]

    def _model(self, name: str) -> dict[str, Any]:
        started = int(self.router.started)
        return {"id": name, "object": "model", "created": started, "owned_by": "windve", "root": self._rules.model}


def _health(live_pools: Mapping[str, bool]) -> dict[str, Any]:
    """One model's health: whether all, some or none of its pools can answer."""
    missing = [name for name, is_live in live_pools.items() if not is_live]
    if not missing:
        return {"status": "ok"}
    return {"status": "unavailable" if len(missing) == len(live_pools) else "degraded", "missing": missing}


@cache
def _page() -> tuple[bytes, bytes]:
    """The file, and the Content Security Policy that allows its own script and style by their hashes."""
    content = files(__package__).joinpath("page.html").read_bytes()
    hashes = {}
    for kind in (b"script", b"style"):
        inline = b"".join(re.findall(rb"<%b>(.*?)</%b>" % (kind, kind), content, re.DOTALL))
        hashes[kind] = b64encode(sha256(inline).digest())
    policy = (
        b"default-src 'none'; script-src 'sha256-%b'; style-src 'sha256-%b'; img-src data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy % (hashes[b"script"], hashes[b"style"])


@cache
def _swagger_ui() -> bytes:
    """The page, with its script and style inside: a browser near an isolated cluster may have no internet access."""

    def in_page(name: str, kind: str) -> str:
        content = files("fastapi_offline").joinpath("static", name).read_bytes()
        return f"data:{kind};charset=utf-8;base64,{b64encode(content).decode()}"

    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="windve",
        swagger_js_url=in_page("swagger-ui-bundle.js", "text/javascript"),
        swagger_css_url=in_page("swagger-ui.css", "text/css"),
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},  # without this, the page asks swagger.io to validate the document
    )
    return bytes(page.body)
