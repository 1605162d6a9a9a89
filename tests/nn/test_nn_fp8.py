"""Linear layers in fp8 in the simulator: results and gradients beside float64 of what the fp8 stands for."""

from itertools import chain, product
from typing import NamedTuple

import pytest
import torch
from support.forked_processes import run_ranks
from support.scaled_reference import E4M3, E5M2

import mkernel as mk
from mkernel import nn
from mkernel.nn.fp8 import RECIPES

IN, OUT = 144, 132  # several blocks of 128, with a remainder


class Case(NamedTuple):
    recipe: str
    gradients: torch.dtype | None
    dim: int | None  # the dimension of the sequence that is divided; None: it is not

    @property
    def options(self):
        parallel = dict(sequence_parallel=self.dim is not None, sequence_dim=self.dim or 0)
        its = dict(fp8=self.recipe, fp8_gradients=self.gradients, generator=torch.Generator().manual_seed(7))
        return its | parallel

    def input(self, x):
        """What the input is after it was quantized, in float64; so for the following."""
        return numbers(x, RECIPES[self.recipe][0])

    def weight(self, weight):
        return numbers(weight, RECIPES[self.recipe][1])

    def weight_of_gradient(self, weight):
        if self.gradients is None:
            return self.weight(weight)
        return numbers(weight.t(), RECIPES[self.recipe][1]).t()

    def gradient(self, grad):
        return grad.double() if self.gradients is None else numbers(grad, RECIPES[self.recipe][0], self.gradients)


def close(one, other):
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def numbers(tensor, recipe, dtype=E4M3):
    return mk.dequantize(*mk.quantize(tensor.detach(), recipe, dtype=dtype), torch.float64)


def everyones(group, tensor):
    return [part.double() for part in group.exchange("parts", tensor)]


def random(group, *shape, seed=0):
    """Rows of all sizes, so that a scale of another one shows."""
    generator = torch.Generator().manual_seed(10 * seed + group.rank)
    size = 2.0 ** torch.randint(-2, 3, (*shape[:-1], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * size


def common(*shape, seed=0):
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_column(group, case):
    column = nn.ColumnParallelLinear(IN, OUT * group.size, **case.options)
    shape = (2, 3, IN) if case.dim == 1 else (5, IN)
    x = (common(*shape) if case.dim is None else random(group, *shape)).requires_grad_()
    y = column(x)
    grad = random(group, *y.shape, seed=1)
    y.backward(grad)
    its, weight = case.input(x), case.weight(column.weight)
    whole = its if case.dim is None else torch.cat(everyones(group, its), case.dim)
    close(y, whole @ weight.t() + column.bias.double())
    dx = sum(everyones(group, case.gradient(grad) @ case.weight_of_gradient(column.weight)))
    close(x.grad, dx if case.dim is None else dx.chunk(group.size, case.dim)[group.rank])
    rows = grad.double().movedim(case.dim or 0, 0).flatten(0, -2)
    close(column.weight.grad, rows.t() @ whole.movedim(case.dim or 0, 0).flatten(0, -2))
    close(column.bias.grad, rows.sum(0))
    return y, x.grad, column.weight.grad, column.bias.grad


def check_row(group, case):
    dim = case.dim
    row = nn.RowParallelLinear(OUT * group.size, IN, **case.options)
    shape = (2, 2 * group.size, OUT) if dim else (4 * group.size, OUT)
    x = random(group, *shape).requires_grad_()
    y_shape = [size // group.size if i == dim else size for i, size in enumerate((*shape[:-1], IN))]
    residual = common(*y_shape, seed=3).requires_grad_()
    y = row(x, residual)
    grad = common(*y.shape, seed=4) if dim is None else random(group, *y.shape, seed=1)
    y.backward(grad)
    its = case.input(x)
    total = sum(everyones(group, its @ case.weight(row.weight).t())) + row.bias.double()
    close(y, (total if dim is None else total.chunk(group.size, dim)[group.rank]) + residual.detach().double())
    quantized = case.gradient(grad)
    whole = quantized if dim is None else torch.cat(everyones(group, quantized), dim)
    close(x.grad, whole @ case.weight_of_gradient(row.weight))
    rows = (grad.double() if dim is None else whole).flatten(0, -2)
    close(row.weight.grad, rows.t() @ its.flatten(0, -2))
    close(row.bias.grad, rows.sum(0))
    assert torch.equal(residual.grad, grad)
    return y, x.grad, row.weight.grad, row.bias.grad


CASES = [Case(recipe, gradients, dim) for recipe in RECIPES for gradients in (None, E5M2) for dim in (None, 0, 1)]
CASES.append(Case("BlockWise", E4M3, 0))
CASES.append(Case("RowWise", E4M3, 1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe}-{str(case.gradients)[12:18]}-{case.dim}")
@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 2), marks=pytest.mark.thorough)])
def test_gradients(case, cluster):
    """Results and gradients beside float64; under another schedule, the same bits."""

    def on_rank(group):
        return [each for check in (check_column, check_row) for each in check(group, case)]

    first, second = (
        mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cpu", seed=seed) for seed in (0, 1)
    )
    for one, other in zip(chain(*first), chain(*second), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 3), (2, 2)])
def test_other_worlds(cluster):
    """With blocks, and gradients in fp8."""

    def on_rank(group):
        for dim in (None, 0):
            check_column(group, Case("BlockWise", E5M2, dim))
            check_row(group, Case("BlockWise", E5M2, dim))

    mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cpu")


def test_several_layers_with_one_input():
    """Quantized as one weight; in bf16, with one bias."""
    weights = [common(size, IN, seed=size).bfloat16().requires_grad_() for size in (40, 130)]
    bias = common(130).bfloat16().requires_grad_()

    def on_rank(group):
        x = random(group, 4, IN).bfloat16().requires_grad_()
        apart = nn.functional.column_parallel_linears(x, weights, [None, bias], fp8="RowWise", fp8_gradients=E4M3)
        assert [tuple(y.shape) for y in apart] == [(4 * group.size, 40), (4 * group.size, 130)]
        found = torch.autograd.grad([y.sum() for y in apart], (x, *weights, bias))
        whole = nn.functional.column_parallel_linear(
            x, torch.cat(weights), torch.cat([torch.zeros(40).bfloat16(), bias]), fp8="RowWise", fp8_gradients=E4M3
        )
        assert torch.equal(torch.cat(apart, -1), whole)
        for one, other in zip(found, torch.autograd.grad(whole.sum(), (x, *weights, bias)), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == torch.bfloat16

    mk.spawn(on_rank, gpus_per_node=2, device="cpu")


def test_blocks_of_layers():
    """Blocks, whose column layers have one input, pass it on: close to the same in fp32."""

    def on_rank(group):
        x = random(group, 4, 64).requires_grad_()
        options = dict(fp8="BlockWise", fp8_gradients=E5M2)
        for kind, sizes in ((nn.ParallelSwiGLU, (64, 96)), (nn.ParallelQKV, (64, 4))):
            torch.manual_seed(0)
            plain = kind(*sizes)
            quantized = kind(*sizes, **options)
            quantized.load_state_dict(plain.state_dict())
            found = []
            for module in (plain, quantized):
                ys = module(x)
                ys = torch.cat([y.flatten() for y in (ys if isinstance(ys, tuple) else (ys,))])
                found.append((ys, *torch.autograd.grad(ys.square().sum(), (x, *module.parameters()))))
            for exact, rounded in zip(*found, strict=True):
                error = (rounded - exact).norm() / exact.norm()
                assert 1e-4 < error < 0.2, error

    mk.spawn(on_rank, gpus_per_node=2, device="cpu")


EDGES = {
    "no rows": (dict(shape=(0,)), {}),
    "no rows, not divided": (dict(shape=(2, 0)), dict(sequence_parallel=False)),
    "a vector": (dict(shape=()), dict(sequence_parallel=False)),
    "gradients that are zero": (dict(factor=0.0), {}),
    "gradients that are tiny": (dict(factor=1e-37), dict(sequence_parallel=False)),
    "bf16": (dict(dtype=torch.bfloat16), dict(fp8_gradients=E4M3)),
    "autocast": (dict(cast=True), {}),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge):
    """Gradients of the right shapes and dtypes, which are finite."""
    given, options = EDGES[edge]

    def on_rank(group):
        dtype, cast = given.get("dtype", torch.float32), given.get("cast", False)
        more = dict(dtype=dtype, fp8_gradients=E5M2) | options
        for kind, recipe in product((nn.ColumnParallelLinear, nn.RowParallelLinear), RECIPES):
            layer = kind(64 * group.size, 48 * group.size, fp8=recipe, **more)
            inputs = 64 * (group.size if kind is nn.ColumnParallelLinear else 1)
            x = torch.randn(*given.get("shape", (2 * group.size, 3)), inputs).to(dtype).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                y = layer(x)
            assert y.dtype == (torch.bfloat16 if cast else dtype)
            (y * given.get("factor", 1.0)).sum().backward()
            for tensor in (x, *layer.parameters()):
                assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
                assert tensor.grad.isfinite().all()

    mk.spawn(on_rank, gpus_per_node=2, device="cpu")


def test_layers_are_made_and_shown():
    def on_rank(group):
        plain = torch.nn.Linear(IN, OUT)
        with torch.no_grad():
            torch.manual_seed(1)
            plain.weight.normal_()
        column = nn.ColumnParallelLinear.from_linear(plain, fp8="RowWise")
        assert "fp8='RowWise'" in str(column)
        row = nn.RowParallelLinear(IN, OUT, fp8="BlockWise", fp8_gradients=E5M2)
        assert "fp8='BlockWise', fp8_gradients=torch.float8_e5m2" in str(row)
        with torch.no_grad():
            whole = torch.cat(group.exchange("y", column(torch.ones(2, IN).bfloat16().float())), -1)
        assert whole.shape == (2 * group.size, OUT)
        for wrong in (
            dict(fp8="rows"), dict(save="gathered"), dict(fp8_gradients=torch.bfloat16),
            dict(fp8=None, fp8_gradients=E5M2),
        ):  # fmt: skip
            with pytest.raises(mk.ArgumentError, match="fp8"):
                nn.ColumnParallelLinear(IN, OUT, **(dict(fp8="RowWise") | wrong))

    mk.spawn(on_rank, gpus_per_node=2, device="cpu")


@pytest.mark.parametrize("gradients", [None, E5M2], ids=str)
def test_gradients_of_gradients_are_refused(gradients):
    """Not left out."""

    def on_rank(group):
        for kind in (nn.ColumnParallelLinear, nn.RowParallelLinear):
            layer = kind(64, 64, fp8="RowWise", fp8_gradients=gradients)
            x = torch.ones(4, 64, requires_grad=True)
            dx = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]
            with pytest.raises(RuntimeError, match="once_differentiable"):
                dx.sum().backward()

    mk.spawn(on_rank, gpus_per_node=1, device="cpu")


COMPILED = """
    from support.patience import WAIT
    import torch
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    torch.manual_seed(0)
    up, down = mk.nn.ColumnParallelLinear(64, 96, fp8="RowWise"), mk.nn.RowParallelLinear(96, 64, fp8="BlockWise")
    up.fp8_gradients = down.fp8_gradients = {gradients}
    x = torch.randn(4, 64, requires_grad=True)

    def block(x):
        return down(up(x).relu())

    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        y = function(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, up.weight, up.bias, down.weight, down.bias))])
    for one, other in zip(*results):
        assert torch.equal(one, other)
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("gradients", [None, E5M2], ids=str)
def test_a_compiled_block(gradients):
    """In one graph, with the same bits."""
    for rank, (output, code) in enumerate(run_ranks(COMPILED.format(gradients=gradients), 2)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
