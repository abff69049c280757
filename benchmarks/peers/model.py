"""The model as each peer but Infinity runs it: sentence-transformers."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sentence_transformers import SentenceTransformer

Vectors = npt.NDArray[np.float32]


class Model:
    """The folder is named by the environment's MODEL, the number format by DTYPE."""

    def __init__(self) -> None:
        kwargs = {"dtype": os.environ["DTYPE"]}
        self._model = SentenceTransformer(os.environ["MODEL"], device="cpu", model_kwargs=kwargs)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """In batches of 32, ordered by length: the library's own way."""
        vectors = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        found: Vectors = vectors.float().numpy()
        return found

    def answer_all(self, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Answers in OpenAI's shape to several requests, as one call of the model."""
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
