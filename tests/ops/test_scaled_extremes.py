"""Operators with scales on values at the edges: NaN, infinity, saturated, rows and blocks of zeros, scales whose
product is no number of fp32, scales in memory that repeats; and torch._scaled_mm beside them, on all ranks' rows."""

from __future__ import annotations

import pytest
import torch
from support.operator_calls import run
from support.scaled_reference import BLOCKS, E4M3, E5M2, ROWS, TENSORS, Quantized, recipe_name

import mkernel as mk

M, N, K = 12, 20, 300  # of each rank; k is two blocks and a rest
CLUSTERS = [(1, 1), (1, 3), (2, 2)]
NAN, INF = float("nan"), float("inf")


def quantized(group, recipe, change=lambda x, w: None, kinds=(E4M3, E4M3)):
    """This rank's operands, quantized of random numbers after they were changed."""
    generator = torch.Generator().manual_seed(group.rank)
    x, w = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    change(x, w)
    (a, scale_a), (w8, scale_w) = mk.quantize(x, recipe[0], dtype=kinds[0]), mk.quantize(w, recipe[1], dtype=kinds[1])
    return a, w8.t(), scale_a, scale_w.t() if scale_w.dim() else scale_w


def with_values(tensor, values):
    """A copy of a tensor of any dtype with some elements replaced."""
    wide = tensor.float()
    for place, value in values.items():
        wide[place] = value
    return wide.to(tensor.dtype)


def not_finite(group, recipe):
    a, b, *scales = quantized(group, recipe)
    return with_values(a, {(3, 7): NAN, (5, K - 1): NAN}), with_values(b, {(130, N - 1): NAN}), *scales


def infinite(group, recipe):
    a, b, *scales = quantized(group, recipe, kinds=(E5M2, E4M3))
    return with_values(a, {(3, 7): INF, (5, K - 1): -INF, (6, 0): INF, (6, 1): NAN}), b, *scales


def no_number_for_a_scale(group, recipe):
    a, b, scale_a, scale_b = quantized(group, recipe)
    return a, b, with_values(scale_a, {(2, scale_a.shape[1] - 1): NAN}), scale_b


def infinite_before(group, recipe):
    """Of an infinity, quantizing makes NaN of all elements that share its scale."""
    return quantized(group, recipe, lambda x, w: x[:, 130].copy_(torch.tensor([INF] + [1.0] * (M - 1))))


def saturated(group, recipe):
    """Products of the largest numbers: 1e12 and more, of which float16 has none."""

    def change(x, w):
        x.sign_().mul_(57344.0)
        w.fill_(-448.0)

    return quantized(group, recipe, change, kinds=(E5M2, E4M3))


def zeros(group, recipe):
    """A row, a block of a row, all of a column, a block of columns."""

    def change(x, w):
        x[2] = 0
        x[4, 128:256] = 0
        w[:, :128] = 0
        w[3] = 0

    return quantized(group, recipe, change)


def all_zeros(group, recipe):
    return quantized(group, recipe, lambda x, w: (x.zero_(), w.zero_()))


def zero_scales(group, recipe):
    a, b, scale_a, scale_b = quantized(group, recipe)
    return a, b, scale_a * 0, scale_b


def repeated_scales(group, recipe):
    """One scale in memory, in the shape of all."""
    a, b, scale_a, scale_b = quantized(group, recipe)
    return a, b, torch.tensor([[0.5]]).expand(scale_a.shape), torch.tensor([[0.25]]).expand(scale_b.shape)


CASES = [
    not_finite, infinite, no_number_for_a_scale, infinite_before, saturated, zeros, all_zeros, zero_scales,
    repeated_scales,
]  # fmt: skip


def call_all(group, operands, **more):
    """The results of the three operators, in fp32 unless another dtype is asked for: (gathered, sum, part of it)."""
    more.setdefault("out_dtype", torch.float32)
    return [
        mk.all_gather_scaled_matmul(*operands, **more),
        mk.scaled_matmul_all_reduce(*operands, **more, reduce_dtype=torch.float32),
        mk.scaled_matmul_reduce_scatter(*operands, **more, reduce_dtype=torch.float32),
    ]


def exact_of(group, operands):
    """The same in float64, and the sums of the absolute values of what was added."""
    a, b, scale_a, scale_b = operands
    rows, columns = mk.dequantize(a, scale_a, torch.float64), mk.dequantize(b, scale_b, torch.float64)
    everyone = torch.cat(group.exchange("rows", rows))
    own = slice(group.rank * (M // group.size), (group.rank + 1) * (M // group.size))
    found = []
    for sign in (lambda x: x, torch.abs):
        total = sum(group.exchange("product", sign(rows) @ sign(columns)))
        found.append([sign(everyone) @ sign(columns), total, total[own]])
    return zip(*found)


def assert_close(y, exact, size):
    """NaN and infinities in the same places; everything else within the bound of sums in fp32."""
    expected = exact.to(y.dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert torch.equal(y[y.isinf()], expected[y.isinf()])
    finite = expected.isfinite()
    bound = (K + 12) * 2**-24 * size + torch.finfo(y.dtype).eps * exact.abs()
    assert bool(((y.double() - exact).abs() <= bound)[finite].all())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("recipe", [ROWS, BLOCKS], ids=recipe_name)
def test_edges(case, recipe):
    def work(group):
        operands = case(group, recipe)
        for y, (exact, size) in zip(call_all(group, operands), exact_of(group, operands)):
            assert_close(y, exact, size)

    for cluster in CLUSTERS:
        run(work, cluster=cluster)


def test_a_result_may_overflow():
    """As float64 rounded to float16 does."""

    def work(group):
        operands = quantized(group, ROWS, lambda x, w: x.mul_(2e3))
        for y, (exact, _) in zip(call_all(group, operands, out_dtype=torch.float16), exact_of(group, operands)):
            near = (exact.abs() - 65504).abs() < 100  # either way
            assert torch.equal((y.isinf() | near), exact.to(torch.float16).isinf() | near)
            assert y.isinf().any()

    run(work, cluster=(1, 3))


@pytest.mark.parametrize(("of_a", "of_b"), [(1e-25, 1e-16), (1e24, 1e16)])
def test_scales_whose_product_is_no_number(of_a, of_b):
    """The result is one."""

    def work(group):
        a, b, scale_a, scale_b = quantized(group, ROWS)
        if of_a > 1:
            a, b = [(each.float() / 448 * 2**-7).to(E4M3) for each in (a, b)]
        operands = a, b, scale_a * 448 * of_a, scale_b * 448 * of_b
        for y, (exact, size) in zip(call_all(group, operands), exact_of(group, operands)):
            assert exact.abs().max() < 3e38
            assert_close(y, exact, size + 1e-38)

    run(work, cluster=(1, 3))


@pytest.mark.parametrize("recipe", [TENSORS, ROWS], ids=recipe_name)
@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 48, 80), (17, 32, 272)])
def test_beside_pytorch(recipe, shape):
    """torch._scaled_mm of everyone's rows; partials, of everyone's products."""
    m, n, k = shape
    how = Quantized(recipe, (E5M2, E4M3))

    def library(a, b, scale_a, scale_b):
        scales = scale_a.contiguous(), scale_b.contiguous()
        return torch._scaled_mm(a.contiguous(), b, *scales, out_dtype=torch.float32).double()

    def work(group):
        operands = how.rows(m, k, (group.rank,)), how.columns(k, n, (group.rank,))
        (a, b), (scale_a, scale_b) = zip(*operands)
        everyone = group.exchange("rows", operands[0])
        gathered = torch.cat([library(its, b, its_scale, scale_b) for its, its_scale in everyone])
        total = sum(group.exchange("products", library(a, b, scale_a, scale_b)))
        sizes = [mk.dequantize(each, scale, torch.float64).abs() for each, scale in operands]
        everyones = torch.cat(group.exchange("sizes", sizes[0])) @ sizes[1]
        found = mk.all_gather_scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32)
        assert_close(found, gathered, everyones)
        found = mk.scaled_matmul_all_reduce(a, b, scale_a, scale_b, out_dtype=torch.float32)
        assert_close(found, total, sum(group.exchange("size", sizes[0] @ sizes[1])))

    for cluster in CLUSTERS[1:]:
        run(work, cluster=cluster)


@pytest.mark.parametrize("recipe", ["RowWise", "BlockWise1x128"])
def test_one_row_with_more_dimensions(recipe):
    """As in decoding: [1, 1, k] has a scale of shape [1, 1, 1]."""

    def work(group):
        x, w = torch.ones(1, 1, 96) * (1 + group.rank), torch.ones(5, 96)
        a, scale_a = mk.quantize(x, recipe)
        b, scale_b = mk.quantize(w, "RowWise" if recipe == "RowWise" else "BlockWise128x128")
        given = a, b.t(), scale_a, scale_b.t()
        gathered, total = mk.all_gather_scaled_matmul(*given), mk.scaled_matmul_all_reduce(*given)
        assert torch.equal(gathered, torch.tensor([96.0, 192.0]).bfloat16().view(2, 1, 1).expand(2, 1, 5))
        assert torch.equal(total, torch.full((1, 1, 5), 288.0).bfloat16())

    run(work, cluster=(1, 2))
