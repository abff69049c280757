"""The products in C beside float64, in every form that this processor runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.kernels import packed_products
from deployments.generation.kernels.packed_products import PackedDense, PackedProducts, forms, products_for
from tests.kit.packed_models import EXACT

CPU = EXACT.device
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1 / 128}  # of numbers of about 1; bfloat16 rounds what comes out
FORMS = [(form, dtype) for dtype in NEAR for form in forms(dtype)]
built = pytest.mark.skipif(not FORMS, reason="not built (python setup.py build_ext --inplace), or not for this CPU")


def numbers(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found, wanted):
    return (found.double() - wanted).abs().max() <= NEAR[found.dtype] * max(1, wanted.abs().max())


@built
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 200),
    outputs=st.integers(1, 200),
    with_bias=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**20),
)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_each_form_is_float64s(form, dtype, rows, width, outputs, with_bias, strided, seed):
    x = numbers(rows, 2 * width, dtype=dtype, seed=seed)
    x = x[:, :width] if strided else x[:, :width].contiguous()
    weights = [width**-0.5 * numbers(outputs, width, dtype=torch.float32, seed=seed + i) for i in (1, 2)]
    gate, up = (weight.to(dtype) for weight in weights)
    bias = numbers(outputs, dtype=dtype, seed=seed + 3) if with_bias else None
    residual = numbers(rows, outputs, dtype=dtype, seed=seed + 4)
    added = 0 if bias is None else bias.double()
    one = x.double() @ gate.double().T + added
    dense = PackedDense(form, gate, biases=(bias,))
    assert near(dense(x), one)
    assert near(dense.plus(x, residual), one + residual.double())
    gated = PackedDense(form, gate, up, biases=(None, bias))
    assert near(gated(x), functional.silu(one - added) * (x.double() @ up.double().T + added))


@built
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_large_numbers_stay_and_nan_stays_in_its_row(form, dtype):
    x = torch.full((33, 40), 100.0, dtype=dtype)
    gate, up = torch.full((5, 40), -100.0, dtype=dtype), torch.ones(5, 40, dtype=dtype)
    assert PackedDense(form, gate, up)(x).abs().max() < 1e-20  # silu of -400,000
    assert PackedDense(form, -gate, up)(x).float().sub(1.6e9).abs().max() <= 1.6e9 / 128
    x[7] = torch.nan
    assert PackedDense(form, gate)(x).isnan().any(1).nonzero().flatten().tolist() == [7]


@built
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_any_number_of_threads_computes_the_same(form, dtype):
    x, weight = numbers(40, 96, dtype=dtype, seed=0), numbers(1000, 96, dtype=dtype, seed=1)
    dense, found = PackedDense(form, weight), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(dense(x))
    assert all(one.equal(found[0]) for one in found)


@built
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_by_name_they_are_torchs(activation):
    """Also of activations that the C file does not have."""
    tensors = {f"{name}.weight": numbers(50, 30, dtype=torch.float32, seed=at) for at, name in enumerate("abc")}
    tensors["b.bias"] = numbers(50, dtype=torch.float32, seed=9)
    weights = Weights(tensors, tensors.__getitem__, EXACT)
    x, found = numbers(9, 30, dtype=torch.float32, seed=7), []
    for products in (TorchProducts(), PackedProducts(forms(torch.float32)[0])):
        dense = products.dense(weights, "b", scales=(0.5,))
        gated = products.gated(weights, "a", "b", activation)
        found.append(torch.cat([dense(x), gated(x), products.dense(weights, "c").plus(x, dense(x))], 1))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)


def test_torch_computes_what_they_do_not(monkeypatch):
    for place in (Place(CPU, torch.float16), Place(torch.device("cuda"), torch.float32)):
        assert isinstance(products_for(place), TorchProducts)
    for quicker in (True, False):
        monkeypatch.setattr(packed_products, "is_quicker_packed", lambda *_, quicker=quicker: quicker)
        assert isinstance(products_for(EXACT), TorchProducts) == (not quicker or not forms(torch.float32))
