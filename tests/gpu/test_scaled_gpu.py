"""Operators with scales on a GPU: several ranks share it. All recipes, against float64 of what the fp8 stands for, and
torch._scaled_mm beside them."""

import pytest
import torch
from harness import randn

import mkernel as mk

RECIPES = [
    ("TensorWise", "TensorWise"),
    ("RowWise", "RowWise"),
    ("TensorWise", "RowWise"),
    ("BlockWise1x128", "BlockWise128x128"),
]
SHAPES = [
    (256, 512, 256),
    (129, 257, 65),
    (1, 1, 1),
    (7, 131, 8),
    (640, 384, 512),
    (37, 1000, 333),
    (300, 2560, 1024),
    (512, 640, 1040),
]
OPERATORS = (mk.all_gather_scaled_matmul, mk.scaled_matmul_reduce_scatter, mk.scaled_matmul_all_reduce)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores"
)


def quantized(group, m, n, k, recipe, dtype=torch.float8_e4m3fn):
    """Operands, and a and b in float64."""
    a, scale_a = mk.quantize(randn(group, m, k, dtype=torch.float32), recipe[0], dtype=dtype)
    w, scale_w = mk.quantize(randn(group, n, k, dtype=torch.float32, seed=1), recipe[1])
    b, scale_b = w.t(), scale_w.t() if scale_w.dim() else scale_w
    numbers = mk.dequantize(a, scale_a, torch.float64), mk.dequantize(b, scale_b, torch.float64)
    return (a, b, scale_a, scale_b), numbers


def exact_of(group, operator, numbers, fast=False):
    """The result in float64, and how far off it may be: partials and node sums are rounded to bf16, and Hopper's tensor
    cores keep some 13 bits of sums within 128 of k or, if accumulation is fast, within all of k: see
    `fast_accumulation_bound` of the benchmarks."""
    torch.cuda.current_stream().synchronize()
    everyone = [[each.to(group.device) for each in pair] for pair in group.exchange("numbers", numbers)]
    if operator is mk.all_gather_scaled_matmul:
        parts = [(torch.cat([a for a, _ in everyone]), numbers[1])]
    else:
        parts = everyone
    rows = slice(None)
    if operator is mk.scaled_matmul_reduce_scatter:
        share = len(numbers[0]) // group.size
        rows = slice(group.rank * share, (group.rank + 1) * share)
    exact, travelled, size = (
        sum(each(a[rows], b) for a, b in parts)
        for each in (lambda a, b: a @ b, lambda a, b: (a @ b).abs(), lambda a, b: a.abs() @ b.abs())
    )
    group.synchronize()
    return exact, 2**-8 * (2 * travelled + exact.abs()) + (1.6 * 2**-10 if fast else 2**-11) * size


def call_all(group, shape, recipe, hopper=False, **more):
    """Call all operators; hopper: the kernels for Hopper must take the calls."""
    rows, n, k = shape
    for operator in OPERATORS:
        m = rows * group.size if operator is mk.scaled_matmul_reduce_scatter else rows
        operands, numbers = quantized(group, m, n, k, recipe)
        exact, bound = exact_of(group, operator, numbers, more.get("use_fast_accum", False))
        if hopper:
            assert mk.explain(operator.__name__, *operands, **more).hopper
        results = [operator(*operands, **more) for _ in range(4)]  # the last ones are prepared
        group.synchronize()
        for y in results:
            assert y.dtype == torch.bfloat16
            error = (y.double() - exact).abs()
            assert bool((error <= bound).all()), f"{operator.__name__}: {(error - bound).max().item()} over the bound"
            assert torch.equal(y, results[0]), "bits differ"


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_recipes(cluster, recipe):
    def on_rank(group):
        for shape in SHAPES:
            call_all(group, shape, recipe)
            if "Block" not in recipe[0]:
                call_all(group, shape, recipe, use_fast_accum=True)

    mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", timeout=20.0)


# rows of a rank (of the sum, for all_reduce), n, k: large enough for the kernels for Hopper
LARGE = [(1536, 4096, 1040), (2048, 4104, 144), (1536, 3080, 8192)]
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_kernels_for_hopper(gpus, recipe):
    def on_rank(group):
        for shape in LARGE:
            call_all(group, shape, recipe, hopper=True)
            if "Block" not in recipe[0]:
                call_all(group, shape, recipe, hopper=True, use_fast_accum=True)

    mk.spawn(on_rank, gpus_per_node=gpus, device="cuda", timeout=20.0)


@on_hopper
@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("recipe", [RECIPES[1], RECIPES[3]], ids="-".join)
def test_bias_and_residual_in_the_kernels_for_hopper(gpus, recipe):
    def on_rank(group):
        for operator in OPERATORS[1:]:
            rows, n, k = 1536, 4096, 528
            scatters = operator is mk.scaled_matmul_reduce_scatter
            operands, numbers = quantized(group, rows * group.size if scatters else rows, n, k, recipe)
            exact, bound = exact_of(group, operator, numbers)
            bias = torch.linspace(-4, 4, n, device=group.device).bfloat16()
            residual = torch.linspace(-2, 2, rows * n, device=group.device).view(rows, n).bfloat16()
            more = dict(bias=bias, residual=residual)
            assert mk.explain(operator.__name__, *operands, **more).hopper
            y, again = (operator(*operands, **more) for _ in range(2))
            group.synchronize()
            error = (y.double() - exact - bias.double() - residual.double()).abs()
            assert bool((error <= bound + 2**-8 * (bias.abs() + residual.abs()).double()).all())
            assert torch.equal(y, again)

    mk.spawn(on_rank, gpus_per_node=gpus, device="cuda", timeout=20.0)


@on_hopper
@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_that_cannot_run_the_kernels_for_hopper(gpus):
    """The second operand of the last rank is no transposed view: its tiles are as wide, in the portable kernel."""

    def on_rank(group):
        for recipe in RECIPES:
            for operator in OPERATORS[1:]:
                m = 1536 * group.size if operator is mk.scaled_matmul_reduce_scatter else 1536
                (a, b, *scales), numbers = quantized(group, m, 4096, 272, recipe)
                exact, bound = exact_of(group, operator, numbers)
                b = b.contiguous() if group.rank == group.size - 1 else b
                y = operator(a, b, *scales)
                group.synchronize()
                assert bool(((y.double() - exact).abs() <= bound).all())

    mk.spawn(on_rank, gpus_per_node=gpus, device="cuda", timeout=20.0)


@on_hopper
@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_few_rows(gpus, recipe):
    """Rows of all ranks; n, k."""

    def on_rank(group):
        for rows in (1, 16, 64, 100, 128, 256):
            for n, k in ((1024, 8192), (8192, 1024), (1000, 1040)):
                call_all(group, (-(-rows // group.size), n, k), recipe)
                if "Block" not in recipe[0]:
                    call_all(group, (-(-rows // group.size), n, k), recipe, use_fast_accum=True)

    mk.spawn(on_rank, gpus_per_node=gpus, device="cuda", timeout=20.0)


def test_e5m2_and_what_is_gathered():
    def on_rank(group):
        for recipe in RECIPES:
            operands, (a, b) = quantized(group, 129, 257, 400, recipe, torch.float8_e5m2)
            exact, bound = exact_of(group, mk.all_gather_scaled_matmul, (a, b))
            y, rows, scales = mk.all_gather_scaled_matmul(*operands, return_gathered=True)
            group.synchronize()
            assert bool(((y.double() - exact).abs() <= bound).all())
            everyone = torch.cat([each.to(group.device) for each in group.exchange("a", a)])
            assert torch.equal(mk.dequantize(rows, scales, torch.float64), everyone)

    mk.spawn(on_rank, gpus_per_node=4, device="cuda", timeout=20.0)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("recipe", [RECIPES[1], RECIPES[3]], ids="-".join)
def test_rows_that_the_kernel_quantizes(cluster, recipe):
    """Bit for bit what PyTorch quantizes."""

    def on_rank(group):
        for m, n, k in SHAPES:
            for dtype, kind in ((torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float8_e5m2)):
                x = randn(group, m, k, dtype=torch.float32).mul_(2.0 ** torch.randn(m, 1, device=group.device))
                x[0] = 0
                x = x.to(dtype)
                w, scale_w = mk.quantize(randn(group, n, k, dtype=torch.float32, seed=1), recipe[1])
                a, scale_a = mk.quantize(x, recipe[0], dtype=kind)
                expected = mk.all_gather_scaled_matmul(a, w.t(), scale_a, scale_w.t(), return_gathered=True)
                for _ in range(3):
                    found = mk.all_gather_scaled_matmul(
                        x, w.t(), None, scale_w.t(), return_gathered=True, recipe_a=recipe[0], dtype_a=kind
                    )
                    group.synchronize()
                    for one, other in zip(found, expected):
                        assert torch.equal(one.float(), other.float())

    mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", timeout=20.0)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids="-".join)
def test_beside_pytorch(recipe):
    def on_rank(group):
        operands, _ = quantized(group, 512, 768, 1024, recipe)
        scales = [each.contiguous() for each in operands[2:]]
        expected = torch._scaled_mm(*operands[:2], *scales, out_dtype=torch.bfloat16)
        for operator in OPERATORS:
            torch.testing.assert_close(operator(*operands), expected, rtol=2e-2, atol=1e-1)

    mk.spawn(on_rank, gpus_per_node=1, device="cuda", timeout=20.0)
