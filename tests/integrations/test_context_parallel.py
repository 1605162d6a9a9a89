"""PyTorch's context_parallel with mk.ring_attention behind it: as plain attention over the whole sequence, forward and
backward."""

import pytest
import torch
import torch.nn.functional as F
from support.forked_processes import run_ranks
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import mkernel as mk
from mkernel import integrations
from mkernel.integrations import context_parallel

NAME = context_parallel.REPORTED

START = """
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from support.patience import WAIT
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.distributed.tensor.parallel import parallelize_module
    from mkernel.integrations import context_parallel, report, reset

    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    rank, size = dist.get_rank(), dist.get_world_size()
    plain_attention = F.scaled_dot_product_attention
    context_parallel.enable()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    length, dim = {length}, 64
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 4, length, dim, generator=generator)
    weights = [torch.randn(dim, generator=generator).requires_grad_() for _ in range(3)]
    cotangent = torch.randn(2, 4, length, dim, generator=generator)

    def heads(x):
        query, key, value = (x * weight for weight in weights)
        return query, key[:, :2], value[:, 2:]

    def expected(causal):
        doubles = [weight.detach().double().requires_grad_() for weight in weights]
        query, key, value = (x.double() * weight for weight in doubles)
        out = plain_attention(query, key[:, :2], value[:, 2:], is_causal=causal, scale=0.2, enable_gqa=True)
        return out.detach(), torch.autograd.grad(out, doubles, cotangent.double())

    def check(out, grads, causal):
        exact, exact_grads = expected(causal)
        assert (out.double() - exact).abs().max() < 1e-5
        for grad, exact_grad in zip(grads, exact_grads):
            dist.all_reduce(grad)  # of all ranks' parts of the sequence
            assert (grad.double() - exact_grad).abs().max() < 1e-4 * exact_grad.abs().max()
"""
END = """
    context_parallel.disable()
    assert F.scaled_dot_product_attention is plain_attention
    print("right on rank", rank)
    dist.barrier()
"""

MONKEY_PATCH = """
    for causal in (True, False):
        part, dout, whole = x.clone(), cotangent.clone(), x.clone()
        with cp.context_parallel(mesh, buffers=[part, dout], buffer_seq_dims=[2, 2], no_restore_buffers={{dout}}):
            assert part.shape[2] == length // size
            query, key, value = heads(part)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.2, enable_gqa=True)
            assert type(out) is torch.Tensor
            grads = torch.autograd.grad(out, weights, dout)
            (everything,) = cp.context_parallel_unshard(mesh, [out.detach()], [2])
        assert torch.equal(part, whole), "buffers are restored"
        check(everything, grads, causal)
    counts = report().operators["context_parallel.scaled_dot_product_attention"]
    assert counts.fused == 2 and not counts.fell_back, counts
"""

COMPILED = """
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(x):
        return F.scaled_dot_product_attention(*heads(x), is_causal=True, scale=0.2, enable_gqa=True)

    for _ in range(2):
        part, dout = x.clone(), cotangent.clone()
        with cp.context_parallel(mesh, buffers=[part, dout], buffer_seq_dims=[2, 2]):
            out = attend(part)
            grads = torch.autograd.grad(out, weights, dout)
            (everything,) = cp.context_parallel_unshard(mesh, [out.detach()], [2])
        check(everything, grads, True)
    assert report().operators["context_parallel.scaled_dot_product_attention"].fused == 1  # it was traced once
"""

MODULE = """
    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2, enable_gqa=True)

    style = cp._ContextParallel(seq_dim=2, attention_type=cp._ContextParallel.AttentionType.SDPA)
    attention = parallelize_module(Attention(), mesh, style)
    balancer = cp._HeadTailLoadBalancer(length, size, "cpu")
    from torch.distributed.tensor.experimental._context_parallel import _attention as private
    part, dout = private._context_parallel_shard(mesh, [x, cotangent], [2, 2], balancer)
    cp._enable_context_parallel_dispatcher()
    try:
        out = attention(*heads(part))
        grads = torch.autograd.grad(out, weights, dout)
        (everything,) = cp.context_parallel_unshard(mesh, [out.detach()], [2], balancer)
    finally:
        cp._disable_context_parallel_dispatcher()
    check(everything, grads, True)
    assert report().operators["context_parallel.scaled_dot_product_attention"].fused == 1
"""

LEFT = """
    reset()
    with cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        problems = [((x, x, x), dict(dropout_p=0.5))]
        problems += [((x, x, x), dict(attn_mask=torch.ones(2, 4, length // size, length // size).bool()))]
        problems += [((x, x, x), dict(scale=scale, is_causal=True)) for scale in (0.0, -1.0)]
        for y, gqa in ((x[:, :2], False), (x[:, :3], True)):
            problems.append(((x, y, y), dict(is_causal=True, enable_gqa=gqa)))
        problems += [((x, y, x), dict(is_causal=True)) for y in (x[:1], x[:, :2], torch.cat([x, x], 3))]
        for tensors, problem in problems:
            try:
                F.scaled_dot_product_attention(*tensors, **problem)
            except mk.MKernelError:
                raise
            except Exception:
                pass  # PyTorch has none of them on CPUs
        for name in ("enable", "disable"):
            try:
                getattr(context_parallel, name)()
                assert name == "enable"  # it is enabled
            except mk.MKernelError as problem:
                assert name == "disable" and "leave PyTorch's context_parallel" in str(problem), problem
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        y = x[:, :, rank:].contiguous()
        try:
            F.scaled_dot_product_attention(y, y, y, is_causal=True)
            raise AssertionError("lengths differ")
        except mk.ArgumentError as problem:
            assert "must pass the same values" in str(problem), problem
    counts = report().operators["context_parallel.scaled_dot_product_attention"]
    assert counts.fused == 1, counts
    assert counts.fell_back == {
        "dropout of weights": 1,
        "attn_mask: causal or none is fused": 1,
        "scale=0.0: numbers greater than 0 are fused": 1,
        "scale=-1.0: numbers greater than 0 are fused": 1,
        "numbers of heads that differ, without enable_gqa or not as multiples": 3,
        "batches, or head dimensions of query and key, that differ": 2,
    }, counts
    context_parallel.disable()
    with cp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        try:
            context_parallel.enable()
            raise AssertionError("it was enabled inside")
        except mk.MKernelError as problem:
            assert "before PyTorch's context_parallel is entered" in str(problem)
    context_parallel.enable()
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), plain_attention(x, x, x))
    assert counts == report().operators["context_parallel.scaled_dot_product_attention"]
"""


def check(done):
    for rank, (output, code) in enumerate(done):
        assert code == 0, output
        assert f"right on rank {rank}" in output


@pytest.mark.parametrize(("ranks", "length"), [(2, 24), pytest.param(3, 27, marks=pytest.mark.thorough)])
def test_context_parallel(ranks, length):
    """In the zigzag layout, or contiguous where PyTorch's load balancer does not divide the sequence."""
    check(run_ranks(START.format(length=length) + MONKEY_PATCH.replace("{{", "{").replace("}}", "}") + END, ranks))


@pytest.mark.thorough
@pytest.mark.thorough
def test_compiled():
    check(run_ranks(START.format(length=24) + COMPILED + END, 2))


def test_modules():
    check(run_ranks(START.format(length=24) + MODULE + END, 2))


def test_what_is_left_to_pytorch():
    check(
        run_ranks(
            START.format(length=24).replace("import torch\n", "import torch\n    import mkernel as mk\n", 1)
            + LEFT
            + END,
            2,
        )
    )


def test_enable_and_disable():
    """A switch; what is passed plain tensors is PyTorch's function."""
    plain = F.scaled_dot_product_attention
    with context_parallel.enable():
        assert context_parallel.enabled()
        with context_parallel.enable():
            pass
        assert context_parallel.enabled()
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
        x = torch.randn(1, 2, 6, 8)
        assert torch.equal(
            F.scaled_dot_product_attention(x, x, x, None, 0.0, True, scale=0.3),
            plain(x, x, x, None, 0.0, True, scale=0.3),
        )
        compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain(x, x, x))
    assert not context_parallel.enabled()
    assert F.scaled_dot_product_attention is plain
    context_parallel.disable()
    assert NAME in integrations.report().operators


def test_biases_of_pytorch():
    """They look for the function by its place."""
    query, key = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 6, 16)
    calls = [
        ((query, key, key, causal_lower_right(4, 6)), {}),
        ((query, key, key), {"attn_mask": causal_upper_left(4, 6)}),
    ]
    expected = [F.scaled_dot_product_attention(*given, **more) for given, more in calls]
    with context_parallel.enable():
        for (given, more), out in zip(calls, expected):
            assert torch.equal(F.scaled_dot_product_attention(*given, **more), out)


def test_a_pytorch_without_it_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(context_parallel._Torch, "MODULE", "torch.nowhere")
    with pytest.raises(mk.MKernelError, match="too old or too new"):
        context_parallel.enable()
    assert not context_parallel.enabled()
