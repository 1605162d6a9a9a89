"""Calls with few rows on GPUs: which kernel they take, their results against float64, and the same bits every time."""

import pytest
import torch

import mkernel as mk
from mkernel.ops import all_gather_matmul
from mkernel.ops.reduce import reduce_scatter

pytestmark = pytest.mark.gpu

ROWS = [1, 16, 64, 100, 128, 256]
SIZES = [(1024, 8192), (8192, 1024), (1000, 1032)]  # n, k


def operands(group, m, n, k, turn, dtype):
    generator = torch.Generator().manual_seed(1000 * turn + group.rank)
    a = torch.randn(m, k, generator=generator).to(group.device, dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(group.device, dtype)
    return a, w.t()


def assert_close(found, exact, dtype, size):
    group_eps = torch.finfo(dtype).eps
    bound = group_eps * (exact.abs() + 2 * size)
    assert ((found.double() - exact).abs() <= bound).all(), float(((found.double() - exact).abs() / bound).max())


def gathered(group, m, n, k, dtype):
    for turn in range(3):
        a, b = operands(group, m, n, k, turn, dtype)
        y, again = (mk.all_gather_matmul(a, b, group=group) for _ in range(2))
        group.synchronize()
        parts = group.exchange("rows", a.cpu())
        assert_close(y, torch.cat(parts).to(group.device).double() @ b.double(), dtype, 1)
        assert torch.equal(y, again)


def summed(group, op, m, n, k, dtype):
    rows = m * group.size
    for turn in range(3):
        a, b = operands(group, rows, n, k, turn, dtype)
        own = slice(group.rank * m, (group.rank + 1) * m) if op == "matmul_reduce_scatter" else slice(None)
        bias = torch.linspace(-1, 1, n).to(group.device, dtype)
        residual = torch.linspace(-1, 1, rows * n).view(rows, n).to(group.device, dtype)[own].contiguous()
        y, again = (getattr(mk, op)(a, b, bias=bias, residual=residual, group=group) for _ in range(2))
        group.synchronize()
        products = group.exchange("products", (a.double() @ b.double()).cpu())
        exact = sum(products).to(group.device)[own] + bias.double() + residual.double()
        assert_close(y, exact, dtype, group.size)
        assert torch.equal(y, again)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_gather_matmul(ranks, dtype):
    def on_rank(group):
        for n, k in SIZES:
            for m in ROWS:
                gathered(group, -(-m // group.size), n, k, dtype)
        a, b = operands(group, 4, 1024, 8192, 0, dtype)
        assert all_gather_matmul.explain(a, b, group=group).few_rows

    mk.spawn(on_rank, gpus_per_node=ranks, device="cuda", timeout=30.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums(op, ranks):
    def on_rank(group):
        for n, k in SIZES:
            for m in ROWS:
                summed(group, op, -(-m // group.size), n, k, torch.bfloat16)
        a, b = operands(group, 4 * group.size, 1024, 8192, 0, torch.bfloat16)
        assert reduce_scatter.explain(a, b, group=group).few_rows

    mk.spawn(on_rank, gpus_per_node=ranks, device="cuda", timeout=30.0)


def test_captured_graphs():
    def on_rank(group):
        a, b = operands(group, 4, 1024, 8192, 0, torch.bfloat16)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            mk.all_gather_matmul(a, b, group=group)
        group.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = mk.all_gather_matmul(a, b, group=group)
        for turn in range(5):
            a.copy_(operands(group, 4, 1024, 8192, turn, torch.bfloat16)[0])
            graph.replay()
            group.synchronize()
            assert_close(y, a.double() @ b.double(), torch.bfloat16, 1)

    mk.spawn(on_rank, gpus_per_node=1, device="cuda", timeout=30.0)
