"""The linear layers in the simulator, beside torch.nn.Linear in float64."""

import pytest
import torch
from support.nn_reference import FEATURES, LINEARS, WORLDS, Linear, assert_within, values

import mkernel as mk
from mkernel import nn


@pytest.mark.parametrize(
    ("nodes", "gpus"),
    [pytest.param(*world, marks=() if world in ((1, 2), (2, 2)) else pytest.mark.thorough) for world in WORLDS],
)
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_gradients(nodes, gpus, case):
    mk.spawn(case.check, True, nodes=nodes, gpus_per_node=gpus, device="cpu")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_all_output_features_on_every_rank(sequence_parallel):
    plain = Linear("column").plain().double()
    x = values(12, FEATURES[0], seed=1)

    def on_rank(group):
        torch.manual_seed(7)
        module = nn.ColumnParallelLinear(*FEATURES, sequence_parallel=sequence_parallel, gather_output=True)
        with torch.no_grad():
            return module(x.chunk(group.size)[group.rank] if sequence_parallel else x)

    exact, magnitude = plain(x.double()), x.double().abs() @ plain.weight.abs().t() + plain.bias.abs()
    results = mk.spawn(on_rank, nodes=1, gpus_per_node=3, device="cpu")
    for result in results:
        assert_within(result, exact.detach(), magnitude.detach(), FEATURES[0])
        assert torch.equal(result, results[0])


def test_autocast():
    """As F.linear: products in the dtype of autocast."""

    def on_rank(group):
        column = nn.ColumnParallelLinear(*FEATURES)
        row = nn.RowParallelLinear(FEATURES[1], FEATURES[0])
        replicated = nn.ColumnParallelLinear(*FEATURES, sequence_parallel=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(4, FEATURES[0])
            y = column(x)
            return y.dtype, row(y).dtype, replicated(x).dtype

    assert set(mk.spawn(on_rank, device="cpu")) == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (2, "sequence_dim must be a dimension of x, which has 2 of them; got 2"),
        (-3, "sequence_dim must be a dimension of x, which has 2 of them; got -3"),
        (1, r"sequence_dim must not be the last dimension of x, shape \(4, 24\)"),
        (-1, "sequence_dim must not be the last dimension of x"),
    ],
)
@pytest.mark.parametrize("kind", [nn.ColumnParallelLinear, nn.RowParallelLinear])
def test_a_dimension_that_is_not_the_sequence(dim, message, kind):
    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=message):
            kind(24, 24, sequence_dim=dim)(torch.randn(4, 24))

    mk.spawn(on_rank, nodes=1, gpus_per_node=1, device="cpu")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_results_may_be_overwritten(sequence_parallel):
    """As by nn.ReLU(inplace=True), which the backward pass must see."""

    def on_rank(group):
        common = dict(sequence_parallel=sequence_parallel)
        modules = [
            nn.ColumnParallelLinear(24, 36, **common),
            nn.ParallelQKV(24, 12, **common),
            nn.RowParallelLinear(36, 24),
        ]
        gradients = []
        for relu in (torch.relu, torch.relu_):
            x = values(12, 24, seed=1).requires_grad_()
            y = relu(modules[0](x))
            query, _, _ = modules[1](x)
            (relu(query).sum() + relu(modules[2](y)).sum()).backward()
            gradients.append([x.grad, *(each.weight.grad for each in (modules[0], modules[1].q_proj, modules[2]))])
            for module in modules:
                module.zero_grad()
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))

    mk.spawn(on_rank, device="cpu")


def test_what_needs_no_gradient_gets_none():
    def on_rank(group):
        module = nn.ColumnParallelLinear(24, 36, sequence_parallel=False)
        x = values(12, 24, seed=1)
        module.weight.requires_grad_(False)
        module(x.requires_grad_()).sum().backward()
        assert module.weight.grad is None
        assert module.bias.grad is not None
        module.bias.grad = None
        y = module(x.detach())  # no sum over the ranks, either
        y.sum().backward()
        assert (module.bias.grad == 12).all()

    mk.spawn(on_rank, device="cpu")
