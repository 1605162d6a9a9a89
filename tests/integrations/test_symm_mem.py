"""torch.ops.symm_mem.fused_* with mkernel behind them: values, shapes and strides as PyTorch's own implementation."""

import json

import pytest
import torch
from support.forked_processes import run_ranks
from torch.distributed import _symmetric_memory

import mkernel as mk
from mkernel import integrations
from mkernel.integrations import calls, symm_mem

GATHER, SCATTER = "symm_mem.fused_all_gather_matmul", "symm_mem.fused_matmul_reduce_scatter"

START = """
    import os, warnings
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from support.patience import WAIT
    from torch.distributed import _symmetric_memory as symmetric_memory
    from torch.distributed.device_mesh import init_device_mesh
    import mkernel as mk
    from mkernel.integrations import report, reset, symm_mem

    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    rank, size = dist.get_rank(), dist.get_world_size()
    WORLD = dist.group.WORLD.group_name
    GATHER, SCATTER = "symm_mem.fused_all_gather_matmul", "symm_mem.fused_matmul_reduce_scatter"
    operators = torch.ops.symm_mem

    def close(result, parts):
        '''Within what rounding explains of the sum of these products (float64), whose terms travel rounded.'''
        exact = sum(a @ b for a, b in parts)
        eps, k = torch.finfo(result.dtype).eps, parts[0][0].shape[-1]
        rounded = (sum((a @ b).abs() for a, b in parts) + exact.abs()) * eps / 2
        added = 4 * k**0.5 * torch.finfo(torch.float32).eps * sum(a.abs() @ b.abs() for a, b in parts)
        return exact, rounded + added

    def same_layout(result, torchs):
        assert result.dtype == torchs.dtype and result.shape == torchs.shape, (result.shape, torchs.shape)
        strides = [[one for one, number in zip(each.stride(), each.shape) if number > 1] for each in (result, torchs)]
        assert not result.numel() or strides[0] == strides[1], strides

    def gathered(tensor, group):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return parts

    def check_gather(a, bs, dim, name=WORLD, return_A=True):
        group = dist.distributed_c10d._resolve_process_group(name)
        whole, products = operators.fused_all_gather_matmul(a, bs, dim, name, return_A=return_A)
        theirs = symmetric_memory._fused_all_gather_matmul_fallback(a, bs, dim, name, return_A=return_A)
        everyone = torch.cat(gathered(a, group), dim)
        assert (whole is None) == (not return_A)
        if return_A:
            assert torch.equal(whole, everyone)
            same_layout(whole, theirs[0])
        assert len(products) == len(bs)
        for product, b, other in zip(products, bs, theirs[1]):
            same_layout(product, other)
            exact, bound = close(product, [(everyone.double(), b.double())])
            assert ((product.double() - exact).abs() <= bound).all(), (a.shape, dim, b.shape)

    def check_scatter(a, b, op, dim, name=WORLD):
        group = dist.distributed_c10d._resolve_process_group(name)
        result = operators.fused_matmul_reduce_scatter(a, b, op, dim, name)
        same_layout(result, symmetric_memory._fused_matmul_reduce_scatter_fallback(a, b, op, dim, name))
        scale = group.size() if op == "avg" else 1
        parts = [(x.double() / scale, y.double()) for x, y in zip(gathered(a, group), gathered(b, group))]
        exact, bound = close(result, parts)
        mine = slice(result.shape[dim] * group.rank(), result.shape[dim] * (group.rank() + 1))
        exact, bound = [each.movedim(dim, 0)[mine].movedim(0, dim) for each in (exact, bound)]
        assert ((result.double() - exact).abs() <= bound).all(), (a.shape, op, dim)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, dtype=dtype)

    def raised(kind, part, function, *args):
        try:
            function(*args)
        except kind as problem:
            assert part in str(problem), problem
        else:
            raise AssertionError(f"{part}: nothing was raised")

    torch.manual_seed(100 + rank)
    before = torch._C._dispatch_dump("symm_mem::fused_all_gather_matmul")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        symm_mem.enable()
"""

END = """
    symm_mem.disable()
    print("right on rank", rank)
    dist.barrier()
"""

EVERY_SHAPE = """
    {init}
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    gathers = [((3, 16), 0, bf16), ((2, 3, 24), 0, fp32), ((2, 3, 24), 1, bf16), ((2, 2, 3, 8), 2, fp16)]
    for shape, dim, dtype in gathers:
        k, a = shape[-1], random(*shape, dtype=dtype)
        check_gather(a, [random(k, 5, dtype=dtype)], dim, return_A=dim != 0)
        # not contiguous; several Bs of different widths, one a transposed view
        a = a.movedim(dim, 0).contiguous().movedim(0, dim)
        check_gather(a, [random(k, 2, dtype=dtype), random(7, k, dtype=dtype).t(), random(k, 3, dtype=dtype)], dim)
    scatters = [((2 * size, 16), 0, bf16, "avg"), ((size, 3, 24), 0, fp16, "sum"), ((2, size, 24), 1, bf16, "sum"),
                ((3, 2, 2 * size, 8), 2, fp32, "avg"), ((2, 3, 8), 2, bf16, "sum"), ((3, 16), 1, fp32, "avg")]
    for shape, dim, dtype, op in scatters:
        check_scatter(random(*shape, dtype=dtype), random(shape[-1], 3 * size, dtype=dtype), op, dim)
    counts = {{name: report().as_dict()[name] for name in (GATHER, SCATTER)}}
    assert counts == {{GATHER: {{"fused": 2 * len(gathers), "fell_back": {{}}}},
                       SCATTER: {{"fused": len(scatters), "fell_back": {{}}}}}}, counts
    check_gather(random(3, 16), [random(16, 2 + rank)], 0)  # B may have another width on each rank
    check_gather(random(0, 16), [random(16, 3), random(16, 2)], 0)
    check_scatter(random(0, 16), random(16, 3), "sum", 0)
"""


@pytest.mark.parametrize(
    ("ranks", "init"),
    [
        (2, ""),
        pytest.param(3, "", marks=pytest.mark.thorough),
        pytest.param(
            4, "assert mk.init(gpus_per_node=2, timeout=WAIT).nodes == 2", marks=pytest.mark.thorough, id="two nodes"
        ),
    ],
)
def test_every_shape(ranks, init):
    check(run_ranks(START + EVERY_SHAPE.format(init=init) + END, ranks))


GROUPS = """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(2):
        for part in ("tp", "dp"):
            name = mesh[part].get_group().group_name
            check_gather(random(2, 16), [random(16, 3)], 0, name)
            check_scatter(random(4, 16), random(16, 3), "sum", 0, name)
    alone = [dist.new_group([each]) for each in range(size)][rank]
    check_gather(random(2, 16), [random(16, 3), random(16, 5)], 0, alone.group_name)
    check_scatter(random(2, 3, 16), random(16, 3), "avg", 2, alone.group_name)
    assert report().as_dict()[GATHER] == {"fused": 5, "fell_back": {}}, report()
    raised(Exception, "nobody", operators.fused_all_gather_matmul, random(2, 16), [random(16, 3)], 0, "nobody")
"""


@pytest.mark.thorough
def test_groups():
    check(run_ranks(START + GROUPS + END, 4))


FALLBACKS = """
    a, b = random(2, 3, 8), random(8 * size, 5)
    check_gather(a, [b, random(8 * size, 3)], 2)
    check_gather(a.double(), [random(8, 3).double()], 1)
    assert operators.fused_all_gather_matmul(a, [], 0, WORLD)[1] == []
    check_scatter(random(2, 2, 16, dtype=torch.float64), random(16, 3).double(), "sum", 1)
    check_scatter(random(size, 16).half() / 16, random(16, 3).half(), "avg", 0)
    highest = operators.fused_matmul_reduce_scatter(torch.full((2, 4), rank + 1.0), torch.ones(4, 3), "max", 0, WORLD)
    assert torch.equal(highest, torch.full((1, 3), 4.0 * size)), highest
    counts = report().as_dict()
    assert counts[GATHER]["fused"] == counts[SCATTER]["fused"] == 0, counts
    for name, parts in {{
        GATHER: ("last dimension", "torch.float64", "empty"), SCATTER: ("torch.float64", "torch.float16", "'max'")
    }}.items():
        found = counts[name]["fell_back"]
        assert sorted(found.values()) == [1, 1, 1], found
        for part in parts:
            assert [reason for reason in found if part in reason], (part, found)
        assert f"{{name}}: 0 fused, 3 left to PyTorch" in str(report()), report()
    reset()
    assert report().as_dict() == {{name: {{"fused": 0, "fell_back": {{}}}} for name in report().as_dict()}}

    # arguments that are wrong on all ranks, and on one only: an error on all of them, and the group still works
    for dim in (-1, 3):
        raised(ValueError, "gather_dim", operators.fused_all_gather_matmul, a, [random(8, 3)], dim, WORLD)
        raised(ValueError, "scatter_dim", operators.fused_matmul_reduce_scatter, a, random(8, 3), "sum", dim, WORLD)
    raised(ValueError, "2 dimensions", operators.fused_all_gather_matmul, random(8), [random(8, 3)], 0, WORLD)
    odd = random(3, 2, 8)
    raised(ValueError, "multiple", operators.fused_matmul_reduce_scatter, odd, random(8, 3), "sum", 0, WORLD)
    raised(ValueError, "multiple", operators.fused_matmul_reduce_scatter, a, random(8, 3), "sum", 2, WORLD)
    raised(ValueError, "", operators.fused_all_gather_matmul, a, [random(8 + rank, 3)], 0, WORLD)
    raised(ValueError, "", operators.fused_all_gather_matmul, random(2 + rank, 8), [random(8, 3)], 0, WORLD)
    raised(ValueError, "", operators.fused_matmul_reduce_scatter, random(2, 8), random(8 - rank, 3), "sum", 0, WORLD)
    check_gather(random(2, 8), [random(8, 3)], 0)

    # gradients are right, or refused; autocast changes nothing
    w = random(8, 3).requires_grad_()
    try:
        y = operators.fused_all_gather_matmul(a, [w], 0, WORLD, return_A=False)[1][0]
        everyone = torch.cat(gathered(a, dist.group.WORLD))
        assert torch.allclose(torch.autograd.grad(y.sum(), w)[0], everyone.flatten(0, 1).sum(0)[:, None], atol=1e-5)
    except mk.ArgumentError as refusal:
        assert "requires grad" in str(refusal), refusal
    with torch.autocast("cpu", torch.bfloat16):
        products = operators.fused_all_gather_matmul(random(2, 8), [random(8, 3), random(8, 4)], 0, WORLD)[1]
        products.append(operators.fused_matmul_reduce_scatter(random(2, 8), random(8, 3), "sum", 0, WORLD))
    assert [product.dtype for product in products] == [torch.float32] * 3
"""


def test_what_is_left_to_pytorch_and_what_is_refused():
    check(run_ranks(START + FALLBACKS.replace("{{", "{").replace("}}", "}") + END, 2))


COMPILED = """
    import torch.distributed._functional_collectives as collectives
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
    from functorch.compile import make_boxed_func

    warnings.simplefilter("ignore", FutureWarning)
    dist.is_nccl_available = lambda: True  # the pass asks

    def layer(x, w1, w2, dim, op="sum"):
        h = torch.relu(collectives.all_gather_tensor_autograd(x, dim, dist.group.WORLD) @ w1)
        return collectives.reduce_scatter_tensor_autograd(h @ w2, op, dim, dist.group.WORLD)

    def fuse(graph, inputs):
        '''What Inductor does with a graph, without compiling it.'''
        post_grad.view_to_reshape(graph)
        micro_pipeline_tp.micro_pipeline_tp_pass(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return make_boxed_func(graph.forward)

    passes = aot_autograd(fw_compiler=fuse, bw_compiler=fuse, decompositions=select_decomp_table())

    def check_compiled(backend, dim, shape):
        torch._dynamo.reset()
        reset()
        x, w1, w2 = [each.requires_grad_() for each in (random(*shape), random(16, 12), random(12, 8))]
        y = layer(x, w1, w2, dim)
        given = torch.randn_like(y)
        expected = [y, *torch.autograd.grad(y, (x, w1, w2), given)]
        assert report().as_dict()[GATHER]["fused"] == 0
        with config.patch(_micro_pipeline_tp=True), symmetric_memory._test_mode():
            y = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)(x, w1, w2, dim)
            assert [report().as_dict()[name]["fused"] for name in (GATHER, SCATTER)] == [1, 1], report()
            found = [y, *torch.autograd.grad(y, (x, w1, w2), given)]
        # backward: the gradient of reduce-scatter is gathered, that of all-gather is scattered
        for name in (GATHER, SCATTER):
            assert report().as_dict()[name] == {"fused": 2, "fell_back": {}}, report()
        for one, other in zip(found, expected):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.thorough
def test_the_pass_of_inductor():
    """The pass of async tensor parallelism on the graphs of forward and backward, run without compiling them."""
    program = """
    for dim, shape in ((0, (4, 16)), (1, (2, 4, 16))):
        check_compiled(passes, dim, shape)
    """
    check(run_ranks(START + COMPILED + program + END, 2))


@pytest.mark.thorough
def test_inductor():
    program = """
    config.compile_threads = 1
    check_compiled("inductor", 1, (2, 4, 16))
    """
    check(run_ranks(START + COMPILED + program + END, 2))


DISABLED = """
    assert symm_mem.enabled()
    symm_mem.enable()  # again
    with symm_mem.enable():
        check_gather(random(2, 8), [random(8, 3)], 0)
    assert symm_mem.enabled(), "it was enabled before"
    symm_mem.disable()
    symm_mem.disable()
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")
    assert torch._C._dispatch_dump("symm_mem::fused_all_gather_matmul") == before
    raised(NotImplementedError, "CPU", check_gather, random(2, 8), [random(8, 3)], 0)
    with symm_mem.enable():
        check_gather(random(2, 8), [random(8, 3)], 0)
    assert not symm_mem.enabled()
    assert report().as_dict()[GATHER]["fused"] == 2
"""


def test_pytorchs_implementations_are_restored():
    check(run_ranks(START + DISABLED + END, 1))


def check(results):
    for rank, (output, code) in enumerate(results):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


def test_the_report(monkeypatch):
    monkeypatch.setattr(calls, "_fused", calls.Counter())
    monkeypatch.setattr(calls, "_fell_back", {GATHER: calls.Counter(), SCATTER: calls.Counter()})
    assert str(integrations.report()) == f"{GATHER}: not called\n{SCATTER}: not called"
    for _ in range(3):
        calls.count_fused(GATHER)
        calls.count_fallback(GATHER, "A is torch.float64")
    calls.count_fallback(GATHER, "Bs is empty")
    found = integrations.report()
    assert str(found) == (
        f"{GATHER}: 3 fused, 4 left to PyTorch\n    3 x A is torch.float64\n    1 x Bs is empty\n{SCATTER}: not called"
    )
    assert found.operators[GATHER] == integrations.Calls(3, {"A is torch.float64": 3, "Bs is empty": 1})
    assert json.loads(json.dumps(found.as_dict()))[GATHER]["fell_back"]["Bs is empty"] == 1
    integrations.reset()
    assert integrations.report().operators[GATHER] == integrations.Calls(0, {})
    assert found.operators[GATHER].fused == 3, "a report does not change"


def test_on_gpus_pytorchs_own_implementation_is_the_fallback():
    """PyTorch has one for CUDA, which needs one NVLink domain; on CPUs there are only the collectives."""
    for name in (symm_mem.GATHER, symm_mem.SCATTER):
        assert symm_mem.fall_back(name, "test", torch.device("cuda", 0)) is getattr(_symmetric_memory, f"_{name}")
        assert symm_mem.fall_back(name, "test", torch.device("cpu")) is getattr(_symmetric_memory, f"_{name}_fallback")
    integrations.reset()


def test_another_pytorch(monkeypatch):
    monkeypatch.delattr(_symmetric_memory, "_fused_matmul_reduce_scatter")
    with pytest.raises(mk.MKernelError, match=f"PyTorch {torch.__version__.split('+')[0]}.*_fused_matmul_reduce"):
        symm_mem.enable()
    assert not symm_mem.enabled()
