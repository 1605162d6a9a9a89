"""TorchTitan's tensor-parallel layers with mkernel's operators in them: processes on CPUs, compared in float64."""

import importlib.util

import pytest
from support.forked_processes import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")

START = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import spmd_types as spmd
    from datetime import timedelta
    from support.patience import WAIT
    import mkernel as mk
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.common import decoder_sharding as sharding
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = "cpu"  # TorchTitan takes cuda where there is no accelerator
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    NAMES = ("attention_qkv", "attention_output", "feed_forward")
    IMPORTS = OverrideConfig(imports=[f"mkernel.integrations.torchtitan.{name}" for name in NAMES])

    def layer_configs():
        '''The configurations of a layer of TorchTitan's Llama, as its trainer would prepare them.'''
        config = model_registry("debugmodel", tp_gemm_backend="dist_gemm").model
        for layer in config.layers:
            sharding.set_gqa_attention_sharding(layer.attention, enable_sp=True)
            layout = sharding.dense_sequence_parallel_placement()
            sharding.set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=layout, enable_sp=True)
        replaced = apply_overrides(IMPORTS, config)
        assert len(replaced) == 3 * len(config.layers), replaced
        return config.layers[0].attention.qkv_linear, config.layers[0].attention.wo, config.layers[0].feed_forward

    def dims_of(tp):
        size = dist.get_world_size()
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=size // tp, cp=1, tp=tp, pp=1, ep=1, world_size=size, spmd_backend="spmd_types"
        )
        dims.build_mesh()
        return dims

    def near(result, exact, what, terms):
        '''A sum of so many products: the bound grows with their square root.'''
        error, largest = (result.double() - exact).abs().max().item(), exact.abs().max().item()
        assert error <= 4 * terms**0.5 * torch.finfo(torch.float32).eps * largest, (what, error, largest)
"""

GRADIENTS = """
    tp = {tp}
    dims = dims_of(tp)
    data, rank = divmod(dist.get_rank(), tp)  # ranks of tensor parallelism are neighbours
    B, L = 2, 8

    def heads(y, layer):
        '''What a plain projection splits into.'''
        y = y.unflatten(-1, (-1, layer.r_dim, layer.head_dim))
        return [part.flatten(2, 3) for part in y.split([layer.heads_per_kv, 1, 1], -2)]

    def compare(config, forward, gathers, outputs_dim):
        '''A layer on its part of the input, against `forward` of the whole layer in float64.'''
        torch.manual_seed(1)
        layer = config.build()
        layer.init_states()
        whole = {{name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}}
        columns = whole[next(iter(whole))].shape[1]
        layer.parallelize(dims)
        x = torch.randn(B, L, columns, generator=torch.Generator().manual_seed(2 + data))
        part = (lambda t, dim: t.chunk(tp, dim)[rank])
        own = part(x, 1 if gathers else 2).clone().requires_grad_()
        with get_spmd_context(parallel_dims=dims)():
            results = layer(own)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        x = x.double().requires_grad_()
        exact = forward(x, whole, layer)
        grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(9)) for y in exact]
        for index, (y, e) in enumerate(zip(results, exact, strict=True)):
            assert y.is_contiguous() or outputs_dim == 1  # kernels of attention rely on it
            near(y, part(e.detach(), outputs_dim), f"output {{index}}", columns)
        torch.autograd.backward(results, [part(grad, outputs_dim) for grad in grads])
        torch.autograd.backward(exact, [grad.double() for grad in grads])
        near(own.grad, part(x.grad, 1 if gathers else 2), "input", columns)
        for name, parameter in layer.named_parameters():
            grad = whole[name].grad
            if parameter.shape != grad.shape:
                grad = part(grad, [a != b for a, b in zip(parameter.shape, grad.shape)].index(True))
            near(parameter.grad, grad, name, columns)

    qkv, wo, ffn = layer_configs()
    swiglu = lambda x, w, _: [(F.silu(x @ w["w1.weight"].T) * (x @ w["w3.weight"].T)) @ w["w2.weight"].T]
    compare(qkv, lambda x, w, layer: heads(x @ w["wqkv.weight"].T, layer), True, 2)
    compare(wo, lambda x, w, _: [x @ w["weight"].T], False, 1)
    compare(ffn, swiglu, True, 1)
    print("right on rank", dist.get_rank())
"""


def run(program, ranks):
    for rank, (output, code) in enumerate(run_ranks(START + program, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.thorough)])
def test_layers_and_gradients(ranks, tp):
    run(GRADIENTS.format(tp=tp), ranks)


def test_layouts_are_type_checked():
    """TorchTitan's checker of layouts accepts the layers, and refuses an input of another layout."""
    program = """
    dims = dims_of(2)
    qkv, wo, ffn = (config.build() for config in layer_configs())
    for layer in (qkv, wo, ffn):
        layer.init_states()
        layer.parallelize(dims)
    x = torch.randn(2, 4, 256)
    plain, other = x.clone(), x.clone()
    with get_spmd_context(parallel_dims=dims)():
        expected = wo(qkv(plain)[0].flatten(2)) + ffn(plain)
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
        layout = sharding.dense_sequence_parallel_placement()
        spmd.assert_type(x, layout.axis_types, layout.partition_spec)
        y = wo(qkv(x)[0].flatten(2)) + ffn(x)
        replicated = sharding.dense_activation_placement(tp=spmd.R)
        spmd.assert_type(other, replicated.axis_types, replicated.partition_spec)
        try:
            ffn(other)
        except spmd.SpmdTypeError:
            print("right on rank", dist.get_rank())
    assert torch.equal(y, expected)
    """
    run(program, 2)


def test_without_tensor_parallelism():
    """The layers that are replaced do the work, as they do in TorchTitan."""
    program = """
    dims = dims_of(1)
    qkv, wo, ffn = (config.build() for config in layer_configs())
    ffn.init_states()
    ffn.parallelize(dims)
    x = torch.randn(2, 4, 256)
    with get_spmd_context(parallel_dims=dims)():
        y = ffn(x)
    w = {name: value.double() for name, value in ffn.state_dict().items()}
    x = x.double()
    exact = (F.silu(x @ w["w1.weight"].T) * (x @ w["w3.weight"].T)) @ w["w2.weight"].T
    near(y, exact, "output", 256)
    print("right on rank", dist.get_rank())
    """
    run(program, 2)
