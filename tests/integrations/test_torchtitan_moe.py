"""TorchTitan's token dispatcher with mkernel's operators in it, around experts as TorchTitan has them: on simulated
ranks, beside one rank with all experts. TorchTitan itself is a stand-in with the same interface."""

import importlib

import pytest
import torch
from support import torchtitan_stand_in as stand_in
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
