"""mosec with sentence-transformers, after mosec's own embedding example: one worker, batches of up to 64."""

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
    # A wait of 1 ms, not the 10 ms of the example: no slower under load, and a lone query does not sit it out.
    server.append_worker(Embedder, max_batch_size=64, max_wait_time=1, timeout=60, route="/v1/embeddings")
    server.run()
