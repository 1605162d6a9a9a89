"""Checks of torch.compile, which a program runs on each of its two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mkernel as mk
from mkernel.runtime.group import current, set_current
from support.gradient_reference import SMALL
from support.registered_checks import Block, K, M, N, tensor

FUNCTIONS = {
    "gather": lambda a, b, **more: mk.all_gather_matmul(a, b, **more),
    "gather a list": lambda a, b, **more: torch.cat(mk.all_gather_matmul(a, [b, b.detach()], **more), 1),
    "scatter": lambda a, b, **more: mk.matmul_reduce_scatter(a, b, **more),
    "reduce": lambda a, b, **more: mk.matmul_all_reduce(a, b, **more),
}


def graphs_made():
    assert not counters["graph_break"], counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def gradients(function, *inputs):
    """The result, and the gradients of the inputs and of the parameters of a module."""
    for each in inputs:
        each.grad = None
    y = function(*inputs)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in inputs if each.requires_grad)]


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def train(model, forward, x):
    """Five steps; their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = forward(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training_a_block(group, backend="aot_eager", blocks=(False, True)):
    """The same loss as without torch.compile, one compilation for all steps. blocks: with a list of matrices, or
    without."""
    x = tensor(M, K, seed=group.rank, grad=False)
    for several in blocks:
        model = Block(group, several)
        expected = train(model, model, x)
        model = Block(group, several)
        losses = train(model, compiled(model, backend), x)
        assert graphs_made() == 1, counters
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
        assert len(set(losses)) == 5, losses  # the parameters have changed


def check_every_operator(group):
    a, b = tensor(group.size * M, K, seed=group.rank), tensor(K, N)
    for function in FUNCTIONS.values():
        for more in ({}, {"config": SMALL}, {"group": group}):
            expected = gradients(lambda a, b: function(a, b, **more), a, b)
            assert_equal(gradients(compiled(lambda a, b: function(a, b, **more)), a, b), expected)
            assert graphs_made() == 1


def check_sizes_that_change(group):
    b = tensor(K, N)
    for name, function in FUNCTIONS.items():
        call = compiled(function, dynamic=True)
        for rows in (2, 3, 5, 8, 13):
            a = tensor(group.size * rows, K, seed=group.rank)
            assert_equal(gradients(call, a, b), gradients(function, a, b))
        assert graphs_made() <= 1, (name, counters)


def check_more_dimensions(group):
    a, w = tensor(2, group.size * M, K, seed=group.rank), tensor(N, K)
    bias, residual = tensor(N), tensor(2, M, N, seed=group.rank)

    def block(a, w, bias, residual):
        y, gathered = mk.all_gather_matmul(a, w.t(), bias=bias, gather_dim=1, return_gathered=True, save="gathered")
        z = mk.matmul_reduce_scatter(a, w.t(), bias=bias, residual=residual, scatter_dim=1, reduce_dtype=torch.float32)
        total = mk.matmul_all_reduce(gathered[0], w.t(), residual=y[0])
        return torch.cat([y.flatten(), z.flatten(), total.flatten(), gathered.flatten()])

    inputs = (a, w, bias, residual)
    assert_equal(gradients(compiled(block), *inputs), gradients(block, *inputs))
    assert graphs_made() == 1


def check_given_results(group):
    """out=, with a bias, which was once left out."""
    a, b, bias = tensor(group.size * M, K, grad=False), tensor(K, N, grad=False), tensor(N, grad=False)
    for function in (mk.all_gather_matmul, mk.matmul_reduce_scatter, mk.matmul_all_reduce):
        expected = function(a, b, bias=bias)
        out = torch.zeros_like(expected)
        y = compiled(lambda a, b, bias, out: function(a, b, bias=bias, out=out))(a, b, bias, out)
        assert_equal([y, out], [expected, expected])
    a, out = tensor(2, M, K, seed=group.rank, grad=False), torch.zeros(2, group.size * M, N)
    rows = out.transpose(0, 1).contiguous().transpose(0, 1)
    y = compiled(lambda a, b, out: mk.all_gather_matmul(a, b, gather_dim=1, out=out))(a, b, rows)
    assert_equal([y, rows], [mk.all_gather_matmul(a, b, gather_dim=1)] * 2)


def check_modes(group):
    """Autocast, checkpoints, and no gradients."""
    a, b = tensor(group.size * M, K, seed=group.rank), tensor(K, N)
    for function in FUNCTIONS.values():

        def cast(a, b):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(a, b)

        def again(a, b):
            return checkpoint(function, a.tanh(), b, use_reentrant=False)

        for each in (cast, again):
            assert_equal(gradients(compiled(each), a, b), gradients(each, a, b))
            assert graphs_made() == 1
        expected = function(a, b).detach()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                y = compiled(function)(a, b)
            assert torch.equal(y, expected)
            assert not y.requires_grad


def check_changes_of_the_current_group(group):
    """A graph belongs to a group: another one is made when the current group changes."""
    a, b = tensor(M, K, seed=group.rank), tensor(K, N)
    call = compiled(FUNCTIONS["gather"])
    alone = group.subset([group.rank])
    for turn in range(2):
        assert call(a, b).shape == (group.size * M, N)
        set_current(alone)
        try:
            y = call(a, b)
            assert y.shape == (M, N), y.shape
            y.sum().backward()
        finally:
            set_current(group)
        assert graphs_made() == 2, (turn, counters)


def check_groups_of_torch(group):
    """Process groups and meshes that are first used in a graph, and several groups in one graph."""
    a, b = tensor(group.size * M, K, seed=group.rank), tensor(K, N)
    everyone = list(range(group.size))
    made = [dist.new_group(everyone), dist.new_group(everyone).group_name, init_device_mesh("cpu", (group.size,))]
    mesh = init_device_mesh("cpu", (1, group.size), mesh_dim_names=("dp", "tp"))
    expected = gradients(FUNCTIONS["gather"], a, b)
    for each in (*made, mesh["tp"]):
        call = compiled(lambda a, b: mk.all_gather_matmul(a, b, group=each))
        assert_equal(gradients(call, a, b), expected)
        assert graphs_made() == 1
        assert current() is group
    alone = group.subset([group.rank])

    def several(a, b):
        y = mk.all_gather_matmul(a, b, group=mesh["tp"])
        z = mk.matmul_all_reduce(y, b.t(), group=mesh["dp"])
        return mk.matmul_reduce_scatter(z, b, group=group) + mk.all_gather_matmul(a, b, group=alone)

    assert_equal(gradients(compiled(several), a, b), gradients(several, a, b))
    assert graphs_made() == 1


def raised(part, kind=mk.ArgumentError):
    return pytest.raises(kind, match=part)


def check_errors(group):
    """A rank that refuses its arguments, or calls something else, when a graph runs."""
    a, b = tensor(group.size * M, K, seed=group.rank), tensor(K, N)
    wrong = tensor(K, N, dtype=torch.float64) if group.rank else b
    for name, function in FUNCTIONS.items():
        if name == "gather a list":
            continue  # refused while it is traced
        call = compiled(function)
        call(a, b)
        with raised("b has dtype" if group.rank else "rank 1 refused its call"):
            call(a, wrong)
        assert_equal(gradients(call, a, b), gradients(function, a, b))
    # what is refused while it is traced, runs without a graph, and is refused there
    bias = torch.ones(N + group.rank)
    with raised("bias must be" if group.rank else "rank 1 refused its call"):
        torch.compile(lambda a, b: mk.all_gather_matmul(a, b, bias=bias), backend="aot_eager")(a, b)
    y = compiled(FUNCTIONS["gather"])(a, b)
    with raised("the same calls in the same order"):
        if group.rank:
            mk.matmul_all_reduce(a, b)
        else:
            y.sum().backward()
    with raised("no group named 'nobody'", mk.MKernelError):
        compiled(lambda a, b: mk.matmul_all_reduce(a, b, group="nobody"))(a, b)


def inductor(group):
    """The same with PyTorch's compiler, which takes long."""
    check_training_a_block(group, "inductor", blocks=(True,))
    a, b = tensor(group.size * M, K, seed=group.rank), tensor(K, N)
    for name, function in FUNCTIONS.items():
        expected = gradients(function, a, b)
        fast = compiled(function, "inductor", mode="reduce-overhead")
        for _ in range(2):
            torch.testing.assert_close(gradients(fast, a, b), expected, rtol=1e-5, atol=1e-5)
        assert graphs_made() == 1, name


def run(group):
    """All checks, in the order in which they are written."""
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            function(group)
            group.barrier()
