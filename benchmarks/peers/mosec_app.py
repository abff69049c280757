"""mosec with sentence-transformers, following its embedding example: one worker, batches of up to MAX_BATCH (64)."""

import os
from typing import Any

from mosec import Server, Worker

from benchmarks.peers.model import Model


class Embedder(Worker):  # type: ignore[misc] # mosec is not typed, and not installed here
    def __init__(self) -> None:
        self._model = Model()

    def forward(self, data: list[Any]) -> list[dict[str, Any]]:
        return self._model.answer_all(data)


if __name__ == "__main__":
    server = Server()
    # Wait 1 ms instead of the example's 10 ms: it is no slower under load, and a lone query waits less.
    batch = int(os.environ.get("MAX_BATCH", "64"))
    server.append_worker(Embedder, max_batch_size=batch, max_wait_time=1, timeout=60, route="/v1/embeddings")
    server.run()
