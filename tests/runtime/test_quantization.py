"""Quantizing to fp8: which elements share a scale, that nothing overflows, and that PyTorch takes the same numbers."""

from __future__ import annotations

import pytest
import torch
from support.scaled_reference import E4M3, E5M2

import mkernel as mk

RECIPES = ["TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128"]


def values(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * 2 ** torch.randn(shape[:-1] + (1,), generator=generator)).to(
        dtype
    )


@pytest.mark.parametrize(("recipe", "shape"), [
    ("TensorWise", ()), ("RowWise", (200, 1)), ("BlockWise1x128", (200, 3)), ("BlockWise128x128", (2, 3)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_shares_a_scale(recipe, shape, dtype):
    x = values(200, 300)
    narrow, scale = mk.quantize(x, recipe, dtype=dtype)
    assert (narrow.shape, narrow.dtype, scale.shape, scale.dtype) == (x.shape, dtype, shape, torch.float32)
    rows, columns = {"TensorWise": (200, 300), "RowWise": (1, 300), "BlockWise1x128": (1, 128)}.get(recipe, (128, 128))
    most = torch.finfo(dtype).max
    for i in range(0, 200, rows):
        for j in range(0, 300, columns):
            block = x[i : i + rows, j : j + columns]
            its = scale if not shape else scale[i // rows, j // columns if recipe != "RowWise" else 0]
            assert its == block.abs().max() * (1 / most)
            assert narrow[i : i + rows, j : j + columns].float().abs().max() == most


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(recipe, dtype):
    """As close as fp8 is, which has 3 bits behind the first: half of the last is 2^-4. Near zero, half of the smallest
    number."""
    x = values(3, 130, 257, dtype=dtype)
    narrow, scale = mk.quantize(x, recipe)
    back = mk.dequantize(narrow, scale, torch.float64)
    smallest = mk.dequantize(torch.full_like(narrow.float(), 2.0**-9).to(E4M3), scale, torch.float64)
    assert ((back - x.double()).abs() <= 1.001 * torch.maximum(x.double().abs() / 16, smallest / 2)).all()
    assert mk.dequantize(narrow, scale).dtype == torch.float32
    assert mk.dequantize(narrow, scale, torch.bfloat16).dtype == torch.bfloat16


def test_members_of_pytorch_s_enumeration():
    scaling_type = torch.nn.functional.ScalingType
    x = values(4, 130)
    for recipe in RECIPES:
        for one, other in zip(mk.quantize(x, getattr(scaling_type, recipe)), mk.quantize(x, recipe)):
            assert torch.equal(one.float(), other.float())


def test_zeros_and_what_is_not_finite():
    for recipe in RECIPES:
        narrow, scale = mk.quantize(torch.zeros(4, 4), recipe)
        assert (scale == 1).all()
        assert not narrow.float().any()
        narrow, scale = mk.quantize(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]), recipe)
        assert mk.dequantize(narrow, scale)[0, 1].isnan()
        narrow, scale = mk.quantize(torch.tensor([[1.0, float("inf")], [2.0, 3.0]]), recipe, dtype=E5M2)
        assert mk.dequantize(narrow, scale)[0].isnan().all()
    for shape in ((0, 5), (5, 0)):
        for recipe in RECIPES:
            assert mk.quantize(torch.zeros(shape), recipe)[0].shape == shape


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_small_and_large_numbers(dtype):
    """Scales are normal numbers of fp32, and nothing exceeds the largest number of fp8."""
    half = torch.finfo(dtype).eps / 2  # of the last bit
    for largest in (2.0**-149, 1e-42, 1.2e-38, 1e-36, 1.0, 3.4e38):
        x = torch.linspace(-1, 1, 130).mul(largest).reshape(1, -1)
        for recipe in RECIPES:
            narrow, scale = mk.quantize(x, recipe, dtype=dtype)
            assert (scale >= 2.0**-126).all()
            assert narrow.float().isfinite().all()
            off = (mk.dequantize(narrow, scale, torch.float64) - x.double()).abs()
            assert (off <= 1.001 * half * (x.double().abs() + torch.finfo(dtype).smallest_normal * scale.max())).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(2, 2), "BlockWise1x32"), "recipe must be one of TensorWise, RowWise, .* got BlockWise1x32"),
        ((torch.ones(2, 2).int(),), "x must be a tensor of floating-point numbers, got torch.int32"),
        (([1.0],), "got list"),
        ((torch.ones(2), "BlockWise128x128"), "too few dimensions for BlockWise128x128"),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(mk.ArgumentError, match=words):
        mk.quantize(*arguments)


def test_the_dtype_must_be_fp8():
    with pytest.raises(mk.ArgumentError, match=r"dtype must be torch\.float8_e4m3fn or torch\.float8_e5m2"):
        mk.quantize(torch.ones(2), dtype=torch.float16)


@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise"])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_pytorch_multiplies_them(recipe, kind):
    """torch._scaled_mm takes the quantized operands as they are, and so does ours: the same numbers."""
    a, scale_a = mk.quantize(values(48, 64), recipe, dtype=kind)
    w, scale_w = mk.quantize(values(32, 64), recipe)
    scale_b = scale_w.t().contiguous() if scale_w.dim() else scale_w
    expected = torch._scaled_mm(a, w.t(), scale_a, scale_b, out_dtype=torch.float32)

    def on_rank(group):
        return [
            mk.all_gather_scaled_matmul(a, w.t(), scale_a, scale_b, out_dtype=torch.float32),
            mk.scaled_matmul_all_reduce(a, w.t(), scale_a, scale_b, out_dtype=torch.float32),
            mk.scaled_matmul_reduce_scatter(a, w.t(), scale_a, scale_b, out_dtype=torch.float32),
        ]

    exact = mk.dequantize(a, scale_a, torch.float64) @ mk.dequantize(w, scale_w, torch.float64).t()
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-5)
    for y in mk.spawn(on_rank, gpus_per_node=1, device="cpu")[0]:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
