"""torch.ops.symm_mem.fused_*scaled* with mkernel behind them: values, shapes and strides as PyTorch's own."""

import pytest
from support.forked_processes import run_ranks

START = """
    import warnings
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from support.patience import WAIT
    from torch.distributed import _symmetric_memory as symmetric_memory
    import mkernel as mk
    from mkernel.integrations import report, reset, symm_mem

    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    rank, size = dist.get_rank(), dist.get_world_size()
    WORLD = dist.group.WORLD.group_name
    GATHER = "symm_mem.fused_all_gather_scaled_matmul"
    SCATTER = "symm_mem.fused_scaled_matmul_reduce_scatter"
    operators = torch.ops.symm_mem
    BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
    symm_mem.enable()
    torch.manual_seed(100 + rank)

    def weights(n, k, recipe):
        w, scale = mk.quantize(torch.randn(n, k), recipe)
        return w.t(), scale.t().contiguous() if scale.dim() else scale

    def same(result, theirs):
        assert result.dtype == theirs.dtype and result.shape == theirs.shape, (result.shape, theirs.shape)
        strides = [[one for one, number in zip(each.stride(), each.shape) if number > 1] for each in (result, theirs)]
        assert strides[0] == strides[1], strides
        if result.element_size() == 1:
            assert torch.equal(result.float(), theirs.float())
        else:
            torch.testing.assert_close(result.float(), theirs.float(), rtol=2e-2, atol=6e-2)

    def gathered(tensor, dim):
        parts = [torch.empty_like(tensor.contiguous().view(torch.uint8)) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous().view(torch.uint8))  # gloo knows no fp8
        return torch.cat(parts, dim).view(tensor.dtype)

    def gathered_by_pytorch(a, bs, scale, scales, dim, group, biases, results, dtypes, fasts):
        '''Its fallback, but for the collectives.'''
        whole = gathered(a, dim).movedim(dim, 0)
        whole = whole.contiguous()
        if scale.dim():  # the scale of a single row is a row's, too
            scale = scale if scale.shape[dim] != a.shape[dim] else gathered(scale, dim)
            scale = scale.movedim(dim, 0).flatten(0, -2).contiguous()
        products = []
        for b, its, bias, dtype, fast in zip(bs, scales, biases, dtypes, fasts):
            y = torch._scaled_mm(whole.flatten(0, -2), b, scale, its, bias, None, dtype, fast)
            products.append(y.unflatten(0, whole.shape[:-1]).movedim(0, dim))
        return whole.movedim(0, dim), products

    def check_gather(shape, dim, recipe, widths=(6, 4), replicated=False, dtypes=(BF16, FP32), bias=False):
        x = torch.randn(shape)
        if recipe == "TensorWise":
            torch.manual_seed(0)
            scale = torch.rand(()) + 0.5  # PyTorch takes the same for all ranks
            a = (x / scale).to(torch.float8_e4m3fn)
        else:
            a, scale = mk.quantize(x, recipe)
        bs, scales = zip(*[weights(n, shape[-1], recipe) for n in widths])
        if replicated:
            scale = gathered(scale, dim)
        biases = [torch.ones(n, dtype=BF16) if bias else None for n in widths]
        given = (a, list(bs), scale, list(scales), dim, WORLD, biases, [None] * len(bs), list(dtypes[: len(bs)]),
                 [False, True][: len(bs)])
        whole, products = operators.fused_all_gather_scaled_matmul(*given)
        theirs = gathered_by_pytorch(*given)
        for one, other in zip([whole, *products], [theirs[0], *theirs[1]], strict=True):
            same(one, other)

    def check_scatter(shape, dim, recipe, op="sum", dtype=BF16, flat=False, fast=False):
        torch.manual_seed(200 + rank)
        a, scale = mk.quantize(torch.randn(shape), recipe)
        b, scale_b = weights(6, shape[-1], recipe)
        output = [*shape[:-1], 6]
        if flat:
            a, scale = a.flatten(0, -2), scale.flatten(0, -2) if scale.dim() else scale
        given = (a, b, scale, scale_b, op, dim, 0 if flat else dim, WORLD, output, None, None, dtype, fast)
        same(operators.fused_scaled_matmul_reduce_scatter(*given),
             symmetric_memory._fused_scaled_matmul_reduce_scatter_fallback(*given))
"""

END = """
    symm_mem.disable()
    print("right on rank", rank)
    dist.barrier()
"""

SHAPES = """
    gathers = [((2, 3, 48), 1, "RowWise", dict(bias=True)), ((2, 3, 48), 0, "TensorWise", dict(widths=(5,))),
               ((1, 1, 32), 1, "RowWise", dict(widths=(6, 1)))]
    scatters = [((2, size, 48), 1, "RowWise", dict(op="avg", dtype=FP32)), ((size, 3, 48), 0, "TensorWise", {})]
    if size > 2:
        gathers += [((3, 32), 0, "RowWise", {}), ((2, 3, 48), 1, "RowWise", dict(replicated=True)),
                    ((2, 3, 48), 0, "TensorWise", dict(dtypes=(FP16, BF16)))]
        scatters += [((2 * size, 32), 0, "RowWise", {}), ((2, size, 48), 1, "RowWise", dict(flat=True)),
                     ((size, 3, 48), 0, "TensorWise", dict(fast=True))]
    for shape, dim, recipe, more in gathers:
        check_gather(shape, dim, recipe, **more)
    for shape, dim, recipe, more in scatters:
        check_scatter(shape, dim, recipe, **more)
    counts = report().as_dict()
    assert counts[GATHER] == {"fused": len(gathers), "fell_back": {}}, counts
    assert counts[SCATTER] == {"fused": len(scatters), "fell_back": {}}, counts

    # blocks, which PyTorch has no product of on CPUs
    torch.manual_seed(rank)
    x, w = torch.randn(3, 260), torch.randn(150, 260)
    (a, scale_a), (w8, scale_w) = mk.quantize(x, "BlockWise1x128"), mk.quantize(w, "BlockWise128x128")
    whole, products = operators.fused_all_gather_scaled_matmul(
        a, [w8.t(), w8.t()[:, :128]], scale_a, [scale_w.t(), scale_w.t()[:, :1]], 0, WORLD, [None] * 2, [None] * 2,
        [FP32] * 2, [True] * 2,
    )
    everyone = [torch.empty(3, 260) for _ in range(size)]
    dist.all_gather(everyone, mk.dequantize(a, scale_a))
    exact = torch.cat(everyone) @ mk.dequantize(w8, scale_w).t()
    for product, n in zip(products, (150, 128)):
        torch.testing.assert_close(product, exact[:, :n], rtol=1e-4, atol=1e-3)
"""

FALLBACKS = """
    a, scale = mk.quantize(torch.randn(2 * size, 32), "RowWise")
    b, scale_b = weights(6 * size, 32, "RowWise")
    one = torch.ones(())

    def gather(a=a, bs=[b], scale=scale, scales=[scale_b], dim=0, result=None, dtype=BF16):
        given = [[each] * len(bs) for each in (None, result, dtype, False)]
        return operators.fused_all_gather_scaled_matmul(a, bs, scale, scales, dim, WORLD, *given)

    def scatter(op="sum", dim=0, dtype=BF16, bias=None, result=None):
        shape = [2 * size, 6 * size]
        return operators.fused_scaled_matmul_reduce_scatter(
            a, b, scale, scale_b, op, dim, dim, WORLD, shape, bias, result, dtype)

    highest = scatter(op="max")
    assert highest.shape == (2, 6 * size)
    biased = scatter(bias=torch.ones(6 * size, dtype=BF16))
    torch.testing.assert_close(biased.float(), scatter().float() + size, rtol=2e-2, atol=6e-2)
    for call, more, part in [
        (gather, dict(bs=[], scales=[]), "Bs is empty"),
        (gather, dict(result=one), "result_scale"),
        (gather, dict(dtype=torch.float64), "out_dtype is torch.float64"),
        (scatter, dict(dtype=None), "out_dtype is None"),
        (scatter, dict(dim=1), "last one"),
    ]:
        name = GATHER if call is gather else SCATTER
        before = sum(report().operators[name].fell_back.values())
        try:
            call(**more)
        except Exception as theirs:
            assert not isinstance(theirs, mk.MKernelError), theirs  # PyTorch's own: gloo knows no fp8
        found = report().operators[name].fell_back
        assert sum(found.values()) == before + 1 and [reason for reason in found if part in reason], (part, found)
    assert report().operators[SCATTER].fused == 1
    assert [reason for reason in report().operators[SCATTER].fell_back if "a bias" in reason]

    # arguments that are wrong on one rank only: an error on all of them, and the group still works
    for wrong in (dict(scale=scale[: len(scale) - rank]), dict(scales=[scale_b[:, rank:]])):
        try:
            gather(**wrong)
        except mk.ArgumentError as refusal:
            assert "scale_" in str(refusal), refusal
        else:
            raise AssertionError(wrong)
    check_gather((3, 32), 0, "RowWise")
"""


def check(program, ranks):
    for rank, (output, code) in enumerate(run_ranks(START + program + END, ranks)):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_shapes(ranks):
    check(SHAPES, ranks)


def test_what_is_left_to_pytorch_and_what_is_refused():
    check(FALLBACKS, 2)
