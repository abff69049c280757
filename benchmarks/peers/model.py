"""The model with sentence-transformers, as all peers except Infinity run it."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sentence_transformers import SentenceTransformer

Vectors = npt.NDArray[np.float32]


class Model:
    """The environment variable MODEL names the folder, DTYPE the number format."""

    def __init__(self) -> None:
        kwargs = {"dtype": os.environ["DTYPE"]}
        self._model = SentenceTransformer(os.environ["MODEL"], device="cpu", model_kwargs=kwargs)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed in batches of 32, ordered by length, as the library does by default."""
        vectors = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        found: Vectors = vectors.float().numpy()
        return found

    def answer_all(self, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Answer several requests in OpenAI's format with one call of the model."""
        asked = [_texts(body) for body in bodies]
        vectors = iter(self.embed([text for texts in asked for text in texts]))
        return [_answer([next(vectors) for _ in texts]) for texts in asked]


def _texts(body: Any) -> list[str]:
    given = body["input"]
    return [given] if isinstance(given, str) else given


def _answer(vectors: Sequence[Vectors]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector.tolist()} for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": "all-MiniLM-L6-v2"}
