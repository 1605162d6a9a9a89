"""Checks of the registered operators, which a program runs on each of its ranks."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mkernel as mk
from mkernel.ops.library import encoded, registered
from support.gradient_reference import GATHER, REDUCE, SCATTER, SMALL

M, K, N = 4, 8, 6


def tensor(*shape, seed=0, grad=True, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_(grad)


def calls(group):
    """Every registered operator that has a gradient or fills a given tensor, with arguments of all kinds."""
    name, size = group.group_name, group.size
    a, b, w = tensor(M, K, seed=group.rank), tensor(K, N), tensor(N, K)
    plain, out = (a.detach(), b.detach()), torch.zeros(size * M, N)
    tall, bias, residual = tensor(size * M, K, seed=group.rank), tensor(N), tensor(M, N, seed=group.rank)
    config = encoded(SMALL)
    return [
        (GATHER, "", (a, b, name)),
        (GATHER, "", (a, w.t(), name, config)),
        (GATHER, "_gathered", (a, b, name)),
        (GATHER, "_list", (a, [b, w.t()], name, "sharded", False, None)),
        (GATHER, "_list", (a, [w[:2].t(), w[2:].t()], name, "sharded", True, None)),
        (GATHER, "_list", (a, [b], name, "gathered", False, config)),
        (GATHER, "_weight_grad", (a, tensor(size * M, N), False, name)),
        (GATHER, "_weight_grad", (a, tensor(size * M, N), True, name)),
        (GATHER, "_out", (*plain, name, True, None, out)),
        (GATHER, "_out", (*plain, name, False, config, out)),
        (SCATTER, "", (tall, b, bias, residual, name, None)),
        (SCATTER, "", (tall, w.t(), None, None, name, torch.float32, config)),
        (SCATTER, "_out", (tall.detach(), b.detach(), None, None, name, None, None, out[:M])),
        (REDUCE, "", (a, b, bias, tensor(M, N), name, None)),
        (REDUCE, "", (a, w.t(), None, None, name, torch.float32, False, config)),
        (REDUCE, "_each", (a, name)),
        (REDUCE, "_out", (*plain, None, None, name, None, True, None, out[:M])),
    ]


def check_every_operator_is_here(group):
    """What is registered for these operators is what `calls` calls."""
    checked = {operator + variant for operator, variant, _ in calls(group)}
    for operator in (GATHER, SCATTER, REDUCE):
        registered(operator)
    everything = {each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith("mkernel::")}
    found = {name.removeprefix("mkernel::") for name in everything}
    assert checked == {name for name in found if name.startswith((GATHER, SCATTER, REDUCE))}, found


def check_opcheck(group):
    for operator, variant, arguments in calls(group):
        outcome = torch.library.opcheck(registered(operator, variant).default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, (operator, variant, outcome)


def check_fake_tensors(group):
    """The same shapes, strides and dtypes as on real tensors, with no call on the group, and a backward pass."""
    layouts = []
    for fake in (False, True):
        torch.manual_seed(0)
        exchanges = group._exchanges
        with FakeTensorMode(allow_non_fake_inputs=False) if fake else torch.enable_grad():
            layouts.append([layout(each) for each in results(group)])
        assert not fake or group._exchanges == exchanges, "a fake call has talked to other ranks"
    assert layouts[0] == layouts[1]


def layout(result):
    return tuple(result.shape), result.stride(), result.dtype, result.requires_grad


def results(group):
    """Results and gradients of the public functions."""
    a, w = torch.randn(2, M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    bias = torch.randn(N, requires_grad=True)
    tall = torch.randn(2, group.size * M, K, requires_grad=True)
    ys, gathered = mk.all_gather_matmul(a, [w.t(), w.t()], gather_dim=1, return_gathered=True)
    found = [
        *ys, gathered,
        mk.all_gather_matmul(a, w.t(), bias=bias, gather_dim=1, save="gathered"),
        mk.matmul_reduce_scatter(tall, w.t(), bias=bias, residual=torch.randn(2, M, N), scatter_dim=1),
        mk.matmul_all_reduce(a, w.t(), bias=bias),
        mk.matmul_all_reduce(a[0, 0], w.t()),
    ]  # fmt: skip
    loss = sum(y.sum() for y in found)
    loss.backward()
    with torch.no_grad():
        for function, rows in ((mk.all_gather_matmul, a[0]), (mk.matmul_reduce_scatter, tall[0])):
            y = function(rows, w.t(), bias=bias)
            found += [y, function(rows, w.t(), bias=bias, out=torch.empty_like(y))]
    return [*found, a.grad, w.grad, bias.grad, tall.grad]


def check_fake_tensors_are_checked(group):
    for function in (mk.all_gather_matmul, mk.matmul_reduce_scatter, mk.matmul_all_reduce):
        for a, b, part in [
            (torch.empty(M, K), torch.empty(K + 1, N), "must be b's rows"),
            (torch.empty(M, K), torch.empty(K, N, dtype=torch.float16), "b has dtype"),
            (torch.empty(M, K), torch.empty(K), "b must have 2 dimensions"),
        ]:
            with FakeTensorMode() as mode, pytest.raises(mk.ArgumentError, match=part):
                function(mode.from_tensor(a), mode.from_tensor(b))


class Block(torch.nn.Module):
    """Two layers that are sharded over the ranks of a group."""

    def __init__(self, group, several=False):
        super().__init__()
        generator = torch.Generator().manual_seed(group.rank)
        self.up, self.gate = (torch.nn.Parameter(torch.randn(N, K, generator=generator)) for _ in range(2))
        self.down = torch.nn.Parameter(torch.randn(K, N, generator=generator))
        self.group, self.several = group, several

    def forward(self, x):
        if self.several:
            up, gate = mk.all_gather_matmul(x, [self.up.t(), self.gate.t()], group=self.group)
            hidden = up * gate.sigmoid()
        else:
            hidden = mk.all_gather_matmul(x, self.up.t(), group=self.group).sigmoid()
        return x + mk.matmul_reduce_scatter(hidden, self.down.t(), group=self.group)


def check_export(group):
    x = tensor(M, K, seed=group.rank, grad=False)
    for several in (False, True):
        model = Block(group, several)
        with torch.no_grad():
            y = model(x)
            for strict in (False, True):
                rows = {0: torch.export.Dim("rows", min=2, max=64)}
                for shapes in (None, {"x": rows}):
                    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)
                    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
                    assert sum(name.startswith("mkernel.") for name in names) == 2, names
                    assert torch.equal(program.module()(x), y)
                twice = torch.cat([x, x])
                assert torch.equal(program.module()(twice), model(twice))


def run(group):
    """All checks, in the order in which they are written."""
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            function(group)
            group.barrier()
