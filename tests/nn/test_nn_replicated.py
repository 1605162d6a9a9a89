"""sum_gradients: what is replicated, and copies of it."""

import copy
import io

import pytest
import torch
from support.nn_reference import values

import mkernel as mk
from mkernel import nn


def spawn(function):
    return mk.spawn(function, nodes=1, gpus_per_node=2, device="cpu")


def assert_summed(module, size, times=1):
    """Its bias has a gradient of 3 from each rank."""
    for parameter in module.parameters():
        parameter.grad = None
    module(values(3, 8, seed=1)).sum().backward()
    assert module.bias.grad.tolist() == [3.0 * times * size] * 8


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(module):
    module = module.to("meta").to_empty(device="cpu")
    module.reset_parameters()
    return module


def assigned(module):
    module.load_state_dict(torch.nn.LayerNorm(8).state_dict(), assign=True)
    return module


@pytest.mark.parametrize("change", [copy.deepcopy, saved_and_loaded, emptied, assigned])
def test_parameters_that_are_replaced(change):
    """A hook of a tensor stays with it: each of these makes other tensors."""

    def on_rank(group):
        norm = torch.nn.LayerNorm(8)
        nn.sum_gradients(norm)
        assert_summed(norm, group.size)
        changed = change(norm)
        assert_summed(changed, group.size)
        assert_summed(changed, group.size)  # the hook is not added again

    spawn(on_rank)


def test_parameters_of_modules_that_are_not_called():
    """MultiheadAttention uses the parameters of out_proj, and never calls it."""

    def on_rank(group):
        attention = torch.nn.MultiheadAttention(8, 2)
        nn.sum_gradients(attention)
        grads = []
        for module in (attention, copy.deepcopy(attention)):
            x = values(3, 1, 8, seed=1)
            module(x, x, x)[0].sum().backward()
            grads.append({name: parameter.grad for name, parameter in module.named_parameters()})
        assert grads[0]["out_proj.bias"].tolist() == [3.0 * group.size] * 8
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])

    spawn(on_rank)


def test_a_backward_pass_under_autocast():
    """Gradients of parameters in fp32 stay so."""

    def on_rank(group):
        norm, moe = torch.nn.LayerNorm(8), nn.ExpertParallelMoE(8, 8, 2, 1, shared_experts=1)
        nn.sum_gradients(norm)
        grads = []
        for enabled in (False, True):
            norm.zero_grad()
            loss = norm(values(3, 8, seed=group.rank)).square().sum()
            loss = loss + nn.replicated.with_summed_gradient(moe.gate.weight, group).square().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                grads.append(torch.autograd.grad(loss, [*norm.parameters(), moe.gate.weight]))
        assert all(torch.equal(*pair) for pair in zip(*grads))

    spawn(on_rank)


def test_a_gradient_is_summed_once():
    """Also of a parameter that two modules share, if sum_gradients is called for both; over other ranks once more."""

    def on_rank(group):
        norm = torch.nn.LayerNorm(8)
        both = torch.nn.ModuleList([norm, torch.nn.LayerNorm(8)])
        both[1].bias = norm.bias
        nn.sum_gradients(norm)
        nn.sum_gradients(both)
        assert_summed(norm, group.size)
        nn.sum_gradients(norm, group=group.subset([0, 1]))
        assert_summed(norm, group.size, times=group.size)

    spawn(on_rank)


def test_handles():
    def on_rank(group):
        norm = torch.nn.LayerNorm(8)
        norm.weight.requires_grad_(False)
        (handle,) = nn.sum_gradients(norm)
        handle.remove()
        for module in (norm, copy.deepcopy(norm)):
            assert_summed(module, 1)
        nn.sum_gradients(norm)
        assert_summed(norm, group.size)

    spawn(on_rank)


def test_a_graph_says_that_a_parameter_was_replaced():
    norm = torch.nn.LayerNorm(8)
    nn.sum_gradients(norm, group=mk.init())
    copied = copy.deepcopy(norm)
    with pytest.raises(Exception, match=r"call the module once before torch\.compile"):
        torch.compile(copied, backend="eager", fullgraph=True)(values(3, 8, seed=1))
    torch._dynamo.reset()
    copied(values(3, 8, seed=1))
    torch.compile(copied, backend="eager", fullgraph=True)(values(3, 8, seed=1)).sum().backward()
