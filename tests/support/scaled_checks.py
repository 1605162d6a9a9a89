"""Checks of the registered operators with scales, which a program runs on each of its ranks."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mkernel as mk
from mkernel.ops.library import encoded, registered
from support.gradient_reference import SMALL

GATHER, SCATTER, REDUCE = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"
BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = encoded(mk.Config(tile_m=SMALL.tile_m, tile_n=SMALL.tile_n, tile_k=32))
K, N = 140, 20
QUANTIZED = dict(recipe_a="BlockWise1x128", dtype_a=torch.float8_e5m2)


def operands(group, m, recipe=("RowWise", "RowWise")):
    generator = torch.Generator().manual_seed(group.rank)
    a, scale_a = mk.quantize(torch.randn(m, K, generator=generator), recipe[0])
    w, scale_w = mk.quantize(torch.randn(N, K, generator=generator), recipe[1])
    return a, w.t(), scale_a, scale_w.t() if scale_w.dim() else scale_w


def calls(group):
    """Every registered operator with scales, with arguments of all kinds."""
    name, size = group.group_name, group.size
    rows, tall = operands(group, 4), operands(group, 4 * size, ("BlockWise1x128", "BlockWise128x128"))
    out, bias = torch.zeros(4 * size, N, dtype=BF16), torch.ones(N)
    one = operands(group, 4, ("TensorWise", "TensorWise"))
    wide = torch.randn(4, K, generator=torch.Generator().manual_seed(group.rank)), rows[1], None, rows[3]
    return [
        (GATHER, "", (*rows, name, BF16, False)),
        (GATHER, "", (*tall, name, FP32, False, CONFIG)),
        (GATHER, "_gathered", (*rows, name, BF16, True)),
        (GATHER, "_gathered", (*tall, name, BF16, False)),
        (GATHER, "_gathered", (*one, name, BF16, False)),
        (GATHER, "", (*wide, name, BF16, False, CONFIG, "RowWise", torch.float8_e5m2)),
        (GATHER, "_gathered", (*wide, name, BF16, False, None, "RowWise")),
        (GATHER, "_out", (*wide, name, BF16, False, True, None, out, "RowWise")),
        (GATHER, "_out", (*rows, name, BF16, False, True, None, out)),
        (GATHER, "_out", (*rows, name, BF16, False, False, CONFIG, out)),
        (SCATTER, "", (*tall, bias, torch.ones(4, N), name, FP32, FP32, False)),
        (SCATTER, "_out", (*tall, None, None, name, None, None, False, None, out[:4])),
        (REDUCE, "", (*rows, bias.to(BF16), None, name, None, FP32, True, False, CONFIG)),
        (REDUCE, "_out", (*rows, None, None, name, BF16, None, False, True, None, out[:4])),
    ]


def check_opcheck(group):
    checked = {operator + variant for operator, variant, _ in calls(group)}
    everything = {each.name.removeprefix("mkernel::") for each in torch._C._jit_get_all_schemas()}
    assert checked == {name for name in everything if name.startswith((GATHER, SCATTER, REDUCE))}, everything
    for operator, variant, arguments in calls(group):
        # torch cannot compare fp8 tensors, which the other checks do
        checks = ["test_autograd_registration", "test_faketensor"]
        checks += ["test_aot_dispatch_dynamic"] * (variant == "")
        outcome = torch.library.opcheck(registered(operator, variant).default, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}, (operator, variant, outcome)


def results(group, function=lambda call: call):
    """Results of the public functions. function: what to make of them."""
    a, b, scale_a, scale_b = operands(group, 4 * group.size, ("BlockWise1x128", "BlockWise128x128"))
    shaped = a.view(2, -1, K), b, scale_a.view(2, -1, 2), scale_b
    bias, residual = torch.ones(N), torch.ones(2, 2, N)
    gather, scatter, reduce = mk.all_gather_scaled_matmul, mk.scaled_matmul_reduce_scatter, mk.scaled_matmul_all_reduce
    return [
        function(lambda *given: gather(*given, bias=bias, out_dtype=FP32))(a, b, scale_a, scale_b),
        *function(lambda *given: gather(*given, gather_dim=1, return_gathered=True))(*shaped),
        *function(lambda wide, *given: gather(wide, given[0], None, given[2], return_gathered=True, **QUANTIZED))(
            shaped[0].float(), *shaped[1:]
        ),
        function(lambda wide, *given: gather(wide, given[0], None, given[2], **QUANTIZED))(a.bfloat16(), *shaped[1:]),
        function(lambda *given: scatter(*given, bias=bias, residual=residual, out_dtype=FP32, scatter_dim=1))(*shaped),
        function(lambda *given: reduce(*given, reduce_dtype=FP32))(*shaped),
        function(lambda *given: reduce(*given, out=torch.empty(4 * group.size, N)))(a, b, scale_a, scale_b),
    ]


def layout(result):
    return tuple(result.shape), result.stride(), result.dtype


def check_fake_tensors(group):
    """The same shapes, strides and dtypes as on real tensors, with no call on the group."""
    real, exchanges = results(group), group._exchanges
    with FakeTensorMode() as mode:
        fake = results(group, lambda call: lambda *given: call(*[mode.from_tensor(each) for each in given]))
    assert group._exchanges == exchanges, "a fake call has talked to other ranks"
    assert [layout(each) for each in fake] == [layout(each) for each in real]
    a, *others = operands(group, 4)
    wrong = a.float(), *others
    with FakeTensorMode() as mode, pytest.raises(mk.ArgumentError, match=r"a has dtype torch\.float32"):
        mk.scaled_matmul_all_reduce(*[mode.from_tensor(each) for each in wrong])


def check_compiled(group):
    """Graphs of them compute the same."""

    def compiled(call):
        torch._dynamo.reset()
        return torch.compile(call, backend="aot_eager", fullgraph=True)

    for one, other in zip(results(group, compiled), results(group), strict=True):
        assert torch.equal(one.float(), other.float())


def run(group):
    """All checks, in the order in which they are written."""
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            function(group)
            group.barrier()
