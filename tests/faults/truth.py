"""What the service must answer to a text: the emulated engine's vector of these tokens, computed here on its own."""

import zlib

import numpy as np
from tokenizers import Tokenizer

from benchmarks.kit.arrivals import LONGEST
from benchmarks.kit.texts import model_folder

DIMENSION = 384
_KINDS = 9973  # so many different vectors there are


class Truth:
    def __init__(self):
        self._tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(LONGEST)

    def vector(self, text: str) -> np.ndarray:
        """float32 [384], a unit vector."""
        ids = np.array(self._tokenizer.encode(text).ids, dtype=np.int32)
        seed = zlib.crc32(ids.tobytes()) % _KINDS
        vector = np.cos((seed + 1) * np.arange(1, DIMENSION + 1) * 1e-3)
        return vector / np.linalg.norm(vector)

    def agrees(self, texts: list[str], vectors: object) -> bool:
        """Whether there is one right vector for each text, in their order."""
        try:
            found = np.array(vectors, dtype=np.float32)
        except (TypeError, ValueError):
            return False
        if found.shape != (len(texts), DIMENSION):
            return False
        return all(np.allclose(one, self.vector(text), atol=1e-4) for one, text in zip(found, texts, strict=True))
