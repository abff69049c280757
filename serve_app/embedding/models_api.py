"""Several models under one URL: selects the model of each request, and describes all models.

The model is the one in the path (`/models/NAME/embed`), or else the one in the body (`model`), or else the first in
the settings that has the route.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.embedding.router import Router
from deployments.errors import InvalidInput
from serve_app.api_keys import ApiKeys
from serve_app.config.models import ByModel
from serve_app.embedding.api import HttpApi, ollama_lists
from serve_app.embedding.document import document
from serve_app.observe.observer import ONE_MODEL, Observer
from serve_app.web.about import ServiceApi
from serve_app.web.asgi import PROBES, Answer, HttpRequest

_PREFIX = "/models/"


class ModelsApi(ServiceApi):
    """The ASGI application of one Router replica with several models."""

    def __init__(
        self, routers: ByModel[Router], api_keys: ApiKeys | None = None, observer: Observer | None = None
    ) -> None:
        settings = routers.first.settings
        super().__init__(api_keys, observer, emulated=settings.emulated, has_page=settings.page)
        self._max_body_bytes = settings.limits.max_body_bytes  # the same for all
        self._apis = routers.each(lambda router: HttpApi(router, api_keys))
        self._document = document([api.served for api in self._apis], api_keys=api_keys is not None)
        self._of_all = {**self._shared_routes, **ollama_lists(self.parts)}

    @property
    def parts(self) -> Sequence[HttpApi]:
        return list(self._apis)

    async def answer(self, request: HttpRequest) -> Answer:
        if request.path.startswith(_PREFIX):
            return await self._enter(request).answer(request)
        method = "GET" if request.method == "HEAD" else request.method
        handler = self._of_all.get((method, request.path))
        return await (handler(request) if handler else (await self._choose(request)).answer(request))

    def route(self, path: str) -> str:
        return self._split(path)[1] if path.startswith(_PREFIX) else path

    def _is_open(self, request: HttpRequest) -> bool:
        """A probe of a model needs no key either. Names that there are not get 401, as all else does."""
        if not request.path.startswith(_PREFIX):
            return super()._is_open(request)
        name, rest = self._split(request.path)
        return request.method in {"GET", "HEAD"} and rest in PROBES and name in self._apis.names

    def _split(self, path: str) -> tuple[str, str]:
        """(the model's name, the rest) of a path with a prefix."""
        rest = path.removeprefix(_PREFIX)
        for name in sorted(self._apis.names, key=len, reverse=True):  # `a/b` before `a`
            if f"{rest}/".startswith(f"{name}/"):
                return name, rest.removeprefix(name) or "/"
        name, _, rest = rest.partition("/")
        return name, f"/{rest}"

    def _enter(self, request: HttpRequest) -> HttpApi:
        """Select the model in the path, and remove its prefix from the path. Raises UnknownModel."""
        name, request.path = self._split(request.path)
        api = self._apis.named(name)
        request.root += _PREFIX + name
        return api

    async def _choose(self, request: HttpRequest) -> HttpApi:
        """Select the model for a path without a prefix. Raises UnknownModel, InvalidInput or BodyTooLarge."""
        if request.path.startswith(ONE_MODEL):
            return self._apis.named(request.path.removeprefix(ONE_MODEL))
        name = await self._named(request) if request.method == "POST" else None
        if name is not None:
            return self._apis.named(name)
        has = [api for api in self._apis if api.has(request.path, request.method)]
        return next(iter(has or [api for api in self._apis if api.has(request.path)]), self._apis.first)

    async def _named(self, request: HttpRequest) -> str | None:
        """The model named in the body, or None. All other checks of the body are left to the route."""
        found = await request.json_object(self._max_body_bytes)
        name = None if found is None else found.get("model")
        if name is None and found is not None and request.path == "/api/show":
            name = found.get("name")  # Ollama's older name of the field
        if name is not None and not isinstance(name, str):
            raise InvalidInput("model must be a string", param="model")
        return name
