"""`@serve.batch` with sentence-transformers, as Ray Serve's documentation has it, under Serve's defaults."""

from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request

from benchmarks.peers.model import Model


@serve.deployment(
    max_ongoing_requests=1000,  # at its default of 5, no batch is larger
    ray_actor_options={"num_cpus": 2},  # Ray gives PyTorch as many threads
)
class Embedder:
    def __init__(self) -> None:
        self._model = Model()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
    async def embed(self, bodies: list[Any]) -> list[dict[str, Any]]:
        return self._model.answer_all(bodies)

    async def __call__(self, request: Request) -> Any:
        return await self.embed(await request.json())


def build() -> Application:
    application: Application = Embedder.bind()  # type: ignore[attr-defined]
    return application
