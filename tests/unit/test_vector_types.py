"""Vectors of int8, uint8 and bits: what each number becomes."""

import base64

import numpy as np
import pytest
from sentence_transformers.util import quantize_embeddings

from serve_app.embedding.output_shapes import as_base64, largest, narrow, quantize

UNIT = np.array([[0.6, -0.8, 0, 0]], np.float32)
EIGHT = np.array([[3, -1, 0, 2, -5, 1e-30, -1e-30, 4]], np.float32)


def unit(rows, dimension, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("vectors", "kind", "numbers"),
    [
        (UNIT, "float", [0.6, -0.8, 0, 0]),
        (UNIT, "int8", [76, -102, 0, 0]),  # 127 * 0.6 = 76.2
        (UNIT, "uint8", [204, 26, 128, 128]),
        (UNIT * 7, "int8", [76, -102, 0, 0]),  # of the unit vector, however long it was
        (UNIT * 0, "int8", [0, 0, 0, 0]),
        (np.array([[-1, 0]], np.float32), "int8", [-127, 0]),
        (np.array([[-1, 0]], np.float32), "uint8", [1, 128]),
        (EIGHT, "ubinary", [0b10010101]),
        (EIGHT, "binary", [0b10010101 - 128]),
        (EIGHT[:, :3], "ubinary", [0b10000000]),  # padded
        (np.full((1, 17), 1, np.float32), "ubinary", [255, 255, 128]),
        (np.full((1, 17), -1, np.float32), "binary", [-128, -128, -128]),
    ],
)
def test_each_type(vectors, kind, numbers):
    found = quantize(vectors, kind)
    assert found.tolist() == [pytest.approx(numbers)]
    assert found.dtype == {"float": np.float32, "int8": np.int8, "binary": np.int8}.get(kind, np.uint8)


@pytest.mark.parametrize(("dimension", "most"), [(1, 1), (64, 1), (256, 0.5), (1024, 0.25), (4096, 0.125)])
def test_the_range_of_int8_goes_by_the_dimension(dimension, most):
    assert largest(dimension) == most
    vector = np.zeros((1, dimension), np.float32)
    vector[0, 0] = 1
    assert quantize(vector, "int8")[0, 0] == 127  # what is larger is cut


@pytest.mark.parametrize("kind", ["binary", "ubinary"])
def test_bits_are_those_of_sentence_transformers(kind):
    vectors = unit(50, 100)
    assert np.array_equal(quantize(vectors, kind), quantize_embeddings(vectors, kind))


@pytest.mark.parametrize("dimension", [64, 384, 1024, 4096])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_one_byte_keeps_cosines_at_any_dimension(kind, dimension):
    vectors = unit(40, dimension)
    whole = quantize(vectors, kind).astype(np.float32) - (128 if kind == "uint8" else 0)
    cosines = (whole * vectors).sum(1) / np.linalg.norm(whole, axis=1)
    assert cosines.min() > 0.9995
    products = whole @ whole.T * (largest(dimension) / 127) ** 2
    assert np.allclose(products, vectors @ vectors.T, atol=0.02)  # one scale for all: dot products too


def test_floats_in_base64():
    vector = np.array([1, -2.5, 1 / 3], np.float32)
    little, big = (np.frombuffer(base64.b64decode(as_base64(narrow(vector, "float32", end))), f"{sign}f4")
                   for end, sign in (("native", "<"), ("big", ">")))  # fmt: skip
    assert little.tolist() == big.tolist() == vector.tolist()
    half = np.frombuffer(base64.b64decode(as_base64(narrow(vector, "float16", "little"))), "<f2")
    assert half.tolist() == vector.astype(np.float16).tolist()


@pytest.mark.parametrize("endianness", ["little", "big"])
def test_bfloat16_is_torch_s(endianness):
    import torch

    vector = np.concatenate([unit(1, 1000)[0], np.array([1.00390625, 1.01171875, 0, -0.0], np.float32)])  # ties
    raw = narrow(vector, "bfloat16", endianness).astype("<u2").view(np.int16)
    assert torch.equal(torch.from_numpy(raw).view(torch.bfloat16), torch.from_numpy(vector).to(torch.bfloat16))
