"""TorchTitan's token dispatcher with mkernel's operators in it. On simulated ranks, around experts as TorchTitan has
them, beside one rank with all experts; there, TorchTitan is a stand-in with the same interface. And in processes on
CPUs, in a layer of TorchTitan's DeepSeek-V3, where TorchTitan is installed."""

import importlib
import importlib.util

import pytest
import torch
from support import torchtitan_stand_in as stand_in
from support.forked_processes import run_ranks
from support.torchtitan_stand_in import Dispatcher, Experts, Mesh

import mkernel as mk

TOKENS, HIDDEN, INNER, EXPERTS, K = 12, 32, 16, 8, 3  # of a rank, of a layer, and of a token


@pytest.fixture
def integration(monkeypatch):
    stand_in.install(monkeypatch)
    return importlib.import_module("mkernel.integrations.torchtitan_moe")


def values(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def inputs(rank):
    """Tokens, scores, ids, and the gradient of the result."""
    scores, ids = values(TOKENS, EXPERTS, seed=10 + rank).softmax(1).topk(K)
    return values(TOKENS, HIDDEN, seed=20 + rank), scores, ids, values(TOKENS, HIDDEN, seed=30 + rank)


def matrices(first=0, count=EXPERTS):
    shapes = ((INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))
    whole = [values(EXPERTS, *shape, seed=seed, scale=shape[1] ** -0.5) for seed, shape in enumerate(shapes)]
    return [each[first : first + count] for each in whole]


def train(dispatcher, experts, x, scores, ids, dout):
    """As TorchTitan's RoutedExperts: the result, and the gradients of tokens and scores."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, of_experts, metadata = dispatcher.dispatch(x, scores, ids, counts)
    y = dispatcher.combine(experts(rows, of_experts), metadata, x)
    y.backward(dout)
    return y.detach(), x.grad, scores.grad


def close(one, other):
    """Both round to bf16 in the same places, and sum in another order."""
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


@pytest.mark.parametrize("capacity_factor", [None, 2.0])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (1, 1)], ids=str)
def test_beside_one_rank_with_all_experts(cluster, capacity_factor, integration):
    config = Dispatcher.Config(num_experts=EXPERTS, top_k=K)
    replaced = stand_in.overridden(config, capacity_factor=capacity_factor)

    def on_rank(group):
        dispatcher = replaced.build()
        assert type(dispatcher) is integration.TokenDispatcher
        dispatcher.wire_meshes(ep_mesh=Mesh(group))
        mine = EXPERTS // group.size
        experts = Experts(*matrices(group.rank * mine, mine))
        return train(dispatcher, experts, *inputs(group.rank)), [each.grad for each in experts.parameters()]

    found = mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cpu")
    plain, whole = config.build(), Experts(*matrices())
    for rank, (results, _) in enumerate(found):
        for one, other in zip(results, train(plain, whole, *inputs(rank)), strict=True):
            close(one, other)
    for gradients, parameter in zip(zip(*(gradients for _, gradients in found)), whole.parameters(), strict=True):
        close(torch.cat(gradients), parameter.grad)


def test_without_expert_parallelism(integration):
    """The dispatcher that is replaced does the work."""
    dispatcher = integration.TokenDispatcher.Config(num_experts=EXPERTS, top_k=K).build()
    plain = Dispatcher.Config(num_experts=EXPERTS, top_k=K).build()
    for one, other in zip(*(train(each, Experts(*matrices()), *inputs(0)) for each in (dispatcher, plain))):
        assert torch.equal(one, other)


def test_what_is_refused(integration):
    def on_rank(group):
        dispatcher = integration.TokenDispatcher.Config(num_experts=5, top_k=2).build()
        dispatcher.wire_meshes(ep_mesh=Mesh(group))
        with pytest.raises(mk.ArgumentError, match="num_experts is 5, which 2 ranks of expert parallelism cannot"):
            dispatcher.dispatch(torch.ones(2, 8), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), None)
        dispatcher = integration.TokenDispatcher.Config(num_experts=4, top_k=2, capacity_factor=0.5).build()
        dispatcher.wire_meshes(ep_mesh=Mesh(group))
        with pytest.raises(mk.CapacityError, match="8 rows go to rank 0, whose capacity is 2"):
            dispatcher.dispatch(torch.ones(2, 8), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), None)

    mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu")


def test_a_dispatcher_that_pads_is_left_as_it_is(integration):
    """TorchTitan's for quantized experts is a subclass of the one that is replaced."""

    class Padding(Dispatcher):
        class Config(Dispatcher.Config):
            pass

    config = Padding.Config(num_experts=EXPERTS, top_k=K)
    assert stand_in.overridden(config) is config


A_LAYER_OF_TORCHTITAN = """
    import torch
    import torch.distributed as dist
    from datetime import timedelta
    from support.patience import WAIT
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.deepseek_v3 import model_registry, sharding

    parallel_dims.device_type = "cpu"  # TorchTitan takes cuda where there is no accelerator
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    size, rank = dist.get_world_size(), dist.get_rank()

    def train(x, ep, **arguments):
        '''(result, gradient of x, gradients of parameters, the dispatcher) of a layer whose experts ep ranks share.'''
        config = model_registry("debugmodel").model
        layers = [layer.moe for layer in config.layers if layer.moe is not None]
        layout = sharding._GROUPED_EXPERTS_PARAM_LAYOUT
        set_moe_sharding_config(layers[0], enable_ep=ep > 1, enable_sp=False, expert_param_layout=layout)
        if ep > 1:
            name = "mkernel.integrations.torchtitan_moe.token_dispatcher"
            replaced = apply_overrides(OverrideConfig(imports=[(name, arguments)]), config)
            assert len(replaced) == len(layers), replaced
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=ep, world_size=size, spmd_backend="spmd_types"
        )
        dims.build_mesh()
        torch.manual_seed(1)
        layer = layers[0].build()
        layer.init_states()
        layer.parallelize(dims)
        x = x.clone().requires_grad_()
        with get_spmd_context(parallel_dims=dims)():
            y = layer(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
        gradients = {name: getattr(p.grad, "to_local", lambda p=p: p.grad)() for name, p in layer.named_parameters()}
        return y.detach(), x.grad, gradients, type(layer.routed_experts.token_dispatcher).__module__

    def close(one, other):
        '''Experts compute in bf16.'''
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))

    x = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(2 + rank))
    y, dx, gradients, module = train(x, 1)
    assert module.startswith("torchtitan.")
    for arguments in ({}, dict(capacity_factor=2.0)):
        found = train(x, size, **arguments)
        assert found[3] == "mkernel.integrations.torchtitan_moe"
        close(found[0], y)
        close(found[1], dx)
        assert found[2].keys() == gradients.keys()
        for name, gradient in found[2].items():
            expected = gradients[name]
            if "inner_experts" in name:  # of this rank's experts, over all ranks' tokens
                expected = expected.clone()
                dist.all_reduce(expected)
                expected = expected.chunk(size)[rank]
            close(gradient, expected)
    print("right on rank", rank)
"""


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_a_layer_of_torchtitan():
    """Beside the same layer with all experts on each rank, which TorchTitan's own dispatcher serves."""
    for rank, (output, code) in enumerate(run_ranks(A_LAYER_OF_TORCHTITAN, 2, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
