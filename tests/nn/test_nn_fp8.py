"""Linear layers in fp8 in the simulator: results and gradients beside float64 of what the fp8 stands for."""

import pytest
import torch
from support.forked_processes import run_ranks

import mkernel as mk
from mkernel import nn
from mkernel.nn.fp8 import RECIPES

IN, OUT = 144, 260  # several blocks of 128, with remainders


def close(one, other):
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def numbers(tensor, recipe):
    """What a tensor is after it was quantized, in float64."""
    return mk.dequantize(*mk.quantize(tensor.detach(), recipe), torch.float64)


def everyones(group, tensor):
    return [part.double() for part in group.exchange("parts", tensor)]


def random(group, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * seed + group.rank))


def check_column(group, recipe, dim):
    of_x, of_weight = RECIPES[recipe]
    column = nn.ColumnParallelLinear(IN, OUT, fp8=recipe, sequence_dim=dim)
    x = random(group, *((5, IN) if dim == 0 else (2, 3, IN))).requires_grad_()
    y = column(x)
    grad = random(group, *y.shape, seed=1)
    y.backward(grad)
    xs, weight = everyones(group, numbers(x, of_x)), numbers(column.weight, of_weight)
    whole = torch.cat(xs, dim)
    close(y, whole @ weight.t() + column.bias.double())
    close(x.grad, sum(everyones(group, grad.double() @ weight)).chunk(group.size, dim)[group.rank])
    rows = grad.double().movedim(dim, 0).flatten(0, -2)
    close(column.weight.grad, rows.t() @ whole.movedim(dim, 0).flatten(0, -2))
    close(column.bias.grad, rows.sum(0))


def check_row(group, recipe, dim):
    """dim: the dimension of the sequence that is divided; None: it is not."""
    of_x, of_weight = RECIPES[recipe]
    features = 132 * group.size
    row = nn.RowParallelLinear(features, OUT, fp8=recipe, sequence_parallel=dim is not None, sequence_dim=dim or 0)
    shape = (4 * group.size, 132) if not dim else (2, 2 * group.size, 132)
    x = random(group, *shape).requires_grad_()
    y_shape = [size // group.size if i == dim else size for i, size in enumerate((*shape[:-1], OUT))]
    common = torch.randn(y_shape, generator=torch.Generator().manual_seed(3))
    residual = common.clone().requires_grad_()
    y = row(x, residual)
    grad = common + 1 if dim is None else random(group, *y.shape, seed=1)
    y.backward(grad)
    its, weight = numbers(x, of_x), numbers(row.weight, of_weight)
    total = sum(everyones(group, its @ weight.t())) + row.bias.double()
    close(y, (total if dim is None else total.chunk(group.size, dim)[group.rank]) + common.double())
    whole = grad.double() if dim is None else torch.cat(everyones(group, grad), dim)
    close(x.grad, whole @ weight)
    close(row.weight.grad, whole.flatten(0, -2).t() @ its.flatten(0, -2))
    close(row.bias.grad, whole.flatten(0, -2).sum(0))
    assert torch.equal(residual.grad, grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 2), marks=pytest.mark.thorough)])
def test_gradients(recipe, cluster):
    def on_rank(group):
        for dim in (0, 1):
            check_column(group, recipe, dim)
        for dim in (None, 0, 1):
            check_row(group, recipe, dim)

    mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cpu")


def test_layers_are_made_and_shown():
    def on_rank(group):
        plain = torch.nn.Linear(IN, OUT)
        with torch.no_grad():
            torch.manual_seed(1)
            plain.weight.normal_()
        column = nn.ColumnParallelLinear.from_linear(plain, fp8="RowWise")
        assert "fp8='RowWise'" in str(column)
        assert "fp8='BlockWise'" in str(nn.RowParallelLinear(IN, OUT, fp8="BlockWise"))
        with torch.no_grad():
            whole = torch.cat(group.exchange("y", column(torch.ones(2, IN).bfloat16().float())), -1)
        assert whole.shape == (2 * group.size, OUT)
        for wrong in (dict(fp8="rows"), dict(sequence_parallel=False), dict(save="gathered")):
            with pytest.raises(mk.ArgumentError, match="fp8"):
                nn.ColumnParallelLinear(IN, OUT, **(dict(fp8="RowWise") | wrong))

    mk.spawn(on_rank, gpus_per_node=2, device="cpu")


COMPILED = """
    from support.patience import WAIT
    import torch
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    torch.manual_seed(0)
    up, down = mk.nn.ColumnParallelLinear(64, 96, fp8="RowWise"), mk.nn.RowParallelLinear(96, 64, fp8="BlockWise")
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
def test_a_compiled_block():
    """In one graph, with the same bits."""
    for rank, (output, code) in enumerate(run_ranks(COMPILED, 2)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
