"""LitServe with sentence-transformers, following its documentation: one worker, batches of up to MAX_BATCH (64).
Requests that wait longer than TIMEOUT_S (60) are dropped.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import litserve

from benchmarks.peers.model import Model


class Embedder(litserve.LitAPI):  # type: ignore[misc] # not installed here
    def setup(self, device: str) -> None:
        assert device == "cpu"
        self._model = Model()

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, bodies: list[Any]) -> list[dict[str, Any]]:
        return self._model.answer_all(bodies)

    def unbatch(self, output: list[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    batch, timeout_s = int(os.environ.get("MAX_BATCH", "64")), float(os.environ.get("TIMEOUT_S", "60"))
    api = Embedder(max_batch_size=batch, batch_timeout=0.001, api_path="/v1/embeddings")
    server = litserve.LitServer(api, accelerator="cpu", timeout=timeout_s)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
