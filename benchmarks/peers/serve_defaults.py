"""An ingress that calls an embedder once per query, as in Ray Serve's documentation, with Serve's defaults. The
embedder does nothing, so this measures the path alone.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of a class's routes as they stand.

from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

_DIMENSION = 384

api = FastAPI()


@serve.deployment(max_ongoing_requests=1000)  # at its default of 5, requests wait in the proxy and back off
class Embedder:
    def __init__(self) -> None:
        vector = np.random.default_rng(0).standard_normal(_DIMENSION)
        self._vector = (vector / np.linalg.norm(vector)).astype(np.float32)

    async def __call__(self, text: str) -> npt.NDArray[np.float32]:
        assert text
        return self._vector


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(api)
class Ingress:
    def __init__(self, embedder: DeploymentHandle[Embedder]) -> None:
        self._embedder = embedder

    @api.get("/ping")
    async def ping(self) -> str:
        return "pong"

    @api.post("/v1/embeddings")
    async def embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        vector = await self._embedder.remote(body["input"])
        data = [{"object": "embedding", "index": 0, "embedding": vector.tolist()}]
        return {"object": "list", "data": data, "model": "nothing"}


def build() -> Application:
    application: Application = Ingress.bind(Embedder.bind())  # type: ignore[attr-defined]
    return application
