"""The routes that every service has: models, health and OpenAPI document; and the errors for all other paths."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any, Protocol

from fastapi.openapi.docs import get_swagger_ui_html

from deployments.errors import Unavailable, WindveError
from serve_app.api_keys import ApiKeys
from serve_app.observe.observer import ONE_MODEL, Observer
from serve_app.version import VERSION
from serve_app.web.admission_headers import SPACE, check_space
from serve_app.web.asgi import PROBES, Answer, Asgi, Handler, HttpRequest, json_answer
from serve_app.web.errors import NoRoute, WrongMethod
from serve_app.web.fields import Rules
from serve_app.web.page import page

COMPLETIONS = "/v1/completions", "/completions"
CHATS = "/v1/chat/completions", "/chat/completions"
MODELS = "/v1/models", "/models"
SHARED_ROUTES = (
    *("/", "/tokenize", "/decode", "/detokenize", "/info", "/load", "/version", "/docs", "/openapi.json"),
    *MODELS,
    *PROBES,
)
NO_REPLICA = "no live replica with an open queue"
_NOT_HERE = {  # routes that other servers have
    "/metrics": "Ray exports the Prometheus metrics of all replicas on each node's metrics port; /info has counters",
}


def model_list(models: Sequence[Mapping[str, Any]]) -> Answer:
    """The answer of OpenAI's `GET /v1/models`."""
    return json_answer({"object": "list", "data": models})


def health(live_pools: Mapping[str, bool]) -> dict[str, Any]:
    """One model's health: whether all, some or none of its pools can answer."""
    missing = [name for name, is_live in live_pools.items() if not is_live]
    if len(missing) == len(live_pools):
        return {"status": "unavailable", "missing": missing}
    return {"status": "degraded", "missing": missing} if missing else {"status": "ok"}


class Served(Protocol):
    """The part of a Router that these routes use."""

    @property
    def space(self) -> str:
        """The name of the model's space (`models/space.py`)."""

    @property
    def started(self) -> float:
        """Unix time in seconds."""

    @property
    def live_pools(self) -> Mapping[str, bool]:
        """For each pool that is not closed: whether it has a live replica."""

    @property
    def load(self) -> int:
        """Queries or answers in progress at its replicas, from all Routers."""

    async def hear_replicas(self) -> None:
        """Refresh what the Router knows of each replica."""


class DocumentedApi(Asgi):
    """Serves the OpenAPI document (`_document`), the pages, and `/ping`, which shows that the process lives."""

    _document: Mapping[str, Any]

    async def ping(self, _: HttpRequest) -> Answer:
        return [], b""

    async def version(self, _: HttpRequest) -> Answer:
        """The answer of vLLM and Ollama to `/version`."""
        return json_answer({"version": VERSION})

    async def docs(self, _: HttpRequest) -> Answer:
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"max-age=86400")]
        return headers, await asyncio.to_thread(_swagger_ui)  # it reads two megabytes the first time

    async def page(self, _: HttpRequest) -> Answer:
        """The live page of the service, for a browser."""
        return page()

    async def openapi(self, request: HttpRequest) -> Answer:
        return json_answer({**self._document, "servers": [{"url": request.root or "/"}]})


class ModelApi(DocumentedApi):
    """The routes to one model in one Router replica: those of every service, and `_own_routes`."""

    def __init__(
        self,
        rules: Rules,
        router: Served,
        api_keys: ApiKeys | None,
        observer: Observer | None,
        *,
        emulated: bool,
        has_page: bool,
    ) -> None:
        super().__init__(api_keys, observer, emulated=emulated, has_page=has_page)
        self._rules, self._served = rules, router
        self._space = SPACE.encode(), router.space.encode()
        self._routes: dict[tuple[str, str], Handler] = {
            **self._own_routes(),
            **{("GET", path): self.openai_models for path in MODELS},
            ("GET", "/version"): self.version,
            ("GET", "/load"): self.load,
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.ping,
            ("GET", "/docs"): self.docs,
            ("GET", "/openapi.json"): self.openapi,
            **({("GET", "/"): self.page} if has_page else {}),
        }

    @abstractmethod
    def _own_routes(self) -> dict[tuple[str, str], Handler]:
        """The routes of this kind of model, of its tokenizer, and `/info`."""

    def has(self, method: str, path: str) -> bool:
        """Whether there is such a route."""
        return (method, path) in self._routes

    def has_path(self, path: str) -> bool:
        """Whether there is a route with this path, for any method."""
        return any(known == path for _, known in self._routes)

    async def answer(self, request: HttpRequest) -> Answer:
        """Each answer names the model's space. Raises WrongSpace before the body is read."""
        handler = self._routes.get((request.method, request.path)) or self._rare(request.method, request.path)
        check_space(request.headers, self._served.space)
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

    async def openai_models(self, _: HttpRequest) -> Answer:
        return model_list(self.models)

    async def openai_model(self, name: str, _: HttpRequest) -> Answer:
        self._rules.check_model(name)
        return json_answer(self._model(name))

    @property
    def models(self) -> list[dict[str, Any]]:
        """All names of the model, as OpenAI's `/v1/models` lists them."""
        return [self._model(name) for name in self._rules.names]

    def _model(self, name: str) -> dict[str, Any]:
        started = int(self._served.started)
        return {"id": name, "object": "model", "created": started, "owned_by": "windve", "root": self._rules.model}

    async def load(self, _: HttpRequest) -> Answer:
        """The answer of vLLM's `/load`."""
        await self._served.hear_replicas()
        return json_answer({"server_load": self._served.load})

    async def health(self, _: HttpRequest) -> Answer:
        """Raises Unavailable if no pool can answer, so that load balancers stop using this Router."""
        found = health(self._served.live_pools)
        if found["status"] == "unavailable":
            raise Unavailable(f"no pool can answer now: {NO_REPLICA}")
        return json_answer(found)


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
