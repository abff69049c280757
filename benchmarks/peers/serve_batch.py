"""`@serve.batch` with sentence-transformers, following Ray Serve's documentation, with Serve's defaults: batches of up
to MAX_BATCH (64). MAX_ONGOING and MAX_QUEUED bound what is at the replica and what waits for it: Serve's backpressure.
"""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request

from benchmarks.peers.model import Model


@serve.deployment(
    max_ongoing_requests=int(os.environ.get("MAX_ONGOING", "1000")),  # at its default of 5, no batch is larger
    max_queued_requests=int(os.environ.get("MAX_QUEUED", "-1")),  # -1, its default: any number
    ray_actor_options={"num_cpus": 2},  # Ray gives PyTorch as many threads
)
class Embedder:
    def __init__(self) -> None:
        self._model = Model()

    @serve.batch(max_batch_size=int(os.environ.get("MAX_BATCH", "64")), batch_wait_timeout_s=0.001)
    async def embed(self, bodies: list[Any]) -> list[dict[str, Any]]:
        return self._model.answer_all(bodies)

    async def __call__(self, request: Request) -> Any:
        return await self.embed(await request.json())


def build() -> Application:
    application: Application = Embedder.bind()  # type: ignore[attr-defined]
    return application
